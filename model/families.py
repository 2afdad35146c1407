"""The kernel classes: one record each, which all modules ask; none compares names or types.

Names are those of the FlashAttention generations whose structure the class has: fa2 (mma.sync, portable Triton), fa3
(wgmma, Gluon for Hopper), fa4 (tcgen05, Gluon for data-centre Blackwell), and unfused attention to compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from tilecast.base.same import Same
from tilecast.base.words import did_you_mean, nearest
from tilecast.model.kernel.alike import Alike, with_knobs
from tilecast.model.kernel.grid import Grid
from tilecast.model.kernel.knobs import check_value, value_like
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.variants import (
    fa2,
    fa2_backward,
    fa3,
    fa3_backward,
    fa3_backward_apart,
    fa4,
    unfused,
)
from tilecast.model.kernel.variants.blackwell import backward as fa4_backward
from tilecast.model.kernel.verdict import VariantError, Verdict
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline import fa2 as fa2_pipeline
from tilecast.model.pipeline import fa3 as fa3_pipeline
from tilecast.model.pipeline import fa4 as fa4_pipeline
from tilecast.model.pipeline import unfused as unfused_pipeline
from tilecast.model.pipeline.graph import Pipeline

Rule = Callable[[Any, Workload, Machine], Verdict]


@dataclass(frozen=True, slots=True)
class Family:
    """One kernel class."""

    name: str
    #: Other names that files and command lines may use: the template's, of which generated files bear the name.
    aliases: tuple[str, ...]
    about: str
    variant: type[Any]
    #: (workload, variant, machine) -> its loop; workloads come as `loop_shape`.
    build: Callable[[Workload, Any, Machine], Pipeline]
    #: Whether a machine can run a variant, and whether the template can write a legal one.
    legality: Rule
    writable: Rule
    #: Every combination of knobs worth telling apart, in order of preference among equals.
    space: Callable[[Workload, Machine], Grid[Any]]
    #: What the authors of the published kernel ship for a shape.
    published: Callable[[Workload, Machine], Variant]
    #: What decides the loop; the tile alone; how many features a variant uses.
    structure: Callable[[Any], tuple[object, ...]]
    tile: Callable[[Any], tuple[object, ...]]
    plainness: Callable[[Any], tuple[float, ...]]
    #: Which of its variants share what.
    alike: Alike
    #: Slots of the K/V ring, where kernels alike but for it differ in nothing else; None where depth costs occupancy.
    ring_depth: Callable[[Any], float] | None = None
    #: Name of the template that writes it ("": none).
    template: str = ""
    #: Whether it is one fused kernel; the unfused class is three launches.
    fused: bool = True
    #: Whether its loop under a causal mask is that without a mask, masked blocks included.
    causal_as_none: bool = False
    #: What knobs were called before: files and command lines may still use it.
    old_knobs: Mapping[str, str] = field(default_factory=dict)


def _first_unfused(workload: Workload, variant: Any, machine: Machine) -> Pipeline:
    return unfused_pipeline.kernels(workload, variant, machine)[0].pipeline


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("fa4", ("blackwell_ws", "blackwell"), "Gluon, data-centre Blackwell: tcgen05, scores and outputs in tensor memory",
               fa4.Fa4Variant, fa4_pipeline.build, fa4.legality, fa4.writable, fa4.space, fa4.published,
               fa4.structure, fa4.tile, fa4.plainness, fa4.ALIKE, fa4.ring_depth, "blackwell_ws",
               old_knobs={"stages": "softmax_tiles"}, causal_as_none=True),
        Family("fa3", ("hopper_ws", "hopper"), "Gluon, Hopper: TMA producer, wgmma consumer warpgroups",
               fa3.Fa3Variant, fa3_pipeline.build, fa3.legality, fa3.writable, fa3.space, fa3.published,
               fa3.structure, fa3.tile, fa3.plainness, fa3.ALIKE, fa3.ring_depth, "hopper_ws"),
        Family("fa2", ("triton", "ampere"), "plain Triton, any GPU from Ampere on",
               fa2.Fa2Variant, fa2_pipeline.build, fa2.legality, fa2.writable, fa2.space, fa2.published,
               fa2.structure, fa2.structure, fa2.plainness, fa2.ALIKE, None, "triton",
               old_knobs={"stages": "kv_stages"}, causal_as_none=True),
        Family("unfused", (), "three kernels with the score matrix in memory, to compare with",
               unfused.UnfusedVariant, _first_unfused, unfused.legality, unfused.writable, unfused.space,
               unfused.published, unfused.structure, unfused.structure, unfused.plainness,
               Alike({}, {}, (), ()), fused=False),
    )
}  # fmt: skip
_BY_NAME = {name: family for family in FAMILIES.values() for name in (family.name, *family.aliases)}
_KNOBS = frozenset(
    name for family in FAMILIES.values() for name in (*(f.name for f in fields(family.variant)), *family.old_knobs)
)
#: The knob that deals tiles, at one value.
_GRID = {"scheduler": "grid"}
_NATIVE = {"tcgen05": "fa4", "wgmma": "fa3"}

#: Knob values that no other library's kernels have.
_OURS = (("rescale", "anchored"), ("scheduler", "paired"), ("mask_home", "tmem"))
#: Knobs that the open kernels of a family choose by the head dimension alone: FlashAttention-4 and FROST share a pair's query tile by keys
#: where O fills tensor memory (head_dim 256), nowhere else.
_BY_HEAD_DIM = ("split",)
#: Most exponentials that an open kernel emulates: FlashAttention-4 28 % (its pull request 2316) and, at head_dim 256, 37.5 % (2488),
#: FROST 25 %.
_MOST_EMULATED, _MOST_EMULATED_AT_256 = 0.28, 0.375

#: Allowed values of knobs with few, of one family where its name goes before; numbers are (low, high) ranges.
SCHEDULERS = ("grid", "persistent", "longest-first", "longest-grid", "work-stealing", "paired")
_CHOICES: dict[str, tuple[object, ...]] = {
    "scheduler": SCHEDULERS,
    "split": ("q", "k"),
    "cta_group": (1, 2),
    "softmax_tiles": (1, 2, 3, 4),
    "fa2 kv_stages": (1, 2, 3, 4),
    "tile_m": (16, 32, 64, 128, 256),
    "warpgroups": (1, 2, 3),
    "warps": (4, 8),
    "stats_slots": (1, 2),
    "mask_home": ("tmem", "registers"),
    "q_stages": (1, 2),
    "rescale": ("always", "conditional", "anchored"),
    "poly_degree": (1, 2, 3, 4, 5),
    "intermediate_bytes": (0, 2, 4),
}
#: Keys of an iteration come in multiples.
_TILE_STEP = 16
_RANGES: dict[str, tuple[float, float]] = {
    "tile_n": (16, 256),
    "kv_stages": (0, 32),
    "emulated_share": (0.0, 1.0),
    "rescale_threshold": (0.0, 64.0),
}


def knob_takes(family: str, knob: str, value: object) -> str:
    """What ``knob`` of ``family``, with the default ``value``, takes, in words: values, or the ends of a range."""
    if isinstance(value, bool):
        return "true, false"
    choices = _CHOICES.get(f"{family} {knob}", _CHOICES.get(knob))
    if choices is not None:
        return ", ".join(map(str, choices))
    low, high = _RANGES[knob]
    return f"{low:g} to {high:g}" + (f", by {_TILE_STEP}" if knob == "tile_n" else "")


def find_family(name: str) -> Family:
    """The family called ``name`` or by one of its aliases; VariantError with the nearest names otherwise."""
    _refuse_others(name)
    if name not in _BY_NAME:
        raise VariantError(f"unknown kernel family '{name}'{nearest(name, tuple(_BY_NAME))}")
    return _BY_NAME[name]


def _refuse_others(name: str) -> None:
    if name.startswith("gemm_"):
        raise VariantError(f"family {name} multiplies matrices: 'tilecast gemm' forecasts and writes it")
    if name in (*fa2_backward.NAMES, *fa3_backward.NAMES, *fa3_backward_apart.NAMES, *fa4_backward.NAMES):
        raise VariantError(f"family {name} is a backward pass: --pass bwd forecasts it and writes it")


def family_of(variant: Variant) -> Family:
    """The record of a variant's class."""
    return FAMILIES[variant.family]


