"""`tilecast.addmm` on the GPU at hand beside torch.addmm, torch.compile and quack, and the second accumulator by that one knob.

    python tools/h200_gemm.py OUT.csv [--rounds 15] [--compile] [--only 0,7]

30 products plus C: k from 64 to 1024, m and n from 2048 to 16384, in and out of place, bf16 and fp32 C; then k from 2048 to
8192; then pairs of kernels that differ in `accumulators` alone, at every k.  Each call is a CUDA graph, L2 evicted before it,
the subjects in turns, launch by launch; the table has medians and the range.  Every subject's result is held against
float64 on some rows before it is timed, and one that is wrong is not timed.  --compile adds torch.compile with max-autotune, which
takes minutes; quack is timed where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from measuring import FILLER_CYCLES, Call, csv_table, evicting, graph_of, nvidia_smi

from tilecast.base.module_file import module_of
from tilecast.codegen.gemm.generate import generate_gemm
from tilecast.model.gemm.families import writable
from tilecast.model.gemm.variant import GemmVariant, gemm_variant_text
from tilecast.model.gemm.workload import Gemm
from tilecast.model.machine.machine import load_machine

#: (m, n, k, dtype of C, whether D is written over C).
SMALL_K = (
    *((8192, 8192, k, "bf16", place) for k in (64, 128, 256, 512, 1024) for place in (False, True)),
    *((4096, 4096, k, "bf16", False) for k in (64, 128, 256, 512, 1024)),
    *((16384, 2048, k, "bf16", True) for k in (64, 256, 1024)),
    *((2048, 16384, k, "bf16", False) for k in (128, 512)),
    *((16384, 16384, k, "bf16", True) for k in (64, 256, 512)),
    *((2048, 2048, k, "bf16", False) for k in (256, 1024)),
    *((8192, 4096, k, "fp32", True) for k in (64, 128, 256, 512, 1024)),
)
LARGE_K = tuple((8192, 8192, k, "bf16", True) for k in (2048, 4096, 8192))
#: Kernels of which one has two accumulators and one the same with one.
KNOB = (GemmVariant(stages=5, c_stages=4, c_parts=2), GemmVariant(stages=6, c_stages=4, c_parts=4))
KNOB_KS = (64, 128, 256, 512, 1024, 2048, 4096)
FIELDS = ("gpu", "date", "driver", "torch", "triton", "m", "n", "k", "c_dtype", "in_place", "subject", "variant", "us", "low_us",
          "high_us", "tflops", "gbps", "against_torch", "largest_error", "sm_clock_mhz", "effective_mhz")  # fmt: skip


def tensors(shape: tuple[int, int, int, str, bool]) -> tuple[Any, ...]:
    """a, b, c and d (c itself in place) of a shape; b by columns, as the weight of a linear layer lies."""
    import torch

    m, n, k, wide, in_place = shape
    kind = torch.float32 if wide == "fp32" else torch.bfloat16
    a = torch.randn(m, k, device="cuda").bfloat16()
    b = torch.randn(n, k, device="cuda").bfloat16().t()
    c = torch.randn(m, n, device="cuda").to(kind)
    return a, b, c, c if in_place else torch.empty_like(c)


def generated(variant: GemmVariant, folder: Path) -> Any:
    """The module of a kernel made for this run."""
    made = generate_gemm(Gemm(8192, 8192, 512), load_machine("h200"), variant)
    file = folder / f"knob{abs(hash(variant))}.py"
    file.write_text(made.source, encoding="utf-8")
    return module_of(file)


def peers(shape: tuple[int, int, int, str, bool], a: Any, b: Any, c: Any, d: Any, compiled: bool) -> dict[str, Call]:
    """torch.addmm, torch.compile's best and quack, each writing into ``d``; none for an fp32 C, which they do not take."""
    import torch

    if shape[3] == "fp32":
        # What PyTorch programs do: the product in bf16, then an addition in fp32.
        return {"torch mm then add_": lambda: d.copy_(c).add_(a @ b) if d is not c else d.add_(a @ b)}
    found: dict[str, Call] = {"torch.addmm": lambda: torch.addmm(c, a, b, out=d)}
    if compiled:
        # Also its persistent Triton kernel that copies by TMA.
        torch._dynamo.reset()  # every shape compiles the same function
        options = {"max_autotune": True, "triton.enable_persistent_tma_matmul": True}
        tuned = torch.compile(lambda c, a, b: torch.addmm(c, a, b), dynamic=False, options=options)
        found["torch.compile"] = lambda: tuned(c, a, b)
    if importlib.util.find_spec("quack") is not None:
        from quack.gemm_interface import gemm_add  # type: ignore[import-not-found]

        # Its own choice of a configuration: tuning would compile some hundred.
        found["quack"] = lambda: gemm_add(a, b, c, out=d, tuned=False)
    return found


