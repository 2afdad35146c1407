"""L2 and HBM: bandwidth of all SMs and of one, latency of a dependent chain."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tilecast.validation.lab.calibrate.cases import Case, Reading, repeats
from tilecast.validation.lab.calibrate.gpu import Gpu, Launch

_CHUNK, _UNROLL = 16384, 4
#: The walks start behind the data of the arithmetic streams.
_BASE = 64 << 20
#: What one SM's chain of memory loads walks over.
_WALK_BYTES = 5 << 19


def _bandwidth(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    region = int(str(case.params["region_bytes"]))
    copy = bool(case.params["copy"])
    grid = gpu.identity.sm_count if case.params["sms"] == "all" else 1
    passes = (4 << 20) if case.params["source"] != "hbm" else region
    rounds = passes // (_CHUNK * _UNROLL)
    launch = Launch(grid, 1024, 0, size=grid * region if copy else 0, rounds=rounds, offset=_BASE)

    def once() -> dict[str, float]:
        found, _ = gpu.records(case, launch)
        spans = (found[:, :, 1].max(axis=1) - found[:, :, 0].min(axis=1)).astype(float)
        seconds = float(found[:, :, 3].max() - found[:, :, 2].min()) * 1e-9
        moved = rounds * _CHUNK * _UNROLL * (2 if copy else 1)
        return {"bytes_per_clk": moved / float(np.median(spans)), "chip_tbps": grid * moved / seconds * 1e-12}

    return repeats(7, once, {"bytes_per_clk": "B/clk/SM", "chip_tbps": "TB/s"})


def _bandwidth_case(sms: str, source: str, region: int, private: bool, copy: bool = False) -> Case:
    # Shared readers start 1/8 of a megabyte apart, as CTAs of different heads do.
    defines: dict[str, int | str] = {
        "PRIVATE": int(private), "REGION": f"{region}ll", "UNROLL": _UNROLL, "COPY": int(copy), "STRIDE": 131072,
    }  # fmt: skip
    params: dict[str, int | float | str | bool] = {"sms": sms, "source": source, "region_bytes": region, "copy": copy}
    return Case("memory", "bandwidth", params, "memory_bandwidth.cu", _bandwidth, "", defines, quick=True, seconds=0.05)


def _driver_copy(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    size = 1 << 30

    def once() -> dict[str, float]:
        took = gpu.milliseconds(lambda: gpu.copy(size + _BASE, _BASE, size))
        return {"chip_tbps": 2 * size / took * 1e-9}

    return repeats(7, once, {"chip_tbps": "TB/s"})


def _latency(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    from_l2, rounds = case.params["source"] == "l2", 1000
    walked = 98304 if from_l2 else _WALK_BYTES
    sms = gpu.identity.sm_count

    def once() -> dict[str, float]:
        at = _BASE if from_l2 else gpu.fresh(sms * _WALK_BYTES)
        launch = Launch(sms, 32, rounds * 4, walked, rounds, offset=at)
        _, tail = gpu.records(case, launch, sms * rounds)
        each = tail.astype(float)
        each = each[each > 0]
        return {
            "latency_cycles": float(np.median(each)),
            "latency_p10_cycles": float(np.percentile(each, 10)),
            "latency_p90_cycles": float(np.percentile(each, 90)),
        }

    return repeats(5, once, dict.fromkeys(("latency_cycles", "latency_p10_cycles", "latency_p90_cycles"), "cycles"))


def cases() -> list[Case]:
    """Bandwidths by source and sharing, and two latencies."""
    return [
        _bandwidth_case("all", "l2_shared", 16 << 20, False),
        _bandwidth_case("all", "l2_private", 131072, True),
        _bandwidth_case("one", "l2_private", 131072, True),
        _bandwidth_case("all", "hbm", 16 << 20, True),
        _bandwidth_case("all", "hbm", 12 << 20, True, copy=True),
        Case("memory", "driver_copy", {"bytes": 1 << 30}, "idle.cu", _driver_copy, quick=True, seconds=0.05),
        Case(
            "memory", "latency", {"source": "l2"}, "memory_latency.cu", _latency,
            defines={"SPACE": "131072ll", "STEP": 1152, "WARM": 1}, quick=True,
        ),
        Case(
            "memory", "latency", {"source": "hbm"}, "memory_latency.cu", _latency,
            defines={"SPACE": f"{_WALK_BYTES}ll", "STEP": 2176, "WARM": 0}, quick=True, seconds=0.1,
        ),
    ]  # fmt: skip
