"""The Pipeline: one immutable value that bounds, schedule, simulation, report and templates all read.

A pipeline is the steady-state loop of a tiled attention kernel as a dataflow graph.  One *iteration* of the
loop handles one block of keys for every query tile that the CTA (or warpgroup set) owns.

Units of measure: every ``*_cycles`` is SM clocks; a demand is the number of cycles in which the operation,
running alone at the unit's full rate, would occupy that unit of one SM.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import lru_cache
from math import inf
from operator import attrgetter
from typing import Literal, NamedTuple

from tilecast.base.same import Same

#: Units of one SM that operations draw on, in the order reports show them.
UNITS: tuple[str, ...] = (
    "tensor",  # tensor core array
    "mufu",  # special function unit (ex2)
    "fma",  # FP32 pipe
    "alu",  # integer, logic, min/max pipe
    "cvt",  # float -> 16/8-bit packing
    "issue",  # warp schedulers
    "regs",  # register file ports, where accumulators in registers contend with arithmetic (Hopper)
    "smem",  # shared memory port
    "tmem_read",
    "tmem_write",
    "tma",  # bulk copy engine
    "memory",  # this SM's share of the chip's memory bandwidth, where a loop streams
    "l2",  # its share of what L2 gives while all SMs ask, and of what it takes
    "l2_store",
)


#: Extra demand of operations whose block crosses a mask boundary: op name -> (unit, cycles) pairs; unit "" is time that the
#: operation waits on top of its busiest unit.
MaskDemand = tuple[tuple[str, tuple[tuple[str, float], ...]], ...]


Engine = Literal["", "tensor", "tma", "memory", "l2"]
EdgeKind = Literal["data", "buffer", "order"]
Space = Literal["smem", "tmem", "registers"]


class PipelineError(ValueError):
    """A pipeline that cannot be built or is not well formed; the message is one sentence."""


class Op(NamedTuple):
    """One operation of the loop body.

    ``role`` issues operations in program order.  A synchronous operation (``engine`` empty) keeps its role busy
    until it is finished; an asynchronous one keeps it busy for ``issue_cycles`` and then runs on its engine.
    """

    name: str
    kind: str
    role: str
    #: (unit, cycles) pairs; the cycles the operation occupies that unit of the SM at full rate.
    demand: tuple[tuple[str, float], ...]
    #: Shortest time from start to finish when the operation has the SM to itself.
    min_cycles: float
    #: "" (synchronous), "tensor" (in-order matrix engine), "tma" (copies in flight side by side), "memory" or "l2" (copies that
    #: the chip's memory, or L2, serves one after the other).
    engine: Engine = ""
    issue_cycles: float = 0.0
    #: Query tile (stage) the operation belongs to; -1 when it serves all of them.
    tile: int = -1
    #: Warp instructions per SM sub-partition by pipe, for instruction-mix checks ("mufu", "fma", "alu", ...).
    instructions: tuple[tuple[str, float], ...] = ()
    #: Of a matrix operation: FMA a cycle and sub-partition that others issue beside it without slowing it; each one beyond
    #: takes a cycle of the tensor core.  Infinite where none does.
    hidden_fma: float = inf
    #: Of an operation that holds its role: shortest time from start to finish while matrix operations run beside it; 0 where
    #: they do not slow it.
    beside_mma_cycles: float = 0.0

    def cycles(self, unit: str) -> float:
        """Cycles of ``unit`` this operation occupies (0 when it does not use it)."""
        for name, cycles in self.demand:
            if name == unit:
                return cycles
        return 0.0


def of_tile(op: Op, tile: int) -> Op:
    """What ``op`` of query tile 0 is for another one: names tell the tiles apart, nothing else does."""
    if tile == op.tile:
        return op
    return op._replace(name=op.name.replace("0", str(tile)), role=op.role.replace("0", str(tile)), tile=tile)


class Edge(NamedTuple):
    """``dst`` of iteration i starts no earlier than ``latency_cycles`` after ``src`` of i - ``distance`` ends.

    ``kind`` is "data" (a value), "buffer" (a slot is free again) or "order" (a barrier with no value);
    ``why`` names the barrier or buffer for people.
    """

    src: str
    dst: str
    distance: int = 0
    latency_cycles: float = 0.0
    kind: EdgeKind = "data"
    why: str = ""


class Buffer(NamedTuple):
    """Storage that values of the loop live in: ``depth`` slots of ``bytes_per_slot`` (TMEM: 512 B a column)."""

    name: str
    space: Space
    bytes_per_slot: int
    depth: int
    producer: str = ""
    consumer: str = ""


class Step(NamedTuple):
    """One entry of a role's program: run ``op`` for iteration (loop step + ``shift``)."""

    op: str
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Role:
    """A group of warps that executes one instruction stream in order."""

    name: str
    program: tuple[Step, ...]
    warps: int = 4
    registers_per_thread: int = 0


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The loop of one kernel on one machine; see the module docstring."""

    name: str
    machine: str
    ops: tuple[Op, ...]
    edges: tuple[Edge, ...]
    roles: tuple[Role, ...]
    buffers: tuple[Buffer, ...]
    #: Query rows one CTA owns, key rows of one iteration, and how many CTAs share an SM.
    rows_per_cta: int
    keys_per_iteration: int
    ctas_per_sm: int
    #: Cycles before the first operation of a tile can start, and after the last one until the tile is stored, without
    #: what the launch's other tiles cost it in memory bandwidth (`edge_read_bytes`, `edge_write_bytes`).
    prologue_cycles: float
    epilogue_cycles: float
    #: Cycles from one loop of a tile to its next where blocks that cross a mask boundary have loops of their own.
    restart_cycles: float = 0.0
    #: Extra demand of an iteration whose block crosses a mask boundary: op name -> (unit, cycles) pairs.
    mask_demand: MaskDemand = ()
    #: Whether the code of the first block of every tile is that of masked blocks, whatever the mask.
    first_block_masked: bool = False
    #: Bytes a CTA reads before its loop and writes after it with nothing of its own to hide them under.
    edge_read_bytes: float = 0.0
    edge_write_bytes: float = 0.0
    #: CTAs that work on one tile together (2 for tcgen05 CTA pairs), each on its own SM.
    cta_group: int = 1
    #: Whether a persistent CTA's other roles finish a tile under the next one's loop; False where the warps that multiply
    #: also write the output.
    tiles_overlap: bool = True
    #: Whether a CTA that lives on has room to fetch the next tile's Q before it has multiplied by this one's for the last time.
    query_ahead: bool = True
    #: Whether its products run on mma.sync, below the rate of a machine that has wgmma or tcgen05.
    legacy_matrix_path: bool = False
    #: Where several CTAs share an SM, one of them while all others do the same at the same time; None where that is not asked.
    in_step: Pipeline | None = None
    #: Numbers a report wants to show: ("exp2 on FMA", 0.1875) and so on.
    notes: tuple[tuple[str, float | str], ...] = ()
    _index: dict[str, Op] = field(init=False, compare=False, repr=False)
    _demand: dict[str, float] = field(init=False, compare=False, repr=False)
    _hash: int = field(default=0, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        index, demand = _checked(Same(self.ops), Same(self.roles), self.name)
        object.__setattr__(self, "_index", index)
        object.__setattr__(self, "_demand", demand)
        self._check_edges()

    def _check_edges(self) -> None:
        index = self._index
        for src, dst, distance, _, _, _ in self.edges:
            if src not in index or dst not in index:
                raise PipelineError(
                    f"pipeline {self.name}: edge names unknown operation '{dst if src in index else src}'"
                )
            if distance < 0:
                raise PipelineError(f"pipeline {self.name}: edge {src}->{dst} has negative distance")

    def __hash__(self) -> int:
        # A pipeline is a key of many caches and holds hundreds of values: hash it once.
        if not self._hash:
            p = self
            parts = (p.name, p.machine, p.ops, p.edges, p.roles, p.buffers, p.prologue_cycles, p.mask_demand)
            object.__setattr__(self, "_hash", hash(parts))
        return self._hash

    def waiting(self, edges: tuple[Edge, ...], **around: object) -> Pipeline:
        """The same operations and roles with other ``edges`` between them, and what that changes ``around`` them."""
        # Searches ask by the thousand: `dataclasses.replace` takes three times as long and checks the operations again.
        made = object.__new__(Pipeline)
        for name, value in zip(_FIELDS, _values_of(self), strict=True):
            object.__setattr__(made, name, value)
        for name, value in (("edges", edges), ("_hash", 0), *around.items()):
            object.__setattr__(made, name, value)
        made._check_edges()
        return made

    def op(self, name: str) -> Op:
        """The operation called ``name``; KeyError when there is none."""
        return self._index[name]

    def demand(self) -> dict[str, float]:
        """Cycles per unit and iteration, for units that are used at all."""
        return dict(self._demand)

    def instructions(self) -> dict[str, float]:
        """Warp instructions per SM sub-partition and iteration, by pipe."""
        total: dict[str, float] = {}
        for op in self.ops:
            for pipe, count in op.instructions:
                total[pipe] = total.get(pipe, 0.0) + count
        return total


_FIELDS = tuple(f.name for f in fields(Pipeline))
_values_of = attrgetter(*_FIELDS)


@lru_cache(maxsize=2048)
def _checked(same_ops: Same[tuple[Op, ...]], same_roles: Same[tuple[Role, ...]], name: str) -> tuple[dict[str, Op], dict[str, float]]:  # fmt: skip
    """Operations by name and their cycles per unit; PipelineError unless they are sound and the roles run each of them once."""
    ops, roles = same_ops.value, same_roles.value
    index = {op.name: op for op in ops}
    if len(index) != len(ops):
        raise PipelineError(f"pipeline {name}: two operations share a name")
    total = dict.fromkeys(UNITS, 0.0)
    for op in ops:
        for unit, cycles in op.demand:
            if unit not in total:
                raise PipelineError(f"pipeline {name}: operation {op.name} uses unknown unit '{unit}'")
            if cycles > op.min_cycles * (1 + 1e-9):
                raise PipelineError(
                    f"pipeline {name}: operation {op.name} needs {cycles:g} cycles of {unit} "
                    f"but claims to finish in {op.min_cycles:g}"
                )
            total[unit] += cycles
    programmed = [step.op for role in roles for step in role.program]
    if sorted(programmed) != sorted(index):
        raise PipelineError(f"pipeline {name}: roles must run every operation exactly once")
    return index, {unit: cycles for unit, cycles in total.items() if cycles > 0}
