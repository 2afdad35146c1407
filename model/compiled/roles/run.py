"""Run the steady loops of warp roles against each other, instruction by instruction, on one sub-partition of an SM.

The sub-partition is that of the warp which issues the matrix products; single warps on other sub-partitions run beside it
and share nothing with it but barriers, tensor core and copies.  The rules:

- one instruction a cycle; a warp's next waits for the stall count of its last and the counters in its wait mask;
- a pipe is occupied for `RoleCosts.occupies` cycles, tensor memory's port by the bytes that a warp moves through it;
- the tensor core takes products of tcgen05 in the order of their issue; a commit completes with the last product before it;
- products of wgmma are queued and served as `WgmmaQueue` says, and while one runs it goes before arithmetic, as in
  `model.compiled.sm`; mma.sync occupies its sub-partition's tensor core like any pipe;
- beside wgmma the port of shared memory is the SM's: loads and stores of warps, and copies out, take from the product in service what it does
  not leave of the port; accesses of warps stand in line for it, while the warps go on, as `PortLine` says;
- copies by lanes come from L2 at the rate of all SMs together, and a group of them is there when its last is;
- the n-th wait of a warp at a ring of s barriers passes when the (n + 1 - s f)-th phase of the ring is complete, where f is 1
  if the barrier lets the first wait pass; a phase is complete when all who arrive at it have;
- where all warps wait in their first iteration, a wait under a branch is passed over: it concerns the iteration before;
- an arrival is seen `handover` cycles later, what engines complete when it is complete; a wait takes `poll` cycles at least;
  who waits at a named barrier goes on `named` cycles after the last other arrival, and `met` after its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilecast.model.compiled.code import CodeError
from tilecast.model.compiled.roles.code import Barrier, KernelRoles, RoleCode, RoleInstruction, again, together
from tilecast.model.compiled.roles.costs import RoleCosts
from tilecast.model.compiled.roles.state import State

#: Iterations of the matrix role: until the loops have found their rhythm, and those that are averaged.
_SETTLING, _AVERAGED = 8, 16
#: The same where nothing is handed over and nothing multiplied, and warps only share pipes: in loops of all warps of so many
#: instructions one iteration is like the next.
_SETTLING_ALONE, _AVERAGED_ALONE, _LONG = 2, 4, 20_000
#: How often all loops' instructions may be issued between two iterations of the matrix role before it waits for what never comes.
_PATIENCE = 100


@dataclass(frozen=True, slots=True)
class RolesRun:
    """A steady state."""

    #: Cycles of an iteration of the matrix role.
    cycles: float
    #: Cycles by pipe and of "issue" on the sub-partition in an iteration; "tensor" of the SM's tensor core.
    busy: dict[str, float]
    #: (role, barrier) -> cycles an iteration that the role stands at it beyond a poll.
    waits: dict[tuple[str, str], float]


def step(state: State) -> None:
    """Issue the next instruction; CodeError where all warps wait for something that never comes."""
    while True:
        chosen, best = None, math.inf
        for warp in state.warps:
            # A warp is ready no earlier than it is free; who stands at a named barrier is counted there when asked.
            if warp.done or (warp.free > best and warp.program[warp.pc].asks != "named_wait"):
                continue
            ready = state.ready(warp)
            if ready is not None and (
                ready < best or (ready == best and chosen is not None and warp.last < chosen.last)
            ):
                chosen, best = warp, ready
        service = state.queue.next_service() if state.queue else math.inf
        access = state.line.next() if state.line else math.inf
        if state.queue and service <= min(best, access) and service < math.inf:
            state.queue.serve(service)
        elif state.line and access <= best and access < math.inf:
            state.line.serve(access)
        elif chosen is not None:
            state.count += 1
            chosen.last = state.count
            state.issue(chosen, best)
            return
        elif all(warp.done for warp in state.warps):
            return
        elif not (state.skip_guarded() or state.open_meeting() or state.leave()):
            raise CodeError(
                f"{state.kernel.kernel}: its roles wait for each other: {_standing(state)}; the reading of the code is wrong"
            )


def run_roles(kernel: KernelRoles, costs: RoleCosts, ctas: int = 1) -> RolesRun:
    """The steady state of ``ctas`` CTAs on an SM; CodeError when roles wait for something that never comes."""
    kernel = together(kernel, ctas)
    state = State(kernel, costs)
    matrix = state.warps[kernel.matrix]
    at: dict[str, float] = {}
    begun: list[dict[int, float]] = []
    patience = _PATIENCE * sum(len(role.loop) for role in kernel.roles)
    seen, since = 0, 0
    alone = not kernel.flop and not any(one.barrier >= 0 for role in kernel.roles for one in role.loop)
    settling, laps_averaged = (_SETTLING_ALONE, _AVERAGED_ALONE) if alone else (_SETTLING, _AVERAGED)
    if alone and sum(len(role.loop) for role in kernel.roles) > _LONG:
        settling, laps_averaged = 1, 1
    while len(matrix.laps) < settling + laps_averaged:
        if not begun and len(matrix.laps) == settling:
            at, begun = dict(state.busy), [dict(warp.standing) for warp in state.warps]
        step(state)
        if len(matrix.laps) > seen:
            seen, since = len(matrix.laps), state.count
        elif state.count - since > patience:
            raise CodeError(
                f"{kernel.kernel}: {matrix.name} waits while other roles go round: {_standing(state)}; the reading of the code is wrong"
            )
    laps, averaged = matrix.laps, laps_averaged * kernel.unrolled
    waits = {
        (warp.name, kernel.barriers[barrier].name): (cycles - before.get(barrier, 0.0)) / averaged
        for warp, before in zip(state.warps, begun, strict=True)
        for barrier, cycles in warp.standing.items()
    }
    busy = {name: (cycles - at[name]) / averaged for name, cycles in state.busy.items()}
    # Products that no warp waits for are issued ahead of the tensor core, but not for ever.
    return RolesRun(max((laps[-1] - laps[settling - 1]) / averaged, busy["tensor"]), busy, waits)


def tile_cycles(kernel: KernelRoles, costs: RoleCosts, iterations: int, ctas: int = 1, later: bool = False) -> float:
    """Cycles from the first instruction of ``ctas`` CTAs, begun together, to the last of a tile of ``iterations`` each, which its
    unrolled loops divide; ``later``: of the roles that multiply, of a tile before which the same CTA had another.

    CodeError when roles wait for something that never comes, or the kernel comes without the code around its loops.
    """
    if not all(role.begin for role in kernel.roles):
        raise CodeError(f"{kernel.kernel}: expected the code around its loops, got the loops alone")
    kernel = together(again(kernel) if later else kernel, ctas)
    state = State(kernel, costs, iterations // kernel.unrolled, kernel.more_passes)
    begun = _brought(state) if later else 0.0
    while not all(warp.done for warp in state.warps):
        step(state)
    return max(warp.free for warp in state.warps if warp.multiplies or not later) - begun


def _brought(state: State) -> float:
    """When roles that multiply nothing have gone as far as they can by themselves: there those that multiply begin.

    They run ahead into a CTA's next tile while that before it ends, as far as slots are free.  What those that multiply give at
    named barriers before all else they have given by then.
    """
    matrices = [warp for warp in state.warps if warp.multiplies]
    for warp in matrices:
        while warp.program[warp.pc].code.kind == "named_arrive":
            state.issue(warp, warp.free)
        warp.free = math.inf
    ahead = [warp for warp in state.warps if not warp.multiplies]
    while any(not warp.done and state.ready(warp) is not None for warp in ahead):
        step(state)
    landed = (at for parties in state.arrived for times in parties.values() for at in times)
    begun = max((*(warp.free for warp in ahead), *landed), default=0.0)
    for warp in matrices:
        warp.free = begun
    return begun


def pass_cycles(code: Sequence[RoleInstruction], costs: RoleCosts, beside: Sequence[RoleInstruction] = ()) -> float:
    """Cycles of a warp that runs ``code`` once and finds every mbarrier open, while another goes round the loop ``beside``."""
    roles = [RoleCode("beside", 0, (), _open(beside))] if beside else []
    roles.append(RoleCode("code", 0, _open(code), ()))
    numbers = {one.barrier for role in roles for one in (*role.ahead, *role.loop)}
    named = tuple(Barrier(f"#{number}", 1, True, ()) for number in range(max(numbers, default=-1) + 1))
    state = State(KernelRoles("", "", tuple(roles), named), costs)
    while not state.warps[-1].done:
        step(state)
    return state.warps[-1].free


def _open(code: Sequence[RoleInstruction]) -> tuple[RoleInstruction, ...]:
    """The same, in which mbarriers belong to no role."""
    return tuple(one if one.kind in ("named_wait", "named_arrive") else one._replace(barrier=-1) for one in code)


def _standing(state: State) -> str:
    """Who waits where."""
    found = []
    for warp in state.warps:
        if not warp.done:
            one = warp.program[warp.pc].code
            where = state.kernel.barriers[one.barrier].name if one.barrier >= 0 else one.kind
            found.append(f"{warp.name} at {where}")
    return ", ".join(found)
