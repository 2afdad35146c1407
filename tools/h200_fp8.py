"""e4m3 attention on the GPU at hand: errors by four protocols, then times in turns with bf16 and, where installed, cuDNN's fp8.

    python tools/h200_fp8.py ERRORS.csv TIMES.csv [FILE.py ...] [--seconds N] [--fa3 LIBRARY]

FILEs are generated e4m3 kernels, by default those that ship; - in place of a table leaves it out.  LIBRARY is FlashAttention-3 as
vLLM builds it (_vllm_fa3_C.abi3.so), which adds P V up in two levels.  Errors (relative L2 norms against float64): "randn" against
the descaled inputs, beside P rounded to e4m3 in float64; "outliers" is FlashAttention-3's protocol, root mean square error
with inputs quantised per tensor; "positive" has 128k keys and V > 0, where a short accumulator would lose most; "sink" has
one key far above the others; "hadamard" is "outliers" through `tilecast.quantize_e4m3`, q and k rotated.  Times: protocol of `h200_kernels.py`; "V as stored" includes the pass over V.
"""

from __future__ import annotations

import argparse
import csv
import math
import multiprocessing
import statistics
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from h200_kernels import HIDDEN, TOKENS, fa3, measure

import tilecast
from tilecast.base.module_file import module_of
from tilecast.validation.lab.measure.telemetry import Nvml

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
LENGTHS, ROUNDS = (4096, 16384), 9
OCTAVES = 2.0**8  # P of the float64 emulation ends here, as the kernels' does
ROWS_AT_ONCE = 512


