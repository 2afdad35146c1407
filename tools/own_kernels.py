"""What tools share that measure kernels of their own in CUDA: their text behind that of `tilecast calibrate`, machine code, clock."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence

from tilecast.validation.lab.calibrate.gpu import Gpu
from tilecast.validation.lab.calibrate.nvrtc import compile_cubin, source_text


def kernel_text(kernel: str, prelude: str, defines: Mapping[str, int | str]) -> str:
    """CUDA source of ``kernel``, with what every microbenchmark has before its own (`nvrtc.source_text`)."""
    head = source_text("empty.cu", prelude, defines)
    return head[: head.rindex("// A kernel that does nothing")] + kernel


def _compiled(text: str) -> bytes:
    return compile_cubin(text, "sm_90a")


def machine_codes(texts: Sequence[str]) -> list[bytes]:
    """Machine code for Hopper of each, on all cores."""
    with multiprocessing.get_context("spawn").Pool() as pool:
        return pool.map(_compiled, texts)


def clock_mhz(gpu: Gpu) -> str:
    """The column ``clock_mhz``: the SM clock at most."""
    return f"{gpu.identity.clock_mhz:g}"
