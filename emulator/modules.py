"""Stand-ins for the modules of Triton that a generated kernel imports, with the names of one release."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from tilecast.emulator.decorated import aggregate, counted, remembering, replaced, with_constructor
from tilecast.emulator.errors import UnsupportedError
from tilecast.emulator.hardware.memory import ATOMICS, Shared
from tilecast.emulator.hardware.tensor_memory import DescribedTmem, Tmem
from tilecast.emulator.language import atomics, launch_control, libdevice, newer, packed, threadwise, wider
from tilecast.emulator.language.arrays import TensorDescriptor
from tilecast.emulator.language.from_triton import LAYOUTS
from tilecast.emulator.language.hostside import Config, Jitted, first_config, heuristics
from tilecast.emulator.language.im2col import TensorDescriptorIm2Col
from tilecast.emulator.language.language import Language
from tilecast.emulator.language.parting import converting, meeting, reducing
from tilecast.emulator.language.products import barrier_count
from tilecast.emulator.session import ANY_RELEASE, Session
from tilecast.emulator.values import dtypes, memory_layouts
from tilecast.emulator.values.scalars import constexpr
from tilecast.emulator.values.tensors import Tensor

#: Names that a kernel may ask for with hasattr and that one of the releases does not have.
_NOT_IN = {
    "3.6": {"async_load", "barrier", "allocate_mbarrier", "load_max", "reinterpret", "aggregate"},
    "3.9": {"thread_barrier", "_reinterpret", "_aggregate"},
    # Kernels that were not generated for one release get the names of all.
    ANY_RELEASE: set(),
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
            f"{self.__dict__['_session'].here()}: the emulator does not know {self.__name__}.{name}: docs/emulator.md lists what it knows"
        )


class Placeholder:
    """What host code builds for its benchmarks from the compiler's own library: nothing, whatever it asks for."""

    def __getattr__(self, name: str) -> Placeholder:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_args: Any, **_options: Any) -> Placeholder:
        return self

    def __enter__(self) -> Placeholder:
        return self

    def __exit__(self, *_error: object) -> None:
        pass


#: Types that kernels only name, in annotations.
_TYPES = {
    name: type(name, (), {}) for name in ("base_type", "base_value", "block_type", "pointer_type", "tuple_type", "void", "shared_memory_descriptor_type")
}  # fmt: skip
#: What tensors have as methods.
_METHODS = (
    "expand_dims", "sum", "max", "min", "reduce", "ravel", "cast", "abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin",
    "cos", "floor", "ceil", "gather", "associative_scan", "histogram", "erf", "sqrt_rn", "cumsum", "cumprod", "xor_sum", "reduce_or",
    "cdiv", "sigmoid",
)  # fmt: skip


def _language(session: Session, gl: Language) -> Module:
    names = (
        "arange", "full", "zeros", "to_tensor", "where", "minimum", "maximum", "exp2", "log2", "cdiv", "reshape",
        "convert_layout", "inline_asm_elementwise", "assume", "max", "min", "sum", "store", "load", "allocate_shared_memory",
        "program_id", "num_programs", "barrier", "warp_specialize", "reduce", "expand_dims", "permute", "split", "join",
        "broadcast", "ravel", "full_like", "zeros_like", "cast", "set_auto_layout", "static_assert", "device_assert",
        "num_warps", "num_ctas",
    )  # fmt: skip
    types_ = {
        "float16": dtypes.FP16, "bfloat16": dtypes.BF16, "float32": dtypes.FP32, "float8e4nv": dtypes.FP8E4,
        "float8e5": dtypes.FP8E5, "int1": dtypes.BOOL, "int8": dtypes.INT8, "uint8": dtypes.UINT8,
        "uint16": dtypes.UINT16, "uint32": dtypes.UINT32, "uint64": dtypes.UINT64, "float64": dtypes.FP64, "int16": dtypes.INT16, "int32": dtypes.INT32, "int64": dtypes.INT64,
    }  # fmt: skip
    moving = {
        **{name: reducing(session, getattr(gl, name)) for name in ("max", "min", "sum", "reduce")},
        "convert_layout": converting(session, gl.convert_layout),
        **{f"atomic_{name}": atomics.read_modify_write(session, ufunc) for name, ufunc in ATOMICS.items()},
    }
    more = {**wider.names(session), **newer.names(session), **atomics.names(session), **threadwise.names(session)}
    scattering = ("gather", "histogram", "associative_scan", "dot_fma")
    functions = {
        **gl.mathematics(), **more, **{name: getattr(gl, name) for name in names},
        **{name: meeting(session, more[name]) for name in scattering}, **moving,
    }  # fmt: skip
    session.methods = {name: functions[name] for name in _METHODS}
    session.methods |= {
        f"pointer.{name}": functions[name] for name in ("store", *(n for n in functions if n.startswith("atomic_")))
    }
    return Module(
        "triton.experimental.gluon.language",
        session,
        {
            **functions, **types_, **LAYOUTS,
            "thread_barrier": gl.barrier, "constexpr": constexpr, "static_range": counted(session, static=True),
            "tensor": Tensor, "shared_memory_descriptor": Shared, "tuple": tuple, "dtype": dtypes.Dtype, "constexpr_function": functools.partial(remembering, session),
            **dict.fromkeys(("multiple_of", "max_contiguous", "max_constancy"), gl.hint), **_TYPES,
            **dict.fromkeys(("static_print", "device_print"), gl.no_print),
        },
    )  # fmt: skip


