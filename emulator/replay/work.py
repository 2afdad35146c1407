"""What arithmetic costs: the steps that a role executed as warp instructions on a sub-partition of an SM.

A step is as many instructions of a warp as a thread has registers of its result by its layout; each takes an issue slot and its
pipe for the cycles that the machine file says (`model.compiled.costs`: the same facts as of compiled instructions).  Steps overlap as on a
vector machine with chaining: every pipe takes them in order, a step begins when the first of what it needs is there, and one that
needs all of a reduction, of a load of tensor memory or of a number a row waits for its end.  So a compiler that orders well is
assumed; what it adds (moves, addresses) is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf, log, prod

from tilecast.emulator.replay.sharing import Load
from tilecast.emulator.trace import Step
from tilecast.emulator.values.registers import linear_of
from tilecast.model.compiled.costs import PARTITIONS, latencies, pipe_cycles
from tilecast.model.machine.machine import Machine

_LANES = 32
#: Which port a load or store goes through.
_PORTS = {
    "tmem_load": "tmem_read", "tmem_store": "tmem_write", "smem_load": "smem", "smem_store": "smem",
    "global_load": "global", "global_store": "global",
}  # fmt: skip
#: Units that all sub-partitions share, and issue slots of what all warps come to: their streams count an SM's cycles.
_OF_THE_SM = {*_PORTS.values(), "issue"}
#: Products of elements that an instruction of mma.sync does: 16 x 8 x 16.
_MMA_SYNC = 16 * 8 * 16
#: Of a division by div.full: the reciprocal, and two multiplications after it.
_DIVISION_FMA = 2


@dataclass(frozen=True, slots=True)
class Costs:
    """Cycles of a sub-partition for an instruction of a warp, and of latencies; bytes a cycle of an SM."""

    pipe: dict[str, float]
    #: The same while wgmma runs, with cycles of the register ports, and a warp's own cycles from one to the next.
    beside: dict[str, float]
    ports: dict[str, float]
    follows: dict[str, float]
    latency: dict[str, float]
    convert: float
    inputs: float
    packed: bool
    shared_bytes: float
    shared_bytes_beside: float
    tensor_read: float
    tensor_write: float
    tensor_latency: float
    global_bytes: float
    barrier: float
    fence: float
    mma_sync: float
    #: Whether the tensor core and arithmetic have the register ports in common.
    shares_ports: bool


@lru_cache(maxsize=64)
def costs_of(machine: Machine) -> Costs:
    """From a machine file; MachineError names a fact it lacks."""
    m, pipe, classes = machine, pipe_cycles(machine), latencies(machine)
    ports = {name: m.get(f"mma_load.{name}_port_cycles", 0.0) for name in ("alu", "fma", "mufu")}
    gap = {name: m.get(f"mma_load.{name}_gap_cycles", 0.0) for name in ("alu", "fma", "mufu")}
    memory = m.tensor_kind == "tcgen05"
    return Costs(
        pipe={name: pipe[name] for name in ("alu", "fma", "mufu", "shared")},
        beside={name: m.get(f"mma_load.{name}_cycles", pipe[name]) for name in ("alu", "fma", "mufu", "shared")},
        ports=ports,
        follows={name: max(ports[name], 1.0 + gap[name]) for name in ports},
        latency={
            "alu": m["alu.latency_cycles"], "fma": m["fma.latency_cycles"], "mufu": classes["mufu"],
            "shared": classes["shuffle"], "smem": classes["shared"], "global": classes["l2"],
        },
        convert=_LANES * PARTITIONS / m["cvt.f32x2_to_bf16x2_per_clk"],
        inputs=m["alu.minmax_inputs"] - 1.0,
        packed=m.get("fma.packed_f32x2", 0.0) > 0,
        shared_bytes=m["smem.bytes_per_clk"],
        shared_bytes_beside=m.get("smem.load_bytes_per_clk_under_mma", m["smem.bytes_per_clk"]),
        tensor_read=m["tmem.read_bytes_per_clk"] if memory else inf,
        tensor_write=m["tmem.write_bytes_per_clk"] if memory else inf,
        tensor_latency=m["tmem.idle_latency_cycles"] if memory else 0.0,
        global_bytes=m.get("l2.bytes_per_clk_per_sm_lockstep", m["tma.bytes_per_clk"]),
        barrier=m.get("sync.barrier_cycles", m["sync.named_barrier_cycles"]),
        fence=m["sync.fence_async_cycles"],
        mma_sync=2.0 * _MMA_SYNC / (m.get("tensor.mma_sync_flop_per_clk", m["tensor.fp16_flop_per_clk"]) / PARTITIONS),
        shares_ports=m.has("mma_load.mufu_port_cycles"),
    )  # fmt: skip


@dataclass(slots=True)
class _Stream:
    """A step on its unit: ``count`` instructions of a warp, ``each`` cycles apart, whose results come ``latency`` later."""

    #: "" for none.
    unit: str
    count: float
    each: float
    latency: float
    #: Whether who needs it needs all of it.
    whole: bool = False
    #: Cycles after the last result until the step is over: what a reduction does across its parts.
    tail: float = 0.0
    #: Whether nothing of the role goes past it: it begins after all before, and what comes after waits for it.
    holds: bool = False
    begin: float = 0.0
    end: float = 0.0


def registers(step: Step, warps: int) -> float:
    """Elements that a thread has of a tensor of the step's shape."""
    layout = linear_of(step.layout, step.shape) if step.layout is not None and step.shape else None
    if layout is not None:
        return float(2 ** sum(any(basis) for basis in layout.reg))
    return max(1.0, prod(step.shape) / (_LANES * warps))


