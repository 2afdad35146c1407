"""The tables of docs/training.md are what was measured: whole passes in turns, and the portable kernels of the sweep added up."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Callable

import pytest
from support.paths import ROOT

from tilecast.base.data import MEASURED
from tilecast.codegen.shipping.ship import read_backward_list
from tilecast.kernels import registry

PAGE = ROOT / "docs" / "training.md"
#: Shape as the table of the sweep has it: (head_dim, head_dim_v, mask, seqlen).
Shape = tuple[str, str, str, str]


#: Portable kernels that shipped for an H200 until `hopper_bwd` ran all of their problems: what the tables compare it with.
REPLACED = {
    "triton_tma_bwd_d64_full": (
        "dkv_tile_m=128,dkv_tile_n=64,dkv_warps=4,dkv_stages=2,"
        "dq_tile_m=64,dq_tile_n=64,dq_warps=4,dq_stages=2,dkv_loads=descriptors,dq_loads=descriptors,dkv_apart=false"
    ),
    "triton_tma_bwd_d128_full": (
        "dkv_tile_m=64,dkv_tile_n=64,dkv_warps=4,dkv_stages=2,"
        "dq_tile_m=64,dq_tile_n=64,dq_warps=4,dq_stages=2,dkv_loads=descriptors,dq_loads=descriptors,dkv_apart=false"
    ),
    "triton_tma_bwd_d128_causal": (
        "dkv_tile_m=64,dkv_tile_n=64,dkv_warps=4,dkv_stages=2,"
        "dq_tile_m=128,dq_tile_n=64,dq_warps=8,dq_stages=3,dkv_loads=descriptors,dq_loads=pointers,dkv_apart=false"
    ),
    "triton_tma_bwd_d256_full": (
        "dkv_tile_m=64,dkv_tile_n=64,dkv_warps=4,dkv_stages=2,"
        "dq_tile_m=128,dq_tile_n=32,dq_warps=8,dq_stages=3,dkv_loads=descriptors,dq_loads=descriptors,dkv_apart=true"
    ),
    "triton_tma_bwd_d256_causal": (
        "dkv_tile_m=64,dkv_tile_n=64,dkv_warps=4,dkv_stages=2,"
        "dq_tile_m=128,dq_tile_n=32,dq_warps=8,dq_stages=3,dkv_loads=descriptors,dq_loads=pointers,dkv_apart=true"
    ),
}


def variants() -> dict[str, tuple[str, str]]:
    """(family, variant) of the kernels for an H200, by module."""
    shipped = {k.module: (k.family, k.variant) for k in read_backward_list() if k.machine == "h200-sxm"}
    return shipped | {module: ("triton_bwd", variant) for module, variant in REPLACED.items()}


def loops(variant: str) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Knobs of the loops over queries and over keys, named as in the sweep: there ``loads`` is each loop's own."""
    knobs = dict(part.split("=") for part in variant.split(","))
    return tuple(
        {(k.replace(f"{prefix}_loads", "loads"), v) for k, v in knobs.items() if k.startswith(f"{prefix}_")}
        for prefix in ("dkv", "dq")
    )  # type: ignore[return-value]


