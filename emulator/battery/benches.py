"""Which battery a generated file gets: by its family and type."""

from __future__ import annotations

from collections.abc import Callable

from tilecast.emulator.battery.backward import BackwardBench
from tilecast.emulator.battery.bench import Bench
from tilecast.emulator.battery.eight_bits import NarrowBench
from tilecast.emulator.battery.gemm import GemmBench
from tilecast.emulator.battery.launches import AnyBench
from tilecast.emulator.battery.serving import ServingBench
from tilecast.emulator.source import Source
from tilecast.model.machine.machine import Machine

_Make = Callable[[Source, str | Machine | None], AnyBench]
_OF: dict[str, _Make] = {
    "hopper_serving": ServingBench, "hopper_serving_e4m3": ServingBench, "hopper_serving_runs": ServingBench, "hopper_serving_runs_e4m3": ServingBench, "hopper_prefill": ServingBench, "hopper_mla": ServingBench, "blackwell_serving": ServingBench,
    "hopper_bwd": BackwardBench, "hopper_bwd_apart": BackwardBench, "gemm_hopper": GemmBench, "gemm_blackwell": GemmBench,
}  # fmt: skip


def bench_for(source: Source, machine: str | Machine | None) -> AnyBench:
    """The bench of a file; UnsupportedError where its family does not run here."""
    header = source.header()
    narrow = header.get("workload", {}).get("dtype") == "fp8"
    make: _Make = _OF.get(str(header.get("family", "")), NarrowBench if narrow else Bench)
    return make(source, machine)
