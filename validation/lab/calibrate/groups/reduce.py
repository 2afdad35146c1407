"""The copy engine's additions to float32 numbers in L2: what dQ of a backward pass leaves an SM by."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tilecast.validation.lab.calibrate.cases import Case, Reading, repeats
from tilecast.validation.lab.calibrate.gpu import Gpu, Launch

CHIPS = (90, 100, 103, 120)
ROW_BYTES = 128
#: Tiles are added from here on: the first megabytes belong to other benchmarks.
_BASE = 64 << 20
#: Bytes that each SM adds to again and again: those of all SMs stay in L2.
_OWN_BYTES = 128 << 10
_ROUNDS_BYTES = 2 << 20


def _bandwidth(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    box_rows, flight = int(str(case.defines["BOX_ROWS"])), int(str(case.defines["FLIGHT"]))
    box_bytes = box_rows * ROW_BYTES
    grid = gpu.identity.sm_count if case.params["sms"] == "all" else 1
    rounds = _ROUNDS_BYTES // box_bytes
    encoded = gpu.tensor_map((gpu.data_bytes - _BASE) // ROW_BYTES, box_rows, _BASE, floats=True)

    def once() -> dict[str, float]:
        found, _ = gpu.records(case, Launch(grid, 32, flight * box_bytes, _BASE, rounds, encoded))
        each = (found[:, 0, 1] - found[:, 0, 0]).astype(float)
        seconds = float(found[:, 0, 3].max() - found[:, 0, 2].min()) * 1e-9
        return {
            "cycles_per_tile": float(np.median(each)) / rounds,
            "bytes_per_clk": rounds * box_bytes / float(np.median(each)),
            "chip_tbps": grid * rounds * box_bytes / seconds * 1e-12,
        }

    units = {"cycles_per_tile": "cycles", "bytes_per_clk": "B/clk/SM", "chip_tbps": "TB/s"}
    return repeats(5, once, units)


def _case(sms: str, by: str, box_rows: int, flight: int) -> Case:
    box_bytes = box_rows * ROW_BYTES
    defines = {"BOX_ROWS": box_rows, "FLIGHT": flight, "REGION": _OWN_BYTES // box_bytes, "TENSOR": int(by == "tensor")}
    params: dict[str, int | float | str | bool] = {"sms": sms, "by": by, "box_bytes": box_bytes, "in_flight": flight}
    return Case(
        "reduce", "add_bandwidth", params, "tma_reduce.cu", _bandwidth, "", defines, CHIPS, flight == 4,
        flight * box_bytes, 0.02,
    )  # fmt: skip


def cases() -> list[Case]:
    """By tensor map and by address, one SM and all, several sizes and numbers on their way."""
    return [
        _case(sms, by, rows, flight)
        for by in ("tensor", "address") for sms in ("one", "all") for rows in (64, 128, 256) for flight in (1, 2, 4)
    ]  # fmt: skip
