"""Bursts of arithmetic beside matrix products on one SM: how long they take, and what the products lose.

    python tools/fma_bursts.py OUT.csv [--cache DIR] [--only-compile] [--seconds S]

`tilecast calibrate`'s corun/beside_mma has streams that never end; kernels do their maxima and rescale O in one piece and then do other
things.  In "steady" rounds warpgroups multiply back to back (m64 x n, groups of eight, two under way) while others meet, do a burst and
wait some 1,500 cycles.  In "late" rounds those that multiply come DELAY cycles after the burst begins, with empty hands, and issue
PRODUCTS.  Bursts are straight-line code entered in the middle; gaps are written into the machine code: the stall count of the last
instruction before one (10 cycles at most), and NOPs in the place of the instructions that follow.  Half a minute on a Hopper GPU, half of it to compile.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from measuring import csv_table
from own_kernels import clock_mhz, kernel_text, machine_codes

from tilecast.validation.lab.calibrate.cases import CalibrateError
from tilecast.validation.lab.calibrate.gpu import Gpu, Launch
from tilecast.validation.lab.calibrate.groups.corun import inside
from tilecast.validation.lab.calibrate.preludes import STREAMS, wgmma_prelude

#: Steps of the longest burst, of a piece of one that can be left out, groups of eight products that are logged, of shared memory the bytes.
LONGEST, PIECE, LOG = 768, 32, 1024
SMEM = 131072 + 8 * 4 * LOG + 8 * LOG
ROUNDS, PAUSE = 64, 1500
KERNEL = (
    r"""
