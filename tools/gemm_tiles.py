"""Every kernel that may compute a drawn product of whole tiles, those that ship and tiles that do not, as A and B lie and from copies of them.

    python tools/gemm_tiles.py OUT.csv [--seeds 1,2,3 | --by-k 8 | --few 60] [--only 3:122,2:1] [--before FOLDER] [--rounds 7] [--within 1.25] [--share 0/1]

Problems are those of `gemm_drawn.py` that have more than 32 rows and columns, no C or D at odd steps, and at most --most microseconds at 600 TFLOP/s.
With --by-k those of `h200_gemm.py` (seed 0) and so many more of each k from 64 to 2048, drawn by a rule: whole tiles from a quarter of a wave to 32 waves,
A by rows, B by columns, a whole C, D new, given or in place, every fifth C in float32; with --few so many of a fiftieth of a wave to two waves, k from
64 to 4096, rows of A and B at 16 to 128 bytes, every second C in float32.  --before: kernel files of an earlier form by the same names,
timed beside those of now.  Each kernel runs alone from matrices made before: `copied` says which are copies whose rows start at whole lines.  Kernels whose
time by `product_us` is beyond --within times the least are left away, those that ship are not.  Beside them torch.addmm (for a float32 C the better
of two forms, as in gemm_drawn.py) and the whole call, copies included, as "tilecast.addmm".  Each is a CUDA graph of one call, L2 evicted before by
reading, in turns, medians.  `difference`: from torch's, over its largest value; one above 2 % is no result of the same product.
"""

from __future__ import annotations

import functools
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gemm_drawn import Drawn, calls_of, drawn, tensors_of
from h200_gemm import LARGE_K, SMALL_K
from measuring import csv_table, evicting, first_line, graph_of, listing, share_of, times_us

from tilecast.base.module_file import module_of
from tilecast.codegen.gemm.generate import generate_gemm
from tilecast.kernels.gemm import choice, layouts, operator, registry
from tilecast.kernels.gemm.launching import gemm_launcher, parted_launcher
from tilecast.model.gemm.variant import GemmVariant
from tilecast.model.gemm.workload import Gemm
from tilecast.model.machine.machine import load_machine

FIELDS = ("gpu", "date", "driver", "torch", "triton", "seed", "number", "m", "n", "k", "a", "b", "c", "dtype", "c_dtype", "place", "copied", "kernel", "form", "parts",
          "us", "low_us", "difference", "note")  # fmt: skip
#: Tiles of joined warpgroups: rows, columns, then of a 16-bit and of a float32 C the slots of A and B, those of C, and boxes of C.
JOINED = (
    (64, 32, (12, 1, 1), (12, 1, 1)), (64, 64, (12, 2, 1), (12, 2, 2)), (64, 96, (10, 3, 3), (10, 3, 3)), (64, 128, (8, 2, 2), (8, 4, 4)), (64, 192, (6, 3, 3), (6, 4, 6)),
    (128, 96, (6, 3, 3), (6, 3, 3)), (128, 128, (5, 2, 2), (5, 4, 4)), (128, 160, (5, 5, 5), (4, 5, 5)),
    (128, 192, (4, 3, 3), (4, 4, 6)), (128, 256, (4, 2, 4), (3, 5, 8)), (128, 320, (3, 3, 5), (3, 3, 10)), (256, 128, (3, 2, 2), (3, 2, 4)),
)  # fmt: skip
#: Tiles of joined warpgroups that share k: rows, columns, slots of A and B, of sums, boxes of sums.
SHARED = ((128, 128, 5, 4, 4), (64, 128, 8, 4, 4))
MOST_US = 150.0
#: k of the problems drawn by k.
KS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def few_waves(count: int) -> Iterator[tuple[int, int, Drawn]]:
    """(0, number, problem) of few tiles."""
    draw = random.Random(2)
    for i in range(count):
        tiles, shape = 3 * 88 ** draw.random(), 8 ** draw.uniform(-1, 1)
        m, n = (max(1, min(128, round((tiles * ratio) ** 0.5 * 2))) * 64 for ratio in (shape, 1 / shape))
        k = round(64 ** draw.uniform(0, 1)) * 64 + draw.choice((0, 0, 0, 32, 16, 8))
        c_dtype = "float32" if i % 2 else "bfloat16"
        place = draw.choice(("new", "given", "in place"))
        yield 0, i, Drawn("few waves", m, n, k, "bfloat16", c_dtype, "rows", "columns", "rows", place, 1.0, 1.0)


