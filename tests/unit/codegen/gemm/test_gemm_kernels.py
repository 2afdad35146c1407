"""GEMM kernels: what is written, and what it computes: Gluon in the emulator, plain Triton in its interpreter.

TRITON_INTERPRET counts when triton is imported, so the interpreter runs in a process of its own: this file as a script.
What the compiler makes of shipped files: test_shipped_compile.py.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.interpreter import environment, quicken
from support.paths import ROOT
from support.whole import whole

import tilecast
from tilecast.base.module_file import module_of
from tilecast.codegen.gemm.copies import COPY
from tilecast.codegen.gemm.generate import generate_gemm
from tilecast.codegen.gemm.ship import ShippedGemm, read_gemm_list
from tilecast.codegen.render import format_source
from tilecast.codegen.shipping.ship import KERNELS
from tilecast.emulator.any_kernel import load_any
from tilecast.emulator.errors import EmulationError
from tilecast.emulator.replay.timing import COPY_ORDER, PORT, replay
from tilecast.model.gemm.evaluate import stream
from tilecast.model.gemm.families import native_gemm_family, writable
from tilecast.model.gemm.variant import GemmVariant
from tilecast.model.gemm.workload import Gemm
from tilecast.model.kernel.header import read_header
from tilecast.model.machine.machine import load_machine

SHIPPED = read_gemm_list()
GLUON = [kernel for kernel in SHIPPED if kernel.family != "gemm_triton"]
#: Those that write D of a whole k themselves.
WHOLE_K = [kernel for kernel in GLUON if not kernel.parted]


@dataclass(frozen=True)
class Case:
    """One product; ``a`` and ``b``: "rows" or "columns" without gaps; ``c``: "rows", at "odd" steps as D is too, "columns", or one "row" or "column" of all;
    ``d``: "new", or "c" to write over it, or new and at "odd" steps."""

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    alpha: float = 1.0
    beta: float = 1.0
    a: str = "rows"
    b: str = "rows"
    c: str = "rows"
    d: str = "new"
    mode: str = "late"
    seed: int = 0
    #: Columns of C and D beyond those that count, which must stay as they are.
    gap: int = 0


CASES = {
    "several tiles": Case(264, 392, 200),
    "factors, by columns, strides": Case(300, 520, 72, alpha=0.5, beta=-2.0, b="columns", d="c", mode="random", seed=1, gap=8),
    "no C": Case(136, 264, 328, "float16", beta=0.0, a="columns", mode="random", seed=2),
    "both by columns, in place": Case(520, 136, 64, a="columns", b="columns", d="c", mode="random", seed=3),
    "one small tile": Case(3, 8, 8, "float16", alpha=3.0),
    "more steps than slots": Case(130, 264, 1000, mode="random", seed=4),
    "a row of C": Case(264, 200, 136, alpha=1.5, beta=0.5, c="row", mode="random", seed=5),
    "C by columns": Case(136, 264, 72, beta=-0.5, c="columns", mode="random", seed=6),
    "C and D at odd steps, in place": Case(260, 265, 72, alpha=0.5, c="odd", d="c", mode="random", seed=7, gap=3),
    "D at odd steps": Case(130, 263, 136, beta=0.0, c="odd", mode="random", seed=8),
    "a column of C": Case(264, 200, 136, alpha=1.5, beta=0.5, c="column", mode="random", seed=9),
    "a column of C, D at odd steps": Case(260, 265, 72, beta=-1.0, c="column", d="odd", mode="random", seed=10),
    "C by columns, D at odd steps": Case(136, 265, 72, c="columns", d="odd", mode="random", seed=11),
}  # fmt: skip


def torch_or_skip():  # type: ignore[no-untyped-def]
    return pytest.importorskip("torch")


def check(launch, case: Case, c_dtype: str, padded: bool = True) -> None:  # type: ignore[no-untyped-def]
    """D is what float64 gives, but for its own rounding and that of float32 sums; nothing else is written."""
    torch = torch_or_skip()
    torch.manual_seed(case.seed)
    kind, wide = getattr(torch, case.dtype), getattr(torch, c_dtype)

    def matrix(rows: int, columns: int, how: str):  # type: ignore[no-untyped-def]
        # Columns without gaps begin at whole 16 bytes.
        first, second = (rows, columns) if how == "rows" else (columns, rows)
        whole = torch.randn(first, -(-second // 8) * 8 if padded else second).to(kind)[:, :second]
        return whole if how == "rows" else whole.t()

    a, b = matrix(case.m, case.k, case.a), matrix(case.k, case.n, case.b)
    step = case.n + 1 - case.n % 2 if case.c == "odd" else -(-case.n // 8) * 8
    holder = torch.randn(case.m, step + case.gap).to(wide)
    c = holder[:, : case.n]
    if case.c == "row":
        c = c[:1].clone().expand(case.m, case.n)
    elif case.c == "column":
        c = c[:, :1].expand(case.m, case.n)
    elif case.c == "columns":
        c = c.t().contiguous().t()
    beyond = holder[:, case.n :].clone()
    want = case.alpha * (a.double() @ b.double()) + case.beta * c.double()
    d = c if case.d == "c" else torch.full_like(holder, float("nan"))[:, : case.n]
    if case.d == "odd":
        d = torch.full((case.m, case.n + 1 + case.n % 2), float("nan"), dtype=wide)[:, 1 : case.n + 1]
    launch(a, b, c if case.beta else None, d, case.alpha, case.beta)
    scale = abs(case.alpha) * (a.double().abs() @ b.double().abs()) + abs(case.beta) * c.double().abs()
    rounded = (want.to(wide).double() - want).abs()
    assert bool(
        ((d.double() - want).abs() <= rounded * 1.01 + 4e-7 * scale + torch.finfo(wide).eps * 0.02 * want.abs()).all()
    )
    assert torch.equal(holder[:, case.n :], beyond)


def path_of(kernel: ShippedGemm) -> Path:
    return KERNELS / "generated" / f"{kernel.module}.py"


# -- Gluon, in the emulator --------------------------------------------------------------------------------------------


def case_of(place: int, kernel: ShippedGemm, number: int, name: str) -> Any:
    """A kernel and a case: half of the cases of each by turns, the others with `--whole` alone."""
    return pytest.param(kernel, name, marks=() if (place + number) % 2 else whole, id=f"{kernel.module}-{name}")


@pytest.mark.parametrize(
    ("kernel", "name"),
    [case_of(place, kernel, n, name) for place, kernel in enumerate(GLUON) for n, name in enumerate(CASES)],
)
def test_computes_the_product(kernel: ShippedGemm, name: str) -> None:
    torch_or_skip()
    case = CASES[name]
    module = tilecast.emulated(str(path_of(kernel)), machine=kernel.machine, mode=case.mode, seed=case.seed, sms=3)
    narrow = kernel.workload.d_dtype == "bf16"
    check(module.launch, case, "float16" if narrow and case.dtype == "float16" else "bfloat16" if narrow else "float32")


def in_parts(module: Any, parts: int) -> Any:
    """The launch of a file that can share k, in ``parts``, which leaves no sum that it has not written in D."""
    torch = torch_or_skip()

    def launch(a, b, c, d, alpha, beta):  # type: ignore[no-untyped-def]
        sums = torch.full(module.sums_shape(*d.shape, parts), float("nan"))
        module.launch(a, b, c, d, alpha, beta, sums if parts > 1 else None)

    return launch


@pytest.mark.parametrize("parts", [2, 3, 5, 8])
def test_sums_of_parts_of_k_are_added_up(parts: int) -> None:
    """Also where no whole number of parts makes k (16 steps), and where rows end within a tile and columns within 16 bytes."""
    kernel = next(kernel for kernel in GLUON if kernel.parted)
    for case, wide in (
        (Case(130, 141, 1000, alpha=0.5, beta=-2.0, b="columns", gap=3), "float32"), (Case(70, 264, 1000, d="c"), "bfloat16"),
        (Case(264, 9, 1000, "float16", a="columns", beta=0.0), "float16"),
    ):  # fmt: skip
        module = tilecast.emulated(str(path_of(kernel)), machine=kernel.machine, mode="random", seed=parts, sms=3)
        check(in_parts(module, parts), replace(case, seed=parts), wide)


def test_the_same_sums_give_the_same_bits_whatever_the_schedule_and_the_programs() -> None:
    torch = torch_or_skip()
    kernel = next(kernel for kernel in GLUON if kernel.parted)
    torch.manual_seed(3)
    a, b, c = (torch.randn(shape).bfloat16() for shape in ((140, 520), (520, 136), (140, 136)))
    found = []
    for sms, seed in ((1, 1), (3, 2), (8, 3)):
        module = tilecast.emulated(str(path_of(kernel)), machine=kernel.machine, mode="random", seed=seed, sms=sms)
        d = torch.full_like(c, float("nan"))
        in_parts(module, 4)(a, b, c, d, 1.0, 1.0)
        found.append(d)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


SPACE = [
    ("h200", replace(v, stages=min(v.stages, 3)), c)
    for c in ("bf16", "fp32")
    for v in (
        GemmVariant("gemm_hopper", 64, 256, 64, 2, 2, 2), GemmVariant("gemm_hopper", 128, 64, 64, 3, 1, 2),
        GemmVariant("gemm_hopper", 128, 256, 64, 2, 1, 1), GemmVariant("gemm_hopper", 128, 32, 32, 2, 2, 4),
        # Halves of a tile whose columns share one slot; turns, each with one slot, which is given back before the next is asked for.
        GemmVariant("gemm_hopper", 128, 256, 64, 2, 1, 1, 4), GemmVariant("gemm_hopper", 128, 128, 64, 2, 2, 2, 2),
        GemmVariant("gemm_hopper", 128, 128, 64, 2, 2, 6, 4), GemmVariant("gemm_hopper", 128, 128, 64, 2, 1, 3, 2),
        # Programs that meet: at every second k-step, at every tile; three products a k-step.
        GemmVariant("gemm_hopper", 128, 128, 64, 2, 2, 2, 2, in_step=2), GemmVariant("gemm_hopper", 128, 128, 64, 2, 1, 3, 2, in_step=64),
        GemmVariant("gemm_hopper", 192, 64, 64, 2, 2, 2, 2), GemmVariant("gemm_hopper", 192, 128, 64, 2, 2, 2, 4, in_step=1),
        # Two products a k-step that differ in their columns, of warpgroups that take turns and of joined ones; joined ones of one product.
        GemmVariant("gemm_hopper", 64, 192, 64, 2, 2, 2, 3), GemmVariant("gemm_hopper", 128, 96, 64, 2, 2, 4, 3),
        GemmVariant("gemm_hopper", 128, 192, 64, 2, 1, 1, 6, 0, joined=1), GemmVariant("gemm_hopper", 64, 96, 64, 3, 1, 3, 3, 0, joined=1),
        GemmVariant("gemm_hopper", 256, 64, 32, 2, 1, 1, 1, 0, joined=1), GemmVariant("gemm_hopper", 64, 64, 64, 4, 1, 2, 2, 0, joined=1),
    )
] + [
    ("b200", v, c)
    for c in ("bf16", "fp32")
    for v in (GemmVariant("gemm_blackwell", 128, 64, 64, 2, 1, 1, 2), GemmVariant("gemm_blackwell", 128, 64, 32, 3, 2, 3, 2))
]  # fmt: skip


@pytest.mark.parametrize(("machine", "variant", "c_dtype"), SPACE)
def test_other_knobs_compute_it_too(machine: str, variant: GemmVariant, c_dtype: str, tmp_path: Path) -> None:
    torch_or_skip()
    made = generate_gemm(Gemm(1024, 1024, 256, c_dtype=c_dtype), load_machine(machine), variant)
    ast.parse(made.source)
    assert format_source(made.source) == made.source
    file = tmp_path / "kernel.py"
    file.write_text(made.source, encoding="utf-8")
    module = tilecast.emulated(str(file), machine=machine, mode="random", seed=5, sms=2)
    check(module.launch, Case(330, 200, 136, d="c", seed=5), "bfloat16" if c_dtype == "bf16" else "float32")


@pytest.mark.parametrize("before", [0, 7, -(1 << 20)])
def test_programs_that_meet_leave_their_counters_as_they_were_whatever_is_in_them(before: int, tmp_path: Path) -> None:
    """Others may count there too, and more than ever come may be waited for: the product is right, and the wait has an end."""
    torch = torch_or_skip()
    from tilecast.kernels.gemm.launching import COUNTERS

    variant = GemmVariant("gemm_hopper", 128, 64, 64, 2, 2, 2, in_step=2)
    file = tmp_path / "kernel.py"
    file.write_text(generate_gemm(Gemm(1024, 1024, 256), load_machine("h200"), variant).source, encoding="utf-8")
    module = tilecast.emulated(str(file), machine="h200", mode="random", seed=7, sms=3)
    met = torch.full((COUNTERS,), before, dtype=torch.int32)
    check(lambda *given: module.launch(*given, met), Case(330, 200, 328, d="c", seed=7), "bfloat16")
    assert bool((met == before).all())


BROKEN = [
    ("gemm_hopper_turns", "        mbarrier.wait(turns.index(g), turn // 2 & 1)\n", ""),
    ("gemm_hopper_turns", "mbarrier.arrive(slots.empty.index(slot), count=1)", "pass"),
    ("gemm_hopper_turns", "                tma.store_wait(0)\n", ""),
    ("gemm_hopper_turns", "    if ADD_C == 1:\n        mbarrier.wait(slots.full.index(slot), lap & 1)\n    elif", "    if"),
    ("gemm_hopper_turns", "                mbarrier.wait(slots.written.index(slot), lap & 1)\n", ""),
    ("gemm_hopper_turns", "+ n % SLOTS, n // SLOTS", "+ n % SLOTS, n"),
    ("gemm_hopper_parts", "column, first + step, n % STAGES", "column, step, n % STAGES"),
    ("gemm_hopper_joined_128x192", "gl.where(turn == 0, gl.minimum(problem.steps, EARLY), 0)", "gl.minimum(problem.steps, EARLY)"),
    ("gemm_hopper_joined_128x192", "copy_tile(more_desc, [k, column + FIRST_N]", "copy_tile(more_desc, [k, column]"),
    ("gemm_hopper_parts", "in gl.static_range(1, MOST)", "in gl.static_range(1, 2)"),
    ("gemm_hopper_parts", "gl.where(part < parts, n, 0)", "n"),
    ("gemm_hopper_parts", "    if FOLLOWS:\n        gdc_wait()\n", ""),
    ("gemm_hopper_long", "        fence_async_shared()\n        mbarrier.arrive(slots", "        mbarrier.arrive(slots"),
    ("gemm_hopper_long", "sums = done(sums, 0)\n        mbarrier.arrive", "mbarrier.arrive"),
    ("gemm_blackwell", "        mbarrier.wait(sums.full.index(place), turn // ACCUMULATORS & 1)\n", ""),
    ("gemm_blackwell", "        mbarrier.wait(sums.empty.index(place), turn // ACCUMULATORS & 1 ^ 1)\n", ""),
    ("gemm_blackwell", "            tcgen05_commit(ring.empty.index(slot))\n", ""),
    ("gemm_blackwell", "                    mbarrier.wait(slots.empty.index(slot), lap & 1 ^ 1)\n                    copy_box", "                    copy_box"),
    ("gemm_hopper_turns", "                if part * PIECES + piece >= EARLY_C or turn > 0:\n", "                if True:\n"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "line", "instead"), BROKEN)
def test_the_emulator_sees_what_is_taken_away(module: str, line: str, instead: str, tmp_path: Path) -> None:
    torch_or_skip()
    kernel = next(k for k in SHIPPED if k.module == module)
    text = path_of(kernel).read_text(encoding="utf-8")
    assert line in text
    file = tmp_path / "kernel.py"
    file.write_text(text.replace(line, instead), encoding="utf-8")
    broken = tilecast.emulated(str(file), machine=kernel.machine, mode="random", seed=6, sms=1)
    with pytest.raises((EmulationError, AssertionError)):
        launch = in_parts(broken, 3) if kernel.parted else broken.launch
        check(launch, Case(400, 520, 328, seed=6), "bfloat16")


@pytest.mark.parametrize("k", [128, 512])
@pytest.mark.parametrize("kernel", WHOLE_K, ids=lambda kernel: kernel.module)
def test_the_executed_source_takes_as_long_as_the_pipeline_says(kernel: ShippedGemm, k: int) -> None:
    """Two routes to the cycles of a tile: the pipeline, and what the emulator saw the file do, at the same cost of a copy.

    They differ in who goes first at the port of shared memory (docs/emulator.md).  Where products on Blackwell take all of it and
    reading C and writing D is nearly all there is, that decides, and in wide tiles of float32 on Hopper, of a k for which they do not run: with
    products first the replay is where the pipeline is.  Where C and one step of A and B are asked for together, it is that copies move side by
    side in the pipeline, and one after the other in the replay.  Joined warpgroups have nothing beside an epilogue, of which the replay has some
    cycles more: much of two k-steps of their small tiles.  With one slot of C a tile is a chain of boxes, and the pipeline counts a round trip for
    each: the replay is shorter.
    """
    difference = replayed_and_piped(kernel, k)
    if kernel.variant.joined and k == 128:
        assert (-0.12 if kernel.variant.c_stages == 1 else 0.0) < difference < 0.27
        return
    if (
        kernel.family == "gemm_blackwell" or kernel.module in ("gemm_hopper_c32_wide", "gemm_hopper_c32_broad")
    ) and k == 128:
        assert difference < -0.1
        difference = replayed_and_piped(kernel, k, (PORT,))
    if kernel.module == "gemm_hopper_c32_long" and k == 128:
        assert difference < -0.08
        difference = replayed_and_piped(kernel, k, (COPY_ORDER,))
    assert abs(difference) < 0.09


def replayed_and_piped(kernel: ShippedGemm, k: int, without: tuple[str, ...] = ()) -> float:
    """Relative difference of the replay's cycles of a tile to the pipeline's."""
    torch = torch_or_skip()
    chip = load_machine(kernel.machine)
    # The replay knows the copy engine's own rate and the latency from L2 alone.
    rate, latency = chip["tma.bytes_per_clk"], chip["tma.latency_l2_cycles"]
    port = "l2.bytes_per_clk_per_sm_lockstep"
    plain = {"tma.latency_hbm_cycles": latency, port if chip.has(port) else "l2.bytes_per_clk_per_sm": rate}
    if chip.has("tma.store_bytes_per_clk"):
        plain["tma.store_bytes_per_clk"] = rate
    v, work = kernel.variant, replace(kernel.workload, k=k)
    session, module = load_any(str(path_of(kernel)), machine=chip, sms=1)
    ends = []
    for tiles in (4, 8):
        a, b = (
            torch.zeros(v.tile_m * tiles, k, dtype=torch.bfloat16),
            torch.zeros(k, v.tile_n, dtype=torch.bfloat16),
        )
        c = torch.zeros(v.tile_m * tiles, v.tile_n, dtype=torch.bfloat16 if work.d_dtype == "bf16" else torch.float32)
        session.traces.clear()
        module.launch(a, b, c, torch.empty_like(c))
        ends.append(replay(session.traces[-1], chip, without).cycles)
    found = stream(work, v, chip.with_facts(plain), 1700.0, memory=False)
    return float((ends[1] - ends[0]) / 4 / found.tile_cycles - 1)


# -- plain Triton, in its interpreter ----------------------------------------------------------------------------------


#: Cases of each portable kernel: of few rows it has a row of tiles, or some.
PORTABLE = {
    "gemm_triton": CASES,
    "gemm_triton_one": {f"one row: {name}": replace(case, m=case.m % 2 + 1) for name, case in CASES.items()},
    "gemm_triton_one_column": {
        f"one row by columns: {name}": replace(case, m=case.m % 2 + 1) for name, case in CASES.items()
    },
    "gemm_triton_few": {f"few rows: {name}": replace(case, m=case.m % 37 + 1) for name, case in CASES.items()},
}


def interpreted() -> None:
    quicken()
    for kernel in (k for k in SHIPPED if k.family == "gemm_triton"):
        module = module_of(path_of(kernel))
        for name, case in PORTABLE[kernel.module].items():
            # The interpreter's bf16 tl.dot gives wrong numbers.
            for wide in ("float16", "float32"):
                check(in_parts(module, 1), replace(case, dtype="float16"), wide, padded=False)
                check(in_parts(module, 3), replace(case, dtype="float16"), wide, padded=False)
            print(name, flush=True)
    copied()
    print("copies", flush=True)


def copied() -> None:
    """Copies are what was copied, and of what lies behind a row no more is written than its last 16 bytes have."""
    import torch

    module = module_of(KERNELS / "generated" / f"{COPY}.py")
    torch.manual_seed(0)
    odd, gaps = torch.randn(70, 131).bfloat16(), torch.randn(33, 300).half()[:, 1:282:2]
    for given in ((odd,), (odd, gaps), (gaps, odd[:, :128].t()), (odd.t(), odd[:1])):
        rooms = [torch.full((len(x), -(-x.shape[1] // 8) * 8 + 8), 7.0).to(x.dtype) for x in given]
        module.launch(*(y for x, room in zip(given, rooms, strict=True) for y in (x, room[:, : x.shape[1]])))
        for x, room in zip(given, rooms, strict=True):
            assert torch.equal(room[:, : x.shape[1]], x) and bool((room[:, -8:] == 7).all())


def test_the_portable_kernel_computes_it_in_the_interpreter() -> None:
    torch_or_skip()
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, __file__], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[:-1] == [*(name for kernel in PORTABLE.values() for name in kernel), "copies"]


# -- files and refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", SHIPPED, ids=lambda kernel: kernel.module)
def test_what_ships_says_what_it_is(kernel: ShippedGemm) -> None:
    header = read_header(path_of(kernel).read_text(encoding="utf-8"), path_of(kernel))
    assert header["pass"] == "gemm" and header["family"] == kernel.family
    assert Gemm(**header["workload"]) == kernel.workload
    assert writable(kernel.variant, kernel.workload, load_machine(kernel.machine)).legal


def test_ranges_of_k_leave_no_gap() -> None:
    rows = json.loads((KERNELS / "generated" / "gemm.json").read_text(encoding="utf-8"))
    for wide in (2, 4):
        own = [r for r in rows if r["family"] == "gemm_hopper" and r["c_bytes"] == wide and "use" not in r]
        ends = {
            1,
            1 << 30,
            *(r["k_min"] - 1 for r in own if "k_min" in r),
            *(r["k_max"] + 1 for r in own if "k_max" in r),
        }
        for k in ends | {end - 1 for end in ends if end > 1}:
            here = [r for r in own if "gpu" not in r and r.get("k_min", 1) <= k <= r.get("k_max", k)]
            assert len(here) == 1 or (len(here) > 1 and all("tile" in r for r in here)), k


@pytest.mark.parametrize(
    ("gemm", "machine", "variant", "words"),
    [
        (Gemm(512, 512, 512, dtype="fp8"), "h200", None, "bf16 and fp16, got dtype 'fp8'"),
        (Gemm(512, 512, 512, d_dtype="fp32"), "h200", GemmVariant(stages=3), "C and D of one dtype"),
        (Gemm(512, 512, 512), "b200", GemmVariant("gemm_blackwell", 128, 128, 64, 4, 1, 2, 2, cta_group=2), "forecast but not written"),
        (Gemm(512, 512, 512), "a100", GemmVariant(), "needs wgmma"),
        (Gemm(512, 512, 512), "h200", GemmVariant(tile_m=192, accumulators=1), "tiles of 192 rows are for warpgroups that take turns"),
        (Gemm(512, 512, 512), "b200", GemmVariant("gemm_blackwell", stages=2, c_parts=2, in_step=4), "do not meet, got in_step 4"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_says_why(gemm: Gemm, machine: str, variant: GemmVariant | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        generate_gemm(gemm, load_machine(machine), variant)


@pytest.mark.parametrize("machine", ["h200", "b200", "a100"])
def test_the_best_that_can_be_written_is_written(machine: str) -> None:
    chip = load_machine(machine)
    made = generate_gemm(Gemm(4096, 4096, 512), chip)
    assert made.variant.family == native_gemm_family(chip).name and made.variant.cta_group == 1
    ast.parse(made.source)


def test_a_launch_refuses_what_it_does_not_take() -> None:
    torch = torch_or_skip()
    launch = tilecast.emulated(str(KERNELS / "generated" / "gemm_hopper_turns.py"), machine="h200").launch
    a, b, c = (torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(3))
    for arguments, words in (
        ((a, b[:32], c, c), r"expected \(m, k\) and \(k, n\)"),
        ((a.float(), b, c, c), "a: expected bf16 or fp16"),
        ((a, b.half(), c, c), "b: expected"),
        ((a, b, c[:32], c), "c: expected"),
        ((a, b, c.float(), c.float()), "d: expected bf16, fp16"),
        ((a[:, ::2], b[::2], c, c), "a: expected rows or columns without gaps"),
        ((a.flatten()[4:-60].view(63, 64), b, c[:63], c[:63]), "start at 16 bytes"),
    ):
        with pytest.raises(ValueError, match=words):
            launch(*arguments)


if __name__ == "__main__":
    interpreted()
