"""The GEMM kernel classes: what a variant needs of an SM, whether a machine has it, and which variants are worth a look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

from tilecast.model.gemm.variant import GemmVariant, check_family
from tilecast.model.gemm.workload import Gemm
from tilecast.model.kernel.verdict import LEGAL, Verdict, over_limit
from tilecast.model.machine.machine import Machine

#: Registers of a consumer thread of two warpgroups beside a producer warp group, and what an epilogue needs beside its accumulator and
#: C (kernels of 192 x 128 tiles compile without spills).
_CONSUMER_REGISTERS, _OTHER_REGISTERS = 232, 8
#: Barriers, alignment.
_BOOKKEEPING_BYTES = 2048
_KINDS = {"gemm_hopper": "wgmma", "gemm_blackwell": "tcgen05"}
#: Kinds that a kernel for the matrix unit of one generation cannot run without.
_ELSEWHERE = "use family gemm_hopper on Hopper, gemm_blackwell on data-centre Blackwell, gemm_triton elsewhere"
_MOST_STAGES = 6
#: Parts of k at most: a merge asks for all of an element's sums at once.
_MOST_PARTS = 32
#: Columns of a box of C and D whose rows the copy engine still takes at its full rate (64 bytes of 16-bit values), and bytes of a
#: row of D that a thread of the Blackwell kernels has in registers (tcgen05.ld of 64 columns beside as many of C).
_LEAST_COLUMNS, _COLUMN_BYTES = 32, 128


@dataclass(frozen=True, slots=True)
class GemmFamily:
    """One GEMM kernel class."""

    name: str
    about: str
    legality: Callable[[GemmVariant, Gemm, Machine], Verdict]
    #: Every combination of knobs worth telling apart that the machine can run, in order of preference among equals.
    space: Callable[[Gemm, Machine], tuple[GemmVariant, ...]]


def stage_bytes(v: GemmVariant, gemm: Gemm) -> int:
    """Shared memory of one slot of the A/B ring of one CTA; a pair shares the columns of B."""
    return (v.tile_m + v.tile_n // v.cta_group) * v.tile_k * gemm.dtype_bytes


def column_pieces(tile_n: int) -> tuple[int, ...]:
    """Columns of the products that make up those of a tile: powers of two, the larger first, 256 at most."""
    return (tile_n,) if not tile_n & tile_n - 1 else ((first := 1 << tile_n.bit_length() - 1), tile_n - first)


def consumer_warps(v: GemmVariant) -> int:
    """Warps of a role that multiplies (Hopper): of a joined one both warpgroups', where a tile has rows for two."""
    return 8 if v.joined and v.tile_m > 64 else 4


def boxes(v: GemmVariant) -> int:
    """Boxes that C and D of a warpgroup's tile move in: ranges of columns, and of 192 rows three times 64."""
    return v.c_parts * (3 if v.tile_m == 192 else 1)


def slot_bytes(v: GemmVariant, gemm: Gemm) -> int:
    """Shared memory of one slot that a box of C comes into and of D, or of float32 sums of a part of k, leaves from; the portable kernel has
    none."""
    held = 4 if v.parts > 1 else max(gemm.c_bytes, gemm.d_bytes)
    return 0 if v.family == "gemm_triton" else v.tile_m * v.tile_n // boxes(v) * held


def shared_bytes(v: GemmVariant, gemm: Gemm) -> int:
    """Shared memory of one CTA."""
    return v.stages * stage_bytes(v, gemm) + v.c_stages * slot_bytes(v, gemm) + _BOOKKEEPING_BYTES


def accumulator_registers(v: GemmVariant) -> int:
    """Registers of a thread that hold sums: a tile over one warpgroup that takes turns, or over all that cooperate."""
    threads = 32 * v.warps if v.family == "gemm_triton" else 128 if v.accumulators == 2 or v.tile_m == 64 else 256
    return v.tile_m * v.tile_n // threads


