"""Which kernel runs a problem on a device, and why none does: what the operator and its gradients ask alike.

Kernels are imported when a problem is met for the first time, and remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from tilecast.kernels import registry
from tilecast.kernels.errors import UnsupportedError, check_agreement, scale_refusal
from tilecast.kernels.padding import padded
from tilecast.kernels.starting import on_device

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Kernel(NamedTuple):
    """A kernel as calls need it."""

    #: Fewest and most query rows of a sequence.
    first: int
    last: int
    launch: Callable[..., Any]
    #: Whether the launch takes a window.
    windowed: bool
    #: Most keys of a sequence, and most query rows of a key/value head.
    keys_max: int
    rows_max: int

    def fits(self, queries: int, keys: int, rows: int = 0) -> bool:
        """Whether it runs sequences of so many queries, keys and query rows of a key/value head."""
        return self.first <= queries <= self.last and keys <= self.keys_max and rows <= self.rows_max


#: Of a problem, best first.
Kernels = tuple[Kernel, ...]
#: (device, dtype, head_dim_qk, head_dim_v, mask) -> its kernels.  The device is CUDA's index, -1 for the CPU.
Known = dict[tuple[int, Any, int, int, str], Kernels]
forward_kernels: Known = {}
backward_kernels: Known = {}
_grad_enabled = torch.is_grad_enabled


def wants_gradients(q: Any, k: Any, v: Any) -> bool:
    """Whether autograd will ask for a gradient of this call."""
    return _grad_enabled() and bool(q.requires_grad or k.requires_grad or v.requires_grad)


def refusal(q: Any, k: Any, v: Any, scale: float | None, left: int, right: int) -> str | None:
    """Why no kernel runs this valid problem; None when one does."""
    if scale is not None and (refused := scale_refusal(scale)):
        return refused
    if q.dtype not in DTYPE_NAMES:
        return _dtype_refusal(q.dtype)
    # Shapes alone, as FakeTensorMode also has them on a machine without a GPU: nothing will run.
    if q.device.type == "meta" or (q.device.type == "cuda" and not torch.cuda.is_available()):
        return None
    mask = "none" if left < 0 and right < 0 else "causal" if left < 0 and right == 0 else "window"
    refused = kernel_refusal(q, v.shape[3], mask, "fwd")
    if refused is None and wants_gradients(q, k, v):
        refused = kernel_refusal(q, v.shape[3], mask, "bwd")
    return refused


def _dtype_refusal(dtype: Any) -> str:
    return f"q, k, v: expected dtype torch.bfloat16 or torch.float16, got {dtype}; cast them, or use fallback='sdpa'"


def kernel_refusal(
    q: Any, head_dim_v: int, mask: str, direction: str, names: Mapping[Any, str] = DTYPE_NAMES
) -> str | None:
    """Why no shipped kernel computes such problems ("fwd") or their gradients ("bwd") on q's device; None when one does."""
    head_dim = q.shape[3]
    served = _served(q.device.type, q.get_device(), names[q.dtype], mask, direction)
    if isinstance(served, str):
        return served
    # Compared one by one: under torch.compile the sizes may be symbols, and this makes them constants.
    for known, known_v in served:
        if head_dim == known and head_dim_v == known_v:
            return None
    got = _dims_text(head_dim, head_dim_v)
    what = "a shipped kernel" if direction == "fwd" else "a shipped backward pass"
    if names is not DTYPE_NAMES:
        have = ", ".join([_dims_text(*pair) for pair in served])
        return f"head_dim: expected one that {what} has ({have}), got {got}; fallback='sdpa' runs it"
    for known, known_v in served:  # zeros behind the last column change nothing
        if head_dim <= known and head_dim_v <= known_v:
            return None
    widest = [(a, b) for a, b in served if not any(c >= a and d >= b and (c, d) != (a, b) for c, d in served)]
    have = " or ".join([_dims_text(*pair) for pair in widest])
    return f"head_dim: expected at most that of {what} ({have}), got {got}; fallback='sdpa' runs it"


def _dims_text(head_dim: int, head_dim_v: int) -> str:
    return f"{head_dim}" if head_dim == head_dim_v else f"{head_dim}/{head_dim_v}"


def _served(kind: str, device: int, dtype: str, mask: str, direction: str) -> tuple[tuple[int, int], ...] | str:
    """(head_dim, head_dim_v) that the shipped kernels take on a device, or the sentence that says why none does."""
    capability = capability_of(kind, device)
    if isinstance(capability, str):
        return capability
    served = registry.head_dims(capability, dtype, mask, _entries(direction))
    if not served:
        version = f"compute capability {capability[0]}.{capability[1]}"
        what = "kernel" if direction == "fwd" else "backward pass"
        return f"q, k, v: no shipped {what} for {dtype}, mask '{mask}' on {version}; fallback='sdpa' runs it"
    return served


# Reads the index file and asks the driver: torch.compile takes its answer as a constant.  This is all that
# torch.compiler.assume_constant_result does, without importing the whole compiler into programs that never compile.
_served._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _entries(direction: str) -> tuple[registry.Entry, ...]:
    return registry.shipped() if direction == "fwd" else registry.shipped_backward()


def capability_of(kind: str, device: int) -> tuple[int, int] | str:
    """Compute capability of a device, or the sentence that says why its tensors cannot run."""
    if kind != "cuda":
        return f"q, k, v: expected tensors on a CUDA device, got device '{kind}'; move them, or use fallback='sdpa'"
    if torch.version.hip is not None:
        return "q, k, v: expected an NVIDIA GPU, got PyTorch for ROCm; fallback='sdpa' runs there"
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


def find_kernels(
    q: Any, k: Any, v: Any, mask: str, direction: str = "fwd", *,
    names: Mapping[Any, str] = DTYPE_NAMES, known: Known | None = None,
) -> Kernels:  # fmt: skip
    """The kernels of a problem met for the first time, imported and remembered; UnsupportedError where there is none.

    ``names``: dtypes and their names in the index; ``known``: where they are remembered, by default with others of a direction.
    """
    # Devices by index alone look the same when neither is CUDA.
    check_agreement(q, k, v)
    dtype, device, head_dim, head_dim_v = q.dtype, q.get_device(), q.shape[3], v.shape[3]
    refused = kernel_refusal(q, head_dim_v, mask, direction, names) if dtype in names else _dtype_refusal(dtype)
    if refused:
        raise UnsupportedError(refused)
    capability = capability_of(q.device.type, device)
    assert not isinstance(capability, str)
    problem = mask, _entries(direction)
    entries, wider = registry.candidates(capability, names[dtype], head_dim, head_dim_v, *problem), None
    if not entries:
        wider = registry.widened(capability, names[dtype], head_dim, head_dim_v, *problem)
        assert wider is not None
        entries = registry.candidates(capability, names[dtype], *wider, *problem)
    try:
        launches = [registry.launcher(e) for e in entries]
    except ImportError as error:
        raise UnsupportedError(
            f"attention: the kernels need Triton 3.6 or newer, and importing one gave '{error}'; "
            "pip install 'tilecast[gpu]', or use fallback='sdpa'"
        ) from error
    if wider is not None:
        launches = [padded(launch, *wider, direction) for launch in launches]
    found = tuple(
        Kernel(
            e.seqlen_q_min, e.seqlen_q_max, on_device(launch, device), e.mask == "window", e.seqlen_k_max, e.rows_max
        )
        for e, launch in zip(entries, launches, strict=True)
    )
    if known is None:
        known = forward_kernels if direction == "fwd" else backward_kernels
    known[(device, dtype, head_dim, head_dim_v, mask)] = found
    return found
