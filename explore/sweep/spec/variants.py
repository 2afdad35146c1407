"""The variants of a specification: how to choose, explicit knobs, and knobs whose lists cross.

A choice is one of: a rule (``best``, ``published``, ``all``, each optionally ``:FAMILY``) or a variant.  Families go by the
model's name (fa4, fa3, fa2, unfused) or by the name of the kernels (blackwell_ws, hopper_ws, triton).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from tilecast.base.words import nearest
from tilecast.codegen.families import FAMILIES as KERNELS
from tilecast.codegen.families import Family, find_family, native_kernel_family
from tilecast.codegen.search import best_expressible, first_obstacle, search_space
from tilecast.explore.sweep.errors import SpecError
from tilecast.model.forecast.predict import PredictError
from tilecast.model.kernel.candidates import native_family, published_variant
from tilecast.model.kernel.variant import FAMILIES, VariantError, parse_variant, variant_text
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

RULES = ("best", "published", "all")


@dataclass(frozen=True, slots=True)
class Choice:
    """``rule`` with an optional kernel or model ``family``; or rule "" and the full ``text`` of a variant."""

    rule: str
    family: str
    text: str = ""


def read_variants(where: str, raw: dict[str, Any]) -> tuple[Choice, ...]:
    """Choices of ``variants = [...]`` and ``[[variant]]`` tables, in order; "best" when there are none."""
    texts = raw.get("variants", [] if "variant" in raw or "kernels" in raw else ["best"])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise SpecError(f"{where}: variants takes a list of texts such as 'best' or 'fa4:cta_group=2', got {texts!r}")
    tables = raw.get("variant", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise SpecError(f"{where}: variant takes tables, each under [[variant]], got {tables!r}")
    found = [_choice(f"{where}: variants: '{text}'", text) for text in texts]
    for number, table in enumerate(tables, start=1):
        found += _crossed(f"{where}: variant {number}", table)
    return tuple(dict.fromkeys(found))


def _choice(where: str, text: str) -> Choice:
    head, _, rest = text.partition(":")
    if head in RULES:
        return Choice(head, _known_family(where, rest) if rest else "")
    if "=" in head:
        pairs = dict(part.partition("=")[::2] for part in text.split(","))
        if "family" not in pairs:
            raise SpecError(f"{where}: expected a family first, such as 'fa4:{text}'")
        head, rest = pairs["family"].strip(), text
    family = _known_family(where, head, (*RULES, *FAMILIES, *KERNELS))
    knobs = ",".join(part for part in rest.split(",") if part and not part.strip().startswith("family="))
    return _variant(where, family, knobs)


def _known_family(where: str, name: str, known: tuple[str, ...] = (*FAMILIES, *KERNELS)) -> str:
    if name not in FAMILIES and name not in KERNELS:
        raise SpecError(f"{where}: unknown family '{name}'{nearest(name, known)}")
    return name


def _variant(where: str, family: str, knobs: str) -> Choice:
    model_family = KERNELS[family].model_family if family in KERNELS else family
    try:
        text = variant_text(parse_variant(f"family={model_family},{knobs}"))
    except VariantError as error:
        raise SpecError(f"{where}: {str(error).removeprefix('--variant: ')}") from None
    return Choice("", family, text)


def _crossed(where: str, table: dict[str, Any]) -> list[Choice]:
    family = table.get("family")
    if not isinstance(family, str):
        raise SpecError(f"{where}: expected a family ({', '.join((*FAMILIES, *KERNELS))}), got {family!r}")
    _known_family(where, family)
    axes = {knob: value if isinstance(value, list) else [value] for knob, value in table.items() if knob != "family"}
    empty = [knob for knob, values in axes.items() if not values]
    if empty:
        raise SpecError(f"{where}: {empty[0]} takes a value or a list of values, got an empty list")
    return [
        _variant(where, family, ",".join(f"{knob}={_plain(v)}" for knob, v in zip(axes, values, strict=True)))
        for values in product(*axes.values())
    ]


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def forecast_variants(choice: Choice, work: Workload, machine: Machine) -> list[str] | str:
    """Variants a forecast item may hold for a choice; or the sentence why "all" has none."""
    if not choice.rule:
        return [choice.text]
    if choice.rule != "all":
        family = choice.family or native_family(machine)
        return [f"{choice.rule}:{KERNELS[family].model_family if family in KERNELS else family}"]
    found = _kernel_family(choice, machine)
    space = search_space(found, work, machine)
    return [variant_text(variant) for variant in space] or _obstacle(found, work, machine)


def measured_variants(choice: Choice, work: Workload, machine: Machine) -> tuple[str, list[str] | str]:
    """(kernel family, variants that can be written); or the sentence why there are none."""
    family = _kernel_family(choice, machine)
    if choice.rule == "all":
        found = [variant_text(variant) for variant in search_space(family, work, machine)]
        return family.name, found or _obstacle(family, work, machine)
    if choice.rule == "best":
        try:
            return family.name, [variant_text(best_expressible(family, work, machine))]
        except PredictError as error:
            return family.name, str(error)
    variant = published_variant(family.model_family, work, machine) if choice.rule else parse_variant(choice.text)
    verdict = family.expressible(variant, work, machine)
    if not verdict.legal:
        return family.name, f"{family.name}: {work.label()} on {machine.name}: {verdict.sentence()}"
    return family.name, [variant_text(variant)]


def _obstacle(family: Family, work: Workload, machine: Machine) -> str:
    sentence = first_obstacle(family, work, machine).sentence()
    return f"{family.name}: {work.label()} on {machine.name}: {sentence}"


def _kernel_family(choice: Choice, machine: Machine) -> Family:
    """The kernels of a choice: by their own name, by the model's, or the machine's native ones."""
    if choice.family in KERNELS or not choice.family:
        return find_family(choice.family or native_kernel_family(machine))
    named = [family for family in KERNELS.values() if family.model_family == choice.family]
    if not named:
        raise SpecError(f"variants: family {choice.family} has no kernels to write; expected {', '.join(KERNELS)}")
    return named[0]
