"""Problem, machine and variant in; the source of one GEMM kernel out, and its forecast."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from tilecast.codegen.render import render
from tilecast.model.gemm.families import column_pieces, consumer_warps, writable
from tilecast.model.gemm.forecast import GemmPrediction, forecast_gemm
from tilecast.model.gemm.variant import GemmVariant, gemm_variant_text
from tilecast.model.gemm.workload import Gemm
from tilecast.model.kernel.header import header_text
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.machine.machine import Machine

#: Architectures that the kernels of a family run on.
TARGETS = {"gemm_hopper": ("sm_90a",), "gemm_blackwell": ("sm_100a", "sm_103a"), "gemm_triton": ("sm_80", "sm_90a", "sm_100a", "sm_103a")}  # fmt: skip
#: How often a program looks whether the others have come to a meeting, about 0.6 us each.
LOOKS = 16
#: k-steps at most whose copies all warps wait for the order of, about 100 cycles each.
EARLY_STEPS = 4
#: And boxes of C.
EARLY_BOXES = 2
#: Elements of a C that the copy engine does not bring which a thread has ahead beside its sums, and where these are many; what its registers do not
#: hold goes through L2.
C_AHEAD, C_AHEAD_OF_MANY, MANY_SUMS = 16, 8, 192
#: Columns at least of a box that the copy engine takes.
LEAST_COLUMNS = 16


@dataclass(frozen=True, slots=True)
class GeneratedGemm:
    """The source of a GEMM kernel, what it was made from, and its forecast."""

    source: str
    header: dict[str, object]
    variant: GemmVariant
    forecast: GemmPrediction


@dataclass(frozen=True, slots=True)
class GemmKernel:
    """Everything the templates read except the header, as ``k``."""

    title: str
    description: str
    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    group_m: int
    c_bytes: int
    accumulators: int
    c_stages: int
    c_parts: int
    warps: int
    #: k-steps from one meeting of the programs to the next; 0: they do not meet.
    in_step: int
    family: str
    #: Whether D is the sums of parts of k, which a second launch adds up.
    parted: bool = False
    #: Of which there are so many where a call does not say.
    parts: int = 1
    #: Registers of a thread of the second warpgroup (Hopper).
    registers: int = 232
    #: How often a program looks at most whether the others have come.
    looks: int = LOOKS
    #: Whether the two warpgroups that multiply a tile are one role (Hopper).
    joined: bool = False
    #: Warps of a role that multiplies (Hopper).
    role_warps: int = 4
    #: Whether first copies are ordered before the roles start (Hopper).
    early: bool = True

    @property
    def merged(self) -> int:
        """Columns that a program has which adds up parts of k: of one row there are not many."""
        return 128 if self.tile_m == 1 else 512

    @property
    def lang(self) -> str:
        """What the file calls Triton's language."""
        return "tl" if self.family == "gemm_triton" else "gl"

    @property
    def turns(self) -> bool:
        """Whether two warpgroups take turns with whole tiles."""
        return self.accumulators == 2

    @property
    def piece_m(self) -> int:
        """Rows of a tile that one product has: those of a warpgroup, or of a tile that no power of two of rows has 64."""
        if self.tile_m & self.tile_m - 1:
            return 64
        return self.tile_m if self.turns or self.joined else self.tile_m // 2

    @property
    def pieces(self) -> int:
        """Pieces that a tile has: boxes of A, C and D, and products of a k-step."""
        return self.tile_m // self.piece_m

    @property
    def own_pieces(self) -> int:
        """Those of one warpgroup."""
        return self.pieces if self.turns else 1

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of the products that a row piece of a k-step is: Triton's tensors have powers of two of them."""
        return column_pieces(self.tile_n)

    @property
    def products(self) -> int:
        """Products of a k-step that a role issues."""
        return self.own_pieces * len(self.widths)

    @property
    def product_columns(self) -> tuple[int, ...]:
        """Columns of each of these."""
        return self.widths if self.own_pieces == 1 else (self.tile_n,) * self.own_pieces

    @property
    def part_n(self) -> int:
        """Columns of a box of C and D."""
        return self.tile_n // self.c_parts

    @property
    def ahead_n(self) -> int:
        """Those of one of a C that the copy engine does not bring, beside a D that it takes (Hopper)."""
        if self.family != "gemm_hopper":
            return self.part_n
        sums = self.tile_m * self.tile_n // 128 if self.turns else 0
        ahead = C_AHEAD_OF_MANY if sums >= MANY_SUMS else C_AHEAD
        return min(self.part_n, max(LEAST_COLUMNS, ahead * 32 * self.role_warps // self.piece_m))

    @property
    def alone_n(self) -> int:
        """And of one of which the copy engine moves neither (Hopper): where warpgroups take turns the fewest, and all of a box where two halves of a
        tile are two roles, by what was measured."""
        if self.family != "gemm_hopper" or not (self.turns or self.joined):
            return self.part_n
        return min(self.ahead_n, LEAST_COLUMNS) if self.turns else self.ahead_n

    @property
    def box_of_turn(self) -> str:
        """Number of a box of C and D among those of a ring of slots."""
        if self.own_pieces > 1:
            return f"({self.own_turn} * (TILE_N // WIDTH) + part) * PIECES + piece"
        return f"{self.own_turn} * (TILE_N // WIDTH) + part"

    @property
    def early_steps(self) -> int:
        """k-steps that are ordered before the roles start (Hopper): the warp that copies orders more as fast, and where programs meet at k-steps that
        is at the first too."""
        return min(self.stages, EARLY_STEPS) if self.early and not self.in_step else 0

    @property
    def early_boxes(self) -> int:
        """Boxes of C of a program's first tile that are ordered as early, of those that have slots."""
        if not self.early:
            return 0
        return min(EARLY_BOXES, self.c_parts * self.pieces, self.slots * (1 if self.turns or self.joined else 2))

    @property
    def launch_registers(self) -> int:
        """Registers of a thread at launch (Hopper): so many that, shared out anew, those of warps that copy have 24.  With more left the compiler
        gives some to these, which not all four warps of theirs take part in, and the launch fails."""
        return 128 if self.joined and self.role_warps == 4 else 168

    @property
    def first_size(self) -> int:
        """Which argument of the kernel is the first size (Hopper): before it are descriptors, and counters of programs that meet."""
        return 4 + (len(self.widths) > 1) + (self.in_step > 0)

    @property
    def slots(self) -> int:
        """Slots of C and D of one warpgroup."""
        return self.c_stages // self.accumulators if self._two_rings and self.turns else self.c_stages

    @property
    def _two_rings(self) -> bool:
        """Whether every warpgroup has slots of its own."""
        return self.family == "gemm_hopper"

    @property
    def role_text(self) -> str:
        """What a role that multiplies does in the Hopper kernel."""
        if self.joined:
            who = "Both warpgroups, a half of the rows each" if self.role_warps == 8 else "The warpgroup"
            return f"{who}: products of every tile, then its D."
        if self.turns:
            return "Every second tile: its products while the other warpgroup writes, then its D."
        return "PIECE_M rows of every tile: products, then D."

    @property
    def own_turn(self) -> str:
        """How many tiles a ring of slots has had before the turn-th."""
        return "turn // 2" if self._two_rings and self.turns else "turn"

    @property
    def first_slot(self) -> str:
        """Where a warpgroup's slots begin, as the start of a sum."""
        if not self._two_rings or self.joined:
            return ""
        return f"{'turn % 2' if self.turns else 'piece'} * SLOTS + "


def generate_gemm(
    gemm: Gemm, machine: Machine, variant: GemmVariant | None = None, version: str = "", *, family: str | None = None,
    clock: str | float = "sustained", parted: bool = False,
) -> GeneratedGemm:  # fmt: skip
    """The kernel of ``variant`` (default: the best by forecast that can be written); ``parted``: that can share a tile's k among programs,
    whose sums a second launch adds up (the portable kernel always can), as one of a variant of several ``parts`` does.

    Raises VariantError, with the violated resource, by how much and the lever, for a variant that cannot be written.
    """
    forecast = forecast_gemm(gemm, machine, variant, family=family, clock=clock, written=True)
    made = forecast.variant
    verdict = writable(made, gemm, machine)
    if not verdict.legal:
        raise VariantError(f"{made.family} cannot write {gemm.label()} for {machine.name}: {verdict.sentence()}")
    header: dict[str, object] = {
        "tilecast": version,
        "family": made.family,
        "machine": machine.name,
        "targets": list(TARGETS[made.family]),
        "pass": "gemm",
        "variant": gemm_variant_text(made),
        "workload": gemm.as_dict(),
    }
    source = render(
        f"{made.family}.py.j2", {"k": context(made, gemm, parted or made.parts > 1), "header": header_text(header)}
    )
    return GeneratedGemm(source, header, made, forecast)


def context(variant: GemmVariant, gemm: Gemm, parted: bool = False) -> GemmKernel:
    """What a template reads of a legal variant (``parted``: `generate_gemm`)."""
    return GemmKernel(
        title=_title(variant, gemm), description=_description(variant), tile_m=variant.tile_m, tile_n=variant.tile_n,
        tile_k=variant.tile_k, stages=variant.stages, group_m=variant.group_m,
        c_bytes=4 if parted else max(gemm.c_bytes, gemm.d_bytes),
        accumulators=variant.accumulators, c_stages=variant.c_stages, c_parts=variant.c_parts, warps=variant.warps, in_step=variant.in_step,
        family=variant.family, parted=parted, parts=variant.parts, joined=bool(variant.joined),
        role_warps=consumer_warps(variant), early=bool(variant.early),
    )  # fmt: skip


_PLACES = {"gemm_hopper": "on Hopper", "gemm_blackwell": "on Blackwell", "gemm_triton": "in plain Triton"}


def _title(v: GemmVariant, gemm: Gemm) -> str:
    wide = " in 32 bit" if max(gemm.c_bytes, gemm.d_bytes) == 4 else ""
    return (
        f"D = alpha A B + beta C {_PLACES[v.family]}: tiles of {v.tile_m} x {v.tile_n}, C and D{wide or ' in 16 bit'}."
    )


def _description(v: GemmVariant) -> str:
    copies = f"A warp copies k-steps of {v.tile_k} of A and B through a ring of {v.stages} slots, another copies tiles of C ahead, a third hands D to the copy engine."
    if v.tile_m == 1:
        how = f"{v.warps} warps multiply and add k-steps of {v.tile_k} element by element; a program has {v.tile_n} columns of one row."
    elif v.family == "gemm_triton":
        how = f"Products of {v.warps} warps, {v.stages} k-steps of {v.tile_k} in flight; a program has one tile."
    elif v.family == "gemm_blackwell":
        how = (
            f"{copies} One more issues products into {v.accumulators} tile{'s' if v.accumulators == 2 else ''} of tensor memory; four warps "
            "add C and round" + (", while the next tile multiplies." if v.accumulators == 2 else ".")
        )
    elif v.accumulators == 2:
        how = f"{copies} Two warpgroups take turns: one multiplies a tile while the other adds C to its last one and rounds."
    else:
        who = "Two warpgroups multiply halves of a tile" + (" by the same code" if v.joined else "")
        if consumer_warps(v) == 4 and v.joined:
            who = "A warpgroup multiplies a tile"
        verbs = "adds C and rounds" if who.startswith("A ") else "add C and round"
        how = f"{copies} {who}, {verbs}; copies run ahead meanwhile."
    tail = (
        f"Programs stay and take every n-th tile, {v.group_m or 'all'} rows of tiles column by column"
        + (
            ", and wait for each other, but not for long, so that they ask L2 for the same lines together."
            if v.in_step
            else "."
        )
        if v.family != "gemm_triton"
        else ""
    )
    runs = f"Runs on {', '.join(TARGETS[v.family])} with triton and torch alone.  Generated by tilecast: regenerate it instead of editing it."
    return textwrap.fill(" ".join(filter(None, (how, tail, runs))), 120)
