"""Copies whose lines leave L2 first: the policy is in each copy of a kernel that ships, and nothing else of it changes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from tilecast.codegen.compiler.compile import compile_kernels
from tilecast.kernels.assembling import assembled_again
from tilecast.kernels.eviction import with_evict_first

GENERATED = Path(__file__).parents[3] / "kernels" / "generated"
PTX = """.version 8.7
.target sm_90a
.visible .entry attention(
	.param .u64 attention_param_0
)
.maxnreg 128
{
	.reg .b32 	%r<2>;
	@%p37 cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%r258], [%rd2, {%r259, %r259}], [%r257];
	ret;
}
"""


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Triton's cache in a folder of this test."""
    from triton import knobs

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["hopper_serve_d128_runs", "hopper_serve_d64_runs_e4m3"])
def test_each_copy_of_a_kernel_gets_the_policy(name: str, tmp_path: Path) -> None:
    source = (GENERATED / f"{name}.py").read_text()
    plain = compile_kernels(GENERATED / f"{name}.py", "sm_90a")[0].ptx
    copies = plain.count("cp.async.bulk.tensor")
    made = with_evict_first(plain)
    assert copies and made.count(".L2::cache_hint") == copies == made.count(", %evict_first;")
    assert made.count("createpolicy") == 1 and made.index("createpolicy") < made.index(".L2::cache_hint")
    (tmp_path / "made.ptx").write_text(made)
    fusion = '"enable_fp_fusion": True'
    assert fusion in source
    file = tmp_path / f"{name}.py"
    file.write_text(source.replace(fusion, f'{fusion}, "ir_override": "{tmp_path / "made.ptx"}"'))
    again = compile_kernels(file, "sm_90a")[0]  # which assembles it
    assert again.ptx == made and again.cubin != compile_kernels(GENERATED / f"{name}.py", "sm_90a")[0].cubin


def test_only_copies_change() -> None:
    before, after = PTX.splitlines(), with_evict_first(PTX).splitlines()
    added = [line for line in after if line not in before]
    assert [line.split()[0] for line in added] == [".reg", "createpolicy.fractional.L2::evict_first.b64", "@%p37"]
    assert [line for line in before if line not in after] == [before[8]]


@pytest.mark.parametrize(
    "ptx", [PTX.replace("cp.async.bulk.tensor", "cp.async.bulk.prefetch"), PTX + ".func other(\n)\n{\n\tret;\n}\n", ""]
)
def test_code_without_copies_or_with_functions_stays(ptx: str) -> None:
    assert with_evict_first(ptx) == ptx


def test_the_kernel_is_compiled_again_from_what_the_cache_keeps(cache: Path) -> None:
    asked = []

    def compile_with(ir_override: str) -> str:
        asked.append(ir_override)
        return "compiled again"

    compiled = SimpleNamespace(asm={"ptx": PTX})
    assert [assembled_again(compiled, with_evict_first, compile_with) for _ in range(2)] == ["compiled again"] * 2
    first, second = asked
    assert first == second, "the cache's key has the path: it must stay"
    assert first.endswith(".ptx") and Path(first).read_text() == with_evict_first(PTX)


@pytest.mark.parametrize("kept", [{}, {"ptx": PTX.replace(".tensor", "")}])
def test_a_kernel_of_which_nothing_can_be_made_stays(kept: dict[str, str], cache: Path) -> None:
    compiled = SimpleNamespace(asm=kept)
    assert assembled_again(compiled, with_evict_first, pytest.fail) is compiled


def test_a_release_without_the_option_launches_what_it_has(cache: Path) -> None:
    def compile_with(**_: str) -> None:
        raise KeyError("Keyword argument ir_override was specified but unrecognised")

    compiled = SimpleNamespace(asm={"ptx": PTX})
    assert assembled_again(compiled, with_evict_first, compile_with) is compiled


def test_ptx_of_a_later_release_than_the_assembler_s_stays(cache: Path) -> None:
    """A process in which torch.compile ran has another ptxas; what it wrote in Triton's cache is found by the next one, which has not."""
    from triton.runtime.errors import PTXASError

    compiled, said = SimpleNamespace(asm={"ptx": PTX}), []

    def compile_with(**_: str) -> None:
        raise PTXASError(said[-1])

    said.append("ptxas changed.ptx, line 5; fatal   : Unsupported .version 9.0; current version is '8.7'")
    assert assembled_again(compiled, with_evict_first, compile_with) is compiled
    said.append("ptxas changed.ptx, line 9; error   : Unknown modifier '.evict'")
    with pytest.raises(PTXASError, match="Unknown modifier"):
        assembled_again(compiled, with_evict_first, compile_with)


def test_a_launch_copies_once_up_to_what_its_module_says(torch, monkeypatch) -> None:
    from tilecast.kernels.scratch import Counters
    from tilecast.kernels.serving import launching

    asked = []
    monkeypatch.setattr(launching, "compiled_starter", lambda *given: asked.append(given[-1]))
    module = SimpleNamespace(
        ONCE_BYTES=2 * 64 * (16 + 8) * 2, scratch=lambda *_: (1, 1), plan=lambda *_: ((1, 1, 1), (), ()), attention=None, OPTIONS={}
    )  # fmt: skip
    device = torch.device("cpu")
    launcher = launching.Launcher(module, (1, 16), device, Counters(device))
    q, k, v = (
        torch.zeros(2, n, heads, d, dtype=torch.bfloat16) for n, heads, d in ((1, 1, 16), (64, 1, 16), (64, 1, 8))
    )
    tensors = (q, k, v, q, None, *[None] * 8)
    for keys in (64, 65):
        launcher._plan(tensors, 0.0, 1, keys, (-1, -1), 0)
    del module.ONCE_BYTES
    launching.Launcher(module, (1, 16), device, Counters(device))._plan(tensors, 0.0, 1, 1, (-1, -1), 0)
    assert asked == [with_evict_first, None, None]
