"""How well the model does near the question: the closest measured points of a table, predicted like any other.

Nearness is a ladder of plain conditions, not a score: the first rung with enough points is taken and named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import log2
from typing import TypeVar

from tilecast.explore.review.content.content import Point, Region
from tilecast.model.forecast.answer import Explained
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, load_machine, machine_names
from tilecast.validation.statistics import summarise

T = TypeVar("T")
#: Points a rung must have, and points that are predicted and shown at most.
_ENOUGH, _MOST = 5, 40
_16_BIT = ("bf16", "fp16")


def region(
    p: Explained, kind: str, items: Sequence[T], shape: Callable[[T], Workload], place: Callable[[T], str],
    point: Callable[[T], Point | None], note: str, missing: str,
) -> Region:  # fmt: skip
    """The nearest of ``items`` to the question of ``p``, each as ``point`` compares it (None: it cannot be forecast).

    ``note`` says what is compared, ``missing`` why there is nothing.
    """
    name, near, found = nearest(p.workload, p.machine, items, shape, place)
    rows = [made for item in near if (made := point(item)) is not None]
    errors = asdict(summarise(row.error for row in rows))
    if not rows:
        return Region(**errors, kind=kind, nearness="", points=(), note=missing)
    if found > len(rows):
        name = f"{name}; the {len(rows)} nearest of {found}"
    return Region(**errors, kind=kind, nearness=name, points=tuple(rows), note=note)


def _rungs(work: Workload, machine: Machine) -> list[tuple[str, Callable[[Workload, str], bool]]]:
    """(how near, condition on workload and machine name), nearest first; a later rung contains the earlier ones."""

    def same_dims(w: Workload) -> bool:
        return (w.head_dim_qk, w.head_dim_v) == (work.head_dim_qk, work.head_dim_v) and _dtype(w) == _dtype(work)

    def length(w: Workload) -> float:
        return max(abs(log2(w.seqlen_q / work.seqlen_q)), abs(log2(w.seqlen_k / work.seqlen_k)))

    kin = {name for name in machine_names() if load_machine(name).tensor_kind == machine.tensor_kind}
    own = machine.name
    dims = (
        f"head_dim {work.head_dim_qk}"
        if work.head_dim_qk == work.head_dim_v
        else f"head_dim {work.head_dim_qk}/{work.head_dim_v}"
    )
    what = f"{_dtype(work)}, {dims}"
    return [
        (f"on {own}, {what}, same mask, length within a factor of 2", lambda w, m: m == own and same_dims(w) and w.mask == work.mask and length(w) <= 1),
        (f"on {own}, {what}, any mask, length within a factor of 4", lambda w, m: m == own and same_dims(w) and length(w) <= 2),
        (f"on {own}, {what}, any mask and length", lambda w, m: m == own and same_dims(w)),
        (f"on {own}, {_dtype(work)}, any shape", lambda w, m: m == own and _dtype(w) == _dtype(work)),
        (f"on GPUs with the same kind of tensor core ({', '.join(sorted(kin))}), {what}", lambda w, m: m in kin and same_dims(w)),
        (f"on GPUs with the same kind of tensor core ({', '.join(sorted(kin))}), any shape and dtype", lambda w, m: m in kin),
    ]  # fmt: skip


def _dtype(work: Workload) -> str:
    """bf16 and fp16 run alike."""
    return "16 bit" if work.dtype in _16_BIT else work.dtype


def distance(a: Workload, b: Workload) -> float:
    """How far two shapes are apart: doublings of length, of heads and of head dimension, and one for another mask."""
    sizes = ("seqlen_q", "seqlen_k", "head_dim_qk", "head_dim_v")
    doublings = sum(abs(log2(getattr(a, name) / getattr(b, name))) for name in sizes)
    work = abs(log2(a.batch * a.heads_q / (b.batch * b.heads_q)))
    return doublings + 0.25 * work + (a.mask != b.mask) + (_dtype(a) != _dtype(b))


def nearest(
    work: Workload, machine: Machine, items: Sequence[T], shape: Callable[[T], Workload], place: Callable[[T], str]
) -> tuple[str, list[T], int]:
    """(how near, at most `_MOST` items of that rung by distance, how many it has); ("", [], 0) when none has any."""
    widest: tuple[str, list[T]] = ("", [])
    for name, condition in _rungs(work, machine):
        here = [item for item in items if condition(shape(item), place(item))]
        if len(here) > len(widest[1]):
            widest = (name, here)
        if len(here) >= _ENOUGH:
            break
    name, here = widest
    order = sorted(range(len(here)), key=lambda i: (place(here[i]) != machine.name, distance(shape(here[i]), work), i))
    return name, [here[i] for i in order[:_MOST]], len(here)
