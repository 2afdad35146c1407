"""Clock, power, temperature and throttle reasons of a GPU while something runs, sampled through NVML.  Reads only."""

from __future__ import annotations

import statistics
import threading
from dataclasses import dataclass
from typing import Any

#: NVML's bit mask of reasons, in words (nvml.h, nvmlClocksEventReason*).
_REASONS = {
    0x1: "idle", 0x2: "application clocks", 0x4: "power cap", 0x8: "hardware slowdown", 0x20: "thermal",
    0x40: "hardware thermal", 0x80: "hardware power brake", 0x100: "display clocks",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Medians over the samples; zeros and "" when nothing was sampled."""

    sm_mhz: float = 0.0
    power_w: float = 0.0
    temperature_c: float = 0.0
    throttle: str = ""
    samples: int = 0


class Nvml:
    """One GPU seen through NVML; ``with nvml.watch() as seen: ...; seen.result()``.

    ``gpu`` is NVML's own index or a UUID ("GPU-..."): NVML does not know CUDA_VISIBLE_DEVICES, so a CUDA index is neither.
    """

    def __init__(self, gpu: int | str = 0) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml: Any = pynvml
        by = pynvml.nvmlDeviceGetHandleByUUID if isinstance(gpu, str) else pynvml.nvmlDeviceGetHandleByIndex
        self._gpu = by(gpu)
        self.driver = str(pynvml.nvmlSystemGetDriverVersion())

    def sample(self) -> tuple[float, float, float, int]:
        """(SM clock in MHz, board power in W, temperature in C, mask of throttle reasons) now."""
        nvml = self._nvml
        return (
            float(nvml.nvmlDeviceGetClockInfo(self._gpu, nvml.NVML_CLOCK_SM)),
            nvml.nvmlDeviceGetPowerUsage(self._gpu) / 1e3,
            float(nvml.nvmlDeviceGetTemperature(self._gpu, nvml.NVML_TEMPERATURE_GPU)),
            int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._gpu)),
        )

    def watch(self, every_s: float = 0.005) -> Watch:
        """A context in which a thread samples every ``every_s`` seconds."""
        return Watch(self, every_s)


class Watch:
    """Samples between entry and exit."""

    def __init__(self, nvml: Nvml, every_s: float) -> None:
        self._nvml, self._every = nvml, every_s
        #: What `Nvml.sample` returned, in order.
        self.samples: list[tuple[float, float, float, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self.samples.append(self._nvml.sample())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def result(self) -> Telemetry:
        """Medians of what was sampled; every throttle reason that was seen at least once in ten samples."""
        return summarise_samples(self.samples)


def summarise_samples(samples: list[tuple[float, float, float, int]]) -> Telemetry:
    """Medians; a reason counts when a tenth of the samples show it."""
    if not samples:
        return Telemetry()
    clock, power, heat = (statistics.median(s[i] for s in samples) for i in range(3))
    often = [text for bit, text in _REASONS.items() if 10 * sum(bool(s[3] & bit) for s in samples) >= len(samples)]
    return Telemetry(clock, power, heat, ", ".join(often), len(samples))
