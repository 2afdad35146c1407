"""Measure what power and clock an NVIDIA GPU settles at under loads that are not attention.

Run on the GPU: ``python tools/power_probe.py OUT.csv``.  Every load runs for some seconds; NVML is
sampled beside it (clock, power, throttle reasons), and a one-warp kernel on a second stream reads the SM's own cycle
counter against the global timer, because the NVML clock is a set point, not what a power-braked SM executes.
Energy terms of the machine files come from this table (docs/model.md, "Clock").
"""

from __future__ import annotations

import csv
import statistics
import sys
import time

import torch
import triton
import triton.language as tl

from tilecast.validation.lab.measure.telemetry import Nvml


@triton.jit
def clock_kernel(out, spins: tl.constexpr):
    """Cycle counter and global timer before and after a dependent chain of about a millisecond."""
    c0 = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    t0 = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    x = tl.load(out + 4).to(tl.int32)
    for _ in range(spins):
        x = tl.inline_asm_elementwise("mad.lo.s32 $0, $1, 3, 1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)
    c1 = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    t1 = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    tl.store(out, c1 - c0)
    tl.store(out + 1, t1 - t0)
    tl.store(out + 4, x.to(tl.int64))


@triton.jit
def arithmetic_kernel(out, rounds: tl.constexpr, kind: tl.constexpr, block: tl.constexpr):
    """Streams of independent FFMA (kind 0), MUFU.EX2 (1) or min/max (2) from registers."""
    i = tl.program_id(0) * block + tl.arange(0, block)
    a = i.to(tl.float32) * 1.1e-7 + 0.3
    b = a * 1.7 + 0.1
    c = b * 0.9 + 0.2
    d = c * 0.8 + 0.3
    for _ in range(rounds):
        if kind == 0:
            a = tl.fma(a, 0.99, b)
            b = tl.fma(b, 0.98, c)
            c = tl.fma(c, 0.97, d)
            d = tl.fma(d, 0.96, a)
        elif kind == 1:
            a = tl.exp2(a) - 1.0
            b = tl.exp2(b) - 1.0
            c = tl.exp2(c) - 1.0
            d = tl.exp2(d) - 1.0
        else:
            a = tl.minimum(a, b)
            b = tl.maximum(b, c)
            c = tl.minimum(c, d)
            d = tl.maximum(d, a)
    tl.store(out + i, a + b + c + d)


def settled(load, work_per_call: float, seconds: float) -> dict[str, float]:
    """Run ``load`` back to back; report the second half of the run."""
    side = torch.cuda.Stream(priority=-1)
    ticks = torch.zeros(8, dtype=torch.int64, device="cuda")
    load()
    clock_kernel[(1,)](ticks, 200000, num_warps=1)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(3):
        load()
    end.record()
    torch.cuda.synchronize()
    one = start.elapsed_time(end) / 3e3
    short = work_per_call / one
    batch = max(1, int(0.05 / one))
    effective, rates = [], []
    with Nvml().watch(0.02) as seen:
        began = time.time()
        while time.time() - began < seconds:
            start.record()
            for _ in range(batch):
                load()
            end.record()
            with torch.cuda.stream(side):
                clock_kernel[(1,)](ticks, 200000, num_warps=1)
            torch.cuda.synchronize()
            rates.append(work_per_call * batch / (start.elapsed_time(end) / 1e3))
            cycles, nanoseconds = ticks[:2].tolist()
            effective.append(cycles / nanoseconds * 1e3)
    tail = seen.samples[len(seen.samples) // 2 :]
    return {
        "short_rate": short,
        "settled_rate": statistics.median(rates[len(rates) // 2 :]),
        "nvml_clock_mhz": statistics.mean(r[0] for r in tail),
        "effective_clock_mhz": statistics.median(effective[len(effective) // 2 :]),
        "power_w": statistics.mean(r[1] for r in tail),
        "throttle_mask": max(r[3] for r in tail),
    }


def main(path: str, only: str = "") -> None:
    torch.manual_seed(0)
    n = 8192
    flop = 2.0 * n**3
    rows: list[dict[str, object]] = []
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    zero = torch.zeros_like(a)
    big = torch.empty(1 << 30, device="cuda", dtype=torch.float32)
    source, target = big[: 1 << 29], big[1 << 29 :]
    out = torch.empty(1 << 22, device="cuda")
    eight = [x.to(torch.float8_e4m3fn) for x in (a, b)]
    one = torch.ones((), device="cuda")
    positive = (torch.rand(n, n, device="cuda") / 64).to(torch.bfloat16)
    small = [torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    grid, block, rounds = 2112, 1024, 4096
    lanes = grid * block * rounds * 4.0

    def attention(d: int, heads: int, s: int, causal: bool):
        q, k, v = (torch.randn(max(1, 16384 // s), heads, s, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        work = 4.0 * q.shape[0] * heads * s * s * d * (0.5 if causal else 1.0)
        return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal), work

    loads = [
        ("idle", lambda: torch.cuda._sleep(10_000_000), 1.0, "call/s"),
        ("matmul 8192 bf16 randn", lambda: torch.matmul(a, b), flop, "FLOP/s"),
        ("matmul 8192 bf16 zeros", lambda: torch.matmul(zero, zero), flop, "FLOP/s"),
        ("matmul 8192 bf16 A uniform [0,1/64)", lambda: torch.matmul(positive, b), flop, "FLOP/s"),
        (
            "matmul 8192 fp8 randn",
            lambda: torch._scaled_mm(eight[0], eight[1].t(), one, one, out_dtype=torch.bfloat16),
            flop,
            "FLOP/s",
        ),
        ("copy 2 GiB", lambda: target.copy_(source), 2.0 * source.numel() * 4, "B/s"),
        ("ffma", lambda: arithmetic_kernel[(grid,)](out, rounds, 0, block, num_warps=8), lanes, "op/s"),
        ("mufu ex2", lambda: arithmetic_kernel[(grid,)](out, rounds, 1, block, num_warps=8), lanes, "op/s"),
        ("minmax", lambda: arithmetic_kernel[(grid,)](out, rounds, 2, block, num_warps=8), lanes, "op/s"),
    ]
    # The same matmul with pauses: the power cap then holds at higher clocks, which traces power against clock.
    for pause_us in (20, 50, 100, 150, 200, 300, 500):

        def paused(pause: int = pause_us) -> None:
            torch.matmul(small[0], small[1])
            torch.cuda._sleep(int(pause * 1.6e3))

        loads.append((f"matmul 4096 bf16 randn, then {pause_us} us x 1.6 GHz pause", paused, 2.0 * 4096**3, "FLOP/s"))
    for d, heads in ((128, 16), (64, 32)):
        load, work = attention(d, heads, 16384, False)
        loads.append((f"sdpa d{d} 16k (check only)", load, work, "FLOP/s"))
    for name, load, work, unit in loads:
        if only not in name:
            continue
        try:
            row = {"load": name, "unit": unit, **settled(load, work, 3.0)}
        except Exception as error:  # a missing library must not lose the other loads
            print(name, "failed:", str(error)[:200])
            continue
        rows.append(row)
        print({k: (round(v, 3) if isinstance(v, float) and v < 1e6 else v) for k, v in row.items()}, flush=True)
        with open(path, "w", newline="") as handle:
            writer = csv.DictWriter(handle, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__)


if __name__ == "__main__":
    main(*sys.argv[1:])
