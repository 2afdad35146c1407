"""Forecasts of a variant from its machine code: the time of the simulation, taken apart as any forecast is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.model.compiled.test_forecast import H200, LONGEST, PERSISTENT, THREE, TRITON, pick, shape
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.compiled.code import KernelCode
from tilecast.model.compiled.costs import mma_cycles
from tilecast.model.compiled.energy import settled_clock
from tilecast.model.compiled.evaluate import CompiledVariant
from tilecast.model.compiled.forecast import forecast
from tilecast.model.compiled.loops.choose import best_kept
from tilecast.model.compiled.loops.shelf import kept_loop
from tilecast.model.compiled.memory import shared_by
from tilecast.model.compiled.roles.code import KernelRoles
from tilecast.model.compiled.roles.costs import role_costs
from tilecast.model.compiled.roles.run import run_roles
from tilecast.model.families import parse_variant
from tilecast.model.forecast.answer import BEFORE, COMPILED
from tilecast.model.forecast.predict import Compiler, Prediction, predict
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, load_machine
from tilecast.model.whatif.what_if import what_if
from tilecast.validation.published.loops import read_loops

KERNELS = {"persistent": PERSISTENT, "longest-first": LONGEST, "triton": TRITON}


def kernel(name: str) -> KernelCode:
    return pick(**KERNELS[name])  # type: ignore[arg-type]


def compiler(code: KernelCode | None = None, roles: KernelRoles | None = None, target: str = "sm_90a") -> Compiler:
    made = CompiledVariant(target, "Triton 0", 168, 0, code, roles)
    return lambda workload, machine, variant: made


def from_code(code: KernelCode, work: Workload, clock: str | float = "sustained") -> Prediction:
    return predict(work, H200, parse_variant(code.variant), clock=clock, compiler=compiler(code))


@pytest.mark.parametrize("name", KERNELS)
def test_the_time_is_that_of_the_simulated_tiles(name: str) -> None:
    code = kernel(name)
    work = shape(code, 2048)
    found = from_code(code, work, 1500.0)
    assert found.time_ms == pytest.approx(forecast(code, work, H200, 1500.0).cycles / 1500.0 / 1e3)
    assert found.level == COMPILED and found.regime == "fixed"
    plain = predict(work, H200, parse_variant(code.variant), clock=1500.0, compiler=None)
    assert plain.level == BEFORE and plain.compiled is None
    assert found.compiled is not None
    assert found.compiled.before_ms == plain.time_ms and found.compiled.before_ii_cycles == plain.ii_cycles


@pytest.mark.parametrize("name", KERNELS)
def test_the_waterfall_adds_up_without_negative_steps(name: str) -> None:
    code = kernel(name)
    for seqlen in (300, 4096):
        found = from_code(code, shape(code, seqlen), 1600.0)
        total = found.time_ms * 1600.0 * 1e3
        assert sum(step.cycles for step in found.waterfall) == pytest.approx(total)
        assert min(step.cycles for step in found.waterfall) >= -1e-6 * total, (name, seqlen)
        assert any("this machine code" in step.cause for step in found.waterfall)


def test_clocks_are_those_that_the_executed_instructions_settle_at() -> None:
    code = kernel("persistent")
    work = shape(code, 4096)
    found = from_code(code, work)
    # Wherever it is looked for from.
    assert found.clock_mhz == pytest.approx(settled_clock(code, work, H200).mhz, abs=5.0)
    (short,) = found.other_regimes
    assert short[0] == "short" and short[3] == pytest.approx(settled_clock(code, work, H200, "short").mhz, abs=5.0)


def test_the_interval_is_as_wide_as_before_compilation() -> None:
    code = kernel("triton")
    work = shape(code, 1024)
    found, plain = from_code(code, work), predict(work, H200, parse_variant(code.variant), compiler=None)
    for end, before in zip(found.tflops_interval, plain.tflops_interval, strict=True):
        assert end / found.tflops == pytest.approx(before / plain.tflops)
    assert found.model_error.mean < plain.model_error.mean
    assert "from machine code" in found.model_error.where


@THREE
def test_text_json_and_html_say_the_level(kernel: dict[str, object]) -> None:
    code = pick(**kernel)  # type: ignore[arg-type]
    found = from_code(code, shape(code, 1024))
    assert "machine code for sm_90a by Triton 0, 168 registers, no spills" in found.text()
    assert "before compilation" in found.text()
    data = found.to_dict()
    assert data["level"] == COMPILED
    assert isinstance(data["compiled"], dict) and data["compiled"]["before"]["tflops"] > 0
    assert predict(shape(code, 1024), H200, compiler=None).to_dict()["compiled"] is None
    assert "machine code" in found._repr_html_()


def test_a_what_if_times_the_kept_code_under_the_changed_facts() -> None:
    code = kernel("persistent")
    work = shape(code, 2048)
    found = what_if(
        work, H200, {"chip.sm_count": 264.0}, variant=parse_variant(code.variant), clock=1500.0, compiler=compiler(code)
    )
    assert found.kept is not None and found.kept.level == found.before.level == COMPILED
    assert found.before.time_ms == from_code(code, work, 1500.0).time_ms
    assert 1.5 < found.before.time_ms / found.kept.time_ms <= 2.05


# --- kernels of which the steady loop is followed ---------------------------------------------------------------------


def stored_roles() -> KernelRoles:
    """FlashAttention-4's loop for head_dim 128 without a mask, which has a block of 128 keys of two tiles of 128 rows."""
    return read_loops()["sm_100a 128/128 none bf16"]


