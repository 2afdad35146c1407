"""How much the data costs: shipped Hopper kernels on inputs whose scores are anything but even, on the GPU at hand.

    python tools/h200_inputs.py BEFORE AFTER OUT.csv [WORD...]

BEFORE and AFTER are folders of kernels; every ``hopper_ws_*.py`` of both (or those whose name has a WORD) runs in bf16 and
fp16 on each of INPUTS, the two in turns, L2 evicted before each launch; medians, SM clock sampled by NVML.  ``slower`` is
AFTER's time over its own on even scores.  Outputs are compared with float64 on some rows of every head of the first batch, and the
largest error of AFTER stands beside that of attention in PyTorch operations.  A line a result, flushed as it comes.
"""

from __future__ import annotations

import concurrent.futures
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from h200_before_after import header_of, load
from measuring import csv_table, evicting, in_turns

from tilecast.validation.lab.measure.telemetry import Nvml

ROUNDS, COMPILERS, PROBED_ROWS = 9, 12, 32
TOKENS, HIDDEN, LENGTH = 16384, 2048, 4096
#: Name -> (what, nats or factor, where): made by `inputs`.
INPUTS = {
    "even": ("scaled", 1.0, ""), "sink 5, first": ("sink", 5.0, "first"), "sink 15, first": ("sink", 15.0, "first"),
    "sink 30, middle": ("sink", 30.0, "middle"), "sink 50, last": ("sink", 50.0, "last"),
    "sink 80, first": ("sink", 80.0, "first"), "q, k x 2": ("scaled", 2.0, ""), "q, k x 4": ("scaled", 4.0, ""),
    "q, k x 8": ("scaled", 8.0, ""), "rising 100": ("ramp", 100.0, "last"), "falling 100": ("ramp", 100.0, "first"),
    "hot rows x 30, 1 of 16": ("rows", 30.0, "16"),
}  # fmt: skip
FIELDS = ("gpu", "date", "driver", "torch", "triton", "kernel", "dtype", "shape", "input", "before_ms", "after_ms",
          "speedup", "slower", "error", "error_pytorch", "step", "sm_clock_mhz", "rounds")  # fmt: skip


