"""`run_ctas`: what `run_sm` does, in C where a compiler is at hand (`sm.c`), else in Python; the digits are the same."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilecast.base.native import load_native
from tilecast.base.same import Same
from tilecast.model.compiled.code import KINDS, PIPES, WarpInstruction
from tilecast.model.compiled.costs import WarpCosts
from tilecast.model.compiled.native.layout import COPY, CTA, INSTRUCTION, OWN, PIECE, PROGRAM, Facts
from tilecast.model.compiled.sm import Cta, SmRun, run_sm
from tilecast.model.compiled.units.fetch import LINE, FetchCosts, InstructionCache, fetch_costs
from tilecast.model.compiled.units.prepared import IssueCosts, prepare
from tilecast.model.compiled.units.steps import Piece, Program, Tag
from tilecast.model.compiled.units.wgmma import PORT_LEFT

_SOURCE = Path(__file__).with_name("sm.c")
#: Kinds whose instructions carry tags, in the order of sm.c.
_TAGGED = ("wait", "arrive", "load")
_NO_TAG, _TURN = -1, -2
Products = dict[tuple[int, bool], float]


def library() -> ctypes.CDLL | None:
    """sm.c as a library; None where there is no compiler."""
    return load_native(_SOURCE)


def run_ctas(ctas: Sequence[Cta], costs: WarpCosts, mma: Products) -> SmRun:
    """What `run_sm` returns and raises."""
    native = library()
    found = _run(native, ctas, costs, mma) if native is not None else None
    # What cannot go on there cannot here either, and here says why.
    return run_sm(ctas, costs, mma) if found is None else found


# --- instructions -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Code as sm.c takes it: distinct instructions, and which of them each is."""

    instructions: tuple[WarpInstruction, ...]
    code: NDArray[np.int32]
    marks: int
    words: int


@lru_cache(maxsize=1024)
def _stretch(code: Same[Sequence[WarpInstruction]]) -> _Stretch:
    numbers: dict[WarpInstruction, int] = {}
    ids = np.array([numbers.setdefault(instruction, len(numbers)) for instruction in code.value], np.int32)
    words = max((i.word + 1 for i in numbers), default=0)
    return _Stretch(tuple(numbers), ids, sum(i.kind == "mark" for i in code.value), words)


_SharedCosts = tuple[Same[dict[str, Any]], ...]


@lru_cache(maxsize=4096)
def _costs_of(
    stretch: Same[_Stretch], costs: _SharedCosts, mma: tuple[tuple[tuple[int, bool], float], ...]
) -> NDArray[Any]:
    """A row for each of the distinct instructions: the same at every clock, and for all machines with the same issue costs."""
    products, issue, rows = dict(mma), IssueCosts(*(part.value for part in costs)), []
    for i in stretch.value.instructions:
        p = prepare(i, issue, products)
        rows.append((
            p.taken, p.taken_under_mma, p.slot, p.stall, p.latency, p.mma_cycles, p.port, p.hold, p.pipe, i.waits, p.write_counter,
            p.read_counter, KINDS.index(p.kind), p.conditional, p.amount, p.commits, not p.from_registers, p.word,
        ))  # fmt: skip
    return np.array(rows, INSTRUCTION)


# --- programs -----------------------------------------------------------------------------------------------------


def _pieces(cta: Cta) -> list[tuple[Piece, ...]]:
    """Its programs in pieces; one that is written out step by step has a piece a step."""
    found = []
    for w, program in enumerate(cta.programs):
        if isinstance(program, Program) and not cta.lines:
            found.append(program.pieces)
            continue
        lines: Iterable[int] = cta.lines[w] if cta.lines else [0] * len(program)
        found.append(tuple(
            Piece((instruction,), line * LINE, {instruction.kind: [tag]})
            for (instruction, tag), line in zip(program, lines, strict=True)
        ))  # fmt: skip
    return found


class _Tags:
    """Numbers of the tags of a run: name by name, ``stride`` apart."""

    def __init__(self, copies: Iterable[Tag], own: Iterable[str], programs: Iterable[Sequence[Piece]]) -> None:
        tags = list(copies)
        tags += [tag for held in programs for p in held for some in p.tags.values() for tag in some if tag is not None]
        names = [name for name, _ in tags] + list(own)
        self.names = {name: i for i, name in enumerate(dict.fromkeys(names))}
        self.stride = 1 + max((number for _, number in tags), default=0)

    def number(self, tag: Tag | None) -> int:
        """Of a tag, as sm.c knows it."""
        if tag is None:
            return _NO_TAG
        return _TURN if tag[0] == "turn" else self.names[tag[0]] * self.stride + tag[1]


