"""Run code of any author's file with its launches emulated, and say what came of it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilecast.base.files import check_writable, write_text_atomically
from tilecast.emulator.errors import EmulationError, RequestError, UnsupportedError

if TYPE_CHECKING:
    from tilecast.model.machine.machine import Machine

#: Items of a sequence, and characters of text, that a summary shows.
_SHOWN, _CHARACTERS = 8, 200


@dataclass(frozen=True, slots=True)
class Called:
    """What a call did."""

    text: str
    right: bool
    #: What is wrong; "" where nothing is.
    wrong: str
    #: What the call returned, as text; "" for None.
    returned: str
    launches: int
    programs: int
    operations: int
    #: 32-bit integers that overflow in larger problems, each in words.
    overflows: list[str]
    #: Of the program that executed most, as it would take alone on an SM; None where nothing ran or a product has no known rate.
    cycles: float | None = None


def run_call(
    file: str, call: str | None, machine: str | None, mode: str, seed: int, sms: int | None, whole: bool = False,
    largest: Mapping[str, int] | None = None, trace: str | None = None,
) -> Called:  # fmt: skip
    """Evaluate ``call`` among the names of ``file``, or (None) run it as a script, with launches emulated.

    ``whole``: what the call returned is all of it, not tensors by shape, type and range; ``largest``: as `any_kernel.emulated` has it;
    ``trace``: a file for the timelines of all programs.

    Code that asks torch for a GPU gets the CPU.  An EmulationError or an assertion that fails is an answer; RequestError
    and UnsupportedError are not, and what else the file raises is a RequestError with its place in the file.
    """
    if trace is not None:
        check_writable(trace)
    need_packages()
    from tilecast.emulator.any_kernel import chip_for, load_any
    from tilecast.emulator.cuda_on_cpu import cuda_on_cpu
    from tilecast.emulator.language.hostside import overflows
    from tilecast.emulator.source import Source

    chip = chip_for(Source(file), machine)
    title = (
        f"{file}: {call or 'as a script'}, {mode}"
        + (f" (seed {seed})" if mode == "random" else "")
        + f" on {chip.title}"
    )
    capability = (9, 0) if chip.tensor_kind == "wgmma" else (10, 0)
    session: Any = None
    returned, wrong, kind = "", "", ""
    with cuda_on_cpu(capability, sms or int(chip["chip.sm_count"])):
        try:
            name = "emulated_kernel" if call is not None else "__main__"
            session, module = load_any(file, machine=chip, mode=mode, seed=seed, sms=sms, name=name, largest=largest)
            if call is not None:
                result = evaluated(call, vars(module), file)
                returned = "" if result is None else str(result) if whole else in_short(result)
        except (RequestError, UnsupportedError):
            raise
        except EmulationError as error:
            kind, wrong = type(error).__name__.removesuffix("Error").lower(), str(error)
        except AssertionError as error:
            kind, wrong = "assertion", str(error).strip() or "an assertion of the file fails"
        except Exception as error:
            raise RequestError(_raised(file, error)) from error
    launches = session.launches if session is not None else 0
    traces = session.traces if session is not None else []
    operations = sum(len(role.events) for one in traces for role in one.roles)
    lines = [title]
    if wrong:
        lines.append(f"  {kind:10s} {wrong}")
    elif not launches:
        lines.append("  nothing    no kernel was launched: nothing was checked")
    else:
        lines.append(
            f"  races      none: {operations} operations of {len(traces)} programs in {launches} launch(es), every access ordered"
        )
    over = overflows(session) if session is not None and not wrong else []
    lines += [f"  {'larger' if not number else '':10s} {said}" for number, said in enumerate(over)]
    time, cycles = _timed(session, chip, trace) if traces and not wrong else ([], None)
    lines += time
    if returned:
        lines.append(f"  returned   {returned}")
    return Called("\n".join(lines), not wrong, wrong, returned, launches, len(traces), operations, over, cycles)


def _timed(session: Any, chip: Machine, trace: str | None) -> tuple[list[str], float | None]:
    """Lines about the time of the program that executed most, and its cycles; all programs' timelines go to ``trace``."""
    from tilecast.emulator.replay.spent import described, longest
    from tilecast.emulator.replay.timeline import chrome_trace
    from tilecast.emulator.replay.timing import replay

    traces = session.traces
    lines, timeline = described(traces, chip, session.source.quote)
    if timeline is None:
        return lines, None
    if trace is not None:
        most = longest(traces)
        write_text_atomically(trace, chrome_trace(timeline if one is most else replay(one, chip) for one in traces))
        lines = [*lines, f"  timeline   {trace}: open in ui.perfetto.dev"]
    return lines, timeline.cycles


