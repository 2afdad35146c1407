"""What host code that imported Triton itself hands to a kernel, as the stand-ins of it: layouts, types, tensor maps, constants."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tilecast.emulator.errors import UnsupportedError
from tilecast.emulator.language.arrays import TensorDescriptor
from tilecast.emulator.language.im2col import TensorDescriptorIm2Col
from tilecast.emulator.session import Session
from tilecast.emulator.values import dtypes, layouts, memory_layouts

#: Layouts by Triton's names of them, which take the same fields by name.
LAYOUTS: Mapping[str, Callable[..., Any]] = {
    "DistributedLinearLayout": layouts.DistributedLinearLayout,
    "SliceLayout": layouts.SliceLayout,
    "BlockedLayout": layouts.BlockedLayout,
    "NVMMADistributedLayout": layouts.NvmmaDistributedLayout,
    "DotOperandLayout": layouts.DotOperandLayout,
    "NVMMASharedLayout": memory_layouts.NvmmaSharedLayout,
    "SwizzledSharedLayout": memory_layouts.SwizzledSharedLayout,
    "PaddedSharedLayout": memory_layouts.PaddedSharedLayout,
    "SharedLinearLayout": memory_layouts.SharedLinearLayout,
}
_MORE: Mapping[str, Callable[..., Any]] = {
    "TensorMemoryLayout": memory_layouts.TensorMemoryLayout,
    "TensorMemoryScalesLayout": memory_layouts.TensorMemoryScalesLayout,
    # Left to the compiler.
    "AutoLayout": lambda: None,
    "CoalescedLayout": lambda: None,
}
_TENSOR_MAPS = {"TensorDescriptor": TensorDescriptor, "TensorDescriptorIm2Col": TensorDescriptorIm2Col}
_TYPES = {dtype.name: dtype for dtype in dtypes.ALL}


def is_tritons(value: Any) -> bool:
    """Whether a value is of a class of Triton's own, not of a stand-in."""
    return type(value).__module__.split(".")[0] == "triton"


def from_triton(session: Session, value: Any) -> Any:
    """A value of Triton's own as the kernel of ``session`` takes it; UnsupportedError of a kind that has no stand-in."""
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(from_triton(session, item) for item in value)
    if not is_tritons(value):
        return value
    name = type(value).__name__
    if name == "constexpr":
        return from_triton(session, value.value)
    if name == "dtype" and value.name in _TYPES:
        return _TYPES[value.name]
    fields = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    given = {field: from_triton(session, getattr(value, field)) for field in fields}
    if name in _TENSOR_MAPS:
        return type(name, (_TENSOR_MAPS[name],), {"session": session})(**given)
    made = LAYOUTS.get(name) or _MORE.get(name)
    if made is not None:
        return made(**given)
    raise UnsupportedError(f"the emulator does not know {type(value).__module__}.{name} as an argument of a kernel")