def run(module: ModuleType, q: Any, k: Any, v: Any, scales: tuple[Any, Any, Any], scale: float) -> tuple[Any, Any]:
    """(out, lse) of a kernel file on e4m3 tensors and their factors; out begins as NaN."""
    out = torch.full(q.shape, math.nan, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    module.launch(q, k, v, out, lse, scale, -1, -1, *scales)
    return out, lse


def reference(q: Any, k: Any, v: Any, scale: float, causal: bool, rounded: bool) -> tuple[Any, Any]:
    """(out, lse) in float64 of float64 tensors, with P rounded to e4m3 or not."""
    group, offset = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    outs, lses = [], []
    for start in range(0, q.shape[2], ROWS_AT_ONCE):
        s = q[:, :, start : start + ROWS_AT_ONCE] @ k.transpose(-1, -2) * scale
        if causal:
            rows = torch.arange(start, start + s.shape[2], device=s.device)[:, None] + offset
            s = s.masked_fill(torch.arange(k.shape[2], device=s.device)[None] > rows, -math.inf)
        lses.append(torch.logsumexp(s, -1))
        p = torch.exp(s - s.amax(-1, keepdim=True)) * OCTAVES
        total = p.sum(-1, keepdim=True)
        outs.append((p.float().to(E4M3).double() if rounded else p) @ v / total)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def quantised(x: Any, per_head: bool = False) -> tuple[Any, Any]:
    """e4m3 of a tensor and what descales it, per tensor or per head."""
    largest = x.abs().amax((2, 3) if per_head else None).float().clamp(min=1e-12)
    factor = (largest / LARGEST).reshape(x.shape[:2] if per_head else (1,))
    by = factor[..., None, None] if per_head else factor
    return (x / by).to(E4M3), factor.contiguous()


def inputs(protocol: str, dim: int) -> tuple[Any, Any, Any]:
    """float64 q, k, v (batch, heads, seqlen, dim) of a protocol: the same at every call."""
    torch.manual_seed(0)

    def draw(heads: int, rows: int) -> Any:
        return torch.randn(1, heads, rows, dim, device="cuda", dtype=torch.float64)

    if protocol in ("outliers", "hadamard"):
        made = [draw(4, 2048) for _ in range(3)]
        return tuple(x + draw(4, 2048) * 10 * (torch.rand_like(x) < 1e-3) for x in made)  # type: ignore[return-value]
    if protocol == "positive":
        return draw(1, 128), draw(1, 131072), draw(1, 131072).abs()
    q, k, v = draw(4, 1000), draw(2, 1500), draw(2, 1500)
    if protocol == "sink":
        # The first key is met last: references outgrow what they were by many octaves.
        k[:, :, 0] = q.reshape(1, 2, 2, 1000, dim).mean((2, 3)) + 0.4
        q = q + 0.4
    return q, k, v


def errors(path: str) -> list[tuple[object, ...]]:
    """(kernel, head_dim, mask, protocol, its error, error of bf16 or of P rounded in float64, of the lse, deterministic)."""
    module = module_of(path)
    work = module.TILECAST["workload"]
    dim, causal = work["head_dim_qk"], work["mask"] == "causal"
    rows: list[tuple[object, ...]] = []
    for protocol in ("randn", "outliers", "hadamard", "positive", "sink"):
        if causal and protocol == "positive":
            continue
        full = inputs(protocol, dim)
        made = [quantised(x, per_head=protocol in ("randn", "sink")) for x in full]
        (q, k, v), factors = [x for x, _ in made], [f for _, f in made]
        if protocol == "hadamard":
            q, k, v, named = tilecast.quantize_e4m3(*(x.half() for x in full))
            factors = list(named.values())
        if protocol in ("randn", "sink"):
            # The interface takes q's factors for each key head.
            factors[0] = factors[0].reshape(1, k.shape[1], -1)[..., 0].contiguous()
            group = q.shape[1] // k.shape[1]
            q = (full[0] / factors[0].repeat_interleave(group, 1)[..., None, None]).clamp(-LARGEST, LARGEST).to(E4M3)
        wide = [
            x.double() * (f.double().repeat_interleave(x.shape[1] // f.shape[1], 1)[..., None, None] if f.ndim == 2 else f.double())
            for x, f in zip((q, k, v), factors, strict=True)
        ]  # fmt: skip
        out, lse = run(module, q, k, v, tuple(factors), dim**-0.5)  # type: ignore[arg-type]
        again, _ = run(module, q, k, v, tuple(factors), dim**-0.5)  # type: ignore[arg-type]
        exact, exact_lse = reference(*wide, dim**-0.5, causal, False)
        emulated, _ = reference(*wide, dim**-0.5, causal, True)
        truth = reference(*full, dim**-0.5, causal, False)[0] if protocol in ("outliers", "hadamard") else exact

        def off(x: Any, truth: Any = truth, protocol: str = protocol) -> float:
            difference = x.double() - truth
            return float(difference.square().mean().sqrt() if protocol in ("outliers", "hadamard") else difference.norm() / truth.norm())  # fmt: skip

        rows.append((Path(path).stem, dim, work["mask"], protocol, f"{off(out):.3e}", f"{off(emulated):.3e}",
                     f"{float((lse - exact_lse).abs().max()):.1e}", int(torch.equal(out, again))))  # fmt: skip
    return rows


def write_errors(files: list[str], target: str) -> None:
    """Errors of kernel files by protocol, to a CSV."""
    rows = []
    for file in files:
        found = errors(file)
        rows += found
        print(*found, sep="\n", flush=True)
        with open(target, "w", newline="", encoding="utf-8") as table:
            writer = csv.writer(table, lineterminator="\n")
            writer.writerow(
                ("kernel", "head_dim", "mask", "protocol", "error", "float64_with_rounded_p", "lse", "same_bits")
            )
            writer.writerows(rows)


def cudnn_fp8(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    """A call of cuDNN's fp8 forward through its frontend, which on Hopper gives e4m3 alone, or the reason why there is none."""
    try:
        import cudnn

        graph = cudnn.pygraph(io_data_type=cudnn.data_type.FP8_E4M3, intermediate_data_type=cudnn.data_type.FLOAT,
                              compute_data_type=cudnn.data_type.FLOAT)  # fmt: skip
        made = {name: graph.tensor(name=name, dim=list(x.shape), stride=list(x.stride()), data_type=cudnn.data_type.FP8_E4M3)
                for name, x in (("q", q), ("k", k), ("v", v))}  # fmt: skip
        one = torch.ones((1, 1, 1, 1), device="cuda")
        names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        numbers = {n: graph.tensor(name=n, dim=[1] * 4, stride=[1] * 4, data_type=cudnn.data_type.FLOAT) for n in names}
        o, _, amax_s, amax_o = graph.sdpa_fp8(
            **made, **numbers, generate_stats=False, attn_scale=scale, use_causal_mask=causal
        )
        out = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device="cuda")
        o.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride())).set_data_type(
            cudnn.data_type.FP8_E4M3
        )
        amax = [torch.empty_like(one), torch.empty_like(one)]
        for tensor in (amax_s, amax_o):
            tensor.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(cudnn.data_type.FLOAT)
        graph.build([cudnn.heur_mode.A])
        space = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")
        pack = {made["q"]: q, made["k"]: k, made["v"]: v, o: out, amax_s: amax[0], amax_o: amax[1]}
        pack |= dict.fromkeys(numbers.values(), one)
        graph.execute(pack, space)
        return lambda: graph.execute(pack, space)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


def calls(path: str, length: int) -> tuple[dict[str, tuple[Any, str]], tuple[Any, ...]]:
    """The launches of a kernel at a length: both, and attention alone; and the tensors."""
    module = module_of(path)
    dim = module.TILECAST["workload"]["head_dim_qk"]
    torch.manual_seed(0)
    shape = (TOKENS // length, HIDDEN // dim, length, dim)
    q, k, v = (torch.randn(shape, device="cuda").to(E4M3) for _ in range(3))
    out = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(shape[:3], device="cuda")
    made = module.plan(q, k, v, out, lse, None, None, None, *module.workspaces(v), -1, -1)
    (first, grid, before), (second, programs, after) = made
    scale = dim**-0.5 * 1.4426950408889634

    def attend() -> None:
        second[programs](*after, scale, **module.OPTIONS)

    def both() -> None:
        first[grid](*before, num_warps=module.PREPARE_WARPS)
        attend()

    name = Path(path).stem
    return {f"{name}, V as stored": (both, ""), f"{name}, V given": (attend, "")}, (q, k, v)


def bf16(dim: int, length: int, causal: bool) -> dict[str, tuple[Any, str]]:
    """`tilecast.attention` on bfloat16 inputs of a shape, by what it is called in the table."""
    import tilecast

    shape = (TOKENS // length, HIDDEN // dim, length, dim)
    q, k, v = (torch.randn(shape, device="cuda").to(torch.bfloat16) for _ in range(3))
    return {"tilecast, bf16": ((lambda: tilecast.attention(q, k, v, causal=causal)), "")}


def _warm(path: str) -> str:
    try:
        work = module_of(path).TILECAST["workload"]
        others = bf16(work["head_dim_qk"], 4096, work["mask"] == "causal")
        for function, _ in [*calls(path, 4096)[0].values(), *others.values()]:
            function()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{path}: {error!r}"[:400]
    return ""


def time_all(files: list[str], target: str, seconds: float, library: str | None = None) -> None:
    """Times of kernel files beside bf16 and cuDNN, in turns, to a CSV; no shape begins after so many seconds."""
    begin, nvml, rows, told = time.time(), Nvml(), [], set()
    kinds = sorted({(w["head_dim_qk"], w["mask"]) for w in (module_of(f).TILECAST["workload"] for f in files)})
    for length in reversed(LENGTHS):
        for dim, mask in kinds:
            if time.time() - begin > seconds:
                print("out of time: the rest was left out")
                return
            causal, functions, tensors = mask == "causal", {}, ()
            for file in files:
                work = module_of(file).TILECAST["workload"]
                if (work["head_dim_qk"], work["mask"]) == (dim, mask):
                    made, tensors = calls(file, length)
                    functions |= made
            functions |= bf16(dim, length, causal)
            peer = cudnn_fp8(*tensors, causal, dim**-0.5)
            if isinstance(peer, str):
                told.add(peer)
            else:
                functions["cuDNN fp8"] = (peer, "")
            if library:
                try:
                    packed = fa3(library, *tensors, causal)
                    packed()
                    functions["FlashAttention-3 (vLLM), fp8"] = (packed, "")
                except RuntimeError as error:
                    told.add(f"FlashAttention-3: {error}"[:300])
            with nvml.watch() as seen:
                times = measure(functions, ROUNDS)
            flop = 4 * TOKENS * HIDDEN * length * (0.5 if causal else 1.0)
            for name, found in times.items():
                median = statistics.median(found)
                rows.append((name, dim, length, mask, f"{median:.4f}", f"{flop / median / 1e9:.1f}", f"{seen.result().sm_mhz:.0f}"))  # fmt: skip
            print(f"d{dim} {length} {mask}: " + "; ".join(f"{r[0]} {r[5]}" for r in rows[-len(times) :]), flush=True)
            with open(target, "w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(("kernel", "head_dim", "seqlen", "mask", "ms", "tflops", "sm_clock_mhz"))
                writer.writerows(rows)
    print(*sorted(told), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("errors")
    parser.add_argument("times")
    parser.add_argument("files", nargs="*")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--fa3", metavar="LIBRARY")
    asked = parser.parse_args()
    folder = Path(__file__).parents[1] / "kernels" / "generated"
    files = asked.files or sorted(map(str, folder.glob("hopper_fp8_*.py")))
    with multiprocessing.get_context("spawn").Pool(min(14, len(files))) as pool:
        told = pool.map(_warm, files, chunksize=1)
    print(*filter(None, told), sep="\n", flush=True)
    usable = [file for file, wrong in zip(files, told, strict=True) if not wrong]
    if asked.errors != "-":
        write_errors(usable, asked.errors)
    if asked.times != "-":
        time_all(usable, asked.times, asked.seconds, asked.fa3)


if __name__ == "__main__":
    main()
