"""The kernels that ship: from `shipped.toml` to the files of `kernels/generated`, their index and their page.

Everything under `kernels/generated` and `kernels/README.md` comes from here, byte for byte; a test compares.
"""

from __future__ import annotations

import csv
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import getsource
from pathlib import Path

from tilecast.base.data import MEASURED
from tilecast.codegen.backward import generate_backward
from tilecast.codegen.compiler import assembling
from tilecast.codegen.gemm.ship import gemm_files, gemm_rows
from tilecast.codegen.generate import forecast_of, generate
from tilecast.codegen.hopper import narrowing
from tilecast.codegen.portable.append import generate_append
from tilecast.codegen.portable.copy import generate_copy_rows
from tilecast.codegen.portable.quantize import generate_quantize
from tilecast.codegen.portable.short import Parts, generate_short
from tilecast.codegen.render import format_source
from tilecast.codegen.serving import generate_serving
from tilecast.model.append import parse_append
from tilecast.model.backward import find_backward, parse_backward
from tilecast.model.families import find_family, parse_variant
from tilecast.model.forecast.predict import Prediction, predict
from tilecast.model.kernel.variants.append import AppendVariant
from tilecast.model.kernel.variants.fa2 import Fa2Variant
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.serving import find_serving, parse_serving

LIST = Path(__file__).parents[1] / "shipped.toml"
_ROOT = Path(__file__).resolve().parents[2]
KERNELS = _ROOT / "kernels"
_MEASURED = MEASURED / "h200_shipped.csv"
#: Shapes of the benchmarks of the FlashAttention papers: 16k tokens in all, hidden size 2048 (16 heads where 2048 does
#: not divide).
_TOKENS, _HIDDEN = 16384, 2048
_WINDOW = (1024, 0)
_REGISTRY = (
    "head_dim_qk",
    "head_dim_v",
    "head_dim_min",
    "mask",
    "capability",
    "preference",
    "seqlen_q_min",
    "seqlen_q_max",
    "seqlen_k_max",
    "rows_max",
    "taller",
    "triton_min",
    "cache",
    "dtypes",
)
_MASK_WORDS = {"none": "no mask", "causal": "causal", "window": "sliding window"}


@dataclass(frozen=True, slots=True)
class Shipped:
    """One row of `shipped.toml`."""

    module: str
    family: str
    machine: str
    variant: str
    workload: Workload
    #: What the registry has to know, as the index holds it.
    facts: dict[str, object]
    #: Of kernels of short sequences, how keys are parted; (): all are one part.
    parts: Parts = ()


def read_list(path: Path = LIST) -> tuple[Shipped, ...]:
    """The forward kernels of the list, in its order."""
    return _listed(path, "kernel")


def read_short_list(path: Path = LIST) -> tuple[Shipped, ...]:
    """The forward kernels of the list for short sequences, in its order."""
    return _listed(path, "short")


def read_backward_list(path: Path = LIST) -> tuple[Shipped, ...]:
    """The backward passes of the list, in its order."""
    return _listed(path, "backward")


def read_serving_list(path: Path = LIST) -> tuple[Shipped, ...]:
    """The serving kernels of the list, in its order."""
    return _listed(path, "serving")


def read_append_list(path: Path = LIST) -> tuple[Shipped, ...]:
    """The kernels of the list that append to caches, in its order."""
    return _listed(path, "append")


def read_quantize_list(path: Path = LIST) -> tuple[Shipped, ...]:
    """The kernels of the list that bring tensors to e4m3, in its order."""
    return _listed(path, "quantize")


def read_copy_list(path: Path = LIST) -> tuple[Shipped, ...]:
    """The kernels of the list that copy rows for others, in its order."""
    return _listed(path, "copy")


def read_e4m3_list(path: Path = LIST) -> tuple[Shipped, ...]:
    """The forward kernels of the list that take e4m3, in its order."""
    return _listed(path, "e4m3")


def _listed(path: Path, kind: str) -> tuple[Shipped, ...]:
    """The kernels of a kind of the list in ``path``, in its order."""
    return tuple(_shipped(row) for row in tomllib.loads(path.read_text(encoding="utf-8"))[kind])


