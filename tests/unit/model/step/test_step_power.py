"""The clock of a launch under a power limit: its power meets the limit at the length that it has at that clock."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tilecast.model.chip.evaluate import PredictError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.step.batch import Batch, parse_requests
from tilecast.model.step.decoder import decoders
from tilecast.model.step.forecast import forecast_step

LLAMA = Workload(heads_q=32, heads_kv=8, seqlen_q=1, head_dim_qk=128, mask="causal")
DECODES = Batch(parse_requests("32x8192"), LLAMA, page=64)


@pytest.mark.parametrize(
    ("name", "limits"), [("h200", (200, 300, 400, 500, 600, 700)), ("b200", (450, 600, 800, 1000))]
)
def test_a_decode_under_a_lower_limit_takes_as_much_longer_as_its_power_allows(
    name: str, limits: tuple[float, ...]
) -> None:
    boards = [load_machine(name).at_power(watts) for watts in limits]
    found = [forecast_step(DECODES, board, next_request=((1, 8192),)) for board in boards]
    clocks = [answer.run.launches[0].clock for answer in found]
    for less, more in pairwise(found):
        assert less.seconds >= more.seconds
    for clock, watts in zip(clocks, limits, strict=True):
        assert clock.power_w <= watts * 1.0001
        # Half the power is not a tenth of the clock: at a low clock the launch draws little of the memory.
        assert clock.bound == "boost" or clock.power_w == pytest.approx(watts, rel=1e-3)
    base = load_machine(name)["power.idle_w"]
    for answer, watts in zip(found, limits, strict=True):
        # Energy above idle at a lower clock is less, never more.
        assert answer.seconds * (watts - base) < found[-1].seconds * (limits[-1] - base) * 1.1
        assert answer.next_request is not None and answer.next_request.attention_seconds > 0


def test_a_limit_below_what_the_lowest_clock_draws_is_refused() -> None:
    with pytest.raises(PredictError, match="even at 100 MHz"):
        forecast_step(DECODES, load_machine("h200").at_power(150))


def test_caches_that_do_not_fit_are_told() -> None:
    heads = Workload(heads_q=64, heads_kv=8, seqlen_q=1, head_dim_qk=128, mask="causal")
    answer = forecast_step(Batch(parse_requests("512x8192"), heads, page=64), "a100", decoder=decoders()["llama3-70b"])
    assert "do not fit this memory, they fill 19 such boards" in answer.text()
    fits = forecast_step(DECODES, "h200", decoder=decoders()["llama3-8b"])
    assert "do not fit" not in fits.text()