def by_k(each: int) -> Iterator[tuple[int, int, Drawn]]:
    """(seed, number, problem): those of the list that has to be reached, then ``each`` of each k."""

    def of(m: int, n: int, k: int, wide: str, place: str) -> Drawn:
        c_dtype = "float32" if wide == "fp32" else "bfloat16"
        return Drawn("by k", m, n, k, "bfloat16", c_dtype, "rows", "columns", "rows", place, 1.0, 1.0)

    for i, (m, n, k, wide, in_place) in enumerate((*SMALL_K, *LARGE_K)):
        yield 0, i, of(m, n, k, wide, "in place" if in_place else "given")
    draw = random.Random(1)
    for k in KS:
        for i in range(each):
            tiles, shape = 33 * 128 ** ((i + draw.random()) / each), 16 ** draw.uniform(-1, 1)
            m, n = (max(1, min(128, round((tiles * ratio) ** 0.5))) for ratio in (shape, 1 / shape))
            less = draw.choice((0, 0, 64))
            yield (
                k,
                i,
                of(
                    m * 128 - less,
                    n * 128,
                    k,
                    "fp32" if i % 5 == 4 else "bf16",
                    draw.choice(("new", "given", "in place")),
                ),
            )


def joined(rows: int, columns: int, stages: int, c_stages: int, c_parts: int) -> GemmVariant:
    """A kernel of joined warpgroups: its tile, slots of A and B and of C or sums, boxes of these."""
    return GemmVariant("gemm_hopper", rows, columns, 64, stages, 1, c_stages, c_parts, 0, joined=1)


def variants(wide: bool) -> dict[str, GemmVariant]:
    """Tiles that do not ship, by name, for a C of float32 (``wide``) or 16 bits."""
    return {f"{rows} x {columns}, joined": joined(rows, columns, *forms[wide]) for rows, columns, *forms in JOINED}


def shared() -> dict[str, GemmVariant]:
    """Those that share k and do not ship."""
    return {f"{rows} x {columns}, joined, parts": joined(rows, columns, *form) for rows, columns, *form in SHARED}


def file_of(variant: GemmVariant, c_dtype: str, parted: bool, folder: Path) -> Path:
    """Where the kernel of a variant lies."""
    return folder / f"tile_{variant.tile_m}_{variant.tile_n}_{c_dtype}{'_parts' * parted}.py"


def write_all(folder: Path) -> None:
    """The kernels of all tiles that do not ship."""
    wanted = [(v, c_dtype, False) for c_dtype in ("bf16", "fp32") for v in variants(c_dtype == "fp32").values()]
    for variant, c_dtype, parted in (*wanted, *((v, "fp32", True) for v in shared().values())):
        problem = Gemm(8192, 8192, 512, c_dtype=c_dtype, d_dtype=c_dtype)
        made = generate_gemm(problem, load_machine("h200-sxm"), variant, parted=parted)
        file_of(variant, c_dtype, parted, folder).write_text(made.source, encoding="utf-8")


def runs_by_tiles(problem: Drawn) -> bool:
    """Whether the operator has a choice of tiles for it."""
    odd = problem.n * (4 if problem.c_dtype == "float32" else 2) % 16
    return min(problem.m, problem.n) > 32 and not odd and problem.c not in ("columns", "column")


