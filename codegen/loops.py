"""The loops that ship (`data/loops`): which they are, made with the compiler at hand, and whether they are current.

For every head dimension and mask that the generated Hopper kernels serve, the loops that the search before compilation puts
first for a short, a middling and a long problem of the same number of tokens: a variant that it puts behind those is rarely
the best (docs/machine-code.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from tilecast.base.data import LOOPS
from tilecast.base.files import cache_folder, write_text_atomically
from tilecast.base.pool import spread
from tilecast.base.progress import Progress, reported, silent
from tilecast.codegen.compiler.compile import CompileError
from tilecast.codegen.compiler.kept import FOLDER, kept_profile
from tilecast.codegen.generate import generate
from tilecast.model.compiled.loops.shelf import KeptLoop, loop_of, shelf_text
from tilecast.model.families import find_family
from tilecast.model.kernel.header import without_header
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.search.best import search_space
from tilecast.model.search.rank import rank

FAMILY, MACHINE = "fa3", "h200-sxm"
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
MASKS = ("none", "causal", "window")
_WINDOW = (1024, 0)
#: (rows, batch) of the problems, 32 heads.
_PROBLEMS = ((4096, 4), (1024, 16), (16384, 1))
#: Loops of a head dimension and mask, and how far behind the first they may be.
_MOST, _BEHIND = 6, 0.965

Wanted = tuple[Workload, Variant]


def problem(dims: tuple[int, int], mask: str, rows: int = 4096, batch: int = 4) -> Workload:
    """A problem that loops are chosen for."""
    return Workload(batch, 32, 32, rows, rows, *dims, mask, _WINDOW if mask == "window" else None)


def wanted() -> Iterator[Wanted]:
    """The kernels that ship, one a loop."""
    machine = load_machine(MACHINE)
    for dims in HEAD_DIMS:
        for mask in MASKS:
            first: dict[Variant | None, Variant] = {}
            score: dict[Variant | None, float] = {}
            for rows, batch in _PROBLEMS:
                work = problem(dims, mask, rows, batch)
                space = search_space(work, machine, FAMILY).variants
                ranking = rank(space, work, machine, clock="short", keep=_MOST, group=loop_of)
                fastest = ranking.best[0].seconds or 0.0
                for entry in ranking.best:
                    loop = loop_of(entry.variant)
                    first.setdefault(loop, entry.variant)
                    score[loop] = max(score.get(loop, 0.0), fastest / (entry.seconds or 1.0))
            for loop in sorted(score, key=lambda name: -score[name])[:_MOST]:
                if score[loop] >= _BEHIND:
                    yield problem(dims, mask), first[loop]


def source_hash(work: Workload, variant: Variant) -> str:
    """Of the kernel's source as it is generated now, without its header."""
    source = generate(work, load_machine(MACHINE), find_family(FAMILY), variant).source
    return hashlib.sha256(without_header(source).encode()).hexdigest()[:16]


def make(job: Wanted) -> KeptLoop:
    """Compile a kernel, or find it among those compiled before; CompileError where its code is not read."""
    work, variant = job
    template = find_family(FAMILY).template
    made = kept_profile(template, variant, work, load_machine(MACHINE), str(cache_folder(FOLDER)))
    if made.code is None:
        raise CompileError(f"{work.label()}: the machine code of {variant} cannot be read: {made.unread}")
    return KeptLoop(source_hash(work, variant), made.code)


def write(path: Path = LOOPS, workers: int = 0, progress: Progress = silent) -> int:
    """Write the file of loops with the compiler at hand, by ``workers`` processes (0: one a core); returns how many."""
    jobs = list(wanted())
    loops = list(reported(spread(make, jobs, workers), "compile", len(jobs), progress))
    write_text_atomically(path, shelf_text(zip((work for work, _ in jobs), loops, strict=True)))
    return len(loops)
