"""How a product of whole tiles runs, against every kernel, copy and number of parts that was measured for problems that nobody chose."""

from __future__ import annotations

import csv
import itertools
import math
import statistics
from pathlib import Path

import pytest

from tilecast.kernels.gemm import choice, registry
from tilecast.kernels.gemm.choice import Tiles, choose, product_us, tiles_of

MEASURED = Path(__file__).parents[3] / "data" / "measured"
SUMS = registry.sharing((9, 0), registry.PARTS)
#: What a call takes besides, which is no matter of choice: an empty launch, the first copy, the way to the memory.
ELSE_US = 6.7
#: What of that ordering the first copies before the roles start saves.
EARLY_US = 0.8


def rows_of(table: str) -> list[dict[str, str]]:
    with (MEASURED / table).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def starts(length: int) -> tuple[int, int]:
    """Of rows of so many 16-bit numbers without gaps, and of their copy."""
    step = 2 * length
    return (min(128, step & -step) if step % 16 == 0 else 0, 128)


def copy_us(copied: str, m: int, n: int, k: int) -> float:
    elements = ("A" in copied) * m * k + ("B" in copied) * n * k
    return choice._COPY_US + elements * choice._ELEMENT_US if elements else 0.0


def test_times_and_choices_hold_against_what_was_measured() -> None:
    """126 problems, up to four forms of copies, every kernel that shipped then: how far the times are off, and what a choice by them costs more than the
    best of all that was measured."""
    errors, costs, table = [], [], rows_of("h100_gemm_choice.csv")
    known = {row["kernel"] for row in table}
    for _, group in itertools.groupby(table, lambda row: (row["seed"], row["number"])):
        rows = list(group)
        m, n, k = (int(rows[0][name]) for name in "mnk")
        c_bytes = 4 if rows[0]["c_dtype"] == "fp32" else 2
        entries = [e for e in registry.together((9, 0), c_bytes, k, gpu="NVIDIA H200") if e.module in known]
        lie = tuple(
            starts(k if its == along else other)
            for its, along, other in ((rows[0]["a"], "rows", m), (rows[0]["b"], "columns", n))
        )
        # Of entries that tell tiles every kernel is measured; those of other k are no choice here.
        tiles = {e.module: t for e, t in zip(entries, tiles_of(entries), strict=True)} | {
            SUMS.module: tiles_of([SUMS])[0]
        }
        measured = {}
        for row in rows:
            if row["kernel"] in tiles:
                which = (row["copied"], row["kernel"], int(row["parts"]))
                measured[which] = float(row["us"]) + copy_us(row["copied"], m, n, k)
                lies = tuple(its[name in row["copied"]] for its, name in zip(lie, "AB", strict=True))
                taken = product_us(tiles[row["kernel"]], m, n, k, lies, c_bytes, 132, which[2])
                errors.append((taken + ELSE_US) / float(row["us"]) - 1)
        found = choose(tiles_of(entries), *tiles_of([SUMS]), m, n, k, lie, c_bytes, 132)
        copied = "".join(name for name, copy in zip("AB", found.copies, strict=True) if copy)
        chosen = (copied, (entries[found.kernel] if found.kernel >= 0 else SUMS).module, found.parts)
        if chosen in measured:
            costs.append(math.log(measured[chosen] / min(measured.values())))
    assert len(costs) >= 124 and statistics.fmean(costs) <= 0.025 and max(costs) <= 0.3
    assert len(errors) > 1000 and statistics.fmean(map(abs, errors)) <= 0.08


def test_tiles_that_were_not_in_view_take_what_the_terms_say() -> None:
    """45 times of tiles of 64, 128 and 192 columns on an H200 that no term was fitted to; and what ordering the first copies before the roles
    gives, which is in no term as all kernels do it."""
    errors, gains, before = [], [], {}
    for row in rows_of("h200_gemm_starts.csv"):
        if row["kernel"] == "torch.addmm":
            continue
        name, *how = row["kernel"].split(", ")
        tiles = Tiles(*map(int, name.split(" x ")), "turns" in how, True)
        m, n, k = (int(row[side]) for side in "mnk")
        early, us = "first copies before the roles" in how, float(row["us"])
        taken = product_us(tiles, m, n, k, (starts(k)[0],) * 2, 2, 132)
        errors.append((taken + ELSE_US - early * EARLY_US) / us - 1)
        if "joined" in how:
            if early:
                gains.append(before[name, m] - us)
            else:
                before[name, m] = us
    assert len(errors) == 45 and statistics.fmean(map(abs, errors)) <= 0.07 and max(map(abs, errors)) <= 0.17
    assert len(gains) == 10 and min(gains) > 0.4 and 0.7 <= statistics.median(gains) <= 1.0


