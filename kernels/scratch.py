"""What launches work in besides their tensors, at hand without asking PyTorch: counters that are zero, and room for partial results."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tilecast.kernels.lasting import capturing, lasting_zeros

#: Counters that a device gets at a time.
_COUNTERS = 1 << 18
#: Most numbers of partial results that are kept for a stream's next launch: 4 MiB.  Calls that need more take longer than their host.
_KEPT = 1 << 20


class Counters:
    """Scratch of launches: counters of arrivals, zero before a launch, which leaves them so, and room for partial results.

    Launches that may overlap need scratch of their own: there is some for every stream, and a launch that is captured
    into a graph, which may be replayed on any stream, keeps its own for good.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._of_stream: dict[int, Any] = {}
        self._partials: dict[int, Any] = {}
        #: Of a stream whose launches find all they need: (both, how much there is of each).
        self._ready: dict[int, tuple[tuple[Any, Any], int, int]] = {}
        self._stock: Any = None
        self._taken = 0
        #: Stocks that captured launches have counters of.
        self._used_up: list[Any] = []

    def get(self, floats: int, count: int) -> tuple[Any, Any]:
        """``floats`` numbers, float32, and ``count`` zeros, int32."""
        if self._device.type != "cuda":
            return self._empty(floats), torch.zeros(count, dtype=torch.int32, device=self._device)
        if capturing():
            return self._empty(floats), self._own(count)
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        ready = self._ready.get(stream)
        if ready is not None and floats <= ready[1] and count <= ready[2]:
            return ready[0]
        found = self._of_stream.get(stream)
        if found is None or found.numel() < count:
            self._ready.pop(stream, None)
            found = self._of_stream[stream] = self._larger(found, max(count, 4096), torch.int32)
        if self._stock is None or self._taken > _COUNTERS // 2:
            # For captures to come, which cannot make any that are zero for free.  Graphs keep no tensor: what they have of the stock
            # before stays theirs by this list alone.
            self._used_up += [] if self._stock is None else [self._stock]
            self._stock, self._taken = lasting_zeros(_COUNTERS, torch.int32, self._device), 0
        if floats > _KEPT:
            return self._empty(floats), found
        partials = self._partials.get(stream)
        if partials is None or partials.numel() < floats:
            partials = self._partials[stream] = self._larger(partials, max(floats, _KEPT // 16), torch.float32)
        self._ready[stream] = (partials, found), partials.numel(), found.numel()
        return partials, found

    def _empty(self, floats: int) -> Any:
        return torch.empty_strided((floats,), (1,), dtype=torch.float32, device=self._device)

    def _larger(self, before: Any, count: int, kind: Any) -> Any:
        """At least ``count`` zeros in place of those ``before`` (None: there were none), which launches may still use."""
        if before is not None:
            before.record_stream(torch.cuda.current_stream(self._device))
        return lasting_zeros(1 << (count - 1).bit_length(), kind, self._device)

    def _own(self, count: int) -> Any:
        if self._stock is None or self._taken + count > _COUNTERS:
            # Zeroed by the graph on every replay.
            return torch.zeros(count, dtype=torch.int32, device=self._device)
        found = self._stock[self._taken : self._taken + count]
        self._taken += -(-count // 4) * 4  # 16 bytes: the compiled code may count on it
        if self._taken > _COUNTERS // 2:
            self._ready.clear()  # the next launch makes more of them
        return found


@functools.cache
def counters_of(device: Any) -> Counters:
    """Those of a device's launches that never run beside one another on a stream."""
    return Counters(device)
