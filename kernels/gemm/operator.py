"""``tilecast.addmm``: beta c + alpha a b on the shipped kernels, as torch operators with gradients.

``torch.ops.tilecast.addmm`` returns a new tensor and has gradients; ``torch.ops.tilecast.addmm_`` adds to c in place and
``torch.ops.tilecast.addmm_out`` writes into a tensor of the caller's, as PyTorch's own: neither has gradients.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.utils.flop_counter import register_flop_formula

from tilecast.kernels import registry
from tilecast.kernels.again import Memory, key_of
from tilecast.kernels.errors import AttentionError, UnsupportedError
from tilecast.kernels.gemm.choice import Choice, Tiles, choose, tiles_of
from tilecast.kernels.gemm.launching import gemm_launcher, parted_launcher
from tilecast.kernels.gemm.layouts import boxes, copied, in_vectors, starts
from tilecast.kernels.gemm.registry import (
    FEW,
    ONE,
    ONE_COLUMN,
    PACES,
    PARTS,
    GemmEntry,
    parts_of,
    sharing,
    together,
)
from tilecast.kernels.selection import capability_of
from tilecast.kernels.starting import on_device, sm_count

_tensor, _empty_strided = torch.Tensor, torch.empty_strided
_memory = Memory()
_INPUTS = (torch.bfloat16, torch.float16)
_OUTPUTS = (*_INPUTS, torch.float32)
#: (device index, bytes of an element of C, k) -> (any strides, (launches of which any may run), which of them (`_chooser`), SMs, `_shared`)
_known: dict[Any, tuple[bool, tuple[Any, ...], Callable[..., Choice], int, dict[str, Any]]] = {}
#: Rows, or columns, up to which a product is one of few.
_FEW = 32
#: Elements of a D at odd steps beside a whole C between which a launch that makes it of float32 sums pays, from such a k on or in place; and of a
#: C by columns up to which a launch may add up parts, whose warps read rows.
_LEAST_SUMS, _MOST_SUMS, _SUMS_K, _MOST_MERGED = 4_000_000, 32_000_000, 256, 500_000
_launchers: dict[Any, Any] = {}


class AddmmError(AttentionError):
    """A call of addmm that makes no sense: shapes, dtypes or devices that do not go together."""


class AddmmUnsupportedError(AddmmError, UnsupportedError):
    """A valid product that no shipped kernel computes."""


def addmm(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1.0, alpha: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """beta c + alpha (a b), as torch.addmm, with float32 sums in a fixed order.

    a: (m, k), b: (k, n), both bfloat16 or both float16 on one CUDA device.  c: anything that expands to (m, n), bfloat16,
    float16 or float32 whatever a is, which is also the dtype of the result; not read where beta is 0.  All may lie anyhow: rows and columns
    of a and b without gaps that start at whole 16 bytes are read by the copy engine where there is one, and others copied first.
    out: (m, n) of c's dtype, to write into; c itself adds in place.  A call with ``out`` has no gradients, as in PyTorch.

    Gradients: beta g for c, alpha g b^T for a, alpha a^T g for b, by PyTorch's own matrix products in a's dtype.

    Raises AddmmError (a ValueError) for calls that make no sense, AddmmUnsupportedError (also a NotImplementedError) for what
    no shipped kernel does.
    """
    key = None
    if type(c) is type(a) is type(b) is _tensor and (out is None or type(out) is _tensor):
        settings = (beta, beta.__class__, alpha, alpha.__class__, out is c)
        key = key_of((c, a, b) if out is None else (c, a, b, out), settings)
        if key is not None and (known := _memory.find(key)) is not None:
            return known(c, a, b, out)
    check(c, a, b)
    alpha, beta = _number("alpha", alpha), _number("beta", beta)
    shape = (a.shape[0], b.shape[1])
    if out is None:
        if c.shape != shape:
            c = c.expand(shape)
        if key is None:
            return _functional(c, a, b, beta, alpha)
        # Nothing watches and nothing has a gradient: the dispatcher would cost more than all the rest.
        out = _empty(c, a, b)
        again = _compute(c, a, b, beta, alpha, out)
        if again is not None:
            _memory.remember(key, again(False))
        return out
    if not isinstance(out, torch.Tensor) or out.shape != shape or out.dtype != c.dtype or out.device != a.device:
        got = f"{out.dtype} {tuple(out.shape)} on {out.device}" if isinstance(out, torch.Tensor) else type(out).__name__
        raise AddmmError(f"out: expected {c.dtype} {tuple(shape)} on {a.device}, got {got}")
    if any(stride == 0 and extent > 1 for stride, extent in zip(out.stride(), shape, strict=True)):
        raise AddmmError("out: expected a tensor whose elements lie apart, got an expanded one: clone it")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (c, a, b, out)):
        raise AddmmError("out: a call that writes into a tensor has no gradients, and one of the tensors requires one: leave out= away, or use torch.no_grad()")  # fmt: skip
    if c.shape != shape:
        c = c.expand(shape)
    if key is not None and not out.is_inference():
        again = _compute(c, a, b, beta, alpha, out)
        increment_version(
            out
        )  # as the dispatcher does: what has kept it for a backward pass must see that it has changed
        if again is not None:
            _memory.remember(key, again(True))
    elif out is c:
        _in_place(c, a, b, beta, alpha)
    else:
        _into(c, a, b, beta, alpha, out)
    return out


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < float("inf"):
        raise AddmmError(f"{name}: expected a finite number, got {value!r}")
    return float(value)


def check(c: Any, a: Any, b: Any) -> None:
    """AddmmError unless shapes, dtypes and devices go together."""
    for name, x in (("c", c), ("a", a), ("b", b)):
        if not isinstance(x, torch.Tensor):
            raise AddmmError(f"{name}: expected a torch tensor, got {type(x).__name__}")
    for name, x in (("a", a), ("b", b)):
        if x.dim() != 2:
            raise AddmmError(f"{name}: expected 2 dimensions, got {x.dim()}: {tuple(x.shape)}")
    if a.shape[1] != b.shape[0]:
        raise AddmmError(f"b: expected {a.shape[1]} rows as a has columns, got {b.shape[0]}")
    if b.dtype != a.dtype:
        raise AddmmError(f"b: expected dtype {a.dtype} as a has, got {b.dtype}")
    for name, x in (("b", b), ("c", c)):
        if x.device != a.device:
            raise AddmmError(f"{name}: expected device {a.device} as a has, got {x.device}")
    shape = (a.shape[0], b.shape[1])
    tail = tuple(c.shape)
    if len(tail) > 2 or any(n not in (1, w) for n, w in zip(tail[::-1], shape[::-1], strict=False)):
        raise AddmmError(f"c: expected what expands to {tuple(shape)}, got {tail}")
    if a.dtype not in _INPUTS:
        raise AddmmUnsupportedError(f"a, b: expected dtype torch.bfloat16 or torch.float16, got {a.dtype}; cast them, or use torch.addmm")  # fmt: skip
    if c.dtype not in _OUTPUTS:
        raise AddmmUnsupportedError(f"c: expected dtype torch.bfloat16, torch.float16 or torch.float32, got {c.dtype}; cast it, or use torch.addmm")  # fmt: skip


def _compute(c: Any, a: Any, b: Any, beta: float, alpha: float, out: Any) -> Any:
    """Choose a kernel and launch; ``out`` may be ``c``, which is of the shape of the result.

    Returns what gives the call of tensors like these, (whether into ``out``, else into a new one) -> (c, a, b, out) -> out; None where that
    call has more to do than to launch.
    """
    if out.numel() == 0:
        return None
    if a.shape[1] == 0:
        out.copy_(c * beta) if beta else out.zero_()
        return None
    capability = capability_of(a.device.type, a.get_device())
    if isinstance(capability, str):
        raise AddmmUnsupportedError(f"addmm: expected tensors on an NVIDIA GPU, got device '{a.device.type}'; move them, or use torch.addmm")  # fmt: skip
    key = (a.get_device(), c.element_size(), a.shape[1])
    kernels = _known.get(key)
    if kernels is None:
        kernels = _known[key] = _find(capability, *key)
    by_columns = out.stride(0) == 1 != out.stride(1)
    if by_columns:
        # Then its transpose, of which kernels write rows, is a product of the same sums.
        a, b, c, out = b.t(), a.t(), c.t(), out.t()
    any_strides, launches, chosen, sms, shared = kernels
    few = min(out.shape)
    use = ONE if few == 1 else FEW if few <= _FEW else ""
    if use in shared:
        turned = out.shape[1] < out.shape[0]
        if turned:
            a, b, c, out = b.t(), a.t(), c.t(), out.t()
        given = (a, b)
        if use == ONE and b.stride(0) < b.stride(1):
            use = ONE_COLUMN
        elif use == FEW:
            given = in_vectors(a, b, key[0])
        whole, parted, tile = shared[use]
        parts = parts_of(PACES[use], tile, out.shape[0], out.shape[1], a.shape[1], sms)
        launch = functools.partial(parted, parts=parts) if parts > 1 else whole
        launch(*given, c if beta else None, out, alpha, beta)
        return _again(launch, turned != by_columns, alpha, beta, out) if given[0] is a and given[1] is b else None
    if any_strides:
        launch, made = launches[0], False
        launch(a, b, c if beta else None, out, alpha, beta)
    else:
        _, parted, _ = shared.get(PARTS, (None, None, None))
        whole, of_columns = bool(beta) and 0 not in c.stride(), c.stride(0) < c.stride(1)
        if whole and of_columns and out.numel() > _MOST_MERGED:
            parted = None
        merged = parted is not None and whole and not of_columns and _by_sums(c, out, a.shape[1])
        ahead = whole and not (boxes(c) and boxes(out))
        choice = chosen(out.shape[0], out.shape[1], (starts(a), starts(b)), merged, parted is not None, ahead)
        # By columns where they are the shorter step: a copy that turns a matrix over takes longer.
        given = copied((a, b), choice.copies, tuple(0 < x.stride(0) < x.stride(1) for x in (a, b)), key[0])
        made = True in choice.copies
        launch = launches[choice.kernel] if choice.kernel >= 0 else functools.partial(parted, parts=choice.parts)
        launch(*given, c if beta else None, out, alpha, beta, follows=choice.early)
        if choice.kernel < 0:
            return None if made else _again(launch, by_columns, alpha, beta, out)
    if made or not hasattr(launch, "started"):
        return None
    return _known_call(launch, (a, b, c if beta else None, out, alpha, beta), by_columns)


def _by_sums(c: Any, out: Any, k: int) -> bool:
    """Whether a launch that makes D of float32 sums pays beside a whole C by rows: of a D that the copy engine does not take, with more under way than
    warpgroups have."""
    if boxes(out) or not _LEAST_SUMS < out.numel() <= _MOST_SUMS:
        return False
    return k >= _SUMS_K or (c.data_ptr() == out.data_ptr() and out.element_size() == 2)


def _again(launch: Any, turned: bool, alpha: float, beta: float, out: Any) -> Any:
    """As `_known_call` of a launch that keeps its plans itself."""

    def start(a: Any, b: Any, c: Any, out: Any) -> None:
        launch(a, b, c, out, alpha, beta)

    return functools.partial(_calls, start, turned, beta, _maker(out, turned))


def _known_call(launch: Any, arguments: tuple[Any, ...], turned: bool) -> Any:
    """(whether into ``out``) -> the call of tensors like these, of the transposed product where ``turned``, whose C may have to be expanded; it
    keeps none."""
    return lambda into: _calls(launch.started(*arguments), turned, arguments[-1], _maker(arguments[3], turned), into)


def _maker(out: Any, turned: bool) -> Any:
    """() -> a new tensor like ``out``, or where it is ``turned`` like its transpose."""
    shape = tuple(out.t().shape if turned else out.shape)
    return functools.partial(_empty_strided, shape, (shape[1], 1), dtype=out.dtype, device=out.device)


def _calls(start: Any, turned: bool, beta: float, made: Any, into: bool) -> Any:
    """(c, a, b, out) -> out, or a new one."""

    def given(c: Any, a: Any, b: Any, out: Any) -> Any:
        added = (c if c.shape == out.shape else c.expand(out.shape)) if beta else None
        if turned:
            start(b.t(), a.t(), None if added is None else added.t(), out.t())
        else:
            start(a, b, added, out)
        return out

    def new(c: Any, a: Any, b: Any, _: Any) -> Any:
        return given(c, a, b, made())

    def changed(c: Any, a: Any, b: Any, out: Any) -> Any:
        given(c, a, b, out)
        increment_version(out)
        return out

    return changed if into else new


def _chooser(
    tiles: tuple[Tiles, ...], sums: tuple[int, int] | None, k: int, c_bytes: int, sms: int
) -> Callable[..., Choice]:
    """(m, n, starts, merged, whether k may be parted, ahead) -> `choose` of what is the same for a k, kept: to look it up costs less than to hash
    all kernels."""
    parted = Tiles(*sums, False) if sums else None

    @functools.lru_cache(maxsize=1 << 10)
    def chosen(
        m: int, n: int, starts: tuple[tuple[int, int], tuple[int, int]], merged: bool, parts: bool, ahead: bool
    ) -> Choice:
        return choose(tiles, parted if parts else None, m, n, k, starts, c_bytes, sms, merged, ahead)

    return chosen


def _find(
    capability: tuple[int, int], device: int, c_bytes: int, k: int
) -> tuple[bool, tuple[Any, ...], Callable[..., Choice], int, dict[str, Any]]:
    """The best kernels of a problem met for the first time, imported; AddmmUnsupportedError where there is none."""
    gpu, sms = _device(device)
    some = together(capability, c_bytes, k, gpu=gpu)
    if not some:
        raise AddmmUnsupportedError(f"addmm: no shipped kernel runs on compute capability {capability[0]}.{capability[1]}; use torch.addmm")  # fmt: skip
    launches, any_strides = tuple(on_device(_launcher(e), device) for e in some), some[0].any_strides
    shared = _shared(capability, device, c_bytes, k, any_strides)
    sums = shared[PARTS][2] if PARTS in shared else None
    return any_strides, launches, _chooser(tiles_of(some), sums, k, c_bytes, sms), sms, shared


def _shared(capability: tuple[int, int], device: int, c_bytes: int, k: int, portable: bool) -> dict[str, Any]:
    """`USES` -> (launch of a whole k, launch of parts, tile) of the kernels kept for them; of parts only beside kernels of its kind."""
    found = {
        use: sharing(capability, use, c_bytes, k) for use in (ONE, ONE_COLUMN, FEW, *(() if portable else (PARTS,)))
    }
    return {
        use: (on_device(_launcher(e), device), on_device(_launcher(e, parted_launcher), device), e.tile)
        for use, e in found.items()
        if e is not None
    }


def _device(device: int) -> tuple[str, int]:
    """Name of a CUDA device, and its SMs."""
    return torch.cuda.get_device_name(device), sm_count(torch.device("cuda", device))


def _launcher(entry: GemmEntry, made: Any = gemm_launcher) -> Any:
    key = (entry.module, made)
    if key not in _launchers:
        try:
            module = importlib.import_module(f"{registry.PACKAGE}.{entry.module}")
        except ImportError as error:
            raise AddmmUnsupportedError(
                f"addmm: the kernels need Triton 3.6 or newer, and importing one gave '{error}'; pip install 'tilecast[gpu]'"
            ) from error
        _launchers[key] = made(module)
    return _launchers[key]


# --- the operators ----------------------------------------------------------------------------------------------------


def _run(c: Any, a: Any, b: Any, beta: float, alpha: float) -> Any:
    out = _empty(c, a, b)
    _compute(c, a, b, beta, alpha, out)
    return out


def _run_in_place(c: Any, a: Any, b: Any, beta: float, alpha: float) -> None:
    _compute(c, a, b, beta, alpha, c)


def _run_into(c: Any, a: Any, b: Any, beta: float, alpha: float, out: Any) -> None:
    _compute(c, a, b, beta, alpha, out)


def _empty(c: Any, a: Any, b: Any, *_: Any) -> Any:
    return torch.empty((a.shape[0], b.shape[1]), dtype=c.dtype, device=a.device)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, a, b, ctx.beta, ctx.alpha = inputs
    # A factor is needed only for the other one's gradient.
    ctx.save_for_backward(a if b.requires_grad else None, b if a.requires_grad else None)
    ctx.dtype = a.dtype


def _gradients(ctx: Any, grad: Any) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    need_c, need_a, need_b = ctx.needs_input_grad[:3]
    narrow = grad.to(ctx.dtype) if need_a or need_b else grad
    return (
        grad * ctx.beta if need_c else None,
        narrow @ b.t() * ctx.alpha if need_a else None,
        a.t() @ narrow * ctx.alpha if need_b else None,
        None,
        None,
    )


def _flops(c: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
    return 2 * int(a[0]) * int(a[1]) * int(b[1])


def _register() -> tuple[Any, ...]:
    library = torch.library.Library("tilecast", "FRAGMENT")
    tags = (torch.Tag.pt2_compliant_tag,)
    library.define("addmm(Tensor c, Tensor a, Tensor b, float beta, float alpha) -> Tensor", tags=tags)
    library.define("addmm_(Tensor(a!) c, Tensor a, Tensor b, float beta, float alpha) -> ()", tags=tags)
    library.define("addmm_out(Tensor c, Tensor a, Tensor b, float beta, float alpha, Tensor(a!) out) -> ()", tags=tags)
    for name, function in (("addmm", _run), ("addmm_", _run_in_place), ("addmm_out", _run_into)):
        library.impl(name, function, "CUDA")
        # No kernel runs there; registered so that a direct call says so in our words.
        library.impl(name, function, "CPU")
    torch.library.register_fake("tilecast::addmm", _empty, lib=library)
    for name in ("addmm_", "addmm_out"):
        torch.library.register_fake(f"tilecast::{name}", lambda *_: None, lib=library)
    torch.library.register_autograd("tilecast::addmm", _gradients, setup_context=_keep, lib=library)
    operators = torch.ops.tilecast
    register_flop_formula(operators.addmm)(_flops)
    return library, operators.addmm.default, operators.addmm_.default, operators.addmm_out.default


# The registrations live as long as the library object.
_library, _functional, _in_place, _into = _register()