def kernels_of(
    problem: Drawn, a: Any, b: Any, within: float, rows: tuple[int, ...], folder: Path, earlier: Path | None = None
) -> Iterator[tuple[str, str, str, int, Any, tuple[bool, bool]]]:
    """(copied, kernel, form, parts, launch, which are copied) of what is timed."""
    m, n, k = problem.m, problem.n, problem.k
    c_bytes, wide = (4, "fp32") if problem.c_dtype == "float32" else (2, "bf16")
    entries = registry.together((9, 0), c_bytes, k, gpu="NVIDIA H200")
    sums = registry.sharing((9, 0), registry.PARTS)
    assert sums is not None
    ship = {e.tile for e in entries if e.use == registry.SMALL and e.accumulators == 1}
    more = {
        name: v
        for name, v in variants(c_bytes == 4).items()
        if v.tile_m in rows and (v.tile_m, v.tile_n) not in ship and file_of(v, wide, False, folder).is_file()
    }
    lies = layouts.starts(a), layouts.starts(b)
    forms = [(e.module, 1, e, t) for e, t in zip(entries, choice.tiles_of(entries), strict=True)]
    forms += [(name, 1, v, choice.Tiles(v.tile_m, v.tile_n, v.accumulators == 2)) for name, v in more.items()]
    of_parts = [(sums.module, sums, choice.tiles_of([sums])[0])]
    of_parts += [(name, v, choice.Tiles(v.tile_m, v.tile_n, False)) for name, v in shared().items()
                 if v.tile_m in rows and file_of(v, "fp32", True, folder).is_file()]  # fmt: skip
    forms += [(name, parts, what, tiles) for name, what, tiles in of_parts for parts in (2, 3, 4, 6, 8)]
    found = []
    for copies in itertools.product(*((False, True) if its[1] > its[0] else (False,) for its in lies)):
        starts = tuple(its[copied] for its, copied in zip(lies, copies, strict=True))
        if 0 in starts:
            continue
        elements = copies[0] * m * k + copies[1] * n * k
        before = choice._COPY_US + elements * choice._ELEMENT_US if elements else 0.0
        for name, parts, what, tiles in forms:
            us = before + choice.product_us(tiles, m, n, k, starts, c_bytes, 132, parts)  # type: ignore[arg-type]
            found.append((us, copies, name, parts, what))
    least = min(us for us, *_ in found)
    for us, copies, name, parts, what in found:
        ships = not isinstance(what, GemmVariant) and parts == 1
        if us + 6.7 > (least + 6.7) * (within + 0.25 * ships):
            continue
        launcher = gemm_launcher if parts == 1 else parted_launcher
        if isinstance(what, GemmVariant):
            launch = launcher(_module(file_of(what, wide if parts == 1 else "fp32", parts > 1, folder)))
        else:
            launch = operator._launcher(what, launcher)
        which = "".join(x for x, copied in zip("AB", copies, strict=True) if copied)
        yield which, name, "now", parts, launch, copies
        if earlier is not None and (file := earlier / f"{name}.py").is_file():
            yield which, name, "before", parts, launcher(_module(file)), copies


@functools.cache
def _module(file: Path) -> Any:
    return module_of(file)


