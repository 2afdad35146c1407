"""The copy engine: latency of one tile by size and source, bandwidth by bytes in flight, stores."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tilecast.validation.lab.calibrate.cases import Case, Reading, repeats
from tilecast.validation.lab.calibrate.gpu import Gpu, Launch

CHIPS = (90, 100, 103, 120)
ROW_BYTES = 128
#: Tiles are read from here on; the first megabytes belong to other benchmarks.
_BASE = 64 << 20
_L2_BYTES = 20 << 20
#: (boxes, rows of a box): 8, 16, 32 KB in one box, 32 and 64 KB in two.
_TILES = ((1, 64), (1, 128), (1, 256), (2, 128), (2, 256))


def _latency(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    boxes, box_rows = int(str(case.defines["BOXES"])), int(str(case.defines["BOX_ROWS"]))
    rounds, from_l2 = 48, case.params["source"] == "l2"
    walked = rounds * boxes * box_rows * ROW_BYTES
    smem = boxes * box_rows * ROW_BYTES

    def once() -> dict[str, float]:
        at = _BASE if from_l2 else gpu.fresh(walked)
        launch = Launch(1, 32, smem, 0, rounds, gpu.tensor_map(walked // ROW_BYTES, box_rows, at))
        if from_l2:
            gpu.records(case, launch)
        _, tail = gpu.records(case, launch, 2 * rounds)
        waits, issues = tail.reshape(rounds, 2).T.astype(float)
        # The first tile also fetches the map.
        waits, issues = waits[4:], issues[4:]
        return {
            "latency_cycles": float(np.median(waits)),
            "latency_p10_cycles": float(np.percentile(waits, 10)),
            "latency_p90_cycles": float(np.percentile(waits, 90)),
            "issue_cycles": float(np.median(issues)),
        }

    names = ("latency_cycles", "latency_p10_cycles", "latency_p90_cycles", "issue_cycles")
    return repeats(5, once, dict.fromkeys(names, "cycles"))


def _bandwidth(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    box_rows, flight = int(str(case.defines["BOX_ROWS"])), int(str(case.defines["FLIGHT"]))
    box_bytes = box_rows * ROW_BYTES
    grid = gpu.identity.sm_count if case.params["sms"] == "all" else 1
    rounds = (2 << 20) // box_bytes if case.params["source"] != "hbm" else (8 << 20) // box_bytes
    encoded = gpu.tensor_map((gpu.data_bytes - _BASE) // ROW_BYTES, box_rows, _BASE)

    def once() -> dict[str, float]:
        found, _ = gpu.records(case, Launch(grid, 32, flight * box_bytes, 0, rounds, encoded))
        each = (found[:, 0, 1] - found[:, 0, 0]).astype(float)
        seconds = float(found[:, 0, 3].max() - found[:, 0, 2].min()) * 1e-9
        return {
            "bytes_per_clk": rounds * box_bytes / float(np.median(each)),
            "chip_tbps": grid * rounds * box_bytes / seconds * 1e-12,
        }

    return repeats(5, once, {"bytes_per_clk": "B/clk/SM", "chip_tbps": "TB/s"})


def _bandwidth_case(
    sms: str, source: str, box_rows: int, flight: int, store: bool = False, quick: bool = False
) -> Case:
    box_bytes = box_rows * ROW_BYTES
    l2_tiles = _L2_BYTES // box_bytes
    # Shared: every SM walks all tiles, from the same tile ("lockstep") or from its own.  Private: its own slice.
    slices = 160
    if source == "hbm":
        region = (16 << 20) // box_bytes
        stride, tiles = region, region * slices
    elif source == "l2_private":
        region = max(1, l2_tiles // slices)
        stride, tiles = region, region * slices
    else:
        region = tiles = l2_tiles
        stride = 0 if source == "l2_lockstep" else max(1, l2_tiles // slices)
    defines = {
        "BOX_ROWS": box_rows, "FLIGHT": flight, "STRIDE": stride, "TILES": tiles, "REGION": region, "STORE": int(store),
    }  # fmt: skip
    params: dict[str, int | float | str | bool] = {
        "sms": sms, "source": source, "box_bytes": box_bytes, "in_flight": flight,
    }  # fmt: skip
    name = "store_bandwidth" if store else "load_bandwidth"
    return Case(
        "tma", name, params, "tma_bandwidth.cu", _bandwidth, "", defines, CHIPS, quick, flight * box_bytes, 0.02
    )


def cases() -> list[Case]:
    """Latencies by size and source; bandwidth by source, box size and number in flight."""
    found = [
        Case(
            "tma", "load_latency", {"source": source, "boxes": boxes, "tile_bytes": boxes * rows * ROW_BYTES},
            "tma_latency.cu", _latency, defines={"BOXES": boxes, "BOX_ROWS": rows}, chips=CHIPS,
            quick=rows * boxes in (64, 256), seconds=0.05,
        )
        for source in ("l2", "hbm") for boxes, rows in _TILES
    ]  # fmt: skip
    for sms in ("one", "all"):
        for source in ("l2_lockstep", "l2_shared", "l2_private", "hbm"):
            if sms == "one" and source in ("l2_lockstep", "l2_shared"):
                continue
            for rows in (128, 256):
                for flight in (1, 2, 3, 4):
                    quick = flight == 4
                    found.append(_bandwidth_case(sms, source, rows, flight, quick=quick))
    for sms in ("one", "all"):
        for source in ("l2_private", "hbm"):
            found += [_bandwidth_case(sms, source, 128, flight, store=True) for flight in (1, 4)]
    return found
