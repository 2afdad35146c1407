"""Put the battery to a kernel: one problem after another, until one finds something."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilecast.base.progress import Progress, silent
from tilecast.emulator.battery.benches import bench_for
from tilecast.emulator.battery.coverage import Unreached
from tilecast.emulator.battery.host import handed_on, tensor_maps
from tilecast.emulator.battery.launches import Labelled
from tilecast.emulator.battery.trials import mending_changes
from tilecast.emulator.errors import (
    BarrierError,
    BoundsError,
    EmulationError,
    IntegerError,
    LayoutError,
    RaceError,
    RequestError,
    UninitializedError,
    UnsupportedError,
)
from tilecast.emulator.expressions import SILENT
from tilecast.emulator.origins import by_turns
from tilecast.emulator.source import Source
from tilecast.model.machine.machine import Machine, MachineError

#: Lines that a message about a place outside a tensor quotes.
_BEHIND = 16
#: Lines that an operand is followed back to, what decides about layouts or is of the host; operands.
_OPERAND, _LAYOUTS, _OPERANDS = 8, 12, 4
#: Waits and signals about an access, lines about them; lines that memory which was never written is followed back to.
_AROUND, _ORDERED, _STORED, _SLOTS = 2, 16, 10, 4
#: Statements that count slots and phases.
_COUNTS = 8
#: Barriers and names of which there is one side only, and lines about each.
_SIDES, _SIDE = 4, 3
#: Frames of an error up to the last caller that is quoted.
_CALLERS = 3


#: Of what changes of lines are tried.
_TRIED = ("wrongresult", "race", "deadlock", "uninitialized", "bounds", "barrier")


@dataclass(frozen=True, slots=True)
class Failure:
    """What one problem found."""

    problem: str
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Battery:
    """What a battery found, and what it reached."""

    failures: tuple[Failure, ...]
    problems: int
    #: How many there are: fewer ran where one failed.
    problems_in_all: int
    refusals: int
    exponentials: int
    programs: int
    operations: int
    statements: int
    statements_in_all: int
    unreached: tuple[Unreached, ...]
    #: Largest errors, as a share of what rounding allows.
    out_error: float
    lse_error: float
    machine: str
    #: Places that compute in 32 bits and were followed to larger problems; lines of those that intervals do not decide.
    indices: int
    undecided: tuple[int, ...]


def run_battery(
    source: Source, machine: str | Machine | None = None, keep_going: bool = False, progress: Progress = silent,
    chosen: Callable[[Labelled], bool] = lambda problem: True, most: int | None = None, tries: bool = False,
) -> Battery:  # fmt: skip
    """Everything the battery has, in the order of the bench's problems, until something is found (``keep_going``: to the end).

    ``chosen``: which problems; ``most``: how many of them; ``tries``: of the first that is wrong, which change of a line makes it right.  Raises RequestError and UnsupportedError for what cannot be run.
    """
    try:
        run = bench_for(source, machine)
    except SyntaxError as error:
        raise RequestError(f"{source.path}: line {error.lineno}: {error.msg}") from None
    except (EmulationError, MachineError):
        raise
    except Exception as error:
        # What stands at the top of the file, before anything is launched.
        message = f"{source.quote_of(error)}: {type(error).__name__}: {error}{_through(source, error)}"
        raise RequestError(f"{source.path} cannot be loaded: {message}") from None
    todo = [one for one in run.todo() if chosen(one)][:most]
    failures: list[Failure] = []
    solved = refusals = exponentials = 0

    def held(name: str, attempt: Callable[[], Any]) -> Any:
        try:
            return attempt()
        except RequestError as error:
            # What the file's own host code asks of its kernels is the file's.
            if not source.frames_of(error):
                raise
            message = f"{source.quote_of(error)}: {error}{_through(source, error)}"
            failures.append(Failure(name, "crash", message))
        except UnsupportedError as error:
            if error.__cause__ is None:
                raise UnsupportedError(str(error) + _called(source, error) + _alone(source)) from None
            failures.append(Failure(name, "crash", str(error) + _through(source, error.__cause__)))
        except EmulationError as error:
            kind = type(error).__name__.removesuffix("Error").lower()
            said = "" if re.search(r"line \d+:", str(error)) else f"{source.quote_of(error)}: "
            failures.append(Failure(name, kind, said + str(error) + _behind(source, error) + _alone(source)))
        except Exception as error:
            # The file's own code: a refusal of what it must take, or a mistake of the host's.
            where = source.quote_of(error)
            message = f"{where}: {type(error).__name__}: {error}{_through(source, error)}"
            failures.append(Failure(name, "crash", message))
        return 0

    for number, problem in enumerate(todo):
        progress("battery", number, len(todo), problem.label())
        held(problem.label(), lambda problem=problem: run.solve(problem))  # type: ignore[misc]
        if tries and len(failures) == 1 and failures[0].kind in _TRIED:
            said = failures[0].message
            failures[0] = replace(failures[0], message=said + mending_changes(run, todo, number, said, progress))
        solved += 1
        if number == 0 and not failures:
            refusals = held("wrong arguments", run.refused)
            exponentials = held("exponentials alone", run.exponentials)
        if failures and not keep_going:
            break
    progress("battery", len(todo), len(todo))
    executed, there = run.coverage.share()
    indices = run.kernel.session.indices
    return Battery(
        tuple(failures), solved, len(todo), refusals, exponentials, run.programs, run.operations, executed, there,
        run.coverage.unreached(), run.out_error, run.lse_error, run.kernel.machine.title,
        len(indices.checked), tuple(sorted({line for _, line, _ in indices.undecided})),
    )  # fmt: skip


def _alone(source: Source) -> str:
    """What the file has one side of only, as text to append: barriers (a wait or a signal is missing, or is another's), and
    names that nothing reads."""
    found = [(f"of {name}: {what}", lines) for name, lines, what in source.dataflow.one_sided()]
    found += [(f"no use of {name}", []) for name in source.dataflow.unused()]
    found += [(f"no use of {name} in {function}", lines) for name, function, lines in source.dataflow.unread()]
    return "".join(
        f"\n             {said}{''.join('; ' + source.quote(line)[:100] for line in lines[:_SIDE])}"
        for said, lines in found[:_SIDES]
    )


def _behind(source: Source, error: EmulationError) -> str:
    """Of a place outside a tensor, or one that two stores reach: what it is computed from, as text to append."""
    ordered = "shared memory" in str(error) or "tensor memory" in str(error)
    if isinstance(error, UninitializedError) and ordered:
        frames = source.frames_of(error)[:_CALLERS]
        return _waited(source, str(error)) + _ordered(source, str(error), frames) + _operands(source, error, _STORED)
    if isinstance(error, (UninitializedError, LayoutError)):
        return _operands(source, error) + (tensor_maps(source) if isinstance(error, LayoutError) else "")
    if isinstance(error, BarrierError) and "used before mbarrier.init" in str(error):
        return _not_initialised(source) + _ordered(source, str(error), source.frames_of(error)[:_CALLERS])
    if isinstance(error, BarrierError) or (isinstance(error, RaceError) and ordered):
        return _ordered(source, str(error), source.frames_of(error)[:_CALLERS])
    twice = str(error).startswith("race on element")
    if not twice and not isinstance(error, (BoundsError, IntegerError)):
        return ""
    frames = source.frames_of(error)
    if isinstance(error, IntegerError):
        # Of larger problems it shows at the end of a launch: where the number was made says more.
        said = int(re.findall(r"line (\d+):", str(error) + " line 0:")[0])
        frames = frames[frames.index(said) :] if said in frames else [said]
    # The address, and which elements are asked for; of a copy's its corner, which is the second argument.
    stores = twice or (bool(frames) and re.search(r"\w+\.store\(", source.quote(frames[0])) is not None)
    behind = by_turns(
        [
            source.values(frames, _BEHIND, argument, only=bool(argument))[1:]
            for argument in ((0, "mask") if stores else (0, 1, "mask"))
        ]
    )
    # What decides that it is asked for at all.
    asked = by_turns([source.values(frames[i:], _OPERAND, "conditions") for i in range(len(frames[:_CALLERS]))])
    behind = by_turns([behind, asked])
    # Of a slot that is not there, how many were made.
    slots = re.search(r"(\w+) has \d+ slots", str(error))
    made = source.dataflow.assigned(slots[1]) if slots else []
    lines = list(dict.fromkeys([*frames[1:3], *made, *behind]))[:_BEHIND]
    text = (
        "; it comes from" + "".join(f"\n               {source.quote(line)[:100]}" for line in lines) if lines else ""
    )
    if twice:
        # The address of the other one.
        both, _, flags = str(error).partition("flags that this program has read")
        # What it waits for, where that does not tell of the other one.
        turns = by_turns([source.values([int(one)], _OPERAND, 1) for one in re.findall(r"line (\d+):", flags)])
        behind_flags = [source.quote(turn)[:100] for turn in dict.fromkeys(turns)][:_OPERAND]
        text += "; of the flags" + "".join(f"\n               {one}" for one in behind_flags) if behind_flags else ""
        others = [int(one) for one in re.findall(r"line (\d+):", both) if int(one) not in frames]
        found = [source.quote(line)[:100] for other in others[:1] for line in source.values([other], _OPERAND, 0)[1:]]
        text += "; of the other one" + "".join(f"\n               {line}" for line in found) if found else ""
        return text + handed_on(source, "addresses depend on strides", ("stride", "attention["))
    tensor = re.search(r"outside (\w+): element", str(error))
    return text + (handed_on(source, f"what launch makes of {tensor[1]}", (tensor[1],)) if tensor else "")


def _waited(source: Source, said: str) -> str:
    """Of memory that a copy has not written yet, who waits for the barrier of the copy, as text to append."""
    barrier = re.search(r"and ([a-z_]\w*(?:\.\w+)*)\[\d+\] counts its bytes", said)
    waits = [source.quote(line)[:100] for line in source.dataflow.waiting(barrier[1])[:_COUNTS]] if barrier else []
    return f"; who waits for {barrier[1]}: {'; '.join(waits)}" if barrier and waits else ""


def _not_initialised(source: Source) -> str:
    """Memory for barriers that is never initialised, and where it is made, as text to append."""
    return "".join(
        f"; no mbarrier.init is about the barriers of {name}, {source.quote(line)[:100]}"
        for name, line in source.dataflow.not_initialised()
    )


def _ordered(source: Source, said: str, frames: Sequence[int]) -> str:
    """Of accesses or arrivals that nothing orders, the waits before and the signals after them, and the other barriers of theirs."""
    flow, places = source.dataflow, [int(line) for line in re.findall(r"line (\d+):", said)]
    # The role that met it first, and who called for it; then the other one.
    around = by_turns(
        [flow.signals_and_waits(place, _AROUND) for place in frames]
        + [
            [*flow.callers(place)[:_CALLERS], *flow.signals_and_waits(place, _AROUND)]
            for place in dict.fromkeys(places)
            if place not in frames
        ]
    )
    name = re.search(r"(?:^|: )([a-z_]\w*(?:\.\w+)*)\[", said) or re.search(r"memory ([a-z_]\w*(?:\.\w+)*)", said)
    back = [line for line, _ in flow.beside(name[1], SILENT)] if name else []
    # What decides whether those signals are given.
    decided = by_turns([source.values([line], _OPERAND, "around")[1:] for line in dict.fromkeys([*around, *back])])
    # Of the other side, what decides whether it gives its slots back.
    sites = dict.fromkeys(site for line in back for site in (line, *flow.callers(line)))
    other = [site for site in sites if not flow.beside_each_other(site, frames)]
    guarded = by_turns([source.values([line], _OPERAND, "conditions") for line in other])
    # Which slot and phase it is.
    counted = by_turns([source.values([line], _SLOTS, 1, counters=True)[1:] for line in dict.fromkeys(around)])
    groups = [[*frames[1:2], *around], back, guarded, counted, decided]
    lines = [line for line in dict.fromkeys(by_turns(groups)) if line not in places][:_ORDERED]
    quoted = [f"\n               {source.quote(line)[:100]}" for line in lines]
    said = "; who calls, waits before, signals after, other barriers of theirs" + "".join(quoted) if quoted else ""
    counts = [source.quote(line) for line in flow.counts([*frames, *places])[:_COUNTS]]
    return said + (f"\n             what counts: {'; '.join(counts)}" if counts else "")


def _operands(source: Source, error: EmulationError, most: int = _BEHIND) -> str:
    """Of an operation that cannot take what it is given, where that comes from, as text to append: at most so many lines."""
    said = re.search(r"line (\d+): ", str(error))
    chain = source.frames_of(error) or ([int(said[1])] if said else [])
    lines = by_turns(
        [
            source.values(
                chain,
                _LAYOUTS if isinstance(error, LayoutError) else _OPERAND,
                number,
                layouts=isinstance(error, LayoutError),
            )[1:]
            for number in (*range(_OPERANDS), *(("layout",) if isinstance(error, LayoutError) else ()))
        ]
        if chain
        else []
    )
    if isinstance(error, LayoutError) and chain:
        # Where the layout itself is wrong, what it is made of comes first.
        made = source.values(chain, _LAYOUTS, "layout", layouts=True, only=True)[1:]
        lines = [*made, *lines] if "basis" in str(error) or "bases" in str(error) else by_turns([lines, made])
    # Of memory that does not fit, where it is made.
    memory = re.search(r" into ([a-z_][\w.]*),", str(error))
    made = source.dataflow.assigned(memory[1].rpartition(".")[2]) if memory else []
    lines = [*source.frames_of(error)[1:_CALLERS], *made, *lines]
    quoted = [f"\n               {source.quote(line)[:100]}" for line in list(dict.fromkeys(lines))[:most]]
    return "; its operands come from" + "".join(quoted) if quoted else ""


def _called(source: Source, error: BaseException) -> str:
    """From where what is not emulated was called, as text to append."""
    callers = [line for line in source.frames_of(error)[:_CALLERS] if source.quote(line) not in str(error)]
    return "".join(f"; called at {source.quote(line)[:100]}" for line in callers)


def _through(source: Source, error: BaseException) -> str:
    """Where the file's code was when it failed, and what those lines are computed from, as text to append."""
    frames = source.frames_of(error)
    behind = (
        [source.values(frames, _LAYOUTS, argument)[1:] for argument in (*range(_OPERANDS), "around")] if frames else []
    )
    # Of a refusal, what decides about it comes first.
    around = source.computed(frames[0]) if frames and isinstance(error, ValueError) else []
    lines = [*frames[:_CALLERS], *around[:_OPERAND], *by_turns(behind), *frames]
    lines += [line for frame in reversed(frames) for line in source.computed(frame, "function")]
    quoted = [source.quote(line)[:100] for line in dict.fromkeys(lines)][:_BEHIND]
    return "; it comes from" + "".join(f"\n               {one}" for one in quoted) if quoted else ""
