"""What the template of the `blackwell_ws` family needs to know: a FlashAttention-4 forward in Gluon for sm_100 and sm_103.

Python decides here, `templates/blackwell_ws.py.j2` only writes.  The order of work in the roles is read from the
`Pipeline`, the same value the forecast is made from: see `blackwell_order`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.codegen import blackwell_order
from tilecast.codegen.blackwell_order import Phases, Rings
from tilecast.codegen.exp2 import COEFFICIENTS
from tilecast.model.kernel.variant import Fa4Variant, VariantError, fa4_smem_bytes, legality
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.build import build_pipeline
from tilecast.model.pipeline.graph import Pipeline

TEMPLATE = "blackwell_ws.py.j2"
#: Name of the kernel in the generated file.
KERNEL = "attention"

SCHEDULERS = ("grid", "persistent", "longest-first")

#: Registers of a (softmax, other) thread by (CTA pair, causal, head_dim, 32 ex2 a clock): fa4.md (d), table of
#: flash_fwd_sm100.py.  The correction role gets the rest of the file.
_REGISTERS: dict[tuple[bool, bool, int, bool], tuple[int, int]] = {
    (True, False, 128, False): (176, 72),
    (False, True, 128, False): (192, 56),
    (True, False, 192, False): (184, 64),
    (False, True, 192, False): (192, 56),
    (True, False, 128, True): (176, 80),
    (False, True, 128, True): (176, 96),
    (True, False, 192, True): (176, 96),
    (False, True, 192, True): (176, 88),
    # Ours, where the defaults below spill.
    (False, False, 192, False): (200, 56),
    (True, False, 64, True): (192, 56),
}
_REGISTERS_SMALL = (200, 48)  # head_dim below 96
_REGISTERS_DEFAULT = (192, 48)
_REGISTERS_BY_KEYS = (184, 72)  # ours: operand addresses of 256 wide heads need more than 48; 176 spills with a mask
_REGISTER_FILE = 65536
#: Heads whose K and V stay in L2 together (fa4.md (h)).
_L2_MEGABYTES = 50
#: Columns of O that the correction role holds at a time; when it stores, a 32-byte sector a row.
_O_COLUMNS = 16
#: Periods of the emulation rule in flash_fwd_sm100.py (fa4.md (d)), and 4, which emulates everything.
_EMULATION_PERIODS = (32, 16, 10, 8, 14, 4)
#: ... when it rescales in every step, has the registers, and should therefore make few round trips.
_O_COLUMNS_BRANCH_FREE, _REGISTERS_BRANCH_FREE = 32, 80
_ELEMENT_BYTES = 2
#: Shared memory beside tiles, statistics and barriers: what the compiler takes for itself, read off compilations.
_COMPILER_BYTES = 640
_MASK_TEXT = {
    "none": "Every query sees every key.",
    "causal": "Query i sees keys up to i + seqlen_k - seqlen_q.",
    "window": "Query i sees keys from window_left before to window_right after position i + seqlen_k - seqlen_q.",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """Columns of a head dimension that are one matrix product: a power of two of them."""

    start: int
    width: int


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A tensor descriptor that the kernel takes: boxes of ``rows`` (a constant of the file) x ``columns``."""

    name: str
    tensor: str
    rows: str
    columns: int
    #: The dimension that a pair of CTAs divides between them, as a ``cga_layout``.
    split: str


@dataclass(frozen=True, slots=True)
class KvRing:
    """A ring of K blocks, of V blocks or of both: the constant that holds its depth."""

    name: str
    slots_name: str
    slots: int
    text: str


