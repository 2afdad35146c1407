"""What a backward pass launches: kernels whose programs own a block of rows and walk over others, and kernels that pass over rows once."""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.graph import Pipeline

#: Bytes of a float32.
FLOAT = 4


@dataclass(frozen=True, slots=True)
class LoopKernel:
    """A launch whose programs each own a block of one head's keys, or queries, and take the other rows block by block.

    Of its ``pipeline`` ``rows_per_cta`` are the rows a program owns and ``keys_per_iteration`` those of a step, whichever
    they are.  Programs that own keys walk over the queries of all heads that share them.
    """

    name: str
    #: "keys" or "queries".
    owns: str
    pipeline: Pipeline
    #: FLOP of matrix products for each element of the score tile.
    flop_per_score: float
    #: Bytes that a program (of a pair: both) reads in a step, and that L2 adds up for it, each from the SM once.
    step_bytes: float
    added_bytes: float = 0.0
    #: Bytes of a row that a step takes: those of the tensors it comes from, and of the sum that L2 keeps.
    row_bytes: float = 0.0
    sum_row_bytes: float = 0.0
    #: Heads whose blocks programs take by turns; 1: head after head.
    heads_abreast: int = 1
    #: Whether the blocks of a head go last to first.
    last_first: bool = False
    #: Whether programs that add to the same sum do so in their order: cycles from one's turn to the next one's; 0 where not.
    turn_cycles: float = 0.0
    #: Query heads that a program which owns keys walks over, one after the other.
    query_heads: int = 1
    #: Parts of the query heads that share a key/value head, each for a program that owns keys.
    parts: int = 1
    #: Cycles from the last step of a tile to the first of the next where programs stay for several; None: they have one each.
    turnaround_cycles: float | None = None
    #: Whether its programs begin beside those of the launch before, on SMs that have none of them.
    beside: bool = False
    #: The problem as its programs see it where that is not the launch's: of keys that are parted each part is a sequence.
    problem: Workload | None = None
    #: Instructions of a program ahead of its loop, in it and behind it, where they are counted: a launch's first ones are in no cache.
    instructions: tuple[float, float, float] = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class RowKernel:
    """A launch that reads and writes every row once, at the memory's pace."""

    name: str
    read_bytes: float
    write_bytes: float
    #: Whether it begins beside the launch before, and its first bytes come under that.
    beside: bool = False
    #: Instructions of a program where they are counted, those that it runs again, and how often it waits for memory after the first time.
    instructions: float = 0.0
    again: float = 0.0
    waits: int = 0


@dataclass(frozen=True, slots=True)
class BackwardPass:
    """The launches of a backward pass, in their order; ``main`` is what its loop's bounds and schedule are asked of."""

    launches: tuple[LoopKernel | RowKernel, ...]

    @property
    def loops(self) -> tuple[LoopKernel, ...]:
        """The launches with matrix products."""
        return tuple(kernel for kernel in self.launches if isinstance(kernel, LoopKernel))


def seen_from_keys(workload: Workload) -> Workload:
    """The problem with keys and queries changed over: key/value heads are the heads, and the window lies the other way round.

    >>> seen_from_keys(Workload(seqlen_q=512, seqlen_k=1024, mask="causal")).window
    (0, -1)
    """
    w = workload
    left, right = w.limits
    hidden = w.mask != "none"
    return Workload(
        w.batch, w.heads_kv, w.heads_kv, w.seqlen_k, w.seqlen_q, w.head_dim_qk, w.head_dim_v,
        "window" if hidden else "none", (right, left) if hidden else None, w.dtype,
    )  # fmt: skip


def row_terms(workload: Workload, counters_of: int = 0, row_bytes: int = 2 * FLOAT) -> RowKernel:
    """LSE and D = sum(dO * O) of every query row, ``row_bytes`` of it written; ``counters_of`` rows share a counter that is set to
    zero."""
    w = workload
    rows = float(w.batch * w.heads_q * w.seqlen_q)
    counters = FLOAT / counters_of if counters_of else 0.0
    return RowKernel("row terms", rows * (2 * w.head_dim_v * w.dtype_bytes + FLOAT), rows * (row_bytes + counters))


def round_sums(workload: Workload, chains: int = 1) -> RowKernel:
    """Sums in float32, one of each of the ``chains``, read, scaled and rounded: dQ of query heads."""
    w = workload
    elements = float(w.batch * w.heads_q * w.seqlen_q * w.head_dim_qk)
    return RowKernel("round dQ", chains * elements * FLOAT, elements * w.dtype_bytes)


def sum_parts(workload: Workload, parts: int, beside: bool = False) -> tuple[RowKernel, ...]:
    """dK and dV of ``parts`` read and added up, ``beside`` the launch before; nothing where there is one."""
    w = workload
    size = float(w.batch * w.heads_kv * w.seqlen_k * (w.head_dim_qk + w.head_dim_v) * w.dtype_bytes)
    return (RowKernel("sum of parts", parts * size, size, beside),) if parts > 1 else ()


def key_sums(workload: Workload) -> tuple[tuple[RowKernel, ...], tuple[RowKernel, ...]]:
    """What goes before and behind programs that add dK and dV to sums in float32: zeros, and the sums read, scaled and rounded."""
    w = workload
    rows = float(w.batch * w.heads_kv * w.seqlen_k)
    sums = {"dK": rows * w.head_dim_qk, "dV": rows * w.head_dim_v}
    return (
        tuple(RowKernel(f"zeros of {name}", 0.0, elements * FLOAT) for name, elements in sums.items()),
        tuple(
            RowKernel(f"round {name}", elements * FLOAT, elements * w.dtype_bytes) for name, elements in sums.items()
        ),
    )


def row_terms_and_zeros(workload: Workload) -> RowKernel:
    """`row_terms` of a pass whose programs add to dQ's sums in any order: zeros must be there before."""
    w, terms = workload, row_terms(workload)
    zeros = float(w.batch * w.heads_q * w.seqlen_q * w.head_dim_qk * FLOAT)
    return RowKernel("row terms, zeros", terms.read_bytes, terms.write_bytes + zeros)


def add_cycles(machine: Machine, size_bytes: float, together: bool = False) -> float:
    """Cycles until ``size_bytes`` of float32 are added to sums in L2 by the copy engine, one SM alone or all ``together``."""
    latency = machine.get("tma.reduce_latency_cycles", machine["l2.latency_cycles"])
    return latency + size_bytes / add_rate(machine, together)


def add_rate(machine: Machine, together: bool = False) -> float:
    """Bytes a clock that an SM's copy engine has added in L2, alone or while all do; as fast as its stores where nothing else is known."""
    rate = machine.get("tma.reduce_bytes_per_clk", machine.get("tma.store_bytes_per_clk", machine["tma.bytes_per_clk"]))
    if together and machine.has("l2.reduce_tbps"):
        rate = min(rate, machine.bytes_per_clk(machine["l2.reduce_tbps"], machine.rated_mhz))
    return rate
