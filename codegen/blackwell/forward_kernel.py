"""A `blackwell_ws` kernel as its template reads it: decisions as fields, and names and expressions that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.codegen.blackwell.order import Phases, Rings
from tilecast.codegen.blackwell.softmax_kernel import SoftmaxKernel
from tilecast.codegen.gluon import sizes_statement
from tilecast.codegen.host import SMS_STATEMENT, WINDOW_STATEMENTS, Descriptor, Host, box_statements


@dataclass(frozen=True, slots=True)
class Piece:
    """Columns of a head dimension that are one matrix product: a power of two of them."""

    start: int
    width: int


@dataclass(frozen=True, slots=True)
class KvRing:
    """A ring of K blocks, of V blocks or of both: the constant that holds its depth."""

    name: str
    slots_name: str
    slots: int
    text: str


@dataclass(frozen=True, slots=True)
class BlackwellKernel(SoftmaxKernel):
    """Everything `TEMPLATE` reads except the header, as ``k``; see the template for what each field becomes."""

    title: str
    description: str
    mask: str
    head_dim_qk: int
    head_dim_v: int
    scheduler: str
    softmax_tiles: int
    by_keys: bool
    cta_group: int
    tile_n: int
    split_p: bool
    stats_slots: int
    rescale_threshold: float
    branch_free: bool
    load_max: bool
    poly_degree: int
    #: Per quarter of a row, the columns whose exponentials go to the FMA pipe.
    emulated: tuple[tuple[int, ...], ...]
    rescale_columns: int
    qk_pieces: tuple[Piece, ...]
    v_pieces: tuple[Piece, ...]
    kv_rings: tuple[KvRing, ...]
    rings: Rings
    issue_text: str
    load: Phases
    mma: Phases
    correction: Phases
    stats_lag: tuple[int, ...]
    softmax_registers: int
    other_registers: int
    registers_at_launch: int
    #: (name, first column, columns) of tensor memory; P is the right half of S.
    tmem_map: tuple[tuple[str, int, int], ...]
    #: Columns of O that the correction role stores at a time: a 32-byte sector a row.
    store_columns: int = 16
    #: L2 that K and V of the heads at work together may fill (FA4C, tile_scheduler.py).
    l2_megabytes: int = 50
    #: Whether Q, K and V have 8 bits an element: then P is e4m3, O bf16, and heads have factors.
    fp8: bool = False

    @property
    def persistent(self) -> bool:
        """Whether a program takes more than one work tile."""
        return self.scheduler == "persistent"

    @property
    def rows(self) -> int:
        """Query rows of a softmax group."""
        return 128 * self.cta_group

    @property
    def tile_m(self) -> int:
        """Query rows of a work tile."""
        return self.rows * (1 if self.by_keys else self.softmax_tiles)

    @property
    def quarter_bits(self) -> int:
        """Halvings from a quarter to one column."""
        return self.quarter.bit_length() - 1

    @property
    def kv_bytes_per_key(self) -> int:
        """Bytes of K and V for one key of one head."""
        return (self.head_dim_qk + self.head_dim_v) * self.element_bytes

    # -- work ----------------------------------------------------------------------------------------------------------

    @property
    def sizes(self) -> tuple[str, ...]:
        """Numbers that vary from call to call and that roles copy, in the order of the kernel's arguments.

        What several roles need is worked out once, on the host: the compiler would otherwise compute it before the
        roles part and hold it in registers, or in local memory, through all of them.
        """
        window = ("window_left", "window_right") if self.mask == "window" else ()
        dealt = () if self.scheduler == "grid" else ("heads", "programs" if self.persistent else "heads_at_once")
        return ("heads_q", "group", "seqlen_q", "seqlen_k", *window, "query_blocks", *dealt, *self.factor_sizes)

    @property
    def tile(self) -> str:
        """Number of the work tile."""
        return "tile" if self.persistent else "program_number()"

    @property
    def steps_text(self) -> str:
        """What `steps` counts, in words."""
        return "pairs of blocks" if self.by_keys else "blocks"

    @property
    def steps(self) -> str:
        """What a role's loop over keys counts."""
        return "pairs" if self.by_keys else "blocks"

    @property
    def step_keys(self) -> str:
        """Keys of one step of that loop."""
        return f"{self.softmax_tiles} * TILE_N" if self.by_keys else "TILE_N"

    @property
    def block_count(self) -> str:
        """Key blocks up to the last one that a work tile takes."""
        first = "first + " if self.mask == "window" else ""
        return first + (f"{self.softmax_tiles} * pairs" if self.by_keys else "blocks")

    # -- shared and tensor memory --------------------------------------------------------------------------------------

    @property
    def descriptors(self) -> tuple[Descriptor, ...]:
        """All tensor descriptors, in the order of the kernel's arguments."""
        out = []
        for tensor, rows, pieces, split in (
            ("q", "ROWS", self.qk_pieces, "[0, 0, 1, 0]"),
            ("k", "TILE_N", self.qk_pieces, "[0, 0, 1, 0]"),
            ("v", "TILE_N", self.v_pieces, "[0, 0, 0, 1]"),
        ):
            for piece in pieces:
                suffix = f"_{piece.start}" if len(pieces) > 1 else ""
                out.append(Descriptor(f"{tensor}_desc{suffix}", tensor, rows, piece.width, split))
        return tuple(out)

    @property
    def in_pieces(self) -> bool:
        """Whether a head's columns are more than one product: then all of them go as tuples."""
        return len(self.qk_pieces) > 1 or len(self.v_pieces) > 1

    @property
    def o_in_pieces(self) -> bool:
        """Whether O is a tuple."""
        return len(self.v_pieces) > 1

    def bytes_of(self, descriptor: str) -> str:
        """Bytes of a tile that land in one CTA."""
        return f"{descriptor}.nbytes_per_cta" if self.pair else f"{descriptor}.block_type.nbytes"

    @property
    def ring_names(self) -> tuple[str, ...]:
        """All rings, Q's first."""
        return self.rings.names

    @property
    def ring_arguments(self) -> str:
        """The rings as the matrix role gets them: three in a tuple, so that its parameters stay few."""
        return f"({', '.join(self.ring_names)})" if len(self.ring_names) > 2 else ", ".join(self.ring_names)

    @property
    def ring_parameters(self) -> str:
        """What it calls them."""
        return "rings" if len(self.ring_names) > 2 else ", ".join(self.ring_names)

    @property
    def ring_unpacking(self) -> str:
        """The start of a line of its body that names each."""
        return f"{', '.join(self.ring_names)} = rings\n    " if len(self.ring_names) > 2 else ""

    @property
    def ring_depths(self) -> tuple[str, ...]:
        """Constants of the depths of the K and V rings."""
        return tuple(f"{ring.slots_name} = gl.constexpr({ring.slots})  # {ring.text}" for ring in self.kv_rings)

    @property
    def new_rings(self) -> tuple[str, ...]:
        """Statements that make the rings."""
        slots = (str(1 if self.by_keys else self.softmax_tiles), *(ring.slots_name for ring in self.kv_rings))
        described = tuple(map(self.descriptors_of, "qkv"))
        return tuple(f"{name} = make_ring({described[n]}, {slots[n]})" for n, name in enumerate(self.ring_names))

    @property
    def first_places(self) -> str:
        """The statement that starts every ring at its first slot."""
        names = [f"{name}_at" for name in self.ring_names]
        return f"{', '.join(names)} = {', '.join(['(zero, zero)'] * len(names))}"

    @property
    def group_names(self) -> str:
        """The softmax groups."""
        return ", ".join(f"softmax{group}" for group in range(self.softmax_tiles))

    @property
    def new_groups(self) -> tuple[str, ...]:
        """Statements that make the softmax groups."""
        return tuple(
            f"softmax{group} = make_softmax({'o' if self.by_keys else ''})" for group in range(self.softmax_tiles)
        )

    @property
    def softmax_roles(self) -> tuple[str, ...]:
        """Partitions of the softmax groups."""
        other = [f"softmax{1 - group}, " if self.by_keys else "" for group in range(self.softmax_tiles)]
        return tuple(
            f"(softmax_role, ({group}, {lag}, softmax{group}, {other[group]}problem)),"
            for group, lag in enumerate(self.stats_lag)
        )

    @property
    def new_o(self) -> str:
        """Expression that allocates O."""
        made = [f"allocate_tensor_memory(gl.float32, [ROWS, {p.width}], accumulator({p.width}))" for p in self.v_pieces]
        return f"({', '.join(made)})" if len(made) > 1 else made[0]

    def o_columns(self, holder: str) -> str:
        """A call for some columns of O, up to its first number."""
        return f"o_columns({holder}, " if self.o_in_pieces else f"{holder}.o.slice("

    @property
    def pv_statements(self) -> tuple[str, ...]:
        """Products of P and V, in powers of two of keys, with the barriers that they wait for."""
        n, lines = self.tile_n, []
        halves = (("p_ready", 0, n // 2), ("", n // 2, n // 4), ("p_rest", 3 * n // 4, n // 4))
        v, o = ("v[i]", "softmax.o[i]") if self.o_in_pieces else ("v[0]" if self.in_pieces else "v", "softmax.o")
        for barrier, start, keys in halves if self.split_p else (("p_ready", 0, n),):
            part = f".slice({start}, {keys})" if keys != n else ""
            product = f"tcgen05_mma(p{part}, {v}{part}, {o}, use_acc={'True' if start else 'use_acc'})"
            lines += [f"mbarrier.wait(softmax.{barrier}, phase)"] if barrier else []
            lines += ["for i in gl.static_range(len(v)):", "    " + product] if self.o_in_pieces else [product]
        return tuple(lines)

    @property
    def tmem_columns(self) -> int:
        """Columns of tensor memory in use."""
        return sum(columns for _, _, columns in self.tmem_map)

    @property
    def tmem_text(self) -> str:
        """Where S and O lie."""
        return ", ".join(f"{name} at {start}" for name, start, _ in self.tmem_map)

    # -- host ----------------------------------------------------------------------------------------------------------

    @property
    def host(self) -> Host:
        """The host side."""
        boxes = [(made.tensor, made.rows, made.columns) for made in self.descriptors]
        lines = [*box_statements(boxes, [made.split for made in self.descriptors] if self.pair else ())]
        lines += WINDOW_STATEMENTS if self.mask == "window" else ()
        lines += ["query_blocks, heads = triton.cdiv(seqlen_q, TILE_M.value), batch * heads_q"]
        lines += ["programs = query_blocks * heads"]
        if self.persistent:
            lines += [SMS_STATEMENT, f"programs = min(programs, sms{' // 2' if self.pair else ''})"]
        elif self.scheduler == "longest-first":
            lines += [
                f"# As many heads at a time as have their K and V in {self.l2_megabytes} MB of L2.",
                f"fitting = max({self.l2_megabytes} * 2**20 // ({self.kv_bytes_per_key} * seqlen_k), 1)",
                "heads_at_once = min(2 ** (fitting.bit_length() - 1) * (heads_q // heads_kv), heads)",
            ]
        values = ("heads_q // heads_kv" if name == "group" else name for name in self.sizes)
        lines += [sizes_statement(values)]
        return Host(self.mask, self.head_dim_qk, self.head_dim_v, tuple(lines), self.host_arguments)

    # -- launch --------------------------------------------------------------------------------------------------------

    @property
    def needs_newest(self) -> tuple[tuple[str, str, str], ...]:
        """(what, module, name it lacks in older releases) of what needs a new Triton."""
        out = []
        if self.pair:
            out.append(("a pair of CTAs that multiplies together", "mbarrier", "allocate_mbarrier"))
        if self.load_max:
            out.append(
                ("a row maximum that comes with the load (tcgen05.ld.red)", "tensor_memory_descriptor", "load_max")
            )
        return tuple(out)

    @property
    def copy_tile(self) -> str:
        """The function that starts a copy."""
        return "tma.async_load" if self.needs_newest else "copy_tile"

    @property
    def worker_warps(self) -> list[int]:
        """Warps of the roles beside the correction role."""
        return [*[4] * self.softmax_tiles, 1, 1]

    @property
    def worker_registers(self) -> list[int]:
        """Registers of a thread of these roles."""
        return [*[self.softmax_registers] * self.softmax_tiles, *[self.other_registers] * 2]
