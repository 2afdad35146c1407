"""The order of work in a `blackwell_ws` kernel, read from the pipeline of its variant.

The pipeline says in which order the matrix role issues its products and how the correction role serves the softmax
groups.  From that follow the copies of the load role and the statements of all three, which are written here.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model.kernel.variants.fa4 import Fa4Variant
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.pipeline.fa4 import STATISTICS_SLOT
from tilecast.model.pipeline.graph import Pipeline, Role, Step


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of one softmax group: QK of a key block, or PV with all its parts."""

    op: str
    group: int
    #: Whether it is the first to use its K or V block, and the last.
    takes: bool
    releases: bool


@dataclass(frozen=True, slots=True)
class Phases:
    """Lines before a role's loop over key blocks, in it, and after it."""

    first: tuple[str, ...]
    loop: tuple[str, ...]
    last: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rings:
    """Names of rings in the kernel: K and V have one each, or share one."""

    k: str
    v: str

    @property
    def names(self) -> tuple[str, ...]:
        """All rings, Q's first."""
        return ("q", *dict.fromkeys((self.k, self.v)))


@dataclass(frozen=True, slots=True)
class Order:
    """The products of the matrix role: before the loop QK of the first block, in it PV of a block and QK of the next."""

    first: tuple[Product, ...]
    loop: tuple[Product, ...]
    last: tuple[Product, ...]

    def text(self) -> str:
        """ "First QK0 QK1; in the loop PV0 QK0 PV1 QK1, QK of the next block; then PV0 PV1." """
        first, loop, last = (
            " ".join(f"{p.op}{p.group}" for p in phase) for phase in (self.first, self.loop, self.last)
        )
        return f"First {first}; in the loop {loop}, QK of the next block; then {last}."


def matrix_order(pipeline: Pipeline, groups: int, by_keys: bool) -> Order:
    """The products in the order of the pipeline's matrix role.

    Raises VariantError where the kernel, which has one S for each group and keeps P in it, cannot follow that order.
    """
    program = _role(pipeline, "mma").program
    _check_order(program, pipeline, groups)
    loop = list(dict.fromkeys((pipeline.op(step.op).kind.upper(), pipeline.op(step.op).tile) for step in program))
    phases = ([p for p in loop if p[0] == "QK"], loop, [p for p in loop if p[0] == "PV"])
    return Order(*(tuple(_with_blocks(phase, by_keys)) for phase in phases))


def _check_order(program: tuple[Step, ...], pipeline: Pipeline, groups: int) -> None:
    """P lies where S was: QK of a group's next block must follow its PV, and nothing may run further ahead."""
    place = {step.op: n for n, step in enumerate(program)}
    for step in program:
        op = pipeline.op(step.op)
        if step.shift != (1 if op.kind == "qk" else 0):
            raise VariantError(
                f"blackwell_ws: the kernel has one S a tile, so '{step.op}' cannot run {step.shift} ahead"
            )
    for group in range(groups):
        parts = [name for name in place if name.startswith(f"pv{group}")]
        if any(place[name] > place[f"qk{group}"] for name in parts):
            raise VariantError(f"blackwell_ws: qk{group} must come after pv{group}, whose P it overwrites")
        if [place[name] for name in sorted(parts)] != list(range(place[min(parts)], place[min(parts)] + len(parts))):
            raise VariantError(f"blackwell_ws: the parts of pv{group} must follow each other")


def _with_blocks(products: list[tuple[str, int]], by_keys: bool) -> list[Product]:
    """Mark where a K or V block is first used and where it is free again: groups share blocks unless they alternate."""
    out = []
    for n, (op, group) in enumerate(products):
        same = [m for m, other in enumerate(products) if other[0] == op and (other[1] == group or not by_keys)]
        out.append(Product(op, group, n == same[0], n == same[-1]))
    return out


def load_statements(order: Order, rings: Rings, groups: int, by_keys: bool) -> Phases:
    """The load role's copies: blocks in the order in which products take them, Q after the first K."""

    def copies(products: tuple[Product, ...], next_k: bool) -> list[str]:
        lines = []
        for product in products:
            what = "k" if product.op == "QK" else "v"
            ring = rings.k if what == "k" else rings.v
            behind = (product.group if by_keys else 0) + ((groups if by_keys else 1) if next_k and what == "k" else 0)
            key = "key" + (f" - {behind} * TILE_N" if behind > 1 else " - TILE_N" if behind else "")
            if product.takes:
                lines.append(f"{ring}_at = load({ring}, {ring}_at, {what}_desc, batch, head_kv, {key})")
        return lines

    first = copies(order.first, False)
    first[1:1] = [
        f"q_at = load(q, q_at, q_desc, batch, head, row{rows})"
        for rows in (("",) if by_keys or groups == 1 else ("", " + ROWS"))
    ]
    return Phases(tuple(first), tuple(copies(order.loop, True)), tuple(copies(order.last, False)))


