"""The kernel classes of backward passes: their records, and their variants as text.

Beside `families`, which holds the forward classes: a forward pass is one launch and its loop, a backward pass several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from tilecast.model.kernel.knobs import check_value, family_named, parse_knobs, value_like
from tilecast.model.kernel.variants import fa2_backward, fa3_backward, fa3_backward_apart
from tilecast.model.kernel.variants.blackwell import backward as fa4_backward
from tilecast.model.kernel.variants.blackwell.backward import Fa4BackwardVariant
from tilecast.model.kernel.variants.fa2_backward import Fa2BackwardVariant
from tilecast.model.kernel.variants.fa3_backward import Fa3BackwardVariant
from tilecast.model.kernel.variants.fa3_backward_apart import Fa3BackwardApartVariant
from tilecast.model.kernel.variants.hopper import few_backward
from tilecast.model.kernel.variants.hopper.few_backward import FewBackwardVariant
from tilecast.model.kernel.verdict import VariantError, Verdict
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.backward import fa2, fa3, fa3_apart, fa4, few
from tilecast.model.pipeline.backward.kernels import BackwardPass

BackwardVariant = (
    Fa2BackwardVariant | Fa3BackwardVariant | Fa3BackwardApartVariant | Fa4BackwardVariant | FewBackwardVariant
)
V = TypeVar("V", bound=BackwardVariant)


@dataclass(frozen=True, slots=True)
class BackwardFamily:
    """A kernel class of backward passes."""

    name: str
    #: Name of the template that writes it; generated files bear it.
    template: str
    about: str
    variant: type[BackwardVariant]
    legality: Callable[..., Verdict]
    writable: Callable[..., Verdict]
    #: Every legal combination of knobs worth telling apart, and the one to start from.
    space: Callable[[Workload, Machine], Iterable[BackwardVariant]]
    chosen: Callable[[Workload, Machine], BackwardVariant]
    #: (workload, variant, machine) -> its launches, their loops as pipelines.
    build: Callable[[Workload, Any, Machine], BackwardPass]
    #: Other names, those of the forward class of its kind.
    also: tuple[str, ...] = ()
    #: The same as ``space`` of what its authors publish; None: that is no less.
    published: Callable[[Workload, Machine], Iterable[BackwardVariant]] | None = None


TRITON_BACKWARD = BackwardFamily(
    *fa2_backward.NAMES, "plain Triton without atomics, any GPU from Ampere on", Fa2BackwardVariant,
    fa2_backward.legality, fa2_backward.writable, fa2_backward.space, fa2_backward.chosen, fa2.build,
    ("fa2", "triton"),
)  # fmt: skip
HOPPER_BACKWARD = BackwardFamily(
    *fa3_backward.NAMES, "Gluon for Hopper, dQ summed in a fixed order", Fa3BackwardVariant,
    fa3_backward.legality, fa3_backward.writable, fa3_backward.space, fa3_backward.chosen, fa3.build,
    ("fa3", "hopper_ws"), fa3_backward.published,
)  # fmt: skip
HOPPER_BACKWARD_APART = BackwardFamily(
    *fa3_backward_apart.NAMES, "Gluon for Hopper, two kernels, head_dim 192, 256 and 192/128", Fa3BackwardApartVariant,
    fa3_backward_apart.legality, fa3_backward_apart.writable, fa3_backward_apart.space, fa3_backward_apart.chosen,
    fa3_apart.build,
)  # fmt: skip
BLACKWELL_BACKWARD = BackwardFamily(
    *fa4_backward.NAMES, "data-centre Blackwell, as FlashAttention-4 has it; forecast only", Fa4BackwardVariant,
    fa4_backward.legality, fa4_backward.writable, fa4_backward.space, fa4_backward.chosen, fa4.build, ("fa4", "blackwell_ws"),
    fa4_backward.published,
)  # fmt: skip
FEW_BACKWARD = BackwardFamily(
    *few_backward.NAMES, "plain Triton for Hopper, few query rows of a key/value head, all of them in a program", FewBackwardVariant,
    few_backward.legality, few_backward.writable, few_backward.space, few_backward.chosen, few.build,
)  # fmt: skip
#: The first is what `--pass bwd` takes where no family is named.
BACKWARD_FAMILIES = (TRITON_BACKWARD, HOPPER_BACKWARD, HOPPER_BACKWARD_APART, BLACKWELL_BACKWARD, FEW_BACKWARD)

#: What numbers of knobs may be that are no tiles: query rows of a key/value head, those of a step where there are steps of them.
_LIMITS = {"rows": (1, 4096), "step": (0, 256)}
#: Those built for a matrix unit, the first that can run a problem first: on Hopper one kernel where it can be written.
_NATIVE = (FEW_BACKWARD, BLACKWELL_BACKWARD, HOPPER_BACKWARD, HOPPER_BACKWARD_APART)


def family_of(variant: BackwardVariant) -> BackwardFamily:
    """The kernel class of a variant."""
    return next(family for family in BACKWARD_FAMILIES if family.name == variant.family)


def writable(variant: BackwardVariant, workload: Workload, machine: Machine) -> Verdict:
    """Whether a backward pass of ``variant`` can be written: legal, and within what its template writes."""
    family = family_of(variant)
    verdict = family.legality(variant, workload, machine)
    return family.writable(variant, workload, machine) if verdict.legal else verdict


def native_backward(workload: Workload, machine: Machine, published: bool = False) -> BackwardFamily:
    """The class built for the machine's matrix unit that has a variant for ``workload``, of those its authors have where ``published``; the
    portable one where none has."""
    for family in _NATIVE:
        space = family.published if published and family.published is not None else family.space
        if any(True for _ in space(workload, machine)):
            return family
    return TRITON_BACKWARD


@lru_cache(maxsize=1 << 13)
def build_backward(workload: Workload, variant: BackwardVariant, machine: Machine) -> BackwardPass:
    """The launches of a legal ``variant``."""
    return family_of(variant).build(workload, variant, machine)


def parse_backward(text: str, base: V) -> V:
    """A variant from "dkv_tile_m=32,..."; knobs not named keep ``base``'s values.

    Raises VariantError with the nearest names for an unknown family, knob or value.
    """

    def check_family(name: str) -> None:
        if find_backward(name).name != base.family:
            raise VariantError(f"--variant: expected a variant of family {base.family}, got family '{name}'")

    return parse_knobs(text, base, check_family, _value)


def named_in(text: str) -> BackwardFamily | None:
    """The family that a variant's text names, "family=..." or "...:"; None where it names none."""
    name = family_named(text)
    return None if name is None else find_backward(name)


def find_backward(name: str) -> BackwardFamily:
    """The family of backward passes of a name, or the one of a forward family's kind; VariantError where there is none."""
    for family in BACKWARD_FAMILIES:
        if name in (family.name, family.template, *family.also):
            return family
    known = ", ".join(f"{family.name} or {family.template}" for family in BACKWARD_FAMILIES)
    raise VariantError(f"--pass bwd: expected family {known}, got '{name}'")


def _value(key: str, text: str, current: object) -> object:
    value = value_like(key, text, current)
    if not isinstance(current, (bool, str)):
        check_value(
            key, text, value, fa2_backward.WARPS if key.endswith("_warps") else None, _LIMITS.get(key, (1, 256))
        )
    return value
