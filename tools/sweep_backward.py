"""Variants of the portable backward on the GPU at hand, kernel by kernel, beside PyTorch's own backward passes.

    python tools/sweep_backward.py OUT.csv [--shapes 128:causal:4096,192/128:none:16384] [--seconds 450] [--write FOLDER | --read FOLDER]

One process times; others compile and check before.  The kernels of a backward pass do not depend on each other's knobs, so
each is timed alone, and the best key kernels and the best query kernel make the best variant.  Every candidate must first
agree with float64 gradients on a small problem with odd lengths and grouped heads: error at most twice that of the same
attention in PyTorch operations.  Shapes are those of the FlashAttention papers: 16k tokens, hidden size 2048.

Files are generated here by default, which needs jinja2 and ruff; --write FOLDER only generates (without a GPU), --read FOLDER
takes what it wrote.  After --seconds no further shape is begun, and the rows so far stay.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from measuring import Add, by_sdpa, csv_table, evicting, in_turns

from tilecast.base.module_file import module_of
from tilecast.validation.lab.measure.telemetry import Nvml

DEFAULT = "64:none:4096,64:causal:4096,64:causal:16384,128:none:4096,128:causal:4096,128:causal:16384,256:none:4096,256:causal:4096,192/128:causal:4096,96:causal:4096"
TOKENS, HIDDEN, ROUNDS, WARMUP = 16384, 2048, 7, 3
FIELDS = ("gpu", "date", "driver", "torch", "triton", "head_dim", "head_dim_v", "mask", "batch", "heads", "seqlen", "kernel",
          "knobs", "ms", "ms_low", "ms_high", "tflops", "registers", "spilled", "sm_clock_mhz", "rounds", "note")  # fmt: skip
#: Candidates of each loop, (moving tile, staying tile, warps, stages), by the wider head dimension; the last of a key loop: apart.
KEY_LOOPS = {
    64: [(64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2), (32, 128, 4, 2), (64, 128, 4, 2)],
    96: [(64, 128, 8, 2), (32, 128, 8, 2), (32, 128, 8, 3), (64, 64, 4, 2), (32, 64, 4, 2)],
    128: [(64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 2), (32, 128, 8, 3), (32, 128, 8, 4), (64, 64, 4, 2), (32, 64, 4, 2), (128, 128, 8, 2, True), (64, 128, 8, 2, True)],
    192: [(32, 128, 8, 2, True), (64, 128, 8, 2, True), (32, 128, 8, 3, True), (32, 128, 8, 2), (32, 64, 4, 2), (64, 64, 4, 2, True)],
    256: [(32, 128, 8, 2, True), (64, 128, 8, 1, True), (16, 64, 8, 2), (32, 64, 8, 2), (64, 64, 4, 2, True), (32, 64, 4, 2, True)],
}  # fmt: skip
QUERY_LOOPS = {
    64: [(128, 128, 8, 2), (128, 128, 8, 3), (64, 128, 8, 2), (64, 128, 8, 3), (64, 128, 8, 4), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2), (32, 128, 8, 3)],
    96: [(64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3)],
    128: [(64, 128, 8, 2), (64, 128, 8, 3), (128, 128, 8, 2), (32, 128, 8, 2), (32, 128, 8, 4), (64, 64, 4, 2), (64, 64, 4, 3), (32, 64, 4, 3)],
    192: [(64, 128, 8, 2), (32, 128, 8, 2), (32, 128, 8, 3), (64, 64, 4, 2), (32, 64, 4, 2)],
    256: [(32, 128, 8, 2), (32, 128, 8, 3), (64, 64, 8, 2), (32, 64, 4, 2), (16, 128, 8, 3), (64, 128, 8, 1)],
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """One line of the table."""

    head_dim: int
    head_dim_v: int
    mask: str
    seqlen: int

    @property
    def batch(self) -> int:
        """Sequences that make the number of tokens, at least one."""
        return max(1, TOKENS // self.seqlen)

    @property
    def heads(self) -> int:
        """Heads that make the hidden size; 16 where none do."""
        return HIDDEN // self.head_dim if HIDDEN % self.head_dim == 0 else 16

    @property
    def window(self) -> tuple[int, int]:
        """Keys left and right of the diagonal; -1: no limit."""
        return (1024, 0) if self.mask == "window" else (-1, -1)

    @property
    def flop(self) -> float:
        """Of a backward pass: 2.5 times forward."""
        from tilecast.kernels.flops import attention_flops

        q, k, v = self.tensors(1)
        left, right = (-1, 0) if self.mask == "causal" else self.window
        return 2.5 * attention_flops(q, k, v, None, left, right)

    def tensors(self, group: int) -> tuple[tuple[int, ...], ...]:
        """Extents of q, k and v."""
        widths = (
            (self.heads, self.head_dim),
            (self.heads // group, self.head_dim),
            (self.heads // group, self.head_dim_v),
        )
        return tuple((self.batch, heads, self.seqlen, width) for heads, width in widths)


def parse_shapes(text: str) -> list[Shape]:
    """Shapes of "head_dim[/head_dim_v]:mask:seqlen,..."."""
    found = []
    for part in text.split(","):
        dims, mask, length = part.split(":")
        qk, _, v = dims.partition("/")
        found.append(Shape(int(qk), int(v or qk), mask, int(length)))
    return found


# --- candidates ---------------------------------------------------------------------------------------------------------


def variants(shape: Shape) -> Iterator[Any]:
    """Files to write: the i-th key loop with the i-th query loop, by pointers and by descriptors."""
    from tilecast.model.kernel.variants.fa2 import LOADS
    from tilecast.model.kernel.variants.fa2_backward import Fa2BackwardVariant

    wide = next(width for width in KEY_LOOPS if width >= max(shape.head_dim, shape.head_dim_v))
    keys, queries = KEY_LOOPS[wide], QUERY_LOOPS[wide]
    for loads, i in itertools.product(reversed(LOADS), range(max(len(keys), len(queries)))):
        (n, m, w, s), key = queries[i % len(queries)], keys[i % len(keys)]
        yield Fa2BackwardVariant("fa2_bwd", *key[:4], m, n, w, s, loads, loads, len(key) > 4)


def write(shapes: list[Shape], folder: Path) -> None:
    """Every candidate as a file, named after what it computes."""
    from tilecast.codegen.portable.backward import TEMPLATE, context
    from tilecast.codegen.render import render
    from tilecast.model.kernel.header import header_text
    from tilecast.model.kernel.variant import variant_text
    from tilecast.model.kernel.workload import Workload

    folder.mkdir(parents=True, exist_ok=True)
    for dim, dim_v, mask in dict.fromkeys((s.head_dim, s.head_dim_v, s.mask) for s in shapes):
        work = Workload(head_dim_qk=dim, head_dim_v=dim_v, mask=mask, window=(1024, 0) if mask == "window" else None)
        for i, variant in enumerate(variants(Shape(dim, dim_v, mask, 4096))):
            header = header_text({"variant": variant_text(variant)})
            # Not `generate_backward`: a sweep also tries what its rules would refuse, and the check below judges.
            source = render(TEMPLATE, {"k": context(variant, work), "header": header})
            (folder / f"d{dim}_{dim_v}_{mask}_{i:02}.py").write_text(source, encoding="utf-8")


def check(task: tuple[Path, Shape]) -> str:
    """Compile a candidate by running it on a small problem; "" where it is right, else what is wrong."""
    import torch

    path, shape = task
    try:
        error, allowed = _errors(module_of(path), shape)
        torch.cuda.synchronize()
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem).splitlines()[0][:120] if str(problem) else ''}"
    return "" if error <= allowed else f"wrong: error {error:.3g}, allowed {allowed:.3g}"


def _errors(module: ModuleType, shape: Shape) -> tuple[float, float]:
    """Largest error of the three gradients over what is allowed for it, and 1."""
    import torch

    torch.manual_seed(0)
    lengths, heads, kv = (419, 611), 4, 2

    def draw(count: int, length: int, width: int) -> Any:
        return torch.randn(1, count, length, width, device="cuda").to(torch.bfloat16)

    q, k, v = draw(heads, lengths[0], shape.head_dim), draw(kv, lengths[1], shape.head_dim), draw(kv, lengths[1], shape.head_dim_v)  # fmt: skip
    dout, scale = draw(heads, lengths[0], shape.head_dim_v), shape.head_dim**-0.5
    window = (100, 0) if shape.mask == "window" else (-1, -1)
    distance = torch.arange(lengths[1], device="cuda")[None] - torch.arange(lengths[0], device="cuda")[:, None] - lengths[1] + lengths[0]  # fmt: skip
    seen = torch.ones_like(distance, dtype=torch.bool)
    if shape.mask != "none":
        seen = distance <= 0
    if shape.mask == "window":
        seen &= distance >= -window[0]

    def gradients(dtype: Any) -> tuple[Any, ...]:
        inputs = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        wide = [t.repeat_interleave(heads // kv, 1) for t in inputs[1:]]
        scores = (inputs[0] @ wide[0].mT * scale).masked_fill(~seen, -math.inf)
        out = torch.softmax(scores, -1) @ wide[1]
        return out, torch.logsumexp(scores, -1), *torch.autograd.grad(out, inputs, dout.to(dtype))

    out, lse, *exact = gradients(torch.float64)
    peer = gradients(torch.bfloat16)[2:]
    found = [torch.full_like(t, math.nan) for t in (q, k, v)]
    module.launch(q, k, v, out.detach().to(torch.bfloat16), lse.detach().float(), dout, *found, scale, *window)
    worst = 0.0
    for mine, theirs, true in zip(found, peer, exact, strict=True):
        step = torch.finfo(torch.bfloat16).eps * true.abs().max().item()
        allowed = 2 * (theirs.double() - true).abs().max().item() + step
        error = (mine.double() - true).abs().max().item()
        worst = max(worst, error / allowed if math.isfinite(error) else math.inf)
    return worst, 1.0


# --- timing -------------------------------------------------------------------------------------------------------------


def problem(shape: Shape, group: int = 1) -> tuple[Any, ...]:
    """q, k, v, out, lse, dout, dq, dk, dv on the GPU: out and lse of the shipped forward kernel.  ``group`` query heads share keys."""
    import torch

    from tilecast.kernels.operator import attention

    torch.manual_seed(0)
    q, k, v = (torch.randn(extents, device="cuda").to(torch.bfloat16) for extents in shape.tensors(group))
    window = shape.window if shape.mask == "window" else None
    out, lse = attention(q, k, v, causal=shape.mask == "causal", window=window, return_lse=True)
    return q, k, v, out, lse, torch.randn_like(out), torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def ours(
    path: Path, shape: Shape, tensors: tuple[Any, ...]
) -> Iterator[tuple[str, str, Callable[[], object], int, int]]:
    """(kernel, its knobs, a launch of it, registers, spilled bytes) of a candidate."""
    from tilecast.kernels.launching import terms_shape

    module = module_of(path)
    q, k, v, out, lse, dout, dq, dk, dv = tensors
    terms = lse.new_empty(terms_shape(module, q))
    scale = shape.head_dim**-0.5
    module.launch(*tensors, scale, *shape.window, None, terms)
    knobs = dict(part.split("=") for part in module.TILECAST["variant"].split(","))
    planned = module.plan(q, k, v, out, lse, dout, None, dq, dk, dv, terms, *shape.window)
    for (kernel, grid, arguments), options in zip(planned, module.OPTIONS, strict=True):
        name = kernel.fn.__name__
        scales = () if name == "row_terms" else (scale * module.LOG2E.value, scale)
        compiled = kernel[grid](*arguments, *scales, **options)
        prefix = {"row_terms": "none", "query_gradients": "dq_"}.get(name, "dkv_")
        own = ",".join(f"{key}={value}" for key, value in knobs.items() if key.startswith(prefix))

        def run(
            kernel: Any = kernel, grid: Any = grid, given: Any = (*arguments, *scales), options: Any = options
        ) -> None:
            kernel[grid](*given, **options)

        yield name, own, run, getattr(compiled, "n_regs", 0), getattr(compiled, "n_spills", 0)


def peers(shape: Shape, tensors: tuple[Any, ...]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Backward passes of PyTorch's SDPA and of the shipped kernels, whole."""
    import torch

    from tilecast.kernels import registry
    from tilecast.kernels.launching import terms_shape

    q, k, v, lse, dout = *tensors[:3], *tensors[4:6]
    capability = torch.cuda.get_device_capability()
    wanted = capability, "bf16", shape.head_dim, shape.head_dim_v, shape.mask
    for entry in registry.candidates(*wanted, registry.shipped_backward())[:1]:
        module = module_of(registry.INDEX.parent / f"{entry.module}.py")
        terms = lse.new_empty(terms_shape(module, q))
        given = (*tensors, shape.head_dim**-0.5, *shape.window, None, terms)
        yield entry.module, partial(module.launch, *given)
    if shape.mask == "window":
        return
    for name, backend in (("sdpa flash", "FLASH"), ("sdpa cudnn", "CUDNN")):
        inputs = [t.detach().requires_grad_() for t in (q, k, v)]
        made = by_sdpa(backend, shape.mask == "causal")(*inputs)
        yield name, partial(torch.autograd.grad, made, inputs, dout, retain_graph=True)
    if importlib.util.find_spec("flash_attn") and importlib.util.find_spec("cutlass"):
        from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]

        turned = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in (q, k, v)]
        made = flash_attn_func(*turned, causal=shape.mask == "causal")
        made = made[0] if isinstance(made, tuple) else made
        seed = dout.transpose(1, 2).contiguous()
        yield "flash-attn-4 (sm_90)", partial(torch.autograd.grad, made, turned, seed, retain_graph=True)


