"""The blackwell_ws family: what its context decides, what its kernels compute, what they compile to.

There is no Blackwell GPU here, so kernels run on a stand-in for Gluon: generated files are plain Python, roles are threads,
copies and matrix products finish late and at random on threads of their own, and memory starts as NaN.  A missing wait
shows as a wrong result, a wrong phase as a deadlock.
"""

from __future__ import annotations

import ast
import importlib.util
import queue
import random
import re
import sys
import threading
import time
import types
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilecast.codegen import blackwell_ws
from tilecast.codegen.render import render
from tilecast.model.graph import Step
from tilecast.model.machine import load_machine
from tilecast.model.pipelines import build_pipeline
from tilecast.model.variant import Fa4Variant, VariantError, fa4_smem_bytes
from tilecast.model.workload import Workload

PATIENCE_SECONDS = 20.0


class Dtype:
    def __init__(self, name: str, numpy: Any) -> None:
        self.name, self.numpy = name, numpy


F16, F32, I32, I64 = (
    Dtype("fp16", np.float16),
    Dtype("fp32", np.float32),
    Dtype("i32", np.int32),
    Dtype("i64", np.int64),
)


def _raw(x: Any) -> Any:
    return x.a if isinstance(x, Tensor) else x


class Tensor:
    """A tensor in registers; only its values matter."""

    def __init__(self, a: Any, layout: Any = None) -> None:
        self.a = np.asarray(a)
        self.type = types.SimpleNamespace(layout=layout)

    shape = property(lambda self: list(self.a.shape))

    def to(self, dtype: Dtype) -> Tensor:
        return Tensor(self.a.astype(dtype.numpy))

    def reshape(self, shape: list[int]) -> Tensor:
        return Tensor(self.a.reshape(shape))

    def permute(self, *order: int) -> Tensor:
        return Tensor(self.a.transpose(order))

    def split(self) -> tuple[Tensor, Tensor]:
        return Tensor(self.a[..., 0]), Tensor(self.a[..., 1])

    def __getitem__(self, key: Any) -> Tensor:
        return Tensor(self.a[key])

    def __invert__(self) -> Tensor:
        return Tensor(~self.a)

    def __neg__(self) -> Tensor:
        return Tensor(-self.a)


def _operator(name: str) -> None:
    def forward(self: Tensor, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        other = _raw(other)
        if self.a.dtype == np.float32 and isinstance(other, float):
            other = np.float32(other)
        with np.errstate(all="ignore"):
            return Tensor(getattr(self.a, name)(other))

    setattr(Tensor, name, forward)


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "and", "or", "lshift", "rlshift"):
    _operator(f"__{_name}__")
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _operator(f"__{_name}__")


class Pointer:
    def __init__(self, base: Any, offset: Any = 0) -> None:
        self.base, self.offset = base, offset
        self.dtype = types.SimpleNamespace(element_ty=F32 if base.dtype == np.float32 else F16)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.base, self.offset + other)

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.base, self.offset[key])


class Int(int):
    """A scalar that knows .to, as Triton's do."""

    def to(self, _dtype: Any) -> int:
        return int(self)

    @property
    def value(self) -> int:
        return int(self)


def _integer(name: str) -> None:
    def forward(self: Int, other: Any) -> Any:
        out = getattr(int, name)(self, other)
        return Int(out) if isinstance(out, int) else out

    setattr(Int, name, forward)


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
    _integer(f"__{_name}__")


class Machine:
    """What one program shares: a clock of barriers, the tensor core, the copy engine."""

    def __init__(self, ctas: int, seed: int) -> None:
        self.ctas = ctas
        self.ready = threading.Condition()
        self.random = random.Random(seed)
        self.failed: BaseException | None = None
        self.engine: queue.Queue[Any] = queue.Queue()
        self.program = 0
        self.columns = 0
        self.tmem = np.full((128 * ctas, 2048), 0xFF, np.uint8)

    def pause(self) -> None:
        if self.random.random() < 0.3:
            time.sleep(self.random.random() * 0.002)

    def run_engine(self) -> None:
        while (job := self.engine.get()) is not None:
            self.pause()
            job()


class Barrier:
    def __init__(self, machine: Machine, shared: bool) -> None:
        self.machine, self.shared = machine, shared
        self.count = self.pending = self.bytes = self.phase = 0

    def step(self, arrivals: int = 0, size: int = 0) -> None:
        with self.machine.ready:
            self.pending -= arrivals
            self.bytes += size
            assert self.pending >= 0, "more arrivals than the barrier counts"
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase + 1, self.count
                self.machine.ready.notify_all()

    def wait(self, parity: int) -> None:
        machine = self.machine
        machine.pause()
        with machine.ready:
            done = machine.ready.wait_for(lambda: machine.failed or self.phase & 1 != int(parity), PATIENCE_SECONDS)
            if machine.failed or not done:
                raise TimeoutError(f"deadlock: barrier waits for parity {parity} in phase {self.phase}")