def times(graphs: dict[str, Any], rounds: int, evict: Any) -> dict[str, list[tuple[float, float]]]:
    """(microseconds, SM cycles a microsecond) of each graph, in turns; cycles by the SMs' own counters, from before to after it."""
    import torch

    from tilecast.validation.lab.measure.stamps import Stamps

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stamps = Stamps(torch.device("cuda"))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            evict.zero_()
            torch.cuda._sleep(FILLER_CYCLES)
            stamps.begin()
            begin.record()
            graph.replay()
            end.record()
            stamps.end()
            torch.cuda.synchronize()
            cycles, seconds = stamps.read()
            found[name].append((begin.elapsed_time(end) * 1e3, cycles / seconds * 1e-6))
    return found


def error_of(call: Call, a: Any, b: Any, c: Any, d: Any) -> float:
    """Largest error on some rows over float64's largest value there; of a call that leaves its result in ``d`` or returns it."""
    import torch

    rows = torch.randint(0, a.shape[0], (64,), device="cuda")
    want = c[rows].double() + a[rows].double() @ b.double()
    kept = c.clone() if d is c else None
    made = call()
    made = d if made is None else made
    error = float((made[rows].double() - want).abs().max() / want.abs().max())
    if kept is not None:
        c.copy_(kept)
    return error


def measure(shape: tuple[int, int, int, str, bool], calls: dict[str, tuple[str, Call]], given: Any, rounds: int, evict: Any) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of one shape; ``calls``: subject -> (variant, call)."""
    a, b, c, d = given
    m, n, k, wide, in_place = shape
    problem = Gemm(m, n, k, c_dtype=wide, in_place=in_place)
    allowed = 4e-6 * k if wide == "fp32" else 1.2e-2
    errors = {name: error_of(call, a, b, c, d) for name, (_, call) in calls.items()}
    # torch's own way with an fp32 C rounds the product to bf16 in between.
    right = {name for name, error in errors.items() if error <= allowed or name == "torch mm then add_"}
    for name in sorted(set(calls) - right):
        print(f"{name} on {shape}: error {errors[name]:.2e} above {allowed:.2e}: not timed", flush=True)
    both = times({name: graph_of(call) for name, (_, call) in calls.items() if name in right}, rounds, evict)
    found = {name: [us for us, _ in values] for name, values in both.items()}
    medians = {name: statistics.median(values) for name, values in found.items()}
    base = next((us for name, us in medians.items() if name.startswith("torch")), None)
    same = {"m": m, "n": n, "k": k, "c_dtype": wide, "in_place": int(in_place), "sm_clock_mhz": nvidia_smi("clocks.sm")}
    return [
        {
            **same, "subject": name, "variant": calls[name][0], "us": round(us, 2), "low_us": round(min(found[name]), 2),
            "high_us": round(max(found[name]), 2), "tflops": round(problem.flops / us * 1e-6, 1),
            "gbps": round(problem.least_bytes / us * 1e-3, 1), "against_torch": round(base / us, 3) if base else "",
            "largest_error": f"{errors[name]:.2e}", "effective_mhz": round(statistics.median(mhz for _, mhz in both[name])),
        }
        for name, us in medians.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", default="gemm_hopper", help="whose kernels tilecast.addmm takes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile", action="store_true", help="also time torch.compile with max-autotune")
    parser.add_argument("--only", help="numbers of shapes, with commas between (default: all)")
    given = parser.parse_args()
    os.environ["TILECAST_GEMM_FAMILY"] = given.family
    import torch

    import tilecast

    evict = evicting()
    shapes = [*SMALL_K, *LARGE_K]
    knobs = [(8192, 8192, k, "bf16", True) for k in KNOB_KS]
    chosen = {int(n) for n in given.only.split(",")} if given.only else set(range(len(shapes) + len(knobs)))
    with tempfile.TemporaryDirectory() as folder, csv_table(given.out, FIELDS) as add:
        for number, shape in enumerate([*shapes, *knobs]):
            if number not in chosen:
                continue
            torch.manual_seed(number)
            a, b, c, d = tensors(shape)
            calls: dict[str, tuple[str, Call]] = {}
            if number < len(shapes):
                calls["tilecast"] = ("", lambda a=a, b=b, c=c, d=d: tilecast.addmm(c, a, b, out=d))
                others = peers(shape, a, b, c, d, given.compile)
                calls |= {name: ("", call) for name, call in others.items()}
            else:
                problem, chip = Gemm(*shape[:3]), load_machine("h200")
                for two in KNOB:
                    for variant in (two, replace(two, accumulators=1)):
                        if writable(variant, problem, chip).legal:
                            module = generated(variant, Path(folder))
                            text = gemm_variant_text(variant)
                            calls[f"{variant.accumulators} accumulators, {two.stages} stages"] = (
                                text, lambda launch=module.launch, a=a, b=b, c=c, d=d: launch(a, b, c, d),
                            )  # fmt: skip
            for row in measure(shape, calls, (a, b, c, d), given.rounds, evict):
                add(row)
                print(row, flush=True)


if __name__ == "__main__":
    main()