def test_choices_of_few_waves_hold_against_what_was_measured() -> None:
    """72 problems of up to two waves that no term was fitted to, by every kernel that ships now and in the form before the first boxes of C are
    ordered early: how far the times are off, what a choice costs, and what the tiles kept for few waves give."""
    errors, costs, gains = [], [], []
    of_tiles = {f"{rows} x {columns}, joined": (rows, columns) for rows, columns in ((64, 128), (128, 128), (256, 128))}
    for _, group in itertools.groupby(rows_of("h200_gemm_few_waves.csv"), lambda row: row["number"]):
        rows = list(group)
        m, n, k = (int(rows[0][name]) for name in "mnk")
        c_bytes = 4 if rows[0]["c_dtype"] == "fp32" else 2
        entries = registry.together((9, 0), c_bytes, k, gpu="NVIDIA H200")
        tiles = {e.module: t for e, t in zip(entries, tiles_of(entries), strict=True)} | {
            SUMS.module: tiles_of([SUMS])[0]
        }
        by_size = {e.tile: e.module for e in entries if e.use == registry.SMALL and e.accumulators == 1}
        measured = {}
        for row in rows:
            module = by_size.get(of_tiles.get(row["kernel"], ()), row["kernel"])
            if module in tiles:
                which = (row["copied"], module, int(row["parts"]))
                measured[which] = float(row["us"]) + copy_us(row["copied"], m, n, k)
                lies = tuple(starts(k)[name in row["copied"]] for name in "AB")
                taken = product_us(tiles[module], m, n, k, lies, c_bytes, 132, which[2])
                errors.append((taken + ELSE_US - EARLY_US) / float(row["us"]) - 1)
        found = choose(tiles_of(entries), *tiles_of([SUMS]), m, n, k, (starts(k),) * 2, c_bytes, 132)
        copied = "".join(name for name, copy in zip("AB", found.copies, strict=True) if copy)
        chosen = (copied, (entries[found.kernel] if found.kernel >= 0 else SUMS).module, found.parts)
        if chosen in measured:
            costs.append(math.log(measured[chosen] / min(measured.values())))
            without = {which: us for which, us in measured.items() if which[1] not in by_size.values()}
            gains.append(math.log(min(without.values()) / measured[chosen]))
    assert len(costs) >= 68 and statistics.fmean(costs) <= 0.02 and max(costs) <= 0.2
    assert len(errors) > 500 and statistics.fmean(map(abs, errors)) <= 0.08
    assert statistics.fmean(gains) >= 0.06


def lying(rows: int, columns: int, how: str) -> tuple[int, int]:
    """As `starts`, of a matrix that lies by "rows", "columns", as a "slice" of a wider one or at "odd" steps (tools/gemm_drawn.py)."""
    length = rows if how == "columns" else columns
    return starts(length + {"slice": 64, "odd": 1}.get(how, 0))


def test_choices_among_tiles_of_pieces_hold_against_what_was_measured() -> None:
    """66 drawn problems for which such tiles were thought to pay, 22 of them some that lost to cuBLAS: what a choice costs, and what the tiles give.
    No term was fitted to them; that turns of 128 x 192 take what those of 192 x 128 do was seen in them."""
    new = {"gemm_hopper_broad", "gemm_hopper_c32_broad", "gemm_hopper_joined_128x320", "gemm_hopper_joined_256x192", "gemm_hopper_c32_joined_256x192"}  # fmt: skip
    costs, gains = [], []
    for _, group in itertools.groupby(rows_of("h200_gemm_tiles.csv"), lambda row: (row["seed"], row["number"])):
        rows = list(group)
        m, n, k = (int(rows[0][name]) for name in "mnk")
        c_bytes = 4 if rows[0]["c_dtype"] == "float32" else 2
        entries = registry.together((9, 0), c_bytes, k, gpu="NVIDIA H200")
        measured = {
            (row["copied"], row["kernel"]): float(row["us"]) + copy_us(row["copied"], m, n, k)
            for row in rows
            if row["kernel"].startswith("gemm_hopper")
        }
        lie = lying(m, k, rows[0]["a"]), lying(k, n, rows[0]["b"])
        found = choose(tiles_of(entries), None, m, n, k, lie, c_bytes, 132)
        copied = "".join(name for name, copy in zip("AB", found.copies, strict=True) if copy)
        chosen = measured.get((copied, entries[found.kernel].module))
        if chosen is not None:
            costs.append(math.log(chosen / min(measured.values())))
            without = [us for (_, kernel), us in measured.items() if kernel not in new]
            gains.append(math.log(min(without) / chosen))
    assert len(costs) == 66 and statistics.fmean(costs) <= 0.012 and max(costs) <= 0.1
    assert statistics.fmean(gains) >= 0.008


def test_parts_of_k_are_those_that_were_fastest() -> None:
    """13 problems whose rows lie well, by parts."""
    costs = []
    rows = [row for row in rows_of("h200_gemm_by_parts.csv") if row["kernel"] == SUMS.module and row["parts"].isdigit()]
    for size, group in itertools.groupby(rows, lambda row: (row["m"], row["n"], row["k"])):
        times = {int(row["parts"]): float(row["us"]) for row in group}
        taken = {
            parts: product_us(Tiles(128, 128, parts == 1), *map(int, size), (128, 128), 2, 132, parts)
            for parts in times
        }
        costs.append(times[min(taken, key=lambda parts: taken[parts])] / min(times.values()) - 1)
    assert len(costs) == 13 and statistics.fmean(costs) <= 0.015 and max(costs) <= 0.1


@pytest.mark.parametrize("parts", [1, 4])
def test_a_product_takes_longer_the_more_there_is_to_do_and_the_worse_it_lies(parts: int) -> None:
    tiles = tiles_of([SUMS])[0]

    def us(
        m: int = 512, n: int = 512, k: int = 4096, lie: tuple[int, int] = (128, 128), c_bytes: int = 2, sms: int = 132
    ) -> float:
        return product_us(tiles, m, n, k, lie, c_bytes, sms, parts)

    assert us() < us(k=8192) < us(k=16384) and us() < us(m=8192) < us(m=16384, n=8192)
    assert us() < us(sms=16) < us(sms=2) and us() <= us(c_bytes=4)
    for worse, better in itertools.pairwise((16, 32, 64, 128)):
        assert us(lie=(128, better)) < us(lie=(128, worse)) < us(lie=(worse, worse))
        assert us(lie=(128, worse)) == us(lie=(worse, 128))