class Shared:
    """Shared memory, or an array of barriers."""

    def __init__(self, a: Any) -> None:
        self.a = a

    shape = property(lambda self: list(self.a.shape))
    dtype = F16

    def index(self, i: Any) -> Any:
        item = self.a[int(i)]
        return item[0] if item.dtype == object else Shared(item)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        assert dim == 0
        return Shared(self.a[start : start + length])

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.a.reshape(shape))

    def permute(self, order: Any) -> Shared:
        return Shared(self.a.transpose(order))

    def load(self, layout: Any = None) -> Tensor:
        return Tensor(self.a.copy(), layout)

    def store(self, value: Tensor) -> None:
        self.a[...] = value.a


class Tmem:
    """Columns of tensor memory, seen as `dtype`; two views may overlap."""

    def __init__(self, machine: Machine, byte: int, columns: int, dtype: Any) -> None:
        self.machine, self.byte, self.columns, self.dtype = machine, byte, columns, dtype

    shape = property(lambda self: [self.machine.tmem.shape[0], self.columns])

    @property
    def view(self) -> Any:
        size = np.dtype(self.dtype).itemsize * self.columns
        return self.machine.tmem[:, self.byte : self.byte + size].view(self.dtype)

    def slice(self, start: int, length: int) -> Tmem:
        return Tmem(self.machine, self.byte + start * np.dtype(self.dtype).itemsize, length, self.dtype)

    def reinterpret(self, dtype: Dtype, shape: list[int], _layout: Any) -> Tmem:
        return Tmem(self.machine, self.byte, shape[1], dtype.numpy)

    def load(self, layout: Any = None) -> Tensor:
        return Tensor(self.view.copy(), layout)

    def load_max(self, layout: Any = None, propagate_nan: Any = None) -> tuple[Tensor, Tensor]:
        values = self.view.copy()
        return Tensor(values, layout), Tensor(values.max(axis=1))

    def store(self, value: Tensor) -> None:
        assert list(value.a.shape) == self.shape and value.a.dtype == self.dtype
        self.view[...] = value.a


# --- PTX --------------------------------------------------------------------------------------------------------------


def _f(bits: Any) -> Any:
    return bits.view(np.float32)


def _b(floats: Any) -> Any:
    return np.asarray(floats, np.float32).view(np.uint32)


def _down(exact: Any) -> Any:
    near = exact.astype(np.float32)
    return np.where(near > exact, np.nextafter(near, np.float32(-np.inf)), near).astype(np.float32)


def _packed(op: str, xs: list[Any]) -> Any:
    a = [_f(x).astype(np.float64) for x in xs]
    exact = {
        "fma": lambda: a[0] * a[1] + a[2],
        "mul": lambda: a[0] * a[1],
        "add": lambda: a[0] + a[1],
        "sub": lambda: a[0] - a[1],
    }[op.split(".")[0]]()
    return _b(_down(exact) if ".rm." in op else exact.astype(np.float32))


def ptx(text: str, inputs: list[Any], outputs: int, machine: Machine | None = None) -> list[Any]:
    """Run the PTX of an inline assembly block on arrays of 32-bit registers."""
    env: dict[str, Any] = {f"${outputs + i}": np.ascontiguousarray(x).view(np.uint32) for i, x in enumerate(inputs)}
    like = next(iter(env.values()))

    def value(token: str) -> Any:
        token = token.strip()
        if token in env:
            return env[token]
        if token.startswith("0f"):
            return np.full_like(like, int(token[2:], 16))
        if token.startswith("0x"):
            number = int(token, 16)
            return (np.full_like(like, number & 0xFFFFFFFF), np.full_like(like, number >> 32))
        if token in ("%ctaid.x", "%clusterid.x"):
            assert machine is not None
            return np.full_like(like, machine.program)
        return np.full_like(like, int(token))

    body = text.strip()
    body = body[1:-1] if body.startswith("{") else body
    with np.errstate(all="ignore"):
        for statement in filter(None, (s.strip() for s in body.split(";"))):
            op, rest = statement.split(None, 1)
            if op == ".reg":
                continue
            groups = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
            target, sources = groups[0], groups[1:]
            if op == "mov.b64" and sources[0].startswith("{"):
                env[target] = tuple(value(t) for t in sources[0].strip("{}").split(","))
            elif op == "mov.b64" and target.startswith("{"):
                for name, half in zip(target.strip("{}").split(","), value(sources[0]), strict=True):
                    env[name.strip()] = half
            elif op.startswith("mov"):
                env[target] = value(sources[0])
            elif op.endswith("f32x2"):
                pairs = [value(s) for s in sources]
                env[target] = tuple(_packed(op, [pair[half] for pair in pairs]) for half in (0, 1))
            elif op.startswith("max."):
                pick = np.maximum if ".NaN." in op else np.fmax
                out = _f(value(sources[0]))
                for s in sources[1:]:
                    out = pick(out, _f(value(s)))
                env[target] = _b(out)
            elif op.startswith("ex2."):
                env[target] = _b(np.exp2(_f(value(sources[0]))))
            elif op == "shl.b32":
                env[target] = value(sources[0]) << int(sources[1])
            elif op == "add.s32":
                env[target] = value(sources[0]) + value(sources[1])
            else:
                raise NotImplementedError(statement)
    return [env[f"${i}"] for i in range(outputs)]


