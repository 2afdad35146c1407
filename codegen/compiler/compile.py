"""Compile a generated kernel for a target without a GPU.  The only module of codegen that imports triton, beside `assembling`.

A generated file is loaded and its own ``launch`` is called with tensors that have shapes but no data, under a driver
that only knows the target: what gets compiled is what a launch on that GPU would compile, options included.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tilecast.base.module_file import module_of
from tilecast.codegen.compiler.assembling import Change, assembled_again
from tilecast.codegen.hopper.narrowing import change_for

#: Targets by the name users know: (compute capability, SMs of the chip, for persistent grids).
TARGETS: dict[str, tuple[int, int]] = {"sm_80": (80, 108), "sm_90a": (90, 132), "sm_100a": (100, 148), "sm_103a": (103, 148)}  # fmt: skip
_DTYPE_NAMES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp8": "torch.float8_e4m3fn"}
#: Tokens of a page that serving kernels are compiled for, and those of latent attention.
_PAGE, _LATENT_PAGE = 16, 64
_VALUE = re.compile(r"%\w+")
_serial = itertools.count()


class CompileError(ValueError):
    """A file that cannot be compiled for a target: one sentence with what, why and what to do."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One compiled kernel: Triton's intermediate texts and the machine code."""

    name: str
    target: str
    cubin: bytes
    ptx: str
    shared_bytes: int
    tmem_columns: int
    warps: int


@dataclass(frozen=True, slots=True)
class Launched:
    """A kernel that a caller's code launches: compiled, its CTAs, and how many configurations an autotuner would have timed."""

    compiled: Compiled
    ctas: int
    configurations: int


def tool(name: str) -> Path:
    """A binary of the CUDA toolkit that ships inside triton; CompileError when triton is not installed."""
    try:
        import triton
    except ImportError:
        raise CompileError("reading machine code needs triton: pip install 'tilecast[gpu]'") from None
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    if not (folder / name).exists():
        raise CompileError(f"triton {triton.__version__} ships no {name}: use a release that does (3.6 or later)")
    return folder / name


class _Name(str):
    """A dtype that prints as torch's does."""

    __slots__ = ()

    @property
    def itemsize(self) -> int:
        return 4 if self.endswith("float32") else 1 if "float8" in self else 2


@dataclass(frozen=True, slots=True)
class _Device:
    index: int
    type: str = "cuda"


class _Shape:
    """A tensor without data: what ``launch`` and Triton's argument specialisation ask of one."""

    def __init__(
        self, shape: tuple[int, ...], dtype: str, size: int, target: int, strides: tuple[int, ...] | None = None
    ) -> None:
        self.shape = shape
        self.dtype = _Name(dtype)
        self.device = _Device(target)
        self.ndim = len(shape)
        self._size = size
        dense = [1]
        for extent in reversed(shape[1:]):
            dense.insert(0, dense[0] * extent)
        self._strides = strides or tuple(dense)

    def data_ptr(self) -> int:
        return 1 << 20

    def element_size(self) -> int:
        return self._size

    def stride(self, axis: int | None = None) -> Any:
        return self._strides if axis is None else self._strides[axis]

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def is_contiguous(self) -> bool:
        return True

    def new_empty(self, shape: tuple[int, ...], dtype: Any = None) -> _Shape:
        name = self.dtype if dtype is None else _Name(dtype)
        return _Shape(tuple(shape), name, name.itemsize, self.device.index)

    new_zeros = new_empty

    def zero_(self) -> None:
        """There is nothing to fill."""

    def numel(self) -> int:
        total = 1
        for extent in self.shape:
            total *= extent
        return total


class _Properties:
    def __init__(self, sms: int) -> None:
        self._sms = sms

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"multiprocessor_count": self._sms, "max_shared_mem": 232448, "max_num_regs": 65536, "warpSize": 32}


class _OfflineDriver:
    """Answers what Triton asks of a driver before a launch, for a GPU that is not there."""

    def __init__(self, capability: int, sms: int, as_torch: bool = False) -> None:
        self._capability, self._as_torch = capability, as_torch
        self.utils = _Properties(sms)

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, _device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        if not self._as_torch:
            return _Device(self._capability)
        import torch

        return torch.device("cuda")


