"""Cycle and time stamps on every SM, as a kernel that goes before and after what is measured.

Cycles come from the SM's own counter, so they hold at any clock; dividing by the global timer gives the clock the SM
really ran at, which NVML overstates under matrix load (docs/measured-facts.md).
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _stamp(out):  # type: ignore[no-untyped-def]
    clock, timer, sm = tl.inline_asm_elementwise(
        "mov.u64 $0, %clock64; mov.u64 $1, %globaltimer; { .reg .u32 s; mov.u32 s, %smid; cvt.u64.u32 $2, s; }",
        "=l,=l,=l,l",
        [out.to(tl.int64)],
        dtype=(tl.int64, tl.int64, tl.int64),
        is_pure=False,
        pack=1,
    )
    slot = out + 3 * tl.program_id(0)
    tl.store(slot, sm)
    tl.store(slot + 1, clock)
    tl.store(slot + 2, timer)


class Stamps:
    """A pair of stamps: ``begin()``, work, ``end()``, and after a synchronisation ``read()``."""

    def __init__(self, device: torch.device) -> None:
        self._sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._rows: Any = torch.zeros(2, self._sms, 3, dtype=torch.int64, device=device)

    def begin(self) -> None:
        """Queue the stamp before the work."""
        _stamp[(self._sms,)](self._rows[0], num_warps=1)

    def end(self) -> None:
        """Queue the stamp after the work."""
        _stamp[(self._sms,)](self._rows[1], num_warps=1)

    def read(self) -> tuple[float, float]:
        """(SM cycles, seconds) from the first stamp to the second: medians over the SMs that both ran on."""
        first, second = ({row[0]: (row[1], row[2]) for row in stamps} for stamps in self._rows.cpu().tolist())
        both = first.keys() & second.keys()
        if not both:
            raise RuntimeError("the stamps before and after a measurement ran on no common SM")
        cycles = statistics.median(second[sm][0] - first[sm][0] for sm in both)
        seconds = statistics.median(second[sm][1] - first[sm][1] for sm in both) * 1e-9
        return float(cycles), float(seconds)