def inputs(work: dict[str, Any], dtype: Any, kind: tuple[str, float, str]) -> tuple[Any, Any, Any]:
    """q, k, v of a header's dimensions at 16k tokens; a sink or a ramp is a column that all queries share."""
    import torch

    what, amount, where = kind
    dim, heads = work["head_dim_qk"], max(HIDDEN // work["head_dim_qk"], 1)
    batch, length = TOKENS // LENGTH, LENGTH
    if work["seqlen_q"] < 2048:
        batch, length = TOKENS // 2048, 2048
    generator = torch.Generator("cuda").manual_seed(1)

    def draw(width: int) -> Any:
        return torch.randn((batch, heads, length, width), generator=generator, device="cuda")

    q, k, v = draw(dim), draw(dim), draw(work["head_dim_v"])
    if what == "scaled":
        q, k = q * amount, k * amount
    elif what == "rows":
        q[:, :, :: int(where)] *= amount
    else:
        q[..., 0] = 8.0
        column = torch.zeros(length, device="cuda")
        if what == "sink":
            column[{"first": 0, "middle": length // 2, "last": -1}[where]] = amount
        else:
            column = torch.linspace(0, amount, length, device="cuda")
            column = column if where == "last" else column.flip(0)
        k[..., 0] = column * math.sqrt(dim) / 8.0
    return q.to(dtype), k.to(dtype), v.to(dtype)


def errors(q: Any, k: Any, v: Any, out: Any, work: dict[str, Any]) -> tuple[float, float, float]:
    """Largest error of ``out`` and of PyTorch operations against float64 on some rows, and a step of the type there."""
    import torch

    length = q.shape[2]
    rows = torch.linspace(0, length - 1, PROBED_ROWS, device="cuda").long()
    left, right = work["window"] or ((-1, 0) if work["mask"] == "causal" else (-1, -1))
    keys = torch.arange(length, device="cuda")
    hidden = torch.zeros((PROBED_ROWS, length), dtype=torch.bool, device="cuda")
    if right >= 0:
        hidden |= keys > rows[:, None] + right
    if left >= 0:
        hidden |= keys < rows[:, None] - left

    def attend(*tensors: Any) -> Any:
        a, b, c = (x[0] for x in tensors)
        scores = (a[:, rows] @ b.transpose(-1, -2)) * work["head_dim_qk"] ** -0.5
        return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ c

    exact = attend(q.double(), k.double(), v.double())
    wrong = (out[0][:, rows].double() - exact).abs().nan_to_num(math.inf).max().item()
    theirs = (attend(q, k, v).double() - exact).abs().max().item()
    largest = exact.abs().max().item()
    return wrong, theirs, torch.finfo(out.dtype).eps * 2.0 ** math.floor(math.log2(largest))


def measured(before: Any, after: Any, work: dict[str, Any], dtype: Any, name: str, nvml: Nvml) -> dict[str, Any]:
    """One result, without what relates it to others."""
    import torch

    q, k, v = inputs(work, dtype, INPUTS[name])
    shape = (*q.shape[:3], v.shape[3])
    window = work["window"] or ()
    launches, outs = [], []
    for module in (before, after):
        out = torch.full(shape, math.nan, device="cuda", dtype=dtype)
        lse = torch.empty(shape[:3], device="cuda")
        launches.append(lambda m=module, o=out, e=lse: m.launch(q, k, v, o, e, work["head_dim_qk"] ** -0.5, *window))
        outs.append(out)
    with nvml.watch() as seen:
        old, new = map(statistics.median, in_turns(launches, ROUNDS, evicting(), back=True))
    wrong, theirs, step = errors(q, k, v, outs[1], work)
    return {"shape": "x".join(map(str, q.shape)), "input": name, "before_ms": old, "after_ms": new, "speedup": old / new,
            "error": wrong, "error_pytorch": theirs, "step": step, "sm_clock_mhz": seen.result().sm_mhz, "rounds": ROUNDS}  # fmt: skip


def warm(path: Path) -> None:
    """Compile a kernel for both types into Triton's cache."""
    import torch

    module, work = load(path, "warm"), header_of(path)["workload"]
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = (x[:1, :1] for x in inputs(work, dtype, INPUTS["even"]))
        out, lse = torch.empty_like(v), torch.empty(q.shape[:3], device="cuda")
        module.launch(q, k, v, out, lse, 1.0, *(work["window"] or ()))
    torch.cuda.synchronize()


def main(before: Path, after: Path, out: str, words: list[str]) -> int:
    """Measure; 1 when an error is above twice PyTorch's and above a step."""
    import torch

    names = sorted(p.name for p in after.glob("hopper_ws_*.py") if (before / p.name).is_file())
    names = [n for n in names if not words or any(word in n for word in words)]
    with concurrent.futures.ThreadPoolExecutor(COMPILERS) as pool:
        command = [sys.executable, "-W", "ignore", __file__, "--warm"]
        paths = [folder / name for name in names for folder in (before, after)]
        list(pool.map(lambda path: subprocess.run([*command, str(path)], check=True, timeout=200), paths))
    nvml = Nvml()
    bad = 0
    slower: list[tuple[float, str]] = []
    even: list[tuple[float, str]] = []
    with csv_table(out, FIELDS) as add:
        for name in names:
            old, new = load(before / name, "before"), load(after / name, "after")
            work = header_of(after / name)["workload"]
            for dtype in (torch.bfloat16, torch.float16):
                base = math.nan
                for kind in INPUTS:
                    row = measured(old, new, work, dtype, kind, nvml)
                    base = row["after_ms"] if kind == "even" else base
                    label = f"{name.removesuffix('.py')} {str(dtype).removeprefix('torch.')} {kind}"
                    row |= {"kernel": name.removesuffix(".py"), "dtype": str(dtype).removeprefix("torch."),
                            "slower": row["after_ms"] / base}  # fmt: skip
                    wrong = row["error"] > max(2 * row["error_pytorch"], row["step"])
                    bad += wrong
                    (even if kind == "even" else slower).append(
                        (row["speedup"] if kind == "even" else row["slower"], label)
                    )
                    add({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})
                    print(f"{label:58}{row['before_ms']:8.3f} -> {row['after_ms']:7.3f} ms x{row['speedup']:.3f}  of even {row['slower']:.3f}"
                          f"  error {row['error']:.2e} ({row['error_pytorch']:.2e}){' ABOVE' * wrong}", flush=True)  # fmt: skip
    mean = math.exp(statistics.fmean(math.log(x) for x, _ in even))
    print(f"even scores, speedup: geometric mean {mean:.4f}, lowest {min(even)}")
    print(
        f"other inputs over even: highest {max(slower)}; above 1.3: {sum(x > 1.3 for x, _ in slower)} of {len(slower)}"
    )
    print(f"errors above max(2 x PyTorch's, a step): {bad}")
    return 1 if bad else 0


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == ["--warm"]:
        warm(Path(arguments[1]))
    elif len(arguments) >= 3:
        raise SystemExit(main(Path(arguments[0]), Path(arguments[1]), arguments[2], arguments[3:]))
    else:
        raise SystemExit(str(__doc__))
