"""Programs for `sm.run_sm`: a kernel's stretches repeated as a tile needs them, every wait and arrival given its meaning.

Which barrier an instruction is about follows from the order the templates write them in (codegen/templates):
`hopper_ws` polls K of the next block, then V of this one, and releases in the same order; `triton` issues its own copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tilecast.base.same import Same
from tilecast.model.compiled.code import CodeError, KernelCode, Stretch, WarpInstruction
from tilecast.model.compiled.costs import WarpCosts
from tilecast.model.compiled.sm import MARK, Cta
from tilecast.model.compiled.units.fetch import LINE
from tilecast.model.compiled.units.steps import Piece, Program, Tag
from tilecast.model.kernel.variants.fa2 import Fa2Variant
from tilecast.model.kernel.variants.fa3 import Fa3Variant
from tilecast.model.kernel.workload import DTYPES

_MARK = (MARK,)


@dataclass(frozen=True, slots=True)
class TileCounts:
    """Blocks of keys one warpgroup takes in for one tile: passed over before, on the right edge, whole, on the left edge,
    passed over after.  The first block counts to none of them: it is in the code before the loops (`hopper_ws`)."""

    passed: int = 0
    edge: int = 0
    main: int = 0
    left: int = 0
    passed_after: int = 0

    def blocks(self, first: int) -> int:
        """Blocks of the ring the tile uses; ``first`` is 1 where the first block stands before the loops."""
        return self.passed + self.edge + self.main + self.left + self.passed_after + first

    def as_tuple(self) -> tuple[int, int, int, int, int]:
        """Its fields in order."""
        return self.passed, self.edge, self.main, self.left, self.passed_after


class _Writer:
    """A program being written."""

    def __init__(self, stretches: Sequence[Stretch], copy: int) -> None:
        self.pieces: list[Piece] = []
        self._stretches = stretches
        # Copies of the code lie apart; stretches follow each other.
        self._begins = [copy << 20]
        for stretch in stretches:
            self._begins.append(self._begins[-1] + len(stretch.instructions))

    def run(self, at: int, tags: dict[str, list[Tag | None]]) -> None:
        """Append stretch number ``at``."""
        if self._stretches[at].instructions:
            self.pieces.append(Piece(self._stretches[at].instructions, self._begins[at], tags))

    def append(self, code: Sequence[WarpInstruction]) -> None:
        """Append instructions that are not the kernel's: they are on the line of the one before."""
        self.pieces.append(Piece(code, LINE * self.pieces[-1].lines[-1], {}))

    def program(self) -> Program:
        return Program(tuple(self.pieces))


def _count(code: Sequence[WarpInstruction], kind: str) -> int:
    return _kinds(Same(code)).get(kind, 0)


@lru_cache(maxsize=1024)
def _kinds(code: Same[Sequence[WarpInstruction]]) -> dict[str, int]:
    return Counter(i.kind for i in code.value)


# --- hopper_ws ------------------------------------------------------------------------------------------------


def hopper_cta(
    code: KernelCode, variant: Fa3Variant, tiles: Sequence[Sequence[TileCounts]], costs: WarpCosts, cold: bool,
    share: float = 0.0, together: bool = False,
) -> Cta:  # fmt: skip
    """A CTA that does ``tiles`` one after the other; ``tiles[i][w]`` is what warpgroup w does in tile i.

    ``share`` of the K and V bytes come from memory, the rest from L2; ``together`` starts the warpgroups at one time.
    """
    programs = tuple(
        _hopper_program(Same(code.consumers[w]), variant, w, tuple(tile[w] for tile in tiles))
        for w in range(variant.warpgroups)
    )
    size = DTYPES[code.dtype]
    k_bytes = float(variant.tile_n * code.head_dim_qk * size)
    v_bytes = float(variant.tile_n * code.head_dim_v * size)
    q_bytes = float(64 * code.head_dim_qk * size)  # every warpgroup's part has a barrier of its own
    copies: list[tuple[Tag, float, int, float, float]] = []
    block = 0
    for number, tile in enumerate(tiles):
        for step in range(tile[0].blocks(1)):
            latency = costs.tma_latency_hbm if cold and number == 0 and step == 0 else costs.tma_latency
            copies.append((("K", block), k_bytes, variant.kv_stages, latency, share))
            if step == 0:
                for w in range(variant.warpgroups):
                    # Together: all parts of Q land when the last does.
                    parts = 1 if not together else variant.warpgroups if w == 0 else 0
                    copies.append(((f"Q{w}", number), parts * q_bytes, variant.q_stages, costs.tma_latency_hbm, 1.0))
            copies.append((("V", block), v_bytes, variant.kv_stages, latency, share))
            block += 1
    return Cta(programs, tuple(copies))


