"""Launches of serving kernels that cost little on the host and never wait for the device.

What a launch works out for a shape is kept, as `tilecast.kernels.launching` does for the other kernels.  Lengths stay on the
device: programs find their work themselves, so that a captured launch is right for whatever lengths are there on replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tilecast.kernels.eviction import with_evict_first
from tilecast.kernels.launching import keep
from tilecast.kernels.scratch import Counters
from tilecast.kernels.starting import compiled_starter, on_device, sm_count, takes_of, told_apart

#: What a launch works in, and what is to be called after the others (None: nothing).
Made = tuple[Any, Callable[[], None] | None]
#: Of a launch: whether the next one may begin before it ends, and whether it may begin before the one before has ended.
LEADS, FOLLOWS = 1, 2
#: Of a launch: whether it takes sequences of fewer rows too, as none of the step is for those.
FEWER = 4


def start_all(starts: Iterable[Callable[..., Any]], *given: Any) -> None:
    """Make launches of `Launcher.started` with what is given, one after the other, and end their step."""
    join_all([start(*given) for start in starts])


def join_all(launched: Sequence[Made]) -> None:
    """End a step: make the launches that merge what those of the step leave.

    These may run at the same time.  So what one works in stays until the last has its own, or that could be the same memory.
    """
    for _, join in launched:
        if join is not None:
            join()


def alike(lists: Sequence[Any], seqlen_q: int, seqlen_k: int) -> bool:
    """Whether each sequence surely has as many keys as queries: one list has the begins of both, and no length is cut short."""
    starts_q, starts_k, used_k = lists[:3]
    return starts_q is not None and starts_q is starts_k and used_k is None and seqlen_k <= seqlen_q


class Launcher:
    """``launch`` of a generated serving kernel on one device, with a memory for shapes.

    ``module`` is the file as a module, ``rows`` (fewest, most) those of the sequences that it takes.
    """

    def __init__(self, module: Any, rows: tuple[int, int], device: Any, counters: Counters) -> None:
        #: Whether a launch can begin before the one before has ended, and let the next one begin before it ends itself.
        self.follows, self.leads = getattr(module, "FOLLOWS", False), getattr(module, "LEADS", False)
        #: How many parts the kernel makes of a sequence's keys, where it makes any: (queries, keys, group, key heads, left).
        self.parts = getattr(module, "parts", None)
        #: Rows of its tiles, where it makes parts; 0 where it makes none.
        self.tile_rows = module.TILE_M.value if self.parts is not None else 0
        #: (fewest rows, most rows, launcher, launch) of this kernel for half the rows of its tiles and for the others, which take its place
        #: beside a launch for more rows; none where it has no such form.
        self.halves: tuple[tuple[int, int, Launcher, Any], ...] = ()
        #: Bytes of keys and values up to which those that a launch copies leave L2 first; 0 where they may be read again.
        self._once = getattr(module, "ONCE_BYTES", 0)
        self._module, self._rows, self._device, self._counters = module, rows, device, counters
        self._plans: dict[Any, tuple[Any, ...]] = {}
        self._sms = sm_count(device, 2)

    def __call__(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, lists: tuple[Any, ...], scale: float, softcap: float,
        seqlen_q: int, seqlen_k: int, window: tuple[int, int], beside: int = 0,
    ) -> Made:  # fmt: skip
        """Write ``out`` and ``lse`` (None: not asked for) of the sequences with as many rows as the kernel is for.

        lists: cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, cache_batch_idx, sinks, k_descale, v_descale; beside: `LEADS` where the
        next launch may begin before this one ends, plus `FOLLOWS` where this one may begin before the one before has ended, plus `FEWER`
        where it takes sequences of fewer rows than its own as well.  Returns what the launch works in (where the next one may begin
        before it ends, that must not get the same memory), and what is to be called when all launches of a step are made, to merge what
        this one leaves (None: nothing).
        """
        tensors = (q, k, v, out, lse, *lists)
        return self._made(
            self._find(tensors, softcap, seqlen_q, seqlen_k, window, beside),
            tensors,
            self._module.scales(scale, softcap),
        )

    def _made(self, plan: tuple[Any, ...], tensors: tuple[Any, ...], scales: tuple[float, float]) -> Made:
        """A launch by a plan."""
        start, join, (floats, count) = plan
        work = self._counters.get(floats, count)
        start(*tensors, *work, *scales)
        return work, None if join is None else lambda: join(*tensors, *work, *scales)

    def _find(
        self,
        tensors: tuple[Any, ...],
        softcap: float,
        seqlen_q: int,
        seqlen_k: int,
        window: tuple[int, int],
        beside: int,
    ) -> tuple[Any, ...]:
        """The plan of a shape, made where it is not known."""
        q, k, v, out, lse, *lists = tensors
        # All that compiled code, its arguments and the checks depend on, but addresses and scales.
        key = (
            q.dtype, q.shape, q.stride(), q.data_ptr() & 15, k.shape, k.stride(), k.data_ptr() & 15,
            v.shape, v.stride(), v.data_ptr() & 15, k.data_ptr() == v.data_ptr(), out.stride(),
            None if lse is None else lse.stride(),
            *[None if t is None else (t.dtype, t.shape, t.stride(), t.data_ptr() & 15) for t in lists],
            softcap != 0.0, seqlen_q, seqlen_k, window, beside, self.parts is not None and alike(lists, seqlen_q, seqlen_k),
        )  # fmt: skip
        plan = self._plans.get(key)
        if plan is None:
            plan = keep(self._plans, key, self._plan(tensors, softcap, seqlen_q, seqlen_k, window, beside))
        return plan

    def started(
        self,
        tensors: tuple[Any, ...],
        scale: float,
        softcap: float,
        seqlen_q: int,
        seqlen_k: int,
        window: tuple[int, int],
        beside: int = 0,
    ) -> Callable[..., Any]:
        """The launch of tensors like these (in the order of `__call__`) as (q, k, v, out, lse, lists) -> what `__call__` returns; it keeps
        none."""
        plan = self._find(tensors, softcap, seqlen_q, seqlen_k, window, beside)
        scales, made = self._module.scales(scale, softcap), self._made
        (start, join, (floats, count)), scratch = plan, self._counters.get

        def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, lists: Sequence[Any]) -> Made:
            work = scratch(floats, count)
            start(q, k, v, out, lse, *lists, *work, *scales)
            return work, None

        def merged(q: Any, k: Any, v: Any, out: Any, lse: Any, lists: Sequence[Any]) -> Made:
            return made(plan, (q, k, v, out, lse, *lists), scales)

        return on_device(launch if join is None else merged, tensors[0].get_device())

    def _plan(
        self, tensors: tuple[Any, ...], softcap: float, seqlen_q: int, seqlen_k: int, window: tuple[int, int], beside: int,
    ) -> tuple[Any, ...]:  # fmt: skip
        """(launch of the tensors, the two of its scratch and the two scales; one that merges what it leaves, or None; sizes of its scratch)
        of a shape."""
        module, (q, k, v, out, lse, *lists) = self._module, told_apart(tensors)
        rows, timing = (1 if beside & FEWER else self._rows[0], self._rows[1]), beside & (LEADS | FOLLOWS)
        batch = q.shape[0] if lists[0] is None else lists[0].shape[0] - 1
        same = self.parts is not None and alike(
            tensors[5:], seqlen_q, seqlen_k
        )  # of the tensors as given: those told apart are others
        heads_kv = k.shape[-2]
        sizes = module.scratch(
            batch, heads_kv, q.shape[-2] // heads_kv, seqlen_q, seqlen_k, self._sms,
            *((None if lists[0] is None else q.shape[0], max(rows[0], 1), window[0], same) if self.parts is not None else ()),
        )  # fmt: skip
        kinds = (torch.float32, torch.int32)
        work = tuple(
            torch.empty(size, dtype=kind, device=self._device) for size, kind in zip(sizes, kinds, strict=True)
        )
        grid, arguments, flags, *joined = module.plan(
            q, k, v, out, lse, lists, seqlen_q, seqlen_k, window, softcap != 0.0, rows, work, self._sms,
            **({"beside": timing} if timing else {}), **({"alike": True} if same else {}),
        )  # fmt: skip
        given = (q, k, v, out, lse, *lists, *work)
        takes = takes_of(arguments, given)
        takes.update({len(arguments) + i: len(given) + i for i in range(2)})
        options = module.options_of(flags) if hasattr(module, "options_of") else module.OPTIONS

        once = batch * seqlen_k * heads_kv * (k.shape[-1] + v.shape[-1]) * k.element_size() <= self._once
        start = compiled_starter(
            module.attention,
            options,
            grid,
            (*arguments, 1.0, 1.0, *flags),
            takes,
            len(given) + 2,
            bool(beside & FOLLOWS),
            with_evict_first if once else None,
        )
        join = None
        if joined and joined[0]:
            grid, arguments = joined[0]
            takes = takes_of(arguments, given)
            merging = compiled_starter(
                module.attention_join, module.JOIN_OPTIONS, grid, arguments, takes, len(given) + 2, True
            )
            join = on_device(merging, q.get_device())
        return start, join, sizes
