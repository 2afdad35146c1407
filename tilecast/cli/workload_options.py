"""The options that verbs share, stated once.  A parameter's type says which options it stands for:

    @app.command()
    @takes_workload
    def predict(work: Workload, machine: Machine, kernel: Kernel, clock: Clock, as_json: AsJson = False) -> None: ...

`takes_workload` replaces each such parameter by its options and hands the verb the value that they make.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import typer

from tilecast.model.kernel.presets import preset as find_preset
from tilecast.model.kernel.presets import preset_names
from tilecast.model.kernel.shapes_csv import model_heads_kv, parse_window, read_shapes
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import DTYPES, Workload, WorkloadError
from tilecast.model.machine.machine import Machine, MachineError, load_machine, machine_names

_WORK = "Workload"
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; its keys are documented and stable (docs/json.md).")]
#: Fields of `Workload` by the option that sets them.
OPTION_OF = {
    "batch": "--batch", "heads": "--heads", "heads_q": "--heads", "heads_kv": "--heads-kv", "seqlen_q": "--seqlen",
    "seqlen_k": "--seqlen-k", "head_dim_qk": "--head-dim", "head_dim_v": "--head-dim-v", "dtype": "--dtype",
    "window": "--window", "clock": "--clock", "power": "--power", "step": "--step", "mode": "--mode", "grid": "--grid", "span": "--span",
    "m": "--m", "n": "--n", "k": "--k", "c_dtype": "--c-dtype", "d_dtype": "--d-dtype", "alpha": "--alpha", "beta": "--beta",
    "in_place": "--in-place", "iterations": "--iterations", "page": "--page", "cache": "--cache", "latent": "--latent",
}  # fmt: skip
#: The level of a forecast that compiles a kernel, beside those of the model.
_COMPILES = "code"
#: The model's own levels (`forecast.level.LEVELS`, which would load the search); the first is the default.
_LEVELS = ("auto", "fluid", "kept")
_FAMILY_NAMES = ("fa4", "fa3", "fa2", "unfused")


@dataclass(frozen=True, slots=True)
class Shapes:
    """Workloads to answer for; ``listed`` when they came from a file, so that one of them still makes a table."""

    works: tuple[Workload, ...]
    listed: bool


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a model without lengths, for verbs that take many; ``preset`` is its name, where one was given."""

    work: Workload
    preset: str | None


@dataclass(frozen=True, slots=True)
class NamedMachine:
    """A machine, and the name or file that the user gave for it."""

    name: str
    chip: Machine


class Machines(tuple[Machine, ...]):
    """One machine, or several with commas between."""


def check_knobs(variant: str | None) -> None:
    """VariantError for a ``--variant`` that says nothing: it is no way to ask for the best kernel."""
    if variant is not None and not variant.strip():
        raise VariantError(f"--variant: expected knob=value, got '{variant}'")


@dataclass(frozen=True, slots=True)
class Kernel:
    """``--family`` and ``--variant`` as given; what they mean may depend on the machine."""

    family: str | None
    variant: str | None

    def __post_init__(self) -> None:
        check_knobs(self.variant)

    def on(self, machine: Machine) -> tuple[str, Any]:
        """(family name, variant or None for the best) on ``machine``; VariantError where the two contradict each other.

        Knobs that the text does not name have their family's defaults, so that a text means one kernel everywhere.
        """
        from tilecast.model.families import find_family, native_family, parse_variant

        record = find_family(self.family) if self.family is not None else native_family(machine)
        if self.variant is None:
            return record.name, None
        variant = parse_variant(self.variant, record.variant())
        if self.family is not None and variant.family != record.name:
            raise VariantError(
                f"--family {self.family} and --variant {self.variant} contradict each other: the variant is of family "
                f"{variant.family}: drop one of the two"
            )
        return variant.family, variant


@dataclass(frozen=True, slots=True)
class Changes:
    """Facts to set and to scale."""

    values: dict[str, float]
    factors: dict[str, float]

    def of(self, machine: Machine) -> Machine:
        """``machine`` with the changes, where a verb may do without any."""
        from tilecast.model.machine.changes import change_machine

        return change_machine(machine, self.values, self.factors)[0] if self.values or self.factors else machine


@dataclass(frozen=True, slots=True)
class Clock:
    """A regime ("sustained", "short"), MHz, or None where a verb has a default of its own."""

    value: Any

    def words(self) -> str:
        """For headlines."""
        return self.value if isinstance(self.value, str) else f"{self.value:g} MHz"


