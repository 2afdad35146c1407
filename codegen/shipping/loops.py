"""Loops of machine code (`data/loops`, and the user's own): which are wanted, made with the compiler at hand, written down.

For every head dimension, mask and width of elements that the generated Hopper kernels serve, the loops of kernels that ship and
those that the search before compilation puts first for a short, a middling and a long problem of the same number of tokens: a
variant that it puts behind those is rarely the best (docs/machine-code.md).
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from tilecast.base.data import LOOP_TARGETS, LOOPS
from tilecast.base.files import cache_folder, write_text_atomically
from tilecast.base.pool import spread
from tilecast.base.progress import Progress, reported, silent
from tilecast.codegen.compiler.compile import CompileError
from tilecast.codegen.compiler.kept import FOLDER, kept_profile
from tilecast.codegen.compiler.profile import compiler_name
from tilecast.codegen.generate import generate
from tilecast.codegen.render import BEST_ALLOCATION
from tilecast.codegen.shipping.ship import read_e4m3_list, read_list
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.compiled.loops.shelf import (
    DTYPES,
    KeptLoop,
    forget,
    loop_of,
    loops_at_hand,
    own_loops,
    shelf_text,
    shelved,
)
from tilecast.model.families import find_family, native_family, parse_variant
from tilecast.model.kernel.header import without_header
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, load_machine
from tilecast.model.search.best import search_space
from tilecast.model.search.rank import rank

MACHINE = "h200-sxm"
#: (dtype, head dimensions, mask) that kernels are generated for: all masks in 16 bits, no windows in e4m3.
MASKS = ("none", "causal", "window")
SERVED = (
    *(("bf16", dims, mask) for dims in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)) for mask in MASKS),
    *(("fp8", dims, mask) for dims in ((64, 64), (128, 128), (256, 256)) for mask in ("none", "causal")),
)
_WINDOW = (1024, 0)
#: (rows, batch) of the problems, 32 heads.
_PROBLEMS = ((4096, 4), (1024, 16), (16384, 1))
#: Family -> loops of a dtype, head dimension and mask, and how far behind the first they may be.  Of 38 measured shapes the
#: fastest kernel's loop was always among the first twelve, and never more than 4 % behind the first.
SHIPPED: dict[str, tuple[int, float]] = {"fa3": (20, 0.88)}


Wanted = tuple[Workload, Variant]


def problem(dtype: str, dims: tuple[int, int], mask: str, rows: int = 4096, batch: int = 4) -> Workload:
    """A problem that loops are chosen for."""
    return Workload(batch, 32, 32, rows, rows, *dims, mask, _WINDOW if mask == "window" else None, dtype)


def wanted() -> Iterator[Wanted]:
    """The kernels that ship, one a loop."""
    machine = load_machine(MACHINE)
    for family, (most, behind) in SHIPPED.items():
        for served in SERVED:
            problems = [problem(*served, rows, batch) for rows, batch in _PROBLEMS]
            first = _first(problems, machine, family, most, behind)
            found = {loop_of(variant): variant for variant in (*_shipped(family, *served), *first)}
            for variant in found.values():
                yield problem(*served), variant


def _shipped(family: str, dtype: str, dims: tuple[int, int], mask: str) -> Iterator[Variant]:
    """Variants of ``family`` in the list of kernels that ship."""
    for kernel in (*read_list(), *read_e4m3_list()):
        work = kernel.workload
        at = (find_family(kernel.family).name, work.dtype, (work.head_dim_qk, work.head_dim_v), work.mask)
        if at == (family, dtype, dims, mask):
            yield parse_variant(f"family={family},{kernel.variant}")


def _first(problems: Iterable[Workload], machine: Machine, family: str, most: int, behind: float) -> list[Variant]:
    """A variant of each of the ``most`` loops that come first in any of the problems."""
    first: dict[Variant | None, Variant] = {}
    score: dict[Variant | None, float] = {}
    for work in problems:
        space = search_space(work, machine, family).variants
        ranking = rank(space, work, machine, clock="short", keep=most, group=loop_of)
        fastest = ranking.best[0].seconds or 0.0
        for entry in ranking.best:
            loop = loop_of(entry.variant)
            first.setdefault(loop, entry.variant)
            score[loop] = max(score.get(loop, 0.0), fastest / (entry.seconds or 1.0))
    ordered = sorted(score, key=lambda name: -score[name])[:most]
    return [first[loop] for loop in ordered if score[loop] >= behind]


def source_hash(work: Workload, variant: Variant) -> str:
    """Of what a compiler reads of the kernel's source as it is generated now."""
    source = generate(work, load_machine(MACHINE), find_family(variant.family), variant, compiler=None).source
    return hashlib.sha256(compiled_text(source).encode()).hexdigest()[:16]


