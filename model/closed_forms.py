"""Closed forms: cycles per unit and score tile, forward and backward, and the HBM traffic argument.

Expressions are sympy, for reading, differentiating and break-evens; sympy loads only when they are asked for.  They
reproduce the tables of the FlashAttention-4 paper (FA4P, with FA4B); the simulation does not use them, it
is checked against them.  Symbols: M query rows, N key rows, d head dim (q/k), v head dim (v), b bytes per element,
U rows of one matrix
instruction, F matrix FLOP per cycle, E exponentials per cycle, W shared-memory bytes per cycle, L FMA lanes, A ALU lanes,
f share of exponentials emulated on the FMA pipe, k FMA lane slots of one emulated exponential.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilecast.base.words import folded

if TYPE_CHECKING:
    from tilecast.model.kernel.workload import Workload
    from tilecast.model.machine.machine import Machine

_NAMES = "M N U d v b F E W L A f k T_R T_W"
#: Rows one matrix instruction covers, so rows per read of its B operand (mma.sync: a warp's share of 128 rows on four).
_INSTRUCTION_ROWS = {"tcgen05": 128, "wgmma": 64, "mma_sync": 32}


class DemandError(ValueError):
    """A tile or machine without closed forms; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """One named expression (sympy) and what it counts; `evaluate` gives the number."""

    name: str
    meaning: str
    expression: Any
    unit: str = "cycles"

    def evaluate(self, values: dict[str, float]) -> float:
        """The expression's number for symbol values by name."""
        return float(self.expression.subs({s: values[str(s)] for s in self.expression.free_symbols}))


def symbols() -> dict[str, Any]:
    """The symbols by name, all positive but the emulated share, which may be 0."""
    import sympy

    positive = {name: sympy.Symbol(name, positive=True) for name in _NAMES.split()}
    return {**positive, "f": sympy.Symbol("f", nonnegative=True)}


def forward_forms() -> tuple[ClosedForm, ...]:
    """Forward, one M x N score tile with operands as FA4 places them: Q, K, V in shared memory, P in tensor memory."""
    s = symbols()
    m, n, d, v, b = s["M"], s["N"], s["d"], s["v"], s["b"]
    # Shared memory: every instruction re-reads its B operand, so K and V count once per U rows of M.
    reads = (m * d + m / s["U"] * n * d + m / s["U"] * n * v) * b
    return (
        ClosedForm("T_MMA", "matrix unit: S = Q K^T and O += P V", 2 * m * n * (d + v) / s["F"]),
        ClosedForm("T_EXP", "exponentials on MUFU, none emulated", m * n / s["E"]),
        ClosedForm("T_SMEM", "shared memory: operands Q, K, V", reads / s["W"]),
        ClosedForm("T_MUFU", "MUFU with a share f emulated", (1 - s["f"]) * m * n / s["E"]),
        ClosedForm("T_FMA", "FMA: scale, row sum, emulated exponentials", m * n * (2 + s["f"] * s["k"]) / s["L"]),
        ClosedForm("T_ALU", "ALU: 3-input row max, packing two to 16 bit", m * n * (1 + s["f"]) / s["A"]),
        ClosedForm("T_TMEM_READ", "tensor memory: S to registers", 4 * m * n / s["T_R"]),
        ClosedForm("T_TMEM_WRITE", "tensor memory: P from registers", b * m * n / s["T_W"]),
    )