def _window(length: int) -> tuple[int, int]:
    """The window of a kernel's workload: of fewer keys one that still hides some."""
    return min(_WINDOW[0], length // 2), _WINDOW[1]


def _shipped(row: dict[str, object]) -> Shipped:
    dim, dim_v = int(str(row["head_dim_qk"])), int(str(row["head_dim_v"]))
    length, mask = int(str(row["seqlen"])), str(row["mask"])
    heads = _HIDDEN // dim if _HIDDEN % dim == 0 else 16
    # Serving kernels are for groups of 4 query heads, `queries` of them a sequence.
    queries, group = (int(str(row["queries"])), 4) if "queries" in row else (length, 1)
    if row["family"] == "hopper_mla" or "latent=1" in str(row["variant"]).split(","):
        heads, group = 1, 64
    work = Workload(max(1, _TOKENS // length), heads * group, heads, queries, length, dim, dim_v, mask,
                    _window(length) if mask == "window" else None, str(row.get("dtype", "bf16")))  # fmt: skip
    facts = {key: row[key] for key in _REGISTRY if key in row}
    listed = row.get("parts", [])
    assert isinstance(listed, list)
    parts = tuple((least, fewest, keys, most) for least, fewest, keys, most in listed)
    return Shipped(str(row["module"]), str(row["family"]), str(row["machine"]), str(row["variant"]), work, facts, parts)


def files(version: str) -> Iterator[tuple[Path, str]]:
    """(path below `KERNELS`, text) of everything that ships; kernels first, then index and page."""
    index: list[dict[str, object]] = []
    lines: list[str] = []
    measured = _measured()
    for kernel in (*read_list(), *read_e4m3_list()):
        family = find_family(kernel.family)
        machine = load_machine(kernel.machine)
        variant = parse_variant(f"family={family.name},{kernel.variant}")
        narrower = "head_dim_min" in kernel.facts
        made = generate(kernel.workload, machine, family, variant, version, compiler=None, narrower=narrower)
        yield Path("generated") / f"{kernel.module}.py", made.source
        dtypes = ["fp8"] if kernel.workload.dtype == "fp8" else ["bf16", "fp16"]
        index.append(
            {"module": kernel.module, "family": kernel.family, "dtypes": dtypes, **kernel.facts,
             "forecast": {"workload": kernel.workload.label(), **forecast_of(made.prediction)}}
        )  # fmt: skip
        short = predict(kernel.workload, machine, variant, clock="short", interval=False, compiler=None)
        lines.append(_page_row(kernel, short, measured))
    backward = []
    for kernel in read_backward_list():
        given = parse_backward(kernel.variant, find_backward(kernel.family).variant())
        yield (
            Path("generated") / f"{kernel.module}.py",
            generate_backward(kernel.workload, load_machine(kernel.machine), given, version).source,
        )
        index.append(
            {"module": kernel.module, "family": kernel.family, "pass": "bwd", "dtypes": ["bf16", "fp16"], **kernel.facts}
        )  # fmt: skip
        backward.append(f"| `{kernel.module}.py` | {_purpose(kernel)} | {_devices(kernel)} | `{kernel.variant}` |")
    serving = []
    for kernel in read_serving_list():
        given_serving = parse_serving(kernel.variant, find_serving(kernel.family).variant())
        made_serving = generate_serving(kernel.workload, load_machine(kernel.machine), given_serving, version)
        yield Path("generated") / f"{kernel.module}.py", made_serving.source
        facts = {**kernel.facts, "mask": "window"}
        index.append(
            {"module": kernel.module, "family": kernel.family, "pass": "serve", "dtypes": ["bf16", "fp16"], **facts}
        )
        serving.append(
            f"| `{kernel.module}.py` | {_purpose_of_rows(kernel)} | {_devices(kernel)} | `{kernel.variant}` |"
        )
    short_ones = []
    for kernel in read_short_list():
        chosen = parse_variant(f"family=fa2,{kernel.variant}")
        assert isinstance(chosen, Fa2Variant)
        yield (
            Path("generated") / f"{kernel.module}.py",
            generate_short(
                kernel.workload,
                load_machine(kernel.machine),
                chosen,
                version,
                narrower="head_dim_min" in kernel.facts,
                parts=kernel.parts,
            ),
        )
        index.append(
            {"module": kernel.module, "family": kernel.family, "pass": "short", "dtypes": ["bf16", "fp16"], **kernel.facts, "mask": "window"}
        )  # fmt: skip
        short_ones.append(
            f"| `{kernel.module}.py` | {_purpose_of_rows(kernel)} on up to {kernel.facts['seqlen_k_max']} keys | {_devices(kernel)} | `{kernel.variant}` |"
        )
    for kernel in read_append_list():
        given_append = parse_append(kernel.variant, AppendVariant())
        # No index has them: there is one for each kind of cache, on every device.
        made_append = generate_append(kernel.workload, load_machine(kernel.machine), given_append, version)
        yield Path("generated") / f"{kernel.module}.py", made_append.source
        cache = "e4m3" if given_append.cache_bits == 8 else "16-bit"
        serving.append(
            f"| `{kernel.module}.py` | any head_dim, appends to a {cache} cache | {_devices(kernel)} | `{kernel.variant}` |"
        )
    for kernel in read_quantize_list():  # nor this, which is one for all
        yield (
            Path("generated") / f"{kernel.module}.py",
            generate_quantize(kernel.workload, load_machine(kernel.machine), version),
        )
    for kernel in read_copy_list():  # and this
        yield (
            Path("generated") / f"{kernel.module}.py",
            generate_copy_rows(kernel.workload, load_machine(kernel.machine), version),
        )
    yield from gemm_files(version)
    yield Path("generated") / "index.json", json.dumps(index, indent=1) + "\n"
    yield Path("generated") / "__init__.py", format_source('"""Generated kernels: `make kernels` writes them; nothing here is edited by hand."""\n')  # fmt: skip
    yield from (
        (Path(f"{source.__name__.rpartition('.')[2]}.py"), getsource(source)) for source in (narrowing, assembling)
    )
    yield Path("README.md"), _page(lines, short_ones, backward, serving, gemm_rows())


def _measured() -> dict[str, dict[str, str]]:
    """module@seqlen -> the measured row; empty until something was measured."""
    if not _MEASURED.exists():
        return {}
    with _MEASURED.open(encoding="utf-8", newline="") as file:
        return {f"{row['kernel']}@{row['seqlen']}": row for row in csv.DictReader(file)}


def _page_row(kernel: Shipped, forecast: Prediction, measured: dict[str, dict[str, str]]) -> str:
    work = kernel.workload
    found = measured.get(f"{kernel.module}@{work.seqlen_q}")
    figure = (
        f"{float(found['tflops']):.0f} ({found['gpu'].removeprefix('NVIDIA ')}, {found['date']})" if found else "no"
    )
    return f"| `{kernel.module}.py` | {_purpose(kernel)} | {work.seqlen_q} | {forecast.tflops:.0f} on {forecast.machine.name} | {figure} |"


def _purpose(kernel: Shipped) -> str:
    """Which calls a kernel serves."""
    work = kernel.workload
    low, high = kernel.facts.get("seqlen_q_min"), kernel.facts.get("seqlen_q_max")
    lengths = f", from {low} queries" if low else f", up to {high} queries" if high else ""
    if "seqlen_k_max" in kernel.facts:
        lengths += f" and {kernel.facts['seqlen_k_max']} keys"
    dtype = "e4m3, " if work.dtype == "fp8" else ""
    return f"{dtype}head_dim {work.dims}, {_MASK_WORDS[work.mask]}{lengths}{_needs(kernel)}"


def _purpose_of_rows(kernel: Shipped) -> str:
    """Which sequences a serving kernel takes."""
    low, high = kernel.facts.get("seqlen_q_min"), kernel.facts.get("seqlen_q_max")
    cache = f", {kernel.facts['cache']} cache" if "cache" in kernel.facts else ""
    if low:
        which = f"{low} to {high} rows" if high else f"from {low} rows"
    else:
        which = f"up to {high} rows" if high else "values in the keys"
    return f"head_dim {kernel.workload.dims}, {which}{cache}"


def _devices(kernel: Shipped) -> str:
    """Compute capabilities that a kernel serves."""
    capability = kernel.facts["capability"]
    if isinstance(capability, dict):
        return ".".join(map(str, capability["min"])) + " and newer"
    assert isinstance(capability, list)
    return ", ".join(".".join(map(str, pair)) for pair in capability)


def _needs(kernel: Shipped) -> str:
    least = kernel.facts.get("triton_min")
    return f"; Triton {'.'.join(map(str, least))} or newer" if isinstance(least, list) else ""


def _page(lines: list[str], short: list[str], backward: list[str], serving: list[str], gemm: list[str]) -> str:
    rows, few, gradients, steps, products = ("\n".join(part) for part in (lines, short, backward, serving, gemm))
    return f"""# Kernels that ship

Written by `make kernels` from [`codegen/shipped.toml`](../codegen/shipped.toml), this page included; edit that list or the
templates instead.  `tilecast.attention` picks among them by device, head_dim, mask and query length
([`registry.py`](registry.py)); each file also runs on its own, with triton and torch alone:
`launch(q, k, v, out, lse, scale)`, which checks and prepares in every call.  The operator launches through
[`launching.py`](launching.py), which works that out once for a shape; `launching.launcher(module)` gives you the same.

- `hopper_ws_*`: Gluon for sm_90a, anchored softmax; what `tilecast.attention` runs on H100 and H200.
- `hopper_fp8_*`: the same family for e4m3 q, k and v, bf16 out: `launch(..., q_descale=, k_descale=, v_descale=)` also brings V
  along its keys first ([docs/fp8.md](../docs/fp8.md)).
- `blackwell_fp8_*`: `blackwell_ws` for e4m3 or e5m2 q, k and v, bf16 out, the same arguments; not yet on hardware, and what the
  operator runs there, having no other.
- `triton_quantize`: q, k and v of 16 bits to e4m3 before these, with a factor to each key head and, where asked, a Hadamard rotation of q and k.
- `triton_copy`: q, k and v whose rows start at odd addresses, or have no whole 16 bytes, copied for all of these in one launch.
- `triton_tma_*`: plain Triton with tensor descriptors, sm_90 and newer data-centre GPUs.
- `triton_*`: plain Triton with pointers, any GPU from Ampere on.
- `blackwell_ws_*`: Gluon for sm_100a and sm_103a, FlashAttention-4's structure; `_pair` kernels multiply with two CTAs
  together, `_b300` ones take all exponentials to that chip's faster MUFU and row maxima from the load.  Compiled,
  inspected and run on a CPU stand-in, not yet on hardware: the operator prefers the portable kernels there until
  `TILECAST_FAMILY=blackwell_ws` asks for them.

Forecast and measured: bf16 (e4m3 where the table says so) TFLOP/s in a short run at 16k tokens, hidden size 2048, the given sequence length (windows: 1024
keys to the left).  Measured in turns with the other kernels of the shape, L2 evicted, median of 15
([`h200_shipped.csv`](../data/measured/h200_shipped.csv); against other libraries:
[docs/kernels.md](../docs/kernels.md)).  [`index.json`](generated/index.json) has the sustained forecasts, unit by unit.  The pointer kernels
are made for an A100 and forecast there; an H200 runs them, but not at that figure.

| file | for | seqlen | forecast | measured |
|---|---|---|---|---|
{rows}

## Short sequences

`triton_short_*`: plain Triton with pointers, for few queries on few keys under any mask.  A program has one small tile, whose rows are those of the query
heads that share a key head, and an SM has several programs; nothing is set up before the first copy.  A note of `predict` forecasts them.

| file | for | compute capability | variant |
|---|---|---|---|
{few}

## Backward passes

`triton_bwd_*` (pointers, any GPU from Ampere on) and `triton_tma_bwd_*` (tensor descriptors, sm_90 and newer data-centre GPUs) are
plain Triton; `hopper_bwd_*` is Gluon for sm_90a, preferred where it was measured to be faster: FlashAttention-3's structure, two kernels at head_dim 256.
`triton_few_bwd_*` (plain Triton, sm_90a) goes before those where the query heads that share a key head have few rows together.
`launch(q, k, v, out, lse, dout, dq, dk, dv, scale)` writes the gradients that `tilecast.attention` gives to autograd, whatever
kernel went forward.  Each file starts three or four kernels (of few rows one or two) and sums in a fixed order, so the same call gives the same bits.  Beside
the tensors they need 8 bytes for each query row of each head, rounded up to whole tiles; `hopper_bwd_d64_*` needs 32, `hopper_bwd_d128_*` 36, and both another 4 for each
element of dq, which it sums in float32, but for head_dim 256.  `tilecast predict --pass bwd`
forecasts them; [docs/training.md](../docs/training.md) has measurements.

| file | for | compute capability | variant |
|---|---|---|---|
{gradients}

## Kernels to serve with

`hopper_serve_*` (Gluon, sm_90a, sequences of up to 64 rows: decode), `hopper_prefill_*` (the same for more rows), `blackwell_serve_*` (Gluon, sm_100a and sm_103a, up to 128 rows;
compiled and emulated, never run on a GPU: the portable ones are preferred there until `TILECAST_FAMILY=blackwell_serving` asks for these)
and `triton_serve_*` (pointers, any GPU from Ampere on): `launch(q, k, v, out, lse, scale, cu_seqlens_q, ..., block_table, ...)` is what
`tilecast.attention_kvcache` and `tilecast.attention_varlen` run ([docs/serving.md](../docs/serving.md)): packed or paged, any
mask, one launch for all sequences whose rows (queries times query heads to a key head) the file is for.  Keys are split by
a sequence's own lengths and heads, so the same sequence gives the same bits in every batch.  Nothing forecasts them yet.  `triton_append*` writes new keys and
values to their places in a cache, rotated where asked, and goes before them.

| file | for | compute capability | variant |
|---|---|---|---|
{steps}

## Products plus C

`gemm_*`: `launch(a, b, c, d, alpha, beta)` writes `alpha a b + beta c` to `d`, which may be `c`; what `tilecast.addmm` runs
([docs/gemm.md](../docs/gemm.md)).  `gemm_hopper*` and `gemm_blackwell*` are Gluon: copies by a warp, C copied ahead, D stored by the copy
engine, one or two accumulators; C and D may lie anyhow, and then go through shared memory.  `gemm_triton*` are plain Triton with pointers, for
any strides; they and `gemm_hopper_parts` also take `sums`, float32 of the file's `sums_shape(m, n, parts)`, and share k among so many programs.
`gemm_copy` copies A and B, one or both in a launch, into rows that the copy engine reads.  Hopper's are measured, Blackwell's were compiled,
and run in the emulator or in Triton's interpreter.  [`gemm.json`](generated/gemm.json) is their index.  Forecast: TFLOP/s in a
short run at m = n = 8192 and the given k.

| file | for | compute capability | k | forecast |
|---|---|---|---|---|
{products}
"""


def write(version: str, root: Path = KERNELS) -> tuple[Path, ...]:
    """Write everything that ships below ``root`` and remove generated files that no longer do; returns what changed.

    Raises VariantError outside a source tree, where the measurements that the page shows are not.
    """
    if not (_ROOT / "pyproject.toml").is_file():
        raise VariantError(
            f"ship: expected a source tree of tilecast, got the installed package in {_ROOT}: clone it first"
        )
    changed = []
    wanted = dict(files(version))
    (root / "generated").mkdir(parents=True, exist_ok=True)
    for path, text in wanted.items():
        target = root / path
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")
            changed.append(path)
    for stale in sorted((root / "generated").glob("*.py")):
        if stale.relative_to(root) not in wanted:
            stale.unlink()
            changed.append(stale.relative_to(root))
    return tuple(changed)