def compiled_text(source: str) -> str:
    """Constants of a Gluon file and the functions that Gluon compiles: without header, imports, the host side, and the option that
    makes later releases allocate registers as the oldest, which compiles the loops, does of itself (a test compiles both)."""
    source = without_header(source).replace(f", {BEST_ALLOCATION}", "")
    lines, kept = source.splitlines(), []
    for node in ast.parse(source).body:
        marks = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        if isinstance(node, ast.Assign) or any(ast.unparse(mark).startswith("gluon.") for mark in marks):
            kept += lines[min([node.lineno, *(mark.lineno for mark in marks)]) - 1 : node.end_lineno]
    return "\n".join(kept)


def make(job: Wanted) -> KeptLoop:
    """Compile a kernel, or find it among those compiled before; CompileError where its code is not read."""
    work, variant = job
    template = find_family(variant.family).template
    made = kept_profile(template, variant, work, load_machine(MACHINE), str(cache_folder(FOLDER)))
    if made.code is None:
        raise CompileError(f"{work.label()}: the machine code of {variant} cannot be read: {made.unread}")
    return KeptLoop(source_hash(work, variant), made.code)


def write(path: Path = LOOPS, workers: int = 0, progress: Progress = silent) -> int:
    """Write the file of loops with the compiler that made it, by ``workers`` processes (0: one a core); returns how many.

    What is at hand from the same source and compiler is not compiled again.  Raises CompileError, and writes nothing, where another
    compiler made the file than is installed, or none is: all loops would be compiled again, and no longer be those that forecasts
    were judged by.  Where there is no file any compiler makes it.
    """
    _same_compiler(path)
    jobs = list(wanted())
    known = [_at_hand(job) for job in jobs]
    missing = [job for job, loop in zip(jobs, known, strict=True) if loop is None]
    made = reported(spread(make, missing, workers), "compile", len(missing), progress)
    loops = [*made, *(loop for loop in known if loop is not None)]
    write_text_atomically(path, shelf_text(loops))
    return len(loops)


def _same_compiler(path: Path) -> None:
    """CompileError where the loops in ``path`` are of another compiler than the one installed."""
    made_by = sorted({loop.code.compiler for loop in shelved(path)})
    try:
        installed = compiler_name()
    except PackageNotFoundError:
        installed = "none"
    if made_by and made_by != [installed]:
        raise CompileError(
            f"{path}: cannot write its loops with another compiler: expected {' and '.join(made_by)}, which made them, got {installed}: "
            f"put {' or '.join(made_by)} first on PYTHONPATH, or remove the file to have all of them compiled anew"
        )


def _at_hand(job: Wanted) -> KeptLoop | None:
    """The loop of a kernel as today's generator and compiler make it, where it was made before."""
    work, variant = job
    found = loops_at_hand(work, load_machine(MACHINE)).get(loop_of(variant))
    if found is None or found.code.compiler != compiler_name():
        return None
    return found if found.source_hash == source_hash(work, parse_variant(found.code.variant)) else None


def add(
    work: Workload, machine: Machine, family: str | None = None, most: int = 6, variant: Variant | None = None,
    workers: int = 0, progress: Progress = silent,
) -> tuple[list[KeptLoop], int, Path]:  # fmt: skip
    """Compile the loop of ``variant``, or the ``most`` loops that come first for ``work`` before compilation, into the user's
    file of loops, where every forecast finds them: (the new ones, how many were at hand, the file).

    Raises PredictError for a dtype or target whose loops are not kept and for a kernel that cannot run, CompileError where
    no compiler is installed, VariantError for a kernel that cannot be written, OutputError where the file cannot be.
    """
    work = work.reduced()
    name = variant.family if variant is not None else family or native_family(machine).name
    if machine.arch not in LOOP_TARGETS or work.dtype not in DTYPES:
        raise PredictError(
            f"loops are kept of {', '.join(DTYPES[:-1])} and {DTYPES[-1]} kernels for {', '.join(LOOP_TARGETS)}, got {work.dtype} on {machine.name} ({machine.arch})"
        )
    variants = [variant] if variant is not None else _first([work], machine, name, most, 0.0)
    if any(loop_of(v) is None for v in variants):
        raise PredictError(f"loops of {name} are not kept: expected a variant of fa3 or fa2")
    known = loops_at_hand(work, machine)
    jobs = [(work, v) for v in variants if loop_of(v) not in known]
    made = list(reported(spread(make, jobs, workers), "compile", len(jobs), progress))
    path = own_loops()
    if made:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, shelf_text([*shelved(path), *made]))
        forget()
    return made, len(variants) - len(jobs), path