def measure(
    problem: Drawn,
    rounds: int,
    within: float,
    rows: tuple[int, ...],
    evict: Any,
    folder: Path,
    earlier: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Rows of one problem, without what is the same in all."""
    import torch

    torch.manual_seed(0)
    c, a, b, out = tensors = tensors_of(problem)
    calls, notes = calls_of(problem, tensors), {}
    added = (c if c.shape == (problem.m, problem.n) else c.expand(problem.m, problem.n)) if problem.beta else None
    d = torch.empty((problem.m, problem.n), dtype=c.dtype, device=c.device) if out is not c else c
    kept = c.clone()
    runs: dict[tuple[str, str, str, int], Callable[[], Any]] = {("", "tilecast.addmm", "now", 1): calls["us"]}
    runs |= {("", "torch.addmm", "", i): call for i, (name, call) in enumerate(calls.items()) if name != "us"}
    turned = tuple(0 < x.stride(0) < x.stride(1) for x in (a, b))
    for copied, name, form, parts, launch, copies in kernels_of(problem, a, b, within, rows, folder, earlier):
        given = layouts.copied((a, b), copies, turned, 0)

        def run(launch: Any = launch, given: Any = given, parts: int = parts) -> Any:
            more = {"parts": parts} if parts > 1 else {}
            launch(*given, added, d, problem.alpha, problem.beta, **more)
            return d

        runs[copied, name, form, parts] = run
    graphs, differs, want = {}, {}, None
    for key, call in sorted(runs.items(), key=lambda item: item[0][1] != "torch.addmm"):
        try:
            c.copy_(kept)
            got = call().double()
            torch.cuda.synchronize()
            if want is None:
                want = got
            differs[key] = float((got - want).abs().max() / want.abs().max().clamp(min=1e-9))
            graphs[key] = graph_of(call)
        except Exception as error:  # one kernel that fails must not end the run
            notes[key] = f"{type(error).__name__}: {first_line(error)}"
    found: dict[Any, list[float]] = times_us(graphs, rounds, evict, "reading")  # type: ignore[arg-type,assignment]
    same = {name: getattr(problem, name) for name in ("m", "n", "k", "a", "b", "c", "dtype", "place")}
    same["c_dtype"] = "fp32" if problem.c_dtype == "float32" else "bf16"
    for key in runs:
        copied, name, form, parts = key
        us = {"difference": f"{differs[key]:.1e}"} if key in differs else {}
        if key in found:
            us |= {"us": f"{statistics.median(found[key]):.2f}", "low_us": f"{min(found[key]):.2f}"}
        shown = 1 if name == "torch.addmm" else parts
        yield {**same, "copied": copied, "kernel": name, "form": form, "parts": shown, **us, "note": notes.get(key, "")}


def main() -> None:
    parser = listing(__doc__, 7)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--by-k", type=int, help="instead: so many of each k, and those of h200_gemm.py")
    parser.add_argument("--few", type=int, help="instead: so many of few tiles")
    parser.add_argument("--before", type=Path, help="kernel files of an earlier form")
    parser.add_argument("--only", help="SEED:NUMBER of problems, with commas between (default: all)")
    parser.add_argument("--within", type=float, default=1.25)
    parser.add_argument("--most", type=float, default=MOST_US)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument(
        "--folder",
        help="where kernels that do not ship lie, those that are there alone (default: all are written for the run)",
    )
    parser.add_argument("--rows", default="64,128,256", help="rows of tiles that do not ship")
    given = parser.parse_args()
    import torch

    begin, evict = time.monotonic(), evicting()
    rows = tuple(map(int, given.rows.split(",")))
    problems = [(seed, i, p) for seed in map(int, given.seeds.split(",")) for i, p in enumerate(drawn(seed, 160))]
    if given.by_k:
        problems = list(by_k(given.by_k))
    if given.few:
        problems = list(few_waves(given.few))
    if given.only:
        wanted = given.only.split(",")
        problems = sorted((p for p in problems if f"{p[0]}:{p[1]}" in wanted), key=lambda p: wanted.index(f"{p[0]}:{p[1]}"))  # fmt: skip
    problems = [p for p in problems if runs_by_tiles(p[2]) and p[2].flop / 6e8 < given.most]
    with tempfile.TemporaryDirectory() as made, csv_table(given.out, FIELDS) as add:
        folder = given.folder or made
        if not given.folder:
            write_all(Path(made))
        for _, (seed, number, problem) in share_of(problems, given.share):
            if time.monotonic() - begin > given.seconds:
                print("out of time before", seed, number)
                break
            try:
                for row in measure(problem, given.rounds, given.within, rows, evict, Path(folder), given.before):
                    add({"seed": seed, "number": number, **row})
            except Exception as error:
                print(seed, number, type(error).__name__, first_line(error), flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
