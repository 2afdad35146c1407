"""A kernel as its machine code shows it: roles of warps, their loops, and what every instruction waits for or sets going."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tilecast.codegen.compiler.opcodes import pipe_of
from tilecast.codegen.compiler.sass import Instruction

#: What a step is; "plain" ones only occupy their pipe.
KINDS = (
    "plain", "wait", "arrive", "expect", "init", "named_wait", "named_arrive", "cluster_wait", "cluster_arrive", "copy_in",
    "copy_out", "commit", "matrix", "matrix_wait", "group", "group_wait", "tensor_load", "tensor_store", "shared_load", "shared_store", "fence", "elect",
    "to_uniform", "registers", "retry", "guard", "exit",
)  # fmt: skip
#: MUFU instructions of a role's loops from which on it computes exponentials.
EXPONENTIALS = 8


@dataclass(frozen=True, slots=True)
class Barrier:
    """A barrier, or a ring of them that a slot counter goes round; equal values are the same barrier.

    ``places`` are addresses in the CTA's shared memory (an mbarrier) or numbers (a named barrier), ascending; none where the
    address is not known: then ``base`` is the unknown part, the same for equal ones, and ``offset`` what is added to it.
    """

    named: bool
    places: tuple[int, ...]
    #: Whose shared memory: "own", "leader" (of a pair) or "peer".
    owner: str = "own"
    base: str = ""
    offset: int = 0

    @property
    def resolved(self) -> bool:
        """Whether its place is known."""
        return bool(self.places)

    @property
    def stages(self) -> int:
        """Slots of the ring, 1 for a barrier alone."""
        return max(1, len(self.places))

    def label(self) -> str:
        """Its name for people: the first address, the ring, whose it is."""
        if not self.resolved:
            return f"[{self.base}+{self.offset:#x}]"
        if self.named:
            return "/".join(f"#{place}" for place in self.places)
        step = self.places[1] - self.places[0] if self.stages > 1 else 8
        ring = f" ring of {self.stages}" if self.stages > 1 else ""
        ring += f", {step} B apart" if step != 8 else ""
        return f"{self.places[0]:#x}{ring}{'' if self.owner == 'own' else f' ({self.owner})'}"


@dataclass(frozen=True, slots=True)
class Guard:
    """A branch inside a loop around code that not every iteration runs; a probability is attached by its name."""

    #: Kind and number in the loop, such as "vote0".
    name: str
    #: What decides it: "vote" of the warp, "uniform" (a value that the warp shares), "warp" (its index), each "thread", "elect" (the thread
    #: that was elected).
    kind: str
    address: int
    #: Instructions under it that stand elsewhere; those in line name the guard themselves.
    away: tuple[Step, ...] = ()
    #: Warps that run what is under it, where their index decides; empty otherwise.
    warps: tuple[int, ...] = ()
    #: Whether the first, second, ... of some iterations, which repeat themselves, run it; empty where nothing says.
    turns: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction as a warp of a role runs it."""

    instruction: Instruction
    kind: str
    #: (warps, barrier) that it waits for, arrives at, or that its copy or commit completes on; warps that agree share one.
    barriers: tuple[tuple[tuple[int, ...], Barrier], ...] = ()
    #: wait: parity of the phase it waits for at first (1 passes a fresh barrier); expect: bytes; arrive, init: arrivals; named barriers: threads; matrix_wait, group_wait: groups that may stay under way;
    #: loads and stores of tensor and shared memory: registers a thread; copies by lanes: bytes a lane; registers: a thread's budget; -1: not known.
    amount: int = -1
    #: matrix: m, n, k; zeros where the descriptor is not known.
    shape: tuple[int, int, int] = (0, 0, 0)
    #: matrix: where A comes from: "shared", "tensor" or "registers".
    source: str = ""
    #: The place of its barrier when the loop is entered, of a ring; -1: not known.
    first: int = -1
    #: Loads and stores of shared memory: wavefronts of 128 bytes that a warp's takes.
    wavefronts: int = 0
    #: It works for a pair of CTAs; its barrier or its data goes to several CTAs.
    pair: bool = False
    multicast: bool = False
    #: wait: the retry stands "inline" or "away"; "" for a poll that is not repeated. matrix: "commits" where the group ends here.
    note: str = ""
    #: Name of the guard under which it runs, and what decides its own predicate.
    guard: str = ""
    under: str = ""
    #: Warps that run it, where branches on their index decide; empty otherwise.
    runs: tuple[int, ...] = ()
    #: Iterations that run it, as of its guard; of a loop run in line several times, which time it is.
    turns: tuple[bool, ...] = ()
    turn: int = 0

    @property
    def pipe(self) -> str:
        """The pipe it occupies."""
        return pipe_of(self.instruction.opcode)


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop of a role: what an iteration runs, in order, with the loops inside where they are entered."""

    #: By nesting and order in the role: "0", "0.0", "0.1".
    name: str
    address: int
    body: tuple[Step | Loop, ...]
    guards: tuple[Guard, ...]
    #: Loops that an iteration may run in place of what ``body`` shows.
    beside: tuple[Loop, ...] = ()
    #: Name of the guard of the loop around it under which it is entered.
    guard: str = ""

    @property
    def steps(self) -> tuple[Step, ...]:
        """What the loop runs itself, without the loops inside."""
        return tuple(one for one in self.body if isinstance(one, Step))

    @property
    def inner(self) -> tuple[Loop, ...]:
        """The loops inside."""
        return (*(one for one in self.body if isinstance(one, Loop)), *self.beside)

    @property
    def steady(self) -> bool:
        """Whether it has no loops inside."""
        return not self.inner

    def pipes(self) -> Counter[str]:
        """Instructions of an iteration by pipe, loops inside not counted."""
        return Counter(step.pipe for step in self.steps)

    def walk(self) -> Iterator[Loop]:
        """The loop and all inside, in order."""
        yield self
        for one in self.inner:
            yield from one.walk()

    def before(self, inner: Loop) -> tuple[Step, ...]:
        """What runs ahead of ``inner`` since the loop before it: its preheader."""
        at = self.body.index(inner)
        begin = max((i + 1 for i in range(at) if isinstance(self.body[i], Loop)), default=0)
        return tuple(one for one in self.body[begin:at] if isinstance(one, Step))

    def after(self, inner: Loop) -> tuple[Step, ...]:
        """What runs behind ``inner`` until the next loop: its epilogue."""
        at = self.body.index(inner)
        end = next((i for i in range(at + 1, len(self.body)) if isinstance(self.body[i], Loop)), len(self.body))
        return tuple(one for one in self.body[at + 1 : end] if isinstance(one, Step))


@dataclass(frozen=True, slots=True)
class Role:
    """Warps of a CTA that run the same code; ``body`` is all of it, from the kernel's first instruction."""

    warps: tuple[int, ...]
    #: A thread's, when its first loop begins; None where nothing says.
    registers: int | None
    #: The whole path as the body of a loop that runs once.
    whole: Loop

    @property
    def loops(self) -> tuple[Loop, ...]:
        """Outermost loops, in order."""
        return self.whole.inner

    def walk(self) -> Iterator[Loop]:
        """All loops, outer ones first."""
        for loop in self.loops:
            yield from loop.walk()

    @property
    def work(self) -> str:
        """What its loops are for, by their instructions: matrix, copy, compute, store or idle."""
        kinds = Counter(step.kind for loop in self.walk() for step in loop.steps)
        pipes = sum((loop.pipes() for loop in self.walk()), Counter[str]())
        if not pipes:
            return "idle"
        if kinds["matrix"]:
            # A division by a shape takes a reciprocal or two as well.
            return "matrix and compute" if pipes["mufu"] >= EXPONENTIALS else "matrix"
        if kinds["tensor_load"] or pipes["fma"] + pipes["mufu"] > pipes.total() / 2:
            return "compute"
        return "copy in" if kinds["copy_in"] else "copy out" if kinds["copy_out"] else "compute"


@dataclass(frozen=True, slots=True)
class KernelShape:
    """What a kernel's listing tells."""

    kernel: str
    target: str
    #: Warps of a CTA; a listing alone does not tell, then it is how many the reader was told to follow.
    warps: int
    roles: tuple[Role, ...]
    #: mbarriers that the kernel sets up: (barrier, arrivals that complete a phase, -1 where unknown), by address.
    barriers: tuple[tuple[Barrier, int], ...]

    def sites(self) -> tuple[Step, ...]:
        """Every step of every loop that is about a barrier."""
        steps = [step for role in self.roles for loop in role.walk() for step in loop.steps]
        return tuple(step for step in steps if step.barriers)

    def resolved(self) -> tuple[int, int]:
        """(sites in loops whose barriers are all known, all sites in loops)."""
        sites = self.sites()
        return sum(all(one.resolved for _, one in step.barriers) for step in sites), len(sites)
