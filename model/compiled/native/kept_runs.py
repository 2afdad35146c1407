"""Simulated once, kept: what runs of loops at hand took, in tilecast's cache, by everything that a run depends on.

A run reads a loop's code, the tiles given to it, and of a machine only `SmFacts`: another power limit or number of SMs asks
for nothing new.  A file holds the runs of one loop, a line each, below a line that names the simulator they are of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

from tilecast.base.files import OutputError, cache_folder, write_text_atomically
from tilecast.model.compiled.code import KernelCode
from tilecast.model.compiled.costs import WarpCosts, mma_cycles, spill_costs, warp_costs
from tilecast.model.machine.machine import Machine

#: Folder of tilecast's cache.
FOLDER = "runs"
#: Bytes of a loop's file after which it is begun again; a run takes about 60.
_FULL = 1 << 20
#: Ends every line: one that a process left half-written says nothing.
_WHOLE = "."

Ends = tuple[float, ...]


# --- what a run reads of a machine --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class SmFacts:
    """All that a run reads of a machine at a clock; one object for machines that do not differ in it."""

    costs: WarpCosts
    #: Cycles of matrix products by (columns, A from registers).
    mma: dict[tuple[int, bool], float]
    digest: str


#: By digest; begun again when full.
_facts: dict[str, SmFacts] = {}
_MOST_FACTS = 4096


@lru_cache(maxsize=4096)
def sm_facts(code: KernelCode, machine: Machine, mhz: float, ctas: int) -> SmFacts:
    """What runs of ``code`` read of ``machine`` at ``mhz`` while ``ctas`` of its CTAs share the SM; MachineError as `warp_costs`."""
    costs, mma = spill_costs(warp_costs(machine, mhz), machine, code, ctas), _mma_table(code, machine)
    read = repr(([getattr(costs, f.name) for f in fields(costs)], sorted(mma.items())))
    digest = hashlib.sha256(read.encode()).hexdigest()
    if len(_facts) >= _MOST_FACTS:
        _facts.clear()
    return _facts.setdefault(digest, SmFacts(costs, mma, digest))


@lru_cache(maxsize=4096)
def _mma_table(code: KernelCode, machine: Machine) -> dict[tuple[int, bool], float]:
    kinds = {
        (i.amount, i.from_registers)
        for consumer in code.consumers
        for stretch in consumer
        for i in stretch.instructions
        if i.kind == "mma"
    }
    return {kind: mma_cycles(machine, *kind, code.dtype) for kind in kinds}


# --- the files ----------------------------------------------------------------------------------------------------


def kept_run(code: KernelCode, asked: object, simulate: Callable[[], Ends]) -> Ends:
    """The run of a loop at hand, simulated where it was not before; ``asked`` prints all that it depends on beside ``code``.

    Code that is no loop at hand (`KernelCode.digest` is empty) is simulated.
    """
    if not code.digest:
        return simulate()
    name = hashlib.sha256(repr(asked).encode()).hexdigest()[:20]
    known = _read(code.digest)
    found = known.get(name)
    if found is None:
        found = known[name] = simulate()
        _append(code.digest, f"\n{name} {' '.join(map(repr, found))} {_WHOLE}")
    return found


def _path(digest: str) -> Path:
    return cache_folder(FOLDER) / f"{digest}.txt"


@lru_cache(maxsize=1024)
def _read(digest: str) -> dict[str, Ends]:
    known: dict[str, Ends] = {}
    try:
        simulator, *lines = _path(digest).read_text(encoding="ascii").split("\n")
    except (OSError, ValueError):
        return known
    if simulator != _simulator():
        return known
    for line in lines:
        name, *ends = line.split(" ")
        if ends and ends[-1] == _WHOLE:
            known[name] = tuple(map(float, ends[:-1]))
    return known


def _append(digest: str, line: str) -> None:
    """Where it can be: a cache that cannot be written is none."""
    path = _path(digest)
    try:
        if not _goes_on(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(path, _simulator())
        with path.open("a", encoding="ascii") as file:
            file.write(line)
    except (OSError, OutputError):
        return


def _goes_on(path: Path) -> bool:
    """Whether a file is of this simulator and has room."""
    try:
        with path.open(encoding="ascii") as file:
            return file.readline().rstrip("\n") == _simulator() and path.stat().st_size < _FULL
    except (OSError, ValueError):
        return False


@lru_cache(maxsize=1)
def _simulator() -> str:
    """First 16 hex digits of SHA-256 over what simulates."""
    digest = hashlib.sha256()
    for path in sorted(path for path in Path(__file__).parents[1].rglob("*") if path.suffix in (".py", ".c")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