# --- the modules a generated file imports --------------------------------------------------------------------------------


@dataclass
class Descriptor:
    base: Any
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any

    @property
    def dtype(self) -> Dtype:
        return F16


class Launcher:
    """A jitted function: called inside the kernel, or launched with a grid."""

    def __init__(self, fn: Any, state: types.SimpleNamespace) -> None:
        self.fn, self.state = fn, state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*args: Any, num_ctas: int = 1, **_options: Any) -> None:
            args = tuple(Pointer(a.data) if isinstance(a, Array) else a for a in args)
            args = tuple(Int(a) if isinstance(a, int) else a for a in args)
            for program in range(grid[0]):
                machine = self.state.machine = Machine(num_ctas, self.state.seed + program)
                machine.program = program
                self.state.machine = machine
                engine = threading.Thread(target=machine.run_engine, daemon=True)
                engine.start()
                self.fn(*args)
                machine.engine.put(None)
                engine.join()
                if machine.failed:
                    raise machine.failed

        return launch


class Array:
    """A torch-like tensor over numpy data of shape (batch, heads, rows, columns)."""

    def __init__(self, data: Any) -> None:
        self.data, self.shape = data, data.shape
        self.dtype = "torch.float16" if data.dtype == np.float16 else "torch.float32"
        self.device = "numpy"

    def data_ptr(self) -> int:
        return 4096

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.data.itemsize for s in self.data.strides)

    def numel(self) -> int:
        return int(self.data.size)


