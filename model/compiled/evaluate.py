"""One launch of a variant as compiled: the forecast before compilation with what its machine code says in its place.

Two simulators follow machine code.  Kernels whose tiles are followed from beginning to end (`compiled.forecast`: Hopper)
have all their cycles from there.  Of others the steady loop is followed (`compiled.roles`: Blackwell); what their tiles
take around it, masked blocks included, stays what it was before compilation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

from tilecast.model.chip.evaluate import Evaluation, PredictError, evaluate, timed
from tilecast.model.chip.launch import ChipRun, play
from tilecast.model.chip.power import Clock, fixed, length
from tilecast.model.chip.tiles import head_tiles
from tilecast.model.compiled.code import CodeError, KernelCode
from tilecast.model.compiled.energy import activity, settled_clock
from tilecast.model.compiled.forecast import CompiledForecast, forecast
from tilecast.model.compiled.roles.code import KernelRoles
from tilecast.model.compiled.roles.costs import role_costs
from tilecast.model.compiled.roles.run import run_roles
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, MachineError


@dataclass(frozen=True, slots=True)
class CompiledVariant:
    """A variant as a compiler made it: ``code`` where its tiles can be followed, ``roles`` where its steady loop can."""

    target: str
    compiler: str
    registers: int
    stack_bytes: int
    code: KernelCode | None = None
    roles: KernelRoles | None = None
    #: The variant of the same loop whose code this is, where it is not the variant's own.
    stands_in: str = ""

    @property
    def followed(self) -> str:
        """What of it is simulated, in words."""
        if self.code is None:
            return "the steady loop; starts, ends and masks before compilation"
        return "whole tiles" + (f", by the code of {self.stands_in}" if self.stands_in else "")


def evaluate_compiled(
    made: CompiledVariant, workload: Workload, machine: Machine, variant: Variant, clock: str | float
) -> Evaluation:
    """Forecast of a legal ``variant`` from its machine code.

    Raises PredictError where the code cannot be followed: what, and what to do instead.
    """
    if machine.arch != made.target:
        raise PredictError(f"machine code for {made.target} does not run on {machine.name} ({machine.arch})")
    if made.code is None and made.roles is None:
        raise PredictError(f"no simulator follows {variant.family} kernels for {made.target}: use --level fluid")
    before = evaluate(workload, machine, variant, clock)
    with followed_on(machine):
        if made.code is not None:
            return _whole_tiles(made.code, workload, machine, clock, before)
        assert made.roles is not None
        return evaluate_loop(made.roles, workload, machine, variant, clock)


@contextmanager
def followed_on(machine: Machine) -> Iterator[None]:
    """PredictError, which names the level before compilation, for machine code that cannot be followed on ``machine``."""
    try:
        yield
    except MachineError as error:
        raise PredictError(
            f"{machine.name} is not known well enough to follow machine code: {error}: use --level fluid"
        ) from None
    except CodeError as error:
        raise PredictError(f"the machine code of this kernel cannot be followed: {error}: use --level fluid") from None


def _whole_tiles(
    code: KernelCode, workload: Workload, machine: Machine, clock: str | float, before: Evaluation
) -> Evaluation:
    settled = _clock(code, workload, machine, clock, before.clock.mhz)
    seen = forecast(code, workload, machine, settled.mhz)
    hertz = settled.mhz * 1e6
    chip, loop_before = _chip(seen, workload, machine, settled.mhz, before)
    seconds = seen.cycles / hertz
    memory = seen.memory_cycles / hertz if seen.memory_cycles > seen.span_cycles else 0.0
    trace = before.trace.longer(seen.cycles_per_block - before.trace.ii_cycles)
    return Evaluation(
        seconds, workload.flops / seconds / 1e12, settled, chip, before.pipeline, trace, seen.launch_cycles / hertz,
        memory, loop_before,
    )  # fmt: skip


def _clock(code: KernelCode, workload: Workload, machine: Machine, clock: str | float, near_mhz: float) -> Clock:
    if isinstance(clock, str):
        return settled_clock(code, workload, machine, clock, near_mhz=near_mhz)
    seen = forecast(code, workload, machine, clock)
    memory = seen.memory_cycles / (clock * 1e6)
    return fixed(machine, activity(code, workload, machine, seen), length(seen.cycles, memory), clock)


def _chip(
    seen: CompiledForecast, workload: Workload, machine: Machine, mhz: float, before: Evaluation
) -> tuple[ChipRun, float]:
    """The launch as the waterfall takes it apart, and the cycles of its steady state before compilation."""
    pipeline = before.pipeline
    blocks = head_tiles(workload, pipeline.rows_per_cta, pipeline.keys_per_iteration).total_iterations
    slots = int(machine["chip.sm_count"]) * seen.ctas_per_sm
    rounds = blocks * workload.batch * workload.heads_q / slots
    loop = min(seen.mean_cycles, rounds * seen.cycles_per_block)
    chip = replace(
        before.chip, makespan_cycles=seen.span_cycles, mean_cycles=seen.mean_cycles, loop_cycles=loop, mask_cycles=0.0,
        fill_cycles=0.0, edge_cycles=seen.mean_cycles - loop, tiles=seen.tiles, slots=slots, l2_bytes=seen.l2_bytes,
        hbm_bytes=seen.memory_bytes, l2_floor_cycles=0.0, hbm_seconds=seen.memory_cycles / (mhz * 1e6),
    )  # fmt: skip
    return chip, rounds * before.trace.ii_cycles


def evaluate_loop(
    roles: KernelRoles, workload: Workload, machine: Machine, variant: Variant, clock: str | float
) -> Evaluation:
    """Forecast of a legal ``variant`` whose steady loop is ``roles``: what its tiles take around it, as before compilation.

    Raises CodeError for a loop that is not of this variant or cannot be followed, MachineError for a fact that is missing.
    """
    before = evaluate(workload, machine, variant, clock)
    cycles = _steady_cycles(roles, machine)
    extra = cycles / _blocks(roles, workload, before) - before.trace.ii_cycles
    chip = play(workload, variant, before.pipeline, machine, extra)
    found = timed(workload, machine, before.pipeline, chip, clock)
    return replace(found, trace=before.trace.longer(extra), loop_before=before.chip.loop_cycles)


@lru_cache(maxsize=512)
def _steady_cycles(roles: KernelRoles, machine: Machine) -> float:
    return run_roles(roles, role_costs(machine)).cycles


def _blocks(roles: KernelRoles, workload: Workload, before: Evaluation) -> int:
    """Blocks of keys in an iteration of the compiled loop, by its products; CodeError where they make no whole block."""
    pipeline = before.pipeline
    block = 2.0 * pipeline.rows_per_cta * pipeline.keys_per_iteration * (workload.head_dim_qk + workload.head_dim_v)
    blocks = roles.flop / block
    if round(blocks) < 1 or abs(blocks - round(blocks)) > 0.01 * blocks:
        raise CodeError(f"its loop multiplies {roles.flop:.4g} FLOP an iteration, a block of keys takes {block:.4g}")
    return round(blocks)
