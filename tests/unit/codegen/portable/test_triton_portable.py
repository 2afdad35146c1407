"""The `triton` and `triton_short` families: numerics in Triton's interpreter on a CPU, and what the compiler makes of it for each GPU.

TRITON_INTERPRET counts when triton is imported, so the numerics run in one process of their own: this file as a script.
They use fp16: the interpreter's bf16 tl.dot gives wrong numbers.
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
from support.whole import sampled, whole

from tilecast.base.module_file import module_of
from tilecast.codegen.portable import short
from tilecast.codegen.portable.forward import TEMPLATE, context
from tilecast.codegen.render import render
from tilecast.kernels import generated
from tilecast.model.kernel.header import header_text
from tilecast.model.kernel.variants.fa2 import LOADS, Fa2Variant
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

#: The kernels by how their tiles come, and those of short sequences, whose rows are of all heads that share a key head.
FORMS = (*LOADS, "short")
REGISTERED = Path(generated.__file__).parent
#: Error allowed beside twice that of PyTorch's fp16 attention: the last place of an fp16 near 1/2.
FLOOR = 2.0**-12


def source(
    dims: tuple[int, int] = (128, 128),
    mask: str = "none",
    tile: tuple[int, int] = (64, 32),
    warps: int = 4,
    stages: int = 2,
    loads: str | None = None,
    machine: str = "h200-sxm",
) -> str:
    """Text of a generated file."""
    workload = Workload(
        head_dim_qk=dims[0], head_dim_v=dims[1], mask=mask, window=(128, 0) if mask == "window" else None
    )
    scheduler = "grid" if mask == "none" else "longest-first"
    variant = Fa2Variant(tile_m=tile[0], tile_n=tile[1], warps=warps, kv_stages=stages, scheduler=scheduler)
    header = header_text({"family": "fa2", "mask": mask, "workload": workload.as_dict()})
    if loads == "short":
        # Heads of widths that no kernel has go to one of the next power of two.
        narrower = bool({*dims} & {40, 72, 248})
        columns = [1 << (n - 1).bit_length() if narrower else n for n in dims]
        wide = replace(workload, head_dim_qk=columns[0], head_dim_v=columns[1])
        kernel = short.context(replace(variant, tile_m=16), wide, load_machine(machine), narrower)
        return render(short.TEMPLATE, {"k": kernel, "header": header})
    kernel = context(variant, workload, load_machine(machine), loads)
    return render(TEMPLATE, {"k": kernel, "header": header})


# --- numerics: the cases, what runs them in the interpreter, and what must hold -------------------------------


@dataclass(frozen=True)
class Case:
    """One call of a generated kernel; `heads` are (query heads, key/value heads), `window` is (left, right)."""

    dims: tuple[int, int]
    mask: str
    seqlens: tuple[int, int]
    heads: tuple[int, int] = (1, 1)
    window: tuple[int, int] = (-1, -1)
    loads: str = "pointers"
    scale: float | None = None
    batch: int = 1

    @property
    def name(self) -> str:
        window = f"-w{self.window[0]},{self.window[1]}" if self.mask == "window" else ""
        scale = "" if self.scale is None else f"-scale{self.scale:g}"
        return (
            f"{self.dims[0]}x{self.dims[1]}-{self.mask}{window}-{self.seqlens[0]}x{self.seqlens[1]}"
            f"-h{self.heads[0]}:{self.heads[1]}-{self.loads}{scale}"
        )

    @property
    def file(self) -> str:
        return f"d{self.dims[0]}_{self.dims[1]}_{self.mask}_{self.loads}.py"

    @property
    def limits(self) -> tuple[int, int]:
        """The window that `launch` is told: kernels of short sequences know no other mask."""
        return (-1, 0) if self.loads == "short" and self.mask == "causal" else self.window

    @property
    def factor(self) -> float:
        return 1.0 / math.sqrt(self.dims[0]) if self.scale is None else self.scale


def cases() -> list[Case]:
    found = []
    for mask in ("none", "causal", "window"):
        window = (20, 5) if mask == "window" else (-1, -1)
        for dims in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
            for loads in FORMS:
                found.append(Case(dims, mask, (33, 97), window=window, loads=loads))
        for seqlens in ((1, 127), (7, 7), (127, 127), (129, 129), (129, 7)):
            for loads in FORMS:
                found.append(Case((64, 64), mask, seqlens, window=window, loads=loads))
        for heads in ((2, 2), (4, 1), (8, 1)):
            for loads in FORMS:
                found.append(Case((64, 64), mask, (20, 37), heads=heads, window=window, loads=loads, batch=2))
        # Of short sequences: several tiles of rows, and heads of fewer columns than the kernel.
        for dims in ((40, 40), (72, 128), (248, 248)):
            found.append(Case(dims, mask, (9, 97), heads=(6, 2), window=window, loads="short", batch=2))
        found.append(Case((64, 64), mask, (5, 23), heads=(21, 3), window=window, loads="short", batch=2))
        for scale in (0.3, 1e-44):
            found.append(Case((64, 64), mask, (20, 37), window=window, scale=scale))
    for window in ((0, 0), (1, 0), (0, 40), (-1, 3), (17, -1), (-1, -1), (2**31 - 1, 2**31 - 1), (500, 0)):
        for seqlens in ((33, 100), (100, 33)):
            found += [Case((64, 64), "window", seqlens, window=window, loads=form) for form in ("pointers", "short")]
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


def padded(batch: int, heads: int, length: int, width: int, fill: Any = None) -> tuple[Any, Any]:
    """(storage, view): batch x length x heads x width seen as (batch, heads, length, width), NaN all around it."""
    import torch

    storage = torch.full((batch + 1, length + 40, heads, width + 8), math.nan, dtype=torch.float16)
    view = storage[:batch, :length, :, :width].transpose(1, 2)
    if fill is not None:
        view.copy_(torch.randn(batch, heads, length, width, generator=fill))
    return storage, view


def reference(case: Case, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """(out, lse) in float64."""
    import torch

    group = case.heads[0] // case.heads[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    scores = (case.factor * q.double() @ k.transpose(-1, -2)).masked_fill(~visible(case), -math.inf)
    weights = torch.nan_to_num(torch.softmax(scores, -1), nan=0.0)
    return weights @ v, torch.logsumexp(scores, -1)


def peer(case: Case, q: Any, k: Any, v: Any) -> Any:
    """PyTorch's own fp16 attention on the same values."""
    import torch

    group = case.heads[0] // case.heads[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible(case), scale=case.factor)


