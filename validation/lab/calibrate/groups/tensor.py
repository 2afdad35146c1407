"""Matrix instructions: rate, issue-to-visible latency, and who is served first."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tilecast.validation.lab.calibrate.cases import Case, Reading, repeats
from tilecast.validation.lab.calibrate.gpu import Gpu, Launch
from tilecast.validation.lab.calibrate.preludes import wgmma_prelude

HOPPER = (90,)
BLACKWELL = (100, 103)
WGMMA_SMEM = 131072
_REPEATS = 7


def _whole(params: Mapping[str, object], name: str) -> int:
    return int(str(params[name]))


def _wgmma_rate(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    groups, rounds, steps = _whole(case.params, "warpgroups"), 100, 8

    def once() -> dict[str, float]:
        found, _ = gpu.records(case, Launch(gpu.identity.sm_count, 128 * groups, WGMMA_SMEM, rounds=rounds))
        spans = found[:, :, 1].max(axis=1) - found[:, :, 0].min(axis=1)
        return {"cycles_per_mma": float(np.median(spans)) / (groups * rounds * steps)}

    return repeats(_REPEATS, once, {"cycles_per_mma": "cycles"})


def _wgmma_latency(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    rounds = 100

    def once() -> dict[str, float]:
        launch = Launch(1, 128 * _whole(case.params, "warpgroups"), WGMMA_SMEM, rounds=rounds)
        found, _ = gpu.records(case, launch)
        per = found[0].astype(float) / rounds
        return {
            "wait_cycles": float(np.mean(per[:, 1] - per[:, 6])),
            # The four warps of a warpgroup are not held up alike.
            "issue_cycles": float(np.max(per[:, 5] - per[:, 6])),
            "issue_first_warp_cycles": float(np.min(per[:, 5] - per[:, 6])),
        }

    names = ("wait_cycles", "issue_cycles", "issue_first_warp_cycles")
    return repeats(_REPEATS, once, dict.fromkeys(names, "cycles"))


def _wgmma_order(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    rounds = 50

    def once() -> dict[str, float]:
        found, _ = gpu.records(
            case, Launch(1, 256, WGMMA_SMEM, size=_whole(case.params, "delay_cycles"), rounds=rounds)
        )
        first, second = (found[0, i : i + 4].astype(float).mean(axis=0) / rounds for i in (0, 4))
        return {
            "first_start": first[0], "first_done": first[1], "second_start": second[0], "second_done": second[1],
        }  # fmt: skip

    return repeats(
        _REPEATS, once, dict.fromkeys(("first_start", "first_done", "second_start", "second_done"), "cycles")
    )


def _rate_cases() -> list[Case]:
    def case(n: int, a: str, groups: int, dtype: str = "bf16", trans_b: bool = False) -> Case:
        return Case(
            "tensor", "wgmma_rate",
            {"n": n, "a": a, "warpgroups": groups, "dtype": dtype, "b": "mn-major" if trans_b else "k-major"},
            "wgmma_rate.cu", _wgmma_rate, wgmma_prelude(n, a, dtype, trans_b), {"GROUPS": groups, "STEPS": 8}, HOPPER,
            quick=groups == 1 and n in (64, 128, 256),
        )  # fmt: skip

    cases = []
    for a in ("smem", "register"):
        for n in (8, 16, 32, 64, 96, 128, 192, 256):
            cases += [case(n, a, groups) for groups in (1, 2, 3, 4) if groups < 4 or n <= 128]
        for n in (64, 128, 256):
            cases += [case(n, a, groups, dtype="fp8") for groups in (1, 2)]
            cases += [case(n, a, groups, trans_b=True) for groups in (1, 2)]
    return cases


def _latency_cases() -> list[Case]:
    cases = []
    for a in ("smem", "register"):
        for n in (64, 128, 256):
            for groups, trans_b in ((1, False), (1, True), (2, False)):
                for steps in (1, 2, 4, 8, 16):
                    cases.append(
                        Case(
                            "tensor", "wgmma_latency",
                            {"n": n, "a": a, "steps": steps, "warpgroups": groups, "b": "mn-major" if trans_b else "k-major"},
                            "wgmma_latency.cu", _wgmma_latency, wgmma_prelude(n, a, trans_b=trans_b),
                            {"GROUPS": groups, "STEPS": steps}, HOPPER, quick=groups == 1 and not trans_b and steps == 8,
                        )
                    )  # fmt: skip
    return cases


def _order_cases() -> list[Case]:
    cases = []
    for a in ("smem", "register"):
        for n in (64, 128, 256):
            alone = 8 * n // 2
            for delay in (0, alone // 4, alone // 2, alone):
                cases.append(
                    Case(
                        "tensor", "wgmma_order", {"n": n, "a": a, "steps": 8, "delay_cycles": delay},
                        "wgmma_order.cu", _wgmma_order, wgmma_prelude(n, a), {"STEPS": 8}, HOPPER,
                    )
                )  # fmt: skip
    return cases


def _mma_sync(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    warps, chains = _whole(case.params, "warps"), _whole(case.params, "chains")
    rounds, unroll = 500, 16 // chains

    def once() -> dict[str, float]:
        found, _ = gpu.records(case, Launch(1, 32 * warps, rounds=rounds))
        span = float(found[:, :, 1].max() - found[:, :, 0].min())
        per_partition = max(1, warps // 4)
        return {"cycles_per_mma": span / (rounds * unroll * chains * per_partition)}

    return repeats(_REPEATS, once, {"cycles_per_mma": "cycles"})


def _mma_sync_cases() -> list[Case]:
    shapes = [(1, 1), (4, 8), (8, 8), (16, 8)]
    return [
        Case(
            "tensor", "mma_sync_m16n8k16", {"warps": warps, "chains": chains}, "mma_sync.cu", _mma_sync,
            defines={"THREADS": 32 * warps, "CHAINS": chains, "UNROLL": 16 // chains}, quick=warps in (1, 8),
        )
        for warps, chains in shapes
    ]  # fmt: skip


def _tcgen05(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    rounds, ctas = 100, _whole(case.params, "ctas")

    def once() -> dict[str, float]:
        found, _ = gpu.records(case, Launch(ctas, 128, WGMMA_SMEM, rounds=rounds))
        return {"wait_cycles": float(found[0, 0, 6]) / rounds, "issue_cycles": float(found[0, 0, 5]) / rounds}

    return repeats(_REPEATS, once, {"wait_cycles": "cycles", "issue_cycles": "cycles"})


def _tcgen05_cases() -> list[Case]:
    return [
        Case(
            "tensor", "tcgen05_latency",
            {"m": 128 * ctas, "n": n, "a": "tmem" if tmem else "smem", "steps": depth, "ctas": ctas},
            "tcgen05.cu", _tcgen05, defines={"CTAS": ctas, "A_TMEM": tmem, "M": 128 * ctas, "N": n, "DEPTH": depth},
            chips=BLACKWELL, quick=depth in (8, 16) and n == 128,
        )
        for ctas in (1, 2) for tmem in (0, 1) for n in (64, 128, 256) for depth in (1, 4, 8, 16)
    ]  # fmt: skip


def _tmem(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    rounds = 500

    def once() -> dict[str, float]:
        found, _ = gpu.records(case, Launch(1, 128, rounds=rounds))
        span = float(found[:, :, 1].max() - found[:, :, 0].min())
        return {"cycles_per_access": span / (rounds * 4), "bytes_per_clk": 4 * 4096 * rounds * 4 / span}

    return repeats(_REPEATS, once, {"cycles_per_access": "cycles", "bytes_per_clk": "B/clk/SM"})


def _tmem_cases() -> list[Case]:
    return [
        Case(
            "tensor", "tmem", {"access": "store" if store else "load", "one_at_a_time": bool(latency)}, "tmem.cu", _tmem,
            defines={"STORE": store, "LATENCY": latency}, chips=BLACKWELL, quick=True,
        )
        for store in (0, 1) for latency in (0, 1)
    ]  # fmt: skip


def cases() -> list[Case]:
    """All matrix benchmarks; the runner keeps those of the chip at hand."""
    return [*_rate_cases(), *_latency_cases(), *_order_cases(), *_mma_sync_cases(), *_tcgen05_cases(), *_tmem_cases()]