@dataclass(frozen=True, slots=True)
class Level:
    """What a forecast is made from: one of the levels of `model.forecast.level`, or the kernel compiled."""

    name: str

    def compiler(self) -> Any:
        """What `predict` takes as its compiler: None before compilation."""
        if self.name != _COMPILES:
            from tilecast.model.forecast.level import compiler_of

            return compiler_of(self.name)
        from tilecast.cli.progress import quiet_at_exit
        from tilecast.codegen.compiler.kept import compiled_variant

        quiet_at_exit()
        return compiled_variant


class LevelAtHand(Level):
    """A level that compiles nothing, for verbs that forecast many kernels."""


# --- what makes each value --------------------------------------------------------------------------------------------


def _work(
    *, batch: int | None = None, heads: int | None = None, heads_kv: int | None = None, seqlen: int | None = None,
    seqlen_k: int | None = None, head_dim: int | None = None, head_dim_v: int | None = None, causal: bool | None = None,
    window: str | None = None, dtype: str | None = None, preset: str | None = None,
) -> Workload:  # fmt: skip
    """One workload from the options; WorkloadError, in the options' names, on anything that makes no sense."""
    try:
        model = find_preset(preset) if preset is not None else None
        heads_q = heads if heads is not None else model.heads_q if model else 16
        shared = heads_kv if heads_kv is not None else model_heads_kv(model, heads_q)
        dim = head_dim if head_dim is not None else model.head_dim_qk if model else 128
        dim_v = head_dim_v if head_dim_v is not None else model.head_dim_v if model and head_dim is None else dim
        length = seqlen if seqlen is not None else model.seqlen if model else 4096
        limits = parse_window(window, bool(causal)) if window is not None else None
        if window is not None and limits is None:
            raise WorkloadError("window: expected 'left,right' or one number, got ''")
        mask = "window" if limits else "causal" if causal else "none"
        if model and causal is None and limits is None:
            mask, limits = model.mask, model.window
        keys = seqlen_k if seqlen_k is not None else length
        return Workload(
            1 if batch is None else batch, heads_q, shared, length, keys, dim, dim_v, mask, limits,
            "bf16" if dtype is None else dtype,
        )  # fmt: skip
    except WorkloadError as error:
        raise WorkloadError(in_options(str(error))) from None


def _heads(*, preset: str | None = None, causal: bool | None = None, **options: Any) -> Heads:
    """Heads from the options; causal where nothing says otherwise, for what is served is."""
    if causal is None and preset is None and options["window"] is None:
        causal = True
    return Heads(_work(preset=preset, causal=causal, seqlen=1, **options), preset)


def in_options(sentence: str) -> str:
    """A refusal that begins with a field's name, with the option's name instead."""
    field, colon, rest = sentence.partition(":")
    return f"{OPTION_OF[field]}:{rest}" if colon and field in OPTION_OF else sentence


def _shapes(*, shapes: str | None = None, **options: Any) -> Shapes:
    if shapes is None:
        return Shapes((_work(**options),), False)
    clash = [name for name, value in options.items() if value is not None]
    if clash:
        raise WorkloadError(f"--shapes gives the shapes, with their columns: drop --{clash[0].replace('_', '-')}")
    return Shapes(tuple(read_shapes(shapes)), True)


def _machine_word(machine: str | None, machine_name: str | None) -> str:
    if machine is not None and machine_name is not None and machine != machine_name:
        raise MachineError(f"two machines: '{machine_name}' and --machine {machine}: give one")
    word = machine if machine is not None else machine_name
    if word is None:
        raise MachineError("which machine?  Give its name or file first, or with --machine (tilecast machine list)")
    return word


def _load(word: str, power: float | None) -> Machine:
    machine = load_machine(word)
    return machine if power is None else machine.at_power(power)


def _machine(*, machine: str | None, machine_name: str | None, power: float | None = None) -> Machine:
    return _load(_machine_word(machine, machine_name), power)


def _named_machine(*, machine: str | None, machine_name: str | None, power: float | None = None) -> NamedMachine:
    word = _machine_word(machine, machine_name)
    return NamedMachine(word, _load(word, power))


