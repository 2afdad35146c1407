"""Run a generated kernel: load the file, give it tensors, collect what it computed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from tilecast.base.data import shipped_kernel
from tilecast.emulator.decorated import replaced
from tilecast.emulator.errors import RequestError, UnsupportedError
from tilecast.emulator.extremes import far_launches
from tilecast.emulator.host_torch import HostTorch
from tilecast.emulator.language.arrays import Array
from tilecast.emulator.modules import modules
from tilecast.emulator.replay.timeline import Timeline
from tilecast.emulator.replay.timing import replay
from tilecast.emulator.session import RELEASES, Session, Watcher
from tilecast.emulator.source import Change, Source
from tilecast.emulator.trace import ProgramTrace
from tilecast.emulator.verify import as_numpy
from tilecast.model.kernel.header import header_window
from tilecast.model.machine.machine import Machine, load_machine

MODES = ("late", "random")
_LOG2E = 1.4426950408889634
#: Families of generated files that run here, and the tensor cores that they are for.
_TENSOR_KIND = {
    "hopper_ws": "wgmma", "blackwell_ws": "tcgen05", "hopper_serving": "wgmma", "hopper_serving_e4m3": "wgmma", "hopper_serving_runs": "wgmma", "hopper_serving_runs_e4m3": "wgmma", "hopper_prefill": "wgmma",
    "hopper_mla": "wgmma", "blackwell_serving": "tcgen05", "hopper_bwd": "wgmma", "hopper_bwd_apart": "wgmma", "gemm_hopper": "wgmma",
    "gemm_blackwell": "tcgen05",
}  # fmt: skip
_FORWARD = ("hopper_ws", "blackwell_ws")


@dataclass(frozen=True)
class Emulation:
    """What a kernel computed, and what its roles did.

    out: (batch, heads_q, seqlen_q, head_dim_v) in the inputs' type; lse: (batch, heads_q, seqlen_q), float32.
    """

    out: Any
    lse: Any
    header: Mapping[str, Any]
    traces: tuple[ProgramTrace, ...]
    machine: Machine
    #: Line of the last store to each element of ``out`` (0: none).
    stored_at: Any
    #: Lines that put -inf into scores, where that is called for, and under which conditions.
    mask_lines: tuple[int, ...]
    _source: Source
    #: Of the log-sum-exp, as ``stored_at``.
    lse_stored_at: Any

    def timelines(self, known: Timeline | None = None) -> tuple[Timeline, ...]:
        """Every program's operations on its SM, in cycles; ``known``: one that was replayed already."""
        return tuple(
            known if known is not None and known.program == trace.program else replay(trace, self.machine)
            for trace in self.traces
        )

    def quote(self, line: int) -> str:
        """A line of the kernel, for messages."""
        return self._source.quote(line)


def kernel_path(file: str | Path) -> Path:
    """A file, or the name of a shipped kernel; RequestError when there is neither."""
    path = Path(file)
    if path.is_file():
        return path
    if (shipped := shipped_kernel(path)) is not None:
        return shipped
    raise RequestError(f"{file}: expected a kernel file or the name of a shipped kernel (tilecast generate writes one)")


def new_session(
    source: Source, chip: Machine, mode: str = "late", seed: int = 0, sms: int | None = None, release: str = "3.9"
) -> Session:
    """State for running ``source`` on ``chip``; RequestError where they do not go together."""
    family = str(source.header().get("family", ""))
    if family not in _TENSOR_KIND:
        raise RequestError(
            f"{source.path}: the emulator runs {', '.join(_TENSOR_KIND)}, this kernel is of family '{family}'"
        )
    if chip.tensor_kind != _TENSOR_KIND[family]:
        raise RequestError(f"{source.path}: {family} needs {_TENSOR_KIND[family]}, {chip.name} has {chip.tensor_kind}")
    return Session(
        source, mode, seed, sms or int(chip["chip.sm_count"]), int(chip["smem.per_cta_bytes"]),
        int(chip.get("tmem.columns", 0.0)), release,
        chip.get("tmem.load_reduce", 0.0) > 0,
    )  # fmt: skip


def is_forward_header(header: Mapping[str, Any]) -> bool:
    """Whether a header is that of a forward pass in 16 bits, which `emulate` runs."""
    return header.get("family") in _FORWARD and header.get("workload", {}).get("dtype") != "fp8"


def load(session: Session) -> ModuleType:
    """The session's kernel file as a module, with stand-ins for Triton."""
    return session.source.load(modules(session), replaced(session))