def load_source(path: str | Path) -> ModuleType:
    """A generated file as a module of its own; CompileError when it is not one."""
    file = Path(path)
    if not file.is_file():
        raise CompileError(f"{path}: expected a generated kernel file, found none")
    try:
        module = module_of(file, f"tilecast_generated_{next(_serial)}")
    except ModuleNotFoundError as error:
        remedy = ": pip install 'tilecast[gpu]'" if error.name in ("torch", "triton") else ""
        raise CompileError(
            f"{path}: not a kernel that can be loaded: it imports {error.name}, which is not installed{remedy}"
        ) from None
    except Exception as error:
        raise CompileError(f"{path}: not a kernel that can be loaded: {error}") from error
    if not callable(getattr(module, "launch", None)) or not isinstance(getattr(module, "TILECAST", None), dict):
        raise CompileError(
            f"{path}: expected a file written by 'tilecast generate' (TILECAST and launch), got neither; forecast and emulate take "
            "any other with --call 'function(arguments)'"
        )
    return module


@contextmanager
def _offline(
    capability: int,
    sms: int,
    found: list[Any],
    grids: list[tuple[int, ...]] | None = None,
    change: Change | None = None,
) -> Iterator[None]:
    """Inside, launching compiles and collects instead of running: kernels in ``found``, after a ``change`` of their PTX, and, of code that
    is not ours, ``grids``."""
    import triton
    from triton.runtime.jit import JITFunction

    original = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compile_with = functools.partial(original, self, *args, grid=grid, warmup=True, **kwargs)
        made = compile_with()
        found.append(made if change is None else assembled_again(made, change, compile_with))
        if grids is not None:
            grids.append(
                tuple(grid({**dict(zip(self.arg_names, args, strict=False)), **kwargs}) if callable(grid) else grid)
            )

    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(_OfflineDriver(capability, sms, grids is not None))
    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = original
        triton.runtime.driver._active = before


