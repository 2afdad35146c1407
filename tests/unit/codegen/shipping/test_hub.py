"""The folder for the Hugging Face Hub stands alone: loaded as the `kernels` package does, in a process that has no tilecast.

In Triton's interpreter its kernels also compute.  Where `kernels` is installed it loads the folder itself, offline; with transformers beside
it, continuous batching finds flash-attn's functions there.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilecast import __version__
from tilecast.codegen.shipping.hub import VARIANT, hub_files, write_hub

pytest.importorskip("torch")
pytest.importorskip("triton")

#: As kernels.importer does, without it.
LOAD = """
import importlib.util, json, sys
from pathlib import Path
build = Path(sys.argv[1]) / "build" / "torch-universal"
name = json.loads((build / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, build / "__init__.py")
made = importlib.util.module_from_spec(spec)
sys.modules[name] = made
spec.loader.exec_module(made)
"""
ATTEND = """
import torch
operator = sys.modules[f"{made.__name__}.serving.operator"]
operator.capability_of = lambda kind, device: (8, 0)
draw = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(1, n, heads, 64, generator=draw).half() for n, heads in ((2, 4), (20, 2), (20, 2)))
pools = [torch.full((3, 16, 2, 64), float("nan")).half() for _ in range(2)]
for pool, x in zip(pools, (k, v)):
    pool[2, :16], pool[1, :2] = x[0, :16], x[0, 16:18]
out = made.flash_attn_with_kvcache(
    q, *pools, k[:, 18:], v[:, 18:], cache_seqlens=torch.tensor([18], dtype=torch.int32), block_table=torch.tensor([[2, 1]], dtype=torch.int32), causal=True
)
wide = [x[0].double().repeat_interleave(2, 1) for x in (k, v)]
scores = torch.einsum("qhd,khd->hqk", q[0].double(), wide[0]) / 8
scores[:, 0, 19] = -float("inf")
want = torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide[1])
assert (out[0].double() - want).abs().max() < 2e-3
assert hasattr(getattr(torch.ops, made.__name__), "attention_append") and not hasattr(torch.ops.tilecast, "attention_append")
assert not [name for name in sys.modules if name.partition(".")[0] == "tilecast"], "stands alone"
print("attended")
"""
GENERATE = """
import sys
import torch, transformers
from transformers.utils.import_utils import is_kernels_available
if not is_kernels_available():
    print("another version of kernels")
    raise SystemExit
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=97,
    head_dim=16, pad_token_id=0, eos_token_id=None, bos_token_id=None)).eval()
model.set_attn_implementation("tilecast/flash-attn2")
calls = next(sys.modules[name] for name in sys.modules if name.startswith("_tilecast_") and name.endswith(".serving.calls"))
from support import paged_reference
calls.serve, calls.started = paged_reference.serve, lambda arguments: None
prompts = [list(range(3, 8)), list(range(3, 26))]
names = transformers.ContinuousBatchingConfig.__dataclass_fields__
found = model.generate_batch(
    prompts, generation_config=transformers.GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0),
    continuous_batching_config=transformers.ContinuousBatchingConfig(
        **{"page_size" if "page_size" in names else "block_size": 16}, num_blocks=64, max_batch_tokens=64, use_cuda_graph=False))
answers = {tuple(a.prompt_ids): a.generated_tokens for a in found.values()}
model.set_attn_implementation("eager")
for prompt in prompts:
    want = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)[0, len(prompt):].tolist()
    assert answers[tuple(prompt)] == want
print("generated")
"""


def installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("hub")
    assert write_hub(made, __version__) == len(hub_files(__version__))
    return made


def run(script: str, folder: Path, path: str = "", **environment: str) -> str:
    """What a script prints, in a process of its own, from a folder where nothing of ours can be imported by chance."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(folder)], cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_folder_attends_with_nothing_of_ours_installed(folder: Path) -> None:
    assert "attended" in run(LOAD + ATTEND, folder, TRITON_INTERPRET="1")


@pytest.mark.skipif(not installed("kernels"), reason="the package kernels is not installed")
def test_kernels_loads_the_folder(folder: Path) -> None:
    script = "import sys\nfrom pathlib import Path\nfrom kernels import get_local_kernel\nmade = get_local_kernel(Path(sys.argv[1]))\n"
    assert "attended" in run(script + ATTEND, folder, TRITON_INTERPRET="1")


@pytest.mark.skipif(not (installed("kernels") and installed("transformers")), reason="transformers or kernels is not installed")  # fmt: skip
def test_continuous_batching_takes_the_folder(folder: Path) -> None:
    support = str(Path(__file__).parents[3])
    said = run(GENERATE, folder, support, LOCAL_KERNELS=f"tilecast/flash-attn2={folder}")
    if "another version" in said:
        pytest.skip("transformers asks for another version of kernels")
    assert "generated" in said


def test_the_same_sources_give_the_same_name_and_other_sources_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # fmt: skip
    from tilecast.codegen.shipping import hub

    def name() -> str:
        files = hub_files(__version__)
        found = json.loads(files[Path("build") / VARIANT / "metadata.json"])["id"]
        assert f'Library("{found}"' in files[Path("build") / VARIANT / "registration.py"]
        return str(found)

    first = name()
    assert name() == first
    for path in sorted(hub.KERNELS.rglob("*")):
        if path.suffix in (".py", ".json", ".c"):
            copy = tmp_path / path.relative_to(hub.KERNELS)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(path.read_text(encoding="utf-8") + ("\n# changed\n" if path.name == "errors.py" else ""))
    monkeypatch.setattr(hub, "KERNELS", tmp_path)
    assert name() != first


def test_a_folder_that_is_a_file_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tilecast.cli import main

    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        main(["ship", "--hub", str(tmp_path / "file")])
    assert stop.value.code == 2 and "--hub: expected a folder to write to, got" in capsys.readouterr().err