def _machines(*, machine: str | None, machine_name: str | None, power: float | None = None) -> Machines:
    words = [word.strip() for word in _machine_word(machine, machine_name).split(",")]
    if len(words) > 1 and not all(words):
        raise MachineError("--machine: expected names with commas between, got an empty one")
    found = [_load(word, power) for word in words]
    twice = [m.name for i, m in enumerate(found) if m in found[:i]]
    if twice:
        raise MachineError(f"--machine: {twice[0]} is named twice")
    return Machines(found)


def _kernel(*, family: str | None, variant: str | None) -> Kernel:
    return Kernel(family, variant)


def _changes(*, set_: list[str] | None, scale: list[str] | None, whatif: list[str] | None) -> Changes:
    from tilecast.model.machine.changes import parse_changes

    return Changes(parse_changes("--set", [*(set_ or []), *(whatif or [])]), parse_changes("--scale", scale or []))


def _clock(*, clock: str | None) -> Clock:
    from tilecast.model.chip.evaluate import PredictError
    from tilecast.model.chip.power import lasting_seconds

    if clock is None or clock in ("sustained", "short") or lasting_seconds(clock):
        return Clock(clock)
    try:
        mhz = float(clock)
    except ValueError:
        mhz = 0.0
    # What the machine's top clock allows is for the forecast to say.
    if not 50 <= mhz <= 5000:
        raise PredictError(
            f"--clock: expected sustained, short, how long the work lasts (300ms, 2s) or a number of MHz from 50 to 5000, got '{clock}'"
        )
    return Clock(mhz)


def _known_level(level: str, known: tuple[str, ...]) -> str:
    from tilecast.model.chip.evaluate import PredictError

    if level not in known:
        raise PredictError(f"--level: expected {', '.join(known[:-1])} or {known[-1]}, got '{level}'")
    return level


def _level(*, level: str) -> Level:
    return Level(_known_level(level, (*_LEVELS, _COMPILES)))


def _level_at_hand(*, level: str) -> LevelAtHand:
    return LevelAtHand(_known_level(level, _LEVELS))


# --- the options ------------------------------------------------------------------------------------------------------


