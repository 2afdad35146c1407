"""How long ten thousand forecasts take: every item of a sweep through processes and store, and what a commit costs.

python tools/benchmark_sweep.py [--items N] [--workers N] [--intervals]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path

from tilecast.explore.sweep.api import sweep
from tilecast.explore.sweep.run.store import Store

#: Five machines x two masks x three head dims x two dtypes, at every length and batch until there are enough.
MACHINES = ("b200", "b300", "gb200", "gb300", "h200-sxm")


def specification(items: int, intervals: bool) -> dict[str, object]:
    """A sweep of at least ``items`` forecasts, the best variant chosen in each."""
    kinds = len(MACHINES) * 2 * 3 * 2
    lengths = [256 * n for n in range(2, 2 + -(-items // (kinds * 4)))]
    return {
        "machines": list(MACHINES), "interval": intervals,
        "workload": [{"mask": ["none", "causal"], "head_dim": [64, 128, 256], "dtype": ["bf16", "fp8"],
                      "batch": [1, 2, 4, 8], "seqlen": lengths}],
    }  # fmt: skip


def commit_seconds(folder: Path) -> float:
    """Median seconds of one commit of a result of the usual size."""
    result = {"status": "ok", "reason": "", "text": "x" * 1500}
    taken = []
    with Store(folder / "commits.db") as store:
        for n in range(2000):
            began = time.perf_counter()
            store.put(f"{n:064d}", "x" * 430, result, 0.0)
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def main() -> None:
    """Print one line a figure, with the target beside it."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--items", type=int, default=10_000)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument(
        "--intervals", action="store_true", help="with intervals, as the default of a specification is"
    )
    wanted = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"one commit of a result                {commit_seconds(folder) * 1e6:8.0f} us")
        before = os.getloadavg()[0]
        began = time.perf_counter()
        table = sweep(specification(wanted.items, wanted.intervals), store=folder / "s.db", workers=wanted.workers)
        took = time.perf_counter() - began
        used = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        what = f"{len(table)} forecasts, {wanted.workers} workers"
        print(
            f"{what:<38}{took:8.1f} s    (target 300 for 10,000 on 2 cores; load before {before:.1f}, after {os.getloadavg()[0]:.1f})"
        )
        print(f"  processor time of all processes     {used:8.1f} s")
        print(f"  infeasible {table.count('infeasible')}, failed {table.count('failed')}")
        print(f"  store                               {(folder / 's.db').stat().st_size / 1e6:8.1f} MB")
        began = time.perf_counter()
        sweep(specification(wanted.items, wanted.intervals), store=folder / "s.db", workers=wanted.workers)
        print(f"the same again, all from the store    {time.perf_counter() - began:8.1f} s")


if __name__ == "__main__":
    main()
