"""A barrier that nobody uses is refused: its memory becomes somebody else's, and stays a barrier to the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from tilecast.codegen.compiler.compile import CompileError, compile_kernels, load_source
from tilecast.codegen.compiler.sass import resources

GENERATED = Path(__file__).parents[4] / "kernels" / "generated"


def test_a_barrier_that_is_only_set_up_is_refused(tmp_path: Path) -> None:
    source = (GENERATED / "gemm_hopper_short.py").read_text(encoding="utf-8")
    used = "    ring = Ring("
    assert source.count(used) == 1
    file = tmp_path / "idle.py"
    file.write_text(source.replace(used, f"    barriers(3, 1)\n{used}"), encoding="utf-8")
    with pytest.raises(
        CompileError, match="expected every mbarrier to be waited for or arrived at, got 1 that are only set up"
    ):
        compile_kernels(file, "sm_90a")


def test_latent_attention_in_batches_that_fill_the_device_has_none() -> None:
    """Programs take in splits one after the other there, and nothing waits to be merged."""
    file = GENERATED / "hopper_mla_d576_512.py"
    shape = {**load_source(file).TILECAST["workload"], "batch": 132, "heads_q": 16, "seqlen_k": 4096}
    (kernel,) = compile_kernels(file, "sm_90a", shape=shape)
    assert "wgmma" in kernel.ptx


@pytest.mark.parametrize(("c", "d", "beta"), [((0, 1), (1024, 1), 1.0), ((0, 0), (1024, 1), 1.0), ((1, 1024), (1025, 1), 1.0), ((1024, 1), (1025, 1), 0.0)])  # fmt: skip
def test_products_whose_c_or_d_no_copy_engine_moves_have_none(
    c: tuple[int, int], d: tuple[int, int], beta: float
) -> None:
    """Neither where C is one row or number, nor where it is by columns and D at odd steps: no role waits for slots there."""
    file = GENERATED / "gemm_hopper_small.py"
    shape = {
        **load_source(file).TILECAST["workload"],
        "m": 1024,
        "n": 1024,
        "c_strides": c,
        "d_strides": d,
        "beta": beta,
    }
    (kernel,) = compile_kernels(file, "sm_90a", shape=shape)
    assert "wgmma" in kernel.ptx


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_103a"])
def test_copies_for_products_compile_and_write_whole_vectors(target: str) -> None:
    """No list has the kernel, which is one for all."""
    (kernel,) = compile_kernels(GENERATED / "gemm_copy.py", target)
    assert "st.global.v4" in kernel.ptx and not resources(kernel.cubin).stack_bytes