def _plain_language(session: Session, language: Module) -> Module:
    """triton.language, of kernels beside Gluon's that only load, compute and store: values whose threads are not known."""
    names = (
        "arange", "full", "zeros", "zeros_like", "where", "minimum", "maximum", "exp", "exp2", "log", "log2", "sqrt", "rsqrt",
        "abs", "cdiv", "reshape", "max", "min", "sum", "store", "load", "program_id", "num_programs", "reduce", "expand_dims",
        "permute", "split", "join", "broadcast", "ravel", "cast", "static_assert", "device_assert", "static_range", "constexpr",
        "multiple_of", "max_contiguous", "static_print", "device_print", "associative_scan", "inline_asm_elementwise", "assume",
        "float16", "bfloat16", "float32", "float64", "float8e4nv", "float8e5", "int1", "int8", "uint8", "int16", "uint16", "int32", "uint32",
        "int64", "uint64", "tensor", *(f"atomic_{name}" for name in ATOMICS),
    )  # fmt: skip
    return Module(
        "triton.language", session, {
            **{name: vars(language)[name] for name in names}, **replaced(session),
            "PropagateNan": types.SimpleNamespace(ALL=1),
        },
    )  # fmt: skip


def _asked_of_the_gpu(hopper: bool) -> dict[str, Callable[..., Any]]:
    """What tests ask before they skip themselves, as the machine answers."""
    told = {
        "is_cuda": True, "is_ampere_or_newer": True, "is_hopper_or_newer": True, "is_hopper": hopper,
        "is_blackwell": not hopper,
    }  # fmt: skip
    return {name: functools.partial(bool, answer) for name, answer in told.items()}