def _root_cause(error: BaseException) -> str:
    """What went wrong first: Triton wraps every error in the source that led to it."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    told = [line for line in lines if "error" in line.lower() and ":" in line and "codegen" not in line]
    return (told or lines[-1:] or [repr(error)])[0].rpartition("error   : ")[2]


def compile_kernel(
    path: str | Path, target: str, dtype: str = "bf16", with_lse: bool = True, shape: Mapping[str, Any] | None = None
) -> Compiled:
    """Compile the kernel of ``path`` for ``target`` (a key of TARGETS) on the shape its header names, or on ``shape``.

    ``shape`` has the fields of a workload: Triton specialises on arguments that are 1 or multiples of 16.  Raises CompileError for unknown targets, files that are no kernels, and compilations that fail.
    """
    found = compile_kernels(path, target, dtype, with_lse, shape)
    # Before e4m3 attention a kernel brings V into the matrix unit's order, and behind products of parts of k, or of keys, one adds these up.
    found = tuple(kernel for kernel in found if kernel.name not in ("prepare", "merge", "attention_join"))
    if len(found) != 1:
        names = ", ".join(kernel.name for kernel in found)
        raise CompileError(f"{path}: expected launch to start one kernel, it started {len(found)}: {names}")
    return found[0]


def compile_kernels(
    path: str | Path, target: str, dtype: str = "bf16", with_lse: bool = True, shape: Mapping[str, Any] | None = None
) -> tuple[Compiled, ...]:
    """Compile all kernels that ``launch`` of ``path`` starts, in their order: a forward pass has one, a backward pass three.

    Arguments and refusals are those of `compile_kernel`.  Kernels for e4m3 take nothing else, whatever ``dtype`` says.
    """
    if target not in TARGETS:
        raise CompileError(f"--arch: expected {', '.join(TARGETS)}, got '{target}'")
    if dtype not in _DTYPE_NAMES:
        raise CompileError(f"dtype: expected {', '.join(_DTYPE_NAMES)}, got '{dtype}'")
    try:
        import triton  # noqa: F401
    except ImportError:
        raise CompileError("compiling needs triton: pip install 'tilecast[gpu]'") from None
    module = load_source(path)
    header = module.TILECAST
    needs = header.get("targets", [])
    if needs and target not in needs:
        raise CompileError(f"{path}: written for {', '.join(needs)}, not for {target}: pick one of those with --arch")
    capability, sms = TARGETS[target]
    work = header["workload"] if shape is None else shape
    if header["workload"].get("dtype") == "fp8":
        dtype = "fp8"
    found: list[Any] = []
    try:
        arguments, options, columns = _arguments(header, work, dtype, capability, sms, with_lse)
        change = change_for(module, columns) if columns else None  # as `kernels.launching` launches it
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CompileError(
            f"{path}: expected a TILECAST header that says what the kernel is launched on, got one that does not ({error})"
        ) from None
    # Triton prints the whole PTX when the assembler refuses it; the sentence below says what matters.
    with _offline(capability, sms, found, change=change), contextlib.redirect_stdout(io.StringIO()):
        try:
            module.launch(*arguments, **options)
        except ModuleNotFoundError as error:
            raise CompileError(f"compiling needs {error.name}, which the host code of {path} imports") from None
        except Exception as error:
            raise CompileError(f"{path}: does not compile for {target}: {_root_cause(error)}") from error
    for kernel in found:
        if idle := _idle_barriers(kernel.asm["ttgir"]):
            raise CompileError(
                f"{path}: {kernel.metadata.name}: expected every mbarrier to be waited for or arrived at, got {idle} that are only set up: "
                "the compiler gives their memory to something else, which PTX forbids without mbarrier.inval: allocate none where no role uses it"
            )
    return tuple(_compiled(kernel, target) for kernel in found)


def _arguments(
    header: Mapping[str, Any], work: Mapping[str, Any], dtype: str, capability: int, sms: int, with_lse: bool
) -> tuple[tuple[Any, ...], dict[str, Any], int]:
    """What ``launch`` of a file is called with, by its header's pass: tensors of ``work`` without memory, and options; and columns of the wider of q
    and v, for which the code of some is narrowed, 0 where it never is."""
    direction, name = header.get("pass", "fwd"), _DTYPE_NAMES[dtype]
    if direction == "gemm":
        return _gemm(work, name, capability), {}, 0
    if direction == "serve":
        return *_serving(work, name, capability, sms, header["variant"].split(",")), 0
    if direction == "copy":
        x = _Shape((work["m"], work["n"]), name, 2, capability)
        return (x, x, x, x), {}, 0
    if direction == "copy rows":
        return _copy_rows(work, name, capability), {}, 0
    if direction == "quantize":
        return _quantize(work, name, capability), {}, 0
    if direction == "append":
        return *_append(work, name, capability, "cache_bits=8" in header["variant"].split(",")), 0
    left, right = work["window"] or (-1, -1)
    given = (*_tensors(work, direction, name, capability, with_lse), work["head_dim_qk"] ** -0.5, left, right)
    columns = max(work["head_dim_qk"], work["head_dim_v"])
    if dtype != "fp8":
        return given, {}, columns
    by_head = _Shape((work["batch"], work["heads_kv"]), "torch.float32", 4, capability)
    return given, {f"{x}_descale": by_head for x in "qkv"}, columns


def _idle_barriers(ttgir: str) -> int:
    """mbarriers' allocations that are set up and never used.

    Their memory is anybody's from then on, but remains a barrier to the GPU (PTX ISA, mbarrier.inval): when a context switch puts the kernel
    aside, some 32 bytes of what lies there come back changed (H200, docs/notes/serving-kernels.md).
    """
    owner: dict[str, str] = {}
    used: dict[str, bool] = {}
    for line in map(str.strip, ttgir.splitlines()):
        values = _VALUE.findall(line)
        if line.startswith("%") and "ttg.local_alloc" in line and "xi64," in line:
            owner[values[0]] = values[0]
            used[values[0]] = False
        elif line.startswith("%") and "ttg.memdesc_index" in line and values[1] in owner:
            owner[values[0]] = owner[values[1]]
        elif "ttng.init_barrier" not in line:
            used.update({owner[value]: True for value in values if value in owner})
    return sum(not one for one in used.values())


def _compiled(kernel: Any, target: str) -> Compiled:
    """What Triton has made of a kernel."""
    return Compiled(
        name=kernel.metadata.name,
        target=target,
        cubin=kernel.asm["cubin"],
        ptx=kernel.asm["ptx"],
        shared_bytes=int(kernel.metadata.shared),
        tmem_columns=int(getattr(kernel.metadata, "tmem_size", 0) or 0),
        warps=int(kernel.metadata.num_warps),
    )


def compile_launches(file: str, target: str, run: Callable[[], object]) -> tuple[Launched, ...]:
    """The kernels that ``run``, which loads and calls code of ``file``, launches, compiled for ``target`` and not run; each once.

    An autotuner takes the first of its configurations.  What the code makes of results that were not computed does not
    matter once it has launched something.  Raises CompileError with one sentence.
    """
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        raise CompileError("compiling needs triton: pip install 'tilecast[gpu]'") from None
    capability, sms = TARGETS[target]
    found: list[Any] = []
    grids: list[tuple[int, ...]] = []
    tuned: dict[str, int] = {}
    timed = Autotuner._bench

    def first(self: Any, *_args: Any, **_options: Any) -> list[float]:
        tuned[self.base_fn.__name__] = len(self.configs)
        return [1.0, 1.0, 1.0]

    Autotuner._bench = first
    try:
        with (
            _offline(capability, sms, found, grids),
            contextlib.redirect_stdout(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", module="triton")
            run()
    except (Exception, SystemExit) as error:
        if type(error).__module__.startswith("tilecast"):  # a sentence already
            raise
        if type(error).__module__.startswith("triton"):
            raise CompileError(f"{file}: does not compile for {target}: {_root_cause(error)}") from error
        if not grids:
            raise CompileError(
                f"{file}: its code ends before it launches a kernel: {type(error).__name__}: {_root_cause(error)}"
            ) from error
    finally:
        Autotuner._bench = timed
    once: dict[tuple[str, bytes], Launched] = {}
    for kernel, grid in zip(found, grids, strict=False):
        name = str(kernel.metadata.name)
        ctas = math.prod(grid) * int(getattr(kernel.metadata, "num_ctas", 1) or 1)
        once.setdefault((name, kernel.asm["cubin"]), Launched(_compiled(kernel, target), ctas, tuned.get(name, 1)))
    return tuple(once.values())


def _tensors(
    work: Mapping[str, Any], direction: str, dtype: str, capability: int, with_lse: bool
) -> tuple[_Shape | None, ...]:
    """What ``launch`` of a forward ("fwd") or a backward ("bwd") pass takes before the scale, of the shape ``work``."""

    def tensor(heads: int, length: int, width: int) -> _Shape:
        return _Shape((work["batch"], heads, length, width), dtype, _Name(dtype).itemsize, capability)

    q = tensor(work["heads_q"], work["seqlen_q"], work["head_dim_qk"])
    k = tensor(work["heads_kv"], work["seqlen_k"], work["head_dim_qk"])
    v = tensor(work["heads_kv"], work["seqlen_k"], work["head_dim_v"])
    out = tensor(work["heads_q"], work["seqlen_q"], work["head_dim_v"])
    if q.element_size() == 1:
        out = _Shape(out.shape, "torch.bfloat16", 2, capability)
    lse = _Shape(out.shape[:3], "torch.float32", 4, capability)
    if direction == "bwd":
        return q, k, v, out, lse, out, q, k, v
    return q, k, v, out, lse if with_lse else None


def _gemm(work: Mapping[str, Any], dtype: str, capability: int) -> tuple[Any, ...]:
    """What ``launch`` of a GEMM kernel takes: A and B of ``dtype`` by rows, C and D as wide as the kernel's, by rows unless ``work`` has their
    strides (c_strides, d_strides)."""
    m, n, k = work["m"], work["n"], work["k"]
    wide = work["d_dtype"] == "fp32"
    c, d = (
        _Shape((m, n), "torch.float32" if wide else dtype, 4 if wide else 2, capability, work.get(f"{name}_strides"))
        for name in "cd"
    )
    return _Shape((m, k), dtype, 2, capability), _Shape((k, n), dtype, 2, capability), c, d, work["alpha"], work["beta"]


def _serving(
    work: Mapping[str, Any], dtype: str, capability: int, sms: int, knobs: Sequence[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and options of ``launch`` of a serving kernel: queries packed, keys in the smallest pages of what the kernel is for."""
    narrow, latent = "cache_bits=8" in knobs, "latent=1" in knobs or "family=mla-hopper" in knobs
    page = _LATENT_PAGE if latent else _PAGE
    kinds = ("torch.uint8", 1) if narrow else (dtype, 2)
    batch, heads_kv, rows, keys = work["batch"], work["heads_kv"], work["seqlen_q"], work["seqlen_k"]

    def tensor(*shape: int) -> _Shape:
        return _Shape(shape, dtype, 2, capability)

    def whole(*shape: int) -> _Shape:
        return _Shape(shape, "torch.int32", 4, capability)

    q, out = (tensor(batch * rows, work["heads_q"], work[name]) for name in ("head_dim_qk", "head_dim_v"))
    lse = _Shape((work["heads_q"], batch * rows), "torch.float32", 4, capability)
    lists = {"cu_seqlens_q": whole(batch + 1), "seqused_k": whole(batch), "block_table": whole(batch, keys // page)}
    pool = (batch * keys // page, page, heads_kv)
    k, v = (_Shape((*pool, work[name]), *kinds, capability) for name in ("head_dim_qk", "head_dim_v"))
    if latent:  # the first columns of k
        v = _Shape((*pool, work["head_dim_v"]), *kinds, capability, k.stride())
    if narrow:
        lists |= {f"{x}_descale": _Shape((batch, heads_kv), "torch.float32", 4, capability) for x in "kv"}
    scratch = [_Shape((1 << 30,), kind, 4, capability) for kind in ("torch.float32", "torch.int32")]
    return (q, k, v, out, lse, work["head_dim_qk"] ** -0.5), {
        **lists, "max_seqlen_q": rows, "max_seqlen_k": keys, "work": scratch, "sms": sms,
    }  # fmt: skip


def _quantize(work: Mapping[str, Any], dtype: str, capability: int) -> tuple[Any, ...]:
    """What ``launch`` of the kernel that quantises takes: q, k and v, bytes of their shapes, and factors."""
    q, k, v, *_ = _tensors(work, "fwd", dtype, capability, False)
    assert q is not None and k is not None and v is not None
    made = [_Shape(x.shape, "torch.uint8", 1, capability) for x in (q, k, v)]
    return q, k, v, *made, _Shape((3, *k.shape[:2]), "torch.float32", 4, capability)


def _copy_rows(work: Mapping[str, Any], dtype: str, capability: int) -> tuple[Any, ...]:
    """What ``launch`` of the kernel that copies rows takes: q, k and v, and room for them."""
    tensors = _tensors(work, "fwd", dtype, capability, False)[:3]
    return tensors, tensors


def _append(
    work: Mapping[str, Any], dtype: str, capability: int, narrow: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and options of ``launch`` of a kernel that appends: packed queries and keys, rotated, to pages."""
    batch, heads_kv, rows, keys = work["batch"], work["heads_kv"], work["seqlen_q"], work["seqlen_k"]
    dims = work["head_dim_qk"], work["head_dim_v"]
    kinds = ("torch.uint8", 1) if narrow else (dtype, 2)

    def whole(*shape: int) -> _Shape:
        return _Shape(shape, "torch.int32", 4, capability)

    news = [_Shape((batch * rows, heads_kv, dim), dtype, 2, capability) for dim in dims]
    pools = [_Shape((batch * keys // _PAGE, _PAGE, heads_kv, dim), *kinds, capability) for dim in dims]
    q, turned = (_Shape((batch * rows, work["heads_q"], dims[0]), dtype, 2, capability) for _ in range(2))
    table = _Shape((keys, dims[0] // 2), dtype, 2, capability)
    scales = {f"{x}_descale": _Shape((batch, heads_kv), "torch.float32", 4, capability) for x in "kv"}
    return (*news, *pools, whole(batch), whole(batch)), {
        "cu_seqlens_k_new": whole(batch + 1), "cu_seqlens_q": whole(batch + 1), "block_table": whole(batch, keys // _PAGE),
        "rotary_cos": table, "rotary_sin": table, "q": q, "turned": turned, **(scales if narrow else {}),
    }  # fmt: skip
