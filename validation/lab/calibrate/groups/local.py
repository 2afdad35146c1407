"""Local memory, where spilled registers live: latencies, rates, and what a footprint costs that L1 does not hold."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tilecast.validation.lab.calibrate.cases import Case, Reading, repeats
from tilecast.validation.lab.calibrate.gpu import Gpu, Launch
from tilecast.validation.lab.calibrate.groups.corun import corun_case
from tilecast.validation.lab.calibrate.preludes import LOCAL_STREAMS

_KINDS = {"load": 0, "store_load": 1, "store_overwrite": 2, "overwrite": 6, "stores": 3, "loads": 4}
#: Accesses of an unrolled round.
_STEP = 8


def _access(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    rounds, threads = 200, int(str(case.defines["THREADS"]))

    def once() -> dict[str, float]:
        found, _ = gpu.records(case, Launch(1, threads, rounds=rounds))
        span = float(found[:, :, 1].max() - found[:, :, 0].min())
        return {"cycles": span / (rounds * (1 if "overwrite" in str(case.params["access"]) else _STEP))}

    return repeats(7, once, {"cycles": "cycles"})


def _burst(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    threads, rounds = int(str(case.defines["THREADS"])), 20

    def once() -> dict[str, float]:
        found, _ = gpu.records(case, Launch(gpu.identity.sm_count, threads, rounds=rounds))
        return {"issue_cycles": float(np.median(found[:, :, 1] - found[:, :, 0])) / rounds}

    return repeats(5, once, {"issue_cycles": "cycles"})


def _walk(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    threads, words = int(str(case.defines["THREADS"])), int(str(case.defines["WORDS"]))
    rounds = 24 * words // _STEP

    def once() -> dict[str, float]:
        # All SMs at once, as spilling kernels do: what their L1 does not hold meets in L2.
        launch = Launch(gpu.identity.sm_count, threads, case.smem_bytes, rounds=rounds)
        found, _ = gpu.records(case, launch)
        spans = (found[:, :, 1].max(axis=1) - found[:, :, 0].min(axis=1)).astype(float)
        return {"cycles": float(np.median(spans)) / (rounds * _STEP)}

    return repeats(5, once, {"cycles": "cycles"})


def cases() -> list[Case]:
    """One warp's latencies; stores and loads of 1 to 3 warps a sub-partition; walks by footprint; both beside wgmma."""
    found = []
    for name, kind in _KINDS.items():
        for warps in (1, 2, 3) if name in ("stores", "loads") else (1,):
            threads = 128 * warps if name in ("stores", "loads") else 32
            found.append(
                Case(
                    "local", "access", {"access": name, "warps_per_partition": warps}, "local.cu", _access,
                    defines={"KIND": kind, "THREADS": threads, "WORDS": 2 * _STEP}, quick=warps < 3,
                )
            )  # fmt: skip
    for warps in (1, 2, 3):
        for burst in (1, 2, 3, 4, 6, 8, 12, 16, 24):
            found.append(
                Case(
                    "local", "burst", {"stores": burst, "warps_per_partition": warps}, "local.cu", _burst,
                    defines={"KIND": 7, "THREADS": 128 * warps, "WORDS": 32, "BURST": burst},
                )
            )  # fmt: skip
    for smem in (100 << 10, 130 << 10, 162 << 10, 186 << 10, 200 << 10, 224 << 10):
        for threads in (128, 256, 384):
            for words in (8, 16, 32, 48, 64, 96, 128, 192, 256):
                quick = smem == 200 << 10 and threads == 256
                found.append(
                    Case(
                        "local", "walk", {"smem_bytes": smem, "threads": threads, "words": words}, "local.cu", _walk,
                        defines={"KIND": 5, "THREADS": threads, "WORDS": words}, chips=(90, 100, 103), quick=quick,
                        smem_bytes=smem,
                    )
                )  # fmt: skip
    for name in LOCAL_STREAMS:
        found += [corun_case("local", name, 0, streams, 128, "smem") for streams in (1, 2)]
        for n in (64, 128, 256):
            for a in ("smem", "register"):
                found += [corun_case("local", name, mma, 1, n, a) for mma in (1, 2)]
    return found