class Questions(Module):
    """What a test suite asks of the machine: every other ``is_...`` is answered with no, what else is not known when it is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("is_"):
            return functools.partial(bool, False)
        if name.startswith("__") or name in self.__dict__["_missing"]:
            raise AttributeError(name)
        return lambda *_args, **_options: super(Questions, self).__getattr__(name)


def _no_knobs(skipped_attr: Any = None) -> tuple[Callable[[], Any], Callable[[], None]]:
    """(what sets the compiler's options afresh, what sets them back): there is no compiler here."""
    return Placeholder, lambda: None


#: Where Gluon's modules stand.
_GLUON = "triton.experimental.gluon"


def modules(session: Session) -> dict[str, types.ModuleType]:
    """Modules by name, for one session."""
    gl = Language(session)
    language = _language(session, gl)
    plain = _plain_language(session, language)
    device = Module(f"{_GLUON}.language.extra.libdevice", session, libdevice.names(gl))
    found = {
        **_triton(session, plain, device),
        **_compiler(session),
        **_gluon(session, language, device),
        **_nvidia(session, gl),
    }
    linked(found)
    return found


def _jit(session: Session) -> Callable[..., Any]:
    """The decorator of kernels and their functions, with or without options."""

    def jit(fn: Any = None, **_options: Any) -> Any:
        return Jitted(fn, session) if fn is not None else lambda later: Jitted(later, session)

    return jit


def _triton(session: Session, plain: Module, device: Module) -> dict[str, types.ModuleType]:
    """triton and its language, for host code and for kernels without Gluon."""
    arch = 90 if session.tensor_kind == "wgmma" else 100
    driver = types.SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_target=lambda: types.SimpleNamespace(backend="cuda", arch=arch, warp_size=32),
        utils=types.SimpleNamespace(get_device_properties=lambda _device: {"multiprocessor_count": session.sms}),
    )
    triton = Module(
        "triton",
        session,
        {
            "cdiv": lambda a, b: -(-a // b), "next_power_of_2": lambda n: 1 << (int(n) - 1).bit_length(),
            "autotune": first_config, "heuristics": heuristics, "Config": Config, "jit": _jit(session),
            "constexpr_function": functools.partial(remembering, session), "set_allocator": lambda _allocate: None,
            "knobs": Placeholder(), "language": plain,
            "runtime": types.SimpleNamespace(driver=types.SimpleNamespace(active=driver)),
        },
    )  # fmt: skip
    return {
        "triton": triton,
        "triton.language": plain,
        "triton.language.extra": Module("triton.language.extra", session, {"libdevice": device}),
        "triton.language.extra.cuda": Module("triton.language.extra.cuda", session, newer.dependent_launches(session)),
        # Triton 3.6 keeps the decorator of aggregates in its core.
        "triton.language.core": Module("triton.language.core", session, {"_aggregate": with_constructor}),
    }


def _compiler(session: Session) -> dict[str, types.ModuleType]:
    """What host code and test suites take from the compiler itself."""
    asked = _asked_of_the_gpu(session.tensor_kind == "wgmma")
    return {
        "triton._C.libtriton": Module("triton._C.libtriton", session, {"nvidia": Placeholder(), "ir": Placeholder()}),
        "triton._C.libtriton.gluon_ir": Module(
            "triton._C.libtriton.gluon_ir", session, {"make_cga_layout": memory_layouts.cluster_bases}
        ),
        "triton.compiler": Module("triton.compiler", session, {"max_shared_mem": lambda _device: session.smem_limit}),
        "triton._internal_testing": Questions(
            "triton._internal_testing", session, {**asked, "_fresh_knobs_impl": _no_knobs}
        ),
    }


def _gluon(session: Session, language: Module, device: Module) -> dict[str, types.ModuleType]:
    """Gluon and its language, for any GPU."""
    gluon = Module(
        _GLUON,
        session,
        {
            "jit": _jit(session),
            "constexpr_function": functools.partial(remembering, session),
            "must_use_result": lambda fn: fn,
            "aggregate": aggregate,
            "language": language,
        },
    )
    return {
        "triton.experimental": Module("triton.experimental", session, {"gluon": gluon}),
        _GLUON: gluon,
        f"{_GLUON}.language": language,
        # Kernels make operations of their own where a release has none for what it can do.
        f"{_GLUON}.language._core": Module(f"{_GLUON}.language._core", session, {"builtin": lambda fn: fn}),
        f"{_GLUON}.language.extra": Module(f"{_GLUON}.language.extra", session, {"libdevice": device}),
    }


def _nvidia(session: Session, gl: Language) -> dict[str, types.ModuleType]:
    """What Gluon has for each generation of NVIDIA's GPUs, in kernels and for host code."""
    described = type("TensorDescriptor", (TensorDescriptor,), {"session": session})
    columns = type("TensorDescriptorIm2Col", (TensorDescriptorIm2Col,), {"session": session})
    ampere = {
        **newer.CACHING,
        "async_copy": _async_copy(session, gl),
        "mbarrier": _mbarrier(session, gl),
        "mma_v2": functools.partial(wider.mma_v2, session),
    }
    tma = _tma(gl, described, columns)
    since_hopper = {
        **ampere,
        "async_store": gl.shared_store,
        "cluster": Module("cluster", session, {"barrier": gl.cluster_barrier}),
        "tma": Module("tma", session, tma),
        "fence_async_shared": gl.fence_async_shared,
    }
    hopper = {
        "warpgroup_mma": gl.warpgroup_mma, "warpgroup_mma_wait": gl.warpgroup_mma_wait,
        "warpgroup_mma_init": lambda value: value, "warpgroup_mma_accumulator": Tensor,
    }  # fmt: skip
    # Rows by number are Blackwell's.
    rows = {"async_gather": gl.async_gather, "async_scatter": gl.async_scatter}
    blackwell = {"tma": Module("tma", session, {**tma, **rows}), "clc": _clc(session, gl), **_tcgen05(session, gl)}
    inside = f"{_GLUON}.language.nvidia"
    names = {
        inside: {},
        f"{inside}.ampere": ampere,
        f"{inside}.hopper": {**since_hopper, **hopper},
        f"{inside}.blackwell": {**since_hopper, **blackwell},
        f"{_GLUON}.nvidia": {},
        f"{_GLUON}.nvidia.hopper": {"TensorDescriptor": described, "TensorDescriptorIm2Col": columns},
        f"{_GLUON}.nvidia.blackwell": {"TensorDescriptor": described},
    }
    return {name: Module(name, session, known) for name, known in names.items()}


def _mbarrier(session: Session, gl: Language) -> Module:
    names = {
        "MBarrierLayout": memory_layouts.MBarrierLayout, "allocate_mbarrier": gl.allocate_mbarrier, "init": gl.init,
        "wait": gl.wait, "arrive": gl.arrive, "expect": gl.expect, "invalidate": gl.invalidate,
    }  # fmt: skip
    return Module("mbarrier", session, names)


def _async_copy(session: Session, gl: Language) -> Module:
    names = {
        "async_load": gl.cp_async, "async_copy_global_to_shared": gl.cp_async, "commit_group": gl.commit_group,
        "wait_group": gl.wait_group, "mbarrier_arrive": gl.mbarrier_arrive,
    }  # fmt: skip
    return Module("async_copy", session, names)


def _tma(gl: Language, described: type, columns: type) -> dict[str, Any]:
    """The copy engine, by the names of both releases."""
    return {
        "async_load": gl.async_load, "async_copy_global_to_shared": gl.async_load, "async_store": gl.async_store,
        "async_copy_shared_to_global": gl.async_store, "store_wait": gl.store_wait, "tensor_descriptor": described,
        "tensor_descriptor_im2col": columns, "tensor_descriptor_im2col_type": columns, "tensor_descriptor_type": described,
        "async_load_im2col": gl.async_load_im2col, "async_copy_global_to_shared_im2col": gl.async_load_im2col,
        "make_tensor_descriptor": gl.make_tensor_descriptor, **gl.reductions(),
    }  # fmt: skip


def _clc(session: Session, gl: Language) -> Module:
    names = {"try_cancel": gl.try_cancel, "load_result": gl.load_result, "clc_result": launch_control.Answer}
    return Module("clc", session, names)


def _tcgen05(session: Session, gl: Language) -> dict[str, Any]:
    """Tensor memory, its products and packed arithmetic."""
    # Kernels only ask this class which methods it has.
    has = {"reinterpret", "load_max", "_reinterpret"} - _NOT_IN[session.release]
    descriptor = types.SimpleNamespace(**{name: getattr(Tmem, name) for name in has})
    return {
        "TensorMemoryLayout": memory_layouts.TensorMemoryLayout, "allocate_tensor_memory": gl.allocate_tensor_memory,
        "tcgen05_mma": gl.tcgen05_mma, "tcgen05_mma_scaled": gl.tcgen05_mma_scaled, "tcgen05_copy": gl.tcgen05_copy,
        **wider.packed_arithmetic(session), "tcgen05_mma_barrier_count": barrier_count,
        "TensorMemoryScalesLayout": memory_layouts.TensorMemoryScalesLayout,
        "tcgen05_commit": gl.tcgen05_commit, "tensor_memory_descriptor": descriptor,
        "tensor_memory_descriptor_type": functools.partial(DescribedTmem, session),
        "get_tmem_reg_layout": gl.get_tmem_reg_layout, "get_tmem_32x32b_reg_layout": gl.get_tmem_32x32b_reg_layout,
        "float2": Module(f"{_GLUON}.language.nvidia.blackwell.float2", session, packed.NAMES),
    }  # fmt: skip


def linked(found: dict[str, types.ModuleType]) -> None:
    """Let every module know those below it by their last names, and have those imported by their whole names."""
    for name, module in found.items():
        parent, _, last = name.rpartition(".")
        if parent in found:
            found[parent].__dict__.setdefault(last, module)
    for name, module in list(found.items()):
        for last, below in vars(module).items():
            if isinstance(below, types.ModuleType):
                found.setdefault(f"{name}.{last}", below)
