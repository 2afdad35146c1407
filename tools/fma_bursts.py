"""Bursts of arithmetic beside matrix products on one SM: how long they take, and what the products and other warps lose.

    python tools/fma_bursts.py OUT.csv [--cache DIR] [--only-compile] [--seconds S]

`tilecast calibrate`'s corun/beside_mma has streams that never end; kernels do their maxima and rescale O in one piece and then do other
things.  In "steady" rounds warpgroups multiply back to back (m64 x n, groups of eight, two under way) while others meet, do a burst and
wait some 1,500 cycles; in "mixed" ones the second does something else, for longer.  In "late" rounds those that multiply come DELAY
cycles after the burst begins, with empty hands, and issue PRODUCTS in groups of four.  Gaps are written into the machine code: the stall
count of the last instruction before one (10 cycles at most), and NOPs in the place of the instructions that follow.  Half a minute on a
Hopper GPU, and ten seconds to compile on 16 cores.
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

import numpy as np
from measuring import csv_table
from own_kernels import clock_mhz, kernel_text, machine_codes

from tilecast.validation.lab.calibrate.cases import CalibrateError
from tilecast.validation.lab.calibrate.gpu import Gpu, Launch, Records
from tilecast.validation.lab.calibrate.groups.corun import inside
from tilecast.validation.lab.calibrate.preludes import STREAMS, wgmma_prelude

#: Groups of products, and bursts, that are logged; bytes of shared memory.
LOG = 1024
SMEM = 131072 + 32 * LOG
ROUNDS, PAUSE = 64, 1500
KERNEL = (
    r"""
// size: warpgroups that multiply, products of a late round, its delay, groups of products; 8, 8, 16 and 16 bits.
BENCH(THREADS) {
  extern __shared__ __align__(1024) unsigned char smem[];
  u32* groups_at = (u32*)(smem + WGMMA_SMEM);   // LOG groups of products
  u32* seen_at = groups_at + LOG;               // LOG late rounds
  u32* begins = seen_at + LOG;                  // LOG bursts of each of three warpgroups
  u32* ends = begins + 3 * LOG;
  const u32 base = address(smem);
  const int group = warpgroup_index(), multiplying = (int)(size & 255), products = (int)(size >> 8 & 255);
  const int delay = (int)(size >> 16 & 65535), groups = (int)(size >> 32);
  wgmma_fill(smem);
  for (int i = threadIdx.x; i < 8 * LOG; i += blockDim.x) groups_at[i] = 0;
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
      u32 at[3];
#pragma unroll
      for (int p = 0; p < 12; p += 4) {
        if (p < products) {
          wgmma_fence();
#pragma unroll
          for (int u = 0; u < 4; u++) wgmma(c, a, a_step(base, group, u), b_step(base, u), 1);
          wgmma_commit();
          at[p / 4] = clk32();
        }
      }
      wgmma_wait<0>();
      const u32 seen = clk32();
      if (logs) {
        seen_at[r] = seen;
        for (int p = 0; p < 3; p++) if (4 * p < products) groups_at[r * 4 + p] = at[p];
      }
    }
