"""Arithmetic, shared-memory traffic and bulk copies beside matrix work on one SM; and inside one warpgroup."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from tilecast.validation.lab.calibrate.cases import CalibrateError, Case, Reading, repeats
from tilecast.validation.lab.calibrate.gpu import Gpu, Launch
from tilecast.validation.lab.calibrate.preludes import LOCAL_STREAMS, MIXES, SMEM_STREAMS, STREAMS, wgmma_prelude

HOPPER = (90,)
#: Entries of the kernel's log, k-steps of a logged group, bytes of one bulk copy and copies in flight.
LOG, STEPS, FILL_BYTES, FILL_FLIGHT = 1024, 8, 16384, 3
SMEM = 131072 + 32768 + FILL_BYTES * FILL_FLIGHT
#: Expected cycles of a step on one warp a sub-partition, only to choose loop lengths.
_GUESS = {
    "ex2": 8.2, "ffma_3src": 1.2, "ffma_2src": 1.2, "fadd": 1.2, "fmul": 1.2, "max2": 2.2, "pack_bf16x2": 2.2, "lop3": 2.2,
    "iadd3": 2.2, "ex2_poly3": 7.5, "shuffle": 2.2, "softmax_online": 10.4, "softmax_anchored": 9.5,
    "softmax_anchored_poly8": 9.0, "softmax_anchored_poly4": 8.5, "ld_shared": 16.0, "st_shared": 16.0,
    "ldmatrix": 16.0, "stmatrix": 16.0, "ld_local": 4.0, "st_local": 4.0,
}  # fmt: skip
ARITHMETIC = (
    "ex2", "ffma_3src", "ffma_2src", "fadd", "max2", "pack_bf16x2", "lop3", "shuffle", "ex2_poly3", "softmax_online",
    "softmax_anchored", "softmax_anchored_poly8", "softmax_anchored_poly4",
)  # fmt: skip
_QUICK = ("ex2", "softmax_online", "softmax_anchored")


def inside(log: npt.NDArray[np.int64], begin: int, end: int) -> tuple[int, int]:
    """(events, cycles) between the first and the last logged clock inside [begin, end]; clocks are 32-bit.

    (0, 0) when fewer than two fall inside.  The log is zero beyond its last entry.
    """
    entries = log[log != 0]
    # Differences modulo 2**32, as the logged clocks wrap.
    since = (entries - begin) & 0xFFFFFFFF
    within = since[since <= ((end - begin) & 0xFFFFFFFF)]
    return (len(within) - 1, int(within[-1] - within[0])) if len(within) > 1 else (0, 0)


def _lasts(log: npt.NDArray[np.int64], begin: int, end: int) -> bool:
    entries = log[log != 0]
    return bool(len(entries)) and ((int(entries[-1]) - end) & 0xFFFFFFFF) < 1 << 31


def _sample(gpu: Gpu, case: Case, rounds: int, groups: int) -> dict[str, float]:
    """One launch: the rates of every side inside the common window."""
    mma, streams, fill = (int(str(case.defines[key])) for key in ("MMA_GROUPS", "STREAM_GROUPS", "FILL"))
    block = 128 * (mma + streams) + (32 if fill else 0)
    # Copies are measured on one SM: all of them would share the L2's bandwidth, not the SM's.
    grid = 1 if fill else gpu.identity.sm_count
    found, tail = gpu.records(case, Launch(grid, block, SMEM, size=groups, rounds=rounds, offset=1 << 20), 3 * LOG)
    logs = tail.reshape(3, LOG)
    active = [logs[i] for i in range(mma)] + ([logs[2]] if fill else [])
    out: dict[str, float] = {}
    if streams:
        sides = found[0, 4 * mma : 4 * (mma + streams)]
        begin, end = int(sides[:, 0].min()), int(sides[:, 1].max())
        for log in active:
            if not _lasts(log, begin & 0xFFFFFFFF, end & 0xFFFFFFFF):
                raise _TooShortError
        # Steps of one sub-partition: its warps share the pipes.
        out["cycles_per_step"] = (end - begin) / (rounds * 16 * int(str(case.defines["UNROLL"])) * streams)
    else:
        begin = max(int(log[log != 0][0]) for log in active)
        end = min(int(log[log != 0][-1]) for log in active)
    if mma:
        rates = [inside(logs[i], begin & 0xFFFFFFFF, end & 0xFFFFFFFF) for i in range(mma)]
        if any(events < 4 for events, _ in rates):
            raise _StarvedError
        # Matrix instructions of all warpgroups in the same time.
        out["cycles_per_mma"] = 1.0 / sum(events * STEPS / cycles for events, cycles in rates)
    if fill:
        events, cycles = inside(logs[2], begin & 0xFFFFFFFF, end & 0xFFFFFFFF)
        if events < 4:
            raise _StarvedError
        out["fill_bytes_per_clk"] = events * FILL_BYTES / cycles
    return out


class _TooShortError(Exception):
    """The matrix or copy side ended before the streams did."""


class _StarvedError(Exception):
    """The matrix or copy side got almost nothing done while the streams ran."""


def _measure(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    mma, streams, fill = (int(str(case.defines[key])) for key in ("MMA_GROUPS", "STREAM_GROUPS", "FILL"))
    name = str(case.params["stream"])
    n = int(str(case.params["n"]))
    steps = 16 * int(str(case.defines["UNROLL"]))
    rounds = max(4, math.ceil(20000 / (steps * _GUESS.get(name, 4.0))))
    group_cycles = STEPS * max(n / 2, 32) * max(1, mma)
    groups = min(LOG - 24, math.ceil(120000 / group_cycles)) if mma else 64
    units = {}
    if streams:
        units["cycles_per_step"] = "cycles/element" if name in MIXES else "cycles"
    if mma:
        units["cycles_per_mma"] = "cycles"
    if fill:
        units["fill_bytes_per_clk"] = "B/clk/SM"
    for _ in range(8):
        try:
            readings = repeats(5, partial(_sample, gpu, case, rounds, groups), units)
        except _TooShortError:
            # Shorter streams first; they were the longer side.
            rounds, groups = max(4, rounds // 2), min(LOG - 24, groups * 3 // 2)
            continue
        except _StarvedError:
            rounds *= 4
            continue
        bytes_per_step = STREAMS[name].smem_bytes if streams else 0
        if bytes_per_step:
            # Four sub-partitions each move a warp's bytes per step.
            samples = tuple(4 * bytes_per_step / x for x in readings["cycles_per_step"].samples)
            readings["stream_bytes_per_clk"] = Reading(samples, "B/clk/SM")
        return readings
    raise CalibrateError(f"{case.label()}: no loop lengths at which both sides run side by side")


def corun_case(
    group: str, name: str, mma: int, streams: int, n: int, a: str, fill: bool = False, quick: bool = False
) -> Case:
    """``mma`` warpgroups of m64 x n wgmma beside ``streams`` warpgroups of stream ``name``, and bulk copies if ``fill``."""
    prelude = wgmma_prelude(n, a) + STREAMS[name].prelude()
    # Copies for every logged group: it takes at least 256 cycles, and so does a 16 KB copy.
    group_cycles = STEPS * n // 2 * mma
    defines = {
        "MMA_GROUPS": mma, "STREAM_GROUPS": streams, "FILL": FILL_FLIGHT if fill else 0, "FILL_BYTES": FILL_BYTES,
        "FILL_SCALE": max(1, group_cycles // 256) if mma else 4,
        # The loop's branch must not show; a mix is written out for 64 elements, as a kernel's row is.
        "LOCAL": int(name in LOCAL_STREAMS),
        "UNROLL": 1 if name in SMEM_STREAMS else 4 if name in MIXES else 8,
    }  # fmt: skip
    params: dict[str, int | str | float | bool] = {
        "stream": name if streams else "none", "mma_warpgroups": mma, "stream_warpgroups": streams, "n": n, "a": a,
        "fill": fill,
    }  # fmt: skip
    return Case(group, "beside_mma", params, "corun.cu", _measure, prelude, defines, HOPPER, quick, seconds=0.03)


def _overlap(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    groups = int(str(case.params["warpgroups"]))
    rounds = 60

    def once() -> dict[str, float]:
        found, _ = gpu.records(case, Launch(gpu.identity.sm_count, 128 * groups, 131072, rounds=rounds))
        per = np.median(found.astype(float).mean(axis=1), axis=0) / rounds
        return {"iteration_cycles": float(per[1]), "issued_cycles": float(per[0]), "computed_cycles": float(per[5])}

    return repeats(5, once, dict.fromkeys(("iteration_cycles", "issued_cycles", "computed_cycles"), "cycles"))


def _overlap_cases() -> list[Case]:
    cases = []
    for n in (64, 128, 256):
        for groups in (1, 2):
            for name in ("softmax_online", "softmax_anchored", "ex2", "ffma_3src"):
                if name == "ffma_3src" and (n != 128 or groups == 2):
                    continue
                # Half, one and one and a half times the matrix work, and what a 64 x n tile of scores brings.
                matrix = STEPS * n / 2 * groups
                bodies = {max(1, round(share * matrix / (16 * _GUESS[name]))) for share in (0.5, 1.0, 1.5)} | {n // 32}
                for body in sorted(bodies | ({0} if name == "ex2" else set())):
                    for steps, a in ((STEPS, "smem"), (STEPS, "register"), (0, "smem")):
                        if steps or body:
                            cases.append(_overlap_case(name, body, steps, n, a, groups))
    return cases


def _overlap_case(name: str, body: int, steps: int, n: int, a: str, groups: int) -> Case:
    params: dict[str, int | float | str | bool] = {
        "stream": name, "steps_of_16": body, "k_steps": steps, "n": n, "a": a, "warpgroups": groups,
    }  # fmt: skip
    return Case(
        "corun", "inside_warpgroup", params, "overlap.cu", _overlap, wgmma_prelude(n, a) + STREAMS[name].prelude(),
        {"GROUPS": groups, "STEPS": steps, "BODIES": body}, HOPPER,
        quick=n == 128 and name == "softmax_online" and body == n // 32, seconds=0.03,
    )  # fmt: skip


def cases() -> list[Case]:
    """Arithmetic beside wgmma of other warpgroups, alone, and inside the warpgroup that issued the wgmma."""
    found = []
    for name in ARITHMETIC:
        quick = name in _QUICK
        found += [corun_case("corun", name, 0, streams, 128, "smem", quick=quick) for streams in (1, 2)]
        for n in (64, 128, 256):
            for a in ("smem", "register"):
                for mma, streams in ((1, 1), (2, 1), (1, 2)):
                    found.append(corun_case("corun", name, mma, streams, n, a, quick=quick and n == 128))
    return found + _overlap_cases()
