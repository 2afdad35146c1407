"""The `triton_bwd` and `triton_few_bwd` families: gradients in Triton's interpreter against float64, and what the compiler makes of the first's files.

TRITON_INTERPRET counts when triton is imported, so the numerics run in a process of their own: this file as a script.  They
use fp16: the interpreter's bf16 tl.dot gives wrong numbers.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.interpreter import environment, quicken
from support.whole import sampled

from tilecast.base.module_file import module_of
from tilecast.codegen.backward import generate_backward
from tilecast.codegen.compiler.compile import CompileError, compile_kernel
from tilecast.model.backward import TRITON_BACKWARD, parse_backward, writable
from tilecast.model.families import find_family, parse_variant
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.variants.fa2 import LOADS
from tilecast.model.kernel.variants.fa2_backward import Fa2BackwardVariant
from tilecast.model.kernel.variants.hopper.few_backward import FewBackwardVariant
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

#: Error allowed beside twice that of the same attention in PyTorch's fp16 operations: steps of an fp16 near the largest.
STEP = 2.0**-10
TILES = Fa2BackwardVariant(dkv_tile_m=16, dkv_tile_n=32, dq_tile_m=32, dq_tile_n=16)


def work(dims: tuple[int, int], mask: str, **more: Any) -> Workload:
    return Workload(
        head_dim_qk=dims[0], head_dim_v=dims[1], mask=mask, window=(128, 0) if mask == "window" else None, **more
    )


def source(dims: tuple[int, int], mask: str, loads: str = "pointers", apart: bool = False) -> str:
    """Text of a generated file with small tiles, so that small problems have many blocks."""
    from tilecast.codegen.portable.backward import TEMPLATE, context
    from tilecast.codegen.render import render
    from tilecast.model.kernel.header import header_text

    kernel = context(replace(TILES, dkv_loads=loads, dq_loads=loads, dkv_apart=apart), work(dims, mask))
    return render(TEMPLATE, {"k": kernel, "header": header_text({"family": "triton_bwd", "mask": mask})})


#: Such that has all keys and walks over rows.
WALKS = FewBackwardVariant(rows=352, warps=4, stages=1, step=64)


def source_of_few(dims: tuple[int, int], variant: FewBackwardVariant | None = None) -> str:
    """Text of a generated file for few rows, without the two instructions that the interpreter does not know."""
    from tilecast.codegen.portable.backward_few import TEMPLATE, context
    from tilecast.codegen.render import render
    from tilecast.model.kernel.header import header_text

    kernel = context(variant or FewBackwardVariant(), work(dims, "window", heads_q=4, heads_kv=1, seqlen_q=16))
    text = render(TEMPLATE, {"k": kernel, "header": header_text({"family": "triton_few_bwd"})})
    names = "gdc_launch_dependents", "gdc_wait"
    nothing = "".join(f"@triton.jit\ndef {name}():\n    pass\n\n\n" for name in names)
    return text.replace(f"from triton.language.extra.cuda import {', '.join(names)}\n", nothing)


# --- numerics: the cases, what runs them in the interpreter, and what must hold -----------------------------------------


@dataclass(frozen=True)
class Case:
    """One call; `heads` are (query heads, key/value heads), `window` is (left, right), `lse`: whether lse has a gradient."""

    dims: tuple[int, int]
    mask: str
    seqlens: tuple[int, int]
    heads: tuple[int, int] = (1, 1)
    window: tuple[int, int] = (-1, -1)
    loads: str = "pointers"
    apart: bool = False
    scale: float | None = None
    batch: int = 1
    lse: bool = True
    #: Of the query heads that share a key/value head, or of the keys where rows are few, what the rule would make of them on a GPU.
    parts: int = 1
    #: Whether the kernel is the one for few rows, and such that walks over rows of few keys.
    few: bool = False
    walks: bool = False

    @property
    def name(self) -> str:
        window = f"-w{self.window[0]},{self.window[1]}" if self.mask == "window" else ""
        scale = "" if self.scale is None else f"-scale{self.scale:g}"
        apart = "-apart" if self.apart else "-walks" if self.walks else "-few" if self.few else ""
        parts = f"-p{self.parts}" if self.parts > 1 else ""
        return (
            f"{self.dims[0]}x{self.dims[1]}-{self.mask}{window}-{self.seqlens[0]}x{self.seqlens[1]}"
            f"-h{self.heads[0]}:{self.heads[1]}{parts}-{self.loads}{apart}{scale}{'' if self.lse else '-out'}"
        )

    @property
    def file(self) -> str:
        if self.walks:
            return "walks.py"
        if self.few:
            return f"few_{64 if self.dims[0] <= 64 else 128 if self.dims[0] <= 128 else self.dims[0]}_{max(64, self.dims[1])}.py"
        return f"d{self.dims[0]}_{self.dims[1]}_{self.mask}_{self.loads}{'_apart' if self.apart else ''}.py"

    @property
    def factor(self) -> float:
        return 1.0 / math.sqrt(self.dims[0]) if self.scale is None else self.scale


def cases() -> list[Case]:
    found = []
    for mask in ("none", "causal", "window"):
        window = (20, 5) if mask == "window" else (-1, -1)
        for loads in LOADS:
            for dims in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
                found.append(Case(dims, mask, (33, 97), window=window, loads=loads))
            for seqlens in ((1, 65), (7, 7), (65, 65), (97, 33)):
                found.append(Case((64, 64), mask, seqlens, window=window, loads=loads))
        for heads in ((2, 2), (4, 1), (6, 2)):
            found.append(Case((64, 64), mask, (20, 37), heads=heads, window=window, batch=2))
        for heads, parts in (((4, 1), 4), ((10, 2), 3)):
            found.append(Case((64, 64), mask, (20, 37), heads=heads, window=window, batch=2, parts=parts))
        found.append(Case((192, 128), mask, (40, 77), heads=(3, 1), window=window, apart=mask == "none", parts=2))
        for dims in ((64, 64), (40, 40), (96, 96), (128, 128), (192, 128), (256, 256)):
            found.append(Case(dims, mask, (9, 97), heads=(6, 2), window=window, few=True, parts=2))
        for seqlens, heads in (
            ((1, 65), (8, 2)),
            ((7, 7), (3, 1)),
            ((33, 97), (1, 1)),
            ((20, 9), (3, 1)),
            ((64, 300), (1, 1)),
        ):
            found.append(
                Case((64, 64), mask, seqlens, heads=heads, window=window, few=True, parts=-(-seqlens[1] // 64), batch=2)
            )
        found += [
            Case((64, 64), mask, (4, 70), window=window, few=True, lse=False),
            Case((64, 64), mask, (33, 61), heads=(6, 2), window=window, few=True, walks=True, batch=2),
            Case((40, 40), mask, (19, 19), heads=(7, 1), window=window, few=True, walks=True),
            Case((64, 64), mask, (50, 9), heads=(3, 1), window=window, few=True, walks=True, lse=False),
            Case((64, 64), mask, (4, 70), window=window, few=True, scale=1e-44),
        ]
        found.append(Case((64, 64), mask, (40, 37), heads=(2, 1), window=window, lse=False))
        found.append(Case((192, 128), mask, (40, 77), heads=(2, 1), window=window, apart=True))
        found += [Case((64, 64), mask, (20, 37), window=window, scale=scale) for scale in (0.3, 1e-44)]
    for window in ((0, 0), (1, 0), (0, 40), (-1, 3), (17, -1), (-1, -1), (2**31 - 1, 2**31 - 1), (500, 0)):
        found += [Case((64, 64), "window", seqlens, window=window) for seqlens in ((33, 100), (100, 33))]
    return sampled(found)


def visible(case: Case) -> Any:
    """Which keys each query sees, (seqlen_q, seqlen_k) of bool, from the definition."""
    import torch

    rows, keys = case.seqlens
    distance = torch.arange(keys)[None, :] - (torch.arange(rows)[:, None] + keys - rows)
    left, right = {"none": (-1, -1), "causal": (-1, 0), "window": case.window}[case.mask]
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    return seen


def padded(values: Any) -> tuple[Any, Any]:
    """(storage, view): the values as (batch, heads, length, width) with heads innermost in memory, NaN all around them."""
    import torch

    batch, heads, length, width = values.shape
    storage = torch.full((batch + 1, length + 40, heads, width + 8), math.nan, dtype=torch.float16)
    view = storage[:batch, :length, :, :width].transpose(1, 2)
    view.copy_(values)
    return storage, view


def attention(case: Case, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """(out, lse) in PyTorch operations at the dtype of q; empty rows give 0 and an lse without gradient."""
    import torch

    group = case.heads[0] // case.heads[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    seen = visible(case)
    empty = ~seen.any(1, keepdim=True)
    scores = (case.factor * (q @ k.transpose(-1, -2))).masked_fill(~(seen | empty), -math.inf)
    out = torch.softmax(scores, -1).masked_fill(empty, 0.0) @ v
    return out, torch.logsumexp(scores, -1).masked_fill(empty[:, 0], -math.inf)


def gradients(case: Case, dtype: Any, q: Any, k: Any, v: Any, dout: Any, dlse: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """(out, lse, (dq, dk, dv)) of attention in PyTorch operations at a dtype."""
    import torch

    inputs = [t.to(dtype).requires_grad_() for t in (q, k, v)]
    out, lse = attention(case, *inputs)
    total = (out * dout.to(dtype)).sum()
    if case.lse:
        some = lse > -math.inf
        total = total + (lse[some] * dlse[some].to(dtype)).sum()
    return out.detach(), lse.detach(), torch.autograd.grad(total, inputs)


def numbers(case: Case, folder: Path) -> dict[str, Any]:
    """What a case gave: errors against float64 and PyTorch's own, and whether everything outside survived."""
    import torch

    module = module_of(folder / case.file)
    if case.few and not case.walks:

        def sums(q: Any, k: Any, *rest: Any) -> tuple[Any]:
            shape = case.batch * case.heads[1], case.parts, case.heads[0] // case.heads[1] * case.seqlens[0]
            columns = module.COLUMNS.value  # type: ignore[attr-defined]
            return (torch.full((*shape, columns), math.nan) if case.parts > 1 else None,)

        module.workspaces = sums  # type: ignore[attr-defined]
    elif case.parts > 1:

        def workspaces(q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, ...]:
            return tuple(x.new_full((case.batch, case.heads[1] * case.parts, *x.shape[2:]), math.nan) for x in (k, v))

        module.workspaces = workspaces  # type: ignore[attr-defined]
    draw = torch.Generator().manual_seed(1)

    def normal(heads: int, length: int, width: int) -> Any:
        return torch.randn(case.batch, heads, length, width, generator=draw).half()

    (rows, keys), (heads, kv), (qk, width) = case.seqlens, case.heads, case.dims
    q, k, v, dout = normal(heads, rows, qk), normal(kv, keys, qk), normal(kv, keys, width), normal(heads, rows, width)
    dlse = torch.randn(case.batch, heads, rows, generator=draw)
    out, lse, exact = gradients(case, torch.float64, q, k, v, dout, dlse)
    peer = gradients(case, torch.float16, q, k, v, dout, dlse)[2]
    views = [padded(t)[1] for t in (q, k, v, out.half())]
    frames = [padded(torch.full_like(t, math.nan)) for t in (q, k, v)]
    again = [torch.full_like(t, 7.0) for t in (q, k, v)]
    given = lse.float().contiguous(), padded(dout)[1]
    limits = (-1, 0) if case.few and case.mask == "causal" else case.window  # others' kernels know their mask
    more = (case.factor, *limits, dlse if case.lse else None)
    module.launch(*views, *given, *[view for _, view in frames], *more)
    # The interpreter runs the same operations in any case; other strides of the results are worth one length.
    repeated = case.seqlens == (33, 97)
    if repeated:
        module.launch(*views, *given, *again, *more)
    seen = visible(case)
    found = [view for _, view in frames]
    outside = []
    for storage, view in frames:
        view_of = torch.zeros_like(storage, dtype=torch.bool)
        batch, count, length, columns = view.shape
        view_of[:batch, :length, :count, :columns] = True
        outside.append(bool(storage[~view_of].isnan().all()))
    return {
        "errors": [(a.double() - b).abs().max().item() for a, b in zip(found, exact, strict=True)],
        "peer_errors": [(a.double() - b).abs().max().item() for a, b in zip(peer, exact, strict=True)],
        "largest": [b.abs().max().item() for b in exact],
        "empty_rows": not found[0][:, :, ~seen.any(1)].any(),
        "unseen_keys": not any(t[:, :, ~seen.any(0)].any() for t in found[1:]),
        "repeats": not repeated or all(torch.equal(a, b) for a, b in zip(found, again, strict=True)),
        "untouched": all(outside),
    }


