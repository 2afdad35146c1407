"""Machine code of a kernel as the simulator needs it: streams of instructions with the compiler's own scheduling.

NVIDIA's compilers write into every instruction how long to wait before the next (stall), which of six counters it
raises until its result or its operands are done with, and which counters it waits for.  With those, and the latencies
of the few units that vary, the issue times of a warp follow.
"""

from __future__ import annotations

import base64
import json
import lzma
from dataclasses import dataclass
from typing import Any, NamedTuple

#: Pipes of an SM sub-partition that an instruction can occupy.
PIPES = ("alu", "fma", "mufu", "shared", "control", "uniform", "tensor", "other")
#: What the simulator does with an instruction beyond occupying a pipe.
KINDS = ("plain", "mma", "mma_wait", "wait", "arrive", "load", "store", "barrier", "mark", "spill", "reload")
#: Latency classes of instructions whose results take a varying time; "fixed" ones are in the stall counts.
LATENCIES = (
    "fixed",
    "mufu",
    "shuffle",
    "shared",
    "local",
    "constant",
    "special",
    "global",
    "convert",
    "vote",
    "poll",
    "l2",
)


#: What makes kernels the same code (`KernelCode.key`).
CodeKey = tuple[str, str, int, int, str, str]


class WarpInstruction(NamedTuple):
    """One instruction of one warp."""

    pipe: str
    #: Cycles before the warp's next instruction can issue, at least 1.
    stall: int
    #: Bit mask of the six counters that must be clear first; the counters it raises for result and operands (7: none).
    waits: int
    write_counter: int
    read_counter: int
    latency: str
    kind: str
    #: mma: columns N; mma_wait: groups that may stay in flight; barrier: warpgroups that meet (0: the warp's own);
    #: store, spill, reload: bytes a lane.
    amount: int = 0
    #: mma: A comes from registers.
    from_registers: bool = False
    #: mma: the group is committed here.
    commits: bool = False
    #: spill, reload: word of the thread's stack.
    word: int = -1


class Stretch(NamedTuple):
    """A piece of straight-line code: once a tile, or a loop body."""

    #: "once", "edge" (loop over masked blocks), "main" (loop over whole blocks), "left" (masked blocks on the left edge
    #: of a window) or "pass" (blocks that only other warpgroups need).
    role: str
    instructions: tuple[WarpInstruction, ...]


@dataclass(frozen=True, slots=True)
class KernelCode:
    """A compiled kernel.  ``consumers`` holds one program for each warpgroup of a CTA that multiplies."""

    family: str
    variant: str
    head_dim_qk: int
    head_dim_v: int
    mask: str
    dtype: str
    arch: str
    compiler: str
    warps: int
    registers: int
    shared_bytes: int
    stack_bytes: int
    #: mbarriers a CTA sets up before it starts.
    barriers: int
    consumers: tuple[tuple[Stretch, ...], ...]
    #: Of a loop at hand, what names its code wherever it is kept; empty of others.
    digest: str = ""

    def __hash__(self) -> int:
        # By name alone: forecasts are kept by code, and hashing every instruction each time costs more than they do.
        return hash((*self.key(), self.arch, self.compiler, self.registers))

    def key(self) -> CodeKey:
        """What a workload and a variant decide: kernels of one key are the same code."""
        return (self.family, self.variant, self.head_dim_qk, self.head_dim_v, self.mask, self.dtype)


class CodeError(ValueError):
    """Machine code that the simulator cannot follow: what, where, what to do."""


_HEAD = ("family", "variant", "head_dim_qk", "head_dim_v", "mask", "dtype", "arch", "compiler", "warps", "registers",
         "shared_bytes", "stack_bytes", "barriers")  # fmt: skip


def dump_codes(codes: list[KernelCode]) -> str:
    """Many kernels as compact text: distinct instructions once, stretches as indices, compressed."""
    table: dict[WarpInstruction, int] = {}
    kernels = []
    for code in codes:
        consumers = [
            [[stretch.role, [table.setdefault(i, len(table)) for i in stretch.instructions]] for stretch in consumer]
            for consumer in code.consumers
        ]
        kernels.append({**{name: getattr(code, name) for name in _HEAD}, "consumers": consumers})
    plain = json.dumps({"instructions": [list(i) for i in table], "kernels": kernels}, separators=(",", ":"))
    packed = lzma.compress(plain.encode(), preset=9)
    return base64.b85encode(packed).decode() + "\n"


def load_codes(text: str) -> list[KernelCode]:
    """Inverse of `dump_codes`; CodeError for text that is something else."""
    try:
        raw: dict[str, Any] = json.loads(lzma.decompress(base64.b85decode(text.strip())))
        table = [WarpInstruction(*row) for row in raw["instructions"]]
        return [
            KernelCode(
                **{name: kernel[name] for name in _HEAD},
                consumers=tuple(
                    tuple(Stretch(role, tuple(table[i] for i in indices)) for role, indices in consumer)
                    for consumer in kernel["consumers"]
                ),
            )
            for kernel in raw["kernels"]
        ]
    except (ValueError, LookupError, TypeError, lzma.LZMAError) as error:
        raise CodeError(
            f"not a file of machine-code profiles ({type(error).__name__}): write one with tilecast profile"
        ) from None
