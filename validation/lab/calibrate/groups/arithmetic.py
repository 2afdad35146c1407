"""Arithmetic streams from registers: rate by number of warps, dependent latency, mixes of pipes."""

from __future__ import annotations

from collections.abc import Mapping

from tilecast.validation.lab.calibrate.cases import Case, Reading, repeats
from tilecast.validation.lab.calibrate.gpu import Gpu, Launch
from tilecast.validation.lab.calibrate.preludes import LOCAL_STREAMS, MIXES, SMEM_STREAMS, STREAMS

_CHIPS = (80, 86, 89, 90, 100, 103, 120)
_QUICK = ("ex2", "ffma_3src", "max2", "pack_bf16x2", "softmax_online")


def _measure(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    stream = STREAMS[str(case.params["stream"])]
    warps = int(str(case.params["warps_per_partition"]))
    chains = int(str(case.defines["CHAINS"]))
    threads = int(str(case.defines["THREADS"]))
    steps = int(str(case.defines["UNROLL"])) * chains
    rounds = 150

    def once() -> dict[str, float]:
        found, _ = gpu.records(case, Launch(1, threads, rounds=rounds))
        span = float(found[:, :, 1].max() - found[:, :, 0].min())
        # Per sub-partition: warps of one sub-partition share its pipes, sub-partitions share nothing here.
        return {"cycles_per_step": span / (rounds * steps * warps)}

    unit = "cycles/element" if case.params["stream"] in MIXES else "cycles"
    readings = repeats(7, once, {"cycles_per_step": unit})
    if case.benchmark == "rate" and stream.per_step != 1:
        samples = tuple(x / stream.per_step for x in readings["cycles_per_step"].samples)
        readings["cycles_per_instruction"] = Reading(samples, "cycles")
    return readings


def cases() -> list[Case]:
    """Rate of every stream with 1, 2 and 4 warps a sub-partition; latency of the single instructions."""
    found = []
    for name, stream in STREAMS.items():
        if name in SMEM_STREAMS or name in LOCAL_STREAMS:
            continue
        chips = tuple(chip for chip in _CHIPS if chip >= stream.since)
        # Long enough that the loop's branch costs under two percent; mixes as long as a row of scores.
        unroll = 4 if name in MIXES or "+" in name or name == "ex2_poly3" else 8
        for warps in (1, 2, 4):
            found.append(
                Case(
                    "arithmetic", "rate", {"stream": name, "warps_per_partition": warps}, "arithmetic.cu", _measure,
                    stream.prelude(), {"CHAINS": 16, "UNROLL": unroll, "THREADS": 128 * warps}, chips,
                    quick=name in _QUICK and warps < 4,
                )
            )  # fmt: skip
        if name not in MIXES and "+" not in name and name != "ex2_poly3":
            found.append(
                Case(
                    "arithmetic", "latency", {"stream": name, "warps_per_partition": 1}, "arithmetic.cu", _measure,
                    stream.prelude(), {"CHAINS": 1, "UNROLL": 128, "THREADS": 32}, chips, quick=name in _QUICK,
                )
            )  # fmt: skip
    return found