def instructions(step: Step, warps: int, ctas: int) -> float:
    """Instructions of a warp for a step whose ``amount`` counts those of threads, or elements."""
    if not step.shape:
        return max(1.0, step.amount / (_LANES * warps))
    return max(0.5, registers(step, warps) * step.amount * ctas / prod(step.shape))


def _reduction(step: Step, warps: int, ctas: int, costs: Costs) -> list[_Stream]:
    """Within threads, then across the lanes and the warps that have parts of a row."""
    pipe, lat = ("fma" if step.pipe == "sum" else "alu"), costs.latency
    held, axis = instructions(step, warps, ctas), step.axis or 0
    layout = linear_of(step.layout, step.shape) if step.layout is not None else None
    if layout is not None:
        along = 2 ** sum(bool(basis[axis]) for basis in layout.reg)
        lanes, apart = (sum(bool(basis[axis]) for basis in bases) for bases in (layout.lane, layout.warp))
    elif len(step.shape) == 1:
        along, lanes, apart = int(held), _LANES.bit_length() - 1, int(warps > 1)
    else:
        # Where it is not known, a thread has its row.
        along, lanes, apart = min(int(held), step.shape[axis]), 0, 0
    left = max(1.0, held / max(1, along))
    inputs = costs.inputs if step.pipe == "max" else 1.0
    after = ceil(log(max(along, 1), inputs + 1.0) - 1e-9) * lat[pipe]
    if step.pipe == "combine" and lanes == _LANES.bit_length() - 1:
        # Integers of all lanes: one instruction (redux).
        lanes, after = 1, after + lat["shared"]
    else:
        after += lanes * (lat["shared"] + lat[pipe])
    if apart:
        # Warps meet over shared memory.
        after += 2 * lat["smem"] + costs.barrier
    found = [_Stream(pipe, max((held - left) / inputs, 0.5), costs.pipe[pipe], lat[pipe], True, after)]
    return [_Stream("shared", left * lanes, costs.pipe["shared"], 0.0, True), *found] if lanes else found


def _memory(step: Step, costs: Costs) -> _Stream | None:
    """Loads and stores; None for what is none.  The compiler waits for a load of tensor memory where it stands."""
    lat = costs.latency
    rates = {
        "tmem_load": (costs.tensor_read, costs.tensor_latency), "tmem_store": (costs.tensor_write, 0.0),
        "smem_load": (costs.shared_bytes, lat["smem"]), "smem_store": (costs.shared_bytes, lat["smem"]),
        "global_load": (costs.global_bytes, lat["global"]), "global_store": (costs.global_bytes, 0.0),
    }  # fmt: skip
    if step.pipe not in rates:
        return None
    rate, latency = rates[step.pipe]
    return _Stream(_PORTS[step.pipe], 1.0, step.amount / rate, latency, True)


def _streams(step: Step, warps: int, ctas: int, costs: Costs) -> list[_Stream]:
    """The instructions of a step, by unit, in their order."""
    pipe, lat, cycles = step.pipe, costs.latency, costs.pipe
    if pipe in ("max", "sum", "combine"):
        return _reduction(step, warps, ctas, costs)
    if pipe == "all":
        return [_Stream("", inf, 0.0, 0.0)]
    if pipe in ("barrier", "fence"):
        return [_Stream("issue", 1.0, 1.0, costs.barrier if pipe == "barrier" else costs.fence, True, holds=True)]
    if (memory := _memory(step, costs)) is not None:
        return [memory]
    if pipe == "mma":
        return [_Stream("mma", step.amount / _MMA_SYNC / warps, costs.mma_sync, lat["smem"])]
    count = instructions(step, warps, ctas)
    if pipe == "div":
        after = _DIVISION_FMA * lat["fma"]
        return [
            _Stream("mufu", count, cycles["mufu"], lat["mufu"]),
            _Stream("fma", _DIVISION_FMA * count, cycles["fma"], after),
        ]
    if pipe == "fma2":
        # As long on the pipe as two instructions; one of them where the machine has such.
        issued = 1.0 if costs.packed else 2.0
        return [_Stream("fma", issued * count, 2.0 / issued * cycles["fma"], lat["fma"])]
    if pipe == "cvt":
        return [_Stream("cvt", count, max(costs.convert, cycles["alu"]), lat["alu"])]
    # Two results of integer instructions are two instructions.
    unit, results = (pipe[:-1], 2.0) if pipe.endswith("2") else (pipe, 1.0)
    return [_Stream(unit, results * count, cycles[unit], lat[unit])]