def rows() -> list[list[str]]:
    """head_dim, mask, seqlen, TFLOP/s of ours, SDPA's flash, SDPA's cuDNN; "-" where it does not run."""
    by_shape: dict[Shape, list[dict[str, str]]] = defaultdict(list)
    with (MEASURED / "h200_backward_sweep.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            by_shape[(row["head_dim"], row["head_dim_v"], row["mask"], row["seqlen"])].append(row)
    portable = {
        tuple(module.removeprefix("triton_tma_bwd_").rsplit("_", 1)): loops(variant)
        for module, (family, variant) in variants().items()
        if family == "triton_bwd"
    }
    found = []
    for (dim, dim_v, mask, length), measured in by_shape.items():
        wanted = portable.get((f"d{dim}" if dim == dim_v else f"d{dim}_{dim_v}", "full" if mask == "none" else mask))
        if wanted is None:
            continue  # another kernel of Hopper runs it since
        whole = {row["kernel"]: row for row in measured if row["note"] == "whole"}
        flop = max(float(row["ms"]) * float(row["tflops"]) for row in whole.values())
        ms = 0.0
        for row in measured:
            knobs = {tuple(part.split("=")) for part in row["knobs"].split(",") if part}
            taken = row["kernel"] == "row_terms" or knobs in wanted
            ms += float(row["ms"]) if taken and row["ms"] and not row["note"] else 0.0
        peers = [whole[name]["tflops"] if name in whole else "" for name in ("sdpa flash", "sdpa cudnn")]
        texts = [f"{flop / ms:.0f}", *(f"{float(text):.0f}" if text else "-" for text in peers)]
        found.append([dim if dim == dim_v else f"{dim}/{dim_v}", mask, length, *texts])
    return found


def training() -> dict[str, list[dict[str, str]]]:
    """Rows of the training runs, by whose attention it was."""
    found: dict[str, list[dict[str, str]]] = defaultdict(list)
    with (MEASURED / "h100_training.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            found[row["attention"]].append(row)
    return found


def largest_difference(a: list[dict[str, str]], b: list[dict[str, str]]) -> float:
    return max(abs(float(x["loss"]) - float(y["loss"])) for x, y in zip(a, b, strict=True))


def test_the_training_runs_are_those_of_the_table(request: pytest.FixtureRequest) -> None:
    runs = training()
    text = PAGE.read_text(encoding="utf-8")
    head = (
        "| attention | loss, step 100 | 300 | 500 | tokens/s (median) | final parameters |\n|---|---|---|---|---|---|\n"
    )
    before, after = text.split(head)
    lines = []
    for name, rows_of in runs.items():
        losses = [row["loss"][:6] for row in rows_of if row["step"] in ("100", "300", "500")]
        speed = statistics.median(float(row["tokens_per_second"]) for row in rows_of)
        lines.append([name, *losses, f"{speed:,.0f}", rows_of[-1]["parameters_sha256"][:12]])
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    rest = after[after.index("\n\n") + 1 :] if after.startswith("|") else after
    if request.config.getoption("--update-golden"):
        PAGE.write_text(before + head + table + rest, encoding="utf-8")
        return
    assert after == table + rest, "docs/training.md: pytest tests/unit/docs --update-golden, then read the diff"
    ours, again, *others = runs.values()
    assert ours[-1]["parameters_sha256"] == again[-1]["parameters_sha256"] and largest_difference(ours, again) == 0
    unwrapped = " ".join(text.split())
    assert f"at most {max(largest_difference(ours, other) for other in others):.4f} between" in unwrapped
    assert f"by {largest_difference(*others):.4f} between PyTorch's two" in unwrapped


#: As the table of whole passes calls it.
_FA4 = "flash-attn-4 (sm_90)"


def whole_rows() -> list[list[str]]:
    """head_dim, mask, seqlen, TFLOP/s of both shipped kernels, the one that runs in bold, also in any order, flash-attn-4, SDPA's flash and cuDNN."""
    by_shape: dict[tuple[str, str, str], dict[str, str]] = defaultdict(dict)
    known = variants()
    with (MEASURED / "h200_backward_kernels.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            family, variant = known.get(row["kernel"], (row["kernel"], None))
            if "key heads" in row["note"] or "products ahead" in row["note"]:
                continue
            if variant is None or row["knobs"].split(",", 1)[1] == variant:
                family = "hopper_bwd" if family == "hopper_bwd_apart" else family
                family += ", any order" if row["note"].startswith("any order") else ""
                dims = (
                    row["head_dim"]
                    if row["head_dim"] == row["head_dim_v"]
                    else f"{row['head_dim']}/{row['head_dim_v']}"
                )
                by_shape[(dims, row["mask"], row["seqlen"])][family] = f"{float(row['tflops']):.0f}"
    found = []
    for (dims, mask, length), rates in by_shape.items():
        if "hopper_bwd" not in rates:
            continue
        dim, _, dim_v = dims.partition("/")
        entry = registry.select(
            (9, 0), "bf16", int(dim), int(dim_v or dim), mask, int(length), registry.shipped_backward()
        )
        assert entry is not None
        ran = "triton_bwd" if entry.family == "triton_bwd" else "hopper_bwd"
        rates[ran] = f"**{rates[ran]}**"
        found.append(
            [
                dims,
                mask,
                length,
                *(
                    rates.get(k, "-")
                    for k in ("hopper_bwd", "hopper_bwd, any order", "triton_bwd", _FA4, "sdpa flash", "sdpa cudnn")
                ),
            ]
        )
    return sorted(found, key=lambda row: (int(row[0].partition("/")[0]), row[0], row[1] != "none", int(row[2])))


@pytest.mark.parametrize(
    ("names", "found"),
    [(("tilecast",), rows), (("`hopper_bwd`", "in any order", "`triton_bwd`", "flash-attn-4"), whole_rows)],
    ids=["swept", "whole"],
)
def test_the_tables_are_what_was_measured(
    names: tuple[str, ...], found: Callable[[], list[list[str]]], request: pytest.FixtureRequest
) -> None:
    columns = ["head_dim", "mask", "seqlen", *names, "SDPA, flash", "SDPA, cuDNN"]
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(head)
    table = "".join("| " + " | ".join(row) + " |\n" for row in found())
    rest = after[after.index("\n\n") + 1 :]
    if request.config.getoption("--update-golden"):
        PAGE.write_text(before + head + table + rest, encoding="utf-8")
        return
    assert after == table + rest, "docs/training.md: pytest tests/unit/docs --update-golden, then read the diff"
