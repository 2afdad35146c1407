"""What a battery found, and what it reached, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilecast.base.progress import Progress, silent
from tilecast.emulator.call import need_packages

if TYPE_CHECKING:
    from tilecast.emulator.battery.launches import Labelled
    from tilecast.emulator.battery.runner import Battery
    from tilecast.emulator.battery.superfluous import Waits

#: Longest line of a kernel in a report; problems of a quick battery.
_CODE, _QUICK = 100, 6
#: Lines that are listed by number.
_LINES = 8


@dataclass(frozen=True, slots=True)
class BatteryReport:
    """A battery as a text and as figures."""

    text: str
    right: bool
    #: What was found first; "" where nothing was.
    wrong: str
    figures: dict[str, Any]


def run_report(
    file: str, machine: str | None = None, case: str | None = None, keep_going: bool = False,
    superfluous: bool = False, progress: Progress = silent, quick: bool = False,
) -> BatteryReport:  # fmt: skip
    """The battery on ``file`` (a path or a shipped kernel's name); ``case``: only problems whose label contains it;
    ``quick``: only its first ones.

    ``superfluous``: of a kernel that is right, also the waits that nothing needs.
    """
    need_packages()
    from tilecast.emulator.battery.runner import run_battery
    from tilecast.emulator.battery.superfluous import superfluous_waits
    from tilecast.emulator.errors import RequestError
    from tilecast.emulator.run import kernel_path
    from tilecast.emulator.source import Source

    def chosen(one: Labelled) -> bool:
        return case is None or case in one.label()

    source = Source(kernel_path(file))
    found = run_battery(source, machine, keep_going, progress, chosen, _QUICK if quick else None, tries=not quick)
    if not found.problems_in_all:
        raise RequestError(f"--case: no problem of the battery has '{case}' in its label")
    waits = superfluous_waits(source, machine, chosen, progress) if superfluous and not found.failures else None
    return report(file, found, "" if quick else case, waits)


def report(file: str, found: Battery, case: str | None = None, waits: Waits | None = None) -> BatteryReport:
    """``found`` in words and as figures."""
    lines = [f"{file}: battery of {found.problems_in_all} problems on {found.machine}"]
    for failure in found.failures:
        lines += [f"  {failure.kind:10s} {failure.message}", f"             in {failure.problem}"]
    if not found.failures:
        lines += [
            f"  correct    output within {found.out_error:.0%} of what rounding allows"
            + (f", log-sum-exp within {found.lse_error:.0%}" if found.lse_error else ""),
            f"  races      none: {found.operations} operations of {found.programs} programs, every access ordered",
        ]
        if found.refusals:
            lines.append(f"  refused    {found.refusals} wrong calls")
        if found.indices:
            lines.append(_indices(found))
        if found.exponentials:
            lines.append(f"  2^x        {found.exponentials} piece(s) of PTX, alone, as exact as their degree allows")
    elif found.problems < found.problems_in_all:
        lines.append(f"  not run    {found.problems_in_all - found.problems} further problems (--keep-going runs them)")
    lines += _reached(found, case is not None)
    if waits is not None:
        lines.append(
            f"  waits      {len(waits.superfluous)} of {waits.places} were not missed by {waits.problems} problems when left out"
        )
        lines += [
            f"             {one.barrier}: {one.code}" + (f", from {one.caller_code}" if one.caller else "")
            for one in waits.superfluous
        ]
    wrong = f"{found.failures[0].kind}: {found.failures[0].message}" if found.failures else ""
    figures = {
        "failures": [_fields(one) for one in found.failures],
        **{
            name: getattr(found, name)
            for name in (
                "problems", "problems_in_all", "refusals", "exponentials", "programs", "operations", "statements",
                "statements_in_all", "indices", "undecided",
            )
        },
        "out_error_share": found.out_error,
        "lse_error_share": found.lse_error,
        "unreached": [_fields(one) for one in found.unreached],
        "waits": waits.places if waits is not None else None,
        "superfluous": [_fields(one) for one in waits.superfluous] if waits is not None else None,
    }  # fmt: skip
    return BatteryReport("\n".join(lines), not found.failures, wrong, figures)


def _indices(found: Battery) -> str:
    """What larger problems make of 32-bit integers."""
    line = f"  indices    {found.indices} places compute in 32 bits, enough for tensors beyond 2^31 elements"
    if not found.undecided:
        return line + ", for all programs"
    lines = ", ".join(map(str, found.undecided[:_LINES])) + (", .." if len(found.undecided) > _LINES else "")
    return line + f"; for all programs but in line(s) {lines}, where only some were looked at"


def _reached(found: Battery, partial: bool) -> list[str]:
    """What ran and what did not."""
    line = f"  executed   {found.statements} of {found.statements_in_all} statements of the file"
    open_ends = [one for one in found.unreached if not one.reason]
    known = len(found.unreached) - len(open_ends)
    if known:
        line += f"; {known} branch(es) were decided when the kernel was compiled"
    if partial or found.failures:
        return [line]
    return [line, *(f"  {one.what:16s} line {one.line}: {one.code[:_CODE]}" for one in open_ends)]


def _fields(one: Any) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__dataclass_fields__}