def isolation(mask: str, folder: Path) -> dict[str, Any]:
    """Which rows a bad gradient row and a bad key change, against which may."""
    import torch

    case = Case((64, 64), mask, (50, 70), window=(20, 5) if mask == "window" else (-1, -1))
    module = module_of(folder / case.file)
    draw = torch.Generator().manual_seed(2)
    q, dout = (torch.randn(1, 2, 50, 64, generator=draw).half() for _ in range(2))
    k, v = (torch.randn(1, 2, 70, 64, generator=draw).half() for _ in range(2))
    case = replace(case, heads=(2, 2))
    out, lse, _ = gradients(case, torch.float64, q, k, v, dout, torch.zeros(1, 2, 50))

    def run(dout: Any) -> list[Any]:
        found = [torch.empty_like(t) for t in (q, k, v)]
        module.launch(q, k, v, out.half(), lse.float(), dout, *found, case.factor, *case.window)
        return found

    clean, bad = run(dout), dout.clone()
    bad[0, 1, 13] = math.nan
    dirty = run(bad)
    same = [(a == b).all(-1) for a, b in zip(clean, dirty, strict=True)]
    return {
        "dq of that row alone": (~same[0]).nonzero().tolist() == [[0, 1, 13]],
        "other head": all(bool(x[0, 0].all()) for x in same),
        # Rows of a tile share it with a masked row's zero times NaN: keys beyond the tile's reach stay.
        "far keys": mask == "none" or all(bool(x[0, 1, 64:].all()) for x in same[1:]),
    }