@lru_cache(maxsize=512)
def _hopper_program(
    code_of: Same[tuple[Stretch, ...]], variant: Fa3Variant, warpgroup: int, tiles: tuple[TileCounts, ...]
) -> Program:
    """Kept: the same CTA is run from more than one start, and on machines that differ in a fact."""
    stretches = code_of.value
    query = f"Q{warpgroup}"
    turn: list[Tag | None] = [("turn", 0)] if variant.ping_pong and variant.warpgroups > 1 else []
    steps = _Writer(stretches, warpgroup)
    block = 0
    for number, counts in enumerate(tiles):
        begun = False  # the tile's first block has been seen
        looped = False
        gave_q = False
        left = counts.edge + counts.main + counts.left
        for at, (role, code) in enumerate(stretches):
            if role == "pass":
                times = counts.passed_after if looped else counts.passed if not begun else 0
                for _ in range(times):
                    ring: list[Tag | None] = [("K", block), ("V", block)]
                    steps.run(at, {"wait": ring + turn, "arrive": ring + turn})
                    block += 1
            elif role in ("edge", "main", "left"):
                looped = True
                for _ in range(getattr(counts, role)):
                    left -= 1
                    steps.run(at, _loop_tags(code, variant, block, turn, (query, number) if left == 0 else None))
                    gave_q = gave_q or (left == 0 and _gives_q(code, variant, turn))
                    block += 1
            elif not looped:
                waits = _count(code, "wait")
                if waits:
                    begun = True
                first: list[Tag | None] = [(query, number), ("K", block)]
                steps.run(at, {"wait": first[-waits:] if waits < 2 else first, "arrive": [("K", block)]})
            else:
                last: list[Tag | None] = [("V", block)]
                if _count(code, "arrive") > _count(code, "wait"):
                    last = [None if gave_q else (query, number), *last]
                    gave_q = True
                steps.run(at, {"wait": [("V", block)], "arrive": last})
                if _count(code, "wait"):
                    block += 1
        steps.append(_MARK)
    return steps.program()


def _gives_q(code: Sequence[WarpInstruction], variant: Fa3Variant, turn: list[Tag | None]) -> bool:
    """Whether a loop body holds the release of Q, which takes effect in the tile's last block."""
    return _count(code, "arrive") > 2 + len(turn)


def _loop_tags(
    code: Sequence[WarpInstruction], variant: Fa3Variant, block: int, turn: list[Tag | None], query: Tag | None
) -> dict[str, list[Tag | None]]:
    following: Tag = ("K", block + 1)
    mine: Tag = ("V", block)
    operands = [mine, following] if _values_first(Same(code)) else [following, mine]
    let_go: list[Tag | None] = [*turn, *operands] if variant.overlap else [*operands, *turn]
    if _gives_q(code, variant, turn):
        at = let_go.index(following) + 1 if variant.overlap else len(let_go)
        let_go = [*let_go[:at], query, *let_go[at:]]
    return {"wait": [*turn, *operands], "arrive": let_go}


@lru_cache(maxsize=1024)
def _values_first(code: Same[Sequence[WarpInstruction]]) -> bool:
    """Whether a loop body multiplies P (from registers) by V before it multiplies Q (shared memory) by K, as e4m3 kernels do that
    add up P V outside the matrix unit."""
    return next((i.from_registers for i in code.value if i.kind == "mma"), False)