def row_of(shape: Shape, *, kernel: str, knobs: str = "", times: list[float] | None = None, flop: float = 0.0,
           registers: int = 0, spilled: int = 0, clock: float = math.nan, note: str = "") -> dict[str, Any]:  # fmt: skip
    """A row of the table; without times it says in ``note`` why there are none."""
    row: dict[str, Any] = {
        "head_dim": shape.head_dim, "head_dim_v": shape.head_dim_v, "mask": shape.mask, "batch": shape.batch, "heads": shape.heads,
        "seqlen": shape.seqlen, "kernel": kernel, "knobs": knobs, "registers": registers, "spilled": spilled,
        "sm_clock_mhz": f"{clock:.0f}", "rounds": ROUNDS, "note": note,
    }  # fmt: skip
    if times:
        median = statistics.median(times)
        row |= {"ms": f"{median:.4f}", "ms_low": f"{min(times):.4f}", "ms_high": f"{max(times):.4f}"}
        row["tflops"] = f"{flop / median / 1e9:.1f}" if flop else ""
    print(*row.values(), flush=True)
    return row


def sweep(shape: Shape, files: list[Path], wrong: dict[Path, str], add: Add, nvml: Nvml, evict: Any) -> None:
    """All rows of one shape."""

    def timed(run: Callable[[], object]) -> dict[str, Any]:
        with nvml.watch() as seen:
            (times,) = in_turns([run], ROUNDS, evict, warmup=WARMUP, filler=0)
        return {"times": times, "clock": seen.result().sm_mhz or math.nan}

    tensors = problem(shape)
    for name, run in _whole(shape, tensors, add):
        add(row_of(shape, kernel=name, flop=shape.flop, note="whole", **timed(run)))
    done = set()
    for path in files:
        if wrong[path]:
            add(row_of(shape, kernel=path.stem, knobs=module_of(path).TILECAST["variant"], note=wrong[path]))
            continue
        for name, knobs, run, registers, spilled in ours(path, shape, tensors):
            if (name, knobs) not in done and (name != "row_terms" or not done):
                add(row_of(shape, kernel=name, knobs=knobs, registers=registers, spilled=spilled, **timed(run)))
            done.add((name, knobs))