def _complete(words: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [word for word in words() if word.startswith(incomplete)]

    return complete


def _option(kind: Any, name: str, text: str, panel: str | None = None, words: Any = None, **more: Any) -> Any:
    completion = _complete(words) if words is not None else None
    return Annotated[kind, typer.Option(name, help=text, rich_help_panel=panel, autocompletion=completion, **more)]


_WORK_OPTIONS: dict[str, Any] = {
    "batch": _option(int | None, "--batch", "Sequences (default 1).", _WORK),
    "heads": _option(int | None, "--heads", "Query heads (default 16).", _WORK),
    "heads_kv": _option(int | None, "--heads-kv", "Key/value heads (default: as --heads).", _WORK),
    "seqlen": _option(int | None, "--seqlen", "Query length (default 4096).", _WORK),
    "seqlen_k": _option(int | None, "--seqlen-k", "Key length (default: as --seqlen).", _WORK),
    "head_dim": _option(int | None, "--head-dim", "Head dimension of Q and K (default 128).", _WORK),
    "head_dim_v": _option(int | None, "--head-dim-v", "Head dimension of V (default: as --head-dim).", _WORK),
    "causal": _option(bool | None, "--causal/--no-causal", "Causal mask, aligned bottom right.", _WORK),
    "window": _option(str | None, "--window", "Sliding window 'left,right' (or 'left').", _WORK),
    "dtype": _option(str | None, "--dtype", "bf16 (default), fp16 or fp8.", _WORK, lambda: DTYPES),
    "preset": _option(str | None, "--preset", "A model's shape (tilecast presets).", _WORK, preset_names),
}
_SHAPES_OPTION = _option(
    str | None, "--shapes",
    "CSV of shapes, one answer a row; columns are named as these options, all optional: batch, heads, heads_kv, seqlen, "
    "seqlen_k, head_dim, head_dim_v, causal (0 or 1), window, dtype, preset.", _WORK,
)  # fmt: skip
_LENGTHS = ("batch", "seqlen", "seqlen_k")
_MACHINE_OPTIONS: dict[str, Any] = {
    "machine_name": Annotated[
        str | None,
        typer.Argument(metavar="[MACHINE]", help="Machine name or file.", autocompletion=_complete(machine_names)),
    ],
    "machine": _option(str | None, "--machine", "The same as an option.", None, machine_names),
}
_KERNEL_OPTIONS: dict[str, Any] = {
    "family": _option(str | None, "--family", "Kernel family: fa4, fa3, fa2, unfused (default: the machine's own).",
                      None, lambda: _FAMILY_NAMES),
    "variant": _option(str | None, "--variant", "Kernel knobs, e.g. cta_group=2 or fa4:cta_group=2; the others have their "
                       "defaults (default: the best kernel).", None),
}  # fmt: skip
_CHANGE_OPTIONS: dict[str, Any] = {
    "set_": _option(list[str] | None, "--set", "Change a fact: fact=value, e.g. mufu.ex2=32; repeat for more."),
    "scale": _option(list[str] | None, "--scale", "Scale a fact, or a section's rates: smem=1.5; repeat for more."),
    "whatif": _option(list[str] | None, "--whatif", "An older name of --set.", hidden=True),
}
_AT_HAND = (
    "auto (default): from the machine code of a kept loop where there is one, else before compilation. "
    "fluid: always before compilation. kept: from a kept loop or not at all."
)
_LEVEL_AT_HAND_OPTIONS: dict[str, Any] = {"level": _option(str, "--level", _AT_HAND, None, lambda: _LEVELS)}
_LEVEL_OPTIONS: dict[str, Any] = {
    "level": _option(str, "--level", f"{_AT_HAND} code: compile the kernel (no GPU needed) and forecast from its machine code.",
                     None, lambda: (*_LEVELS, _COMPILES)),
}  # fmt: skip
_CLOCK_OPTIONS: dict[str, Any] = {
    "clock": _option(str | None, "--clock", "sustained, short, how long the GPU runs this work from idle (300ms, 2s), or a locked clock in MHz.", None,
                     lambda: ("sustained", "short")),
}  # fmt: skip
#: Of the machine, for verbs that settle a clock.
_POWER_OPTIONS: dict[str, Any] = {
    "power": _option(float | None, "--power", "Power limit of this board in watts (default: the machine file's)."),
}
#: Type of a verb's parameter -> its options, and what makes the value of them.
_GROUPS: dict[Any, tuple[dict[str, Any], Callable[..., Any]]] = {
    Workload: (_WORK_OPTIONS, _work),
    Heads: ({name: option for name, option in _WORK_OPTIONS.items() if name not in _LENGTHS}, _heads),
    Shapes: ({**_WORK_OPTIONS, "shapes": _SHAPES_OPTION}, _shapes),
    Machine: (_MACHINE_OPTIONS, _machine),
    NamedMachine: (_MACHINE_OPTIONS, _named_machine),
    Machines: (_MACHINE_OPTIONS, _machines),
    Kernel: (_KERNEL_OPTIONS, _kernel),
    Changes: (_CHANGE_OPTIONS, _changes),
    Clock: (_CLOCK_OPTIONS, _clock),
    Level: (_LEVEL_OPTIONS, _level),
    LevelAtHand: (_LEVEL_AT_HAND_OPTIONS, _level_at_hand),
}


def takes_workload(
    verb: Callable[..., Any] | None = None, *, machine: str | None = None, clock: str | None = "sustained"
) -> Callable[..., Any]:
    """Decorator: options in place of the parameters whose types are above; ``machine`` and ``clock`` are defaults."""
    if verb is None:
        return lambda function: takes_workload(function, machine=machine, clock=clock)
    defaults = {"machine_name": machine, "clock": clock, "level": _LEVELS[0]}
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(verb).parameters.values():
        found = _GROUPS.get(hints[parameter.name])
        if found is not None and found[0] is _MACHINE_OPTIONS and Clock in hints.values():
            found = {**_MACHINE_OPTIONS, **_POWER_OPTIONS}, found[1]
        options = {parameter.name: hints[parameter.name]} if found is None else found[0]
        if found is not None:
            groups[parameter.name] = found
        for name, annotation in options.items():
            default = parameter.default if found is None else defaults.get(name)
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            )

    def with_values(**values: Any) -> Any:
        if "machine_name" in values and values["machine"] is not None and values["machine_name"] == machine:
            values["machine_name"] = None  # the default gives way to the option
        made = {
            name: make(**{option: values.pop(option) for option in options}) for name, (options, make) in groups.items()
        }
        return verb(**values, **made)

    with_values.__name__, with_values.__doc__, with_values.__module__ = verb.__name__, verb.__doc__, verb.__module__
    with_values.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_values.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_values