def numbers(case: Case, folder: Path) -> dict[str, Any]:
    """What a case gave: errors against float64, and whether everything outside the output survived."""
    import torch

    module = module_of(folder / case.file)
    draw = torch.Generator().manual_seed(1)
    batch, (heads_q, heads_kv), (rows, keys) = case.batch, case.heads, case.seqlens
    q = padded(batch, heads_q, rows, case.dims[0], draw)[1]
    k = padded(batch, heads_kv, keys, case.dims[0], draw)[1]
    v = padded(batch, heads_kv, keys, case.dims[1], draw)[1]
    storage, out = padded(batch, heads_q, rows, case.dims[1])
    lse_storage = torch.full((batch * heads_q * rows + 64,), math.nan)
    lse = lse_storage[: batch * heads_q * rows].view(batch, heads_q, rows)
    module.launch(q, k, v, out, lse, case.factor, *case.limits)
    expected, expected_lse = reference(case, q, k, v)
    seen = visible(case).any(1)
    theirs = peer(case, q, k, v)
    again = torch.full_like(out, 7.0)
    module.launch(q, k, v, again, None, case.factor, *case.limits)
    far = torch.full_like(out, 7.0)
    if case.loads == "short":
        module.plan = reaching_far(module.plan)
    module.launch(q, k, v, far, None, case.factor, *case.limits)
    inside = torch.zeros_like(storage, dtype=torch.bool)
    inside[:batch, :rows, :, : case.dims[1]] = True
    finite = (lse - expected_lse)[:, :, seen].abs()
    return {
        "error": (out - expected).abs().max().item(),
        "peer_error": (theirs - expected)[:, :, seen].abs().max().item() if seen.any() else 0.0,
        "lse_error": finite.max().item() if seen.any() else 0.0,
        "empty_rows": bool((out[:, :, ~seen] == 0).all() and (lse[:, :, ~seen] == -math.inf).all()),
        "repeats": torch.equal(out, again) and torch.equal(out, far),
        "untouched": bool(storage[~inside].isnan().all() and lse_storage[lse.numel() :].isnan().all()),
    }


