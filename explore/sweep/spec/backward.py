"""Backward passes in sweeps, `pass = "bwd"`: their families, variants and forecasts, before compilation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilecast.explore.sweep.spec.choice import Choice, SweptPass
from tilecast.model.backward import (
    BACKWARD_FAMILIES,
    find_backward,
    named_in,
    native_backward,
    parse_backward,
    writable,
)
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.training.forecast import BackwardPrediction, predict_backward


def _family(name: str) -> str:
    return find_backward(name).name


def _text(family: str, knobs: str) -> str:
    return variant_text(parse_backward(f"family={family},{knobs}", find_backward(family).variant()))


def _variants(choice: Choice, work: Workload, machine: Machine) -> list[str] | str:
    if not choice.rule:
        return [choice.text]
    family = find_backward(choice.family) if choice.family else native_backward(work.reduced(), machine)
    if choice.rule == "best":
        return [f"best:{family.name}"]
    space = [v for v in family.space(work.reduced(), machine) if writable(v, work.reduced(), machine).legal]
    if space:
        return [variant_text(v) for v in space]
    verdict = writable(family.chosen(work.reduced(), machine), work.reduced(), machine)
    return f"{family.name}: backward pass of {work.label()} on {machine.name}: {verdict.sentence() or 'no tile fits'}"


def _predict(item: Mapping[str, Any], machine: Machine) -> BackwardPrediction:
    work = Workload.from_dict(item["workload"])
    how, _, family = item["variant"].partition(":")
    if how == "best":
        return predict_backward(work, machine, family=family, clock=item["clock"], interval=item["interval"])
    named = named_in(item["variant"])
    if named is None:
        raise VariantError(f"expected a variant with its family, got '{item['variant']}'")
    variant = parse_backward(item["variant"], named.variant())
    return predict_backward(work, machine, variant, clock=item["clock"], interval=item["interval"])


BACKWARD = SweptPass(
    "bwd", ("best", "all"), tuple(family.name for family in BACKWARD_FAMILIES), _family, _text, _variants, _predict
)
