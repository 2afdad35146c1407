"""Kernels of one folder against their namesakes of another, on the GPU at hand: same values, and how much faster.

    python tools/h200_before_after.py BEFORE AFTER [OUT.csv]

Every ``hopper_ws_*.py`` and ``triton_*.py`` that both folders have runs on the shape of its header and on an odd one
(lengths that divide nothing, two query heads to one of K and V).  Both launches of a shape take turns, each as a CUDA
graph of several launches, L2 evicted in between; medians, SM clock sampled by NVML meanwhile.  The outputs are compared
bit for bit, and where they differ against twice the rounding of the inputs' type.  A kernel that fails costs only itself:
each runs in a process of its own, which compiles while the GPU is busy with another.
"""

from __future__ import annotations

import ast
import concurrent.futures
import csv
import json
import math
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from measuring import evicting, graph_of, in_turns

from tilecast.base.module_file import module_of
from tilecast.validation.lab.measure.telemetry import Nvml

ROUNDS, SECONDS_PER_KERNEL, COMPILERS = 28, 90, 8
FIELDS = ("kernel", "shape", "before_ms", "after_ms", "speedup", "tflops_after", "values", "sm_clock_mhz", "error")


def header_of(path: Path) -> dict[str, Any]:
    """The literal TILECAST of a kernel file, read without importing it."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "TILECAST":
            return dict(ast.literal_eval(node.value))
    raise ValueError(f"{path}: no TILECAST header")


def shapes(work: dict[str, Any]) -> list[dict[str, Any]]:
    """The header's shape, and an odd one of the same kernel."""
    odd = {"batch": 2, "heads_q": 16, "heads_kv": 8, "seqlen_q": 2000 + 37, "seqlen_k": 3000 + 91}
    return [work, {**work, **odd}]


def label(work: dict[str, Any]) -> str:
    """One shape in a word."""
    return f"{work['batch']}x{work['heads_q']}:{work['heads_kv']}x{work['seqlen_q']}/{work['seqlen_k']}"


def flops(work: dict[str, Any]) -> float:
    """4 B H Sq Sk D, of the keys that are seen."""
    rows, keys = work["seqlen_q"], work["seqlen_k"]
    left, right = work["window"] or ((-1, 0) if work["mask"] == "causal" else (-1, -1))
    seen = 0
    for row in range(rows):
        at = row + keys - rows
        first = max(at - left, 0) if left >= 0 else 0
        last = min(at + right, keys - 1) if right >= 0 else keys - 1
        seen += max(last - first + 1, 0)
    return 2.0 * work["batch"] * work["heads_q"] * seen * (work["head_dim_qk"] + work["head_dim_v"])


def load(path: Path, name: str) -> Any:
    """A kernel file as a module."""
    module = module_of(path, name)
    if hasattr(module, "plan"):
        from tilecast.kernels.launching import launcher

        module.launch = launcher(module)  # type: ignore[attr-defined]  # as the operator launches it
    return module


class Problem:
    """Tensors of one shape, and a launch of one module on them."""

    def __init__(self, work: dict[str, Any]) -> None:
        import torch

        torch.manual_seed(0)

        def tensor(heads: int, rows: int, width: int) -> Any:
            return torch.randn((work["batch"], heads, rows, width), device="cuda").to(torch.bfloat16)

        self.work = work
        self.q = tensor(work["heads_q"], work["seqlen_q"], work["head_dim_qk"])
        self.k = tensor(work["heads_kv"], work["seqlen_k"], work["head_dim_qk"])
        self.v = tensor(work["heads_kv"], work["seqlen_k"], work["head_dim_v"])

    def outputs(self) -> tuple[Any, Any]:
        """Room for what a launch writes, filled with NaN."""
        import torch

        work = self.work
        out = torch.full((work["batch"], work["heads_q"], work["seqlen_q"], work["head_dim_v"]), math.nan,
                         device="cuda", dtype=torch.bfloat16)  # fmt: skip
        return out, torch.full(out.shape[:3], math.nan, device="cuda", dtype=torch.float32)

    def launch(self, module: Any, out: Any, lse: Any) -> None:
        """One launch."""
        window = self.work["window"] or ()
        module.launch(self.q, self.k, self.v, out, lse, self.work["head_dim_qk"] ** -0.5, *window)


def compared(before: tuple[Any, Any], after: tuple[Any, Any]) -> str:
    """How two (out, lse) agree, in a word; ValueError where they do not."""
    import torch

    if all(torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0), b.nan_to_num(0)) for a, b in zip(before, after, strict=True)):  # fmt: skip
        return "bitwise"
    out, lse = ((a.double() - b.double()).nan_to_num(0).abs().max().item() for a, b in zip(before, after, strict=True))
    nans = any(not torch.equal(a.isnan(), b.isnan()) for a, b in zip(before, after, strict=True))
    largest = before[0].double().abs().max().item()
    if nans or out > 2 * 2.0**-8 * largest or lse > 1e-3:
        raise ValueError(f"outputs differ by {out:.3g} (largest {largest:.3g}), log-sum-exp by {lse:.3g}, NaN apart: {nans}")  # fmt: skip
    return f"within rounding ({out:.1e})"