def reaching_far(plan: Callable[..., Any]) -> Callable[..., Any]:
    """`plan` of a kernel of short sequences that takes every problem for one whose offsets are of 64 bits."""

    def planned(*arguments: Any) -> Any:
        grid, (*numbers, _) = plan(*arguments)
        return grid, (*numbers, 1)

    return planned


def isolation(mask: str, loads: str, folder: Path) -> dict[str, Any]:
    """Which rows a bad query row or a bad key row changes, against which may."""
    import torch

    case = Case((64, 64), mask, (50, 70), window=(20, 5) if mask == "window" else (-1, -1), loads=loads)
    module = module_of(folder / case.file)
    draw = torch.Generator().manual_seed(2)
    q, k, v = (padded(1, 2, length, 64, draw)[1] for length in (50, 70, 70))

    def run(q: Any, k: Any) -> Any:
        out = torch.empty(1, 2, 50, 64, dtype=torch.float16)
        module.launch(q, k, v, out, None, case.factor, *case.limits)
        return out

    clean = run(q, k)
    result = {}
    for word, value in (("nan", math.nan), ("inf", math.inf)):
        bad = q.clone()
        bad[0, 1, 13] = value
        got = run(bad, k)
        same = (got == clean).all(-1)
        result[f"query {word}"] = bool(got[0, 1, 13].isnan().all()) and (~same).nonzero().tolist() == [[0, 1, 13]]
        bad = k.clone()
        bad[0, 1, 60] = value
        same = (run(q, bad) == clean).all(-1)
        result[f"key {word}"] = bool(same[0, 0].all() and same[0, 1][~visible(case)[:, 60]].all())
    return result


def main(folder: Path) -> None:
    """Run every case and write what came out as JSON."""
    quicken()
    work: dict[str, Callable[[], dict[str, Any]]] = {case.name: partial(numbers, case, folder) for case in cases()}
    for mask in ("none", "causal", "window"):
        for loads in FORMS:
            work[f"isolation-{mask}-{loads}"] = partial(isolation, mask, loads, folder)
    results: dict[str, Any] = {}
    for name, run_case in work.items():
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
            path.write_text(source(case.dims, case.mask, loads=case.loads))
    subprocess.run([sys.executable, "-W", "ignore", __file__, str(folder)], env=environment(), check=True)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_numerics_in_the_interpreter(case: Case, results: dict[str, Any]) -> None:
    got = results[case.name]
    assert "exception" not in got, got["exception"]
    assert got["error"] <= 2 * got["peer_error"] + FLOOR
    assert got["lse_error"] <= 1e-3
    assert got["empty_rows"], "a row without visible keys must give zeros and lse -inf"
    assert got["repeats"], "the same call without lse, and by offsets of 64 bits, must give the same bits"
    assert got["untouched"], "wrote outside out or lse"


def test_offsets_of_tiles_that_reach_far_have_64_bits() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    module = module_of(REGISTERED / "triton_short_d64.py")

    def far(heads: tuple[int, int], lengths: tuple[int, int], stride: int) -> object:
        def one(count: int, length: int) -> Any:
            return torch.empty((), dtype=torch.float16, device="meta").as_strided(
                (1, count, length, 64), (0, 64, stride, 1)
            )

        q, k = one(heads[0], lengths[0]), one(heads[1], lengths[1])
        lse = torch.empty((1, heads[0], lengths[0]), device="meta")
        return module.plan(q, k, k, q, lse, -1, -1)[1][-1]

    assert far((2, 1), (100, 100), 1 << 24) is None  # 64 rows of a tile, 100 keys
    assert far((2, 1), (100, 129), 1 << 24) == 1
    assert far((2, 1), (100, 100), 1 << 25) == 1
    assert far((1 << 14, 1), (1, 1), 64) is None and far((1 << 15, 1), (1, 1), 64) == 1  # rows that multiplying divides


@pytest.mark.parametrize("loads", FORMS)
@pytest.mark.parametrize("mask", ["none", "causal", "window"])
def test_nan_and_inf_stay_in_the_rows_that_see_them(mask: str, loads: str, results: dict[str, Any]) -> None:
    got = results[f"isolation-{mask}-{loads}"]
    assert "exception" not in got, got["exception"]
    assert all(got.values()), got


# --- what the compiler makes of it, without a GPU -------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """Resources and instructions of a compiled kernel."""

    registers: int
    spilled_bytes: int
    instructions: dict[str, int]


