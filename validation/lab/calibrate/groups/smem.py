"""Shared memory: bandwidth alone, under matrix operand reads and under bulk copies; latency."""

from __future__ import annotations

from collections.abc import Mapping

from tilecast.validation.lab.calibrate.cases import Case, Reading, repeats
from tilecast.validation.lab.calibrate.gpu import Gpu, Launch
from tilecast.validation.lab.calibrate.groups.corun import corun_case
from tilecast.validation.lab.calibrate.preludes import SMEM_STREAMS

_KINDS = ("ld_shared", "ldmatrix", "st_ld_shared", "stmatrix_ld_shared")


def _latency(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    rounds = 200

    def once() -> dict[str, float]:
        found, _ = gpu.records(case, Launch(1, 32, rounds=rounds))
        return {"latency_cycles": float(found[0, 0, 1] - found[0, 0, 0]) / (rounds * 8)}

    return repeats(7, once, {"latency_cycles": "cycles"})


def cases() -> list[Case]:
    """Bandwidth streams alone, beside wgmma and beside copies; copies alone and beside wgmma; four latencies."""
    found = [
        Case(
            "smem", "latency", {"access": name}, "smem_latency.cu", _latency, defines={"KIND": kind},
            chips=(90, 100, 103, 120) if kind == 3 else (80, 86, 89, 90, 100, 103, 120), quick=True,
        )
        for kind, name in enumerate(_KINDS)
    ]  # fmt: skip
    for name in SMEM_STREAMS:
        found += [corun_case("smem", name, 0, streams, 128, "smem", quick=streams == 2) for streams in (1, 2)]
        found += [corun_case("smem", name, 0, streams, 128, "smem", fill=True) for streams in (1, 2)]
        for n in (64, 128, 256):
            for a in ("smem", "register"):
                quick = name == "ld_shared" and n == 128
                found += [corun_case("smem", name, mma, 1, n, a, quick=quick) for mma in (1, 2)]
    found.append(corun_case("smem", "ld_shared", 0, 0, 128, "smem", fill=True, quick=True))
    for n in (64, 128, 256):
        for a in ("smem", "register"):
            found += [corun_case("smem", "ld_shared", mma, 0, n, a, fill=True, quick=n == 128) for mma in (1, 2)]
            if n < 256:  # three sides with 128 accumulators would not fit the register file
                found.append(corun_case("smem", "ld_shared", 1, 1, n, a, fill=True))
    return found