def read_largest(text: str | None) -> dict[str, int]:
    """Numbers by name from "M=65536,N=8192"; RequestError where it is not like that."""
    found = {}
    for part in filter(None, (text or "").replace(" ", "").split(",")):
        name, _, number = part.partition("=")
        if not name.isidentifier() or not number.isdigit():
            raise RequestError(f"--largest: expected NAME=NUMBER,... like M=65536,N=8192, got '{text}'")
        found[name] = int(number)
    return found


def in_short(value: Any) -> str:
    """What a call returned, on a line: tensors by type, shape, range and mean, of much text and of long sequences the beginning."""
    from tilecast.emulator.values.outside import is_tensor, numpy_of

    if is_tensor(value):
        return _tensor_in_short(numpy_of(value))
    if isinstance(value, dict):
        pairs = [f"{key}: {in_short(one)}" for key, one in list(value.items())[:_SHOWN]]
        return "{" + ", ".join([*pairs, *_more(len(value))]) + "}"
    if isinstance(value, (tuple, list)):
        text = ", ".join([*map(in_short, value[:_SHOWN]), *_more(len(value))])
        return f"[{text}]" if isinstance(value, list) else f"({text}{',' * (len(value) == 1)})"
    text = str(value)
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}... ({len(text)} characters)"


def _more(count: int) -> list[str]:
    return [f"... {count - _SHOWN} more"] if count > _SHOWN else []


def _tensor_in_short(array: Any) -> str:
    import numpy as np

    what = f"{array.dtype} {list(array.shape)}"
    if not array.size:
        return f"{what}, empty"
    if array.dtype == bool:
        return f"{what}, {int(array.sum())} of {array.size} true"
    # Types of ml_dtypes and small floats as what holds all their numbers; integers as they are.
    numbers = array if array.dtype.kind in "iuc" else array.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    if array.dtype.kind == "c":
        finite, what = np.abs(finite), f"{what}, absolute values"
    found = [f"{what}, no finite number"]
    if finite.size:
        found = [f"{what}, {finite.min():.6g} to {finite.max():.6g}, mean {finite.mean():.4g}"]
    nans = int(np.isnan(numbers).sum())
    infinite = numbers.size - finite.size - nans
    found += [f"{count} {name}" for count, name in ((nans, "NaN"), (infinite, "infinite")) if count]
    return ", ".join(found)


def _raised(file: str, error: Exception) -> str:
    """What a file raises that is no answer, and its last line that has to do with it."""
    ours = os.path.abspath(file)
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if os.path.abspath(frame.filename) == ours
    ]
    where = f"{file}: line {lines[-1]}" if lines else file
    return f"{where}: its code ends with {type(error).__name__}: {error}"


def evaluated(call: str, names: dict[str, Any], file: str) -> Any:
    """What the expression ``call`` gives among the names of ``file``; RequestError where it is none or names nothing there."""
    try:
        code = compile(call, "--call", "eval")
    except SyntaxError as error:
        raise RequestError(
            f"--call: expected an expression like 'function(arguments)', got '{call}': {error.msg}"
        ) from None
    unknown = [name for name in code.co_names[:1] if name not in names and name not in names["__builtins__"]]
    if unknown:
        # Names of Python's own stand in the file for what they are in kernels.
        builtins = names["__builtins__"]
        own = sorted(n for n, value in names.items() if callable(value) and not n.startswith("_") and n not in builtins)
        raise RequestError(f"--call: {file} has no {unknown[0]}; functions there: {', '.join(own[:12]) or 'none'}")
    return eval(code, names)


def need_packages() -> None:
    """RequestError where what the emulator runs on is not installed; where numpy is not loaded yet, it gets one thread."""
    if "numpy" not in sys.modules:
        # Products of single tiles: threads cost up to ten times what they save where others use the cores.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        import greenlet  # noqa: F401
        import ml_dtypes  # noqa: F401
    except ImportError:
        raise RequestError("emulating needs greenlet and ml_dtypes: pip install 'tilecast[emulate]'") from None
