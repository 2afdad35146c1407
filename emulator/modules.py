"""Stand-ins for the modules of Triton that a generated kernel imports, with the names of one release."""

from __future__ import annotations

import types
from typing import Any

from tilecast.emulator.errors import UnsupportedError
from tilecast.emulator.hardware.memory import Shared, Tmem
from tilecast.emulator.language.hostside import Jitted, TensorDescriptor
from tilecast.emulator.language.language import Language
from tilecast.emulator.session import Session
from tilecast.emulator.values import dtypes, layouts
from tilecast.emulator.values.tensors import Int, Tensor, constexpr

#: Names that a kernel may ask for with hasattr and that one of the releases does not have.
_NOT_IN = {
    "3.6": {"async_load", "barrier", "allocate_mbarrier", "load_max", "reinterpret", "aggregate"},
    "3.9": {"thread_barrier", "_reinterpret", "_aggregate"},
}


class Module(types.ModuleType):
    """A module that says what it does not emulate."""

    def __init__(self, name: str, session: Session, names: dict[str, Any]) -> None:
        super().__init__(name)
        missing = _NOT_IN[session.release]
        self.__dict__["_missing"], self.__dict__["_session"] = missing, session
        self.__dict__.update({key: value for key, value in names.items() if key not in missing})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self.__dict__["_missing"]:
            raise AttributeError(name)
        raise UnsupportedError(
            f"{self.__dict__['_session'].here()}: the emulator does not know {self.__name__}.{name}: it runs the subset of Gluon that tilecast's kernels use"
        )


def counted(*bounds: Any) -> Any:
    """range() whose numbers are 32-bit scalars."""
    return map(Int, range(*map(int, bounds)))


def aggregate(cls: type) -> type:
    """gluon.aggregate: a constructor that takes the fields in their order."""

    def fill(self: Any, *values: Any) -> None:
        for name, value in zip(cls.__annotations__, values, strict=True):
            setattr(self, name, value)

    cls.__init__ = fill  # type: ignore[misc]
    return cls


def with_constructor(cls: type) -> type:
    """The same of Triton 3.6, for classes with a constructor; every field must be set."""
    initialise = cls.__init__  # type: ignore[misc]

    def checked(self: Any, *values: Any) -> None:
        initialise(self, *values)
        for name in cls.__annotations__:
            if not hasattr(self, name):
                raise TypeError(f"the constructor of {cls.__name__} does not set {name}")

    cls.__init__ = checked  # type: ignore[misc]
    return cls


def _language(session: Session, gl: Language) -> Module:
    names = (
        "arange", "full", "zeros", "to_tensor", "where", "minimum", "maximum", "exp2", "log2", "cdiv", "reshape",
        "convert_layout", "inline_asm_elementwise", "assume", "max", "min", "sum", "store", "load", "allocate_shared_memory",
        "program_id", "num_programs", "barrier", "warp_specialize",
    )  # fmt: skip
    types_ = {
        "float16": dtypes.FP16, "bfloat16": dtypes.BF16, "float32": dtypes.FP32, "float8e4nv": dtypes.FP8E4,
        "float8e5": dtypes.FP8E5, "int1": dtypes.BOOL, "int16": dtypes.INT16, "int32": dtypes.INT32, "int64": dtypes.INT64,
    }  # fmt: skip
    places = {
        "DistributedLinearLayout": layouts.DistributedLinearLayout,
        "SliceLayout": layouts.SliceLayout,
        "BlockedLayout": layouts.BlockedLayout,
        "NVMMADistributedLayout": layouts.NvmmaDistributedLayout.make,
        "DotOperandLayout": layouts.DotOperandLayout,
        "NVMMASharedLayout": layouts.NvmmaSharedLayout,
        "SwizzledSharedLayout": layouts.SharedLayout,
    }
    return Module(
        "triton.experimental.gluon.language",
        session,
        {
            **{name: getattr(gl, name) for name in names}, **types_, **places,
            "thread_barrier": gl.barrier, "constexpr": constexpr, "static_range": counted,
            "tensor": Tensor, "shared_memory_descriptor": Shared, "tuple": tuple,
        },
    )  # fmt: skip


def modules(session: Session) -> dict[str, types.ModuleType]:
    """Modules by name, for one session."""
    missing, gl = _NOT_IN[session.release], Language(session)
    # Kernels only ask this class which methods it has.
    has = {"reinterpret", "load_max", "_reinterpret"} - missing
    descriptor = types.SimpleNamespace(**{name: getattr(Tmem, name) for name in has})
    mbarrier = Module(
        "mbarrier",
        session,
        {
            "MBarrierLayout": layouts.SharedLayout, "allocate_mbarrier": gl.allocate_mbarrier, "init": gl.init,
            "wait": gl.wait, "arrive": gl.arrive, "expect": gl.expect,
        },
    )  # fmt: skip
    tma = Module("tma", session, {"async_load": gl.async_load, "async_copy_global_to_shared": gl.async_load})
    shared = {"mbarrier": mbarrier, "tma": tma, "fence_async_shared": gl.fence_async_shared}
    hopper = {"warpgroup_mma": gl.warpgroup_mma, "warpgroup_mma_wait": gl.warpgroup_mma_wait}
    blackwell = {
        "TensorMemoryLayout": layouts.TensorMemoryLayout, "allocate_tensor_memory": gl.allocate_tensor_memory,
        "tcgen05_mma": gl.tcgen05_mma, "tcgen05_commit": gl.tcgen05_commit, "tensor_memory_descriptor": descriptor,
    }  # fmt: skip
    base = "triton.experimental.gluon"
    language = _language(session, gl)
    driver = types.SimpleNamespace(
        get_current_device=lambda: 0,
        utils=types.SimpleNamespace(get_device_properties=lambda _device: {"multiprocessor_count": session.sms}),
    )

    def jit(fn: Any = None, **_options: Any) -> Any:
        return Jitted(fn, session) if fn is not None else lambda later: Jitted(later, session)

    # Triton 3.6 keeps the decorator of aggregates in its core.
    gluon = Module(
        base,
        session,
        {"jit": jit, "constexpr_function": lambda fn: fn, "aggregate": aggregate, "language": language},
    )
    core = Module("triton.language.core", session, {"_aggregate": with_constructor})
    triton = Module(
        "triton",
        session,
        {
            "cdiv": lambda a, b: -(-a // b),
            "language": types.SimpleNamespace(PropagateNan=types.SimpleNamespace(ALL=1)),
            "runtime": types.SimpleNamespace(driver=types.SimpleNamespace(active=driver)),
        },
    )  # fmt: skip
    return {
        "triton": triton,
        "triton.language.core": core,
        "triton.experimental": Module("triton.experimental", session, {"gluon": gluon}),
        base: gluon,
        f"{base}.language": language,
        f"{base}.language.nvidia": Module(f"{base}.language.nvidia", session, {}),
        f"{base}.language.nvidia.hopper": Module(f"{base}.language.nvidia.hopper", session, {**shared, **hopper}),
        f"{base}.language.nvidia.blackwell": Module(
            f"{base}.language.nvidia.blackwell", session, {**shared, **blackwell}
        ),
        f"{base}.nvidia": Module(f"{base}.nvidia", session, {}),
        f"{base}.nvidia.hopper": Module(f"{base}.nvidia.hopper", session, {"TensorDescriptor": TensorDescriptor}),
        f"{base}.nvidia.blackwell": Module(f"{base}.nvidia.blackwell", session, {"TensorDescriptor": TensorDescriptor}),
    }