#else
    for (int r = 0; r < groups; r++) {
      wgmma_group<8>(c, a, base, group, rounds >> 30);
      wgmma_wait<1>();
      if (logs) groups_at[r] = clk32();
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
#if OTHER
      if (group == multiplying) {
#pragma unroll
        for (int i = 0; i < STEPS; i++) { BODY(i) }
      } else {
#pragma unroll
        for (int i = 0; i < OTHER; i++) { OTHER_BODY(i) }
      }
#else
#pragma unroll
      for (int i = 0; i < STEPS; i++) { BODY(i) }
#endif
      const i64 e = clk();
      spent += e - b;
      if (threadIdx.x % 128 == 0) {
        begins[(group - multiplying) * LOG + r] = (u32)b;
        ends[(group - multiplying) * LOG + r] = (u32)e;
      }
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
  if (blockIdx.x == 0) for (int i = threadIdx.x; i < 8 * LOG; i += blockDim.x) tail[i] = groups_at[i];
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
    "shuffle": 'asm volatile("shfl.sync.bfly.b32 %0, %0, 1, 31, -1;" : "+r"(y[(i) & 15]));',
    "shared": 'asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(y[(i) & 15]) : "r"(base + WGMMA_SMEM - 4096 + threadIdx.x % 32 * 4 + ((i) & 15) * 128) : "memory");',
    "ffma, ex2": f"if ((i) & 1) {{ {_EX2} }} else {{ {_FMA} }}",
    "softmax_anchored": STREAMS["softmax_anchored"].body.replace("x[i]", "x[(i) & 15]").replace("y[i]", "y[(i) & 15]").replace("x[(i) ^ 1]", "x[((i) ^ 1) & 15]"),
}  # fmt: skip
#: Kinds whose instructions can be told in machine code, and how their opcodes begin there (the low 12 bits of an instruction).
OPCODES = {
    "ffma_3src": (0x223,), "ffma_own": (0x223,), "fmul": (0x220,), "fadd": (0x221,), "max": (0x209,), "lop3": (0x212,), "pack": (0x23E,),
    "ffma, max": (0x223, 0x209),
}  # fmt: skip
#: Cycles of a step beside products where they are not about two, only to choose lengths of loops.
GUESS = {
    "max": 4.6,
    "lop3": 4.6,
    "pack": 4.6,
    "ex2": 12.0,
    "ffma, ex2": 5.0,
    "shared": 12.0,
    "shuffle": 5.0,
    "softmax_anchored": 20.0,
}
#: (columns, home of A) of the products.
SHAPES = (*product((64, 128, 256), ("smem", "register")),)
LENGTHS = (0, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768)
LENGTH_KINDS = ("ffma_3src", "max", "ffma, max", "ffma_own")
#: Of a burst of 384: a gap in the middle (cycles), and combs (so many instructions, then so many idle cycles).
COMBED_LENGTH = 384
GAPS = (4, 16, 64)
COMBS = (
    (1, 1),
    (1, 2),
    (1, 3),
    (1, 5),
    (2, 1),
    (2, 2),
    (4, 1),
    (4, 2),
    (4, 4),
    (4, 9),
    (8, 1),
    (8, 2),
    (8, 4),
    (16, 1),
    (16, 4),
    (32, 4),
    (64, 9),
)
COMBED = ("ffma_3src", "max", "ffma, max")
LATE_KINDS, LATE_LENGTH = ("ffma_3src", "max", "ffma, max", "softmax_anchored"), 512
#: Beside these products: bursts of the first kind, and of one of the others in so many steps.
MIXED_SHAPES = ((64, "smem"), (128, "smem"), (128, "register"), (256, "register"))
MIXED, MIXED_LENGTH = ("ffma_3src", "max", "ffma, max"), 512
OTHERS = {"ex2": 256, "ffma_3src": 1024, "max": 768, "shuffle": 512, "shared": 256, "softmax_anchored": 128}
#: What a launch says, by column.
Times = dict[str, float]
FIELDS = ("gpu", "date", "driver", "clock_mhz", "mode", "kind", "n", "a", "mma_warpgroups", "stream_warpgroups", "burst", "run", "idle", "other", "delay",
          "products", "burst_cycles", "other_cycles", "round_cycles", "product_cycles", "begun_2", "begun_3", "ended_1", "ended_2", "ended_3", "issued_4", "issued_8", "issued_12", "seen_cycles")  # fmt: skip


@dataclass(frozen=True)
class Bursts:
    """A kernel: bursts of ``steps`` of ``kind`` beside products of m64 x ``n`` with A from ``home``, that begin late or go on without
    end; ``other`` is what a second warpgroup does meanwhile."""

    kind: str
    steps: int
    n: int
    home: str
    late: bool = False
    other: str = ""

    def text(self) -> str:
        """CUDA source."""
        defines = {
            "LATE": int(self.late), "LOG": LOG, "THREADS": 384 if self.n == 256 else 512, "STEPS": self.steps,
            "OTHER": OTHERS.get(self.other, 0),
        }  # fmt: skip
        bodies = f"#define BODY(i) {KINDS[self.kind]}\n#define OTHER_BODY(i) {KINDS.get(self.other, ';')}\n"
        return kernel_text(KERNEL, wgmma_prelude(self.n, self.home) + bodies, defines)


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
    found = [Bursts(kind, COMBED_LENGTH, *shape) for kind in COMBED for shape in SHAPES]
    found += [Bursts("ffma_3src", 0, *shape, late=True) for shape in SHAPES]
    found += [Bursts(kind, LATE_LENGTH, *shape, late=True) for kind in LATE_KINDS for shape in SHAPES]
    found += [
        Bursts(kind, MIXED_LENGTH, *shape, other=other) for shape in MIXED_SHAPES for kind in MIXED for other in OTHERS
    ]
    found += [Bursts(kind, steps, *shape) for kind in LENGTH_KINDS for shape in SHAPES for steps in LENGTHS]
    return list(dict.fromkeys(found))


