"""Demand of a backward pass per tile as formulas, by the kernels that a machine's matrix unit has, and the bytes of its launches.

FlashAttention-4's own forms for tensor memory are `closed_forms.backward_forms`.  Those for wgmma count what `fa3_bwd` and
`fa3_bwd_apart` move: a wgmma reads 64 rows of its left operand, unless that is in registers, and all columns of its right one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilecast.model.closed_forms import (
    ClosedForm,
    Traffic,
    backward_forms,
    form_lines,
    form_rows,
    symbols,
    values_for,
)
from tilecast.model.kernel.variants.fa3_backward_apart import own_keys
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.backward.kernels import FLOAT

#: Head dimension up to which a step of the five products has 128 queries.
_TALL_HEAD_DIM = 64


@dataclass(frozen=True, slots=True)
class FormTable:
    """The forms of one kernel, and the tile (query rows, key rows) that it takes by itself."""

    key: str
    title: str
    forms: Callable[[], tuple[ClosedForm, ...]]
    tile: Callable[[Workload], tuple[int, int]]


def five_product_forms() -> tuple[ClosedForm, ...]:
    """`fa3_bwd`, one M x N tile: warpgroups of 64 keys, dS in shared memory, dQ by way of it into a sum in L2."""
    s = symbols()
    m, n, d, v, b, u, w = (s[name] for name in ["M", "N", "d", "v", "b", "U", "W"])
    items = (
        ("S", "S^T = K Q^T: 64 x 64 scores at a time, K and Q for each", 2 * m * n * d * b / u / w),
        ("dP", "dP^T = V dO^T: likewise V and dO", 2 * m * n * v * b / u / w),
        ("dV", "dV += P^T dO: dO once a warpgroup (P^T in registers)", n / u * m * v * b / w),
        ("dK", "dK += dS^T Q: Q once a warpgroup (dS^T in registers)", n / u * m * d * b / w),
        ("dQ", "dQ = dS K: 64 x 64 outputs at a time, dS and K for each", 2 * m * n * d * b / u / w),
        ("dS write", "dS to shared memory", m * n * b / w),
        ("dQ fp32", "dQ fp32 tile written and read by the bulk reduction", 2 * FLOAT * m * d / w),
        ("row terms", "LSE and D to every thread", 2 * m * n / w),
        ("fill", "Q and dO copied in", m * (d + v) * b / w),
    )
    return _with_total("S, dP, dV, dK, dQ", 3 * d + 2 * v, items)


def keys_forms(own: bool = False) -> tuple[ClosedForm, ...]:
    """The kernel of the keys of `fa3_bwd_apart`, one M x N tile: one warpgroup has S and dV, the other dP and dK, or each has all of
    its ``own`` keys."""
    s = symbols()
    m, n, d, v, b, u, w = (s[name] for name in ["M", "N", "d", "v", "b", "U", "W"])
    items = (
        ("S", "S^T = K Q^T: K and Q", (n * d + n / u * m * d) * b / w),
        ("dP", "dP^T = V dO^T: V and dO", (n * v + n / u * m * v) * b / w),
        ("dV", "dV += P^T dO: dO (P^T in registers)", n / u * m * v * b / w),
        ("dK", "dK += dS^T Q: Q (dS^T in registers)", n / u * m * d * b / w),
        *(() if own else (("P fp32", "P in float32 from one warpgroup to the other", 2 * FLOAT * m * n / w),)),
        ("row terms", "LSE and D to every thread", 2 * m * n / w),
        ("fill", "Q and dO copied in", m * (d + v) * b / w),
    )
    return _with_total("S, dP, dV, dK", 2 * d + 2 * v, items)


def queries_forms() -> tuple[ClosedForm, ...]:
    """The kernel of the queries of `fa3_bwd_apart`, one M x N tile: warpgroups of 64 queries."""
    s = symbols()
    m, n, d, v, b, u, w = (s[name] for name in ["M", "N", "d", "v", "b", "U", "W"])
    items = (
        ("S", "S = Q K^T: Q, and K once a warpgroup", (m * d + m / u * n * d) * b / w),
        ("dP", "dP = dO V^T: dO, and V once a warpgroup", (m * v + m / u * n * v) * b / w),
        ("dQ", "dQ += dS K: K once a warpgroup (dS in registers)", m / u * n * d * b / w),
        ("fill", "K and V copied in", n * (d + v) * b / w),
    )
    return _with_total("S, dP, dQ", 2 * d + v, items)


def _with_total(products: str, depth: Any, items: tuple[tuple[str, str, Any], ...]) -> tuple[ClosedForm, ...]:
    s = symbols()
    m, n = s["M"], s["N"]
    total = sum((e for _, _, e in items), start=0 * m)
    return (
        ClosedForm("T_MMA", f"matrix unit: {products}", 2 * m * n * depth / s["F"]),
        ClosedForm("T_EXP", "exponentials to recompute P", m * n / s["E"]),
        ClosedForm("T_SMEM", "shared memory, sum of the items", total),
        *(ClosedForm(f"smem {name}", meaning, expression) for name, meaning, expression in items),
    )


def _without_port(forms: Callable[[], tuple[ClosedForm, ...]]) -> Callable[[], tuple[ClosedForm, ...]]:
    """Where operands are loaded into registers first, and how often each depends on the warps' layout."""
    return lambda: tuple(form for form in forms() if "smem" not in form.name.lower())


