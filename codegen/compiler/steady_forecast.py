"""`tilecast forecast FILE`: what the steady loops of any kernel do on a machine, from its machine code."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from tilecast.codegen.compiler.binary import Binary, BinaryError, from_cubin
from tilecast.codegen.compiler.compile import Compiled, CompileError, Launched, compile_launches
from tilecast.codegen.compiler.inspection import compile_binary, has_pipeline, one_of, pipeline_of
from tilecast.codegen.compiler.structure.assemble import kernel_shape
from tilecast.codegen.compiler.structure.steady import (
    LostBarrierError,
    kernel_roles,
    loops_left_out,
    tile_ends_left_out,
)
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
#: Of loops of backward passes.
_WITHOUT = "CTAs that add to the same dQ in a fixed order wait for each other: only the forecast of a whole pass includes that."
#: Products of an iteration from which on it tells something that each is waited for.
_SERIAL = 4
_NO_LAUNCH = " Its launch is not told: around its loop the code cannot be followed."


#: Tiles of a launch that are dealt to SMs one by one.
MOST_TILES = 1 << 22


@dataclass(frozen=True, slots=True)
class Grid:
    """What a launch does, which machine code alone does not say."""

    ctas: int
    #: Iterations' worth of work of a tile, "128", or "1:128" where tiles have as many of each length between.
    iterations: str
    #: Tiles that the CTAs take, one after the other; 0: each CTA has one.
    tiles: int = 0

    @property
    def work(self) -> list[int]:
        """Iterations of every tile; CodeError as `spread`, for fewer tiles than CTAs, or for more than `MOST_TILES`."""
        if 0 < self.tiles < self.ctas:
            raise CodeError(f"tiles: expected at least one for each of {self.ctas} CTAs, got {self.tiles}")
        count = self.tiles or self.ctas
        if count > MOST_TILES:
            raise CodeError(f"tiles: expected at most {MOST_TILES} of a launch, got {count}")
        return spread(self.iterations, count)


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
    #: Warp -> instructions of its loop that only the end of a tile runs, which are no part of an iteration.
    tile_ends: Mapping[int, int] = field(default_factory=dict)
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
        return self.moved / self.machine.bytes_per_clk(self.machine["hbm.tbps_achieved"], self.mhz)

    @property
    def memory_milliseconds(self) -> float | None:
        """Of the launch, where memory must bring and take all that its lanes move."""
        if self.grid is None:
            return None
        return sum(self.grid.work) * self.kernel.lane_bytes / (self.machine["hbm.tbps_achieved"] * 1e12) * 1e3

    @property
    def milliseconds(self) -> float | None:
        """Of the launch, at the rated clock."""
        return None if self.launch is None else self.launch.cycles / self.mhz * 1e-3

    @property
    def tensor_share(self) -> float:
        """Share of the cycles that the tensor core is busy (0..1)."""
        return self.run.busy["tensor"] / self.cycles

    @property
    def one_by_one(self) -> int:
        """wgmma products of an iteration where each is waited for before the next is issued; 0 where they are not, or few.

        So ptxas writes what it complains about as "wgmma.mma_async instructions are serialized".
        """
        loop = self.kernel.roles[self.kernel.matrix].loop
        kinds = [one.kind for one in loop if one.kind == "wgmma" or (one.kind == "wgmma_wait" and one.amount == 0)]
        count = kinds.count("wgmma") // self.kernel.unrolled
        return 0 if count < _SERIAL or ("wgmma", "wgmma") in itertools.pairwise((*kinds, kinds[0])) else count

    @property
    def mhz(self) -> float:
        """The rated clock, at which throughput is given."""
        return self.machine.rated_mhz

    @property
    def tflops(self) -> float:
        """TFLOP/s of all SMs while they run the loop."""
        return self.flop / self.cycles * self.machine["chip.sm_count"] * self.mhz * 1e-6


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
    work = grid.work if grid is not None else []
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
    found = SteadyForecast(binary.file, machine, roles, run, before, per_sm, left_out=others, apart=apart,
                           tile_ends=tile_ends_left_out(shape))  # fmt: skip
    if grid is None:
        return found
    try:
        cost = CtaCost(per_sm, run, 0.0, 0.0) if apart else cta_cost(roles, costs, per_sm, run, len(work) > grid.ctas)
    except CodeError:
        cost, no_ends = CtaCost(per_sm, run, 0.0, 0.0), True
    paced = replace(cost.steady, cycles=max(cost.steady.cycles, _floor(roles, machine, per_sm)))
    whole = launch(replace(cost, steady=paced), work, machine, grid.ctas)
    return replace(found, run=cost.steady, grid=grid, cost=cost, launch=whole, no_ends=no_ends or bool(apart))
