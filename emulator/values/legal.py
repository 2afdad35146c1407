"""What Triton's compiler would refuse of layouts, swizzles, warp counts, tensor memory and register budgets.

Each function returns the complaint, empty where there is none; layouts that are not followed are not complained about.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tilecast.emulator.values.dtypes import Dtype
from tilecast.emulator.values.layouts import (
    BlockedLayout,
    DistributedLinearLayout,
    DotOperandLayout,
    NvmmaDistributedLayout,
    SliceLayout,
    TmemRegisterLayout,
    tmem_registers,
)
from tilecast.emulator.values.memory_layouts import (
    NvmmaSharedLayout,
    SharedLayout,
    SharedLinearLayout,
    TensorMemoryLayout,
)
from tilecast.emulator.values.wellformed import wrong_registers

#: Threads of a warp; warps that setmaxnreg sets at once; 32-bit registers of an SM; the fewest that a thread can have.
_LANES, _WARPGROUP, _REGISTER_FILE, _FEWEST = 32, 4, 65536, 24
#: Budgets are rounded up to multiples of this for setmaxnreg; the most that it takes.
_STEP, _MOST = 8, 256


@lru_cache(maxsize=4096)
def wrong_for_role(layout: Any, warps: int) -> str:
    """Whether a register layout is none, or is made for another number of warps than a role of ``warps`` has."""
    return wrong_registers(layout) or wrong_threads(layout, warps)


@lru_cache(maxsize=4096)
def threads_of(layout: Any) -> tuple[int, int] | None:
    """(lanes of a warp, warps) that a register layout is made for; None where that is not known."""
    if isinstance(layout, SliceLayout):
        return threads_of(layout.parent)
    if isinstance(layout, DotOperandLayout):
        return threads_of(layout.parent)
    if isinstance(layout, BlockedLayout):
        return math.prod(layout.key[1]), math.prod(layout.key[2])
    if isinstance(layout, NvmmaDistributedLayout):
        return _LANES, math.prod(layout.warps_per_cta)
    if isinstance(layout, DistributedLinearLayout):
        return 1 << len(layout.lane), 1 << len(layout.warp)
    return (_LANES, layout.num_warps) if isinstance(layout, TmemRegisterLayout) else None


def wrong_threads(layout: Any, warps: int) -> str:
    """Whether ``layout`` is made for another number of warps than the role has, or for warps of another size."""
    found = threads_of(layout)
    if found is None or found == (_LANES, warps):
        return ""
    if found[0] != _LANES:
        return f"{layout!r} is made for {found[0]} threads to a warp, a warp has {_LANES}"
    return f"{layout!r} is made for {found[1]} warp{'s' * (found[1] != 1)}, the role has {warps}"


def wrong_swizzle(layout: Any, shape: Sequence[int], dtype: Dtype) -> str:
    """Whether shared memory of ``shape`` cannot have the NVMMA ``layout``."""
    if not isinstance(layout, NvmmaSharedLayout) or layout.bits == 0:
        return ""
    if layout.bits != dtype.bits:
        return f"the layout is made for {layout.bits}-bit elements, {dtype} has {dtype.bits}"
    if layout.swizzle not in (0, 32, 64, 128):
        return f"a swizzle is 0, 32, 64 or 128 bytes wide, got {layout.swizzle}"
    extents = layout.shape_per_cta(shape)
    inner = (extents[0] if layout.transposed else extents[-1]) * dtype.bits // 8 * (2 if layout.fp4_padded else 1)
    if layout.swizzle and inner % layout.swizzle:
        return f"rows of {inner} bytes do not divide into the {layout.swizzle} bytes of the swizzle"
    return ""


def wrong_copy(described: Any, target: Any) -> str:
    """Whether a tensor map and the shared memory that it copies to lay out a tile differently."""
    if not isinstance(described, SharedLayout) or not isinstance(target, SharedLayout):
        return ""
    if not isinstance(described, NvmmaSharedLayout) or not isinstance(target, NvmmaSharedLayout):
        return "the copy engine writes what NVMMASharedLayout describes, no other layout"
    if described.pattern() != target.pattern():
        return f"the tensor map has {described!r}, the shared memory {target!r}"
    return ""


def wrong_operand(layout: Any) -> str:
    """Whether the tensor core cannot read shared memory of this layout."""
    if not isinstance(layout, SharedLayout) or isinstance(layout, (NvmmaSharedLayout, SharedLinearLayout)):
        return ""
    return "the tensor core reads shared memory with NVMMASharedLayout, not with this one"


def wrong_tensor_memory(layout: Any, rows: int, columns: int, dtype: Dtype, ctas: int) -> str:
    """Whether ``rows`` x ``columns`` of tensor memory cannot have ``layout`` in a program of ``ctas`` CTAs."""
    if not isinstance(layout, TensorMemoryLayout):
        return ""
    if layout.two_ctas and ctas < 2:
        return "two_ctas=True needs a program of two CTAs"
    own, columns = (n // parts for n, parts in zip((rows, columns), layout.parts_of(2), strict=True))
    block_rows, block_columns = layout.block
    if block_rows not in (64, 128) or own % block_rows:
        return f"blocks have 64 or 128 rows that divide the {own} of a CTA, got {block_rows}"
    if columns % block_columns and block_columns % columns:
        return f"blocks of {block_columns} columns do not divide {columns}"
    return ""


def wrong_rows(registers: Any, layout: Any, shape: Sequence[int]) -> str:
    """Whether a register layout that was written down holds rows elsewhere than blocks of tensor memory put them."""
    if not isinstance(layout, TensorMemoryLayout) or not isinstance(registers, DistributedLinearLayout):
        return ""
    own = int(shape[0]) // layout.parts_of(2)[0]
    if own == layout.block[0]:
        return ""
    asked = tmem_registers(shape, layout, 1 << len(registers.warp), "32x32b")
    if registers in (asked, tmem_registers(shape, layout, 1 << len(registers.warp), "32x32b_splitn")):
        return ""
    return f"has blocks of {layout.block[0]} rows, and a row to a lane needs blocks of all {own}: ask get_reg_layout()"


def wrong_pair(acc: Any, left: Any, ctas: int) -> str:
    """Whether tensor memory for one CTA and for two meet in a product, given the accumulator's layout and the left operand's."""
    if not isinstance(acc, TensorMemoryLayout):
        return ""
    if acc.two_ctas and ctas < 2:
        return f"the accumulator's layout has two_ctas={acc.two_ctas}, the program has {ctas} CTA"
    if isinstance(left, TensorMemoryLayout) and left.two_ctas != acc.two_ctas:
        return f"the left operand's layout has two_ctas={left.two_ctas}, the accumulator's {acc.two_ctas}"
    return ""


def over_budget(warps: Sequence[int], registers: Sequence[int] | None, default_warps: int) -> str:
    """Whether partitions of ``warps`` with ``registers`` a thread leave the default partition less than a thread needs.

    Registers are handed out to four warps at a time, so small partitions share four with others of their kind.
    """
    if registers is None:
        return ""
    if len(registers) != len(warps):
        return f"{len(warps)} partitions need {len(warps)} register counts, got {len(registers)}"
    rounded = [min(-(-count // _STEP) * _STEP, _MOST) for count in registers]
    groups = [(w, r) for w, r in zip(warps, rounded, strict=True) if w >= _WARPGROUP]
    small = [(w, r) for w, r in zip(warps, rounded, strict=True) if w < _WARPGROUP]
    if small:
        shared = -(-sum(w for w, _ in small) // _WARPGROUP) * _WARPGROUP
        groups.append((shared, min(r for _, r in small)))
    asked = sum(w * r for w, r in groups) * _LANES
    left = (_REGISTER_FILE - asked) // (default_warps * _LANES)
    if left >= _FEWEST:
        return ""
    return (
        f"the partitions ask for {asked} of {_REGISTER_FILE} registers, which leaves {max(left, 0)} to a thread of the default "
        f"partition's {default_warps} warps: at least {_FEWEST}"
    )
