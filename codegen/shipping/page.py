"""The page of the kernels that ship, `kernels/README.md`: what each family is, and a row for each file."""

from __future__ import annotations

import csv
from typing import Any, Protocol

from tilecast.base.data import MEASURED
from tilecast.model.forecast.predict import Prediction
from tilecast.model.kernel.workload import Workload

_MEASURED = MEASURED / "h200_shipped.csv"
_MASK_WORDS = {"none": "no mask", "causal": "causal", "window": "sliding window"}
#: Families of which one file takes every mask.
_ANY_MASK = ("triton_few_bwd",)


class Listed(Protocol):
    """What a row of the page says of a kernel (`ship.Shipped`)."""

    @property
    def module(self) -> str:
        """Name of its file."""

    @property
    def family(self) -> str:
        """Its template's."""

    @property
    def variant(self) -> str:
        """Its knobs."""

    @property
    def workload(self) -> Workload:
        """A problem that it is made for."""

    @property
    def facts(self) -> dict[str, Any]:
        """What the registry has to know."""


def measured() -> dict[str, dict[str, str]]:
    """module@seqlen -> the measured row; empty until something was measured."""
    if not _MEASURED.exists():
        return {}
    with _MEASURED.open(encoding="utf-8", newline="") as file:
        return {f"{row['kernel']}@{row['seqlen']}": row for row in csv.DictReader(file)}


def forward_row(kernel: Listed, forecast: Prediction, timed: dict[str, dict[str, str]]) -> str:
    """The row of a forward kernel: forecast, and measured where it was."""
    work = kernel.workload
    found = timed.get(f"{kernel.module}@{work.seqlen_q}")
    figure = (
        f"{float(found['tflops']):.0f} ({found['gpu'].removeprefix('NVIDIA ')}, {found['date']})" if found else "no"
    )
    return f"| `{kernel.module}.py` | {_purpose(kernel)} | {work.seqlen_q} | {forecast.tflops:.0f} on {forecast.machine.name} | {figure} |"


def _purpose(kernel: Listed) -> str:
    """Which calls a kernel serves."""
    work = kernel.workload
    low, high = kernel.facts.get("seqlen_q_min"), kernel.facts.get("seqlen_q_max")
    lengths = f", from {low} queries" if low else f", up to {high} queries" if high else ""
    if "seqlen_k_max" in kernel.facts:
        lengths += f" and {kernel.facts['seqlen_k_max']} keys"
    dtype = "e4m3, " if work.dtype == "fp8" else ""
    mask = "any mask" if kernel.family in _ANY_MASK else _MASK_WORDS[work.mask]
    return f"{dtype}head_dim {work.dims}, {mask}{lengths}{_needs(kernel)}"


def purpose_of_rows(kernel: Listed) -> str:
    """Which sequences a serving kernel takes."""
    low, high = kernel.facts.get("seqlen_q_min"), kernel.facts.get("seqlen_q_max")
    cache = f", {kernel.facts['cache']} cache" if "cache" in kernel.facts else ""
    if low:
        which = f"{low} to {high} rows" if high else f"from {low} rows"
    else:
        which = f"up to {high} rows" if high else "values in the keys"
    return f"head_dim {kernel.workload.dims}, {which}{cache}"


def devices(kernel: Listed) -> str:
    """Compute capabilities that a kernel serves."""
    capability = kernel.facts["capability"]
    if isinstance(capability, dict):
        return ".".join(map(str, capability["min"])) + " and newer"
    assert isinstance(capability, list)
    return ", ".join(".".join(map(str, pair)) for pair in capability)


def _needs(kernel: Listed) -> str:
    least = kernel.facts.get("triton_min")
    return f"; Triton {'.'.join(map(str, least))} or newer" if isinstance(least, list) else ""


def row(kernel: Listed, purpose: str = "") -> str:
    """The row of a kernel that has no forecast on the page: what it is for, where it runs, its knobs."""
    return f"| `{kernel.module}.py` | {purpose or _purpose(kernel)} | {devices(kernel)} | `{kernel.variant}` |"