def _paper(workload: Workload) -> tuple[int, int]:
    return 128, 128


def _five(workload: Workload) -> tuple[int, int]:
    return (128 if workload.head_dim_qk <= _TALL_HEAD_DIM else 64), 128


def _square(workload: Workload) -> tuple[int, int]:
    return 64, 64


def _wide(workload: Workload) -> tuple[int, int]:
    return 128, 64


def _tall(workload: Workload) -> tuple[int, int]:
    return 64, 128


_TABLES: dict[str, tuple[FormTable, ...]] = {
    "tcgen05": (
        FormTable("one_cta", "One CTA", backward_forms, _paper),
        FormTable("cta_pair", "CTA pair (per CTA)", lambda: backward_forms(cta_pair=True), _paper),
    ),
    "wgmma": (
        FormTable("five_products", "One kernel, five products", five_product_forms, _five),
        FormTable("keys", "Two kernels: the keys'", keys_forms, _square),
        FormTable("queries", "Two kernels: the queries'", queries_forms, _wide),
    ),
    "mma_sync": (
        FormTable("keys", "Two kernels: the keys'", _without_port(keys_forms), _square),
        FormTable("queries", "Two kernels: the queries'", _without_port(queries_forms), _square),
    ),
}


_OWN_KEYS = FormTable("keys", "Two kernels: the keys', 64 a warpgroup", lambda: keys_forms(own=True), _tall)


def tables_of(machine: Machine, workload: Workload) -> tuple[FormTable, ...]:
    """The kernels that a backward pass of ``workload`` has on ``machine``."""
    found = _TABLES[machine.tensor_kind]
    own = machine.tensor_kind == "wgmma" and own_keys(workload)
    return tuple(_OWN_KEYS if own and table.key == "keys" else table for table in found)


# --- break-evens ------------------------------------------------------------------------------------------------------


def _break_evens(forms: tuple[ClosedForm, ...], values: dict[str, float]) -> dict[str, float | None]:
    """Head dimensions (of Q, K and V) at which units change places; None where there is none."""
    import sympy

    s = symbols()
    known = {s[name]: value for name, value in values.items() if name not in ("d", "v")}
    named = {form.name: form.expression.subs(s["v"], s["d"]).subs(known) for form in forms}

    def root(one: str, other: str) -> float | None:
        if other not in named:
            return None
        found = [float(x) for x in sympy.solve(named[one] - named[other], s["d"]) if x.is_real and x > 0]
        return found[0] if found else None

    return {
        "head_dim at which exponentials equal matrix work": root("T_MMA", "T_EXP"),
        "head_dim at which shared memory equals matrix work": root("T_MMA", "T_SMEM"),
    }


# --- bytes ------------------------------------------------------------------------------------------------------------


def five_product_traffic(workload: Workload) -> Traffic:
    """One kernel with five products and the two around it: every tensor as often as a launch needs it."""
    q, o, kv, rows = _sizes(workload)
    sums = q / workload.dtype_bytes * FLOAT
    return Traffic(
        (
            ("row terms: read O, dO, LSE", 2 * o + FLOAT * rows), ("row terms: write LSE, D", 2 * FLOAT * rows),
            ("read Q, dO, LSE, D", q + o + 2 * FLOAT * rows), ("read K, V", kv), ("write dK, dV", kv),
            ("sums of dQ in float32, read and written", 2 * sums), ("round dQ: read", sums), ("write dQ", q),
        )
    )  # fmt: skip


