"""Device memory that outlasts the call that asks for it, and whether the current stream is being captured, which may not make any."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)


def lasting_zeros(count: int, kind: Any, device: Any) -> Any:
    """``count`` zeros of dtype ``kind`` on a CUDA device, zero when the call returns; not under capture.

    Made in another thread: torch.compile's CUDA graphs claim what theirs allocates, warming up too, and refuse tensors that
    no caller gives back.
    """

    def make() -> Any:
        made = torch.zeros(count, dtype=kind, device=device)
        torch.cuda.current_stream(device).synchronize()
        return made

    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(make).result()
