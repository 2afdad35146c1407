"""`tilecast forecast FILE`: what the steady loops of any kernel do on a machine, from its machine code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tilecast.codegen.compiler.binary import Binary, BinaryError, from_cubin
from tilecast.codegen.compiler.compile import Compiled, CompileError, Launched, compile_launches
from tilecast.codegen.compiler.inspection import compile_binary, has_pipeline, one_of, pipeline_of
from tilecast.codegen.compiler.structure.assemble import kernel_shape
from tilecast.codegen.compiler.structure.steady import LostBarrierError, kernel_roles, loops_left_out
from tilecast.model.backward import build_backward, find_backward, parse_backward
from tilecast.model.compiled.code import CodeError
from tilecast.model.compiled.roles.apart import roles_apart
from tilecast.model.compiled.roles.code import KernelRoles
from tilecast.model.compiled.roles.costs import role_costs
from tilecast.model.compiled.roles.launch import CtaCost, Launch, cta_cost, launch, spread
from tilecast.model.compiled.roles.run import RolesRun, run_roles
from tilecast.model.families import loop_shape
from tilecast.model.kernel.header import header_workload
from tilecast.model.machine.machine import Machine
from tilecast.model.sm.simulate import steady_state
from tilecast.model.training.launch import tiles_of

#: Machine that code of a target is forecast for where none is named.
MACHINES = {"sm_80": "a100", "sm_90a": "h200-sxm", "sm_100a": "b200", "sm_103a": "b300"}
#: Busy shares and waits that are worth a place in the text.
_BUSY, _WAIT = 0.05, 1.0
#: Of loops of backward passes.
_WITHOUT = "CTAs that add to one dQ by turns wait for each other: neither has that, the forecast of a pass does."
_NO_LAUNCH = " Its launch is not told: around its loop the code cannot be followed."


@dataclass(frozen=True, slots=True)
class Grid:
    """What a launch does, which machine code alone does not say."""

    ctas: int
    #: Iterations' worth of work of a CTA, "128", or "1:128" where CTAs have as many of each length between.
    iterations: str


@dataclass(frozen=True, slots=True)
class SteadyForecast:
    """The steady loop of a kernel on a machine, and a launch of it where one was described."""

    file: str
    machine: Machine
    kernel: KernelRoles
    run: RolesRun
    #: The same loop before compilation, in cycles; None for a kernel that is not ours.
    before: float | None
    #: CTAs on an SM.
    per_sm: int = 1
    grid: Grid | None = None
    cost: CtaCost | None = None
    launch: Launch | None = None
    #: Warp -> instructions of its role's other loops, which were not followed.
    left_out: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    #: Why roles could not be followed together, so that all cycles are the least that they take; empty where they were.
    apart: str = ""
    #: Whether what a CTA takes around its iterations is not in its launch.
    no_ends: bool = False
    #: What the forecast before compilation has and this one has not, in words.
    without: str = ""

    @property
    def flop(self) -> float:
        """FLOP of an SM in an iteration of each of its CTAs."""
        return self.kernel.flop * self.per_sm

    @property
    def cycles(self) -> float:
        """Of an iteration; of a kernel without products no less than what L2 takes for the bytes that its lanes move."""
        return max(self.run.cycles, _floor(self.kernel, self.machine, self.per_sm))

    @property
    def moved(self) -> float:
        """Bytes that lanes of an SM load from global memory and store there in an iteration of each of its CTAs."""
        return self.kernel.lane_bytes * self.per_sm

    @property
    def memory_cycles(self) -> float:
        """Cycles of an iteration where memory must bring and take all that lanes move, its bandwidth shared by all SMs."""
        return self.moved / _memory_rate(self.machine, self.mhz)

    @property
    def memory_milliseconds(self) -> float | None:
        """Of the launch, where memory must bring and take all that its lanes move."""
        if self.grid is None:
            return None
        work = spread(self.grid.iterations, self.grid.ctas)
        return sum(work) * self.kernel.lane_bytes / (self.machine["hbm.tbps_achieved"] * 1e12) * 1e3

    @property
    def milliseconds(self) -> float | None:
        """Of the launch, at the rated clock."""
        return None if self.launch is None else self.launch.cycles / self.mhz * 1e-3

    @property
    def tensor_share(self) -> float:
        """Share of the cycles that the tensor core is busy (0..1)."""
        return self.run.busy["tensor"] / self.cycles

    @property
    def mhz(self) -> float:
        """The rated clock, at which throughput is given."""
        return self.machine.get("chip.clock_rated_mhz", self.machine["chip.clock_max_mhz"])

    @property
    def tflops(self) -> float:
        """TFLOP/s of all SMs while they run the loop."""
        return self.flop / self.cycles * self.machine["chip.sm_count"] * self.mhz * 1e-6


def _memory_rate(machine: Machine, mhz: float) -> float:
    """Bytes a cycle of an SM that memory brings or takes while all SMs ask for as much."""
    return machine["hbm.tbps_achieved"] * 1e12 / (machine["chip.sm_count"] * mhz * 1e6)


def _floor(kernel: KernelRoles, machine: Machine, per_sm: int) -> float:
    """Least cycles of an iteration of a kernel without products, which the simulator of its warps does not see: its bytes through L2."""
    if kernel.flop:
        return 0.0
    return kernel.lane_bytes * per_sm / machine["l2.bytes_per_clk_per_sm"]


def forecast_source(
    path: str,
    machine: Machine,
    dtype: str = "bf16",
    per_sm: int | None = None,
    grid: Grid | None = None,
    kernel: str | None = None,
) -> SteadyForecast:
    """A generated kernel, compiled for ``machine``, that ``kernel`` (a part of its name) leaves where a launch starts several.

    Of a backward pass CTAs on an SM and the launch are those of the shape in its header, where they are not given.
    Raises what `forecast_binary` does, and CompileError.
    """
    made, binary, header = compile_binary(path, machine.arch, dtype, kernel)
    if header.get("pass") == "bwd":
        return _backward_kernel(made, binary, header, machine, per_sm, grid)
    before = steady_state(pipeline_of(header, machine)).ii_cycles if has_pipeline(header) else None
    return forecast_binary(binary, machine, made.warps, before=before, per_sm=per_sm, grid=grid)


def _backward_kernel(
    made: Compiled, binary: Binary, header: Mapping[str, object], machine: Machine, per_sm: int | None, grid: Grid | None
) -> SteadyForecast:  # fmt: skip
    work, text = header_workload(header), str(header["variant"])
    variant = parse_backward(text, find_backward(str(header["family"])).variant())
    loops = build_backward(loop_shape(work), variant, machine).loops
    mine = next((one for one in loops if one.name == made.name.replace("_", " ")), None)
    if mine is None:
        return forecast_binary(binary, machine, made.warps, per_sm=per_sm, grid=grid)
    ctas = per_sm or mine.pipeline.ctas_per_sm
    before = steady_state(mine.pipeline).ii_cycles if ctas == mine.pipeline.ctas_per_sm else None
    said = _WITHOUT if before is not None and mine.added_bytes else ""
    size = int(mine.added_bytes)
    tiles, heads = tiles_of(mine, work)
    first, last = (int(end) for end in (tiles.iterations.min(), tiles.iterations.max()))
    own = Grid(tiles.count * heads, str(last) if first == last else f"{max(1, first)}:{last}")
    follow = partial(forecast_binary, binary, machine, made.warps, before=before, per_sm=ctas, out_bytes=size)
    found = follow(grid=grid or own)
    if found.no_ends and grid is None:
        found = follow()
        said += _NO_LAUNCH
    return replace(found, without=said)


def forecast_launch(
    path: str, machine: Machine, run: Callable[[], object], kernel: str | None = None, iterations: str | None = None,
    per_sm: int | None = None,
) -> tuple[SteadyForecast, Launched]:  # fmt: skip
    """The kernel that ``run``, code of any Python file, launches, compiled for ``machine``; with ``iterations`` of a CTA its time.

    ``per_sm``: CTAs on an SM (default: as many as its registers, warps and shared memory leave room for).  Raises what `forecast_source` does.
    """
    launched = compile_launches(path, machine.arch, run)
    if not launched:
        raise CompileError(f"{path}: expected the call to launch a kernel, it launched none")
    made = one_of([one.compiled for one in launched], path, kernel)
    found = next(one for one in launched if one.compiled is made)
    binary = from_cubin(made.cubin, path, machine.arch, made.name)
    grid = None if iterations is None else Grid(found.ctas, iterations)
    there = per_sm or ctas_that_fit(machine, made.warps, binary.registers or 0, made.shared_bytes)
    return forecast_binary(binary, machine, made.warps, per_sm=there, grid=grid), found


def ctas_that_fit(machine: Machine, warps: int, registers: int, shared: int) -> int:
    """CTAs that an SM holds at once: by their number, warps, registers (given out by 8 a thread) and shared memory."""
    room = [int(machine["sm.max_ctas"]), int(machine["sm.max_warps"]) // warps]
    room.append(int(machine["reg.file_bytes"]) // max(1, 4 * 32 * warps * (-(-registers // 8) * 8)))
    room.append(int(machine["smem.per_sm_bytes"]) // (shared + 1024))
    return max(1, min(room))


def forecast_binary(
    binary: Binary, machine: Machine, warps: int | None = None, before: float | None = None, per_sm: int | None = None,
    grid: Grid | None = None, out_bytes: int = 0,
) -> SteadyForecast:  # fmt: skip
    """The steady loop of a kernel on ``machine`` with ``per_sm`` CTAs on an SM (default: as many as fit, but 1 of a kernel with
    products whose file does not say how much shared memory it takes), and a launch of ``grid``; ``warps`` of a CTA where the file does not say; ``out_bytes`` are those that a role copies out in an
    iteration, which no code tells.

    Raises BinaryError where the code is not for this machine, ShapeError for a kernel without loops that can be simulated,
    MachineError for facts that the machine lacks, CodeError where the grid is none.  Where its roles do not fit together, each is
    simulated by itself.
    """
    if binary.target != machine.arch:
        raise BinaryError(f"{binary.file}: expected code for {machine.arch} ({machine.name}), got {binary.target}")
    work = spread(grid.iterations, grid.ctas) if grid is not None else []
    shape = kernel_shape(binary, warps)
    costs, others, apart, no_ends = role_costs(machine), loops_left_out(shape), "", False
    try:
        roles = kernel_roles(shape, out_bytes)
    except LostBarrierError as error:
        roles, apart = kernel_roles(shape, out_bytes, lost=True), str(error)
    if per_sm is None:
        fit = ctas_that_fit(machine, shape.warps, binary.registers or 0, binary.shared_bytes or 0)
        per_sm = fit if binary.shared_bytes is not None or not roles.flop else 1
    try:
        run = roles_apart(roles, costs, per_sm) if apart else run_roles(roles, costs, per_sm)
    except CodeError as error:
        run, apart = roles_apart(roles, costs, per_sm), str(error)
    found = SteadyForecast(binary.file, machine, roles, run, before, per_sm, left_out=others, apart=apart)
    if grid is None:
        return found
    try:
        cost = CtaCost(per_sm, run, 0.0, 0.0) if apart else cta_cost(roles, costs, per_sm, run)
    except CodeError:
        cost, no_ends = CtaCost(per_sm, run, 0.0, 0.0), True
    paced = replace(cost.steady, cycles=max(cost.steady.cycles, _floor(roles, machine, per_sm)))
    whole = launch(replace(cost, steady=paced), work, machine)
    return replace(found, run=cost.steady, grid=grid, cost=cost, launch=whole, no_ends=no_ends or bool(apart))


def as_dict(found: SteadyForecast) -> dict[str, Any]:
    """Plain values for --json."""
    run = found.run
    return {
        "file": found.file,
        "kernel": found.kernel.kernel,
        "arch": found.kernel.target,
        "machine": found.machine.name,
        "level": "machine code, steady loop" + (", each role alone: no less than" if found.apart else ""),
        "not_followed": found.apart or None,
        "cycles_per_iteration": found.cycles,
        "cycles_before_compilation": found.before,
        "ctas_per_sm": found.per_sm,
        "flop_per_iteration_and_sm": found.flop,
        "bytes_by_lanes_per_iteration_and_sm": found.moved,
        "memory_cycles_per_iteration": found.memory_cycles,
        "tensor_share": found.tensor_share,
        "clock_mhz": found.mhz,
        "tflops_in_the_loop": found.tflops,
        "busy": {name: cycles / found.cycles for name, cycles in run.busy.items()},
        "launch": _launch_dict(found),
        "roles": [
            {
                "role": role.name,
                "warp": role.warp,
                "instructions": len(role.loop) // found.kernel.unrolled,
                "other_loops": list(found.left_out.get(role.warp, ())),
                "waits": {barrier: cycles for (name, barrier), cycles in run.waits.items() if name == role.name},
            }
            for role in found.kernel.roles
        ],
    }


def _launch_dict(found: SteadyForecast) -> dict[str, Any] | None:
    if found.grid is None or found.cost is None or found.launch is None:
        return None
    return {
        "ctas": found.grid.ctas,
        "iterations": found.grid.iterations,
        "cycles": found.launch.cycles,
        "milliseconds": found.milliseconds,
        "memory_milliseconds": found.memory_milliseconds,
        "ends_cycles": None if found.no_ends else found.cost.ends,
        "peeled_iterations": found.cost.peeled,
        "busy": found.launch.busy,
    }


def _launch_lines(found: SteadyForecast) -> list[str]:
    if found.grid is None or found.cost is None or found.launch is None:
        return []
    whole, grid, least = found.launch, found.grid, _least(found)
    peeled = f"; {found.cost.peeled:.0f} of its iterations stand outside of the loop" if found.cost.peeled else ""
    unit = (
        f"tensor core {whole.busy['tensor']:.0%} busy"
        if found.flop
        else f"{whole.busy['issue']:.0%} of the issue slots taken"
    )
    memory = [] if found.flop or not found.moved else [
        f"Memory takes {found.memory_milliseconds:.4g} ms for all that its lanes move, where L2 does not have it."
    ]  # fmt: skip
    return [
        "",
        f"{grid.ctas:,} CTAs of {grid.iterations} iterations take {least}{whole.cycles:,.0f} cycles, {found.milliseconds:.4g} ms at {found.mhz:.0f} MHz: "
        f"{unit}.",
        *memory,
        f"Set-up, first loads and the epilogue of a CTA are not in it: around its loops the code cannot be followed{peeled}."
        if found.no_ends
        else f"Set-up, first loads and the epilogue of a CTA are {found.cost.ends:,.0f} cycles of it{peeled}.",
    ]


def _least(found: SteadyForecast) -> str:
    return "no less than " if found.apart else ""


def _product_lines(found: SteadyForecast, matrix: str) -> list[str]:
    return [
        f"An iteration of {matrix} takes {_least(found)}{found.cycles:,.0f} cycles for {found.flop / 1e6:.2f} MFLOP of an SM: the tensor core is busy "
        f"{found.tensor_share:.0%} of them.",
        f"{found.machine['chip.sm_count']:.0f} SMs at the rated {found.mhz:.0f} MHz make {found.tflops:,.0f} TFLOP/s as long as all run the loop: what "
        "stands around it, memory and",
        "the power limit are not in it.",
    ]


def _mover_lines(found: SteadyForecast, role: str) -> list[str]:
    """Of a kernel without matrix products in its loops."""
    lines = [
        f"It multiplies no matrices there. An iteration of {role} takes {_least(found)}{found.cycles:,.0f} cycles."
    ]
    if found.moved:
        lines.append(
            f"Lanes of an SM move {found.moved / 1024:,.1f} KB in it to or from global memory: that is where L2 has what they load; "
            f"memory takes {found.memory_cycles:,.0f} cycles."
        )
    return lines


def as_text(found: SteadyForecast) -> str:
    """The forecast for people."""
    run, machine, kernel = found.run, found.machine, found.kernel
    matrix = kernel.roles[kernel.matrix].name
    if found.per_sm > 1:
        matrix += f" in each of {found.per_sm} CTAs"
    lines = [
        f"{kernel.kernel[:60] or 'a kernel'} of {Path(found.file).name}, compiled for {kernel.target}, on {machine.title}: its steady loop,",
        "simulated from machine code",
        "",
        *(_product_lines if found.flop else _mover_lines)(found, matrix),
    ]
    if found.before is not None:
        lines.append(
            f"Before compilation the same loop is forecast at {found.before:,.0f} cycles ({found.before / found.cycles - 1:+.0%})."
        )
    if found.without:
        lines.append(found.without)
    if found.apart:
        told = found.apart.removeprefix(f"{kernel.kernel}: ").removesuffix("; the reading of the code is wrong")
        lines.append(f"What its roles hand each other cannot be followed, so each was simulated alone: {told}.")
    lines += _launch_lines(found)
    busy = sorted(((cycles / found.cycles, name) for name, cycles in run.busy.items()), reverse=True)
    lines += ["", "busy   " + " · ".join(f"{name} {share:.0%}" for share, name in busy if share >= _BUSY), ""]
    lines.append("role                 instructions   stands at barriers, cycles an iteration")
    rows: dict[tuple[str, str], list[str]] = {}
    for role in kernel.roles:
        waits = sorted(((c, b) for (name, b), c in run.waits.items() if name == role.name and c >= _WAIT), reverse=True)
        told = " · ".join(f"{barrier} {cycles:.0f}" for cycles, barrier in waits) or "-"
        rows.setdefault((f"{len(role.loop) // kernel.unrolled:>12}", told), []).append(role.name)
    lines += [f"{_together(names):<20} {count}   {told}" for (count, told), names in rows.items()]
    return "\n".join(lines + _left_out_lines(found))


def _together(names: Sequence[str]) -> str:
    """Roles of one row: the first, and how many more do the same on its sub-partition."""
    return names[0] if len(names) == 1 else f"{names[0]}, {len(names) - 1} more"


def _left_out_lines(found: SteadyForecast) -> list[str]:
    """What a kernel with several loops does elsewhere, and what that means for the numbers above."""
    told: dict[tuple[int, ...], list[str]] = {}
    for role in found.kernel.roles:
        if others := found.left_out.get(role.warp):
            told.setdefault(others, []).append(role.name)
    if not told:
        return []
    followed = "the loop with the fewest instructions a product" if found.flop else "the loop that moves most bytes"
    counted = " The launch's iterations are counted as all of this one." if found.launch is not None else ""
    return [
        "",
        f"Of each role {followed} is followed, others (masks, remainders, other phases) are not.{counted}",
        *(
            f"  {_together(names)}: {len(others)} more loop{'s' if len(others) > 1 else ''}, of {' and '.join(map(str, others))} instructions"
            for others, names in told.items()
        ),
    ]