def build(path: Path, target: str) -> Built:
    """Compile what a generated file launches for ``target``."""
    from tilecast.codegen.compiler.sass import compile_and_read

    code = compile_and_read(path, target)
    used, instructions = code.resources, code.instructions()
    names = ("HMMA", "HGMMA", "UTCHMMA", "LDGSTS", "UTMALDG", "STL", "FFMA", "MUFU")
    counts = {name: sum(i.opcode == name for i in instructions) for name in names}
    return Built(used.registers, used.stack_bytes, counts)


SHIPPED = [
    # target, machine, head_dims, mask, (tile_m, tile_n), warps, stages
    ("sm_80", "a100", (64, 64), "none", (128, 64), 4, 3),
    pytest.param("sm_80", "a100", (128, 128), "causal", (128, 64), 8, 3, marks=whole),
    pytest.param("sm_90a", "h200-sxm", (64, 64), "causal", (128, 128), 8, 3, marks=whole),
    pytest.param("sm_90a", "h200-sxm", (128, 128), "causal", (128, 128), 8, 3, marks=whole),
    ("sm_90a", "h200-sxm", (192, 128), "causal", (128, 64), 8, 3),
    ("sm_90a", "h200-sxm", (256, 256), "none", (128, 64), 8, 2),
    ("sm_100a", "b200", (128, 128), "causal", (128, 128), 8, 2),
]


@pytest.mark.parametrize(("target", "machine", "dims", "mask", "tile", "warps", "stages"), SHIPPED)
def test_compiles_without_spills_onto_the_tensor_cores(
    target: str,
    machine: str,
    dims: tuple[int, int],
    mask: str,
    tile: tuple[int, int],
    warps: int,
    stages: int,
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    path = tmp_path / "kernel.py"
    path.write_text(source(dims, mask, tile, warps, stages, machine=machine))
    built = build(path, target)
    assert built.spilled_bytes == 0 and built.instructions["STL"] == 0, built
    matrix, copy = {"sm_80": ("HMMA", "LDGSTS"), "sm_90a": ("HGMMA", "UTMALDG"), "sm_100a": ("UTCHMMA", "UTMALDG")}[
        target
    ]
    assert built.instructions[matrix] > 0 and built.instructions[copy] > 0, built
    # Softmax is one FMA and one ex2 per score, in a masked and an unmasked body.
    scores = 2 * tile[0] * tile[1] // (32 * warps)
    assert min(built.instructions["FFMA"], built.instructions["MUFU"]) >= scores, built


# --- context ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile_n": 48}, "tile_n must be a power of two"),
        ({"scheduler": "persistent"}, "scheduler must be grid or longest-first"),
    ],
)
def test_refuses_what_triton_cannot_express(change: dict[str, Any], message: str) -> None:
    with pytest.raises(VariantError, match=message):
        context(Fa2Variant(**change), Workload(), load_machine("a100"))


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (Workload(dtype="fp8"), "dtype must be bf16 or fp16"),
        (Workload(head_dim_qk=72), "head_dim must be a multiple of 16"),
    ],
)
def test_refuses_workloads_it_cannot_run(workload: Workload, message: str) -> None:
    with pytest.raises(VariantError, match=message):
        context(Fa2Variant(), workload, load_machine("a100"))


def test_machine_decides_how_tiles_are_loaded() -> None:
    chosen = {name: context(Fa2Variant(), Workload(), load_machine(name)).loads for name in ("a100", "h200-sxm")}
    assert chosen == {"a100": "pointers", "h200-sxm": "descriptors"}