// size: warpgroups that multiply, pieces of a burst, products of a late round, its delay, groups of products; 8, 8, 8, 16 and 16 bits.
#define PIECES(n) case n: { _Pragma("unroll") for (int i = 0; i < 32; i++) { BODY(i) } }
BENCH(THREADS) {
  extern __shared__ __align__(1024) unsigned char smem[];
  u32* issues = (u32*)(smem + WGMMA_SMEM);   // LOG groups of eight
  u32* begins = issues + 8 * LOG;            // LOG bursts
  u32* ends = begins + LOG;
  const u32 base = address(smem);
  const int group = warpgroup_index(), multiplying = (int)(size & 255), pieces = (int)(size >> 8 & 255);
  const int products = (int)(size >> 16 & 255), delay = (int)(size >> 24 & 65535), groups = (int)(size >> 40);
  wgmma_fill(smem);
  for (int i = threadIdx.x; i < 10 * LOG; i += blockDim.x) issues[i] = 0;
  __syncthreads();
  i64 t0 = clk(), t1 = t0, spent = 0;
  if (group < multiplying) {
    float c[REGS];
    u32 a[4];
    wgmma_start(c, a, smem);
    const bool logs = threadIdx.x == 0;
#if LATE
    for (int r = 0; r < rounds; r++) {
      asm volatile("bar.sync 1, %0;" ::"r"(blockDim.x) : "memory");
      spin(delay);
      u32 at[12];
#pragma unroll
      for (int p = 0; p < 12; p += 4) {
        if (p < products) {
          wgmma_fence();
#pragma unroll
          for (int u = 0; u < 4; u++) {
            wgmma(c, a, a_step(base, group, u), b_step(base, u), 1);
            at[p + u] = clk32();
          }
          wgmma_commit();
        }
      }
      wgmma_wait<0>();
      const u32 seen = clk32();
      if (logs) {
        ends[r] = seen;
        for (int p = 0; p < 12; p++) if (p < products) issues[r * 16 + p] = at[p];
      }
    }
#else
    for (int r = 0; r < groups; r++) {
      u32 at[8];
      wgmma_fence();
#pragma unroll
      for (int u = 0; u < 8; u++) {
        wgmma(c, a, a_step(base, group, u), b_step(base, u), u > 0 ? 1 : rounds >> 30);
        at[u] = clk32();
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (logs) for (int u = 0; u < 8; u++) issues[r * 8 + u] = at[u];
    }
    wgmma_wait<0>();
#endif
    wgmma_end(out, c);
  } else {
    const float* in = (const float*)data;
    float x[16], h[16], s[4] = {0.f, 0.f, 0.f, 0.f};
    u32 y[16], w[16];
    const float k = in[threadIdx.x], m = in[threadIdx.x + 1024];
    const u32 ku = __float_as_uint(in[threadIdx.x + 7]), mu = __float_as_uint(in[threadIdx.x + 11]);
#pragma unroll
    for (int i = 0; i < 16; i++) {
      x[i] = in[threadIdx.x + 32 * i]; h[i] = x[i]; y[i] = __float_as_uint(x[i]); w[i] = ku + i;
    }
    t0 = clk();
#pragma unroll 1
    for (int r = 0; r < rounds; r++) {
      spin("""
    + str(PAUSE)
    + r""" + (r * 37) % 128);
#if LATE
      asm volatile("bar.sync 1, %0;" ::"r"(blockDim.x) : "memory");
#else
      asm volatile("bar.sync 1, %0;" ::"r"(blockDim.x - 128 * multiplying) : "memory");
#endif
      const i64 b = clk();
      switch (pieces) {
        """
    + " ".join(f"PIECES({n})" for n in range(LONGEST // PIECE, 0, -1))
    + r"""
        default:;
      }
      const i64 e = clk();
      spent += e - b;
      if (threadIdx.x == 128 * multiplying) begins[r] = (u32)b;
    }
    t1 = clk();
    float t = k + m + s[0] + s[1] + s[2] + s[3];
    u32 z = ku + mu;
#pragma unroll
    for (int i = 0; i < 16; i++) { t += x[i] + h[i]; z += y[i] + w[i]; }
    keep(out, t);
    keep(out, z);
  }
  record(out, t0, t1, 0, 0, spent, 0);
  __syncthreads();
  i64* tail = out + RECORD * (i64)gridDim.x * ((blockDim.x + 31) / 32);
  if (blockIdx.x == 0) for (int i = threadIdx.x; i < 10 * LOG; i += blockDim.x) tail[i] = issues[i];
}
"""
)


def _f(ptx: str, register: str, *inputs: str) -> str:
    extra = ", ".join(f'"f"({name})' for name in inputs)
    return f'asm volatile("{ptx}" : "+f"({register}[(i) & 15]) : {extra});'


_FMA, _MAX = _f("fma.rn.f32 %0, %0, %1, %2;", "x", "k", "m"), _f("max.f32 %0, %0, %1;", "h", "k")
_EX2 = _f("ex2.approx.ftz.f32 %0, %0;", "h").replace(" : );", ");")
#: Kind -> the text of step i of a burst; a step is one instruction, of softmax an element.
KINDS = {
    # With two shared registers, with one shared and one of its own (O times a factor plus P V), with two operands.
    "ffma_3src": _FMA,
    "ffma_own": _f("fma.rn.f32 %0, %0, %1, %2;", "x", "k", "__uint_as_float(w[(i) & 15])"),
    "fmul": _f("mul.rn.f32 %0, %0, %1;", "x", "k"),
    "fadd": _f("add.rn.f32 %0, %0, %1;", "x", "k"),
    "max": _MAX,
    "lop3": 'asm volatile("lop3.b32 %0, %0, %1, %2, 0x96;" : "+r"(y[(i) & 15]) : "r"(ku), "r"(mu));',
    "pack": 'asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y[(i) & 15]) : "f"(x[(i) & 15]), "f"(k)); x[(i) & 15] = __uint_as_float(y[(i) & 15]);',
    "ffma, max": f"if ((i) & 1) {{ {_MAX} }} else {{ {_FMA} }}",
    "ex2": _EX2,
    "ffma, ex2": f"if ((i) & 1) {{ {_EX2} }} else {{ {_FMA} }}",
    "softmax_anchored": STREAMS["softmax_anchored"].body.replace("x[i]", "x[(i) & 15]").replace("y[i]", "y[(i) & 15]").replace("x[(i) ^ 1]", "x[((i) ^ 1) & 15]"),
}  # fmt: skip
#: Kinds whose instructions can be told in machine code, and how their opcodes begin there (the low 12 bits of an instruction).
OPCODES = {
    "ffma_3src": (0x223,), "ffma_own": (0x223,), "fmul": (0x220,), "fadd": (0x221,), "max": (0x209,), "lop3": (0x212,), "pack": (0x23E,),
    "ffma, max": (0x223, 0x209),
}  # fmt: skip
#: Cycles of a step beside products where they are not about two, only to choose lengths of loops.
GUESS = {"max": 2.6, "lop3": 2.6, "pack": 2.6, "ex2": 9.0, "ffma, ex2": 5.0, "softmax_anchored": 15.0}
#: (columns, home of A) of the products.
SHAPES = (*product((64, 128, 256), ("smem", "register")),)
LENGTHS = (0, 32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768)
#: Gaps in the middle of a burst of 384 (cycles), and combs: so many instructions, then so many idle cycles.
GAPS = (2, 4, 8, 16, 32, 64)
COMBS = (
    (1, 1), (1, 2), (1, 3), (1, 5), (1, 7), (2, 2), (2, 6), (4, 4), (4, 9), (8, 2), (8, 4), (8, 9), (16, 4), (16, 9), (32, 4), (32, 9),
    (64, 9),
)  # fmt: skip
COMBED = ("ffma_3src", "max", "ffma, max")
LATE_KINDS = ("ffma_3src", "max", "ffma, max", "softmax_anchored")
#: Bursts whose products' times of issue are kept.
TIMED = (64, 192, 384, 768)
#: What a launch says, by column.
Times = dict[str, Any]
FIELDS = ("gpu", "date", "driver", "clock_mhz", "mode", "kind", "n", "a", "mma_warpgroups", "stream_warpgroups", "burst", "run", "idle", "delay", "products",
          "burst_cycles", "round_cycles", "product_cycles", "seen_cycles", "issued_cycles")  # fmt: skip


@dataclass(frozen=True)
class Bursts:
    """A kernel: bursts of ``kind`` beside products of m64 x ``n`` with A from ``home``, that begin late or go on without end."""

    kind: str
    n: int
    home: str
    late: bool

    def text(self) -> str:
        """CUDA source."""
        defines = {"LATE": int(self.late), "LOG": LOG, "THREADS": self.threads()}
        return kernel_text(KERNEL, wgmma_prelude(self.n, self.home) + f"#define BODY(i) {KINDS[self.kind]}\n", defines)

    def threads(self) -> int:
        """Of a CTA at most: what leaves a warp of wide products its accumulators."""
        return 384 if self.n == 256 else 512


@dataclass(frozen=True)
class Patched:
    """A kernel whose bursts have gaps: `Gpu.kernel` knows kernels by their text."""

    kernel: Bursts
    gaps: tuple[tuple[int, int], ...]

    def text(self) -> str:
        """The kernel's, and where it was changed."""
        return f"{self.kernel.text()}\n// {self.gaps}"


def kernels() -> list[Bursts]:
    """Every kernel, those first that say most."""
    kinds = [
        *((kind, False) for kind in COMBED),
        *((kind, True) for kind in LATE_KINDS),
        *((kind, False) for kind in KINDS if kind not in COMBED),
    ]
    return [Bursts(kind, n, home, late) for kind, late in kinds for n, home in SHAPES]


#: An instruction that does nothing, without its stall count; the place of stall counts and of what an instruction's operands are kept
#: for the next by, in its upper half; the longest count written (there are longer ones, with a meaning of their own beside kept operands).
_NOP, _NOP_UPPER, _STALL, _KEPT, _LONGEST_STALL = 0x7918, 0x000FC00000000000, 41, 58, 11


def burst_at(code: bytes, kind: str) -> int:
    """Where in ``code`` (a cubin) the bursts of ``kind`` begin; ValueError when its longest run of such instructions is no burst."""
    wanted = OPCODES[kind]
    lows = np.frombuffer(code[: len(code) // 16 * 16], dtype="<u8")[::2] & 0xFFF
    best, run = (0, 0), 0
    for i, low in enumerate(lows):
        run = run + 1 if low in wanted else 0
        best = max(best, (run, i + 1 - run))
    if best[0] < LONGEST:
        raise ValueError(f"{kind}: {best[0]} instructions in a row where {LONGEST} were meant")
    return 16 * (best[1] + best[0] - LONGEST)


def with_gaps(code: bytes, kind: str, gaps: tuple[tuple[int, int], ...] = ()) -> bytes:
    """``code`` without the pauses that the assembler leaves where a burst can be entered, but with ``gaps``, as (instructions of the
    longest burst before it, idle cycles)."""
    out, at = bytearray(code), burst_at(code, kind)
    uppers = [struct.unpack_from("<Q", out, at + 16 * i + 8)[0] for i in range(LONGEST)]
    usual = statistics.mode(upper >> _STALL & 15 for upper in uppers)
    for i in range(PIECE - 1, LONGEST - 1, PIECE):
        struct.pack_into("<Q", out, at + 16 * i + 8, uppers[i] & ~(15 << _STALL) | usual << _STALL)
    for before, cycles in gaps:
        where, left = at + 16 * (before - 1), min(cycles, _LONGEST_STALL - usual)
        upper = struct.unpack_from("<Q", out, where + 8)[0]
        struct.pack_into("<Q", out, where + 8, (upper + (left << _STALL)) & ~(15 << _KEPT))
        left = cycles - left
        while left:
            where, more = where + 16, min(left, _LONGEST_STALL)
            struct.pack_into("<QQ", out, where, _NOP, _NOP_UPPER & ~(15 << _STALL) | more << _STALL)
            left -= more
    return bytes(out)


def gap_sets(kind: str) -> Iterator[tuple[int, int, int, tuple[tuple[int, int], ...]]]:
    """(length of the burst, instructions in a row, idle cycles, gaps) for every pattern that ``kind`` is measured with."""
    length = 384
    first = LONGEST - length
    for idle in GAPS:
        yield length, length // 2, idle, ((first + length // 2, idle),)
    for run, idle in COMBS if kind in COMBED else ():
        yield length, run, idle, tuple((at, idle) for at in range(first + run, LONGEST, run))


def beside(kernel: Bursts) -> list[tuple[int, int]]:
    """(warpgroups that multiply, that do bursts) as fit a CTA; alone with one shape only."""
    room = kernel.threads() // 128
    pairs = ((1, 1), (1, 2), (1, 3), (2, 1), (2, 2)) if not kernel.late else ((1, 1), (1, 2), (1, 3))
    found = [pair for pair in pairs if sum(pair) <= room]
    return found + ([(0, 1), (0, 2), (0, 3)] if (kernel.n, kernel.home) == (128, "smem") and not kernel.late else [])


def asked(multiplying: int, pieces: int, products: int = 0, delay: int = 0, groups: int = 0) -> int:
    """The kernel's ``size``."""
    return multiplying | pieces << 8 | products << 16 | delay << 24 | groups << 40


def clocks(tail: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(when products were issued, when bursts began, when late products had been seen), 32-bit clocks."""
    return tail[: 8 * LOG], tail[8 * LOG : 9 * LOG], tail[9 * LOG : 10 * LOG]


def steady(gpu: Gpu, case: Bursts | Patched, kernel: Bursts, mma: int, streams: int, length: int) -> Times:
    """Cycles of a burst, of a round, of a product; when the 1st, 2nd ... product behind a burst's begin was issued, cycles from there."""
    cycles = PAUSE + 200 + GUESS.get(kernel.kind, 2.2) * length * streams
    # Products are logged, and must go on for as long as the bursts do.
    rounds = max(8, min(ROUNDS, int(LOG * 4 * kernel.n / 1.3 / cycles)))
    groups = min(LOG, int(1.3 * rounds * cycles / (4 * kernel.n)) + 24)
    size = asked(mma, length // PIECE, groups=groups)
    found, tail = gpu.records(case, Launch(16, 128 * (mma + streams), SMEM, size=size, rounds=rounds), 10 * LOG)
    sides = found[:, 4 * mma :]
    out: dict[str, Any] = {
        "burst_cycles": sides[:, :, 5].mean() / rounds,
        "round_cycles": (sides[:, :, 1] - sides[:, :, 0]).mean() / rounds,
    }
    if mma:
        issues, begins, _ = clocks(tail)
        begin, end = int(sides[0, :, 0].min()) & 0xFFFFFFFF, int(sides[0, :, 1].max()) & 0xFFFFFFFF
        events, cycles = inside(issues[7::8], begin, end)
        out["product_cycles"] = cycles / events / 8 / mma if events else float("nan")
        known = issues[issues != 0]
        if not (int(known[-1]) - end) & 0xFFFFFFFF < 1 << 31:
            raise CalibrateError("the products ended before the bursts did")
        if length in TIMED:
            after = [
                np.sort(since[since < 1 << 20])[:32] for since in ((known - b) & 0xFFFFFFFF for b in begins[:rounds])
            ]
            whole = [one for one in after if len(one) == 32]
            out["issued_cycles"] = np.median(np.stack(whole), axis=0) if whole else np.zeros(0)
    return out


def late(gpu: Gpu, kernel: Bursts, mma: int, streams: int, length: int, delay: int, products: int) -> Times:
    """Cycles of a burst; from its begin until each product was issued and until the last was seen."""
    launch = Launch(16, 128 * (mma + streams), SMEM, size=asked(mma, length // PIECE, products, delay), rounds=ROUNDS)
    found, tail = gpu.records(kernel, launch, 10 * LOG)
    out: dict[str, Any] = {"burst_cycles": found[:, 4 * mma :, 5].mean() / ROUNDS}
    issues, begins, ends = clocks(tail)
    begins, ends = begins[:ROUNDS], ends[:ROUNDS]
    out["seen_cycles"] = np.median((ends - begins) & 0xFFFFFFFF)
    since = (issues[: 16 * ROUNDS].reshape(ROUNDS, 16) - begins[:, None]) & 0xFFFFFFFF
    out["issued_cycles"] = np.median(since, axis=0)[:products]
    return out


def cached(todo: list[Bursts], folder: Path | None) -> list[bytes]:
    """Machine code of each kernel; kept in ``folder``."""
    texts = [kernel.text() for kernel in todo]
    if folder is None:
        return machine_codes(texts)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.cubin" for text in texts]
    missing = [(path, text) for path, text in zip(paths, texts, strict=True) if not path.exists()]
    if missing:
        for (path, _), code in zip(missing, machine_codes([text for _, text in missing]), strict=True):
            path.write_bytes(code)
    return [path.read_bytes() for path in paths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--only-compile", action="store_true")
    parser.add_argument("--seconds", type=float, default=1000, help="begin no kernel after so many seconds")
    given = parser.parse_args()
    begin = time.monotonic()
    todo = kernels()
    codes = cached(todo, given.cache)
    if given.only_compile:
        return
    gpu = Gpu()
    with csv_table(given.out, FIELDS) as add:
        for kernel, code in zip(todo, codes, strict=True):
            if time.monotonic() - begin > given.seconds:
                print("no time for", kernel, flush=True)
                continue
            try:
                code = with_gaps(code, kernel.kind) if kernel.kind in OPCODES else code
                gpu.kernel(kernel, code)
                same = {"clock_mhz": clock_mhz(gpu), "kind": kernel.kind, "n": kernel.n, "a": kernel.home}
                for row in rows(gpu, kernel, code):
                    add({**same, **row})
            except Exception as error:  # the next kernel may do
                print(kernel, type(error).__name__, error, flush=True)
                if not gpu.alive():
                    raise
    print(f"{time.monotonic() - begin:.1f} s", flush=True)


def rows(gpu: Gpu, kernel: Bursts, code: bytes) -> Iterator[dict[str, object]]:
    """What is measured with a kernel."""
    for mma, streams in beside(kernel):
        told = {"mma_warpgroups": mma, "stream_warpgroups": streams}
        if kernel.late:
            for length, delay, products in product((0, 512), (20, 150), (4, 12)):
                what = {"mode": "late", **told, "burst": length, "delay": delay, "products": products}
                yield from medians(what, partial(late, gpu, kernel, mma, streams, length, delay, products))
            continue
        # A warp of softmax takes longer for each step, and an element is several instructions.
        for length in LENGTHS if kernel.kind != "softmax_anchored" else LENGTHS[:8]:
            yield from medians(
                {"mode": "steady", **told, "burst": length}, partial(steady, gpu, kernel, kernel, mma, streams, length)
            )
    if kernel.late or kernel.kind not in OPCODES:
        return
    for length, run, idle, gaps in gap_sets(kernel.kind):
        patched = Patched(kernel, gaps)
        gpu.kernel(patched, with_gaps(code, kernel.kind, gaps))
        for mma, streams in beside(kernel):
            if mma < 2 and (streams == 1 or kernel.kind in COMBED):
                told = {"mma_warpgroups": mma, "stream_warpgroups": streams}
                what = {"mode": "steady", **told, "burst": length, "run": run, "idle": idle}
                yield from medians(what, partial(steady, gpu, patched, kernel, mma, streams, length))


def medians(told: Mapping[str, object], once: Callable[[], Times]) -> Iterator[dict[str, object]]:
    """A row: ``told``, and the median of what each of three launches says; none where one says nothing."""
    row = dict(told)
    try:
        found = [once() for _ in range(3)]
    except CalibrateError as error:
        print(told, error, flush=True)
        return
    for name in found[0]:
        value = np.median(np.stack([np.asarray(one[name]) for one in found]), axis=0)
        row[name] = " ".join(f"{x:.0f}" for x in value) if value.ndim else f"{value:.2f}"
    yield row


if __name__ == "__main__":
    main()
