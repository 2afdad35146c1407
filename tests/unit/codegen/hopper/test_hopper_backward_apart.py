"""The `hopper_bwd_apart` family: what is legal, what is written, and what the compiler makes of it."""

from __future__ import annotations

import pytest
from support.whole import whole

from tilecast.codegen.backward import generate_backward
from tilecast.model.backward import HOPPER_BACKWARD_APART, find_backward, parse_backward, writable
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.variants import fa3_backward_apart
from tilecast.model.kernel.variants.fa3_backward_apart import Fa3BackwardApartVariant
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

DIMS = [(192, 128), (192, 192), (256, 256)]


def work(dim: int, mask: str = "none", dim_v: int = 0, **others: object) -> Workload:
    window = (100, 20) if mask == "window" else None
    return Workload(head_dim_qk=dim, head_dim_v=dim_v or dim, mask=mask, window=window, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_chosen_is_legal_in_the_space_and_survives_as_text(dims: tuple[int, int], mask: str) -> None:
    chip, problem = load_machine("h200-sxm"), work(dims[0], mask, dims[1])
    chosen = HOPPER_BACKWARD_APART.chosen(problem, chip)
    assert isinstance(chosen, Fa3BackwardApartVariant) and writable(chosen, problem, chip).legal
    space = list(HOPPER_BACKWARD_APART.space(problem, chip))
    assert chosen in space and len(space) == len(set(space))
    assert parse_backward(variant_text(chosen), HOPPER_BACKWARD_APART.variant()) == chosen
    assert find_backward("hopper_bwd_apart") is find_backward("fa3_bwd_apart") is HOPPER_BACKWARD_APART


@pytest.mark.parametrize(
    ("knobs", "problem", "machine", "text"),
    [
        (
            "",
            work(128),
            "h200-sxm",
            "is written for head_dim 192/128, 192, 256, got 128/128: use family fa3_bwd or fa2_bwd",
        ),
        ("", work(512), "h200-sxm", r"shared memory needs \d+ bytes but the limit is .*: use family fa2_bwd"),
        ("", work(256, dim_v=128), "h200-sxm", "is written for head_dim 192/128, 192, 256, got 256/128: use"),
        ("", work(256, dtype="fp8"), "h200-sxm", "is written for bf16 and fp16, got dtype 'fp8'"),
        ("", work(256), "a100", "multiplies with wgmma, which a100 has not: use family fa2_bwd"),
        ("tile_m=64", work(256), "h200-sxm", "family fa3_bwd_apart has no knob 'tile_m'"),
    ],
)
def test_what_cannot_be_written_names_reason_and_lever(knobs: str, problem: Workload, machine: str, text: str) -> None:
    with pytest.raises(VariantError, match=text):
        generate_backward(problem, load_machine(machine), parse_backward(knobs, Fa3BackwardApartVariant()))


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("mask", [pytest.param("none", marks=whole), pytest.param("causal", marks=whole), "window"])
def test_products_run_several_at_a_time_and_tiles_fit(mask: str, dims: tuple[int, int], tmp_path) -> None:
    pytest.importorskip("triton")
    from tilecast.codegen.compiler.compile import compile_kernels
    from tilecast.codegen.compiler.sass import disassemble

    problem = work(dims[0], mask, dims[1])
    file = tmp_path / "backward.py"
    file.write_text(
        generate_backward(problem, load_machine("h200-sxm"), Fa3BackwardApartVariant()).source, encoding="utf-8"
    )
    kernels = {kernel.name: kernel for kernel in compile_kernels(file, "sm_90a")}
    assert kernels.keys() == {"row_terms", "key_gradients", "query_gradients"}
    products = kernels["key_gradients"], kernels["query_gradients"]
    tiles = fa3_backward_apart.shared_bytes(Fa3BackwardApartVariant(), problem)
    assert 0 <= max(kernel.shared_bytes for kernel in products) - tiles <= 512
    for kernel in products:
        words = [code.opcode + code.modifiers for code in disassemble(kernel.cubin)]
        waits = sum(word.startswith("WARPGROUP") and "DEPBAR" in word for word in words)
        # Where registers do not do for what runs, the compiler has each wait for the one before.
        assert 0 < waits < sum(word.startswith("HGMMA") for word in words) / 4
