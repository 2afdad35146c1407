"""Board power, energy and executed clock under loads that are not attention.

The NVML clock is a set point; what an SM executes is its cycle counter over the global timer, read by the load itself.
Power comes from NVML's energy counter between two of its ticks; idle power is a row of its own and nothing is taken off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tilecast.validation.lab.calibrate.cases import CalibrateError, Case, Reading
from tilecast.validation.lab.calibrate.gpu import Gpu, Launch
from tilecast.validation.lab.calibrate.groups.corun import FILL_BYTES, FILL_FLIGHT
from tilecast.validation.lab.calibrate.preludes import LIVE_STREAMS, wgmma_prelude

#: Length of a load, and what is left out at its start while power and clock settle.
SECONDS, SETTLE_SECONDS = 2.4, 1.0
#: The same for loads that stay far below the power limit: their clock does not move.
_CALM_SECONDS, _CALM_SETTLE_SECONDS = 1.6, 0.5
_KERNEL_MS = 40.0
#: Bytes that the memory loads read; random, because zeros take a third less power.
_MEMORY_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class _Load:
    """How to launch a load and what one round of one CTA does."""

    block: int
    smem: int
    #: Operations of a round of one CTA, in ``unit``.
    per_round: float
    unit: str
    offset: int = 0
    size: int = 0


def power_between_ticks(samples: Sequence[tuple[float, float]]) -> float:
    """Watt from samples (seconds, joule) of a counter that moves in steps, between its first and last step.

    CalibrateError when it stepped less than twice.
    """
    steps = [b for a, b in pairwise(samples) if b[1] != a[1]]
    if len(steps) < 2:
        raise CalibrateError("NVML's energy counter did not move during the load")
    return (steps[-1][1] - steps[0][1]) / (steps[-1][0] - steps[0][0])


def _telemetry() -> Any:
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
    except Exception as error:
        raise CalibrateError(f"the power group needs NVML ({error}): pip install nvidia-ml-py") from None


def _run(gpu: Gpu, case: Case, load: _Load) -> Mapping[str, Reading]:
    """A kernel of one kind of work, as many rounds as take about 40 ms, for SECONDS."""
    grid = _grid(gpu, case)
    idle = case.source == "idle.cu"
    launch = Launch(grid, load.block, load.smem, load.size, 2000, offset=load.offset)
    if case.source == "memory_bandwidth.cu":
        gpu.randomize(load.offset, _MEMORY_BYTES)
    if idle:
        launch = Launch(grid, load.block, 0, int(_KERNEL_MS * 1e6), 1)
    else:
        gpu.records(case, launch)
        found, _ = gpu.records(case, launch)
        took_ms = float(np.median(found[:, 0, 3] - found[:, 0, 2])) * 1e-6
        if took_ms <= 0:  # kernels that note no time: their cycles at the top clock
            took_ms = float(np.median(found[:, 0, 1] - found[:, 0, 0])) / gpu.identity.clock_mhz * 1e-3
        rounds = max(1, int(2000 * _KERNEL_MS / took_ms))
        launch = Launch(grid, load.block, load.smem, load.size, rounds, offset=load.offset)
    work = launch.rounds * load.per_round * grid
    named = {"work_per_second": (work, load.unit)} if load.per_round else {}
    return _observe(gpu, case, launch, lambda: named, SECONDS, SETTLE_SECONDS)


def _run_mix(gpu: Gpu, case: Case, per_round: Mapping[str, tuple[float, str]]) -> Mapping[str, Reading]:
    """power_mix.cu for SECONDS; ``per_round`` names what a round of each side of a CTA does: "work", then "fill"."""
    mma, streams, fill = (int(str(case.defines[key])) for key in ("MMA_GROUPS", "STREAM_GROUPS", "FILL"))
    grid, block = _grid(gpu, case), 128 * (mma + streams) + (32 if fill else 0)
    smem = (131072 if mma else 0) + 32768 + fill * FILL_BYTES
    if fill:
        gpu.randomize(1 << 20, grid << 17)
    launch = Launch(grid, block, smem, int(_KERNEL_MS * 1e3 * gpu.identity.clock_mhz), 1)
    sides = {"work": slice(0, 4 * (mma + streams), 4), "fill": slice(4 * (mma + streams), None)}

    def done() -> dict[str, tuple[float, str]]:
        rounds = gpu.last_records(launch)[:, :, 5].sum(axis=0)
        return {
            f"{side}_per_second": (float(rounds[sides[side]].sum()) * amount, unit)
            for side, (amount, unit) in per_round.items()
        }

    calm = not mma
    return _observe(
        gpu, case, launch, done, _CALM_SECONDS if calm else SECONDS, _CALM_SETTLE_SECONDS if calm else SETTLE_SECONDS
    )


def _grid(gpu: Gpu, case: Case) -> int:
    return min(int(str(case.params["active_sms"])) or gpu.identity.sm_count, gpu.identity.sm_count)


def _observe(
    gpu: Gpu, case: Case, launch: Launch, done: Callable[[], Mapping[str, tuple[float, str]]], seconds: float,
    settle: float,
) -> Mapping[str, Reading]:  # fmt: skip
    """Back-to-back launches for ``seconds``; what comes after ``settle`` counts.

    ``done`` gives what the last launch did, by the name of its rate, with its unit.
    """
    nvml, device = _telemetry()
    samples: list[tuple[float, float]] = []
    rows: list[tuple[float, float, int, float, float]] = []
    spent, work = 0.0, dict[str, float]()
    units: dict[str, str] = {}
    begin = time.perf_counter()
    while (now := time.perf_counter() - begin) < seconds:
        gpu.start(gpu.kernel(case), launch)
        while (at := time.perf_counter() - begin) < now + _KERNEL_MS * 0.7e-3:
            samples.append((at, nvml.nvmlDeviceGetTotalEnergyConsumption(device) * 1e-3))
            time.sleep(0.001)
        clock = float(nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM))
        power = nvml.nvmlDeviceGetPowerUsage(device) * 1e-3
        reasons = int(nvml.nvmlDeviceGetCurrentClocksEventReasons(device))
        celsius = float(nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU))
        gpu.wait()
        cycles, nanoseconds = gpu.last_span()
        did = done()
        if now > settle:
            rows.append((clock, power, reasons, cycles / nanoseconds * 1e3 if nanoseconds else 0.0, celsius))
            spent += time.perf_counter() - begin - now
            for name, (amount, unit) in did.items():
                work[name], units[name] = work.get(name, 0.0) + amount, unit
    watt = power_between_ticks([s for s in samples if s[0] > settle])
    clocks, powers, reasons_, effective, celsius_ = zip(*rows, strict=True)
    readings = {
        "power_w": Reading((watt,), "W"),
        "sampled_power_w": Reading(tuple(powers), "W"),
        "nvml_clock_mhz": Reading(tuple(clocks), "MHz"),
        "throttle_reasons": Reading((float(np.bitwise_or.reduce(np.array(reasons_))),), "mask"),
        "temperature_c": Reading(tuple(celsius_), "degC"),
    }
    if any(effective):
        readings["effective_clock_mhz"] = Reading(tuple(x for x in effective if x), "MHz")
    # All work over all time: gaps between launches lower power and work alike.
    for name, amount in work.items():
        readings[name] = Reading((amount / spent,), f"{units[name]}/s")
    return readings


def _burst(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    """Executed clock of launches of about 5 ms in the first tenth of a second after a second of rest."""
    launch = Launch(gpu.identity.sm_count, 256, 131072, 0, 500)
    found, _ = gpu.records(case, launch)
    rounds = int(500 * 5e6 / float(np.median(found[:, 0, 3] - found[:, 0, 2])))
    launch = Launch(gpu.identity.sm_count, 256, 131072, 0, rounds)
    windows: dict[str, list[float]] = {"first_10ms_mhz": [], "10_to_50ms_mhz": [], "50_to_100ms_mhz": []}
    for _ in range(3):
        time.sleep(1.0)
        begin = time.perf_counter()
        while (at := time.perf_counter() - begin) < 0.1:
            gpu.start(gpu.kernel(case), launch)
            gpu.wait()
            cycles, nanoseconds = gpu.last_span()
            name = "first_10ms_mhz" if at < 0.01 else "10_to_50ms_mhz" if at < 0.05 else "50_to_100ms_mhz"
            windows[name].append(cycles / nanoseconds * 1e3)
    return {name: Reading(tuple(values), "MHz") for name, values in windows.items()}


def _stream(name: str, groups: int = 4, quick: bool = False) -> Case:
    stream = LIVE_STREAMS[name]
    # A round is 16 steps of a warpgroup; shared memory counts in bytes.
    each = 16 * 4 * (float(stream.smem_bytes) or 32.0 * stream.per_step)
    unit = "B" if stream.smem_bytes else "op"
    defines = {"MMA_GROUPS": 0, "STREAM_GROUPS": groups, "FILL": 0}
    return Case(
        "power", "load", {"load": name, "active_sms": 0}, "power_mix.cu",
        lambda gpu, case: _run_mix(gpu, case, {"work": (each, unit)}), stream.prelude(), defines, quick=quick,
        seconds=_CALM_SECONDS + 0.3,
    )  # fmt: skip


def _fill(beside: int = 0, sms: int = 0, quick: bool = False) -> Case:
    """Bulk copies from L2, alone or with ``beside`` (N) beside wgmma of two warpgroups."""
    fill = {"fill": (float(FILL_BYTES), "B")}
    defines = {"MMA_GROUPS": 2 if beside else 0, "STREAM_GROUPS": 0, "FILL": FILL_FLIGHT, "FILL_BYTES": FILL_BYTES}
    if not beside:
        return Case(
            "power", "load", {"load": "l2 fill", "active_sms": sms}, "power_mix.cu",
            lambda gpu, case: _run_mix(gpu, case, fill), "", defines, (90, 100, 103, 120), quick,
            seconds=_CALM_SECONDS + 0.3,
        )  # fmt: skip
    both = {"work": (2.0 * 64 * beside * 16 * 8, "FLOP"), **fill}
    return Case(
        "power", "load", {"load": f"wgmma bf16 n{beside} A in smem + l2 fill", "active_sms": sms}, "power_mix.cu",
        lambda gpu, case: _run_mix(gpu, case, both), wgmma_prelude(beside, "smem"), defines, (90,), quick,
        seconds=SECONDS + 0.3,
    )  # fmt: skip


def _wgmma(n: int, a: str, dtype: str = "bf16", zeros: bool = False, sms: int = 0, quick: bool = False) -> Case:
    k = 32 if dtype == "fp8" else 16
    groups = 2
    load = _Load(128 * groups, 131072, 2.0 * 64 * n * k * 8 * groups, "FLOP")
    name = f"wgmma {dtype} n{n} A in {a}{' zeros' if zeros else ''}"
    return Case(
        "power", "load", {"load": name, "active_sms": sms}, "wgmma_rate.cu", lambda gpu, case: _run(gpu, case, load),
        wgmma_prelude(n, a, dtype, zeros=zeros), {"GROUPS": groups, "STEPS": 8}, (90,), quick, seconds=SECONDS + 0.3,
    )  # fmt: skip


def _tcgen05(n: int, a: str, sms: int = 0, quick: bool = False) -> Case:
    depth = 16
    load = _Load(128, 131072, 2.0 * 128 * n * 16 * depth, "FLOP")
    return Case(
        "power", "load", {"load": f"tcgen05 bf16 n{n} A in {a}", "active_sms": sms}, "tcgen05.cu",
        lambda gpu, case: _run(gpu, case, load), "",
        {"CTAS": 1, "A_TMEM": int(a == "tmem"), "M": 128, "N": n, "DEPTH": depth}, (100, 103), quick, seconds=SECONDS + 0.3,
    )  # fmt: skip


def _mma_sync(sms: int = 0, quick: bool = False) -> Case:
    warps, chains, unroll = 16, 8, 2
    load = _Load(32 * warps, 0, 2.0 * 16 * 8 * 16 * chains * unroll * warps, "FLOP")
    return Case(
        "power", "load", {"load": "mma.sync bf16", "active_sms": sms}, "mma_sync.cu",
        lambda gpu, case: _run(gpu, case, load), "",
        {"THREADS": 32 * warps, "CHAINS": chains, "UNROLL": unroll}, (80, 86, 89, 120), quick, seconds=SECONDS + 0.3,
    )  # fmt: skip


def _memory(name: str, region: int, copy: bool, quick: bool = False) -> Case:
    unroll, chunk = 4, 16384
    load = _Load(1024, 0, unroll * chunk * (2.0 if copy else 1.0), "B", 64 << 20, _MEMORY_BYTES if copy else 0)
    defines: dict[str, int | str] = {
        "PRIVATE": 1,
        "REGION": f"{region}ll",
        "UNROLL": unroll,
        "COPY": int(copy),
        "STRIDE": 0,
    }
    return Case(
        "power", "load", {"load": name, "active_sms": 0}, "memory_bandwidth.cu",
        lambda gpu, case: _run(gpu, case, load), "", defines, quick=quick, seconds=SECONDS + 0.3,
    )  # fmt: skip


def cases() -> list[Case]:
    """Idle, streams of live data, L2, memory, and matrix work by shape, data, active SMs and beside copies from L2."""
    found = [
        Case("power", "load", {"load": "idle", "active_sms": 0}, "idle.cu",
             lambda gpu, case: _run(gpu, case, _Load(32, 0, 0.0, "op")), quick=True, seconds=SECONDS)
    ]  # fmt: skip
    found += [
        _stream(name, 1 if name == "chaos, one chain" else 4, name in ("chaos", "chaos+fold", "chaos+ex2+fold"))
        for name in LIVE_STREAMS
    ]
    found += [
        _fill(quick=True),
        _memory("l2 read", 131072, False),
        _memory("hbm read", 12 << 20, False),
        _memory("hbm copy", 12 << 20, True),
    ]
    found += [_wgmma(256, "smem", quick=True), _wgmma(128, "smem"), _wgmma(64, "smem"), _wgmma(128, "register")]
    found += [_wgmma(128, "smem", "fp8"), _wgmma(256, "smem", "fp8"), _wgmma(256, "smem", zeros=True)]
    found.append(
        Case("power", "burst", {"load": "wgmma bf16 n256 A in smem"}, "wgmma_rate.cu", _burst,
             wgmma_prelude(256, "smem"), {"GROUPS": 2, "STEPS": 8}, (90,), seconds=3.5)
    )  # fmt: skip
    found += [_tcgen05(256, "smem", quick=True), _tcgen05(128, "smem"), _tcgen05(256, "tmem"), _mma_sync(quick=True)]
    # Fewer SMs leave the power limit room: the same work at a higher clock.
    for sms in (110, 90, 66):
        found += [_wgmma(256, "smem", sms=sms), _tcgen05(256, "smem", sms=sms), _mma_sync(sms=sms)]
    # Copies beside wgmma take the limit's clock down to where attention runs.
    found += [_fill(256, sms, quick=not sms) for sms in (0, 110, 90, 66)]
    return found
