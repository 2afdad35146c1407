"""Closed forms: cycles of each unit of one SM per score tile, as sympy expressions and as numbers.

Forward and backward tables are those of the FlashAttention-4 paper (arXiv 2603.05451 and its blog; fa4.md (b), (c)).
Symbols: M query rows and N keys of the tile, U rows of one matrix instruction, d_qk and d_v head dims, b bytes per
element, g CTAs that share a matrix instruction, f share of exponentials emulated on the FMA pipe, c FMA slots of one
emulated ex2; R_mma FLOP/clk, R_ex2 op/clk, R_smem B/clk, R_fma and R_alu lanes/clk, w inputs of one min/max
instruction, R_cvt pack instructions/clk, R_tr and R_tw tensor memory B/clk.  Cycles are SM clocks.
sympy is imported inside functions: a forecast does not pay for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from tilecast.model.traffic import FlashBound, Traffic, flash_bound, fused_traffic, unfused_traffic
from tilecast.model.workload import DTYPES, Workload

#: Rows one matrix instruction covers, that is rows per read of its B operand: tcgen05, wgmma, and a warp's share of a
#: 128-row mma.sync tile on four warps.
_INSTRUCTION_ROWS = {"tcgen05": 128, "wgmma": 64, "mma_sync": 32}
UNIT_TITLES = {
    "tensor": "tensor core (MMA)",
    "mufu": "MUFU (ex2)",
    "smem": "shared memory",
    "fma": "FMA pipe",
    "alu": "ALU pipe",
    "cvt": "conversion",
    "tmem_read": "tensor memory read",
    "tmem_write": "tensor memory write",
}


class DemandError(ValueError):
    """A tile, dtype or machine without closed forms; the message is one sentence."""


class Facts(Protocol):
    """What the closed forms need of a machine; a Machine and a plain dict both have it."""

    def __getitem__(self, key: str, /) -> float: ...

    def get(self, key: str, default: float, /) -> float: ...


@dataclass(frozen=True, slots=True)
class Item:
    """One contribution: cycles of ``unit`` per score tile."""

    name: str
    unit: str
    expression: Any
    cycles: float
    #: False for what the paper's totals leave out (shown, not summed).
    counted: bool = True


@dataclass(frozen=True, slots=True)
class Demand:
    """All contributions of one pass over one score tile on one SM (one CTA of a pair)."""

    title: str
    items: tuple[Item, ...]

    @property
    def units(self) -> tuple[str, ...]:
        """Units with demand, in report order."""
        return tuple(unit for unit in UNIT_TITLES if any(item.unit == unit for item in self.items))

    def cycles(self, unit: str) -> float:
        """Cycles of ``unit`` per score tile (0 when unused)."""
        return sum(item.cycles for item in self.items if item.unit == unit and item.counted)

    def expression(self, unit: str) -> Any:
        """Closed form of `cycles`."""
        import sympy

        terms = [item.expression for item in self.items if item.unit == unit and item.counted]
        return sympy.factor_terms(sympy.Add(*terms))

    @property
    def binding(self) -> str:
        """Unit with the most cycles; the first in report order among equals."""
        return max(self.units, key=self.cycles)


@dataclass(frozen=True, slots=True)
class BreakEven:
    """A statement solved for one symbol; ``value`` is None where it has no positive solution."""

    statement: str
    symbol: str
    expression: Any
    value: float | None
    remark: str = ""


@dataclass(frozen=True, slots=True)
class TileShape:
    """The score tile the closed forms are evaluated for."""

    tile_m: int = 128
    tile_n: int = 128
    head_dim_qk: int = 128
    head_dim_v: int = 128
    dtype: str = "bf16"
    emulated_share: float = 0.0
    cta_group: int = 1

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n", "head_dim_qk", "head_dim_v"):
            if getattr(self, name) < 1:
                raise DemandError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.dtype not in DTYPES:
            raise DemandError(f"dtype: expected {', '.join(DTYPES)}, got '{self.dtype}'")
        if not 0 <= self.emulated_share <= 1:
            raise DemandError(f"emulated_share: expected 0 to 1, got {self.emulated_share:g}")
        if self.cta_group not in (1, 2):
            raise DemandError(f"cta_group: expected 1 or 2, got {self.cta_group}")


def tile_shape(workload: Workload, tile_m: int = 128, tile_n: int = 128) -> TileShape:
    """The tile of ``workload``, no emulation, one CTA."""
    return TileShape(tile_m, tile_n, workload.head_dim_qk, workload.head_dim_v, workload.dtype)


def _symbols() -> dict[str, Any]:
    import sympy

    names = "M N U d_qk d_v b g f c w R_mma R_ex2 R_smem R_fma R_alu R_cvt R_tr R_tw"
    return {n: sympy.Symbol(n, positive=True) for n in names.split()}


def _values(machine: Facts, shape: TileShape) -> dict[str, Any]:
    """Numbers for the symbols, exact where the facts are."""
    import sympy

    rate = machine.get(f"tensor.{shape.dtype}_flop_per_clk", 0.0)
    name = getattr(machine, "name", "the machine")
    if not rate:
        raise DemandError(f"{name} has no {shape.dtype} matrix rate in its machine file: use bf16 or fp16")
    pack = "cvt.f32x2_to_fp8x2_per_clk" if shape.dtype == "fp8" else "cvt.f32x2_to_bf16x2_per_clk"
    kind = getattr(machine, "tensor_kind", "tcgen05")
    numbers: dict[str, float] = {
        "M": shape.tile_m, "N": shape.tile_n, "U": min(shape.tile_m, _INSTRUCTION_ROWS[kind]),
        "d_qk": shape.head_dim_qk, "d_v": shape.head_dim_v, "b": DTYPES[shape.dtype],
        "g": shape.cta_group, "f": shape.emulated_share,
        "c": machine.get("mufu.ex2_emulation_fma_slots", 7.45), "w": machine.get("alu.minmax_inputs", 2),
        "R_mma": rate, "R_ex2": machine["mufu.ex2_per_clk"], "R_smem": machine["smem.bytes_per_clk"],
        "R_fma": machine["fma.lanes"], "R_alu": machine["alu.lanes"],
        "R_cvt": machine.get(pack, machine.get("cvt.f32x2_to_bf16x2_per_clk", 32)),
        "R_tr": machine.get("tmem.read_bytes_per_clk", 0), "R_tw": machine.get("tmem.write_bytes_per_clk", 0),
    }  # fmt: skip
    # 0.1875 and the like are exact in binary; 7.45 becomes 149/20 instead of a 53-bit neighbour.
    return {key: sympy.Rational(str(value)) for key, value in numbers.items()}


def _items(rows: list[tuple[str, str, Any, bool]], machine: Facts, shape: TileShape) -> tuple[Item, ...]:
    symbols, values = _symbols(), _values(machine, shape)
    numbers = {symbols[name]: value for name, value in values.items()}
    return tuple(
        Item(name, unit, expression, float(expression.subs(numbers)), counted)
        for name, unit, expression, counted in rows
    )


def forward_demand(machine: Facts, shape: TileShape | None = None) -> Demand:
    """One M x N score tile of the forward pass.

    Shared memory: Q and K feed Q K^T, V feeds P V (P comes from tensor memory or registers); K and V are read once per
    U rows, halved over a pair.  fa4.md's 3 M N d / 8192 is this with N = U = 128.
    """
    shape = shape or TileShape()
    k = _symbols()
    pairs = k["M"] * k["N"]
    per_row_block = k["M"] / k["U"] * k["N"] * k["b"] / (k["g"] * k["R_smem"])
    rows: list[tuple[str, str, Any, bool]] = [
        ("S = Q K^T", "tensor", 2 * pairs * k["d_qk"] / k["R_mma"], True),
        ("O += P V", "tensor", 2 * pairs * k["d_v"] / k["R_mma"], True),
        ("ex2 of the scores", "mufu", (1 - k["f"]) * pairs / k["R_ex2"], True),
        # The profiler's XU counts it; the paper's tables do not.
        ("ex2 of the row scale", "mufu", k["M"] / k["R_ex2"], False),
        ("read Q", "smem", k["M"] * k["d_qk"] * k["b"] / k["R_smem"], True),
        ("read K", "smem", per_row_block * k["d_qk"], True),
        ("read V", "smem", per_row_block * k["d_v"], True),
        ("scale and subtract maximum", "fma", pairs / k["R_fma"], True),
        ("row sum", "fma", pairs / k["R_fma"], True),
        ("emulated ex2", "fma", k["c"] * k["f"] * pairs / k["R_fma"], True),
        ("row maximum", "alu", pairs / ((k["w"] - 1) * k["R_alu"]), True),
        ("pack P", "cvt", pairs / (2 * k["R_cvt"]), True),
    ]
    if machine.get("tmem.read_bytes_per_clk", 0.0):
        rows += [
            ("read S", "tmem_read", 4 * pairs / k["R_tr"], True),
            ("write P", "tmem_write", k["b"] * pairs / k["R_tw"], True),
        ]
    return Demand("forward", _items(rows, machine, shape))


def _backward_compute(k: dict[str, Any]) -> list[tuple[str, str, Any, bool]]:
    """Five products and the recomputed exponentials (the backward emulates none)."""
    pairs = k["M"] * k["N"]
    products = (("S = Q K^T", "d_qk"), ("dP = dO V^T", "d_v"), ("dV = P^T dO", "d_v"), ("dK = dS^T Q", "d_qk"),
                ("dQ = dS K", "d_qk"))  # fmt: skip
    rows = [(name, "tensor", 2 * pairs * k[dim] / k["R_mma"], True) for name, dim in products]
    return [*rows, ("ex2 of the scores", "mufu", pairs / k["R_ex2"], True)]


def backward_demand(machine: Facts, shape: TileShape | None = None, cta_group: int = 1) -> Demand:
    """One M x N score tile of the backward pass, one CTA alone (1) or one CTA of a pair (2).

    Itemised as in the paper.  The pair splits the second operand of every product, exchanges half of dS through
    distributed shared memory and reduces half of the dQ tile per CTA.
    """
    if cta_group not in (1, 2):
        raise DemandError(f"cta_group: expected 1 or 2, got {cta_group}")
    k = _symbols()
    rate = k["R_smem"]
    q, do = (k["M"] * k[dim] * k["b"] / rate for dim in ("d_qk", "d_v"))
    key, value = (k["N"] * k[dim] * k["b"] / rate for dim in ("d_qk", "d_v"))
    ds, dq = k["M"] * k["N"] * k["b"] / rate, 4 * k["M"] * k["d_qk"] / rate
    if cta_group == 1:
        smem = [
            ("S: K, Q", key + q), ("dP: V, dO", value + do), ("dV: dO", do), ("dK: Q", q), ("dQ: dS, K", ds + key),
            ("dS write", ds), ("dQ fp32 write", dq), ("dQ fp32 read", dq),
        ]  # fmt: skip
    else:
        smem = [
            ("S: K, half Q", key + q / 2), ("dP: V, half dO", value + do / 2), ("dV: half dO", do / 2),
            ("dK: half Q", q / 2), ("dQ: dS, K", ds + key), ("dS write", ds),
            # The paper's table gives 384 clk: half a dS tile three times; which three passes is not published.
            ("dS exchange (DSMEM)", 3 * ds / 2),
            ("dQ fp32 write (half)", dq / 2), ("dQ fp32 read (half)", dq / 2),
        ]  # fmt: skip
    rows = _backward_compute(k) + [(name, "smem", expression, True) for name, expression in smem]
    return Demand(f"backward, {cta_group}-CTA", _items(rows, machine, shape or TileShape()))


def break_evens(machine: Facts, shape: TileShape | None = None) -> tuple[BreakEven, ...]:
    """Where two units of the forward pass take the same time, each solved by sympy for one symbol."""
    import sympy

    shape = shape or TileShape()
    k = _symbols()
    forward = forward_demand(machine, shape)
    mma, mufu, fma, smem = (forward.expression(unit) for unit in ("tensor", "mufu", "fma", "smem"))
    d = sympy.Symbol("d", positive=True)
    same_dim = {k["d_qk"]: d, k["d_v"]: d}
    no_share = {k["f"]: 0}
    share = sympy.Symbol("f")
    free = {k["f"]: share}
    questions = (
        ("head_dim at which exp = MMA (no emulation)", d, mufu.subs(no_share) - mma.subs(same_dim)),
        ("ex2 rate (op/clk) at which exp = MMA (no emulation)", k["R_ex2"], mufu.subs(no_share) - mma),
        ("emulated share at which MUFU = MMA", share, (mufu - mma).subs(free)),
        ("emulated share at which MUFU = FMA (more only moves the limit)", share, (mufu - fma).subs(free)),
        ("tile_n at which shared memory = MMA (below it operand reads bind)", k["N"], smem - mma),
    )
    values = {k[name]: value for name, value in _values(machine, shape).items()}
    found = []
    for statement, symbol, difference in questions:
        solved = sympy.solve(difference, symbol)
        if not solved:
            found.append(BreakEven(statement, str(symbol), None, None, "no such point"))
            continue
        numbers = {key: value for key, value in values.items() if key != symbol}
        value = float(solved[0].subs(numbers))
        remark = ""
        if value <= 0:
            remark = "none needed: MMA already takes at least as long" if symbol == share else "no such point"
        found.append(BreakEven(statement, str(symbol), solved[0], value if value > 0 else None, remark))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class DemandReport:
    """Everything `tilecast demand` prints, before it is text."""

    machine: str
    workload: Workload
    shape: TileShape
    forward: Demand
    backward: tuple[Demand, ...]
    break_evens: tuple[BreakEven, ...]
    traffic: tuple[Traffic, ...]
    bound: FlashBound
    hbm_tbps: float


def demand(machine: Facts, workload: Workload | None = None, tile_m: int = 128, tile_n: int = 128) -> DemandReport:
    """All closed forms for one machine, workload (default: `Workload()`) and tile; raises DemandError."""
    workload = workload or Workload()
    shape = tile_shape(workload, tile_m, tile_n)
    # The backward tables are those of a tcgen05 kernel: P^T and dS^T live in tensor memory.
    tensor_memory = bool(machine.get("tmem.read_bytes_per_clk", 0.0))
    backward = tuple(backward_demand(machine, shape, g) for g in (1, 2)) if tensor_memory else ()
    traffic = (
        unfused_traffic(workload, 4),
        unfused_traffic(workload, 2),
        fused_traffic(workload, 2 * tile_m if tensor_memory else tile_m, tile_n),
    )
    return DemandReport(
        str(getattr(machine, "name", "machine")), workload, shape, forward_demand(machine, shape), backward,
        break_evens(machine, shape), traffic, flash_bound(workload, machine.get("smem.per_cta_bytes", 232448)),
        machine.get("hbm.tbps_achieved", 0.0),
    )  # fmt: skip


def demand_report(machine: Facts, workload: Workload | None, tile_m: int, tile_n: int) -> str:
    """What ``tilecast demand`` prints: expressions and numbers, what binds, break-even points, memory traffic."""
    from tilecast.model.demand_text import as_text

    return as_text(demand(machine, workload, tile_m, tile_n))


def demand_dict(machine: Facts, workload: Workload | None, tile_m: int, tile_n: int) -> dict[str, Any]:
    """The same as plain values for --json."""
    from tilecast.model.demand_text import as_dict

    return as_dict(demand(machine, workload, tile_m, tile_n))
