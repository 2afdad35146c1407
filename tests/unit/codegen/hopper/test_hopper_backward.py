"""The `hopper_bwd` family: what is legal, what is written, and how launches hand over its workspaces.

Numbers need a GPU: tests/gpu/test_gradients_gpu.py.  What the compiler makes of its files: test_shipped_compile.py.
"""

from __future__ import annotations

import csv
import types
from pathlib import Path
from statistics import geometric_mean

import pytest

from tilecast.base.data import MEASURED
from tilecast.codegen.backward import generate_backward
from tilecast.codegen.shipping.ship import read_backward_list
from tilecast.model.backward import HOPPER_BACKWARD, find_backward, named_in, parse_backward, writable
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.variants import fa3_backward
from tilecast.model.kernel.variants.fa3_backward import Fa3BackwardVariant
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

SHIPPED = [kernel for kernel in read_backward_list() if kernel.family == "hopper_bwd"]
APART = [kernel for kernel in read_backward_list() if kernel.family == "hopper_bwd_apart"]


def work(dim: int, mask: str = "none", **others: object) -> Workload:
    return Workload(head_dim_qk=dim, head_dim_v=128 if dim == 192 else dim, mask=mask, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("dim", [64, 128, 192])
def test_chosen_is_legal_in_the_space_and_survives_as_text(dim: int, mask: str) -> None:
    chip, problem = load_machine("h200-sxm"), work(dim, mask)
    chosen = HOPPER_BACKWARD.chosen(problem, chip)
    assert isinstance(chosen, Fa3BackwardVariant) and writable(chosen, problem, chip).legal
    space = list(HOPPER_BACKWARD.space(problem, chip))
    assert chosen in space and len(space) == len(set(space))
    assert parse_backward(variant_text(chosen), HOPPER_BACKWARD.variant()) == chosen


def measured(file: str, **wanted: str) -> list[dict[str, str]]:
    """Rows of a table whose columns are as wanted."""
    with (MEASURED / file).open(encoding="utf-8") as table:
        return [row for row in csv.DictReader(table) if all(row[key] == value for key, value in wanted.items())]


@pytest.mark.parametrize("kernel", SHIPPED + APART, ids=lambda kernel: kernel.module)
def test_what_ships_is_the_first_choice_and_was_measured_to_beat_the_portable_one(kernel) -> None:
    family = find_backward(kernel.family)
    variant = parse_backward(kernel.variant, family.variant())
    assert variant == family.chosen(kernel.workload, load_machine(kernel.machine))
    w = kernel.workload
    dims = str(w.head_dim_qk), str(w.head_dim_v)
    if w.mask == "window":
        rows = measured("h200_backward_windows.csv", head_dim=dims[0], head_dim_v=dims[1])
        gains = [float(x["portable_us"]) / float(x["us"]) for x in rows]
        assert len(gains) == 9 and geometric_mean(gains) > 1.1
        return
    if fa3_backward.thirds(w):
        rows = measured("h200_backward_thirds.csv", causal=str(int(w.mask == "causal")))
        found: dict[tuple[str, ...], dict[str, float]] = {}
        for row in rows:
            sizes = tuple(row[key] for key in ("batch", "heads_q", "heads_kv", "queries", "keys", "dtype"))
            found.setdefault(sizes, {})[row["what"]] = float(row["us"])
        shipped = [x for x in found.values() if "thirds, given back one by one" in x and "two kernels" in x]
        gains = [x["two kernels"] / x["thirds, given back one by one"] for x in shipped]
        over = [x["cudnn"] / x["thirds, given back one by one"] for x in shipped if "cudnn" in x]
        assert len(gains) >= 8 and geometric_mean(gains) > 1.02 and geometric_mean(over) > 1.15 and min(over) > 1.05
        return
    if w.head_dim_qk != w.head_dim_v:
        mask = kernel.module.rsplit("_", 1)[1]
        rows = measured(
            "h200_narrow_heads.csv", **{"pass": "bwd"}, head_dim=dims[0], head_dim_v=dims[1], mask=mask, wider_us=""
        )
        gains = [float(x["portable_us"]) / float(x["us"]) for x in rows]
        assert len(gains) >= 3 and geometric_mean(gains) > 1.15 and min(gains) > 0.99
        return
    # Milliseconds by length, in the last run that had this variant; of what ran before the least.
    own, before = {}, {}
    for row in measured("h200_backward_kernels.csv", head_dim=dims[0], head_dim_v=dims[1], mask=w.mask):
        length, time = int(row["seqlen"]), float(row["ms"] or "inf")
        if "key heads" in row["note"] or "any order" in row["note"]:
            continue
        if row["kernel"].startswith("triton_tma_bwd") or "products ahead" in row["note"]:
            before[length] = min(time, before.get(length, time)) if family.name == "fa3_bwd_apart" else time
        elif row["knobs"] == variant_text(variant):
            own[length] = time
    least = int(str(kernel.facts.get("seqlen_q_min", 0)))
    assert own.keys() == before.keys() and len([n for n in own if n >= least]) >= 2
    for length, time in own.items():
        assert (time < before[length]) == (length >= least), (length, time, before[length])


@pytest.mark.parametrize(
    ("knobs", "problem", "machine", "text"),
    [
        ("tile_m=64", work(64), "h200-sxm", "tile_m must be 128 at head_dim 64, got 64: use tile_m=128"),
        ("tile_m=128", work(128), "h200-sxm", r"shared memory needs \d+ bytes but the limit is \d+"),
        ("dk_first=true", work(128), "h200-sxm", "dk_first must be false at head_dim 128, got true: use dk_first=false"),
        ("folded=both", work(128), "h200-sxm", "folded must be lse at head_dim 128, got both: use folded=lse"),
        ("tile_m=128,ahead=true,folded=both,held=false", work(64), "h200-sxm", r"shared memory needs \d+ bytes but the limit is"),
        ("tile_m=128,ahead=true,held=true", work(64), "h200-sxm", "folded must be both at head_dim 64, got lse"),
        ("folded=all", work(128), "h200-sxm", "folded must be one of none, lse, both, got 'all'"),
        ("adders=3", work(128), "h200-sxm", "adders must be 1 or 2, got 3: use adders=2"),
        ("dq_slots=3", work(64), "h200-sxm", r"shared memory needs \d+ bytes|dq_slots must be 1 or 2"),
        ("tile_m=64", work(256), "h200-sxm", r"shared memory needs \d+ bytes but the limit is \d+"),
        ("tile_m=64", work(96), "h200-sxm", "is written for head_dim 64, 128 and, without a window, 192/128, got 96/96: use family fa2_bwd"),
        ("folded=lse,dq_slots=1", work(192), "h200-sxm", "folded must be none at head_dim 192/128, got lse: use folded=none"),
        ("dq_slots=2,folded=none", work(192), "h200-sxm", r"shared memory needs \d+ bytes but the limit is"),
        ("tile_m=64", work(128, dtype="fp8"), "h200-sxm", "is written for bf16 and fp16, got dtype 'fp8'"),
        ("tile_m=64", work(128), "a100", "multiplies with wgmma, which a100 has not: use family fa2_bwd"),
        ("dq_warps=4", work(128), "h200-sxm", "family fa3_bwd has no knob 'dq_warps'"),
        ("family=fa2_bwd", work(128), "h200-sxm", "expected a variant of family fa3_bwd, got family 'fa2_bwd'"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_names_reason_and_lever(knobs: str, problem: Workload, machine: str, text: str) -> None:
    base = Fa3BackwardVariant(tile_m=128 if problem.head_dim_qk == 64 else 64, persistent=True)
    with pytest.raises(VariantError, match=text):
        generate_backward(problem, load_machine(machine), parse_backward(knobs, base))


def test_names_find_the_family() -> None:
    for name in ("fa3_bwd", "hopper_bwd", "fa3", "hopper_ws"):
        assert find_backward(name) is HOPPER_BACKWARD
    assert named_in("hopper_bwd:dq_slots=1") is named_in("dq_slots=1,family=fa3_bwd") is HOPPER_BACKWARD
    assert named_in("dq_slots=1") is None


@pytest.mark.parametrize("dim", ["64", "128", "192_128"])
def test_the_tiles_of_the_file_take_the_shared_memory_that_legality_counts(dim: str) -> None:
    pytest.importorskip("triton")
    from tests.support.shipped_compile import NEWEST, OLDEST, read_record

    record = read_record()
    for case, (_, outcome) in record.items():
        if case.module.startswith(f"hopper_bwd_d{dim}_"):
            assert case.release in (NEWEST, OLDEST)
            kernel = next(k for k in SHIPPED if k.module == case.module)
            variant = parse_backward(kernel.variant, HOPPER_BACKWARD.variant())
            assert isinstance(variant, Fa3BackwardVariant)
            tiles = fa3_backward.shared_bytes(variant, kernel.workload)
            assert 0 <= outcome.shared_bytes - tiles <= 512


class _Kernel:
    """A compiled kernel that notes what it is started with."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def warmup(self, *arguments: object, **options: object) -> None:
        return None

    def __getitem__(self, grid: object):
        return lambda *arguments: self.calls.append(arguments)


def test_launches_get_new_workspaces_each_time() -> None:
    torch = pytest.importorskip("torch")
    from tilecast.kernels.launching import backward_launcher

    first, second = _Kernel(), _Kernel()

    def plan(q, k, v, out, lse, dout, dlse, dq, dk, dv, terms, sums, counters, left, right):
        return (first, (1, 1, 1), (terms, counters, 7)), (second, (1, 1, 1), (sums, dq, counters))

    module = types.SimpleNamespace(
        PADDED=types.SimpleNamespace(value=64), OPTIONS=({}, {}), plan=plan,
        workspaces=lambda q, k, v, terms, left, right: (terms.new_empty(2, 3), terms.new_empty(5)),
    )  # fmt: skip
    q = torch.zeros(1, 1, 70, 64)
    lse = torch.zeros(1, 1, 70)
    launch = backward_launcher(module)
    for _ in range(2):
        launch(q, q.clone(), q.clone(), q.clone(), lse, q.clone(), q.clone(), q.clone(), q.clone(), 0.5)
    for terms, counters, number in first.calls:
        assert terms.shape == (1, 1, 2, 128) and counters.shape == (5,) and number == 7
    for sums, _, counters, scale_log2, scale in second.calls:
        assert (
            sums.shape == (2, 3) and counters.shape == (5,) and scale == 0.5 and scale_log2 == pytest.approx(0.7213475)
        )
    assert first.calls[1][1] is second.calls[1][2]


def test_generate_writes_it_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tilecast.cli import main as command

    file = tmp_path / "backward.py"
    with pytest.raises(SystemExit) as stop:
        command(["generate", "h200-sxm", "--pass", "bwd", "--variant", "hopper_bwd:dq_slots=1", "-o", str(file)])
    out = capsys.readouterr().out
    assert not stop.value.code and "family=fa3_bwd" in out and "targets   sm_90a" in out and "forecast  0." in out
    assert "DQ_SLOTS = gl.constexpr(1)" in file.read_text(encoding="utf-8")