def native_family(machine: Machine) -> Family:
    """The family built for the machine's matrix unit."""
    return FAMILIES[_NATIVE.get(machine.tensor_kind, "fa2")]


def legality(variant: Variant, workload: Workload, machine: Machine) -> Verdict:
    """Whether ``machine`` can run ``variant`` on ``workload``."""
    return family_of(variant).legality(variant, workload, machine)


def writable(variant: Variant, workload: Workload, machine: Machine) -> Verdict:
    """Whether a kernel of ``variant`` can be generated: legal, and within what its template writes."""
    family = family_of(variant)
    verdict = family.legality(variant, workload, machine)
    return family.writable(variant, workload, machine) if verdict.legal else verdict


def published_variant(family: str, workload: Workload, machine: Machine) -> Variant:
    """The variant the family's authors ship for this shape; VariantError for unknown families."""
    return find_family(family).published(workload, machine)


def knob_space(family: str, workload: Workload, machine: Machine) -> tuple[Variant, ...]:
    """Every variant of the space of ``family``, legal or not; VariantError for unknown families."""
    return find_family(family).space(workload, machine).variants


def legal_space(family: str, workload: Workload, machine: Machine) -> tuple[Variant, ...]:
    """The legal variants of `knob_space`; empty where the family cannot run at all."""
    return tuple(v for v in knob_space(family, workload, machine) if legality(v, workload, machine).legal)