def _whole(shape: Shape, tensors: tuple[Any, ...], add: Add) -> Iterator[tuple[str, Callable[[], object]]]:
    """`peers`, up to the first that does not run here, which gets a row that says so."""
    found = peers(shape, tensors)
    while True:
        try:
            yield next(found)
        except StopIteration:
            return
        except RuntimeError as error:
            add(row_of(shape, kernel="sdpa", note=str(error).splitlines()[0][:120]))
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", nargs="?", help="CSV to write")
    parser.add_argument("--shapes", default=DEFAULT, help="head_dim[/head_dim_v]:mask:seqlen, several with commas")
    parser.add_argument("--seconds", type=float, default=450, help="begin no shape after so many seconds")
    parser.add_argument("--write", metavar="FOLDER", help="only write the candidates there")
    parser.add_argument("--read", metavar="FOLDER", help="take candidates from there")
    options = parser.parse_args()
    begin, shapes = time.monotonic(), parse_shapes(options.shapes)
    if options.write:
        write(shapes, Path(options.write))
        return
    if not options.out:
        parser.error("expected a CSV to write, got none")
    import torch

    folder = Path(options.read or tempfile.mkdtemp())
    if not options.read:
        write(shapes, folder)
    files = {shape: sorted(folder.glob(f"d{shape.head_dim}_{shape.head_dim_v}_{shape.mask}_*.py")) for shape in shapes}
    tasks = {path: (path, shape) for shape, paths in files.items() for path in paths}
    workers = max(1, min(14, len(os.sched_getaffinity(0)) - 1))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        wrong = dict(zip(tasks, pool.map(check, tasks.values(), chunksize=1), strict=True))
    print(f"{len(tasks)} candidates checked after {time.monotonic() - begin:.0f} s, {sum(map(bool, wrong.values()))} left out", file=sys.stderr)  # fmt: skip
    nvml, evict = Nvml(), evicting()
    with csv_table(options.out, FIELDS) as add:
        for shape in shapes:
            if time.monotonic() - begin > options.seconds:
                print(f"out of time before {shape}", file=sys.stderr)
                break
            sweep(shape, files[shape], wrong, add, nvml, evict)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