def ctas_per_sm(v: GemmVariant, gemm: Gemm, machine: Machine) -> int:
    """CTAs of the portable kernel that an SM holds (two at most: more change little and split the ring); 1 for the others."""
    if v.family != "gemm_triton":
        return 1
    sums = 0 if machine.tensor_kind == "tcgen05" else accumulator_registers(v)
    threads = 32 * v.warps
    by_registers = int(machine["reg.file_bytes"]) // (4 * threads * min(255, sums + 64))
    return max(1, min(2, int(machine["smem.per_sm_bytes"]) // shared_bytes(v, gemm), by_registers))


def _common(v: GemmVariant, gemm: Gemm, machine: Machine) -> Verdict:
    kind = _KINDS.get(v.family)
    if v.tile_m == 192 and v.family != "gemm_hopper":
        return Verdict(f"family {v.family} has tiles of a power of two of rows, got tile_m 192", "use tile_m=128")
    if v.tile_m < 64 and v.family != "gemm_triton":
        return Verdict(f"a product of family {v.family} has 64 rows or more, got tile_m {v.tile_m}", "use tile_m=64")
    if v.tile_n < 32 and v.tile_m > 1:
        return Verdict(f"only tiles of one row have fewer than 32 columns, got tile_m {v.tile_m} and tile_n {v.tile_n}", "use tile_n=32")  # fmt: skip
    if v.parts > 1 and (v.accumulators > 1 or v.family == "gemm_blackwell"):
        return Verdict(f"k is shared by tiles with one accumulator of families gemm_hopper and gemm_triton, got {v.family} with {v.accumulators}", "use accumulators=1 or parts=1")  # fmt: skip
    if (v.joined or len(column_pieces(v.tile_n)) > 1) and v.family != "gemm_hopper":
        return Verdict(f"family {v.family} has tiles of a power of two of columns and no joined warpgroups, got tile_n {v.tile_n}, joined {v.joined}", "use tile_n=128 and joined=0")  # fmt: skip
    if v.in_step and v.family != "gemm_hopper":
        return Verdict(f"programs of family {v.family} do not meet, got in_step {v.in_step}", "use in_step=0")
    if kind is not None and machine.tensor_kind != kind:
        return Verdict(f"family {v.family} needs {kind}, {machine.name} has {machine.tensor_kind}", _ELSEWHERE)
    if not machine.has(f"tensor.{gemm.dtype}_flop_per_clk"):
        return Verdict(f"{machine.name} has no {gemm.dtype} matrix rate", "use bf16 or fp16")
    need = shared_bytes(v, gemm)
    if need > machine["smem.per_cta_bytes"]:
        return over_limit("shared memory (A/B ring and C/D slots)", need, machine["smem.per_cta_bytes"], "bytes", "use fewer stages, fewer c_stages or a smaller tile")  # fmt: skip
    return LEGAL


def _hopper(v: GemmVariant, gemm: Gemm, machine: Machine) -> Verdict:
    if v.cta_group != 1:
        return Verdict(f"wgmma multiplies in one CTA, got cta_group {v.cta_group}", "use cta_group=1")
    if v.tile_m == 192 and v.accumulators == 1:
        return Verdict("tiles of 192 rows are for warpgroups that take turns, got accumulators 1", "use accumulators=2 or tile_m=128")  # fmt: skip
    if v.joined and (v.accumulators == 2 or v.in_step or v.tile_m not in (64, 128, 256)):
        return Verdict(f"warpgroups are joined that share a tile of 64, 128 or 256 rows, got accumulators {v.accumulators}, tile_m {v.tile_m} and in_step {v.in_step}", "use accumulators=1,tile_m=128,in_step=0 or joined=0")  # fmt: skip
    if v.joined and v.tile_m == 64 and v.tile_n > 192:
        return Verdict(f"joined tiles of 64 rows are one warpgroup's, whose threads begin with 128 registers: 192 columns or fewer, got tile_n {v.tile_n}", "use tile_n=192 or tile_m=128")  # fmt: skip
    if bool(v.joined) == bool(v.group_m):
        return Verdict(f"joined warpgroups, and no others, walk all rows of tiles column by column (group_m 0), got joined {v.joined} and group_m {v.group_m}", f"use group_m={0 if v.joined else 8}")  # fmt: skip
    if len(column_pieces(v.tile_n)) > 1 and v.tile_m == 192:
        return Verdict(f"tiles of 192 rows have a power of two of columns, got tile_n {v.tile_n}", "use tile_m=128")
    if column_pieces(v.tile_n)[-1] % (v.tile_n / v.c_parts):
        return Verdict(f"a box of C and D lies in one product's columns ({', '.join(map(str, column_pieces(v.tile_n)))}), got {v.tile_n} / {v.c_parts}", f"use c_parts={v.tile_n // column_pieces(v.tile_n)[-1]}")  # fmt: skip
    if v.accumulators == 1 and v.tile_m == 64 and not v.joined:
        return Verdict("two warpgroups that cooperate need a tile of 128 rows or more, got tile_m 64", "use tile_m=128 or accumulators=2")  # fmt: skip
    if v.c_stages % v.accumulators:
        return Verdict(f"warpgroups that take turns have c_stages of their own: expected a multiple of 2, got {v.c_stages}", "use c_stages=2")  # fmt: skip
    if v.tile_n // v.c_parts < _LEAST_COLUMNS:
        return Verdict(f"C and D move in boxes of {_LEAST_COLUMNS} columns or more, got {v.tile_n} / {v.c_parts}", "use fewer c_parts")  # fmt: skip
    # A box of C is in registers at a time, or a quarter of the accumulator's columns.
    sums = accumulator_registers(v)
    need = sums + sums // max(4, boxes(v)) * max(gemm.c_bytes, 2) // 4 + _OTHER_REGISTERS
    if need > _CONSUMER_REGISTERS:
        return over_limit("a consumer thread", need, _CONSUMER_REGISTERS, "registers", "use a smaller tile or accumulators=1")  # fmt: skip
    return _common(v, gemm, machine)


def _blackwell(v: GemmVariant, gemm: Gemm, machine: Machine) -> Verdict:
    if v.tile_m != 128:
        return Verdict(f"tensor memory has 128 rows: tile_m must be 128, got {v.tile_m}", "use tile_m=128 (cta_group=2 makes it 256 of a pair)")  # fmt: skip
    verdict = _common(v, gemm, machine)
    columns = v.accumulators * v.tile_n
    if verdict.legal and columns > machine["tmem.columns"]:
        return over_limit("tensor memory", columns, machine["tmem.columns"], "columns", "use a smaller tile_n or accumulators=1")  # fmt: skip
    return verdict


def _triton(v: GemmVariant, gemm: Gemm, machine: Machine) -> Verdict:
    if v.accumulators != 1 or v.cta_group != 1 or v.c_parts != 1:
        return Verdict(
            "the portable kernel has one accumulator in one CTA and D in one part",
            "use accumulators=1,cta_group=1,c_parts=1",
        )
    if machine.tensor_kind == "wgmma" and v.tile_m * 4 < 64 * v.warps:
        return Verdict(f"wgmma takes 64 rows for every four warps, got tile_m {v.tile_m} and {v.warps} warps", "use warps=4")  # fmt: skip
    if machine.tensor_kind != "tcgen05":
        need = accumulator_registers(v) + 64
        if need > machine["reg.max_per_thread"]:
            return over_limit("a thread", need, machine["reg.max_per_thread"], "registers", "use a smaller tile or warps=8")  # fmt: skip
    return _common(v, gemm, machine)


def _deepest(v: GemmVariant, gemm: Gemm, machine: Machine, share: float = 1.0) -> GemmVariant:
    """``v`` with as many stages as fit, up to `_MOST_STAGES`; as it is where not even one does."""
    room = machine["smem.per_cta_bytes"] * share - shared_bytes(replace(v, stages=0), gemm)
    return replace(v, stages=max(1, min(_MOST_STAGES, int(room // stage_bytes(v, gemm)))))


def _own_space(family: str, tiles: tuple[tuple[int, int], ...], pairs: tuple[int, ...], slots: tuple[tuple[int, int], ...], gemm: Gemm, machine: Machine) -> list[GemmVariant]:  # fmt: skip
    depth = 128 // gemm.dtype_bytes
    out = []
    for (m, n), pair, accumulators, (c_stages, c_parts) in product(tiles, pairs, (2, 1), slots):
        v = GemmVariant(family, m, n, depth, 1, accumulators, c_stages, c_parts, cta_group=pair)
        out.append(_deepest(v, gemm, machine))
    return out


def _hopper_space(gemm: Gemm, machine: Machine) -> tuple[GemmVariant, ...]:
    tiles = ((128, 128), (128, 256), (256, 128), (64, 256), (128, 64))
    slots = ((2, 1), (4, 1), (1, 1), (4, 2), (2, 2), (4, 4), (2, 4))
    # Of 192 rows a slot has 64.
    tall = _own_space("gemm_hopper", ((192, 128),), (1,), ((8, 2), (8, 4), (4, 1)), gemm, machine)
    return _legal(
        [*_own_space("gemm_hopper", tiles, (1,), slots, gemm, machine), *tall, *_shared_space(gemm, machine)],
        gemm,
        machine,
    )


def _shared_space(gemm: Gemm, machine: Machine) -> list[GemmVariant]:
    """Kernels that share k, where a launch of a whole k has tiles for half of the SMs at most."""
    v = GemmVariant("gemm_hopper", accumulators=1, c_stages=2, c_parts=2)
    tiles = -(-gemm.m // v.tile_m) * -(-gemm.n // v.tile_n)
    most = min(_MOST_PARTS, -(-gemm.k // v.tile_k)) if 2 * tiles <= machine["chip.sm_count"] else 0
    parts = [n for n in (2, 3, 4, 6, 8, 12, 16, 24, _MOST_PARTS) if n <= most]
    return [_deepest(replace(v, parts=n), gemm, machine) for n in parts]


def _blackwell_space(gemm: Gemm, machine: Machine) -> tuple[GemmVariant, ...]:
    out = []
    for columns in (256, 128):
        parts = columns * max(gemm.c_bytes, gemm.d_bytes) // _COLUMN_BYTES
        slots = tuple((tiles * parts, parts) for tiles in (2, 4, 1))
        out += _own_space("gemm_blackwell", ((128, columns),), (2, 1), slots, gemm, machine)
    return _legal(out, gemm, machine)


def _triton_space(gemm: Gemm, machine: Machine) -> tuple[GemmVariant, ...]:
    out = []
    for (m, n, warps), k in product(((128, 128, 8), (128, 256, 8), (128, 128, 4), (64, 128, 4), (64, 64, 4)), (64, 32)):
        for stages in (4, 3, 2):
            out.append(GemmVariant("gemm_triton", m, n, k * 2 // gemm.dtype_bytes, stages, 1, 1, warps=warps))
    return _legal(out, gemm, machine)


def _legal(variants: list[GemmVariant], gemm: Gemm, machine: Machine) -> tuple[GemmVariant, ...]:
    return tuple(v for v in variants if legality(v, gemm, machine).legal)


def writable(v: GemmVariant, gemm: Gemm, machine: Machine) -> Verdict:
    """Whether a kernel of ``v`` can be written: legal, and within what its template writes."""
    verdict = legality(v, gemm, machine)
    if not verdict.legal:
        return verdict
    if gemm.dtype == "fp8":
        return Verdict(f"family {v.family} is written for A and B in bf16 and fp16, got dtype 'fp8'", "use bf16 or fp16")  # fmt: skip
    if gemm.adds_c and gemm.c_dtype != gemm.d_dtype:
        return Verdict(f"kernels are written for C and D of one dtype, got {gemm.c_dtype} and {gemm.d_dtype}", "use one for both")  # fmt: skip
    wide = _COLUMN_BYTES // max(gemm.c_bytes, gemm.d_bytes)
    if v.family == "gemm_blackwell" and v.tile_n > wide * v.c_parts:
        return Verdict(f"a thread rounds {wide} columns of D at a time at most, got {v.tile_n} / {v.c_parts}", f"use c_parts={-(-v.tile_n // wide)}")  # fmt: skip
    if v.cta_group == 2:
        return Verdict("pairs of CTAs are forecast but not written", "use cta_group=1")
    return LEGAL


GEMM_FAMILIES = {
    family.name: family
    for family in (
        GemmFamily("gemm_hopper", "Gluon, Hopper: TMA producers, wgmma warpgroups that cooperate or take turns", _hopper, _hopper_space),
        GemmFamily("gemm_blackwell", "Gluon, data-centre Blackwell: tcgen05, accumulators in tensor memory", _blackwell, _blackwell_space),
        GemmFamily("gemm_triton", "plain Triton, any GPU from Ampere on", _triton, _triton_space),
    )
}  # fmt: skip
_NATIVE = {kind: name for name, kind in _KINDS.items()}


def find_gemm_family(name: str) -> GemmFamily:
    """The GEMM family called ``name``; VariantError with the nearest names otherwise."""
    check_family(name)
    return GEMM_FAMILIES[name]


def native_gemm_family(machine: Machine) -> GemmFamily:
    """The family built for the machine's matrix unit."""
    return GEMM_FAMILIES[_NATIVE.get(machine.tensor_kind, "gemm_triton")]


def legality(variant: GemmVariant, gemm: Gemm, machine: Machine) -> Verdict:
    """Whether ``machine`` can run ``variant``."""
    depth = variant.tile_k * gemm.dtype_bytes
    if depth % 32:
        return Verdict(f"a matrix instruction takes 32 bytes of k, got tile_k {variant.tile_k}", "use a multiple of it")
    return GEMM_FAMILIES[variant.family].legality(variant, gemm, machine)
