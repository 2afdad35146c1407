"""q, k and v to e4m3 before `tilecast.attention`: a factor for each key head, and q and k rotated so that outliers spread over columns.

The rotation is FlashAttention-3's incoherent processing: random signs and Hadamard's matrix, orthogonal, the same for q and k, which
leaves scores as they are.  On a GPU two launches of a generated kernel (``triton_quantize``) do both; on a CPU, PyTorch.
Deterministic: maxima do not depend on their order.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from tilecast.kernels import registry
from tilecast.kernels.copying import empty_output, readable
from tilecast.kernels.e4m3 import E4M3
from tilecast.kernels.errors import AttentionError, UnsupportedError, check_agreement, check_names, check_ranks
from tilecast.kernels.registration import register
from tilecast.kernels.selection import capability_of
from tilecast.kernels.starting import on_device

LARGEST = 448.0
_DTYPES = (torch.bfloat16, torch.float16)
_MODULE, _OLDEST = "triton_quantize", (8, 0)
#: Columns that a rotation mixes at most, and head dimensions that the kernel takes.
_MIXED, _STEP, _WIDEST = 256, 32, 256
_LAST_SEED = 2**31 - 1
#: Device index -> launch.
_known: dict[int, Any] = {}


def quantize_e4m3(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hadamard: bool = True, seed: int = 0, layout: str = "bhsd"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(q, k, v) in torch.float8_e4m3fn and the factors that `tilecast.attention` undoes that with:

        q8, k8, v8, factors = tilecast.quantize_e4m3(q, k, v)
        out = tilecast.attention(q8, k8, v8, causal=True, **factors)

    q: (batch, heads_q, seqlen_q, head_dim), k, v: (batch, heads_kv, seqlen_k, head_dim | head_dim_v), all bfloat16 or all float16,
    head dimensions of 32 to 256 in steps of 32; with ``layout="bshd"`` heads and seqlen change places.  Factors are float32
    (batch, heads_kv), for q as well: the largest element, by size, of what belongs to a key head, over 448.

    hadamard: rotate q and k first.  Columns change signs, which follow from ``seed`` (0 to 2^31 - 1), and are mixed by Hadamard's
    matrix: all of them where head_dim is a power of two, else each largest power of two that divides it.  Keys that are to
    meet queries of another call need the same seed.

    No gradients.  Raises AttentionError for calls that make no sense, UnsupportedError for what the kernel does not take.
    """
    check_names(layout, None)
    if layout == "bshd" and all(getattr(x, "ndim", 0) == 4 for x in (q, k, v)):
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    _check(q, k, v, hadamard, seed)
    *made, factors = _operator(q, k, v, hadamard, seed)
    if layout == "bshd":
        made = [x.transpose(1, 2) for x in made]
    named = dict(zip(("q_descale", "k_descale", "v_descale"), factors.unbind(0), strict=True))
    return made[0], made[1], made[2], named