_TEXT = """# Kernels that ship

`make kernels` writes these files, their indices and this page from [`codegen/shipped.toml`](../codegen/shipped.toml). Edit that list or the
templates, not the files. Each file runs on its own, with torch and triton alone.

| files | what | GPU | called by |
|---|---|---|---|
| `hopper_ws_*` | [forward](#forward): Gluon, anchored softmax | sm_90a | `tilecast.attention` on H100 and H200 |
| `hopper_fp8_*` | the same for e4m3 q, k and v, bf16 out ([8-bit attention](../docs/fp8.md)) | sm_90a | `attention(..., q_descale=...)` |
| `triton_tma_*` | plain Triton with tensor descriptors | sm_90 and newer data-centre GPUs | `tilecast.attention` elsewhere |
| `triton_*` | plain Triton with pointers | any from Ampere on | the same |
| `blackwell_ws_*`, `blackwell_fp8_*` | Gluon, FlashAttention-4's structure; not yet run on hardware | sm_100a, sm_103a | `TILECAST_FAMILY=blackwell_ws`; in 8 bits always |
| `triton_short_*` | [short sequences](#short-sequences) | sm_90a | `tilecast.attention` |
| `hopper_bwd_*`, `triton_bwd_*`, `triton_tma_bwd_*`, `triton_few_bwd_*` | [backward passes](#backward-passes) | as above | autograd |
| `hopper_serve_*`, `hopper_prefill_*`, `hopper_mla_*`, `triton_serve_*`, `blackwell_serve_*` | [kernels to serve with](#kernels-to-serve-with) | as above | `tilecast.attention_kvcache`, `attention_varlen`, `attention_mla` |
| `triton_append*` | new keys and values to their places in a cache, rotated where asked | any from Ampere on | before those |
| `gemm_*` | [products plus C](#products-plus-c) | by file | `tilecast.addmm` |
| `triton_quantize` | 16-bit q, k and v to e4m3, a factor to each key head, a Hadamard rotation where asked | any from Ampere on | `quantize_e4m3` |
| `triton_copy` | q, k and v whose rows start at odd addresses or have no whole 16 bytes, copied in one launch | any from Ampere on | the operators |

The operator picks by device, head_dim, mask and lengths ([`registry.py`](registry.py) reads [`index.json`](generated/index.json)). It launches
through [`launching.py`](launching.py), which checks and prepares once for a shape; `launching.launcher(module)` gives you the same. A
file's own `launch` checks and prepares in every call.

## Forward

`launch(q, k, v, out, lse, scale)`; of e4m3 kernels also `q_descale=`, `k_descale=` and `v_descale=`, and they first bring V along its keys. `_pair`
kernels multiply with two CTAs together. `_b300` kernels leave all exponentials to that chip's faster MUFU and take row maxima from
the load. Blackwell's kernels were compiled, inspected and [emulated](../docs/emulator.md), not run.

*Forecast*: computed before compilation, bf16 (e4m3 where the row says so) TFLOP/s in a short run at 16k tokens, hidden size 2048 and the
given sequence length; windows reach 1024 keys to the left. *Measured*: the same run on an H200 on the day that stands with it, in turns with the other kernels of the
shape, L2 evicted, median of 15 ([`h200_shipped.csv`](../data/measured/h200_shipped.csv)); "no": not measured in that run. The pointer kernels are
made for an A100 and forecast there; an H200 runs them too. Against other libraries: [docs/kernels.md](../docs/kernels.md).

| file | for | seqlen | forecast | measured |
|---|---|---|---|---|
{rows}

## Short sequences

Plain Triton with pointers, few queries on few keys, any mask. A program has one small tile, whose rows are those of the query heads that
share a key head; an SM has several programs; nothing is set up before the first copy. A note of `tilecast predict` forecasts them.

| file | for | compute capability | variant |
|---|---|---|---|
{few}

## Backward passes

`launch(q, k, v, out, lse, dout, dq, dk, dv, scale)` writes the gradients that `tilecast.attention` gives to autograd, whatever kernel went forward.

- `triton_bwd_*` and `triton_tma_bwd_*` are plain Triton. `hopper_bwd_*` is Gluon with FlashAttention-3's structure, two kernels at head_dim 192
  and 256, preferred where it was measured to be faster. `triton_few_bwd_*` goes before those where the query heads that share a key head
  have few rows together.
- Each file starts three or four kernels (of few rows one or two) and sums in a fixed order, so the same call gives the same bits.
- Memory beside the tensors: 8 bytes for each query row of each head, rounded up to whole tiles; `hopper_bwd_d64_*` 32, `hopper_bwd_d128_*` 36, and both
  another 4 for each element of dq, which they sum in float32 (not at head_dim 256).
- `tilecast predict --pass bwd` forecasts them; [docs/training.md](../docs/training.md) has measurements.

| file | for | compute capability | variant |
|---|---|---|---|
{gradients}

## Kernels to serve with

`launch(q, k, v, out, lse, scale, cu_seqlens_q, ..., block_table, ...)`: packed or paged sequences, any mask, one launch for all sequences whose rows
(queries times query heads of a key head) the file is for ([docs/serving.md](../docs/serving.md)).

- `hopper_serve_*` (Gluon) decode sequences of up to 64 rows, `hopper_prefill_*` take more, `hopper_mla_*` latent attention; `triton_serve_*` (pointers) are for any
  GPU from Ampere on. `blackwell_serve_*` (Gluon, up to 128 rows) were compiled and emulated, never run: the portable ones are preferred
  there until `TILECAST_FAMILY=blackwell_serving` asks for these.
- Keys are split by a sequence's own lengths and heads, so the same sequence gives the same bits in every batch.
- `tilecast step` forecasts them ([docs/serving-step.md](../docs/serving-step.md)).

| file | for | compute capability | variant |
|---|---|---|---|
{steps}

## Products plus C

`launch(a, b, c, d, alpha, beta)` writes `alpha a b + beta c` to `d`, which may be `c` ([docs/gemm.md](../docs/gemm.md)).

- `gemm_hopper*` and `gemm_blackwell*` are Gluon: copies by a warp, C copied ahead, D stored by the copy engine, one or two accumulators; C and D may lie
  anyhow, and then go through shared memory. Hopper's are measured. Blackwell's were compiled and emulated, not run.
- `gemm_triton*` are plain Triton with pointers, for any strides.
- These and `gemm_hopper_parts` also take `sums`, float32 of the file's `sums_shape(m, n, parts)`, and share k among so many programs.
- `gemm_copy` copies A and B, one or both in a launch, into rows that the copy engine reads.
- [`gemm.json`](generated/gemm.json) is their index. *Forecast*: computed, TFLOP/s in a short run at m = n = 8192 and the given k.

| file | for | compute capability | k | forecast |
|---|---|---|---|---|
{products}
"""


def page(forward: list[str], short: list[str], backward: list[str], serving: list[str], gemm: list[str]) -> str:
    """The page, of the rows of each section."""
    rows, few, gradients, steps, products = ("\n".join(part) for part in (forward, short, backward, serving, gemm))
    return _TEXT.format(rows=rows, few=few, gradients=gradients, steps=steps, products=products)
