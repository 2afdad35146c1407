"""Parts of query heads: what the rule must never do, and that what is forecast is what generated files launch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast.base.module_file import module_of
from tilecast.codegen.shipping.ship import KERNELS
from tilecast.model.backward import HOPPER_BACKWARD, TRITON_BACKWARD, build_backward
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.pipeline.backward.kernels import LoopKernel
from tilecast.model.pipeline.backward.parts import parts_of, query_head_parts
from tilecast.model.training.launch import tiles_of

H200 = load_machine("h200-sxm")
LENGTHS = st.integers(1, 40_000)


@given(
    st.integers(1, 72),
    st.integers(1, 40),
    LENGTHS,
    LENGTHS,
    st.sampled_from([(-1, -1), (-1, 0), (64, 0), (500, 20), (0, -1)]),
)
def test_every_part_has_query_heads_and_costs_little(group, heads_kv, seqlen_q, seqlen_k, window) -> None:
    parts = query_head_parts(group, heads_kv, seqlen_q, seqlen_k, *window, 128, 96, 132)
    heads = -(-group // parts)
    assert 1 <= parts <= group and (parts - 1) * heads < group  # the last one has some
    # No block sees more queries than there are: a hundredth of that many programs' loops is more than parts may cost.
    assert (parts - 1) * 96 <= 0.06 * group * seqlen_q
    if heads_kv * -(-seqlen_k // 128) >= 2 * 132 * group:
        assert parts == 1


@pytest.mark.parametrize(
    ("problem", "parts"),
    [
        ((8, 2, 4096, 4096, -1, 0), 4),  # 64 programs of 512 steps at most for 132 SMs
        ((2, 8, 4096, 4096, -1, 0), 1),  # 256 programs
        ((4, 8, 2048, 2048, -1, 0), 2),
        ((7, 2, 1024, 1024, -1, 0), 3),  # of three heads, the last of one
        ((6, 8, 1024, 1024, -1, 0), 2),
        ((16, 8, 2778, 77, -1, -1), 16),
        ((8, 2, 1, 8192, -1, 0), 1),  # one query: nothing to divide
        ((8, 4, 4096, 4096, 512, 0), 1),  # 128 programs alike
        ((8, 2, 4096, 4096, 512, 0), 2),
        ((1, 2, 4096, 4096, -1, 0), 1),
    ],
)
def test_parts_of_known_problems(problem, parts: int) -> None:
    assert query_head_parts(*problem, 128, 96, 132) == parts


@pytest.mark.parametrize(
    "module", ["hopper_bwd_d128_causal", "hopper_bwd_d256_full", "triton_bwd_d64_window", "triton_bwd_d96_full"]
)
def test_generated_files_ask_the_same_rule(module: str) -> None:
    pytest.importorskip("triton")
    found = module_of(KERNELS / "generated" / f"{module}.py").query_head_parts
    for group in (1, 4, 7, 48):
        for lengths in ((33, 4000), (1000, 1000), (9000, 200)):
            for window in ((-1, -1), (-1, 0), (128, 0)):
                asked = (group, 2, *lengths, *window, 64, 80, 132)
                assert found(*asked) == query_head_parts(*asked)


@pytest.mark.parametrize("family", [HOPPER_BACKWARD, TRITON_BACKWARD])
def test_programs_of_parts_are_more_and_shorter_and_their_sums_are_a_launch(family) -> None:
    whole, shared = Workload(1, 8, 8, 1024, mask="causal"), Workload(1, 8, 1, 1024, mask="causal")
    assert parts_of(whole, 128, 64, H200) == 1
    for work in (whole, shared):
        made = build_backward(work, family.chosen(work, H200), H200)
        keys = next(k for k in made.launches if isinstance(k, LoopKernel) and k.owns == "keys")
        tiles, heads = tiles_of(keys, work)
        assert heads == work.batch * work.heads_kv * keys.parts
        steps = tiles.total_iterations * heads
        if work is whole:
            assert keys.parts == 1 and "sum of parts" not in {k.name for k in made.launches}
            alone = steps
        else:
            assert keys.parts > 1 and made.launches[-1].name == "sum of parts"
            assert steps == pytest.approx(alone, rel=0.05)