def one_knob_away(variant: Variant, space: Iterable[Variant]) -> Iterator[Variant]:
    """Variants that differ from ``variant`` in one knob, by the values that it takes in ``space``; legal or not."""
    for knob, values in _values(Same(tuple(space))).items():
        for value in values:
            if value != getattr(variant, knob):
                yield replace(variant, **{knob: value})


@lru_cache(maxsize=16)
def _values(space: Same[tuple[Variant, ...]]) -> dict[str, tuple[Any, ...]]:
    """The values that each knob takes in a space, in their order: spaces of thousands are asked again and again."""
    knobs = [f.name for f in fields(space.value[0]) if f.name != "family"] if space.value else []
    return {knob: tuple(dict.fromkeys(getattr(v, knob) for v in space.value)) for knob in knobs}


def near_published(workload: Workload, machine: Machine) -> tuple[Variant, ...]:
    """The published variant of the machine's own family and its legal neighbours by one knob, without tilecast's own ideas."""
    family = native_family(machine).name
    shipped = published_variant(family, workload, machine)
    near = one_knob_away(shipped, knob_space(family, workload, machine))
    most = _MOST_EMULATED_AT_256 if workload.head_dim_qk >= 256 else _MOST_EMULATED
    others = (
        v
        for v in near
        if not any(getattr(v, knob, "") == value for knob, value in _OURS)
        and all(getattr(v, knob, "") == getattr(shipped, knob, "") for knob in _BY_HEAD_DIM)
        and getattr(v, "emulated_share", 0.0) <= most
    )
    return (shipped, *(v for v in others if legality(v, workload, machine).legal))


def build_pipeline(workload: Workload, variant: Variant, machine: Machine) -> Pipeline:
    """The loop of ``variant`` for ``workload`` on ``machine``; of the workload only head dimensions, dtype and mask matter.

    The unfused family has three kernels; this returns the first, `pipeline.unfused.kernels` all of them.
    """
    # The scheduler deals tiles and leaves their loop alone: variants that differ in nothing else share one pipeline.
    shape = loop_shape(workload, family_of(variant).causal_as_none)
    return _build(shape, with_knobs(variant, _GRID), machine)