# --- triton ---------------------------------------------------------------------------------------------------


def triton_cta(
    code: KernelCode, variant: Fa2Variant, counts: TileCounts, tiles: int, pause: float, costs: WarpCosts, begins: float,
    share: float = 0.0,
) -> Cta:  # fmt: skip
    """A slot of the SM that runs ``tiles`` CTAs after each other with ``pause`` cycles between them."""
    stretches = code.consumers[0]
    writer = _Writer(stretches, 0)
    block = 0
    for number in range(tiles):
        block = _triton_tile(stretches, counts, number, block, writer)
        writer.append(_MARK)
        if pause:
            # An instruction that does nothing for as long.
            writer.append(_nothing(max(1, int(pause))))
    size = DTYPES[code.dtype]
    k_bytes = float(variant.tile_n * code.head_dim_qk * size)
    v_bytes = float(variant.tile_n * code.head_dim_v * size)
    q_bytes = float(variant.tile_m * code.head_dim_qk * size)
    groups = len(code.consumers)
    # Every warpgroup runs the same code; one thread of the CTA issues the copies.
    program = writer.program()
    quiet = Program(tuple(_quiet(piece) for piece in program.pieces))
    own = {
        "K": (k_bytes, costs.tma_latency, share), "V": (v_bytes, costs.tma_latency, share),
        "Q": (q_bytes, costs.tma_latency_hbm, 1.0),
    }  # fmt: skip
    return Cta((program, *[quiet] * (groups - 1)), (), own, begins=begins)


def _quiet(piece: Piece) -> Piece:
    """``piece`` with its loads left out, which another warpgroup issues."""
    tags = {kind: held for kind, held in piece.tags.items() if kind != "load"}
    return Piece(_without_loads(Same(piece.code)), piece.begin, tags)


@lru_cache(maxsize=1024)
def _nothing(cycles: int) -> Sequence[WarpInstruction]:
    return (WarpInstruction("other", cycles, 0, 7, 7, "fixed", "plain"),)


@lru_cache(maxsize=1024)
def _without_loads(code: Same[Sequence[WarpInstruction]]) -> Sequence[WarpInstruction]:
    return tuple(i._replace(kind="plain") if i.kind == "load" else i for i in code.value)


def _triton_tile(stretches: tuple[Stretch, ...], counts: TileCounts, number: int, block: int, program: _Writer) -> int:
    """Append one tile; returns the number of its last block plus one."""
    pieces = list(stretches)
    for i, (role, code) in enumerate(pieces):
        if role == "once":
            loads = _count(code, "load")
            following = next((r for r, _ in pieces[i + 1 :] if r != "once"), None)
            times = getattr(counts, following) if following else 0
            tags: list[Tag | None] = []
            if i == 0:
                tags.append(("Q", number))
                loads -= 1
            ahead = loads // 2
            for j in range(ahead):
                there = j < times
                tags += [("K", block + j) if there else None, ("V", block + j) if there else None]
            program.run(i, {"load": tags, "wait": [("Q", number)] if i == 0 else []})
            depth = ahead
        elif role in ("main", "edge", "left"):
            times = getattr(counts, role)
            pipelined = _count(code, "load") and code[_first(code, "wait")] is not None and depth > 0
            for j in range(times):
                if pipelined:
                    next_block = block + j + depth if j + depth < times else None
                    load: list[Tag | None] = (
                        [None, None] if next_block is None else [("K", next_block), ("V", next_block)]
                    )
                else:
                    load = [("K", block + j), ("V", block + j)]
                ring: list[Tag | None] = [("K", block + j), ("V", block + j)]
                program.run(i, {"wait": ring, "load": load})
            block += times
            depth = 0
        else:
            raise CodeError(f"a kernel of the triton family has no stretch '{role}'")
    return block


def _first(code: Sequence[WarpInstruction], kind: str) -> int:
    return next(i for i, instruction in enumerate(code) if instruction.kind == kind)