def backward_forms(cta_pair: bool = False) -> tuple[ClosedForm, ...]:
    """Backward, one M x N tile: five matrix products and the itemised shared-memory traffic of FA4P (docs/sources.md).

    With ``cta_pair`` the two CTAs share tiles of M = 2 x 128 rows; cycles are per CTA and 128 x N tile.
    """
    s = symbols()
    m, n, d, v, b, w = s["M"], s["N"], s["d"], s["v"], s["b"], s["W"]
    key, value, query, grad, mn = n * d * b / w, n * v * b / w, m * d * b / w, m * v * b / w, m * n * b / w
    items: tuple[tuple[str, str, Any], ...]
    if not cta_pair:
        items = (
            ("S", "S = Q K^T: K and Q", key + query),
            ("dP", "dP = dO V^T: V and dO", value + grad),
            ("dV", "dV += P^T dO: dO (P^T in tensor memory)", grad),
            ("dK", "dK += dS^T Q: Q (dS^T in tensor memory)", query),
            ("dQ", "dQ = dS K: dS and K", mn + key),
            ("dS write", "dS to shared memory", mn),
            ("dQ fp32", "dQ fp32 tile written and read by the bulk reduction", 2 * 4 * m * d / w),
        )
    else:
        items = (
            ("S", "own K tile and half of the shared Q", key + query / 2),
            ("dP", "own V tile and half of the shared dO", value + grad / 2),
            ("dV", "half of dO", grad / 2),
            ("dK", "half of Q", query / 2),
            ("dQ", "dS of both CTAs' keys for half the rows, and K", mn + key),
            ("dS write", "dS to shared memory", mn),
            # The paper prints 384 clk, 1.5 tiles; which passes make them up is not published.
            ("dS exchange", "half a dS tile three times (DSMEM)", 3 * mn / 2),
            ("dQ fp32", "half of the dQ tile written and read by the bulk reduction", 4 * m * d / w),
        )
    total = sum((e for _, _, e in items), start=0 * m)
    return (
        ClosedForm("T_MMA", "matrix unit: S, dP, dV, dK, dQ", 2 * m * n * (3 * d + 2 * v) / s["F"]),
        ClosedForm("T_EXP", "exponentials to recompute P (never emulated)", m * n / s["E"]),
        ClosedForm("T_SMEM", "shared memory, sum of the items", total),
        *(ClosedForm(f"smem {name}", meaning, expression) for name, meaning, expression in items),
    )


@dataclass(frozen=True, slots=True)
class Traffic:
    """HBM bytes of the whole problem by kernel or tensor; ``items`` in order of appearance."""

    items: tuple[tuple[str, float], ...]

    @property
    def total(self) -> float:
        """All bytes."""
        return sum(size for _, size in self.items)


def unfused_traffic(workload: Workload, intermediate_bytes: int | None = None) -> Traffic:
    """Three kernels: S written and read, P written and read; ``intermediate_bytes`` per score (default: input dtype, at least 2)."""
    w, size = workload, workload.dtype_bytes
    middle = intermediate_bytes or max(2, size)
    heads = w.batch * w.heads_q
    scores = float(heads * w.seqlen_q * w.seqlen_k * middle)
    return Traffic(
        (
            ("read Q", float(heads * w.seqlen_q * w.head_dim_qk * size)),
            ("read K", float(w.batch * w.heads_kv * w.seqlen_k * w.head_dim_qk * size)),
            ("write S", scores),
            ("read S", scores),
            ("write P", scores),
            ("read P", scores),
            ("read V", float(w.batch * w.heads_kv * w.seqlen_k * w.head_dim_v * size)),
            ("write O", float(heads * w.seqlen_q * w.head_dim_v * 2)),
        )
    )


def fused_traffic(workload: Workload) -> Traffic:
    """One kernel: Q, K, V read once and O written once (K and V tiles of other query tiles come from L2)."""
    w, size = workload, workload.dtype_bytes
    heads = w.batch * w.heads_q
    return Traffic(
        (
            ("read Q", float(heads * w.seqlen_q * w.head_dim_qk * size)),
            ("read K", float(w.batch * w.heads_kv * w.seqlen_k * w.head_dim_qk * size)),
            ("read V", float(w.batch * w.heads_kv * w.seqlen_k * w.head_dim_v * size)),
            ("write O", float(heads * w.seqlen_q * w.head_dim_v * 2)),
        )
    )


