"""Hand-overs between warps, and what a synchronising instruction costs when no warp is late."""

from __future__ import annotations

from collections.abc import Mapping

from tilecast.validation.lab.calibrate.cases import Case, Reading, repeats
from tilecast.validation.lab.calibrate.gpu import Gpu, Launch

_NEW = (90, 100, 103, 120)
#: name -> (statement, threads, chips).  ``bar`` is an mbarrier whose current phase never completes.
_COSTS: dict[str, tuple[str, int, tuple[int, ...]]] = {
    "bar_sync_128": ('asm volatile("bar.sync 1, 128;" ::: "memory");', 128, ()),
    "bar_sync_256": ('asm volatile("bar.sync 1, 256;" ::: "memory");', 256, ()),
    "bar_sync_384": ('asm volatile("bar.sync 1, 384;" ::: "memory");', 384, ()),
    "syncwarp": ("__syncwarp();", 32, ()),
    "mbarrier_wait_done": ("z += mbar_try(bar, 1);", 32, ()),
    "mbarrier_arrive_elected": ("if (threadIdx.x % 32 == 0) mbar_arrive(bar);", 32, ()),
    "mbarrier_expect_elected": ("if (threadIdx.x % 32 == 0) mbar_expect(bar, 0);", 32, _NEW),
    "fence_proxy_async": ("fence_async();", 128, _NEW),
    "fence_cta": ("__threadfence_block();", 128, ()),
    "wgmma_fence": ('asm volatile("wgmma.fence.sync.aligned;" ::: "memory");', 128, (90,)),
    "vote": ("z += __any_sync(0xffffffffu, z == 77u);", 128, ()),
}
_ALL = (80, 86, 89, 90, 100, 103, 120)


def _cost(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    rounds, threads = 200, int(str(case.defines["THREADS"]))

    def once() -> dict[str, float]:
        found, _ = gpu.records(case, Launch(1, threads, rounds=rounds))
        return {"cycles": float(found[:, :, 1].max() - found[:, :, 0].min()) / (rounds * 8)}

    return repeats(7, once, {"cycles": "cycles"})


def _handover(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    rounds = 500
    warps = int(str(case.params["left_warps"])) + int(str(case.params["right_warps"]))

    def once() -> dict[str, float]:
        found, _ = gpu.records(case, Launch(1, 32 * warps, rounds=rounds))
        # A round is there and back; the cost of one hand-over is half.
        return {"handover_cycles": float(found[:, :, 1].max() - found[:, :, 0].min()) / (2 * rounds)}

    return repeats(7, once, {"handover_cycles": "cycles"})


def _one_way(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    rounds, waiters = 200, int(str(case.params["waiters"]))

    def once() -> dict[str, float]:
        found, _ = gpu.records(case, Launch(1, 32 * (1 + waiters), rounds=rounds))
        return {"cycles": float(found[:, 1:, 1].mean()) / rounds}

    return repeats(7, once, {"cycles": "cycles"})


def _cluster(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    rounds, loads = 300, case.params["operation"] == "load"

    def once() -> dict[str, float]:
        found, _ = gpu.records(case, Launch(2, 32, rounds=rounds))
        span = float((found[:, 0, 1] - found[:, 0, 0]).max())
        # A round is eight loads, or a hand-over there and back.
        return {"cycles": span / (rounds * (8 if loads else 2))}

    return repeats(7, once, {"cycles": "cycles"})


def cases() -> list[Case]:
    """Ping-pongs by mechanism and number of warps, and single costs."""
    ways = ("mbarrier_elected", "mbarrier_all_threads", "named_barrier")
    found = [
        Case(
            "sync", "handover", {"by": way, "left_warps": left, "right_warps": right}, "handover.cu", _handover,
            defines={"KIND": kind, "LEFT": left, "RIGHT": right}, chips=_ALL, quick=True,
        )
        for kind, way in enumerate(ways) for left, right in ((1, 1), (1, 4), (4, 4), (1, 8))
    ]  # fmt: skip
    found += [
        Case(
            "sync", "one_way", {"waiters": waiters}, "one_way.cu", _one_way, defines={"WAITERS": waiters}, chips=_ALL,
            quick=waiters == 4,
        )
        for waiters in (1, 4, 8)
    ]  # fmt: skip
    for name, (statement, threads, chips) in _COSTS.items():
        found.append(
            Case(
                "sync", "cost", {"operation": name}, "sync_cost.cu", _cost,
                defines={"OP": statement, "THREADS": threads}, chips=chips or _ALL, quick=True,
            )
        )  # fmt: skip
    found += [
        Case(
            "sync", "cluster", {"operation": name}, "cluster.cu", _cluster, defines={"KIND": kind},
            chips=(90, 100, 103), quick=True,
        )
        for kind, name in enumerate(("handover", "load", "handover_release_cluster"))
    ]  # fmt: skip
    return found