#: An instruction that does nothing, without its stall count; the place of stall counts and of what an instruction's operands are kept
#: for the next by, in its upper half; the longest count written (there are longer ones, with a meaning of their own beside kept operands).
_NOP, _NOP_UPPER, _STALL, _KEPT, _LONGEST_STALL = 0x7918, 0x000FC00000000000, 41, 58, 11


def burst_at(code: bytes, kernel: Bursts) -> int:
    """Where in ``code`` (a cubin) a kernel's burst begins; ValueError when its longest run of such instructions is no burst."""
    wanted = OPCODES[kernel.kind]
    lows = np.frombuffer(code[: len(code) // 16 * 16], dtype="<u8")[::2] & 0xFFF
    best, run = (0, 0), 0
    for i, low in enumerate(lows):
        run = run + 1 if low in wanted else 0
        best = max(best, (run, i + 1 - run))
    if best[0] != kernel.steps:
        raise ValueError(f"{kernel}: {best[0]} instructions in a row where {kernel.steps} were meant")
    return 16 * best[1]


def with_gaps(code: bytes, kernel: Bursts, gaps: tuple[tuple[int, int], ...]) -> bytes:
    """``code`` with ``gaps`` in its burst, as (instructions before it, idle cycles)."""
    out, at = bytearray(code), burst_at(code, kernel)
    for before, cycles in gaps:
        where = at + 16 * (before - 1)
        upper = struct.unpack_from("<Q", out, where + 8)[0]
        left = min(cycles, _LONGEST_STALL - (upper >> _STALL & 15))
        struct.pack_into("<Q", out, where + 8, (upper + (left << _STALL)) & ~(15 << _KEPT))
        left = cycles - left
        while left:
            where, more = where + 16, min(left, _LONGEST_STALL)
            struct.pack_into("<QQ", out, where, _NOP, _NOP_UPPER & ~(15 << _STALL) | more << _STALL)
            left -= more
    return bytes(out)


def gap_sets() -> Iterator[tuple[int, int, tuple[tuple[int, int], ...]]]:
    """(instructions in a row, idle cycles, gaps) for every pattern."""
    half = COMBED_LENGTH // 2
    yield from ((half, idle, ((half, idle),)) for idle in GAPS)
    for run, idle in COMBS:
        yield run, idle, tuple((at, idle) for at in range(run, COMBED_LENGTH, run))


def beside(kernel: Bursts) -> list[tuple[int, int]]:
    """(warpgroups that multiply, that do bursts) as fit a CTA; alone with one shape only."""
    if kernel.other:
        return [(1, 2), (0, 2)]
    found = [pair for pair in ((1, 1), (1, 2), (1, 3)) if sum(pair) <= (3 if kernel.n == 256 else 4)]
    return found + ([(0, 1), (0, 2), (0, 3)] if (kernel.n, kernel.home) == (128, "smem") and not kernel.late else [])


def asked(multiplying: int, products: int = 0, delay: int = 0, groups: int = 0) -> int:
    """The kernel's ``size``."""
    return multiplying | products << 8 | delay << 16 | groups << 32


def steady(gpu: Gpu, kernel: Bursts, case: Bursts | Patched, mma: int, streams: int) -> Times:
    """Cycles of a burst (of the other's), of a round, of a product."""
    cycles = PAUSE + 200.0
    cycles += max(
        GUESS.get(kernel.kind, 2.2) * kernel.steps * streams, GUESS.get(kernel.other, 2.2) * OTHERS.get(kernel.other, 0)
    )
    # Products are logged, and must go on for as long as the bursts do.
    groups, rounds = LOG - 24, max(6, min(ROUNDS, int(LOG * 4 * kernel.n * max(1, mma) / 1.4 / cycles)))
    groups = min(groups, int(1.4 * rounds * cycles / (4 * kernel.n)) + 24)
    launch = Launch(16, 128 * (mma + streams), SMEM, size=asked(mma, groups=groups), rounds=rounds)
    found, tail = gpu.records(case, launch, 8 * LOG)
    sides = found[:, 4 * mma :]
    spent = sides[:, :, 5] / rounds
    out = {
        "burst_cycles": spent[:, :4].mean() if kernel.other else spent.mean(),
        "round_cycles": (sides[:, :, 1] - sides[:, :, 0]).mean() / rounds,
    }
    if kernel.other:
        out["other_cycles"] = spent[:, 4:].mean()
    out |= spans(tail, streams, rounds)[1]
    if mma:
        begin, end = int(sides[0, :, 0].min()) & 0xFFFFFFFF, int(sides[0, :, 1].max()) & 0xFFFFFFFF
        log = tail[:LOG]
        events, since = inside(log, begin, end)
        if not events or not (int(log[log != 0][-1]) - end) & 0xFFFFFFFF < 1 << 31:
            raise CalibrateError("the products ended before the bursts did")
        out["product_cycles"] = since / events / 8 / mma
    return out


def spans(tail: Records, streams: int, rounds: int) -> tuple[Records, Times]:
    """(clock at which the first of the warpgroups began each burst; when the others began and each ended, cycles from there): a warp
    reads the clock when it comes to issue."""
    first = tail[2 * LOG : 2 * LOG + rounds]
    begun, ended = (
        ((tail[at * LOG :][: 3 * LOG].reshape(3, LOG)[:streams, :rounds] - first + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)
        for at in (2, 5)
    )
    origin = begun.min(axis=0)
    out = {f"begun_{i + 1}": float(np.median(begun[i] - origin)) for i in range(1, streams)}
    return first + origin, out | {f"ended_{i + 1}": float(np.median(ended[i] - origin)) for i in range(streams)}


def late(gpu: Gpu, kernel: Bursts, mma: int, streams: int, delay: int, products: int) -> Times:
    """Cycles of a burst; from its begin until the 4th, 8th and 12th product was issued and until the last was seen."""
    launch = Launch(16, 128 * (mma + streams), SMEM, size=asked(mma, products, delay), rounds=ROUNDS)
    found, tail = gpu.records(kernel, launch, 8 * LOG)
    origin, out = spans(tail, streams, ROUNDS)
    out["burst_cycles"] = found[:, 4 * mma :, 5].mean() / ROUNDS
    out["seen_cycles"] = float(np.median((tail[LOG : LOG + ROUNDS] - origin) & 0xFFFFFFFF))
    since = np.median((tail[: 4 * ROUNDS].reshape(ROUNDS, 4) - origin[:, None]) & 0xFFFFFFFF, axis=0)
    return out | {f"issued_{4 * i + 4}": float(since[i]) for i in range(products // 4)}


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
    mode = "late" if kernel.late else "mixed" if kernel.other else "steady"
    for mma, streams in beside(kernel):
        told = {
            "mode": mode,
            "mma_warpgroups": mma,
            "stream_warpgroups": streams,
            "burst": kernel.steps,
            "other": kernel.other,
        }
        if not kernel.late:
            yield from medians(told, partial(steady, gpu, kernel, kernel, mma, streams))
            continue
        for delay, products in product((20, 150), (4, 12)):
            what = {**told, "delay": delay, "products": products}
            yield from medians(what, partial(late, gpu, kernel, mma, streams, delay, products))
    if mode != "steady" or kernel.kind not in COMBED or kernel.steps != COMBED_LENGTH:
        return
    for run, idle, gaps in gap_sets():
        patched = Patched(kernel, gaps)
        gpu.kernel(patched, with_gaps(code, kernel, gaps))
        for mma, streams in beside(kernel):
            told = {
                "mode": mode,
                "mma_warpgroups": mma,
                "stream_warpgroups": streams,
                "burst": kernel.steps,
                "run": run,
                "idle": idle,
            }
            yield from medians(told, partial(steady, gpu, kernel, patched, mma, streams))


def medians(told: Mapping[str, object], once: Callable[[], Times]) -> Iterator[dict[str, object]]:
    """A row: ``told``, and the median of what each of three launches says; none where one says nothing."""
    try:
        found = [once() for _ in range(3)]
    except CalibrateError as error:
        print(told, error, flush=True)
        return
    yield {**told, **{name: f"{statistics.median(one[name] for one in found):.2f}" for name in found[0]}}


if __name__ == "__main__":
    main()
