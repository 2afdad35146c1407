"""What the template of the `triton_short` family needs to know: a forward of short sequences in plain Triton.

Python decides here, `templates/triton_short.py.j2` only writes.  A tile's rows are those of the query heads that share a key
head, so that few queries fill it; a program has one tile and few registers, so that an SM has many programs.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace

from tilecast.codegen.gluon import in_lines, quoted
from tilecast.codegen.host import WINDOW_STATEMENTS, Host
from tilecast.codegen.masks import keys_seen
from tilecast.codegen.portable import forward as triton_portable
from tilecast.codegen.render import render
from tilecast.model.kernel.header import dims_text, header_text
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.variants.fa2 import Fa2Variant, writable
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.machine.occupancy import KEPT_BYTES

TEMPLATE, FAMILY = "triton_short.py.j2", "triton_short"
#: Targets that the kernels run on.
TARGETS = triton_portable.targets(False)
#: Where those with parts of the keys do, which wait for Hopper's matrix unit themselves.
PARTED_TARGETS = ("sm_90a",)
_POINTERS = ("q_ptr", "k_ptr", "v_ptr", "out_ptr", "lse_ptr")
#: What programs that share a tile write their parts to.
_WORK = ("partials",)
#: What the launch that joins parts takes of the same.
_JOIN_POINTERS = ("partials", "out_ptr", "lse_ptr")
_JOIN_NUMBERS = (
    "stride_ob",
    "stride_oh",
    "stride_os",
    "heads_kv",
    "group",
    "seqlen_q",
    "seqlen_k",
    "window_right",
    "window_left",
    "eighths_v",
    "parts",
    "part_keys",
    "slots",
    "follows",
    "in_turn",
)
_STRIDES = tuple(f"stride_{tensor}{axis}" for tensor in "qkvo" for axis in "bhs")
_SIZES = ("heads_kv", "group", "inverse", "seqlen_q", "seqlen_k", "window_right")
#: What is None where keys before a row have no limit, where heads have all columns, where all keys are one block, and where
#: tiles do not reach far.
_NONE_OR_NUMBERS = ("window_left", "eighths_qk", "eighths_v", "several", "far")
#: Columns of V from which on a kernel for one block of keys has a form for many programs, which takes V and O by halves.
_HALVED_COLUMNS = 256
#: Numbers of O that a program joins.
_JOINED_NUMBERS = 1024
#: Programs of an SM that take parts in turn, by columns of V: as many as their registers leave room for.
_IN_TURN_OF_AN_SM = {64: 3, 128: 2}
_JOINED = ", *joined"
_NUMBERS = "*(n // 8 for x in (q, k, v, out) for n in x.stride()[:3]), *sizes"


#: (fewest keys, fewest parts of all tiles of a sequence, keys of a part, most tiles whose parts have programs of their own): the first that fits.
Parts = tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class ShortKernel:
    """Everything `TEMPLATE` reads except the header, as ``k``."""

    title: str
    description: str
    head_dim_qk: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    warps: int
    kv_stages: int
    #: Whether heads may have fewer columns, a multiple of 8.
    narrower: bool
    #: SMs of the machine that it was chosen on, and bytes of shared memory of one: they say how many programs are at work at once.
    sms: int
    sm_bytes: int
    #: Whether it is for keys of several blocks.
    several: bool = False
    #: How keys are parted (`Parts`); (): all are one part.
    parts: Parts = ()

    @property
    def columns_qk(self) -> int:
        """Columns of tiles of Q and K: Triton's are powers of two."""
        return 1 << (self.head_dim_qk - 1).bit_length()

    @property
    def columns_v(self) -> int:
        """Columns of tiles of V and O."""
        return 1 << (self.head_dim_v - 1).bit_length()

    @property
    def halves(self) -> bool:
        """Whether many programs on one block of keys take V and O by halves: then an SM has three or four in place of two."""
        return not self.several and self.columns_v >= _HALVED_COLUMNS and self.tile_m >= 64

    @property
    def fewer_stages(self) -> bool:
        """Whether many programs on several blocks keep one block less under way: then an SM has two in place of one."""
        return self.several and 2 * (self._shared_bytes + KEPT_BYTES) > self.sm_bytes

    @property
    def _shared_bytes(self) -> int:
        """Of Q and the blocks of K and V under way."""
        return 2 * (self.tile_m * self.columns_qk + self.kv_stages * self.tile_n * (self.columns_qk + self.columns_v))

    @property
    def joined_rows(self) -> int:
        """Rows that a program joins."""
        return _JOINED_NUMBERS // self.columns_v

    @property
    def held(self) -> int:
        """Numbers of O that a thread holds."""
        return self.tile_m * self.columns_v // (32 * self.warps)

    @property
    def join_signature(self) -> str:
        """The head of the kernel that joins parts."""
        return in_lines(", ".join((*_JOIN_POINTERS, *_JOIN_NUMBERS)), "def attention_join(", "):")

    @property
    def join_unspecialized(self) -> str:
        """Its numbers that the compiled code must not depend on."""
        return quoted(_JOIN_NUMBERS)

    @property
    def at_once(self) -> int:
        """Programs that take parts in turn at once."""
        return self.sms * _IN_TURN_OF_AN_SM[self.columns_v]

    @property
    def _none_or_numbers(self) -> tuple[str, ...]:
        found = (*_NONE_OR_NUMBERS, "parts", "part_keys", "follows", "in_turn") if self.parts else _NONE_OR_NUMBERS
        return (*found, "many") if self.halves or self.fewer_stages else found

    @property
    def unspecialized(self) -> str:
        """Numbers that the compiled code must not depend on."""
        return quoted((*_STRIDES, *_SIZES, *self._none_or_numbers))

    @property
    def signature(self) -> str:
        """The head of the kernel."""
        names = (*_POINTERS, *_WORK * bool(self.parts), *_STRIDES, *_SIZES, *self._none_or_numbers, "scale_log2")
        return in_lines(", ".join(names), "def attention(", "):")

    @property
    def host(self) -> Host:
        """The host side."""
        host = Host(
            "window",
            self.head_dim_qk,
            self.head_dim_v,
            (),
            _NUMBERS,
            described=False,
            narrower=self.narrower,
            joined=_JOINED if self.parts else "",
        )
        many: tuple[str, ...] = ()
        if self.halves:
            alone = " and ".join(
                ("several is None", *("eighths == (None, None)",) * self.narrower, f"programs > {2 * self.sms}")
            )
            many = (
                "# Many programs on one block take V and O by halves, so that an SM has more of them: the same bits.",
                f"many = programs if {alone} else None",
            )
        elif self.fewer_stages:
            many = (
                "# Many programs keep a block less under way, so that an SM has two of them: the same bits.",
                f"many = programs if programs > {self.sms} else None",
            )
        parts: tuple[str, ...] = ()
        joins: tuple[str, ...] = ()
        if self.parts:
            parts = (
                "tiles, apart, parts, part_keys = tiles_of(q, k)",
                "parts = parts if parts > 1 else None",
                "in_turn = None if partials is None or apart == tiles else tiles - apart",
                "programs = tiles if partials is None else tiles - apart + apart * parts",
            )
            joins = (
                "slots = apart * (parts or 1)",
                "of_join = (heads_kv, group, seqlen_q, seqlen_k, window_right, left, eighths[1], parts, part_keys, slots, follows, in_turn)",
                "joins = apart * TILE_M.value // JOINED.value",
                "joined = () if partials is None else (((joins, 1, 1), (partials, out, lse, *(n // 8 for n in out.stride()[:3]), *of_join)),)",
            )
        lines = (
            *WINDOW_STATEMENTS,
            "group = heads_q // heads_kv",
            "programs = triton.cdiv(seqlen_q * group, TILE_M.value) * batch * heads_kv",
            f"eighths = {_eighths(host.columns[0], self.columns_qk)}, {_eighths(host.columns[1], self.columns_v)}",
            "several = seqlen_k if seqlen_k > TILE_N.value else None",
            "# Rows of a tile and keys lie at 32-bit offsets, and rows are divided by multiplying, where they do not reach far.",
            "tall = min(seqlen_q, TILE_M.value)",
            "reach = (group * x.stride(1) + tall * x.stride(2) for x in (q, out))",
            "far = 1 if max(*reach, *(seqlen_k * x.stride(2) for x in (k, v))) >= 2**31 or group > 16384 else None",
            "left = window_left if window_left < no_limit else None",
            *parts,
            *many,
            "sizes = (heads_kv, group, -(-(1 << 30) // group), seqlen_q, seqlen_k, window_right, left, *eighths, several, far"
            f"{', parts, part_keys, follows, in_turn' * bool(parts)}{', many' * bool(many)})",
            *joins,
        )
        return replace(host, statements=lines)


