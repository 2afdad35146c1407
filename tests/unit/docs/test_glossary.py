"""docs/glossary.md explains the names that the code prints, and stays in alphabetical order."""

from __future__ import annotations

import re
from dataclasses import fields
from functools import lru_cache

import pytest
from support.paths import ROOT

import tilecast
from tilecast.codegen.tune.survey import FATES
from tilecast.model.families import FAMILIES
from tilecast.model.kernel.variants import fa3, fa4

GLOSSARY = ROOT / "docs" / "glossary.md"
HEADINGS = tuple(re.findall(r"^## (.+)$", GLOSSARY.read_text(encoding="utf-8"), flags=re.MULTILINE))
#: Kernels of every family, one or two CTAs, with and without a mask, every kind of matrix instruction.
KERNELS = (
    ("b200", "causal", 128, {}),
    ("b200", "none", 128, {"family": "fa4", "cta_group": 2, "emulated_share": 0.125, "scheduler": "persistent"}),
    ("b200", "none", 128, {"family": "fa4", "split_p": False}),
    ("b200", "none", 256, {}),
    ("h200-sxm", "causal", 128, {}),
    ("h200-sxm", "none", 128, {"family": "fa3", "rescale": "conditional", "warpgroups": 3, "tile_n": 64}),
    ("h200-sxm", "none", 128, {"family": "fa3", "overlap": False}),
    ("a100", "causal", 128, {}),
    ("rtx-5090", "none", 64, {}),
    ("b200", "none", 128, {"family": "fa2"}),
    ("b200", "none", 128, {"family": "unfused"}),
)


@lru_cache(maxsize=1)
def terms() -> frozenset[str]:
    """Headings, whole and in their parts, and inline code: where a name is explained."""
    text = " ".join(GLOSSARY.read_text(encoding="utf-8").split())
    parts = {part for heading in HEADINGS for part in heading.replace("`", "").split(", ")}
    return frozenset({*HEADINGS, *parts, *re.findall(r"`([^`]+)`", text)})


@lru_cache(maxsize=1)
def forecasts() -> tuple[dict[str, object], ...]:
    return tuple(_forecast(*kernel).to_dict() for kernel in KERNELS)


def _forecast(machine: str, mask: str, head_dim: int, knobs: dict[str, object]) -> tilecast.Prediction:
    work = tilecast.Workload(seqlen_q=2048, seqlen_k=2048, head_dim_qk=head_dim, head_dim_v=head_dim, mask=mask)
    variant = FAMILIES[str(knobs["family"])].variant(**knobs) if knobs else None
    return tilecast.predict(work, machine, variant, interval=False)


def _names() -> dict[str, set[str]]:
    """What forecasts print, by kind of name, without the numbers of tiles and warpgroups in roles."""
    found: dict[str, set[str]] = {"unit": set(), "pipe": set(), "cause": set(), "role": set(), "reason": set()}
    for forecast in forecasts():
        found["unit"] |= set(forecast["units"])
        found["pipe"] |= set(forecast["pipes"])
        found["cause"] |= {step["cause"] for step in forecast["waterfall"]}
        for role, stalls in forecast["stalls"].items():
            found["role"].add(role)
            found["reason"] |= {match[1] for stall in stalls if (match := re.search(r" \((.+)\)$", stall))}
        found["reason"] |= {step["after"] for step in forecast["critical_recurrence"]}
    return found


@pytest.mark.parametrize("kind", ["unit", "pipe", "cause", "role", "reason"])
def test_names_in_a_forecast_are_explained(kind: str) -> None:
    assert sorted(_names()[kind] - terms()) == []


def test_causes_of_a_backward_pass_are_explained() -> None:
    work = tilecast.Workload(seqlen_q=2048, seqlen_k=2048, head_dim_qk=256, head_dim_v=256, mask="causal")
    causes = {step.cause for step in tilecast.predict_backward(work, "h200", interval=False).waterfall}
    assert sorted(causes - terms()) == []


def test_knobs_schedulers_and_fates_are_explained() -> None:
    knobs = {field.name for family in FAMILIES.values() for field in fields(family.variant)}
    names = knobs | set(FAMILIES) | set(fa3.SCHEDULERS) | set(fa4.SCHEDULERS) | set(FATES)
    assert sorted(names - terms()) == []


def test_terms_are_in_alphabetical_order() -> None:
    keys = [heading.replace("`", "").lower() for heading in HEADINGS]
    assert keys == sorted(keys)


def test_links_to_terms_have_their_heading() -> None:
    """A code host and the site make the same anchor of a heading: lower case, spaces to hyphens, the rest of the signs dropped."""
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADINGS}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    links = {link for page in pages for link in re.findall(r"glossary\.md#([\w-]+)", page.read_text(encoding="utf-8"))}
    links |= set(re.findall(r"\]\(#([\w-]+)\)", GLOSSARY.read_text(encoding="utf-8")))
    assert sorted(links - anchors) == []
