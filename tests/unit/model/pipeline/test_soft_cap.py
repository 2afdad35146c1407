"""What a soft cap adds to a loop."""

from __future__ import annotations

import pytest

from tilecast.model.kernel.variants.fa3 import Fa3Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.pipeline import fa3
from tilecast.model.pipeline.soft_cap import DIVISION, TANGENT, with_cap
from tilecast.model.sm.simulate import steady_state

H200 = load_machine("h200-sxm")
WORK = Workload(heads_q=32, heads_kv=8, seqlen_q=4096, head_dim_qk=64, mask="causal")
LOOP = fa3.build(WORK, Fa3Variant(warpgroups=3, tile_n=64, rescale="anchored"), H200)


@pytest.mark.parametrize("cap", [TANGENT, DIVISION])
def test_a_cap_takes_special_functions_of_every_score(cap) -> None:
    plain, bent = LOOP.demand(), with_cap(LOOP, H200, cap).demand()
    scores = 3 * 64 * 64
    assert bent["mufu"] - plain["mufu"] == pytest.approx(cap.mufu * scores / H200["mufu.ex2_per_clk"])
    assert bent["fma"] - plain["fma"] == pytest.approx(cap.fma * scores / H200["fma.lanes"])
    assert {unit for unit in plain if plain[unit] != bent[unit]} == {"mufu", "fma", "issue", "regs"}


def test_a_loop_that_special_functions_bind_takes_as_long_as_they() -> None:
    plain, tangent, division = (
        steady_state(x).ii_cycles for x in (LOOP, with_cap(LOOP, H200, TANGENT), with_cap(LOOP, H200, DIVISION))
    )
    assert plain < with_cap(LOOP, H200, TANGENT).demand()["mufu"] < tangent < division
