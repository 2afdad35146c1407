"""The variants of a specification: how to choose, explicit knobs, and knobs whose lists cross.

A choice is one of: a rule (``best``, ``published``, ``all``, each optionally ``:FAMILY``) or a variant.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from tilecast.base.words import nearest
from tilecast.explore.sweep.errors import SpecError
from tilecast.explore.sweep.spec.choice import FLUID, Choice, SweptPass
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.families import FAMILIES, Family, find_family, native_family, parse_variant, writable
from tilecast.model.forecast.level import at_hand, compiler_of, search_of
from tilecast.model.forecast.predict import Prediction, predict
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.search.best import search_space

RULES = ("best", "published", "all")
_WRITTEN = tuple(name for name, family in FAMILIES.items() if family.template)


def read_variants(where: str, raw: dict[str, Any], swept: SweptPass) -> tuple[Choice, ...]:
    """Choices of ``variants = [...]`` and ``[[variant]]`` tables, in order; "best" when there are none."""
    texts = raw.get("variants", [] if "variant" in raw or "kernels" in raw else ["best"])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise SpecError(f"{where}: variants takes a list of texts such as 'best' or 'fa4:cta_group=2', got {texts!r}")
    tables = raw.get("variant", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise SpecError(f"{where}: variant takes tables, each under [[variant]], got {tables!r}")
    found = [_choice(f"{where}: variants: '{text}'", text, swept) for text in texts]
    for number, table in enumerate(tables, start=1):
        found += _crossed(f"{where}: variant {number}", table, swept)
    return tuple(dict.fromkeys(found))


def _choice(where: str, text: str, swept: SweptPass) -> Choice:
    head, _, rest = text.partition(":")
    if head in swept.rules:
        return Choice(head, _known_family(where, rest, swept, swept.families) if rest else "")
    if head in RULES:
        raise SpecError(
            f"{where}: of pass '{swept.name}' there is no {head}: expected {', '.join(swept.rules)} or a variant"
        )
    if "=" in head:
        pairs = dict(part.partition("=")[::2] for part in text.split(","))
        if "family" not in pairs:
            raise SpecError(f"{where}: expected a family first, such as '{swept.families[0]}:{text}'")
        head, rest = pairs["family"].strip(), text
    family = _known_family(where, head, swept, (*swept.rules, *swept.families))
    knobs = ",".join(part for part in rest.split(",") if part and not part.strip().startswith("family="))
    return _variant(where, family, knobs, swept)


def _known_family(where: str, name: str, swept: SweptPass, known: tuple[str, ...]) -> str:
    try:
        return swept.family(name)
    except VariantError:
        raise SpecError(f"{where}: unknown family '{name}'{nearest(name, known)}") from None


def _variant(where: str, family: str, knobs: str, swept: SweptPass) -> Choice:
    try:
        text = swept.text(family, knobs)
    except VariantError as error:
        raise SpecError(f"{where}: {str(error).removeprefix('--variant: ')}") from None
    return Choice("", family, text)


def _crossed(where: str, table: dict[str, Any], swept: SweptPass) -> list[Choice]:
    family = table.get("family")
    if not isinstance(family, str):
        raise SpecError(f"{where}: expected a family ({', '.join(swept.families)}), got {family!r}")
    family = _known_family(where, family, swept, swept.families)
    axes = {knob: value if isinstance(value, list) else [value] for knob, value in table.items() if knob != "family"}
    empty = [knob for knob, values in axes.items() if not values]
    if empty:
        raise SpecError(f"{where}: {empty[0]} takes a value or a list of values, got an empty list")
    return [
        _variant(where, family, ",".join(f"{knob}={_plain(v)}" for knob, v in zip(axes, values, strict=True)), swept)
        for values in product(*axes.values())
    ]


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def forecast_variants(choice: Choice, work: Workload, machine: Machine) -> list[str] | str:
    """Variants a forecast item may hold for a choice; or the sentence why "all" has none."""
    if not choice.rule:
        return [choice.text]
    if choice.rule != "all":
        return [f"{choice.rule}:{choice.family or native_family(machine).name}"]
    return _written(_family(choice, machine), work, machine)


def measured_variants(choice: Choice, work: Workload, machine: Machine) -> tuple[str, list[str] | str]:
    """(kernel, variants that can be written); or the sentence why there are none."""
    family = _family(choice, machine)
    if not family.template:
        raise SpecError(f"variants: family {family.name} has no kernels to write; expected {', '.join(_WRITTEN)}")
    if choice.rule == "all":
        return family.template, _written(family, work, machine)
    if choice.rule == "best":
        found = _written(family, work, machine)
        return family.template, found if isinstance(found, str) else [variant_text(search_of(at_hand)(work, machine, family.name, "sustained").variant)]  # fmt: skip
    variant = family.published(work, machine) if choice.rule else parse_variant(choice.text)
    verdict = writable(variant, work, machine)
    if not verdict.legal:
        return family.template, f"{family.name}: {work.label()} on {machine.name}: {verdict.sentence()}"
    return family.template, [variant_text(variant)]


def _written(family: Family, work: Workload, machine: Machine) -> list[str] | str:
    """Every variant that can be written, or why there is none."""
    try:
        space = search_space(work, machine, family.name)
    except PredictError as error:
        return str(error)
    if not space.written:
        return f"{family.name}: {work.label()} on {machine.name}: {space.refusal}"
    return [variant_text(variant) for variant in space.variants]


def _family(choice: Choice, machine: Machine) -> Family:
    """The family of a choice, or the machine's own."""
    return find_family(choice.family) if choice.family else native_family(machine)


def _family_name(name: str) -> str:
    return find_family(name).name


def _text(family: str, knobs: str) -> str:
    return variant_text(parse_variant(f"family={family},{knobs}"))


def _predict(item: Mapping[str, Any], machine: Machine) -> Prediction:
    work = Workload.from_dict(item["workload"])
    how, _, family = item["variant"].partition(":")
    compiler = compiler_of(item.get("level", FLUID))
    if how in ("best", "published"):
        return predict(
            work, machine, family=family, published=how == "published", clock=item["clock"], interval=item["interval"],
            compiler=compiler,
        )  # fmt: skip
    variant = parse_variant(item["variant"])
    return predict(work, machine, variant, clock=item["clock"], interval=item["interval"], compiler=compiler)


FORWARD = SweptPass("fwd", RULES, tuple(FAMILIES), _family_name, _text, forecast_variants, _predict)
