"""How long a forecast takes on this machine: warm, cold from a shell, a thousand shapes, and a million keys.

python tools/benchmark_speed.py
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time

from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine


def seconds(call) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    """Print one line a figure, with the target beside it."""
    b200 = load_machine("b200")
    predict(Workload(seqlen_q=4096, seqlen_k=4096, mask="causal"), b200)
    warm = [
        seconds(lambda n=n: predict(Workload(seqlen_q=n, seqlen_k=n, mask="causal"), b200))
        for n in range(4224, 8192, 256)
    ]
    print(f"one warm prediction, new length    {statistics.median(warm) * 1e3:8.1f} ms   (target 50)")
    for length in (8192 + 256, 1 << 20):
        took = seconds(lambda n=length: predict(Workload(seqlen_q=n, seqlen_k=n, mask="causal"), b200))
        print(f"  of them seqlen {length:<8}             {took * 1e3:8.1f} ms")
    command = [sys.executable, "-m", "tilecast.cli", "predict", "--machine", "b200", "--seqlen", "8192", "--causal"]
    cold = [seconds(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)) for _ in range(5)]
    print(f"tilecast predict from a cold shell {statistics.median(cold):8.2f} s    (target 1.0)")
    draw = random.Random(1)

    def many() -> None:
        for _ in range(1000):
            d = draw.choice((64, 128, 192, 256))
            s = draw.choice((512, 1024, 2048, 4096, 8192, 16384, 32768))
            work = Workload(
                draw.choice((1, 2, 4, 8)), 16, 16, s, s, d, 128 if d == 192 else d, draw.choice(("none", "causal")), None,
                draw.choice(("bf16", "fp8")),
            )  # fmt: skip
            predict(work, draw.choice(("b200", "b300", "gb200", "gb300", "h200-sxm")))

    print(f"1,000 shapes, best variant of each {seconds(many):8.1f} s    (target 60)")


if __name__ == "__main__":
    main()