class _Lines:
    """Lines of the programs' code numbered without wide gaps; lines that do not follow each other still do not."""

    def __init__(self, programs: Sequence[Sequence[Piece]], costs: FetchCosts) -> None:
        self.cache = InstructionCache([_last_runs(pieces) for pieces in programs], costs)
        self.numbers: dict[int, int] = {}
        last, number = -1, -1
        for line in sorted({line for lines in {p.lines for pieces in programs for p in pieces} for line in lines}):
            number += 1 if line == last + 1 else 2
            self.numbers[line] = number
            last = line

    def begin(self, piece: Piece) -> int:
        """Where a piece's code begins, in instructions."""
        return self.numbers[piece.begin // LINE] * LINE + piece.begin % LINE

    @cached_property
    def known(self) -> NDArray[np.uint8]:
        """Which numbers are lines, with room for one after the last."""
        known = np.zeros(max(self.numbers.values(), default=0) + 2, np.uint8)
        known[list(self.numbers.values())] = 1
        return known

    @cached_property
    def held(self) -> NDArray[np.int32]:
        """Lines in the first cache at the start, the least recently used first; sm.c reads them only."""
        return np.array([self.numbers[line] for line in self.cache.held()], np.int32)


def _last_runs(pieces: Sequence[Piece]) -> list[int]:
    """Lines of a program in the order in which it runs them for the last time."""
    seen: set[range] = set()
    lines: dict[int, None] = {}
    for piece in reversed(pieces):
        if piece.lines not in seen:
            seen.add(piece.lines)
            lines.update(dict.fromkeys(reversed(piece.lines)))
    return list(reversed(lines))


# --- the run ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Written:
    """Programs as sm.c takes them, whatever their instructions cost; the numbers of their tags, and their lines where fetched."""

    stretches: tuple[_Stretch, ...]
    code: NDArray[np.int32]
    pieces: NDArray[Any]
    tags: NDArray[np.int32]
    #: By program, in order: its first piece, how many, and how many marks it has.
    spans: list[tuple[int, int, int]]
    words: int
    number: _Tags
    lines: _Lines | None

    def table(self, costs: WarpCosts, mma: Products) -> NDArray[Any]:
        """What the instructions of the stretches cost."""
        shared = tuple(Same(getattr(costs, name)) for name in IssueCosts._fields)
        return np.concatenate([_costs_of(Same(one), shared, tuple(mma.items())) for one in self.stretches])


def _written(
    by_cta: Sequence[Sequence[Sequence[Piece]]], has_lines: bool, copies: Iterable[Tag], own: Iterable[str],
    fetch: FetchCosts,
) -> _Written:  # fmt: skip
    programs = [pieces for of_cta in by_cta for pieces in of_cta]
    lines = _Lines(programs, fetch) if has_lines else None
    if lines is not None and not lines.cache.needed:
        lines = None
    number = _Tags(copies, own, programs)
    known: dict[int, tuple[int, _Stretch]] = {}
    codes: list[NDArray[np.int32]] = []
    rows: list[tuple[Any, ...]] = []
    tags: list[int] = []
    spans = []
    room = instructions = words = 0
    for pieces in programs:
        first, marks = len(rows), 0
        for piece in pieces:
            if id(piece.code) not in known:
                stretch = _stretch(Same(piece.code))
                known[id(piece.code)] = room, stretch
                codes.append(stretch.code + np.int32(instructions))
                room, instructions = room + len(stretch.code), instructions + len(stretch.instructions)
                words = max(words, stretch.words)
            at, stretch = known[id(piece.code)]
            marks += stretch.marks
            offsets, counts = [], []
            for kind in _TAGGED:
                held = piece.tags.get(kind, ())
                offsets.append(len(tags))
                counts.append(len(held))
                tags.extend(map(number.number, held))
            rows.append((at, len(piece.code), lines.begin(piece) if lines else 0, offsets, counts))
        spans.append((first, len(rows) - first, marks))
    return _Written(
        tuple(stretch for _, stretch in known.values()), np.concatenate(codes), np.array(rows, PIECE),
        np.array([*tags, 0], np.int32), spans, words, number, lines,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _written_once(
    programs: tuple[tuple[Same[Program], ...], ...], copies: tuple[Tag, ...], own: tuple[str, ...], fetch: FetchCosts
) -> _Written:
    """The same programs are run from more than one start, and on machines that differ in a fact."""
    return _written([[program.value.pieces for program in of_cta] for of_cta in programs], True, copies, own, fetch)


def _run(native: ctypes.CDLL, ctas: Sequence[Cta], costs: WarpCosts, mma: Products) -> SmRun | None:
    """The run, or None where sm.c gave up."""
    by_cta = [_pieces(cta) for cta in ctas]
    programs = [pieces for of_cta in by_cta for pieces in of_cta]
    if not any(programs):
        return None
    tags = tuple(copy[0] for cta in ctas for copy in cta.copies)
    names = tuple(name for cta in ctas for name in cta.own_copies)
    if all(isinstance(p, Program) and not cta.lines for cta in ctas for p in cta.programs):
        known = tuple(tuple(Same(p) for p in cta.programs if isinstance(p, Program)) for cta in ctas)
        written = _written_once(known, tags, names, fetch_costs(costs))
    else:
        has_lines = all(cta.lines or all(isinstance(p, Program) for p in cta.programs) for cta in ctas)
        written = _written(by_cta, has_lines, tags, names, fetch_costs(costs))
    number, lines = written.number, written.lines
    facts = _facts(ctas, costs, number, lines, len(programs), written.words)
    rows, owners, marks = [], [], 0
    spans = iter(written.spans)
    for i, cta in enumerate(ctas):
        for w in range(len(cta.programs)):
            first, count, held = next(spans)
            rows.append((i, w, first, count, marks, lines is not None, cta.begins))
            owners.append((marks, marks + held))
            marks += held
    at, copies, own, cta_rows = 0, [], [], []
    for i, cta in enumerate(ctas):
        cta_rows.append((len(cta.programs), at, len(cta.copies), i * len(number.names), cta.begins))
        at += len(cta.copies)
        copies += [
            (size, latency, share, number.number(tag), tag[1], slots, tag[0].startswith("Q"))
            for tag, size, slots, latency, share in cta.copies
        ]
        own += [cta.own_copies.get(name, (0.0, 0.0, 0.0)) for name in number.names]
    reached, busy = np.zeros(marks + 1), np.zeros(len(PIPES))
    end, instructions = ctypes.c_double(0.0), ctypes.c_int64(0)
    nothing = np.zeros(2, np.uint8)
    arrays = (
        written.table(costs, mma), written.code, written.pieces, written.tags, np.array(rows, PROGRAM), np.array(cta_rows, CTA),
        np.array(copies, COPY), np.array(own, OWN), nothing if lines is None else lines.known,
        np.zeros(1, np.int32) if lines is None else lines.held, reached,
    )  # fmt: skip
    if native.run_sm(
        ctypes.byref(facts), *(ctypes.c_void_p(a.ctypes.data) for a in arrays), ctypes.byref(end),
        ctypes.byref(instructions), ctypes.c_void_p(busy.ctypes.data),
    ):  # fmt: skip
        return None
    shares = dict(zip(PIPES, busy.tolist(), strict=True))
    times = reached.tolist()
    return SmRun(tuple(tuple(times[a:b]) for a, b in owners), end.value, shares["tensor"], instructions.value, shares)


def _facts(
    ctas: Sequence[Cta], costs: WarpCosts, number: _Tags, lines: _Lines | None, programs: int, words: int
) -> Facts:
    c = costs
    known = len(lines.known) - 1 if lines else 0
    return Facts(
        c.operand_release, c.barrier, c.barrier_spread, c.handover, c.one_way, c.mma_latency, c.mma_fetch, c.mma_beside_copy,
        PORT_LEFT, c.tma_issue, c.tma_bytes_per_clk, c.memory_bytes_per_clk, c.store_bytes_per_clk, c.store_queue_bytes, c.reload_latency,
        lines.cache.cycles if lines else 0.0, c.mma_queue, c.spill_words, lines.cache.room if lines else 0, len(ctas),
        programs, number.stride, len(number.names), words, known, lines is not None, len(lines.held) if lines else 0,
    )  # fmt: skip