def modules(seed: int = 0) -> dict[str, types.ModuleType]:
    """Fakes for sys.modules."""
    state = types.SimpleNamespace(machine=None, seed=seed)

    def machine() -> Machine:
        found: Machine = state.machine
        return found

    def warp_specialize(roles: list[Any], _warps: list[int], _registers: list[int]) -> None:
        current = machine()

        def run(fn: Any, args: Any) -> None:
            try:
                fn(*args)
            except BaseException as error:
                with current.ready:
                    current.failed = current.failed or error
                    current.ready.notify_all()

        threads = [threading.Thread(target=run, args=role) for role in roles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def allocate_shared(dtype: Dtype, shape: list[int], _layout: Any, shared: bool = False) -> Shared:
        if dtype is I64:
            bars = np.empty(shape, object)
            for i in range(shape[0]):
                bars[i, 0] = Barrier(machine(), shared)
            return Shared(bars)
        return Shared(np.full(shape, np.nan, dtype.numpy))

    def allocate_tensor(dtype: Dtype, shape: list[int], _layout: Any) -> Tmem:
        start = machine().columns
        machine().columns += shape[1]
        assert machine().columns <= 512
        return Tmem(machine(), 4 * start, shape[1], dtype.numpy)

    def init(bar: Barrier, count: int) -> None:
        bar.count = bar.pending = count

    def load(desc: Descriptor, coordinates: list[Any], bar: Barrier, target: Shared) -> None:
        current = machine()

        def copy() -> None:
            current.pause()
            time.sleep(current.random.random() * 0.003)
            block = np.zeros(desc.block_shape, desc.base.data.dtype)
            first = [int(c) for c in coordinates]
            low = [max(c, 0) for c in first]
            high = [min(c + n, s) for c, n, s in zip(first, desc.block_shape, desc.shape, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                inside = tuple(slice(a - c, b - c) for a, b, c in zip(low, high, first, strict=True))
                block[inside] = desc.base.data[tuple(slice(a, b) for a, b in zip(low, high, strict=True))]
            target.a[...] = block
            bar.step(size=-block.nbytes)

        threading.Thread(target=copy).start()

    def read(operand: Any) -> Any:
        return (operand.view if isinstance(operand, Tmem) else operand.a).astype(np.float32)

    def mma(a: Any, b: Any, acc: Tmem, use_acc: Any = True) -> None:
        def multiply() -> None:
            with np.errstate(all="ignore"):
                product = read(a) @ read(b)
                acc.view[...] = acc.view + product if bool(use_acc) else product

        machine().engine.put(multiply)

    def inline(asm: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
        outputs = constraints.count("=")
        if all(not isinstance(a, Tensor) for a in args):
            out = ptx(asm, [np.array([int(a)], np.int32) for a in args], outputs, machine())
            return Int(out[0].view(np.int32)[0])
        arrays = np.broadcast_arrays(
            *[np.asarray(_raw(a), dtype.numpy if not isinstance(a, Tensor) else None) for a in args]
        )
        shape = arrays[0].shape
        groups = [np.ascontiguousarray(a).reshape(-1, pack) for a in arrays]
        registers = [np.ascontiguousarray(g[:, i]) for g in groups for i in range(pack)]
        out = ptx(asm, registers, outputs, machine())
        return Tensor(np.stack([o.view(dtype.numpy) for o in out], axis=1).reshape(shape))

    def where(condition: Any, a: Any, b: Any) -> Any:
        if not any(isinstance(x, Tensor) for x in (condition, a, b)):
            return a if condition else b
        picked = np.where(_raw(condition), _raw(a), _raw(b))
        return Tensor(picked.astype(np.float32) if picked.dtype == np.float64 else picked)

    def least(a: Any, b: Any) -> Any:
        both = np.minimum(_raw(a), _raw(b))
        return Tensor(both) if isinstance(a, Tensor) or isinstance(b, Tensor) else Int(both)

    def most(a: Any, b: Any) -> Any:
        both = np.maximum(_raw(a), _raw(b))
        return Tensor(both) if isinstance(a, Tensor) or isinstance(b, Tensor) else Int(both)

    def store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
        offsets, values, wanted = np.broadcast_arrays(pointer.offset.a, value.a, mask.a)
        flat = pointer.base.reshape(-1)
        assert np.shares_memory(flat, pointer.base)
        flat[offsets[wanted]] = values[wanted]

    def quiet(fn: Any) -> Any:
        def call(x: Tensor) -> Tensor:
            with np.errstate(all="ignore"):
                return Tensor(fn(x.a))

        return call

    def module(name: str, **names: Any) -> types.ModuleType:
        out = types.ModuleType(name)
        out.__dict__.update(names)
        return out

    layouts = types.SimpleNamespace(get_default_for=lambda *_a, **_k: None)
    gl = module(
        "triton.experimental.gluon.language",
        constexpr=lambda x=None: Int(x) if type(x) is int else x, float16=F16, bfloat16=None, float32=F32, int32=I32, int64=I64,
        DistributedLinearLayout=lambda **k: ("rows", k["shape"]), SliceLayout=lambda d, p: ("slice", d, p),
        SwizzledSharedLayout=lambda *_a, **_k: None, NVMMASharedLayout=layouts,
        inline_asm_elementwise=inline, convert_layout=lambda x, layout, assert_trivial=False: Tensor(x.a, layout),
        static_range=range, to_tensor=Int, range=None, where=where, minimum=least, maximum=most, store=store,
        arange=lambda a, b, layout=None: Tensor(np.arange(a, b, dtype=np.int32)),
        full=lambda shape, value, dtype, layout=None: Tensor(np.full(shape, value, dtype.numpy), layout),
        exp2=quiet(np.exp2), log2=quiet(np.log2), max=lambda x, axis: int(x.a.max(axis)),
        allocate_shared_memory=allocate_shared, warp_specialize=warp_specialize,
    )  # fmt: skip
    mbarrier = types.SimpleNamespace(
        MBarrierLayout=lambda: None,
        allocate_mbarrier=lambda batch, two_ctas=False: allocate_shared(I64, [batch, 1], None, two_ctas),
        init=init,
        wait=lambda bar, parity: bar.wait(parity),
        arrive=lambda bar: (machine().pause(), bar.step(1)),
        expect=lambda bar, size: bar.step(1, size * machine().ctas),
    )
    blackwell = module(
        "triton.experimental.gluon.language.nvidia.blackwell",
        TensorMemoryLayout=lambda *_a, **_k: None, allocate_tensor_memory=allocate_tensor, mbarrier=mbarrier,
        tcgen05_commit=lambda bar: machine().engine.put(lambda: bar.step(1)), tcgen05_mma=mma,
        tensor_memory_descriptor=Tmem, tma=types.SimpleNamespace(async_load=load),
    )  # fmt: skip
    driver = types.SimpleNamespace(
        get_current_device=lambda: 0,
        utils=types.SimpleNamespace(get_device_properties=lambda _d: {"multiprocessor_count": 2}),
    )
    gluon = module(
        "triton.experimental.gluon", jit=lambda fn: Launcher(fn, state), constexpr_function=lambda fn: fn, language=gl
    )
    triton = module(
        "triton", cdiv=lambda a, b: -(-a // b), language=types.SimpleNamespace(PropagateNan=types.SimpleNamespace(ALL=1)),
        runtime=types.SimpleNamespace(driver=types.SimpleNamespace(active=driver)),
    )  # fmt: skip
    return {
        "triton": triton,
        "triton.experimental": module("triton.experimental", gluon=gluon),
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": gl,
        "triton.experimental.gluon.language.nvidia": module("triton.experimental.gluon.language.nvidia"),
        "triton.experimental.gluon.language.nvidia.blackwell": blackwell,
        "triton.experimental.gluon.nvidia": module("triton.experimental.gluon.nvidia"),
        "triton.experimental.gluon.nvidia.blackwell": module("x", TensorDescriptor=Descriptor),
    }


def load_kernel(source: str, seed: int = 0) -> types.ModuleType:
    saved = {
        name: sys.modules.get(name) for name in list(sys.modules) if name == "triton" or name.startswith("triton.")
    }
    for name in saved:
        del sys.modules[name]
    fakes = modules(seed)
    sys.modules.update(fakes)
    try:
        out = types.ModuleType("generated")
        out.__dict__["range"] = lambda *a: map(Int, range(*map(int, a)))
        exec(compile(source, "generated", "exec"), out.__dict__)
    finally:
        for name in fakes:
            sys.modules.pop(name, None)
        sys.modules.update({k: v for k, v in saved.items() if v is not None})
    return out


# --- helpers ------------------------------------------------------------------------------------------------------------


def source_of(variant: Fa4Variant, workload: Workload, machine: str = "b200", pipeline: Any = None) -> str:
    context = blackwell_ws.context(variant, workload, load_machine(machine), pipeline)
    header = f"TILECAST = { ({'workload': workload.as_dict(), 'targets': ['sm_100a', 'sm_103a']})!r}"
    return render(blackwell_ws.TEMPLATE, {**context, "header": header})


def heads(dim_qk: int, dim_v: int = 0, mask: str = "none", window: tuple[int, int] | None = None) -> Workload:
    return Workload(head_dim_qk=dim_qk, head_dim_v=dim_v or dim_qk, mask=mask, window=window, heads_q=4, heads_kv=2)


def reference(q: Any, k: Any, v: Any, scale: float, left: int, right: int) -> tuple[Any, Any]:
    """Attention in float64: output and logarithm of the row sums."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = np.einsum("bhqd,bhkd->bhqk", q, k) * scale
    i, j = np.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2], np.arange(k.shape[2])[None, :]
    hidden = ((left >= 0) & (j < i - left)) | ((right >= 0) & (j > i + right))
    s = np.where(hidden, -np.inf, s)
    with np.errstate(all="ignore"):
        most = s.max(-1, keepdims=True)
        p = np.exp(s - np.where(np.isneginf(most), 0, most))
        total = p.sum(-1, keepdims=True)
        out = np.where(total == 0, 0, np.einsum("bhqk,bhkd->bhqd", p, v) / total)
        return out, np.where(total == 0, -np.inf, np.log(total) + most)[..., 0]


def run(
    source: str, workload: Workload, seqlens: tuple[int, int], seed: int = 0, poison: bool = False
) -> tuple[Any, ...]:
    """(out, lse, expected out, expected lse) of the kernel on the stand-in."""
    rng = np.random.default_rng(seed)
    (sq, sk), w = seqlens, workload
    shapes = ((w.heads_q, sq, w.head_dim_qk), (w.heads_kv, sk, w.head_dim_qk), (w.heads_kv, sk, w.head_dim_v))
    q, k, v = (rng.standard_normal((1, *shape)).astype(np.float16) for shape in shapes)
    q[:, :, : sq // 2] *= 4  # sharp rows, whose maximum moves by more than the threshold
    if poison:
        q[0, 0, 7, 3], q[0, 1, 9, 3] = np.nan, np.inf
    out, lse = np.full((1, w.heads_q, sq, w.head_dim_v), 7, np.float16), np.full((1, w.heads_q, sq), 7, np.float32)
    left, right = w.window or (-1, 0 if w.mask == "causal" else -1)
    load_kernel(source, seed).launch(*map(Array, (q, k, v, out, lse)), w.head_dim_qk**-0.5, left, right)
    return out, lse, *reference(q, k, v, w.head_dim_qk**-0.5, left, right)


# --- what the context decides -------------------------------------------------------------------------------------------


def order(steps: Any) -> list[tuple[str, int]]:
    return [(step["op"], step["tile"]) for step in steps if step["last_part"]]


def test_matrix_order_comes_from_the_pipeline() -> None:
    workload, variant, machine = heads(128), Fa4Variant(), load_machine("b200")
    context = blackwell_ws.context(variant, workload, machine)
    assert order(context["loop_issue"]) == [("PV", 0), ("QK", 0), ("PV", 1), ("QK", 1)]
    assert order(context["first_issue"]) == [("QK", 0), ("QK", 1)]
    assert order(context["last_issue"]) == [("PV", 0), ("PV", 1)]
    pipeline = build_pipeline(workload, variant, machine)
    changed = with_matrix_program(pipeline, ("pv1a", "pv1b", "pv0a", "pv0b", "qk1", "qk0"))
    context = blackwell_ws.context(variant, workload, machine, changed)
    assert order(context["loop_issue"]) == [("PV", 1), ("PV", 0), ("QK", 1), ("QK", 0)]
    assert [step["take"] for step in context["loop_issue"]] == [True, False, False, False, True, False]
    assert [step["release"] for step in context["loop_issue"]] == [False, False, False, True, False, True]


def with_matrix_program(pipeline: Any, names: tuple[str, ...]) -> Any:
    program = tuple(Step(name, 1 if name.startswith("qk") else 0) for name in names)
    roles = tuple(replace(role, program=program) if role.name == "mma" else role for role in pipeline.roles)
    return replace(pipeline, roles=roles)


def test_refuses_an_order_that_overwrites_p() -> None:
    workload, variant, machine = heads(128), Fa4Variant(), load_machine("b200")
    bad = with_matrix_program(
        build_pipeline(workload, variant, machine), ("pv0a", "qk0", "pv0b", "pv1a", "pv1b", "qk1")
    )
    with pytest.raises(VariantError, match="qk0 must come after pv0"):
        blackwell_ws.context(variant, workload, machine, bad)


@pytest.mark.parametrize(("dim_qk", "dim_v"), [(64, 64), (96, 96), (128, 128), (192, 128)])
@pytest.mark.parametrize("group", [1, 2])
def test_rings_are_as_deep_as_the_model_says(dim_qk: int, dim_v: int, group: int) -> None:
    variant, workload, machine = Fa4Variant(cta_group=group), heads(dim_qk, dim_v), load_machine("b200")
    context = blackwell_ws.context(variant, workload, machine)
    slots = fa4_smem_bytes(variant, workload, machine)[2]
    if context["shared_ring"]:
        assert context["k_slots"] == context["v_slots"] == slots
    else:
        assert context["k_slots"] + context["v_slots"] == slots


@pytest.mark.parametrize(
    ("variant", "dims"),
    [
        (Fa4Variant(), (128, 128)),
        (Fa4Variant(), (192, 128)),
        (Fa4Variant(), (96, 96)),
        (Fa4Variant(split="k"), (256, 256)),
        (Fa4Variant(tile_n=64), (64, 64)),
    ],
)
def test_tensor_memory_fits_and_does_not_overlap(variant: Fa4Variant, dims: tuple[int, int]) -> None:
    context = blackwell_ws.context(variant, heads(*dims), load_machine("b200"))
    end = 0
    for _name, start, columns in context["tmem_map"]:
        assert start == end
        end = start + columns
    assert end == context["tmem_columns"] <= 512


@pytest.mark.parametrize("share", [0.0, 0.0625, 0.125, 0.1875, 0.25, 0.3125, 0.703125, 1.0])
@pytest.mark.parametrize("tile_n", [64, 128])
def test_emulated_share_is_exact(share: float, tile_n: int) -> None:
    if share * tile_n / 2 % 1:
        pytest.skip("no whole pairs")
    columns = blackwell_ws.emulated_columns(Fa4Variant(emulated_share=share, tile_n=tile_n))
    assert all(len(set(c)) == len(c) and all(0 <= k < tile_n // 4 and k % 2 == 0 for k in c) for c in columns)
    assert 2 * sum(map(len, columns)) == share * tile_n
    assert not columns[3] or share > 0.75


def test_emulated_columns_follow_the_published_rule() -> None:
    assert blackwell_ws.emulated_columns(Fa4Variant(emulated_share=0.125)) == (
        (),
        (12, 14, 28, 30),
        (12, 14, 28, 30),
        (),
    )
    quarter = (6, 8, 16, 18, 26, 28)
    assert blackwell_ws.emulated_columns(Fa4Variant(emulated_share=0.1875)) == ((), quarter, quarter, ())


@pytest.mark.parametrize(
    ("variant", "workload", "message"),
    [
        (Fa4Variant(emulated_share=0.3), heads(128), "nearest: 0.296875 and 0.3125"),
        (Fa4Variant(stages=3, tile_n=64), heads(64), "two softmax groups"),
        (Fa4Variant(tile_n=96), heads(128), "tile_n must be 64 or 128"),
        (Fa4Variant(poly_degree=2), heads(128), "poly_degree"),
        (Fa4Variant(scheduler="work-stealing"), heads(128), "scheduler"),
        (Fa4Variant(), heads(80), "multiple of 32"),
        (Fa4Variant(), heads(256), "split=k"),
        (Fa4Variant(load_max=True), heads(128), "load_max=false"),
        (Fa4Variant(split="k", stats_slots=2), heads(128), "stats_slots=1"),
    ],
)
def test_refusals_name_the_reason(variant: Fa4Variant, workload: Workload, message: str) -> None:
    with pytest.raises(VariantError, match=message):
        blackwell_ws.context(variant, workload, load_machine("b200"))


# --- what the kernels compute ---------------------------------------------------------------------------------------------

CASES = {
    "full": (Fa4Variant(emulated_share=0.1875, scheduler="persistent"), heads(128), "b200", (300, 333)),
    "causal": (Fa4Variant(emulated_share=0.125, scheduler="longest-first"), heads(128, mask="causal"), "b200", (600, 700)),
    "rows without keys": (Fa4Variant(scheduler="longest-first"), heads(128, mask="causal"), "b200", (300, 130)),
    "window": (Fa4Variant(stats_slots=2, scheduler="persistent"), heads(128, mask="window", window=(100, 20)), "b200", (400, 500)),
    "one-sided window": (Fa4Variant(), heads(64, mask="window", window=(30, -1)), "b200", (400, 300)),
    "always rescale": (Fa4Variant(rescale_threshold=0.0, scheduler="persistent"), heads(64), "b200", (257, 500)),
    "one group": (Fa4Variant(stages=1, split_p=False, scheduler="persistent"), heads(64, mask="causal"), "b200", (300, 500)),
    "narrow blocks": (Fa4Variant(tile_n=64, poly_degree=5, emulated_share=0.25), heads(128, mask="causal"), "b200", (300, 400)),
    "odd width": (Fa4Variant(scheduler="persistent"), heads(96, mask="causal"), "b200", (300, 500)),
    "uneven heads": (Fa4Variant(scheduler="persistent"), heads(192, 128), "b200", (300, 400)),
    "alternate keys": (Fa4Variant(split="k", emulated_share=0.25, scheduler="persistent"), heads(256), "b200", (200, 500)),
    "alternate keys, causal": (Fa4Variant(split="k", scheduler="persistent"), heads(128, mask="causal"), "b200", (300, 700)),
    "pair": (Fa4Variant(cta_group=2, emulated_share=0.1875, scheduler="persistent"), heads(128), "b200", (700, 500)),
    "maximum on load": (Fa4Variant(load_max=True, scheduler="persistent"), heads(128, mask="causal"), "b300", (300, 500)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_computes_attention(case: str) -> None:
    variant, workload, machine, seqlens = CASES[case]
    out, lse, expected, expected_lse = run(source_of(variant, workload, machine), workload, seqlens, seed=len(case))
    np.testing.assert_allclose(out, expected, atol=4e-3)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-4)


def test_computes_attention_in_another_matrix_order() -> None:
    variant, workload = Fa4Variant(scheduler="persistent"), heads(64)
    pipeline = build_pipeline(workload, variant, load_machine("b200"))
    source = source_of(
        variant, workload, pipeline=with_matrix_program(pipeline, ("pv1a", "pv1b", "pv0a", "pv0b", "qk1", "qk0"))
    )
    out, _, expected, _ = run(source, workload, (300, 500))
    np.testing.assert_allclose(out, expected, atol=4e-3)


def test_nan_and_infinity_stay_in_their_rows() -> None:
    variant, workload = Fa4Variant(emulated_share=0.25), heads(128)
    out, _, expected, _ = run(source_of(variant, workload), workload, (300, 333), poison=True)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(expected))
    assert np.isnan(out[0, 0, 7]).all() and np.isnan(out[0, 1, 9]).all() and np.isfinite(out[0, 2:]).all()


@pytest.mark.parametrize(
    "line",
    [
        "mbarrier.wait(p_rest.index(0), p_phase)",
        "mbarrier.wait(p_ready.index(0), p_phase)",
        "mbarrier.wait(s_full, s_phase)",
        "mbarrier.wait(ring_free.index(ring_slot), ring_phase ^ 1)",
        "tcgen05_commit(ring_free.index(v_slot))",
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning", "ignore::RuntimeWarning")
def test_the_stand_in_notices_a_missing_barrier(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PATIENCE_SECONDS", 1.0)
    variant, workload = Fa4Variant(scheduler="persistent", kv_stages=2), heads(64)
    source = source_of(variant, workload)
    assert line in source
    with pytest.raises((AssertionError, TimeoutError)):
        out, _, expected, _ = run(source.replace(line, "pass"), workload, (300, 700))
        np.testing.assert_allclose(out, expected, atol=4e-3)


@pytest.mark.parametrize(("degree", "bound"), [(3, 9e-5), (4, 4e-6), (5, 4e-7)])
def test_exp2_on_the_fma_pipe(degree: int, bound: float) -> None:
    source = source_of(Fa4Variant(emulated_share=0.1875, poly_degree=degree), heads(128))
    text = load_kernel(source).exp2_ptx(tuple(range(0, 32, 2)))
    x = np.linspace(-126, 8, 32 * 4001, dtype=np.float32).reshape(-1, 32)
    got = np.stack([r.view(np.float32) for r in ptx(text, list(x.T), 32)], axis=1)
    exact = np.exp2(x.astype(np.float64))
    assert np.abs(got / exact - 1).max() < bound
    low = ptx(text, [np.full(4, value, np.float32) for value in [-np.inf, -1e30, -127.5, -200.0] * 8], 32)
    assert all((r == 0).all() for r in low)


# --- what they compile to ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_is_readable_python(case: str) -> None:
    variant, workload, machine, _ = CASES[case]
    tree = ast.parse(source_of(variant, workload, machine))
    assert ast.get_docstring(tree)
    header = next(node for node in tree.body if isinstance(node, ast.Assign))
    assert ast.literal_eval(header.value)["workload"]["head_dim_qk"] == workload.head_dim_qk
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert all(ast.get_docstring(function) for function in functions)
    assert functions[-1].name == "launch"
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported <= {"struct", "triton"}


def newest_triton() -> bool:
    found = importlib.util.find_spec("triton.experimental.gluon.language.nvidia.rubin") if HAS_TRITON else None
    return found is not None


HAS_TRITON = importlib.util.find_spec("triton") is not None
NEEDS_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="needs triton")


@NEEDS_TRITON
@pytest.mark.parametrize(("case", "target"), [("full", "sm_100a"), ("pair", "sm_100a"), ("causal", "sm_103a")])
def test_compiles_to_what_the_variant_says(case: str, target: str, tmp_path: Path) -> None:
    from tilecast.codegen.compile import compile_kernel
    from tilecast.codegen.sass import disassemble, inner_loops, resources

    variant, workload, machine, _ = CASES[case]
    if not newest_triton() and (variant.cta_group == 2 or target == "sm_103a"):
        pytest.skip("needs Triton 3.9")
    path, cubin = tmp_path / "kernel.py", tmp_path / "kernel.cubin"
    path.write_text(source_of(variant, workload, machine))
    compiled = compile_kernel(path, target)
    cubin.write_bytes(compiled.cubin)
    instructions, labels = disassemble(cubin)
    count = {
        name: sum(i.opcode == name for i in instructions) for name in ("UTCHMMA", "FFMA2", "FMUL2", "F2FP", "FMNMX3")
    }
    elements = variant.tile_n
    emulated = round(elements * variant.emulated_share)
    exponentials = sum(i.opcode == "MUFU" and i.modifiers.startswith(".EX2") for i in instructions)
    assert exponentials == 2 * (elements - emulated + 1)  # and one for the factor of the row
    assert count["FFMA2"] == 2 * (elements // 2 + emulated // 2 * variant.poly_degree + 1)
    assert count["FMNMX3"] == elements
    assert count["F2FP"] == 2 * (elements + workload.head_dim_v) // 2
    assert count["UTCHMMA"] == 64
    assert compiled.tmem_columns <= 512 and compiled.shared_bytes <= load_machine(machine)["smem.per_cta_bytes"]
    assert resources(cubin).stack_bytes == 0
    # One a group; a path that waits may go round the same loop another way.
    softmax = {loop.begin: loop for loop in inner_loops(instructions, labels) if loop.pipes()["mufu"] >= 8}
    shortest = min(len(loop.instructions) for loop in softmax.values())
    assert sum(len(loop.instructions) < 1.1 * shortest for loop in softmax.values()) == variant.stages