def timed(problem: Problem, modules: tuple[Any, Any]) -> tuple[list[float], str, float]:
    """([median ms of a launch before, after], agreement of values, median SM clock in MHz)."""
    import torch

    outputs = []
    for module in modules:
        out, lse = problem.outputs()
        problem.launch(module, out, lse)
        torch.cuda.synchronize()
        outputs.append((out, lse))
    values = compared(*outputs)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    problem.launch(modules[0], *outputs[0])
    end.record()
    torch.cuda.synchronize()
    # About two milliseconds to a graph: launch gaps and the first launch's cold caches do not show.
    launches = max(2, min(40, math.ceil(2.0 / max(begin.elapsed_time(end), 1e-3))))
    graphs = [
        graph_of(partial(problem.launch, module, *own), launches) for module, own in zip(modules, outputs, strict=True)
    ]
    with Nvml().watch() as seen:
        found = in_turns([graph.replay for graph in graphs], ROUNDS, evicting(), filler=200_000, back=True)
    return [statistics.median(ms) / launches for ms in found], values, seen.result().sm_mhz


def measure(before: Path, after: Path) -> None:
    """Print a JSON line for each shape of one kernel."""
    modules = (load(before, "before"), load(after, "after"))
    for work in shapes(header_of(before)["workload"]):
        row: dict[str, Any] = {"kernel": after.stem, "shape": label(work), "error": ""}
        try:
            (old, new), values, clock = timed(Problem(work), modules)
            row |= {"before_ms": old, "after_ms": new, "speedup": old / new, "values": values, "sm_clock_mhz": clock,
                    "tflops_after": flops(work) / new / 1e9}  # fmt: skip
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        print(json.dumps(row), flush=True)


def warm(before: Path, after: Path) -> None:
    """Compile both into Triton's cache, by a launch on each shape."""
    for path in (before, after):
        module = load(path, "warm")
        for work in shapes(header_of(path)["workload"]):
            problem = Problem({**work, "batch": 1})
            problem.launch(module, *problem.outputs())


def child(word: str, before: Path, after: Path) -> tuple[str, str]:
    """(standard output, what went wrong) of this file run on one kernel."""
    command = [sys.executable, "-W", "ignore", __file__, word, str(before), str(after)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_PER_KERNEL, check=False)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {SECONDS_PER_KERNEL} s"
    last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
    return done.stdout, "" if done.returncode == 0 else (last or [f"exit status {done.returncode}"])[0]


def main(before: Path, after: Path, out: str | None) -> int:
    """Measure all pairs; 1 when one failed."""
    names = sorted(p.name for pattern in ("hopper_ws_*.py", "triton_*.py") for p in after.glob(pattern) if (before / p.name).is_file())  # fmt: skip
    # The same text needs no measurement.
    changed = [n for n in names if (before / n).read_text(encoding="utf-8") != (after / n).read_text(encoding="utf-8")]
    print(f"{len(names)} kernels in both, {len(changed)} of them changed")
    with concurrent.futures.ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(lambda name: child("--warm", before / name, after / name), changed))
    rows: list[dict[str, Any]] = []
    for name in changed:
        text, error = child("--measure", before / name, after / name)
        found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        if error or not found:
            found.append({"kernel": name.removesuffix(".py"), "shape": "-", "error": error or "no result"})
        for row in found:
            if row["error"]:
                print(f"{row['kernel']:32}{row['shape']:24}FAILED: {row['error']}", flush=True)
            else:
                print(f"{row['kernel']:32}{row['shape']:24}{row['before_ms']:9.4f} -> {row['after_ms']:9.4f} ms  x{row['speedup']:.4f}  "
                      f"{row['tflops_after']:6.0f} TFLOP/s  {row['sm_clock_mhz']:.0f} MHz  {row['values']}", flush=True)  # fmt: skip
        rows += found
    if out:
        with open(out, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n", restval="")
            writer.writeheader()
            writer.writerows(rows)
    good = sorted((row["speedup"], row["kernel"], row["shape"]) for row in rows if not row["error"])
    if good:
        mean = math.exp(statistics.fmean(math.log(speedup) for speedup, _, _ in good))
        print(
            f"speedup: geometric mean {mean:.4f}, lowest {good[0][0]:.4f} ({good[0][1]} {good[0][2]}), {len(good)} shapes"
        )
    failed = sum(bool(row["error"]) for row in rows)
    print(f"failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == ["--measure"]:
        measure(Path(arguments[1]), Path(arguments[2]))
    elif arguments[:1] == ["--warm"]:
        warm(Path(arguments[1]), Path(arguments[2]))
    elif len(arguments) in (2, 3):
        raise SystemExit(main(Path(arguments[0]), Path(arguments[1]), arguments[2] if arguments[2:] else None))
    else:
        raise SystemExit(str(__doc__))