def apart_traffic(workload: Workload) -> Traffic:
    """A kernel of the keys and one of the queries, after the one for the row terms: no sums, inputs read twice."""
    q, o, kv, rows = _sizes(workload)
    return Traffic(
        (
            ("row terms: read O, dO, LSE", 2 * o + FLOAT * rows), ("row terms: write LSE, D", 2 * FLOAT * rows),
            ("keys: read Q, dO, LSE, D", q + o + 2 * FLOAT * rows), ("keys: read K, V", kv), ("keys: write dK, dV", kv),
            ("queries: read Q, dO, LSE, D", q + o + 2 * FLOAT * rows), ("queries: read K, V", kv), ("queries: write dQ", q),
        )
    )  # fmt: skip


def _sizes(w: Workload) -> tuple[float, float, float, float]:
    """Bytes of Q, of O, of K and V together, and rows of all query heads."""
    rows = float(w.batch * w.heads_q * w.seqlen_q)
    keys = float(w.batch * w.heads_kv * w.seqlen_k)
    return (
        rows * w.head_dim_qk * w.dtype_bytes, rows * w.head_dim_v * w.dtype_bytes,
        keys * (w.head_dim_qk + w.head_dim_v) * w.dtype_bytes, rows,
    )  # fmt: skip


# --- what `tilecast demand --pass bwd` prints -------------------------------------------------------------------------


def backward_demand_dict(
    machine: Machine, workload: Workload, tile_m: int | None = None, tile_n: int | None = None
) -> dict[str, Any]:
    """Everything it prints; ``tile_m`` and ``tile_n`` in place of each kernel's own.  DemandError as in `closed_forms`."""
    tables = {}
    for table in tables_of(machine, workload):
        own_m, own_n = table.tile(workload)
        tile = tile_m or own_m, tile_n or own_n
        values, forms = values_for(machine, workload, *tile), table.forms()
        if machine.tensor_kind == "wgmma":
            values["U"] = 64.0  # a warpgroup has 64 rows, whichever tensor's they are
        tables[table.key] = {
            "title": table.title, "tile": list(tile), "forms": form_rows(forms, values), "break_even": _break_evens(forms, values),
        }  # fmt: skip
    traffic = {"two_kernels": apart_traffic(workload)}
    if machine.tensor_kind != "mma_sync":
        traffic = {"five_products": five_product_traffic(workload), **traffic}
    return {
        "pass": "bwd",
        "machine": machine.name,
        "workload": workload.as_dict(),
        "kernels": tables,
        "hbm_bytes": {
            **{key: dict(found.items) for key, found in traffic.items()},
            **{f"{key}_total": found.total for key, found in traffic.items()},
        },
    }


def backward_demand_report(machine: Machine, workload: Workload, data: dict[str, Any], width: int = 120) -> str:
    """The text of `tilecast demand --pass bwd`, in lines of ``width`` characters."""
    lines = [f"{machine.title}: demand of the backward pass, head_dim {workload.head_dim_qk}/{workload.head_dim_v}, {workload.dtype}"]  # fmt: skip
    for table in data["kernels"].values():
        m, n = table["tile"]
        rows = table["forms"]
        units = [row for row in rows if row["name"].startswith("T_")]
        busiest = max(units, key=lambda row: row["cycles"])
        lines += ["", *form_lines(f"{table['title']}, {m} x {n}", rows, width)]
        lines.append(f"  busiest: {busiest['name']} ({busiest['cycles']:.0f} cycles)")
        lines += [f"  {name}: {value:.3g}" for name, value in table["break_even"].items() if value is not None]
    traffic = data["hbm_bytes"]
    tbps = machine["hbm.tbps_achieved"]
    lines += ["", f"HBM traffic of the backward pass of {workload.label()}, L2 holding what programs share"]
    for key, title in (
        ("five_products", "five products, dQ summed in float32"),
        ("two_kernels", "two kernels, seven products"),
    ):
        if key not in traffic:
            continue
        total = traffic[f"{key}_total"]
        lines.append(f"  {title:<38}{total / 1e9:10.3f} GB {total / tbps / 1e9:9.3f} ms at {tbps:g} TB/s")
        lines += [f"    {name:<42}{size / 1e9:8.3f} GB" for name, size in traffic[key].items()]
    return "\n".join(lines)
