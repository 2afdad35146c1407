"""Bursts of FMA beside matrix products on one SM: what the products lose, by how many come at once and what they read.

    python tools/fma_bursts.py OUT.csv

`tilecast calibrate`'s corun/beside_mma has streams that never end; kernels rescale O in one piece and then do other things.
One warpgroup multiplies e4m3 back to back (m64 x n), another does a burst and then waits some 1,500 cycles, looking at
the clock; a burst of 0 is the wait alone.  Half a minute on a Hopper GPU.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace

from measuring import csv_table
from own_kernels import clock_mhz, machine_codes

from tilecast.validation.lab.calibrate.cases import CalibrateError, Case
from tilecast.validation.lab.calibrate.gpu import Gpu
from tilecast.validation.lab.calibrate.groups.corun import corun_case
from tilecast.validation.lab.calibrate.preludes import wgmma_prelude

SHAPES = ((128, "register"), (128, "smem"), (256, "register"), (256, "smem"))
BURSTS = (16, 64, 128, 256)
#: Instruction -> its text on x[i]: with two shared registers, with one shared and one of its own (O times a factor plus P V), and
#: with two operands.
STREAMS = {
    "ffma_3src": 'asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x[i]) : "f"(k), "f"(m));',
    "ffma_own": 'asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x[i]) : "f"(k), "f"(__uint_as_float(w[16 + (i)])));',
    "fmul": 'asm volatile("mul.rn.f32 %0, %0, %1;" : "+f"(x[i]) : "f"(k));',
    "fadd": 'asm volatile("add.rn.f32 %0, %0, %1;" : "+f"(x[i]) : "f"(k));',
}
FIELDS = ("gpu", "date", "driver", "clock_mhz", "kind", "burst", "mma_warpgroups", "n", "a", "quantity", "value")
#: Cycles of the wait, by the clock.
_PAUSE = 1500
_WAIT = f"spin({_PAUSE});"


def case_of(name: str, burst: int, mma: int, n: int, home: str) -> Case:
    """``mma`` warpgroups that multiply beside one that does bursts of ``burst`` (a multiple of 16)."""
    case = corun_case("corun", "ffma_3src", mma, 1, n, home)
    step = STREAMS[name] if burst else ""
    body = f"{{ {step} if ((i) == 15 && v == UNROLL - 1) {{ {_WAIT} }} }}"
    prelude = wgmma_prelude(n, home, "fp8") + f"#define BODY(i) {body}\n"
    defines = {**case.defines, "UNROLL": max(1, burst // 16)}
    params = {"stream": "ffma_3src", "kind": name, "burst": burst, "mma_warpgroups": mma, "n": n, "a": home}
    return replace(case, prelude=prelude, defines=defines, params=params)


def cases() -> list[Case]:
    """Every kind and length of burst beside every shape of product, and alone."""
    found = []
    for n, home in SHAPES:
        found.append(case_of("ffma_3src", 0, 1, n, home))
        found += [case_of(name, burst, 1, n, home) for name in STREAMS for burst in BURSTS]
    return found + [case_of(name, burst, 0, 128, "smem") for name in STREAMS for burst in (0, *BURSTS)]


def main() -> None:
    gpu = Gpu()
    todo = cases()
    codes = machine_codes([case.text() for case in todo])
    with csv_table(sys.argv[1], FIELDS) as add:
        for case, code in zip(todo, codes, strict=True):
            gpu.kernel(case, code)
            params = {name: value for name, value in case.params.items() if name in FIELDS}
            try:
                readings = case.measure(gpu, case)
            except CalibrateError as error:
                print(error, flush=True)
                continue
            steps = max(1, int(str(case.params["burst"])) // 16) * 16
            for quantity, reading in readings.items():
                value = statistics.median(reading.samples)
                if quantity == "cycles_per_step":
                    quantity, value = "cycles_per_round", value * steps
                add({"clock_mhz": clock_mhz(gpu), **params, "quantity": quantity, "value": f"{value:.4f}"})


if __name__ == "__main__":
    main()
