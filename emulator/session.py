"""What one emulation shares: the source, the options, the machine's limits, and the program that runs now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tilecast.emulator.errors import EmulationError
from tilecast.emulator.far import Indices, Larger
from tilecast.emulator.source import Source
from tilecast.emulator.trace import ProgramTrace

#: Names that Triton's releases differ in: the release whose names a kernel sees.
RELEASES = ("3.6", "3.9")
#: The number of no step.
NO_STEP = -1
#: The names of all of them, for kernels that were not generated for one.
ANY_RELEASE = "any"


class Charged(Protocol):
    """The program that runs (`hardware.program.Program`), as far as values need it: it counts their work."""

    def charge(
        self, pipe: str, count: float, shape: tuple[int, ...] = (), layout: Any = None, operands: tuple[int, ...] = (),
        axis: int | None = None,
    ) -> int:  # fmt: skip
        """Account for a step (`trace.Step`) of the role that runs; its number."""


@dataclass(frozen=True)
class Growth:
    """How large problems may become to which indices of other authors' launches are followed: memory of the machine, and values of
    the kernel's numbers, by name (then an overflow is an error).
    """

    memory_bytes: float
    largest: Mapping[str, int]


@dataclass(frozen=True)
class Planned:
    """A launch that was not run: the kernel's name, its grid, and the numbers that it would get."""

    kernel: str
    grid: tuple[int, ...]
    numbers: Mapping[str, int]


class Watcher(Protocol):
    """What looks at what copies and matrix products deliver (`steps`)."""

    def copied(self, copy: Any) -> None:
        """A copy has written its tile."""

    def multiplied(self, product: Any, a: Any, result: Any) -> None:
        """A product has read its left operand ``a`` and left ``result`` in its accumulator."""

    def stored(self, name: str, calls: tuple[int, ...], at: Any = None) -> None:
        """Something is stored to a tensor in global or shared memory, at the innermost of these places; ``at``: of global memory
        the elements, where they are known."""

    def loaded(self, calls: tuple[int, ...], unwritten: bool) -> None:
        """Elements of a tensor in global memory that programs store to are loaded; ``unwritten``: some that were never stored."""


@dataclass
class Session:
    """Mutable state of one emulation."""

    source: Source
    mode: str
    seed: int
    sms: int
    smem_limit: int
    tmem_columns: int
    release: str
    #: Whether the machine has tcgen05.ld.red.
    load_reduce: bool = False
    #: Whether products are contracted into sums (a launch option).
    fusion: bool = False
    #: The release of Triton whose compiler adds fences (3.6: between a partition's loads and the copy that overwrites them;
    #: 3.9: also between its stores and the engine that reads them), and whose own code leaves tiles that a program still stores
    #: as it ends to the hardware; empty: the source has to have fences and waits.  Which warps and CTAs meet before a product
    #: is asked of it too (`release`: whose names the kernel sees, and for which it was generated).
    adds_fences: str = ""
    #: Tensor cores of the machine: wgmma or tcgen05; empty where it does not matter.
    tensor_kind: str = ""
    #: Columns of a tile of heads -> how many of them heads have: launchers leave out products of the others, which are zeros.
    columns_there: Mapping[int, int] = field(default_factory=dict)
    #: Launches so far, and warps of the running one.
    launches: int = 0
    num_warps: int = 4
    #: Whether the running launch may begin before the one before it has ended (launch_pdl).
    overlaps: bool = False
    #: Of the running launch: address of an element that atomics access -> what is known of it (`language.atomics`).
    flags: dict[int, Any] = field(default_factory=dict)
    #: Where the running launch overlaps the one before: address of such an element of that one -> what its value tells.
    told_before: dict[int, Any] = field(default_factory=dict)
    #: Of the running launch: program -> (line of an atomic, of a store) of which the atomic does not tell, for another warp stored.
    apart: dict[int, tuple[int, int]] = field(default_factory=dict)
    #: Of the running launch: programs that have not started, those that another one took over, and the one that runs.
    pending: list[int] = field(default_factory=list)
    cancelled: set[int] = field(default_factory=set)
    started: int = 0
    #: Whether programs have to add to a tensor in one order, so that floating-point sums have the same bits in every run.
    sums_in_order: bool = False
    #: At random moments: has the running program give way to others, until its condition holds; False where no program can go on.
    give_way: Callable[[Callable[[], bool]], bool] | None = None
    #: Tensors in global memory by address and shape, and names of them by id.
    arrays: dict[Any, Any] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    #: (place, iteration) of the static loops that are running: each of their iterations is code of its own.
    unrolled: list[int] = field(default_factory=list)
    #: The far larger problems of kernels, by name, and whether indices are followed to them now; how to find those of others'
    #: kernels, and what was launched so far; the running program's, and what is known of all indices; launches that are only planned.
    far_launches: Mapping[str, Larger] | None = None
    follows_far: bool = True
    growth: Growth | None = None
    grown: dict[str, set[Any]] = field(default_factory=dict)
    larger: Larger | None = None
    indices: Indices = field(default_factory=Indices)
    planned: list[Planned] | None = None
    program: Charged | None = None
    traces: list[ProgramTrace] = field(default_factory=list)
    #: Lines that put -inf into a tensor of scores, each with those that called it.
    mask_calls: set[tuple[int, ...]] = field(default_factory=set)
    #: Inline PTX that ran on tensors: (text, results, elements at a time) and the line.
    ptx: dict[tuple[str, int, int], int] = field(default_factory=dict)

    #: Of the running launch: function of constants and arguments -> the layout that it made, and its hash.
    made_layouts: dict[Any, Any] = field(default_factory=dict)
    #: Functions of the language that tensors have as methods too, by name.
    methods: dict[str, Any] = field(default_factory=dict)
    #: What looks at every copy and product; None: nothing does.
    watcher: Watcher | None = None

    #: Events and steps so far, those of large tensors and products as several, and how many there may be (0: any number), for
    #: trials that may never end.
    spent: float = 0
    most_events: float = 0

    #: Whether somebody reads what an error says; of trials nobody does.
    explains: bool = True

    #: Waits for barriers by place and caller's place, where they are counted, and the one that is left out.
    waits: dict[tuple[int, ...], str] | None = None
    left_out: tuple[int, ...] = ()

    def spend(self, work: float = 0.0) -> None:
        """Count an event or a step, ``work``: as how many more; EmulationError where there are more than there may be."""
        self.spent += 1 + work
        if self.spent > self.most_events > 0:
            raise EmulationError(f"{self.here()}: more than {self.most_events:.0f} events")

    def leaves_out(self, name: str) -> bool:
        """Whether the wait for barrier ``name`` that runs now is left out; counts it."""
        if self.waits is None and not self.left_out:
            return False
        place = tuple(self.source.calls()[:2])
        if self.waits is not None:
            self.waits.setdefault(place, name)
        return place == self.left_out

    def calls(self) -> tuple[int, ...]:
        """Places that are running now, innermost first, where a watcher is told."""
        return tuple(self.source.calls()) if self.watcher is not None else ()

    def here(self) -> str:
        """The running line, quoted."""
        return self.source.quote(self.source.line())

    def charge(
        self, pipe: str, count: float, shape: tuple[int, ...] = (), layout: Any = None, operands: tuple[int, ...] = (),
        axis: int | None = None,
    ) -> int:  # fmt: skip
        """Account for a step (`trace.Step`) of the role that runs; its number, NO_STEP outside a kernel."""
        return NO_STEP if self.program is None else self.program.charge(pipe, count, shape, layout, operands, axis)