def _eighths(columns: str, most: int) -> str:
    """The expression of how many times 8 columns heads have, given that of their columns; None where they fill a tile's ``most``."""
    if columns.isdecimal():
        return "None" if int(columns) == most else str(int(columns) // 8)
    return f"None if {columns} == {most} else {columns} // 8"


def generate_short(
    workload: Workload,
    machine: Machine,
    variant: Fa2Variant,
    version: str = "",
    *,
    narrower: bool = False,
    parts: Parts = (),
) -> str:
    """The source of the kernel of ``variant``, for any mask, with ``narrower`` also for heads of fewer columns; ``workload`` is what its
    header names.

    Raises VariantError, with what stands against it and the lever, for a variant that cannot be written.
    """
    verdict = writable(variant, workload, machine)
    if not verdict.legal:
        raise VariantError(f"{FAMILY} cannot write {workload.label()} for {machine.name}: {verdict.sentence()}")
    header: dict[str, object] = {
        "tilecast": version,
        "family": FAMILY,
        "machine": machine.name,
        "targets": list(PARTED_TARGETS if parts else TARGETS),
        "pass": "short",
        "variant": variant_text(variant),
        "workload": workload.as_dict(),
    }
    return render(TEMPLATE, {"k": context(variant, workload, machine, narrower, parts), "header": header_text(header)})


def context(
    variant: Fa2Variant, workload: Workload, machine: Machine, narrower: bool = False, parts: Parts = ()
) -> ShortKernel:
    """What the template reads of a variant that can be written."""
    lines = [
        keys_seen("window"),
        f"A program owns {variant.tile_m} rows, the query heads of one key head for consecutive queries, and takes in "
        f"{variant.tile_n} keys at a time; every block {'that a row does not see whole ' if parts else ''}is masked, and where all keys are one block there is no loop.",
        f"Runs on {'Hopper' if parts else 'any GPU from sm_80 on'} with triton and torch alone.  Generated by tilecast: regenerate it instead of editing it.",
    ]
    if parts:
        sizes = [str(keys) for _, _, keys, _ in reversed(parts)]
        lines.insert(
            2,
            f"Parts of {' or '.join(sizes)} keys have programs of their own where tiles are few, and a second launch joins them.",
        )
    return ShortKernel(
        title=f"Attention forward of short sequences for head_dim {dims_text(workload)} in plain Triton",
        description=textwrap.fill("  ".join(lines), 120),
        head_dim_qk=workload.head_dim_qk,
        head_dim_v=workload.head_dim_v,
        tile_m=variant.tile_m,
        tile_n=variant.tile_n,
        warps=variant.warps,
        kv_stages=variant.kv_stages,
        narrower=narrower,
        sms=int(machine["chip.sm_count"]),
        sm_bytes=int(machine["smem.per_sm_bytes"]),
        several=workload.seqlen_k > variant.tile_n,
        parts=parts,
    )