class Loaded:
    """A generated file that is loaded once and launched on one problem after another.

    ``change``: rewrites the file's syntax tree before it is executed; ``names``: what that may call.
    """

    def __init__(
        self, source: Source, machine: str | Machine | None = None, release: str = "3.9", sms: int | None = None,
        change: Change | None = None, names: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        if release not in RELEASES:
            raise RequestError(f"release: expected {' or '.join(RELEASES)}, got '{release}'")
        self.source, self.header = source, source.header()
        self.machine = machine if isinstance(machine, Machine) else load_machine(machine or str(self.header["machine"]))
        self.session = new_session(source, self.machine, sms=sms, release=release)
        names = {**replaced(self.session), **(names or {})}
        self.torch = HostTorch()
        self.module = source.load({**modules(self.session), "torch": self.torch}, names, change=change)
        if not hasattr(self.module, "launch"):
            raise RequestError(
                f"{source.path}: expected a whole file written by 'tilecast generate', it lacks 'launch'"
            )

    def begin(self, mode: str, seed: int, sms: int | None, watcher: Watcher | None = None) -> None:
        """Set the session for a launch: schedule, SMs, who watches; forget the one before."""
        session = self.session
        session.mode, session.seed, session.sms = mode, seed, sms or session.sms
        session.watcher = watcher
        session.traces.clear()
        session.mask_calls.clear()
        # What host code remembers (`lru_cache`) may be of another number of SMs.
        for found in vars(self.module).values():
            if isinstance(found, functools._lru_cache_wrapper):
                found.cache_clear()

    def constant(self, name: str, otherwise: int) -> int:
        """A number at the top of the file, as TILE_N."""
        found = getattr(self.module, name, otherwise)
        return int(found) if isinstance(found, int) else otherwise

    def mask_lines(self) -> tuple[int, ...]:
        """Lines that hid scores, the line that called for it, and the conditions of both."""
        found: dict[int, None] = {}
        for calls in sorted(self.session.mask_calls):
            for line in calls[:2]:
                # The nearest condition first.
                found.update(dict.fromkeys((line, *sorted(self.source.conditions(line), reverse=True))))
        return tuple(found)


class Kernel(Loaded):
    """A forward pass in 16 bits."""

    def run(
        self, q: Any, k: Any, v: Any, *, scale: float | None = None, window: tuple[int, int] | None = None,
        mode: str = "late", seed: int = 0, sms: int | None = None, with_lse: bool = True, planned: bool = False,
        watcher: Watcher | None = None,
    ) -> Emulation:  # fmt: skip
        """One launch; the arguments of `emulate`.

        ``with_lse=False``: the launch gets None for it, and the result's is NaN.  ``planned``: what ``plan`` works out
        for tensors of these shapes is given these tensors and started, as a launcher that remembers shapes does.  ``watcher``
        is told of every copy and product.
        """
        if mode not in MODES:
            raise RequestError(f"mode: expected {' or '.join(MODES)}, got '{mode}'")
        session = self.session
        if not is_forward_header(self.header):
            raise UnsupportedError(
                f"{self.source.path}: expected a forward pass of {' or '.join(_FORWARD)} in 16 bits, got family "
                f"'{self.header.get('family')}', {self.header['workload']['dtype']}: only the battery has problems for it (tilecast emulate "
                "FILE without a problem)"
            )
        self.begin(mode, seed, sms, watcher)
        if session.far_launches is None:
            shape = self.header["workload"]
            widths = int(shape["head_dim_qk"]), int(shape["head_dim_v"])
            session.far_launches = far_launches(session, self.module.launch, widths, header_window(self.header))
        arrays = [Array(as_numpy(x, name), name) for x, name in ((q, "q"), (k, "k"), (v, "v"))]
        batch, heads, rows, width = arrays[0].shape
        tiles, columns = getattr(self.module, "HEAD_COLUMNS", ()), max(width, arrays[2].shape[3])
        session.columns_there = {n: min(max(columns - sum(tiles[:i]), 8), n) for i, n in enumerate(tiles)}
        # What is never written shows.
        out = Array(np.full((batch, heads, rows, arrays[2].shape[3]), np.nan, arrays[0].data.dtype), "out")
        lse = Array(np.full((batch, heads, rows), np.nan, np.float32), "lse")
        limits = window if window is not None else header_window(self.header)
        factor = scale if scale is not None else width**-0.5
        try:
            if planned:
                self._start_planned([*arrays, out, lse], factor, limits)
            else:
                self.module.launch(*arrays, out, lse if with_lse else None, factor, *limits)
        except (TypeError, AttributeError, IndexError) as error:
            # What Python refuses here is Gluon that the stand-ins do not take.
            raise UnsupportedError(f"{self.source.quote_of(error)}: {error}") from error
        masks = self.mask_lines()
        return Emulation(
            out.data,
            lse.data,
            self.header,
            tuple(session.traces),
            self.machine,
            out.line,
            masks,
            self.source,
            lse.line,
        )

    def _start_planned(self, tensors: list[Array], scale: float, window: tuple[int, int]) -> None:
        """Plan for other tensors of the same shapes, then put these in their places."""
        others = [Array(np.zeros_like(x.data), x.name) for x in tensors]
        grid, arguments = self.module.plan(*others, *window)
        place = {id(other): tensor for other, tensor in zip(others, tensors, strict=True)}
        given = []
        for argument in arguments:
            base = getattr(argument, "base", None)
            if id(base) in place:
                argument = copy.copy(argument)
                argument.base = place[id(base)]
            given.append(place.get(id(argument), argument))
        self.module.attention[grid](*given, max(scale * _LOG2E, 1e-37), **self.module.OPTIONS)


def emulate(
    file: str | Path, q: Any, k: Any, v: Any, *, scale: float | None = None, window: tuple[int, int] | None = None,
    mode: str = "late", seed: int = 0, machine: str | Machine | None = None, sms: int | None = None,
    release: str = "3.9", text: str | None = None,
) -> Emulation:  # fmt: skip
    """Run the kernel in ``file`` (a path or a shipped kernel's name) on a CPU.

    q: (batch, heads_q, seqlen_q, head_dim), k, v alike with heads_kv and seqlen_k; numpy or torch, fp16 or bf16.
    ``window``: keys left and right of the diagonal (-1: no limit); the default is what the file's header says.
    ``mode``: "late" or "random" (with ``seed``); ``machine``: limits and SMs (default: the header's); ``sms``: fewer
    SMs, so that a persistent program runs several tiles; ``release``: whose names of Triton's API the kernel sees;
    ``text``: source to run instead of the file's.
    Raises a subclass of EmulationError that names the source lines when the kernel is wrong.
    """
    source = Source(kernel_path(file) if text is None else file, text)
    kernel = Kernel(source, machine, release, sms)
    return kernel.run(q, k, v, scale=scale, window=window, mode=mode, seed=seed)
