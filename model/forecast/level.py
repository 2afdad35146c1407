"""The level of a forecast: before compilation, or from machine code; who compares variants compares them at one level.

A level is named by a ``compiler``, the argument of every function that forecasts: `at_hand`, the default, machine code
where a loop is at hand (auto), None before compilation (fluid), `kept_loop` machine code or a refusal (kept), and
`codegen.compiler.kept.compiled_variant` the kernel compiled (code).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tilecast.base.data import LOOP_TARGETS
from tilecast.model.chip.evaluate import Evaluation, PredictError, evaluate
from tilecast.model.families import native_family
from tilecast.model.forecast.answer import BEFORE, COMPILED
from tilecast.model.forecast.binding import Binding, binding
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.followed import changed_unfollowed
from tilecast.model.machine.machine import Machine
from tilecast.model.search.best import Best, best

if TYPE_CHECKING:
    from tilecast.model.compiled.evaluate import CompiledVariant

#: Levels by name that need no compiler; the first is the default.
LEVELS = ("auto", "fluid", "kept")
#: From a variant, for a workload on a machine, to its machine code; None where it is not at hand.
Compiler = Callable[[Workload, Machine, Variant], "CompiledVariant | None"]
Search = Callable[[Workload, Machine, str, str | float], Best]


def compiler_of(level: str) -> Compiler | None:
    """The ``compiler`` of one of `LEVELS`."""
    if level != "kept":
        return at_hand if level == "auto" else None
    from tilecast.model.compiled.loops.shelf import kept_loop

    return kept_loop


def at_hand(workload: Workload, machine: Machine, variant: Variant) -> CompiledVariant | None:
    """The machine code of ``variant``'s loop; None where it is not at hand, or does not follow what a what-if changed: the default level of
    every forecast."""
    if machine.arch not in LOOP_TARGETS or changed_unfollowed(machine):
        return None
    from tilecast.model.compiled.loops.shelf import loop_at_hand

    return loop_at_hand(workload, machine, variant)


def _best_at_hand(workload: Workload, machine: Machine, family: str, clock: str | float = "sustained") -> Best:
    if machine.arch not in LOOP_TARGETS or changed_unfollowed(machine):
        return best(workload, machine, family, clock)
    # Most other forecasts need none of the simulators of machine code.
    from tilecast.model.compiled.loops.choose import best_at_hand

    return best_at_hand(workload, machine, family, clock)


def search_of(compiler: Compiler | None) -> Search:
    """The search that says "best" at the level of ``compiler``."""
    if compiler is None:
        return best
    if compiler is at_hand:
        return _best_at_hand
    from tilecast.model.compiled.loops.choose import best_at_hand, best_kept
    from tilecast.model.compiled.loops.shelf import kept_loop, loop_at_hand

    return {loop_at_hand: best_at_hand, kept_loop: best_kept}.get(compiler, best)  # type: ignore[arg-type]


def following(compiler: Compiler | None, changed: Machine) -> Compiler | None:
    """``compiler`` where machine code follows what a what-if changed in ``changed``; else None, or PredictError if machine code was asked for."""
    missed = changed_unfollowed(changed) if compiler is not None else ()
    if not missed:
        return compiler
    if compiler is not at_hand:
        raise PredictError(f"forecasts from machine code do not follow {', '.join(missed)}: use --level auto or fluid")
    return None


def settled(
    compiler: Compiler | None,
    workload: Workload,
    machine: Machine,
    variant: Variant | None = None,
    family: str | None = None,
    clock: str | float = "sustained",
) -> Compiler | None:
    """The one level at which variants are compared with ``variant`` (default: the best of ``family`` at ``compiler``'s level).

    Of "machine code where a loop is at hand" that is machine code for all, where the variant's loop is, or for none.
    PredictError as from the search and the compiler.
    """
    compiler = following(compiler, machine)
    if compiler is None or (compiler is at_hand and machine.arch not in LOOP_TARGETS):
        return None
    from tilecast.model.compiled.loops.shelf import kept_loop, loop_at_hand

    if variant is None:
        variant = search_of(compiler)(workload, machine, family or native_family(machine).name, clock).variant
    if compiler(workload, machine, variant) is None:
        return None
    return kept_loop if compiler in (at_hand, loop_at_hand) else compiler


def follows(compiler: Compiler | None, workload: Workload, machine: Machine, variant: Variant) -> bool:
    """Whether ``variant`` can be forecast at a settled level."""
    if compiler is None:
        return True
    try:
        return compiler(workload, machine, variant) is not None
    except PredictError:
        return False


def level_words(compiler: Compiler | None) -> str:
    """A settled level, as forecasts name theirs: `BEFORE` or `COMPILED`."""
    return BEFORE if compiler is None else COMPILED


def evaluated(
    workload: Workload, machine: Machine, variant: Variant, clock: str | float, made: CompiledVariant | None
) -> tuple[Evaluation, Binding]:
    """A legal variant's launch, from ``made`` where there is one, and what its time sits on.

    What holds a loop of machine code is named by the loop before compilation, whose operations have names.
    """
    followed = launched(workload, machine, variant, clock, made)
    if made is None:
        return followed, binding(workload, machine, followed)
    bound = binding(workload, machine, evaluate(workload, machine, variant, clock))
    return followed, binding(workload, machine, followed).of_loop(bound)


def launched(
    workload: Workload, machine: Machine, variant: Variant, clock: str | float, made: CompiledVariant | None
) -> Evaluation:
    """A legal variant's launch alone, from ``made`` where there is one."""
    if made is None:
        return evaluate(workload, machine, variant, clock)
    from tilecast.model.compiled.evaluate import evaluate_compiled

    return evaluate_compiled(made, workload, machine, variant, clock)