def matrix_statements(order: Order, rings: Rings, groups: int, by_keys: bool, persistent: bool) -> Phases:
    """The matrix role's statements: wait for blocks, issue products, give blocks back."""
    first, loop = _issue(order.first, rings, by_keys, "first"), _issue(order.loop, rings, by_keys, "loop")
    last = _issue(order.last, rings, by_keys, "last")
    if persistent:
        slots = range(1 if by_keys else groups)
        release = [f"tcgen05_commit(q.empty.index(q{slot}))" for slot in slots]
        comment = "# Every QK of this work tile has been issued: when they are done, Q may be overwritten."
        last = [comment, *release, *last, "p_phase = p_phase ^ 1"]
    return Phases(tuple(first), tuple(loop), tuple(last))


def _issue(products: tuple[Product, ...], rings: Rings, by_keys: bool, phase: str) -> list[str]:
    lines, q_taken = [], 0
    for product in products:
        what = "k" if product.op == "QK" else "v"
        ring, group = (rings.k if what == "k" else rings.v), product.group
        q_slot = 0 if by_keys else group
        while what == "k" and phase == "first" and q_taken <= q_slot:  # tiles of Q land in the order of their slots
            lines.append(f"q{q_taken}, q_at = take(q, q_at)")
            q_taken += 1
        if product.takes:
            lines.append(f"{what}_slot, {ring}_at = take({ring}, {ring}_at)")
        if what == "k":
            # By keys, a slot that the compiler does not know: addresses worked out in advance would need registers.
            slot = f"own_copy(q{q_slot})" if by_keys else f"q{q_slot}"
            lines.append(f"issue_qk(softmax{group}, tile_at(q, {slot}), tile_at({ring}, k_slot))")
        else:
            fresh = "True" if by_keys and group else "step != 0" if phase == "loop" else "{steps} != 1"
            lines.append(f"issue_pv(softmax{group}, tile_at({ring}, v_slot), p_phase, {fresh})")
            if by_keys or phase == "last":
                lines.append(f"tcgen05_commit(softmax{group}.o_full)")
        if product.releases:
            lines.append(f"tcgen05_commit({ring}.empty.index({what}_slot))")
    return [line.format(steps="pairs" if by_keys else "blocks") for line in lines]


# --- row statistics ---------------------------------------------------------------------------------------------------


def stats_lag(pipeline: Pipeline, variant: Fa4Variant) -> tuple[int, ...]:
    """By how many steps the release of a statistics slot may lag behind, per softmax group."""
    lags = []
    for group in range(variant.softmax_tiles):
        edge = next(e for e in pipeline.edges if e.dst == f"sum{group}" and e.why == STATISTICS_SLOT)
        if not 0 <= edge.distance <= variant.stats_slots:
            raise VariantError(
                f"blackwell_ws: statistics of tile {group} wait {edge.distance} steps back, more than the slots"
            )
        lags.append(edge.distance)
    return tuple(lags)


def correction_statements(pipeline: Pipeline, groups: int, by_keys: bool, persistent: bool) -> Phases:
    """The correction role's statements: rescale O for every block, then store it.

    Each step releases the statistics slot of the group that the pipeline names.
    """
    released = []
    for step in _role(pipeline, "correction").program:
        edge = next(e for e in pipeline.edges if e.src == step.op and e.why == STATISTICS_SLOT)
        released.append((pipeline.op(step.op).tile, pipeline.op(edge.dst).tile))
    if [group for group, _ in released] != list(range(groups)):
        raise VariantError("blackwell_ws: the correction role must serve the softmax groups in turn, first to last")
    loop, last = [], []
    for group, other in released:
        later = "True" if by_keys and group else "step != 0"
        before = f", softmax{(group - 1) % groups}.o_full, o_phase{'' if group else ' ^ 1'}" if by_keys else ""
        loop.append(f"correct(softmax{group}, n, {later}, softmax{other}{before})")
    loop += ["n += 1", *(["o_phase = o_phase ^ 1"] if by_keys else [])]
    for what in ("total", "maximum"):
        last += [f"{what}{g} = read(softmax{g}, n, softmax{other})" for g, other in released]
        last += ["n += 1"] if what == "total" or persistent else []
    if by_keys:
        last += [f"mbarrier.wait(softmax{group}.o_full, o_phase ^ 1)" for group in range(groups)]
        total = " + ".join(f"total{group}" for group in range(groups))
        last.append(f"store_rows(problem, softmax0, {total}, maximum{groups - 1}, batch, head, row)")
    else:
        for group in range(groups):
            rows = " + ROWS" if group else ""
            last.append(f"mbarrier.wait(softmax{group}.o_full, {'o_phase' if persistent else 0})")
            last.append(f"store_rows(problem, softmax{group}, total{group}, maximum{group}, batch, head, row{rows})")
        last += ["o_phase = o_phase ^ 1"] if persistent else []
    return Phases((), tuple(loop), tuple(last))


def _role(pipeline: Pipeline, name: str) -> Role:
    return next(role for role in pipeline.roles if role.name == name)
