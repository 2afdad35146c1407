"""Instructions with their costs looked up, as the simulators of compiled warps read them."""

from __future__ import annotations

from typing import NamedTuple

from tilecast.model.compiled.code import PIPES, WarpInstruction
from tilecast.model.compiled.costs import WarpCosts

#: Kinds whose issue depends on more than the warp and its pipe.
_CONDITIONAL = frozenset({"mma", "mma_wait", "wait", "barrier", "store", "spill"})


class IssueCosts(NamedTuple):
    """What of `WarpCosts` an instruction's issue takes: the same at every clock."""

    pipe: dict[str, float]
    pipe_under_mma: dict[str, float]
    slot_under_mma: dict[str, float]
    least_stall: dict[str, int]
    smem_port: dict[str, float]
    port_hold: dict[str, float]
    latency: dict[str, float]


class Prepared(NamedTuple):
    """An instruction with its costs looked up: the loop of `run_sm` reads these a hundred thousand times a second."""

    pipe: int
    taken: float
    taken_under_mma: float
    slot: float
    stall: int
    waits: tuple[int, ...]
    write_counter: int
    read_counter: int
    latency: float
    kind: str
    conditional: bool
    amount: int
    mma_cycles: float
    #: Cycles of the SM's shared-memory port.
    port: float
    #: Cycles that it holds its warp beside a product that leaves nothing of that port; 0 for what does not go through it.
    hold: float
    commits: bool
    from_registers: bool
    word: int


def prepare(
    instruction: WarpInstruction, costs: WarpCosts | IssueCosts, mma: dict[tuple[int, bool], float]
) -> Prepared:
    """The instruction with its costs in cycles; ``mma``: those of matrix instructions by amount and whether A is in registers."""
    pipe, kind = instruction.pipe, instruction.kind
    port = _port_cycles(instruction, costs.smem_port)
    conditional = kind in _CONDITIONAL and not (kind == "barrier" and instruction.amount < 2)
    return Prepared(
        PIPES.index(pipe), costs.pipe[pipe], costs.pipe_under_mma[pipe], costs.slot_under_mma[pipe],
        max(instruction.stall, costs.least_stall[pipe]), tuple(bit for bit in range(6) if instruction.waits >> bit & 1),
        instruction.write_counter, instruction.read_counter, costs.latency[instruction.latency], kind, conditional,
        instruction.amount,
        mma[instruction.amount, instruction.from_registers] if kind == "mma" else 0.0, port,
        port_hold(kind, instruction.latency, costs.port_hold), instruction.commits, instruction.from_registers, instruction.word,
    )  # fmt: skip


def port_hold(kind: str, latency: str, costs: dict[str, float]) -> float:
    """Cycles that an instruction holds its warp beside a product that leaves nothing of the shared-memory port; 0 for one that does not go
    through that."""
    if kind in ("spill", "reload", "shared_load", "shared_store"):
        return costs["access"]
    return costs["arrive"] if kind == "arrive" else costs["shuffle"] if latency == "shuffle" else 0.0


def _port_cycles(one: WarpInstruction, costs: dict[str, float]) -> float:
    """Cycles of the SM's shared-memory port: what products read, and words that warps exchange, spill or reload."""
    if one.kind == "mma":
        # A has 64 rows, of 32 bytes in each k-step; B as many as the product has columns.
        return costs["row"] * (one.amount + (0 if one.from_registers else 64))
    if one.kind in ("spill", "reload"):
        return costs["word"] * one.amount / 4
    return costs["word"] if one.latency == "shuffle" else 0.0
