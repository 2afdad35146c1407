"""May the tensor core multiply these operands, where they lie and as a pair of CTAs divides them?"""

from __future__ import annotations

from typing import Any

from tilecast.emulator.errors import LayoutError
from tilecast.emulator.hardware.context import Context
from tilecast.emulator.hardware.memory import Shared
from tilecast.emulator.hardware.tensor_memory import Tmem
from tilecast.emulator.values import dtypes, legal


def check_product(program: Context, a: Any, b: Any, acc_shape: Any) -> None:
    """LayoutError for types and shapes that do not multiply; e4m3 and e5m2 multiply each other."""
    alike = a.dtype is b.dtype or {a.dtype, b.dtype} == {dtypes.FP8E4, dtypes.FP8E5}
    if a.shape[1] != b.shape[0] or list(acc_shape) != [a.shape[0], b.shape[1]] or not alike:
        raise LayoutError(
            f"{program.here()}: {a.dtype} {list(a.shape)} times {b.dtype} {list(b.shape)} into {list(acc_shape)}"
        )


def check_memories(program: Context, a: Any, b: Shared, acc: Tmem | None = None) -> None:
    """LayoutError for operands that the tensor core cannot read where they lie, or that a pair divides otherwise.

    ``acc``: the accumulator in tensor memory; None where it is in registers.
    """
    for operand in (x for x in (a, b) if isinstance(x, Shared)):
        complaint = legal.wrong_operand(operand.layout)
        if complaint:
            raise LayoutError(f"{program.here()}: {operand.name}: {complaint}")
    if acc is None:
        return
    complaint = legal.wrong_pair(acc.layout, a.layout, program.ctas)
    if complaint:
        raise LayoutError(f"{program.here()}: {acc.name}: {complaint}")
    for bit in range(program.ctas.bit_length() - 1):
        by_rows = acc.layout.divides(bit) if acc.layout is not None else 0
        paired = bit == 0 and acc.layout is not None and acc.layout.two_ctas
        # The pair shares out both operands; CTAs that multiply alone need all of the operand that the other's tile shares.
        for operand, side, what in ((a, 0, "rows of the left"), (b, 1, "columns of the right")):
            wanted = side if paired or by_rows == side else None
            if not isinstance(operand, Shared) or operand.divided_by(bit) == wanted:
                continue
            found = operand.divided_by(bit)
            if wanted is None:
                alone = f"the accumulator's layout has two_ctas=False, the program has {program.ctas} CTAs"
                raise LayoutError(
                    f"{program.here()}: {operand.name}: {alone}: each needs the {what} operand whole, and here they divide it "
                    "(cga_layout)"
                )
            how = "they divide the other dimension" if found is not None else "they do not"
            raise LayoutError(
                f"{program.here()}: {operand.name}: the CTAs of a pair divide the {what} operand, and here {how} (cga_layout)"
            )