def work_load(steps: Sequence[Step], warps: int, ctas: int, machine: Machine, hands_over: bool) -> Load:
    """The steps of one role between two synchronising operations.

    ``hands_over``: what comes next tells others (an arrival, a copy, a product), so that the last results have to be there; a wait is
    come to when the last instruction is issued.
    """
    # Numbers differ from lap to lap: what counts is which of the steps here one needs.
    place = {step.number: index for index, step in enumerate(steps)}
    alike = [step._replace(number=0, operands=tuple([place[n] for n in step.operands if n in place])) for step in steps]
    return _work_load(tuple(alike), warps, ctas, machine, hands_over)


@lru_cache(maxsize=4096)
def _work_load(steps: tuple[Step, ...], warps: int, ctas: int, machine: Machine, hands_over: bool) -> Load:
    costs = costs_of(machine)
    # Warps of a role on one sub-partition, which have their instructions in turn.
    abreast = max(1.0, warps / PARTITIONS)
    free: dict[str, float] = {}
    every: list[_Stream] = []
    #: Of each step its last stream.
    last: list[_Stream] = []
    loaded: _Stream | None = None
    floor = 0.0
    for step in steps:
        needed = [last[place] for place in step.operands]
        for part in _streams(step, warps, ctas, costs):
            if part.unit == "tmem_read" and loaded is not None:
                needed.append(loaded)
            begins, ends = floor, 0.0
            for source in needed:
                after = source.latency + source.tail
                waits = part.unit != "" and _needs_all(part, source)
                begins = max(begins, (source.end if waits else source.begin + source.each) + after)
                ends = max(ends, source.end + after)
            if part.holds:
                begins = max([begins, *(one.end for one in every)])
            needed = [part]
            if not part.unit:
                part.begin, part.end = begins, ends
                continue
            begins = max(begins, free.get(part.unit, 0.0))
            busy = part.count * part.each * (1.0 if part.unit in _OF_THE_SM else abreast)
            # What waits for its operands leaves the pipe to others meanwhile.
            free[part.unit] = begins + busy
            part.begin, part.end = begins, max(begins + busy, ends + part.each)
            floor = part.end + part.latency if part.holds else floor
            loaded = part if part.unit == "tmem_read" else loaded
            every.append(part)
        last.append(needed[0])
    return _load(every, abreast, costs, hands_over)


def _needs_all(part: _Stream, source: _Stream) -> bool:
    """Whether a stream can begin only when all of another one is there, not when its first result is."""
    return source.whole or source.count < part.count or part.unit in _OF_THE_SM


def _load(every: list[_Stream], abreast: float, costs: Costs, hands_over: bool) -> Load:
    alone: dict[str, float] = {"issue": 0.0}
    beside: dict[str, float] = {}
    own = fma = 0.0

    def takes(unit: str, cycles: float, slow: float) -> None:
        alone[unit] = alone.get(unit, 0.0) + cycles
        beside[unit] = beside.get(unit, 0.0) + slow

    for part in every:
        count = part.count * (1.0 if part.unit in _OF_THE_SM else abreast)
        alone["issue"] += count
        cycles, pipe = count * part.each, "alu" if part.unit == "cvt" else part.unit
        if part.unit == "cvt":
            takes("cvt", cycles, cycles)
            cycles = count * costs.pipe["alu"]
        if part.unit == "smem":
            takes("smem", cycles, cycles * costs.shared_bytes / costs.shared_bytes_beside)
        elif pipe in costs.beside:
            takes(pipe, cycles, cycles / costs.pipe[pipe] * costs.beside[pipe])
        elif part.unit != "issue":
            takes(part.unit, cycles, cycles)
        if costs.shares_ports and pipe in costs.ports:
            beside["ports"] = beside.get("ports", 0.0) + count * costs.ports[pipe]
            own += part.count * costs.follows[pipe]
        fma += count if part.unit == "fma" else 0.0
    beside["issue"] = alone["issue"]
    reached = max((part.end + (part.latency + part.tail if hands_over else 0.0) for part in every), default=0.0)
    least = max(reached, *alone.values(), 1e-9)
    demands = [tuple((unit, cycles) for unit, cycles in one.items() if cycles > 0.0) for one in (alone, beside)]
    return Load("work", demands[0], least, demands[1], max(least, own, *beside.values()), fma=fma)