def main(folder: Path) -> None:
    """Run every case and write what came out as JSON."""
    quicken()
    todo: dict[str, Callable[[], dict[str, Any]]] = {case.name: partial(numbers, case, folder) for case in cases()}
    for mask in ("none", "causal", "window"):
        todo[f"isolation-{mask}"] = partial(isolation, mask, folder)
    results: dict[str, Any] = {}
    for name, run_case in todo.items():
        try:
            results[name] = run_case()
        except Exception:
            results[name] = {"exception": traceback.format_exc()}
    (folder / "results.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every case gave in the interpreter."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("generated")
    for case in cases():
        path = folder / case.file
        if not path.exists():
            few = tuple(int(n) for n in path.stem.split("_")[1:]) if case.few and not case.walks else ()
            path.write_text(
                source_of_few((64, 64), WALKS)
                if case.walks
                else source_of_few(few)
                if len(few) == 2
                else source(case.dims, case.mask, case.loads, case.apart)
            )
    subprocess.run([sys.executable, "-W", "ignore", __file__, str(folder)], env=environment(), check=True)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_gradients_in_the_interpreter(case: Case, results: dict[str, Any]) -> None:
    got = results[case.name]
    assert "exception" not in got, got["exception"]
    for name, error, peer, largest in zip(
        ("dq", "dk", "dv"), got["errors"], got["peer_errors"], got["largest"], strict=True
    ):
        assert error <= 2 * peer + STEP * largest, f"{name}: {error:.3g}, PyTorch operations {peer:.3g}"
    assert got["empty_rows"], "a row without visible keys must have a gradient of exactly zero"
    assert got["unseen_keys"], "a key that no query sees must have gradients of exactly zero"
    assert got["repeats"], "the same call in other memory must give the same bits"
    assert got["untouched"], "wrote outside dq, dk or dv"


@pytest.mark.parametrize("mask", ["none", "causal", "window"])
def test_nan_stays_in_the_rows_that_see_it(mask: str, results: dict[str, Any]) -> None:
    got = results[f"isolation-{mask}"]
    assert "exception" not in got, got["exception"]
    assert all(got.values()), got


# --- launches -----------------------------------------------------------------------------------------------------------


REFUSED: dict[str, dict[str, Any]] = {
    "scale: expected a number above 0": {"scale": 0.0},
    "window: this kernel has no window, got (3, 0)": {"window_left": 3, "window_right": 0},
    "dout: expected ((1, 2, 8, 64), 'torch.float16', D, [0, 0, 0], (1,), 0), got ((1, 2, 7, 64)": {"dout": (1, 2, 7, 64)},
    "dk: expected ((1, 2, 8, 64), 'torch.float16', D, [0, 0, 0], (1,), 0), got ((1, 1, 8, 64)": {"dk": (1, 1, 8, 64)},
    "lse: expected contiguous float32 (1, 2, 8), got torch.float32 (1, 2, 9) on cpu": {"lse": (1, 2, 9)},
    "dlse: expected contiguous float32 (1, 2, 8), got torch.float32 (1, 2, 9) on cpu": {"dlse": (1, 2, 9)},
    "terms: expected contiguous float32 (1, 2, 2, 64), got torch.float32 (1, 2, 2, 8) on cpu": {"terms": (1, 2, 2, 8)},
}  # fmt: skip


def test_few_rows_are_told_from_many_and_need_no_terms(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from tilecast.kernels.launching import backward_launcher, terms_shape

    path = tmp_path / "few.py"
    path.write_text(source_of_few((64, 64)))
    module = module_of(path)
    q, k = torch.zeros(1, 6, 11, 64, dtype=torch.float16), torch.zeros(1, 1, 8, 64, dtype=torch.float16)
    assert terms_shape(module, q) == (0,)
    for launch in (module.launch, backward_launcher(module)):
        with pytest.raises(ValueError, match="q: expected up to 64 rows of a key/value head, got 66"):
            launch(q, k, k, q, torch.zeros(1, 6, 11), q, q, k, k, 0.125)
        with pytest.raises(ValueError, match=re.escape("window: expected limits of at least -1 (none), got (-2, 0)")):
            launch(q, k, k, q, torch.zeros(1, 6, 11), q, q, k, k, 0.125, -2, 0)
    path = tmp_path / "walks.py"
    path.write_text(source_of_few((64, 64), WALKS))
    long = torch.zeros(1, 1, 65, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="k: expected up to 64 keys, got 65"):
        module_of(path).launch(q, long, long, q, torch.zeros(1, 6, 11), q, q, long, long, 0.125)


@pytest.mark.parametrize(
    ("variant", "problem", "machine", "text"),
    [
        (FewBackwardVariant(), Workload(1, 8, 8, 65, 512), "h200-sxm", "query rows of a key/value head needs 65 rows but the limit is 64"),
        (FewBackwardVariant(), Workload(1, 8, 8, 8, 512), "a100", "is for Hopper's matrix unit"),
        (FewBackwardVariant(warps=6), Workload(1, 8, 8, 8, 512), "h200-sxm", "warps must be 4 or 8, got 6"),
        (FewBackwardVariant(stages=1), Workload(1, 8, 8, 8, 512), "h200-sxm", "stages must be 2 or more"),
        (FewBackwardVariant(tile_n=96), Workload(1, 8, 8, 8, 512), "h200-sxm", "tile_n must be a power of two of at least 64"),
        (FewBackwardVariant(stages=3), Workload(1, 8, 8, 64, 512, 256, 256), "h200-sxm", "shared memory"),
        (FewBackwardVariant(tile_n=128, warps=4), Workload(1, 8, 8, 64, 512), "h200-sxm", "registers"),
        (WALKS, Workload(1, 8, 1, 44, 65), "h200-sxm", "keys of a program that walks over rows needs 65 keys but the limit is 64"),
        (replace(WALKS, step=48), Workload(1, 8, 1, 40, 60), "h200-sxm", "step must be a power of two of at least 64, got 48"),
    ],
)  # fmt: skip
def test_few_rows_that_cannot_be_written_name_the_reason(variant, problem: Workload, machine: str, text: str) -> None:
    verdict = writable(variant, problem, load_machine(machine))
    assert not verdict.legal and text in verdict.sentence()


@pytest.mark.parametrize("sentence", REFUSED)
def test_launch_refuses_in_one_sentence(sentence: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from tilecast.kernels.launching import backward_launcher

    path = tmp_path / "kernel.py"
    path.write_text(source((64, 64), "causal"))
    names = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
    call: dict[str, Any] = {name: torch.zeros(1, 2, 8, 64, dtype=torch.float16) for name in names}
    call |= {"lse": torch.zeros(1, 2, 8), "scale": 0.125}
    for name, change in REFUSED[sentence].items():
        if isinstance(change, tuple):
            change = torch.zeros(change, dtype=call[name].dtype if name in call else torch.float32)
        call[name] = change
    told = re.escape(sentence.replace("D,", "device(type='cpu'),"))
    with pytest.raises(ValueError, match=told):
        module_of(path).launch(**call)
    with pytest.raises(ValueError, match=told):
        backward_launcher(module_of(path))(**call)


def test_the_launcher_plans_a_shape_once_and_gives_each_launch_its_own_tensors() -> None:
    torch = pytest.importorskip("torch")
    from types import SimpleNamespace

    from tilecast.kernels.launching import backward_launcher

    runs: list[tuple[Any, ...]] = []
    planned = []

    class Described:
        def __init__(self, base: Any) -> None:
            self.base, self.box = base, 4

    class Kernel:
        def warmup(self, *_: Any, **__: Any) -> None:
            return None

        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments: runs.append(arguments)

    def plan(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dlse: Any, dq: Any, dk: Any, dv: Any, terms: Any,
             dk_parts: Any, dv_parts: Any, left: int, right: int) -> Any:  # fmt: skip
        planned.append((left, right))
        described = Described(q)
        return (Kernel(), (1,), (out, dout, lse, lse if dlse is None else dlse, 5)), (
            Kernel(),
            (1,),
            (described, k, dk, terms, 7),
        )

    module = SimpleNamespace(
        plan=plan, OPTIONS=({}, {}), PADDED=SimpleNamespace(value=64), workspaces=lambda *given: (None, None)
    )
    launch = backward_launcher(module)

    def tensors() -> list[Any]:
        return (
            [torch.zeros(1, 2, 8, 64) for _ in range(4)]
            + [torch.zeros(1, 2, 8)]
            + [torch.zeros(1, 2, 8, 64) for _ in range(4)]
        )

    for _ in range(2):
        given = tensors()
        given[5] = given[3]  # the gradient may be the output itself
        runs.clear()
        launch(*given, 0.5)
        first, second = runs
        assert first[0] is given[3] and first[1] is given[5] and first[2] is given[4] and first[3] is given[4]
        assert first[4:] == (5,) and second[4:] == (7, 0.5 * math.log2(math.e), 0.5)
        assert second[0].base is given[0] and second[0].box == 4 and second[2] is given[7]
        assert second[3].shape == (1, 2, 2, 64)
    assert planned == [(-1, -1)]
    launch(*tensors(), 0.5, 3, 0)
    launch(*tensors(), 0.5, -1, -1, torch.ones(1, 2, 8))
    assert planned == [(-1, -1), (3, 0), (-1, -1)] and runs[-2][3][0, 0, 0] == 1


# --- variants -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", ["a100", "h200-sxm", "b200"])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_what_is_chosen_can_be_written_and_is_in_the_space(machine: str, dims: tuple[int, int]) -> None:
    chip = load_machine(machine)
    for mask in ("none", "causal", "window"):
        chosen = TRITON_BACKWARD.chosen(work(dims, mask), chip)
        assert writable(chosen, work(dims, mask), chip).legal
        space = list(TRITON_BACKWARD.space(work(dims, mask), chip))
        assert chosen in space and len(space) == len(set(space))
        assert parse_backward(variant_text(chosen), TRITON_BACKWARD.variant()) == chosen


@pytest.mark.parametrize(
    ("knobs", "machine", "text"),
    [
        ("dkv_tile_m=48", "a100", "dkv_tile_m must be a power of two of at least 16, got 48: use 32 or 64"),
        ("dq_loads=descriptors", "a100", "a100 has no bulk copy engine for tensor descriptors: use dq_loads=pointers"),
        ("dkv_loads=carrier", "a100", "dkv_loads must be pointers or descriptors, got 'carrier'"),
        (
            "dkv_tile_n=128,dkv_warps=4",
            "h200-sxm",
            r"a thread of the dkv loop needs \d+ registers but the limit is \d+",
        ),
        (
            "dq_tile_n=256,dq_tile_m=128",
            "h200-sxm",
            r"shared memory of the dq loop needs \d+ bytes but the limit is \d+",
        ),
        ("dkv_stages=1", "h200-sxm", "dkv_stages must be 2 or more on h200-sxm, got 1: Triton 3.6"),
        ("dkv_warps=8", "h200-sxm", "dkv_tile_n must be at least 128 for 8 warps on h200-sxm, got 64: a warpgroup"),
        ("dkv_tiles=64", "a100", "family fa2_bwd has no knob 'dkv_tiles'"),
        ("dq_warps=6", "a100", "knob 'dq_warps' takes one of 4, 8, got '6'"),
        ("dkv_apart=perhaps", "a100", "knob 'dkv_apart' takes true or false, got 'perhaps'"),
        ("dq_warps", "a100", "expected knob=value, got 'dq_warps'"),
        ("family=fa3", "a100", "expected a variant of family fa2_bwd, got family 'fa3'"),
        (
            "family=unfused",
            "a100",
            "expected family fa2_bwd or triton_bwd, fa3_bwd or hopper_bwd, fa3_bwd_apart or hopper_bwd_apart, fa4_bwd or blackwell_bwd, few_bwd or triton_few_bwd, got 'unfused'",
        ),
        ("dq_warps=4,dq_warps=8", "a100", "knob 'dq_warps' is given twice"),
    ],
)
def test_what_cannot_be_written_names_reason_and_lever(knobs: str, machine: str, text: str) -> None:
    chip = load_machine(machine)
    with pytest.raises(VariantError, match=text):
        generate_backward(Workload(), chip, parse_backward(knobs, TRITON_BACKWARD.chosen(Workload(), chip)))


@pytest.mark.parametrize(
    ("workload", "text"),
    [
        (Workload(dtype="fp8"), "is written for bf16 and fp16, got dtype 'fp8'"),
        (Workload(head_dim_qk=72), "head_dim_qk must be a multiple of 16, got 72"),
    ],
)
def test_workloads_that_are_not_written(workload: Workload, text: str) -> None:
    with pytest.raises(VariantError, match=text):
        generate_backward(workload, load_machine("a100"))


def test_verbs_of_forward_passes_refuse_the_family() -> None:
    for ask in (partial(find_family, "triton_bwd"), partial(parse_variant, "family=fa2_bwd,dq_warps=4")):
        with pytest.raises(VariantError, match="is a backward pass: --pass bwd forecasts it and writes it"):
            ask()


# --- the command line ---------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    from tilecast.cli import main as command

    with pytest.raises(SystemExit) as stop:
        command(list(arguments))
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_generate_writes_a_backward_pass_and_says_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "backward.py"
    knobs = ("--variant", "triton_bwd:dq_tile_n=16", "--family", "triton")
    code, out, _ = run(capsys, "generate", "a100", "--pass", "bwd", "--head-dim", "64", *knobs, "-o", str(file))
    assert code == 0 and "dq_tile_n=16" in out and "sm_80, sm_90a" in out and "TFLOP/s" in out
    text = file.read_text(encoding="utf-8")
    assert "def launch(q, k, v, out, lse, dout, dq, dk, dv, scale" in text and '"pass": "bwd"' in text
    code, out, _ = run(capsys, "generate", "a100", "--pass", "bwd", "--head-dim", "64", *knobs, "--json")
    assert (code == 0 and json.loads(out)["source"] + "\n" == text) or json.loads(out)["source"] == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["generate", "a100", "--pass", "both"], "expected fwd, bwd, serve or append, got 'both'"),
        (["generate", "a100", "--pass", "bwd", "--list"], "backward passes have no such list: drop --list"),
        (["generate", "b200", "--pass", "bwd", "--family", "fa4"], "fa4_bwd is forecast but not written"),
        (
            ["generate", "a100", "--family", "triton_bwd"],
            "is a backward pass: --pass bwd forecasts it and writes it",
        ),
        (["predict", "a100", "--variant", "triton_bwd:dq_warps=4"], "is a backward pass"),
        (["emulate", "triton_bwd_d64_full"], "triton"),
        (
            ["inspect", "kernels/generated/triton_bwd_d64_full.py", "--arch", "sm_80"],
            "its launch starts row_terms, key_gradients",
        ),
        (["forecast", "kernels/generated/triton_bwd_d64_full.py", "--machine", "a100"], "which one? Say --kernel"),
    ],
)
def test_verbs_refuse_backward_passes_in_one_sentence(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.paths import ROOT

    monkeypatch.chdir(ROOT)
    code, out, err = run(capsys, *arguments)
    assert code == 2 and not out and text in err and err.count("\n") == 1, err


# --- what the compiler makes of it, without a GPU -----------------------------------------------------------------------


@pytest.mark.parametrize("loads", LOADS)
@pytest.mark.parametrize("mask", ["none", "causal", "window"])
def test_compiled_code_depends_on_no_number(mask: str, loads: str, tmp_path: Path) -> None:
    """Or a stride that is no multiple of 16 would be read in another layout, and its rows added up in another order."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    path = tmp_path / "kernel.py"
    for apart in (False, True):
        path.write_text(source((64, 64), mask, loads, apart))
        module = module_of(path)
        names = ("row_terms", "key_gradients", "query_gradients", "sum_parts", *(("value_gradients",) if apart else ()))
        for kernel in (getattr(module, name) for name in names):
            numbers = [
                p
                for p in kernel.params
                if not p.name.startswith("scale") and "_ptr" not in p.name and "_desc" not in p.name
            ]
            assert [p.name for p in numbers if not p.do_not_specialize] == []
            assert [p.name for p in kernel.params if p.do_not_specialize and p not in numbers] == []


def test_a_file_of_several_kernels_is_not_read_as_one(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    path = tmp_path / "kernel.py"
    path.write_text(generate_backward(work((64, 64), "none"), load_machine("a100")).source)
    with pytest.raises(
        CompileError, match="expected launch to start one kernel, it started 3: row_terms, key_gradients"
    ):
        compile_kernel(path, "sm_80")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
