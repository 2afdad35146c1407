"""Products of blocks with scale factors: tcgen05.mma with block scaling (mxfp8, mxfp4, nvfp4)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from tilecast.emulator.errors import LayoutError
from tilecast.emulator.hardware.context import Context
from tilecast.emulator.hardware.engines import Issuer, Product
from tilecast.emulator.hardware.memory import Shared
from tilecast.emulator.hardware.tensor_memory import Scales, Tmem
from tilecast.emulator.values import dtypes
from tilecast.emulator.values.products import matrix_product

#: Values of the sixteen e2m1 codes (OCP Microscaling Formats 1.0, section 5.3.3).
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_FORMATS = {"e2m1": None, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
#: Elements along K that share a scale factor: of e4m3 factors (nvfp4), of e8m0 factors.
_NV, _MX = 16, 32


def elements(operand: Any, kind: str, axis: int) -> Any:
    """Values of a byte array as float32; e2m1: two to a byte along ``axis``, the lower half first."""
    octets = np.ascontiguousarray(operand).view(np.uint8)
    if kind != "e2m1":
        return octets.view(_FORMATS[kind]).astype(np.float32)
    pairs = np.stack([_E2M1[octets & 15], _E2M1[octets >> 4]], axis=axis + 1)
    shape = list(octets.shape)
    shape[axis] *= 2
    return pairs.reshape(shape)


def factors(scales: Any) -> Any:
    """Scale factors as float32: e4m3 as they are, bytes as e8m0, of which 255 is NaN."""
    if scales.dtype == ml_dtypes.float8_e4m3fn:
        return scales.astype(np.float32)
    octets = scales.view(np.uint8)
    return np.where(octets == 255, np.float32(np.nan), np.exp2(octets.astype(np.float32) - 127).astype(np.float32))


def check_scaled(program: Context, a: Any, b: Any, acc: Tmem, scales: tuple[Any, Any], formats: tuple[str, str]) -> int:
    """Elements along K; LayoutError for operands, formats and scale factors that do not go together."""
    rows, columns = acc.shape
    lengths = []
    for name, operand, kind, axis in (("left", a, formats[0], 1), ("right", b, formats[1], 0)):
        if kind not in _FORMATS:
            raise LayoutError(f"{program.here()}: the {name} operand has format {kind}: e2m1, e4m3 or e5m2")
        if operand.dtype.bits != 8 or operand.shape[1 - axis] != (rows, columns)[1 - axis if axis else 1]:
            raise LayoutError(
                f"{program.here()}: the {name} operand, {operand.dtype} {list(operand.shape)}, into {list(acc.shape)}"
            )
        lengths.append(operand.shape[axis] * (2 if kind == "e2m1" else 1))
    if lengths[0] != lengths[1]:
        raise LayoutError(f"{program.here()}: {lengths[0]} elements along K on the left, {lengths[1]} on the right")
    for name, one, extent in (("left", scales[0], rows), ("right", scales[1], columns)):
        block = _NV if one.dtype is dtypes.FP8E4 else _MX
        if not isinstance(one, Scales) or list(one.shape) not in ([extent, lengths[0] // n] for n in (_NV, _MX)):
            raise LayoutError(
                f"{program.here()}: scale factors of the {name} operand, {one.dtype} {list(one.shape)}: they lie in tensor memory "
                f"with TensorMemoryScalesLayout, [{extent}, {lengths[0] // block}]"
            )
    return int(lengths[0])


class ScaledProduct(Product):
    """acc = (a a_scale) (b b_scale) (+ acc)."""

    def __init__(
        self, role: Issuer, a: Shared | Tmem, b: Shared, acc: Tmem, use_acc: bool, number: int, scales: tuple[Scales, Scales],
        formats: tuple[str, str],
    ) -> None:  # fmt: skip
        super().__init__(role, a, b, acc, use_acc, number)
        self.scales, self._formats = scales, formats

    def operands(self) -> list[Shared | Tmem]:
        """What it reads beside the accumulator."""
        return [self.a, self.b, *self.scales]

    def product(self) -> Any:
        """The product of the scaled operands as they are now."""
        both = []
        for operand, kind, scale, axis in zip((self.a, self.b), self._formats, self.scales, (1, 0), strict=True):
            values = elements(operand.values() if isinstance(operand, Tmem) else operand.a, kind, axis)
            by_row = factors(scale.values())
            repeated = np.repeat(by_row, values.shape[axis] // by_row.shape[1], axis=1)
            both.append(values * (repeated if axis else repeated.T))
        return matrix_product(*both)
