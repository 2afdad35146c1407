"""The emulator against the GPU it emulates: the same file, the same inputs, agreement within rounding."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("greenlet")
pytest.importorskip("ml_dtypes")

import numpy as np  # noqa: E402

import tilecast.kernels.generated as generated  # noqa: E402
from tilecast.emulator.run import emulate  # noqa: E402
from tilecast.model.kernel.header import header_window  # noqa: E402

FAMILIES = {9: "hopper_ws", 10: "blackwell_ws"}
KERNELS = sorted(path.stem for path in Path(str(generated.__file__)).parent.glob("*_ws_*.py"))
#: Steps of the output's type between the two: P is rounded to it from exponentials that differ in the last bits.
STEPS = 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", KERNELS)
def test_emulator_and_gpu_agree(name: str, dtype: torch.dtype) -> None:
    family = FAMILIES.get(torch.cuda.get_device_capability()[0])
    if family is None or not name.startswith(family):
        pytest.skip("written for another GPU")
    kernel = importlib.import_module(f"tilecast.kernels.generated.{name}")
    shape = kernel.TILECAST["workload"]
    left, right = (100, 20) if shape["mask"] == "window" else header_window(kernel.TILECAST)
    generator = torch.Generator().manual_seed(len(name))
    q = torch.randn(1, 2, 300, shape["head_dim_qk"], generator=generator).to(dtype)
    k = torch.randn(1, 1, 450, shape["head_dim_qk"], generator=generator).to(dtype)
    v = torch.randn(1, 1, 450, shape["head_dim_v"], generator=generator).to(dtype)
    scale = shape["head_dim_qk"] ** -0.5
    out = torch.empty(1, 2, 300, shape["head_dim_v"], dtype=dtype, device="cuda")
    lse = torch.empty(1, 2, 300, dtype=torch.float32, device="cuda")
    kernel.launch(q.cuda(), k.cuda(), v.cuda(), out, lse, scale, left, right)
    here = emulate(name, q, k, v, scale=scale, window=(left, right))
    measured = out.float().cpu().numpy()
    step = float(torch.finfo(dtype).eps) * np.abs(measured).max()
    np.testing.assert_allclose(here.out.astype(np.float32), measured, rtol=0, atol=STEPS * step)
    np.testing.assert_allclose(here.lse, lse.cpu().numpy(), rtol=0, atol=1e-4)