@dataclass(frozen=True, slots=True)
class BlackwellKernel:
    """Everything `TEMPLATE` reads except the header, as ``k``; see the template for what each field becomes."""

    title: str
    description: str
    mask: str
    head_dim_qk: int
    head_dim_v: int
    scheduler: str
    stages: int
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
    store_columns: int = _O_COLUMNS
    l2_megabytes: int = _L2_MEGABYTES

    @property
    def pair(self) -> bool:
        """Whether two CTAs multiply together."""
        return self.cta_group == 2

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
        return self.rows * (1 if self.by_keys else self.stages)

    @property
    def quarter(self) -> int:
        """Columns of a quarter of a key block."""
        return self.tile_n // 4

    @property
    def quarter_bits(self) -> int:
        """Halvings from a quarter to one column."""
        return self.quarter.bit_length() - 1

    @property
    def kv_bytes_per_key(self) -> int:
        """Bytes of K and V for one key of one head."""
        return (self.head_dim_qk + self.head_dim_v) * _ELEMENT_BYTES

    # -- work ----------------------------------------------------------------------------------------------------------

    @property
    def _numbers(self) -> tuple[tuple[str, str], ...]:
        """(name in the kernel, expression in `prepare`) of the sizes that roles copy.

        What several roles need is worked out once, on the host: the compiler would otherwise compute it before the
        roles part and hold it in registers, or in local memory, through all of them.
        """
        out = [("heads_q", "heads_q"), ("group", "heads_q // heads_kv"), ("seqlen_q", "seqlen_q"), ("seqlen_k", "seqlen_k")]
        if self.mask == "window":
            out += [("window_left", "window_left"), ("window_right", "window_right")]
        out.append(("query_blocks", "query_blocks"))
        if self.scheduler != "grid":
            name = "programs" if self.persistent else "heads_at_once"
            out += [("heads", "heads"), (name, name)]
        return tuple(out)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Integers of `Problem`: strides of the output first."""
        return ("stride_b", "stride_h", "stride_s", *(name for name, _ in self._numbers))

    @property
    def number_values(self) -> tuple[str, ...]:
        """Expressions in `prepare` for the numbers after the strides."""
        return tuple(value for _, value in self._numbers)

    @property
    def arguments(self) -> str:
        """Arguments of `Problem`, which the kernel has after its descriptors."""
        return ", ".join(("out", "lse", *self.numbers, "scale_log2,"))

    @property
    def own_copies(self) -> str:
        """Arguments of a `Problem` whose sizes are a role's own."""
        kept = [f"self.{name}" for name in ("out", "lse", "stride_b", "stride_h", "stride_s")]
        return ", ".join([*kept, *(f"own_copy(self.{name})" for name, _ in self._numbers), "self.scale_log2,"])

    @property
    def steps(self) -> str:
        """What a role's loop over keys counts."""
        return "pairs" if self.by_keys else "blocks"

    @property
    def step_keys(self) -> str:
        """Keys of one step of that loop."""
        return f"{self.stages} * TILE_N" if self.by_keys else "TILE_N"

    @property
    def block_count(self) -> str:
        """Key blocks up to the last one that a work tile takes."""
        first = "first + " if self.mask == "window" else ""
        return first + (f"{self.stages} * pairs" if self.by_keys else "blocks")

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

    def descriptors_of(self, tensor: str) -> str:
        """The descriptors of a tensor as the roles take them."""
        names = [made.name for made in self.descriptors if made.tensor == tensor]
        return f"({', '.join(names)},)" if self.in_pieces else names[0]

    def bytes_of(self, descriptor: str) -> str:
        """Bytes of a tile that land in one CTA."""
        return f"{descriptor}.nbytes_per_cta" if self.pair else f"{descriptor}.block_type.nbytes"

    @property
    def ring_names(self) -> tuple[str, ...]:
        """All rings, Q's first."""
        return self.rings.names

    @property
    def new_rings(self) -> tuple[tuple[str, str], ...]:
        """(name, expression that makes it) of each."""
        slots = (str(1 if self.by_keys else self.stages), *(ring.slots_name for ring in self.kv_rings))
        return tuple((name, f"make_ring(descs[{n}], {slots[n]})") for n, name in enumerate(self.ring_names))

    @property
    def first_places(self) -> str:
        """The statement that starts every ring at its first slot."""
        names = [f"{name}_at" for name in self.ring_names]
        return f"{', '.join(names)} = {', '.join(['(zero, zero)'] * len(names))}"

    @property
    def group_names(self) -> str:
        """The softmax groups as a tuple."""
        return ", ".join(f"softmax{group}" for group in range(self.stages)) + ("," if self.stages == 1 else "")

    @property
    def new_o(self) -> str:
        """Expression that allocates O."""
        made = [f"allocate_tensor_memory(gl.float32, [ROWS, {p.width}], accumulator({p.width}))" for p in self.v_pieces]
        return f"({', '.join(made)})" if len(made) > 1 else made[0]

    def o_columns(self, holder: str) -> str:
        """What is called for some columns of O."""
        return f"{holder}.o_columns" if len(self.v_pieces) > 1 else f"{holder}.o.slice"

    def keys_of(self, operand: str, start: int, count: int) -> str:
        """The part of P or V for some keys of a block."""
        return operand if count == self.tile_n else f"{operand}.slice({start}, {count})"

    @property
    def p_parts(self) -> tuple[tuple[str, int, int], ...]:
        """(barrier to wait for first, first key, keys) of the products of a PV, in powers of two."""
        n = self.tile_n
        if not self.split_p:
            return (("p_ready", 0, n),)
        return (("p_ready", 0, n // 2), ("", n // 2, n // 4), ("p_rest", 3 * n // 4, n // 4))

    @property
    def tmem_columns(self) -> int:
        """Columns of tensor memory in use."""
        return sum(columns for _, _, columns in self.tmem_map)

    @property
    def tmem_text(self) -> str:
        """Where S and O lie."""
        return ", ".join(f"{name} at {start}" for name, start, _ in self.tmem_map)

    # -- softmax -------------------------------------------------------------------------------------------------------

    @property
    def stats_slot(self) -> str:
        """Slot of row statistics number n."""
        return "0" if self.stats_slots == 1 else "n & 1"

    @property
    def stats_phase(self) -> str:
        """Phase of that slot's barriers."""
        return "n & 1" if self.stats_slots == 1 else "(n >> 1) & 1"

    @property
    def correct_parameters(self) -> str:
        """What the correction role passes on for a block."""
        return "later, released, o_full, o_phase" if self.by_keys else "later, released"

    @property
    def emulated_count(self) -> int:
        """Columns of a key block whose exponentials go to the FMA pipe."""
        return 2 * sum(map(len, self.emulated))

    @property
    def exp2_columns(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(constant, columns) of the different mixes of exponentials that quarters have."""
        mixes = sorted({columns for columns in self.emulated if columns})
        return tuple((f"EXP2_{n}" if len(mixes) > 1 else "EXP2", columns) for n, columns in enumerate(mixes))

    @property
    def polynomial(self) -> tuple[float, ...]:
        """Coefficients of 2^f, lowest power first."""
        return (1.0, *COEFFICIENTS[self.poly_degree])

    @property
    def quarters(self) -> tuple[tuple[str, str, str, str], ...]:
        """(name, function, its further arguments, barrier to arrive at then) of the exponentials of each quarter."""
        constants = {columns: name for name, columns in self.exp2_columns}
        ready = ("", "", "p_ready" if self.split_p else "", "p_rest" if self.split_p else "p_ready")
        return tuple(
            (name, "exp2_mixed" if columns else "gl.exp2", f", {constants[columns]}" if columns else "", barrier)
            for name, columns, barrier in zip("abcd", self.emulated, ready, strict=True)
        )

    # -- launch --------------------------------------------------------------------------------------------------------

    @property
    def needs_newest(self) -> tuple[tuple[str, str, str], ...]:
        """(what, module, name it lacks in older releases) of what needs a new Triton."""
        out = []
        if self.pair:
            out.append(("a pair of CTAs that multiplies together", "mbarrier", "allocate_mbarrier"))
        if self.load_max:
            out.append(("a row maximum that comes with the load (tcgen05.ld.red)", "tensor_memory_descriptor", "load_max"))
        return tuple(out)

    @property
    def aggregate(self) -> str:
        """The decorator of aggregates, which Triton 3.6 has under another name."""
        return "gluon.aggregate" if self.needs_newest else "aggregate"

    @property
    def copy_tile(self) -> str:
        """The function that starts a copy."""
        return "tma.async_load" if self.needs_newest else "copy_tile"

    @property
    def worker_warps(self) -> list[int]:
        """Warps of the roles beside the correction role."""
        return [*[4] * self.stages, 1, 1]

    @property
    def worker_registers(self) -> list[int]:
        """Registers of a thread of these roles."""
        return [*[self.softmax_registers] * self.stages, *[self.other_registers] * 2]


def context(
    variant: Fa4Variant, workload: Workload, machine: Machine, pipeline: Pipeline | None = None
) -> BlackwellKernel:
    """The kernel of a variant.

    ``pipeline`` is the variant's pipeline, by default as built; pass `patterns.with_discovered_order` of it to generate
    the order that a schedule found.  Raises VariantError, one sentence, for what is illegal or Gluon cannot express.
    """
    _refuse(variant, workload, machine)
    pipeline = pipeline or build_pipeline(workload, variant, machine)
    groups, by_keys = variant.stages, variant.split == "k" and variant.stages > 1
    persistent = variant.scheduler == "persistent"
    order = blackwell_order.matrix_order(pipeline, groups, by_keys)
    kv_rings = _kv_rings(variant, workload, machine)
    rings = Rings(kv_rings[0].name, kv_rings[-1].name)
    softmax_registers, other_registers, at_launch = _registers(variant, workload, machine)
    correction_registers = _REGISTER_FILE // 128 - groups * softmax_registers - other_registers
    # Threshold 0 moves most maxima, so a test would only cost.  A pair would have to vote across its two CTAs.
    branch_free = variant.rescale_threshold == 0 or variant.cta_group == 2
    roomy = branch_free and correction_registers >= _REGISTERS_BRANCH_FREE
    _check_shared_memory(variant, workload, machine, by_keys, kv_rings)
    return BlackwellKernel(
        title=_title(workload),
        description=_description(variant, workload),
        mask=workload.mask,
        head_dim_qk=workload.head_dim_qk,
        head_dim_v=workload.head_dim_v,
        scheduler=variant.scheduler,
        stages=groups,
        by_keys=by_keys,
        cta_group=variant.cta_group,
        tile_n=variant.tile_n,
        split_p=variant.split_p,
        stats_slots=variant.stats_slots,
        rescale_threshold=float(variant.rescale_threshold),
        branch_free=branch_free,
        load_max=variant.load_max,
        poly_degree=variant.poly_degree,
        emulated=emulated_columns(variant),
        rescale_columns=_O_COLUMNS_BRANCH_FREE if roomy else _O_COLUMNS,
        qk_pieces=_pieces(workload.head_dim_qk),
        v_pieces=_pieces(workload.head_dim_v),
        kv_rings=kv_rings,
        rings=rings,
        issue_text=order.text(),
        load=blackwell_order.load_statements(order, rings, groups, by_keys),
        mma=blackwell_order.matrix_statements(order, rings, groups, by_keys, persistent),
        correction=blackwell_order.correction_statements(pipeline, groups, by_keys, persistent),
        stats_lag=blackwell_order.stats_lag(pipeline, variant),
        softmax_registers=softmax_registers,
        other_registers=other_registers,
        registers_at_launch=at_launch,
        tmem_map=_tmem_map(variant, workload, by_keys),
    )


def _refuse(variant: Fa4Variant, workload: Workload, machine: Machine) -> None:
    verdict = legality(variant, workload, machine)
    if not verdict.legal:
        raise VariantError(f"blackwell_ws: {verdict.sentence()}")
    if workload.dtype not in ("bf16", "fp16"):
        raise VariantError(f"blackwell_ws: dtype must be bf16 or fp16, got '{workload.dtype}'")
    if variant.scheduler not in SCHEDULERS:
        raise VariantError(f"blackwell_ws: scheduler must be {', '.join(SCHEDULERS)}, got '{variant.scheduler}'")
    if variant.stages > 2:
        raise VariantError(f"blackwell_ws: the register file holds two softmax groups, got stages={variant.stages}")
    if variant.tile_n not in (64, 128):
        raise VariantError(
            f"blackwell_ws: tile_n must be 64 or 128 (powers of two in Triton, a row of S in registers), got {variant.tile_n}"
        )
    if not 3 <= variant.poly_degree <= 5:
        raise VariantError(f"blackwell_ws: poly_degree must be 3, 4 or 5, got {variant.poly_degree}")
    if workload.head_dim_v % _O_COLUMNS_BRANCH_FREE:
        raise VariantError(
            f"blackwell_ws: head_dim_v must be a multiple of {_O_COLUMNS_BRANCH_FREE}, got {workload.head_dim_v}"
        )


def _title(workload: Workload) -> str:
    mask = {"none": "Attention", "causal": "Causal attention", "window": "Sliding-window attention"}[workload.mask]
    dims = f"{workload.head_dim_qk}"
    if workload.head_dim_v != workload.head_dim_qk:
        dims += f" (queries, keys) and {workload.head_dim_v} (values)"
    return f"{mask} forward for head_dim {dims} on Blackwell: FlashAttention-4 in Gluon"


def _description(variant: Fa4Variant, workload: Workload) -> str:
    pair, by_keys = variant.cta_group == 2, variant.split == "k" and variant.stages > 1
    tile = "256 query rows (128 in each of two CTAs that multiply together)" if pair else "128 query rows"
    lines = [_MASK_TEXT[workload.mask]]
    if variant.stages == 1:
        lines.append(f"A unit of work is {tile} of one head; one softmax group of four warps serves it.")
    elif by_keys:
        lines.append(
            f"A unit of work is {tile} of one head; two softmax groups of four warps take turns at its key blocks."
        )
    else:
        lines.append(
            f"A unit of work is two tiles of {tile}; each has a softmax group of four warps, and they share K and V."
        )
    lines.append("One warp loads, one issues matrix products, four warps correct the output and store it.")
    lines.append("S, P and O stay in tensor memory; keys go from the last block to the first, masked blocks first.")
    if variant.emulated_share:
        lines.append(
            f"{variant.emulated_share:.4g} of the exponentials run on the FMA pipe, degree {variant.poly_degree}."
        )
    order = {
        "grid": "One program a unit.",
        "persistent": "Programs stay and take every n-th unit.",
        "longest-first": "One program a unit, the longest units first.",
    }
    lines.append(order[variant.scheduler])
    return "\n".join(lines)


# --- what the hardware decides --------------------------------------------------------------------------------------


def emulated_columns(variant: Fa4Variant) -> tuple[tuple[int, ...], ...]:
    """Per quarter of a row, the even columns whose pair of exponentials goes to the FMA pipe.

    FlashAttention-4's rule (fa4.md (f)) where one of its settings gives the share: in quarters `start` to 2, element k
    is emulated when k mod freq >= freq - 4.  Other shares are spread evenly over the quarters but the last, which the
    tensor core waits for on its own; beyond three quarters of the exponentials it takes part as well.
    """
    pairs = variant.emulated_share * variant.tile_n / 2
    if pairs != int(pairs):
        low, high = (int(pairs) * 2 / variant.tile_n, (int(pairs) + 1) * 2 / variant.tile_n)
        raise VariantError(
            f"blackwell_ws: emulated_share must be whole pairs of {variant.tile_n} columns, got {variant.emulated_share:g}; "
            f"nearest: {low:g} and {high:g}"
        )
    quarter = variant.tile_n // 4
    if not pairs:
        return ((),) * 4
    for start in (1, 0):
        for freq in _EMULATION_PERIODS:
            columns = tuple(k for k in range(0, quarter, 2) if k % freq >= freq - 4)
            if len(columns) * (3 - start) == pairs:
                return tuple(columns if start <= index < 3 else () for index in range(4))
    used = 3 if pairs <= 3 * quarter // 2 else 4
    out = []
    for index in range(4):
        count = int(pairs) * (index + 1) // used - int(pairs) * index // used if index < used else 0
        slots = quarter // 2
        out.append(tuple(2 * k for k in range(slots) if (k + 1) * count // slots > k * count // slots))
    return tuple(out)


def _registers(variant: Fa4Variant, workload: Workload, machine: Machine) -> tuple[int, int, int]:
    """Registers of a softmax thread, of a thread of the matrix and load warps, and of every thread at launch."""
    wide = max(workload.head_dim_qk, workload.head_dim_v)
    key = (variant.cta_group == 2, workload.mask != "none", wide, machine["mufu.ex2_per_clk"] >= 32)
    # One warp each for the matrix and the load role, and two that idle: registers are handed out to four at a time.
    warps = 4 * variant.stages + 4 + 4
    at_launch = _REGISTER_FILE // (32 * warps) // 8 * 8
    if variant.stages == 1:
        return 240, _REGISTERS_DEFAULT[1], at_launch
    if variant.split == "k":
        return *_REGISTERS_BY_KEYS, at_launch
    softmax, other = _REGISTERS.get(key, _REGISTERS_SMALL if wide < 96 else _REGISTERS_DEFAULT)
    return softmax, other, at_launch


def _pieces(head_dim: int) -> tuple[Piece, ...]:
    """Powers of two, largest first, that add up to ``head_dim``: Triton's shapes are powers of two; each is one MMA."""
    widths = [1 << bit for bit in reversed(range(head_dim.bit_length())) if head_dim >> bit & 1]
    return tuple(Piece(sum(widths[:i]), width) for i, width in enumerate(widths))


def _kv_rings(variant: Fa4Variant, workload: Workload, machine: Machine) -> tuple[KvRing, ...]:
    """One ring where K and V tiles are alike, else one each; as many slots as the model counts."""
    _, _, slots = fa4_smem_bytes(variant, workload, machine)
    if workload.head_dim_qk == workload.head_dim_v and variant.cta_group == 1:
        return (KvRing("kv", "KV_STAGES", slots, "K and V blocks in flight; they take turns in one ring"),)
    return (
        KvRing("k", "K_STAGES", slots - slots // 2, "K blocks in flight"),
        KvRing("v", "V_STAGES", slots // 2, "V blocks in flight"),
    )


def _check_shared_memory(
    variant: Fa4Variant, workload: Workload, machine: Machine, by_keys: bool, rings: tuple[KvRing, ...]
) -> None:
    """Refuse what the model's allowance for bookkeeping does not hold: two statistics slots, many barriers."""
    query, _, _ = fa4_smem_bytes(variant, workload, machine)
    widths = (workload.head_dim_qk, workload.head_dim_v)
    ring_bytes = sum(
        ring.slots * variant.tile_n * width * _ELEMENT_BYTES // variant.cta_group
        for ring, width in zip(rings, widths, strict=False)
    )
    rows = variant.stages * (variant.stats_slots + by_keys) * 128 * 4
    # Full and empty ones of Q and the rings; each group's for S, P, its rest, O, its statistics and its maximum.
    barriers = 2 * (1 if by_keys else variant.stages) + 2 * sum(ring.slots for ring in rings)
    barriers += variant.stages * (3 + variant.split_p + 2 * variant.stats_slots + by_keys)
    beside = rows + 8 * barriers + _COMPILER_BYTES
    limit = int(machine["smem.per_cta_bytes"])
    if query + ring_bytes + beside > limit:
        raise VariantError(
            f"blackwell_ws: row statistics and barriers need {beside} bytes of shared memory beside the tiles, "
            f"{limit - query - ring_bytes} are left: use stats_slots=1 or fewer kv_stages"
        )


def _tmem_map(variant: Fa4Variant, workload: Workload, by_keys: bool) -> tuple[tuple[str, int, int], ...]:
    """(name, first column, columns) of tensor memory in the order of allocation."""
    s, o = variant.tile_n, workload.head_dim_v
    if by_keys:
        names = [("O", o), *((f"S{group}", s) for group in range(variant.stages))]
    else:
        names = [pair for group in range(variant.stages) for pair in ((f"S{group}", s), (f"O{group}", o))]
    return tuple((name, sum(n for _, n in names[:i]), columns) for i, (name, columns) in enumerate(names))
