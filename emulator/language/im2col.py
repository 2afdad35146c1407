"""Tensor maps that deliver the columns of a convolution: boxes of pixels by channels (im2col mode of the copy engine)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilecast.emulator.errors import BoundsError, LayoutError
from tilecast.emulator.language.arrays import Box, TensorDescriptor


class TensorDescriptorIm2Col(Box):
    """A tensor map of [N, spatial..., C] whose boxes are [pixels, channels].

    Base pixels run through ``pixel_box_lower_corner`` to extent - 1 + ``pixel_box_upper_corner`` of each spatial dimension, the
    last one fastest, in steps of ``element_strides``; from one image to the next.
    """

    def __init__(
        self, base: Any, shape: Sequence[int], strides: Sequence[int], block_shape: Sequence[Any], layout: Any = None,
        padding: str = "zero", round_f32_to_tf32: bool = False, element_strides: Sequence[int] | None = None,
        pixel_box_lower_corner: Sequence[int] | None = None, pixel_box_upper_corner: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(base, shape, strides, block_shape, layout, padding, round_f32_to_tf32)
        rank = len(self.shape)
        spatial = rank - 2
        low, high = pixel_box_lower_corner, pixel_box_upper_corner
        if not 3 <= rank <= 5 or len(self.block_shape) != 2:
            raise LayoutError(
                f"an im2col descriptor is of 3 to 5 dimensions and boxes [pixels, channels], got {rank} and {self.block_shape}"
            )
        if low is None or high is None or len(low) != spatial or len(high) != spatial:
            raise LayoutError(
                f"an im2col descriptor of {rank} dimensions needs {spatial} lower and upper corners, got {low}, {high}"
            )
        self._low = [int(n) for n in low]
        self._end = [int(n) + int(corner) for n, corner in zip(self.shape[1:-1], high, strict=True)]
        self._steps = [int(n) for n in element_strides[1:-1]] if element_strides else [1] * spatial

    @classmethod
    def from_tensor(
        cls, tensor: Any, block_shape: Sequence[Any], layout: Any = None, padding: str = "zero", **more: Any
    ) -> TensorDescriptorIm2Col:
        """The tensor map of a whole tensor."""
        return cls(tensor, tensor.shape, TensorDescriptor.strides_of(tensor), block_shape, layout, padding, **more)

    def columns(self, corner: Sequence[int], offsets: Sequence[int]) -> Any:
        """[pixels, channels] from the base pixel ``corner`` = [n, spatial..., c] on, each moved by ``offsets``."""
        if len(corner) != len(self.shape) or len(offsets) != len(self._low):
            raise BoundsError(
                f"an im2col copy of {len(self.shape)} dimensions takes as many coordinates and {len(self._low)} offsets, got "
                f"{len(corner)} and {len(offsets)}"
            )
        pixels, channels = self.block_shape
        block = np.full((pixels, channels), self.fill, self.memory.data.dtype)
        extents, strides = [int(n) for n in self.shape], [int(n) for n in self.strides]
        first = int(corner[-1])
        inside = np.arange(max(first, 0), min(first + channels, extents[-1]), dtype=np.int64)
        image, place = int(corner[0]), [int(n) for n in corner[1:-1]]
        for row in range(pixels):
            at = [image, *(p + int(o) for p, o in zip(place, offsets, strict=True))]
            if all(0 <= a < n for a, n in zip(at, extents[:-1], strict=True)):
                start = sum(a * s for a, s in zip(at, strides[:-1], strict=True))
                block[row, inside - first] = self._elements(start + inside * strides[-1])
            # The next base pixel: the last spatial dimension first.
            for dim in reversed(range(len(place))):
                place[dim] += self._steps[dim]
                if place[dim] < self._end[dim]:
                    break
                place[dim] = self._low[dim]
            else:
                image += 1
        return block
