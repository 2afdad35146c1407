"""Around a kernel: launches back to back, CTA after CTA on an SM, first instructions across the chip."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tilecast.validation.lab.calibrate.cases import Case, Reading, repeats
from tilecast.validation.lab.calibrate.gpu import Gpu, Launch, Records

#: Dynamic shared memory of an attention kernel, bytes; devices with less use what they have.
_SMEM = 200 << 10
_BODY_CYCLES = 6000


def _smem(gpu: Gpu, wanted: int) -> int:
    return min(wanted, gpu.identity.smem_per_cta - 1024)


def _graph(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    threads, smem = int(str(case.params["threads"])), _smem(gpu, int(str(case.params["smem_bytes"])))
    grid = gpu.identity.sm_count if case.params["ctas"] == "one per SM" else 1
    body, count = int(str(case.params["body_cycles"])), 200
    run = gpu.graph(case, Launch(grid, threads, smem, size=body), count)

    def once() -> dict[str, float]:
        # The body runs at the top clock: it computes nothing.
        return {"kernel_us": gpu.milliseconds(run) * 1e3 / count - body / gpu.identity.clock_mhz}

    return repeats(9, once, {"kernel_us": "us"})


def turnarounds(found: Records) -> list[float]:
    """Cycles from a CTA's last clock to its successor's first on the same SM; records of shape (CTAs, warps, 8).

    A CTA's first clock is its earliest warp's; SMs whose CTAs overlap give nothing.
    """
    first, last, sm = found[:, :, 0].min(axis=1), found[:, 0, 1], found[:, 0, 4]
    gaps: list[float] = []
    for one in np.unique(sm):
        mine = np.flatnonzero(sm == one)
        order = mine[np.argsort(first[mine])]
        steps = first[order][1:] - last[order][:-1]
        if len(steps) and steps.min() > 0:
            gaps += [float(x) for x in steps]
    return gaps


def _turnaround(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    threads = int(str(case.params["threads"]))
    smem = _smem(gpu, _SMEM)
    launch = Launch(gpu.identity.sm_count * 12, threads, smem, size=_BODY_CYCLES)

    def once() -> dict[str, float]:
        found, _ = gpu.records(case, launch)
        gaps = turnarounds(found)
        # Warps of one CTA do not start together: the spread belongs to the start.
        ramp = found[:, :, 0].max(axis=1) - found[:, :, 0].min(axis=1)
        return {
            "turnaround_cycles": float(np.median(gaps)),
            "turnaround_p90_cycles": float(np.percentile(gaps, 90)),
            "warp_ramp_cycles": float(np.median(ramp)),
        }

    names = ("turnaround_cycles", "turnaround_p90_cycles", "warp_ramp_cycles")
    return repeats(7, once, dict.fromkeys(names, "cycles"))


def start_offsets(ticks: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Mean start of every SM after the first one, in the unit of ``ticks``, which has shape (launches, SMs).

    The timer ticks coarsely; launches fall anywhere between two ticks, so their mean resolves what one cannot.
    """
    mean: npt.NDArray[np.float64] = (ticks - ticks.mean(axis=1, keepdims=True)).mean(axis=0)
    return np.asarray(mean - mean.min(), dtype=np.float64)


def _spread(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    threads, launches = int(str(case.params["threads"])), 300
    launch = Launch(gpu.identity.sm_count, threads, _smem(gpu, _SMEM), size=_BODY_CYCLES)

    def once() -> dict[str, float]:
        ticks = []
        for _ in range(launches):
            found, _ = gpu.records(case, launch)
            by_sm = found[np.argsort(found[:, 0, 4])]
            ticks.append(by_sm[:, :, 2].min(axis=1).astype(float))
        offsets = start_offsets(np.array(ticks))
        return {"start_p50_ns": float(np.median(offsets)), "start_max_ns": float(offsets.max())}

    return repeats(5, once, dict.fromkeys(("start_p50_ns", "start_max_ns"), "ns"))


def cases() -> list[Case]:
    """Empty kernels in a graph, CTA turnaround by threads and register moves, start spread."""
    found = [
        Case(
            "launch", "graph_kernel", {"ctas": ctas, "threads": threads, "smem_bytes": smem, "body_cycles": body},
            "cta_turnaround.cu" if body else "empty.cu", _graph,
            defines={"THREADS": threads, "SETMAXNREG": 0}, quick=True, seconds=0.05,
        )
        for ctas, threads, smem, body in (
            ("one", 32, 0, 0), ("one per SM", 384, 0, 0), ("one per SM", 384, _SMEM, 0), ("one per SM", 384, _SMEM, 20000)
        )
    ]  # fmt: skip
    for threads, moves in ((128, 0), (256, 0), (384, 0), (384, 1)):
        found.append(
            Case(
                "launch", "cta_turnaround", {"threads": threads, "setmaxnreg": bool(moves)}, "cta_turnaround.cu",
                _turnaround, defines={"THREADS": threads, "SETMAXNREG": moves},
                chips=(90, 100, 103) if moves else (80, 86, 89, 90, 100, 103, 120), quick=threads == 384,
            )
        )  # fmt: skip
    found.append(
        Case(
            "launch", "start_spread", {"threads": 384}, "cta_turnaround.cu", _spread,
            defines={"THREADS": 384, "SETMAXNREG": 0}, seconds=0.4,
        )
    )  # fmt: skip
    return found