REFUSED = {
    "scale: expected a number above 0": {"scale": 0.0},
    "scale: expected a number above 0 and at most 2e+38, got -0.3": {"scale": -0.3},
    "scale: expected a number above 0 and at most 2e+38, got nan": {"scale": math.nan},
    "scale: expected a number above 0 and at most 2e+38, got inf": {"scale": math.inf},
    "window: this kernel has no window, got (128, 0)": {"window_left": 128, "window_right": 0},
    "q, k: expected 4 extents, heads of q a multiple of k's, got [2, 8, 64], [1, 2, 8, 64]": {"q": (2, 8, 64)},
    "q, k: expected 4 extents, heads of q a multiple of k's, got [1, 3, 8, 64], [1, 2, 8, 64]": {"q": (1, 3, 8, 64)},
    "q, k: expected 4 extents, heads of q a multiple of k's, got [1, 2, 8, 64], [1, 0, 8, 64]": {"k": (1, 0, 8, 64)},
    "q: expected ((1, 2, 8, 64), 'torch.float16', D, [0, 0, 0], (1,), 0), got ((1, 2, 8, 32), 'torch.float16', D, "
    "[0, 0, 0], (1,), 0): shape, dtype, device, strides % 8, last, start % 16": {"q": (1, 2, 8, 32)},
    "v: expected ((1, 2, 8, 64), 'torch.float16', D, [0, 0, 0], (1,), 0), got ((1, 2, 9, 64)": {"v": (1, 2, 9, 64)},
    "v: expected ((1, 2, 8, 64), 'torch.float16', D, [0, 0, 0], (1,), 0), got ((2, 9, 64)": {"v": (2, 9, 64)},
    "out: expected ((1, 2, 8, 64), 'torch.float16', D, [0, 0, 0], (1,), 0), got ((1, 2, 7, 64)": {"out": (1, 2, 7, 64)},
    "lse: expected contiguous float32 (1, 2, 8), got torch.float32 (1, 2, 9) on cpu": {"lse": (1, 2, 9)},
    "lse: expected contiguous float32 (1, 2, 8), got torch.float16 (1, 2, 8) on cpu": {"lse": "half"},
    "lse: expected contiguous float32 (1, 2, 8), got torch.float32 (1, 2, 8) on meta": {"lse": "elsewhere"},
    "k: expected ((1, 2, 8, 64), 'torch.float16', D, [0, 0, 0], (1,), 0), got ((1, 2, 8, 64), 'torch.float32', D,": {
        "k": "float32"
    },
    "q: expected ((1, 2, 8, 64), 'bf16 or fp16', D, [0, 0, 0], (1,), 0), got ((1, 2, 8, 64), 'torch.float32', D,": {
        "q": "float32"
    },
    "v: expected ((1, 2, 8, 64), 'torch.float16', D, [0, 0, 0], (1,), 0), got ((1, 2, 8, 64), 'torch.float16', "
    "device(type='meta')": {"v": "elsewhere"},
    "k: expected ((1, 2, 8, 64), 'torch.float16', D, [0, 0, 0], (1,), 0), got ((1, 2, 8, 64), 'torch.float16', D, "
    "[0, 0, 1], (8,), 0)": {"k": "transposed"},
    "out: expected ((1, 2, 8, 64), 'torch.float16', D, [0, 0, 0], (1,), 0), got ((1, 2, 8, 64), 'torch.float16', D, "
    "[0, 0, 4], (1,), 0)": {"out": "narrow"},
    "k: expected ((1, 2, 8, 64), 'torch.float16', D, [0, 0, 0], (1,), 0), got ((1, 2, 8, 64), 'torch.float16', D, "
    "[0, 0, 0], (1,), 2)": {"k": "shifted"},
}


@pytest.mark.parametrize("sentence", REFUSED)
@pytest.mark.parametrize("loads", LOADS)
def test_launch_refuses_what_the_operator_refuses(sentence: str, loads: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from tilecast.kernels.launching import launcher

    path = tmp_path / "kernel.py"
    path.write_text(source((64, 64), mask="causal", loads=loads))
    call = {name: torch.zeros(1, 2, 8, 64, dtype=torch.float16) for name in ("q", "k", "v", "out")}
    call |= {"lse": torch.zeros(1, 2, 8), "scale": 0.125}
    for name, change in REFUSED[sentence].items():
        if change == "float32":
            change = call[name].float()
        elif change == "half":
            change = call[name].half()
        elif change == "elsewhere":
            change = call[name].to("meta")
        elif change == "narrow":
            change = torch.zeros(1, 2, 8, 68, dtype=torch.float16)[..., :64]
        elif change == "shifted":
            change = torch.zeros(1025, dtype=torch.float16)[1:].view(1, 2, 8, 64)
        elif change == "transposed":
            change = torch.zeros(1, 2, 64, 8, dtype=torch.float16).transpose(2, 3)
        elif isinstance(change, tuple):
            change = torch.zeros(change, dtype=call[name].dtype)
        call[name] = change
    told = sentence.replace("D,", "device(type='cpu'),")
    with pytest.raises(ValueError, match=re.escape(told)):
        module_of(path).launch(**call)
    with pytest.raises(ValueError, match=re.escape(told)):
        launcher(module_of(path))(**call)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