def _check(q: Any, k: Any, v: Any, hadamard: Any, seed: Any) -> None:
    check_ranks(q, k, v)
    check_agreement(q, k, v)
    if not isinstance(hadamard, bool):
        raise AttentionError(f"hadamard: expected True or False, got {hadamard!r}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _LAST_SEED:
        raise AttentionError(f"seed: expected a whole number from 0 to {_LAST_SEED}, got {seed!r}")
    if q.dtype not in _DTYPES:
        raise UnsupportedError(f"q, k, v: expected dtype torch.bfloat16 or torch.float16, got {q.dtype}; cast them")
    for name, x in (("q", q), ("v", v)):
        if x.shape[3] % _STEP or x.shape[3] > _WIDEST:
            raise UnsupportedError(f"{name}: expected head_dim of {_STEP} to {_WIDEST} in steps of {_STEP}, got {x.shape[3]}; pad it")  # fmt: skip


# --- by PyTorch -------------------------------------------------------------------------------------------------------


def signs(columns: int, seed: int) -> Any:
    """The signs of a rotation, float64 (columns,): a hash of column and seed in 32 bits, as the kernel has it."""
    low = 2**32 - 1
    mixed = (torch.arange(columns, dtype=torch.int64) * 668265263 + seed * 374761393) & low
    # 64 bits do not hold every product: its low half is that of the halves.
    mixed = _low_product(mixed ^ (mixed >> 15), 2246822519)
    mixed = _low_product(mixed ^ (mixed >> 13), 3266489917)
    return 1.0 - 2.0 * (((mixed ^ (mixed >> 16)) >> 31) & 1).double()


def _low_product(x: Any, factor: int) -> Any:
    low = 2**32 - 1
    return ((x & 0xFFFF) * factor + ((((x >> 16) * factor) & 0xFFFF) << 16)) & low


def rotated(x: Any, seed: int) -> Any:
    """``x`` with its last dimension rotated, in x's own precision."""
    width = x.shape[-1]
    mixed = min(width & -width, _MIXED)
    y = (x * signs(width, seed).to(x)).unflatten(-1, (width // mixed, mixed))
    step = 1
    while step < mixed:
        pairs = y.unflatten(-1, (mixed // (2 * step), 2, step))
        first, last = pairs.unbind(-2)
        y = torch.stack((first + last, first - last), -2).flatten(-3)
        step *= 2
    return y.flatten(-2) * mixed**-0.5


def _by_pytorch(q: Any, k: Any, v: Any, hadamard: bool, seed: int) -> tuple[Any, Any, Any, Any]:
    """The operator where no kernel runs."""
    group = q.shape[1] // max(k.shape[1], 1)
    made, factors = [], []
    for x, turns in ((q, hadamard), (k, hadamard), (v, False)):
        wide = rotated(x.float(), seed) if turns else x.float()
        heads = wide.unflatten(1, (k.shape[1], group if x is q else 1)) if k.shape[1] else wide[:, :, None]
        most = heads.abs().amax((2, 3, 4)) if wide.numel() else wide.new_zeros((q.shape[0], k.shape[1]))
        most = torch.where(most == 0.0, LARGEST, most)
        by = (LARGEST / most)[:, :, None, None, None]
        out = empty_output(x, x.shape[3], E4M3)
        made.append(out.copy_((heads * by).clamp(-LARGEST, LARGEST).reshape(x.shape).to(E4M3)))
        factors.append(most / LARGEST)
    return made[0], made[1], made[2], torch.stack(factors)


# --- the operator -----------------------------------------------------------------------------------------------------


def _run(q: Any, k: Any, v: Any, hadamard: bool, seed: int) -> tuple[Any, Any, Any, Any]:
    """The operator on a GPU."""
    _check(q, k, v, hadamard, seed)
    device = q.get_device()
    launch = _known.get(device)
    if launch is None:
        launch = _known[device] = _find(q.device.type, device)
    *outs, factors = made = _fake(q, k, v, hadamard, seed)
    launch(*readable(q, k, v), *(x.view(torch.uint8) for x in outs), factors, hadamard, seed)
    return made


def _find(kind: str, device: int) -> Any:
    """The kernel's ``launch``, imported; UnsupportedError for GPUs before sm_80 and without Triton."""
    capability = capability_of(kind, device)
    if isinstance(capability, str):
        raise UnsupportedError(capability)
    if capability < _OLDEST:
        raise UnsupportedError(f"q, k, v: expected compute capability 8.0 or newer, got {capability[0]}.{capability[1]}")  # fmt: skip
    try:
        module = importlib.import_module(f"{registry.PACKAGE}.{_MODULE}")
    except ImportError as error:
        raise UnsupportedError(
            f"quantize_e4m3: the kernel needs Triton 3.6 or newer, and importing it gave '{error}'; pip install 'tilecast[gpu]'"
        ) from error
    return on_device(module.launch, device)


def _fake(q: Any, k: Any, v: Any, hadamard: bool, seed: int) -> tuple[Any, Any, Any, Any]:
    """Shapes of the operator, without a device."""
    made = [empty_output(x, x.shape[3], E4M3) for x in (q, k, v)]
    return made[0], made[1], made[2], torch.empty((3, *k.shape[:2]), dtype=torch.float32, device=q.device)


_library, _operator = register(
    "quantize_e4m3(Tensor q, Tensor k, Tensor v, bool hadamard, int seed) -> (Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
    on_cpu=_by_pytorch,
)
