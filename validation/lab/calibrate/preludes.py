"""The generated part of a benchmark's CUDA source: matrix instructions by shape, and streams of arithmetic.

PTX takes wgmma's accumulators as one operand each, so the instruction is written out for its N.  A stream is the text
of ``BODY(i)``, one step of chain i on the registers ``x[i] y[i] kk[i] mm[i]`` (a chain's own), ``k m ku mu`` (shared)
and ``s[] h[]`` (running sums and maxima).  Everything is volatile PTX, so that the compiler neither drops nor swaps it.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Bits of the accumulation predicate etc. that differ by dtype: (PTX type, K of one instruction, transpose flags).
_TYPES = {"bf16": ("bf16", 16), "fp8": ("e4m3", 32)}


def wgmma_prelude(n: int, a_home: str, dtype: str = "bf16", trans_b: bool = False, zeros: bool = False) -> str:
    """Definitions for one ``wgmma.mma_async`` shape m64 x n; ``a_home`` is "smem" or "register".

    ``trans_b`` reads B with N along the row (V of an attention kernel; 16-bit types only).  ValueError otherwise.
    """
    if n % 8 or not 8 <= n <= 256 or a_home not in ("smem", "register") or (trans_b and dtype != "bf16"):
        raise ValueError(f"no wgmma with n={n}, A in {a_home}, {dtype}, transposed B {trans_b}")
    kind, k = _TYPES[dtype]
    regs = n // 2
    accumulators = ", ".join(f"%{i}" for i in range(regs))
    if a_home == "register":
        a = "{" + ", ".join(f"%{regs + i}" for i in range(4)) + "}"
        a_inputs, next_operand = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])', regs + 4
    else:
        a, a_inputs, next_operand = f"%{regs}", '"l"(da)', regs + 1
    # 16-bit types take transpose flags: for A only when it is in shared memory, for B always.
    flags = "" if dtype == "fp8" else (", 0" if a_home == "smem" else "") + f", {int(trans_b)}"
    outputs = ", ".join(f'"+f"(c[{i}])' for i in range(regs))
    return (
        f"#define N {n}\n#define REGS {regs}\n#define TRANS_B {int(trans_b)}\n#define FP8 {int(dtype == 'fp8')}\n"
        f"#define ZERO_DATA {int(zeros)}\n"
        "__device__ __forceinline__ void wgmma(float (&c)[REGS], const u32 (&a)[4], u64 da, u64 db, int accumulate) {\n"
        f'  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{next_operand + 1}, 0;'
        f" wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kind}.{kind} {{{accumulators}}}, {a}, %{next_operand},"
        f' p, 1, 1{flags}; }}"\n'
        f'               : {outputs} : {a_inputs}, "l"(db), "r"(accumulate));\n}}\n'
    )


@dataclass(frozen=True, slots=True)
class Stream:
    """One instruction kind or mix: the text of a step, and what a step counts as."""

    body: str
    #: Instructions (or, for a mix, score elements) of one step.
    per_step: float
    #: Lowest compute capability that has it.
    since: int = 80
    #: Bytes of shared memory a warp moves in a step.
    smem_bytes: int = 0

    def prelude(self) -> str:
        """``BODY(i)`` as a macro."""
        return f"#define BODY(i) {self.body}\n"


def _f(ptx: str, *inputs: str) -> str:
    """A step on x[i]: ``ptx`` with %0 = x[i] and the inputs after it."""
    extra = ", ".join(f'"f"({name})' for name in inputs)
    return f'asm volatile("{ptx}" : "+f"(x[i]) : {extra});'


def _u(ptx: str, *inputs: str) -> str:
    extra = ", ".join(f'"r"({name})' for name in inputs)
    return f'asm volatile("{ptx}" : "+r"(y[i]) : {extra});'


_EX2 = _f("ex2.approx.ftz.f32 %0, %0;")
_FFMA = _f("fma.rn.f32 %0, %0, %1, %2;", "k", "m")
_FADD_SUM = 'asm volatile("add.rn.f32 %0, %0, %1;" : "+f"(s[(i) & 3]) : "f"(x[i]));'
_MAX_RUN = 'asm volatile("max.f32 %0, %0, %1;" : "+f"(h[(i) & 3]) : "f"(x[i]));'
_PACK_PAIR = (
    'if ((i) & 1) { asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y[i]) : "f"(x[i]), "f"(x[(i) ^ 1]));'
    " x[i] = __uint_as_float(y[i]); }"
)

# Every step has its own four registers: the assembler would drop a load whose registers the next one overwrites.
_AT = '"r"(at + (flip ^ (((i) & 8) << 11)) + ((i) & 7) * 2048)'
_QUAD = ", ".join(f'"{{0}}r"(w[(i) * 4 + {j}])' for j in range(4))
_SMEM_LOAD = 'asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : ' + _QUAD.format("=") + f" : {_AT});"
_SMEM_STORE = 'asm volatile("st.volatile.shared.v4.u32 [%4], {%0, %1, %2, %3};" :: ' + _QUAD.format("") + f", {_AT});"
_LDMATRIX = (
    'asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : '
    + _QUAD.format("=")
    + f' : {_AT} : "memory");'
)
_STMATRIX = (
    'asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%4], {%0, %1, %2, %3};" :: '
    + _QUAD.format("")
    + f', {_AT} : "memory");'
)
# Local memory, a word a lane: `spill` is the address of sixteen of the thread's words, of which the first eight hold their
# own addresses (corun.cu), so that a load gives the address of the chain's next and the assembler drops none.
_LOCAL_LOAD = 'asm volatile("ld.local.u32 %0, [%0];" : "+r"(w[(i)]) :: "memory");'
_LOCAL_STORE = (
    'asm volatile("st.local.u32 [%1], %0;" :: "r"(w[(i)]), "r"(spill + (flip >> 9) + ((i) & 7) * 4) : "memory");'
)
_PACK = 'asm volatile("cvt.rn.{0}.f32 %0, %1, %2;" : "=r"(y[i]) : "f"(x[i]), "f"(k)); x[i] = __uint_as_float(y[i]);'
# Four floats to one register, as a kernel stores them: the second conversion merges into the first's register.
_PACK8 = (
    'asm volatile("{ .reg .b16 v, w; cvt.rn.satfinite.e4m3x2.f32 v, %1, %2; cvt.rn.satfinite.e4m3x2.f32 w, %2, %1;'
    ' mov.b32 %0, {v, w}; }" : "=r"(y[i]) : "f"(x[i]), "f"(k)); x[i] = __uint_as_float(y[i]);'
)
_COMPARE_SELECT = _f("{ .reg .pred p; setp.gt.f32 p, %0, %1; selp.f32 %0, %2, %0, p; }", "k", "m")
_FFMA2 = (
    'asm volatile("{ .reg .b64 a, b, c; mov.b64 a, {%0, %1}; mov.b64 b, {%2, %2}; mov.b64 c, {%3, %3};'
    ' fma.rn.f32x2 a, a, b, c; mov.b64 {%0, %1}, a; }" : "+f"(x[i]), "+f"(kk[i]) : "f"(k), "f"(m));'
)

# 2**x on the FMA pipe: round to an integer by a large constant, a degree-3 polynomial of the rest, exponent added.
_POLY3 = (
    'asm volatile("{ .reg .f32 t, r, f, p; .reg .b32 e, q; add.rn.f32 t, %0, 0f4B400000; sub.rn.f32 r, t, 0f4B400000;'
    " sub.rn.f32 f, %0, r; fma.rn.f32 p, f, 0f3D9DF09D, 0f3E6906A4; fma.rn.f32 p, p, f, 0f3F31F519;"
    ' fma.rn.f32 p, p, f, 0f3F800000; mov.b32 e, t; shl.b32 e, e, 23; mov.b32 q, p; add.s32 q, q, e; mov.b32 %0, q; }"'
    ' : "+f"(x[i]));'
)


def _every(n: int, last: str, other: str) -> str:
    """``last`` in the last of every ``n`` steps, ``other`` in the rest."""
    return f"if (((i) & {n - 1}) == {n - 1}) {{ {last} }} else {{ {other} }}"


#: Streams by name.  A step counts its instructions; in the mixes, score elements.
STREAMS: dict[str, Stream] = {
    "ex2": Stream(_EX2, 1),
    "ex2_bf16x2": Stream(_u("ex2.approx.ftz.bf16x2 %0, %0;", "ku"), 1, 90),
    "ffma_2src": Stream(_f("fma.rn.f32 %0, %0, %1, %0;", "k"), 1),
    "ffma_3src": Stream(_FFMA, 1),
    "ffma_3src_own": Stream(_f("fma.rn.f32 %0, %0, %1, %2;", "kk[i]", "mm[i]"), 1),
    "ffma2": Stream(_FFMA2, 1, 100),
    "fadd": Stream(_f("add.rn.f32 %0, %0, %1;", "k"), 1),
    "fmul": Stream(_f("mul.rn.f32 %0, %0, %1;", "k"), 1),
    "max2": Stream(_f("max.f32 %0, %0, %1;", "k"), 1),
    "max3": Stream(_f("max.f32 %0, %0, %1, %2;", "k", "m"), 1, 100),
    "pack_bf16x2": Stream(_PACK.format("bf16x2"), 1),
    "pack_f16x2": Stream(_PACK.format("f16x2"), 1),
    "pack_e4m3x2": Stream(_PACK8, 2, 90),
    "shuffle": Stream(_u("shfl.sync.bfly.b32 %0, %0, 1, 31, -1;", "ku"), 1),
    "compare_select": Stream(_COMPARE_SELECT, 2),
    "iadd3": Stream(_u("{ .reg .u32 t; add.u32 t, %0, %1; add.u32 %0, t, %2; }", "ku", "mu"), 1),
    "lop3": Stream(_u("lop3.b32 %0, %0, %1, %2, 0x96;", "ku", "mu"), 1),
    "prmt": Stream(_u("prmt.b32 %0, %0, %1, 0x5410;", "ku"), 1),
    "imad": Stream(_u("mad.lo.u32 %0, %0, %1, %2;", "ku", "mu"), 1),
    # An element, not an instruction.
    "ex2_poly3": Stream(_POLY3, 1),
    # Two pipes in turn: what one warp and one scheduler issue.
    "ex2+ffma": Stream(_EX2 + _FFMA, 1),
    "ex2+2ffma": Stream(_EX2 + _FFMA + _FFMA, 1),
    "ex2+4ffma": Stream(_EX2 + 4 * _FFMA, 1),
    "ffma+max2": Stream(_f("fma.rn.f32 %0, %0, %1, %2;", "k", "m") + _u("max.s32 %0, %0, %1;", "ku"), 2),
    "ffma+lop3": Stream(_FFMA + _u("lop3.b32 %0, %0, %1, %2, 0x96;", "ku", "mu"), 2),
    # Softmax of one score element: scale, exponential, sum, running maximum, half a pack ...
    "softmax_online": Stream(_FFMA + _EX2 + _FADD_SUM + _MAX_RUN + _PACK_PAIR, 1),
    # ... and without the maximum, as kernels that anchor the exponent do.
    "softmax_anchored": Stream(_FFMA + _EX2 + _FADD_SUM + _PACK_PAIR, 1),
    # ... with the exponential of every eighth and every fourth element on the FMA pipe.
    "softmax_anchored_poly8": Stream(_FFMA + _every(8, _POLY3, _EX2) + _FADD_SUM + _PACK_PAIR, 1),
    "softmax_anchored_poly4": Stream(_FFMA + _every(4, _POLY3, _EX2) + _FADD_SUM + _PACK_PAIR, 1),
    # Shared memory, 16 bytes a lane.
    "ld_shared": Stream(_SMEM_LOAD, 1, 80, 512),
    "st_shared": Stream(_SMEM_STORE, 1, 80, 512),
    "ldmatrix": Stream(_LDMATRIX, 1, 80, 512),
    "stmatrix": Stream(_STMATRIX, 1, 90, 512),
    # Local memory, 4 bytes a lane.
    "ld_local": Stream(_LOCAL_LOAD, 1),
    "st_local": Stream(_LOCAL_STORE, 1),
}
# Streams whose energy is measured (power_mix.cu).  Data decide power, and a chain such as x = k x + m settles at its fixed
# point, where nothing toggles any more.  So a chaotic map feeds them, x = x x - 1.9, which stays within 2 and never repeats;
# results are folded into four accumulators (the assembler makes one three-input LOP3 of two folds), as it drops what
# nothing reads.  What a step adds to the step without it is the energy of the instruction.
_CHAOS = 'asm volatile("fma.rn.f32 %0, %0, %0, %1;" : "+f"(x[{0}]) : "f"(-1.9f));'
_X, _X5, _X11 = "x[i]", "x[((i) + 5) & 15]", "x[((i) + 11) & 15]"


def _fold(value: str, at: int = 0) -> str:
    return f'asm volatile("xor.b32 %0, %0, %1;" : "+r"(z[((i) + {at}) & 3]) : "r"(__float_as_uint({value})));'


def _live(ptx: str, *inputs: str) -> Stream:
    """Chaos, the instruction ``ptx`` from ``inputs`` to y[i], a fold of its result."""
    read = ", ".join(f'"f"({name})' for name in inputs)
    return Stream(_CHAOS.format("i") + f'asm volatile("{ptx}" : "=f"(y[i]) : {read});' + _fold("y[i]"), 1)


#: Streams of live data by name; a step is one element.
LIVE_STREAMS: dict[str, Stream] = {
    "chaos": Stream(_CHAOS.format("i"), 1),
    "chaos, one chain": Stream(_CHAOS.format("0"), 1),
    "chaos+fold": Stream(_CHAOS.format("i") + _fold(_X), 1),
    "chaos+2 folds": Stream(_CHAOS.format("i") + _fold(_X) + _fold(_X5, 2), 1),
    "chaos+ex2+fold": _live("ex2.approx.ftz.f32 %0, %1;", _X),
    "chaos+ffma+fold": _live("fma.rn.f32 %0, %1, %2, %3;", _X, "k", "m"),
    "chaos+ffma_3src+fold": _live("fma.rn.f32 %0, %1, %2, %3;", _X, _X5, _X11),
    "chaos+fmul+fold": _live("mul.rn.f32 %0, %1, %2;", _X, "k"),
    "chaos+fadd+fold": _live("add.rn.f32 %0, %1, %2;", _X, _X5),
    "chaos+max2+fold": _live("max.f32 %0, %1, %2;", _X, _X5),
    "chaos+pack_bf16x2+fold": _live("{ .reg .b32 p; cvt.rn.bf16x2.f32 p, %1, %2; mov.b32 %0, p; }", _X, _X5),
    "ld_shared": STREAMS["ld_shared"],
    "st_shared": STREAMS["st_shared"],
}
LOCAL_STREAMS = ("ld_local", "st_local")
SMEM_STREAMS = tuple(name for name, stream in STREAMS.items() if stream.smem_bytes)
MIXES = ("softmax_online", "softmax_anchored", "softmax_anchored_poly8", "softmax_anchored_poly4")