def refetch_bytes(workload: Workload, tile_m: int = 256, tile_n: int = 128) -> float:
    """K and V that query tiles pull through L2: whole blocks of ``tile_n`` keys that a tile of ``tile_m`` rows sees."""
    w, blocks = workload, 0
    for first in range(0, w.seqlen_q, tile_m):
        low, high = w.key_range(first, min(first + tile_m, w.seqlen_q))
        blocks += -(-high // tile_n) - low // tile_n if high > low else 0
    return float(w.batch * w.heads_q * blocks * tile_n * (w.head_dim_qk + w.head_dim_v) * w.dtype_bytes)


def fa1_elements(seqlen: int, head_dim: int, sram_elements: int) -> float:
    """FlashAttention-1's Theta(N^2 d^2 / M): elements moved without an L2, with on-chip memory of M elements."""
    return seqlen * seqlen * head_dim * head_dim / sram_elements


def values_for(
    machine: Machine, workload: Workload, tile_m: int, tile_n: int, emulated_share: float = 0.0
) -> dict[str, float]:
    """Symbol values of a machine and a tile; DemandError for an empty tile or a missing matrix rate."""
    for name, size in (("--tile-m", tile_m), ("--tile-n", tile_n)):
        if size < 1:
            raise DemandError(f"{name}: expected at least 1 row, got {size}")
    if not machine.has(f"tensor.{workload.dtype}_flop_per_clk"):
        raise DemandError(f"{machine.name} has no {workload.dtype} matrix rate in its machine file: use bf16 or fp16")
    return {
        "M": tile_m,
        "N": tile_n,
        "U": min(tile_m, _INSTRUCTION_ROWS[machine.tensor_kind]),
        "d": workload.head_dim_qk,
        "v": workload.head_dim_v,
        "b": workload.dtype_bytes,
        "F": machine[f"tensor.{workload.dtype}_flop_per_clk"],
        "E": machine["mufu.ex2_per_clk"],
        "W": machine["smem.bytes_per_clk"],
        "L": machine["fma.lanes"],
        "A": machine["alu.lanes"],
        "f": emulated_share,
        "k": machine["mufu.ex2_emulation_fma_slots"],
        "T_R": machine.get("tmem.read_bytes_per_clk", float("inf")),
        "T_W": machine.get("tmem.write_bytes_per_clk", float("inf")),
    }


def break_evens(machine: Machine, workload: Workload) -> dict[str, float | None]:
    """Where units change places, solved from the forms; None where every solution is negative.

    ``head_dim`` at which exponentials equal matrix work, the emulated share at which MUFU equals matrix work, and the
    share at which MUFU and FMA pipe are equally busy.
    """
    import sympy

    s = symbols()
    forms = {form.name: form.expression for form in forward_forms()}
    known = {
        s[name]: value for name, value in values_for(machine, workload, 128, 128).items() if name not in ("d", "v", "f")
    }
    dims = {s["d"]: workload.head_dim_qk, s["v"]: workload.head_dim_v}

    def root(equation: Any, unknown: Any) -> float | None:
        # Coefficients are floats, so that a root at 0 may come out as -1e-17.
        found = [max(float(x), 0.0) for x in sympy.solve(equation, unknown) if x.is_real and x > -1e-9]
        return found[0] if found else None

    square = (forms["T_MMA"] - forms["T_EXP"]).subs(s["v"], s["d"]).subs(known)
    return {
        "head_dim at which exponentials equal matrix work": root(square, s["d"]),
        "emulated share at which MUFU equals matrix work": root(
            (forms["T_MUFU"] - forms["T_MMA"]).subs(known).subs(dims), s["f"]
        ),
        "emulated share at which MUFU equals the FMA pipe": root(
            (forms["T_MUFU"] - forms["T_FMA"]).subs(known), s["f"]
        ),
    }


def demand_dict(machine: Machine, workload: Workload, tile_m: int = 128, tile_n: int = 128) -> dict[str, Any]:
    """Everything `tilecast demand` prints, for --json: expressions as text, numbers in cycles or bytes."""
    values = values_for(machine, workload, tile_m, tile_n)

    unfused, fused = unfused_traffic(workload), fused_traffic(workload)
    # The backward tables are those of a kernel with P^T and dS^T in tensor memory.
    tensor_memory = machine.has("tmem.columns")
    heads = workload.batch * workload.heads_q
    sram = int(machine["smem.per_cta_bytes"]) // workload.dtype_bytes
    bound = heads * fa1_elements(workload.seqlen_q, workload.head_dim_qk, sram) * workload.dtype_bytes
    return {
        "machine": machine.name,
        "workload": workload.as_dict(),
        "tile": [tile_m, tile_n],
        "forward": form_rows([f for f in forward_forms() if tensor_memory or "TMEM" not in f.name], values),
        "backward_1cta": form_rows(backward_forms(), values) if tensor_memory else [],
        "backward_2cta": form_rows(backward_forms(cta_pair=True), values) if tensor_memory else [],
        "break_even": break_evens(machine, workload),
        "hbm_bytes": {
            "unfused": dict(unfused.items),
            "unfused_total": unfused.total,
            "fused": dict(fused.items),
            "fused_total": fused.total,
            "unfused_fp32_total": unfused_traffic(workload, 4).total,
            "flash_attention_1_bound": bound,
        },
        "l2_refetch_bytes": refetch_bytes(workload, 2 * tile_m if tensor_memory else tile_m, tile_n),
    }


#: Columns that a table keeps for closed forms.
_LONGEST_FORM = 42


def form_rows(forms: Iterable[ClosedForm], values: dict[str, float]) -> list[dict[str, Any]]:
    """Forms as plain values, each with its number."""
    return [
        {"name": f.name, "meaning": f.meaning, "expression": str(f.expression), "cycles": f.evaluate(values)}
        for f in forms
    ]


def form_lines(title: str, rows: list[dict[str, Any]], width: int) -> list[str]:
    """A table of `form_rows`, in lines of ``width`` characters."""
    name, longest = (max(len(row[part]) for row in rows) for part in ("name", "expression"))
    form = min(longest, _LONGEST_FORM)
    lines = [f"{title:<{name + 4}}{'cycles':>8}  closed form"]
    for row in rows:
        start = f"  {row['name']:<{name}}  {row['cycles']:>8.0f}  "
        hanging, text = len(start) + 4, f"{start}{row['expression']:<{form}}"
        if len(row["expression"]) > form:
            # What it means stands on a line of its own, below the others where that leaves room.
            lines.append(folded(text, width, hanging))
            text = " " * (len(start) + form if width - len(start) - form > 30 else hanging)
        lines.append(folded(f"{text}  {row['meaning']}", width, hanging))
    return lines


def demand_report(machine: Machine, workload: Workload, tile_m: int = 128, tile_n: int = 128, width: int = 120) -> str:
    """The text of `tilecast demand`, in lines of ``width`` characters."""
    data = demand_dict(machine, workload, tile_m, tile_n)
    lines = [
        f"{machine.title}: demand of one {tile_m} x {tile_n} score tile, head_dim {workload.head_dim_qk}/{workload.head_dim_v}, {workload.dtype}"
    ]
    for title, key in (
        ("Forward", "forward"),
        ("Backward, one CTA", "backward_1cta"),
        ("Backward, CTA pair (per CTA)", "backward_2cta"),
    ):
        if data[key]:
            lines += ["", *form_lines(title, data[key], width)]
    busiest = max(data["forward"][:3], key=lambda row: row["cycles"])
    lines += [
        "",
        f"Busiest of matrix unit, MUFU and shared memory, forward: {busiest['name']} ({busiest['cycles']:.0f} cycles)",
    ]
    lines += ["", "Break-even (solved from the forms above)"]
    for name, value in data["break_even"].items():
        lines.append(f"  {name:<52}{'none' if value is None else f'{value:.3g}':>8}")
    traffic = data["hbm_bytes"]
    ratio = traffic["unfused_total"] / traffic["fused_total"]
    seconds = {name: traffic[f"{name}_total"] / machine["hbm.tbps_achieved"] / 1e9 for name in ("unfused", "fused")}
    lines += [
        "",
        f"HBM traffic of {workload.label()}",
        f"  unfused (S and P to memory and back) {traffic['unfused_total'] / 1e9:10.3f} GB {seconds['unfused']:9.3f} ms at {machine['hbm.tbps_achieved']:g} TB/s",
        f"  fused (Q, K, V, O once)              {traffic['fused_total'] / 1e9:10.3f} GB {seconds['fused']:9.3f} ms",
        f"  unfused with fp32 S and P            {traffic['unfused_fp32_total'] / 1e9:10.3f} GB",
        f"  K and V of every query tile, from L2 {data['l2_refetch_bytes'] / 1e9:10.3f} GB",
        f"  N^2 d^2 / M, M one SM's shared memory{traffic['flash_attention_1_bound'] / 1e9:10.3f} GB   (constants dropped)",
        f"  fused moves {ratio:.0f} times less: FlashAttention-1's argument",
    ]
    return "\n".join(lines)