@lru_cache(maxsize=4096)
def loop_shape(workload: Workload, causal_as_none: bool = False) -> Workload:
    """The workload reduced to what a loop body depends on, so that pipelines and simulations are shared between shapes;
    ``causal_as_none`` as `Family` has it."""
    mask = "none" if causal_as_none and workload.mask == "causal" else workload.mask
    return replace(workload, batch=1, heads_q=1, heads_kv=1, seqlen_q=8192, seqlen_k=8192, mask=mask)


# As many as the spaces of some forty head dimensions, masks and machines have.
@lru_cache(maxsize=1 << 15)
def _build(workload: Workload, variant: Variant, machine: Machine) -> Pipeline:
    return family_of(variant).build(workload, variant, machine)


# --- variants as text -------------------------------------------------------------------------------------------------


def parse_variant(text: str, base: Variant | None = None) -> Variant:
    """A variant from "family=fa4,cta_group=2,..." or "fa4:cta_group=2,..."; knobs not named keep ``base``'s values.

    Raises VariantError with the nearest names for an unknown family, knob or value, and where no family is named.
    """
    head, colon, rest = text.partition(":")
    if colon and "=" not in head:
        text = f"family={head.strip()}" + (f",{rest}" if rest.strip() else "")
    pairs: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, found, value = part.partition("=")
        if not found or not value:
            if part in _BY_NAME and not pairs:
                key, value = "family", part
            elif part.replace("-", "_") in _KNOBS:
                raise VariantError(f"--variant: expected knob=value, got '{part}'")
            else:
                raise VariantError(
                    f"--variant: expected a family or knob=value, got '{part}'{did_you_mean(part, _BY_NAME)}"
                )
        key = key.strip().replace("-", "_")
        if key in pairs:
            raise VariantError(f"--variant: knob '{key}' is given twice")
        pairs[key] = value.strip()
    named = pairs.pop("family", base.family if base else "")
    _refuse_others(named)
    if not named:
        raise VariantError(
            f"--variant: no family is named in '{text}': begin with one, as in fa3:tile_n=64{nearest('', tuple(_BY_NAME))}"
        )
    if named not in _BY_NAME:
        raise VariantError(f"--variant: unknown family '{named}'{nearest(named, tuple(_BY_NAME))}")
    family = _BY_NAME[named]
    variant: Variant = base if base is not None and base.family == family.name else family.variant()
    changes: dict[str, Any] = {}
    for key, value in pairs.items():
        knob = family.old_knobs.get(key, key)
        if knob in changes:
            raise VariantError(f"--variant: knob '{knob}' is given twice")
        changes[knob] = _knob_value(variant, knob, value)
    return replace(variant, **changes)


def named_knobs(text: str, family: Family) -> dict[str, object]:
    """The knobs that ``text`` names, as `parse_variant` reads it, and their values; VariantError as there."""
    variant = parse_variant(text, family.variant())
    parts = (part.partition("=")[0].strip() for part in text.partition(":")[2 if ":" in text else 0].split(","))
    keys = (part.replace("-", "_") for part in parts)
    named = {family.old_knobs.get(key, key) for key in keys}
    return {f.name: getattr(variant, f.name) for f in fields(variant) if f.name in named and f.name != "family"}


def _knob_value(variant: Variant, key: str, text: str) -> Any:
    names = tuple(f.name for f in fields(variant) if f.name != "family")
    if key not in names:
        raise VariantError(f"--variant: family {variant.family} has no knob '{key}'{nearest(key, names)}")
    value = value_like(key, text, getattr(variant, key))
    check_value(key, text, value, _CHOICES.get(f"{variant.family} {key}", _CHOICES.get(key)), _RANGES.get(key))
    if key == "tile_n" and value % _TILE_STEP:
        raise VariantError(f"--variant: knob 'tile_n' takes multiples of {_TILE_STEP}, got '{text}'")
    return value