def test_a_steady_loop_takes_the_place_of_the_one_before_compilation() -> None:
    b200 = load_machine("b200")
    roles = stored_roles()
    work = Workload(4, 16, 16, 8192)
    variant = parse_variant("family=fa4")
    found = predict(work, b200, variant, clock=1600.0, compiler=compiler(roles=roles, target="sm_100a"))
    plain = predict(work, b200, variant, clock=1600.0)
    cycles = run_roles(roles, role_costs(b200)).cycles
    assert found.ii_cycles == pytest.approx(cycles)
    # Long tiles are their loops.
    assert found.time_ms / plain.time_ms == pytest.approx(cycles / plain.ii_cycles, rel=0.02)
    assert min(step.cycles for step in found.waterfall) >= -1e-6
    assert "the steady loop" in found.text()


def test_what_cannot_be_followed_is_refused() -> None:
    work, variant = Workload(), parse_variant("family=fa3")

    def ask(machine: Machine, made: Compiler, kernel: Variant = variant) -> None:
        predict(work, machine, kernel, compiler=made)

    with pytest.raises(PredictError, match="no simulator follows fa3 kernels for sm_90a: use --level fluid"):
        ask(H200, compiler())
    with pytest.raises(PredictError, match=r"machine code for sm_100a does not run on h200-sxm \(sm_90a\)"):
        ask(H200, compiler(target="sm_100a"))
    with pytest.raises(PredictError, match="cannot be followed: the profile is of head_dim 64/64"):
        ask(H200, compiler(replace(kernel("persistent"), head_dim_qk=64, head_dim_v=64)))
    with pytest.raises(
        PredictError, match="rtx-5090 is not known well enough to follow machine code: machine rtx-5090 has no fact"
    ):
        ask(load_machine("rtx-5090"), compiler(roles=stored_roles(), target="sm_120a"), parse_variant("family=fa2"))
    with pytest.raises(PredictError, match=r"multiplies \S+ FLOP an iteration, a block of keys takes"):
        ask(
            load_machine("b200"),
            compiler(roles=stored_roles(), target="sm_100a"),
            parse_variant("family=fa4,tile_n=96"),
        )


def test_products_of_8_bits_go_at_their_own_rate() -> None:
    assert mma_cycles(H200, 128, True, "fp8") == mma_cycles(H200, 128, True, "bf16") == 64.0
    twice = H200.with_facts({"tensor.fp8_flop_per_clk": 2 * H200["tensor.fp8_flop_per_clk"]})
    assert mma_cycles(twice, 256, True, "fp8") == 64.0
    assert mma_cycles(twice, 256, True, "bf16") == 128.0


@pytest.mark.parametrize(
    "work",
    [Workload(1, 16, 2, 1024, 64, 64, 64), Workload(1, 8, 8, 512, 512, mask="causal"), Workload(1, 4, 4, 2048, 2048)],
    ids=lambda work: work.label(),
)
def test_sms_that_have_nothing_to_do_leave_the_memory_to_the_others(work: Workload) -> None:
    """A launch of fewer tiles than SMs takes as long on a chip of more SMs, and no longer on one with as many as tiles."""
    h100 = load_machine("h100-sxm")
    kernel = best_kept(work, h100, "fa3", 1500.0).variant
    tiles = work.heads_q * work.batch * -(-work.seqlen_q // (64 * kernel.warpgroups))
    assert tiles < 132
    times = [
        predict(work, h100.with_facts({"chip.sm_count": sms}), kernel, clock=1500.0, interval=False, compiler=kept_loop)
        for sms in (tiles, 132, 264)
    ]
    assert times[1].time_ms == pytest.approx(times[2].time_ms, rel=1e-6)
    assert times[1].time_ms <= times[0].time_ms * (1 + 1e-6)


def test_no_sm_reads_faster_than_its_copy_engine() -> None:
    h100 = load_machine("h100-sxm")
    assert shared_by(h100, 132, 1500.0) is h100
    alone = shared_by(h100, 1, 1500.0)
    assert alone.bytes_per_clk(alone["hbm.tbps_achieved"], 1500.0) == pytest.approx(h100["tma.bytes_per_clk"])
    some = shared_by(h100, 66, 1500.0)
    assert some["hbm.tbps_achieved"] == pytest.approx(min(2 * h100["hbm.tbps_achieved"], alone["hbm.tbps_achieved"]))
