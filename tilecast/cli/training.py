"""What the forecasting verbs do with --pass bwd and --pass both: gradients of q, k and v."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tilecast.cli.workload_options import Changes, Clock, Kernel, Level, Machines, Shapes
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

if TYPE_CHECKING:
    from tilecast.model.backward import BackwardVariant
    from tilecast.model.passes import Pass as Pass_
    from tilecast.model.training.forecast import BackwardPrediction, TrainingPrediction

Pass = Annotated[str, typer.Option("--pass", help="fwd; bwd: gradients of q, k, v.")]
PassOrBoth = Annotated[str, typer.Option("--pass", help="fwd; bwd: gradients of q, k, v; both: forward and backward.")]


def is_forward(direction: str, both: bool = False) -> bool:
    """Whether a verb is asked about the forward pass; VariantError for a pass that it does not know."""
    known = ("fwd", "bwd", "both") if both else ("fwd", "bwd")
    if direction not in known:
        why = ": each pass has kernels of its own, ask about one at a time" if direction == "both" else ""
        raise VariantError(f"--pass: expected {', '.join(known[:-1])} or {known[-1]}, got '{direction}'{why}")
    return direction == "fwd"


def chosen_kernel(kernel: Kernel, work: Workload, machine: Machine) -> tuple[str | None, BackwardVariant | None]:
    """(family or None for the shape's own, variant or None for the best) of ``--family`` and ``--variant``.

    Knobs that the text does not name have the values of the variant to start from for the shape.
    """
    from tilecast.model.backward import find_backward, named_in, native_backward, parse_backward

    family = find_backward(kernel.family) if kernel.family is not None else None
    if kernel.variant is None:
        return (family.name if family is not None else None), None
    named = named_in(kernel.variant)
    if family is not None and named is not None and named.name != family.name:
        raise VariantError(
            f"--family {kernel.family} and --variant {kernel.variant} contradict each other: the variant is of family "
            f"{named.name}: drop one of the two"
        )
    record = family or named or native_backward(work.reduced(), machine)
    return record.name, parse_backward(kernel.variant, record.chosen(work, machine))


class Asked(NamedTuple):
    """What a verb that knows both passes asks about: the pass, its kernel, and the level."""

    asked_pass: Pass_
    family: str | None
    variant: Any
    compiler: Any


def asked(direction: str, kernel: Kernel, work: Workload, machine: Machine, level: Level) -> Asked:
    """The pass, kernel and level of ``--pass``, ``--family``, ``--variant`` and ``--level``."""
    if is_forward(direction):
        from tilecast.model.passes import FORWARD

        return Asked(FORWARD, *kernel.on(machine), level.compiler())
    from tilecast.model.training.passes import BACKWARD

    check_level(level)
    return Asked(BACKWARD, *chosen_kernel(kernel, work, machine), None)


def check_level(level: Level) -> None:
    """PredictError for a level that a backward pass has not."""
    from tilecast.model.chip.evaluate import PredictError

    if level.name not in ("auto", "fluid"):
        raise PredictError(
            f"--level {level.name}: backward passes are forecast before compilation, which is nearer to measurements (docs/accuracy.md, "
            "'tilecast validate backward'): drop it, or 'tilecast forecast FILE.py --kernel gradients' follows the loop of a generated one by its "
            "machine code, role by role"
        )


def predict_pass(
    direction: str, work: Shapes, machines: Machines, kernel: Kernel, clock: Clock, level: Level, as_json: bool,
    trace: str | None, others: dict[str, str | None],
) -> None:  # fmt: skip
    """predict --pass bwd and --pass both."""
    from tilecast.base.files import check_writable, write_text_atomically
    from tilecast.cli.progress import Screen
    from tilecast.cli.tables import shape_name, show
    from tilecast.model.chip.evaluate import PredictError

    for option, value in others.items():
        if value is not None:
            raise PredictError(f"{option} goes with one forward pass: drop --pass {direction}")
    if trace is not None:
        if len(work.works) * len(machines) > 1:
            raise PredictError(
                f"--trace goes with one shape and one machine, got {len(work.works) * len(machines)} forecasts"
            )
        check_writable(trace)
    answers: list[BackwardPrediction | TrainingPrediction | str] = []
    questions = [(chip, w) for chip in machines for w in work.works]
    with Screen() as screen:
        for done, (chip, w) in enumerate(questions):
            screen("forecast", done, len(questions), f"{chip.name} {w.label()}")
            try:
                answers.append(_answer(direction, w, chip, kernel, clock, level))
            except PredictError as error:
                if len(machines) == 1:
                    raise
                answers.append(str(error))
    if all(isinstance(a, str) for a in answers):
        raise PredictError(str(answers[0]))
    if trace is not None and not isinstance(answers[0], str):
        write_text_atomically(trace, answers[0].trace_json())
    if not work.listed and len(machines) == 1:
        only = answers[0]
        assert not isinstance(only, str)
        show(only.text(), only.to_dict(), as_json)
        return
    names = [" ".join(filter(None, (chip.name if len(machines) > 1 else "", shape_name(w) if work.listed else "")))
             for chip, w in questions]  # fmt: skip
    data = [{"machine": chip.name, "workload": w.as_dict(), "refused": a} if isinstance(a, str) else a.to_dict()
            for (chip, w), a in zip(questions, answers, strict=True)]  # fmt: skip
    what = "backward pass" if direction == "bwd" else "forward and backward pass"
    head = f"{what}, {clock.words()} clock" if work.listed else f"{what} of {work.works[0].label()}, {clock.words()} clock"  # fmt: skip
    show(f"{head}\n\n{_table(answers, names)}", data, as_json)


def _answer(
    direction: str, work: Workload, machine: Machine, kernel: Kernel, clock: Clock, level: Level
) -> BackwardPrediction | TrainingPrediction:
    from tilecast.model.training.forecast import predict_backward, predict_training

    if direction == "bwd":
        check_level(level)
        family, variant = chosen_kernel(kernel, work, machine)
        return predict_backward(work, machine, variant, family=family, clock=clock.value)
    if kernel.variant is not None or kernel.family is not None:
        raise VariantError("--pass both forecasts the best kernel of each pass: --family and --variant go with --pass fwd or bwd")  # fmt: skip
    return predict_training(work, machine, clock=clock.value, compiler=level.compiler())


def _table(answers: list[Any], names: list[str]) -> str:
    from tilecast.base.words import significant
    from tilecast.cli.tables import table

    rows = []
    for name, a in zip(names, answers, strict=True):
        if isinstance(a, str):
            rows.append([name, "-", "-", "-", a, "-"])
            continue
        then = getattr(a, "backward", a)
        rows.append(
            [name, f"{a.time_ms:.4g}", significant(a.tflops), f"{then.clock_mhz:.0f}", then.main.binding.name, then.variant.family]
        )  # fmt: skip
    return table(["", "time ms", "TFLOP/s", "MHz", "bound by", "kernel"], rows)


def schedule_pass(
    work: Workload, machine: Machine, kernel: Kernel, clock: Clock, level: Level, time_limit: float, as_json: bool
) -> None:
    """schedule --pass bwd."""
    from tilecast.cli.progress import Screen
    from tilecast.cli.tables import show, width
    from tilecast.model.training.schedule import schedule_backward

    check_level(level)
    family, variant = chosen_kernel(kernel, work, machine)
    with Screen() as screen:
        found = schedule_backward(work, machine, variant, family, clock.value, time_limit, screen)
    show("" if as_json else found.text(width()), found.to_dict() if as_json else None, as_json)


def whatif_pass(
    work: Shapes, machine: Machine, kernel: Kernel, changes: Changes, clock: Clock, level: Level, interval: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """whatif --pass bwd."""
    from tilecast.cli.progress import Screen
    from tilecast.cli.tables import shape_name, show, table
    from tilecast.model.training.whatif import backward_what_if

    check_level(level)
    found = []
    with Screen() as screen:
        for done, w in enumerate(work.works):
            screen("what if", done, len(work.works), w.label())
            family, variant = chosen_kernel(kernel, w, machine)
            found.append(
                backward_what_if(w, machine, changes.values, changes.factors, variant=variant, family=family,
                                 clock=clock.value, interval=interval)
            )  # fmt: skip
    if not work.listed:
        show(found[0].text(), found[0].to_dict(), as_json)
        return
    rows = [
        [shape_name(x.before.workload), f"{x.before.time_ms:.4g}", f"{x.after.time_ms:.4g}", f"{x.speedup:.3f}x",
         f"{x.speedup_kept:.3f}x" if x.kept is not None else "-", x.before.main.binding.name, x.after.main.binding.name]
        for x in found
    ]  # fmt: skip
    header = ["shape", "before ms", "after ms", "speed-up", "kernel kept", "bound by before", "after"]
    show(table(header, rows), [x.to_dict() for x in found], as_json)


def sensitivity_pass(
    work: Workload, machine: Machine, kernel: Kernel, clock: Clock, level: Level, step: float, as_json: bool
) -> None:
    """sensitivity --pass bwd."""
    from tilecast.cli.progress import Screen
    from tilecast.cli.tables import show, width
    from tilecast.model.training.whatif import backward_sensitivities

    check_level(level)
    family, variant = chosen_kernel(kernel, work, machine)
    with Screen() as screen:
        rows = backward_sensitivities(work, machine, variant, family=family, clock=clock.value, step=step, progress=screen)  # fmt: skip
    show(rows.text(width()), rows.to_dict(), as_json)
