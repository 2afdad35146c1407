"""A kernel's shape as plain values and as text: role by role, loop by loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from tilecast.codegen.compiler.structure.shape import Guard, KernelShape, Loop, Role, Step

#: Steps about barriers by what the report calls them.
_WAITS = ("wait", "named_wait", "cluster_wait")
_ARRIVALS = ("arrive", "expect", "named_arrive", "cluster_arrive", "commit")
_COPIES = ("copy_in", "copy_out")
_TENSOR_MEMORY = ("tensor_load", "tensor_store")


def as_dict(shape: KernelShape) -> dict[str, Any]:
    """Plain values for --json."""
    resolved, sites = shape.resolved()
    return {
        "warps": shape.warps,
        "barrier_sites": sites,
        "barrier_sites_resolved": resolved,
        "barriers": [
            {"label": barrier.label(), "places": list(barrier.places), "arrivals": None if count < 0 else count}
            for barrier, count in shape.barriers
        ],
        "roles": [_role(role) for role in shape.roles],
    }


def _role(role: Role) -> dict[str, Any]:
    return {
        "warps": list(role.warps),
        "work": role.work,
        "registers": role.registers,
        "loops": list(_nested(role.whole)),
    }


def _nested(around: Loop) -> Iterator[dict[str, Any]]:
    """The loops inside one, each followed by those inside it."""
    for inner in around.inner:
        yield _loop(inner, around)
        yield from _nested(inner)


def _loop(loop: Loop, around: Loop) -> dict[str, Any]:
    steps, beside = loop.steps, loop in around.beside
    return {
        "name": loop.name,
        "address": loop.address,
        "steady": loop.steady,
        "instructions": len(steps),
        "pipes": dict(loop.pipes().most_common()),
        "before": None if beside else len(around.before(loop)),
        "after": None if beside else len(around.after(loop)),
        "waits": list(_syncs(steps, _WAITS)),
        "arrivals": list(_syncs(steps, _ARRIVALS)),
        "copies": list(_copies(steps)),
        "matrix": list(_products(steps)),
        "tensor_memory": [
            {"opcode": opcode, "registers": width, "count": count}
            for (opcode, width), count in Counter((s.instruction.opcode, s.amount) for s in steps if s.kind in _TENSOR_MEMORY).items()
        ],
        "guards": [_guard(guard, steps) for guard in loop.guards],
    }  # fmt: skip


def _guard(guard: Guard, steps: Iterable[Step]) -> dict[str, Any]:
    count = sum(step.guard == guard.name for step in steps) + len(guard.away)
    return {"name": guard.name, "kind": guard.kind, "instructions": count, "away": bool(guard.away), "warps": list(guard.warps)}  # fmt: skip


def _syncs(steps: Iterable[Step], kinds: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    found = Counter((step.kind, step.barriers, step.amount, step.multicast) for step in steps if step.kind in kinds)
    for (kind, sites, amount, multicast), count in found.items():
        labels = [barrier.label() for _, barrier in sites]
        yield {
            "kind": kind,
            "barrier": "cluster" if not labels else f"{labels[0]} to {labels[-1]}" if len(labels) > 4 else "/".join(labels),
            "resolved": all(barrier.resolved for _, barrier in sites),
            "by_warps": [{"warps": list(warps), "barrier": barrier.label()} for warps, barrier in sites],
            "amount": None if amount < 0 else amount,
            "multicast": multicast,
            "count": count,
        }  # fmt: skip


def _copies(steps: Iterable[Step]) -> Iterator[dict[str, Any]]:
    found = Counter(
        (step.instruction.opcode, step.kind, ", ".join(b.label() for _, b in step.barriers), step.pair, step.multicast)
        for step in steps
        if step.kind in _COPIES
    )
    for (opcode, kind, barrier, pair, multicast), count in found.items():
        yield {
            "opcode": opcode, "direction": kind.removeprefix("copy_"), "barrier": barrier or None, "pair": pair,
            "multicast": multicast, "count": count,
        }  # fmt: skip


def _products(steps: Iterable[Step]) -> Iterator[dict[str, Any]]:
    found = Counter((s.instruction.opcode, s.shape, s.source, s.pair) for s in steps if s.kind == "matrix")
    for (opcode, shape, source, pair), count in found.items():
        yield {
            "opcode": opcode, "shape": list(shape) if all(shape) else None, "source": source, "pair": pair, "count": count,
        }  # fmt: skip


def as_text(shape: KernelShape) -> str:
    """The report for people."""
    resolved, sites = shape.resolved()
    lines = [
        f"{shape.warps} warps a CTA, {len(shape.barriers)} mbarriers set up, {resolved} of {sites} uses of a barrier in loops resolved"
    ]
    for role in as_dict(shape)["roles"]:
        registers = "" if role["registers"] is None else f", {role['registers']} registers a thread"
        lines.append(f"\n{_warps(role['warps'])}: {role['work']}{registers}")
        for loop in role["loops"]:
            lines += _loop_lines(loop)
    return "\n".join(lines)


def _loop_lines(loop: dict[str, Any]) -> Iterator[str]:
    pad = "  " * (1 + loop["name"].count("."))
    pipes = " ".join(f"{pipe} {count}" for pipe, count in loop["pipes"].items())
    yield f"{pad}loop {loop['name']} at {loop['address']:#x}: {loop['instructions']} instructions{'' if loop['steady'] else ' and the loops inside'}"
    yield f"{pad}  {pipes}"
    rows = {
        "waits": [_sync(one) for one in loop["waits"]],
        "arrives": [_sync(one) for one in loop["arrivals"]],
        "copies": [_copy(one) for one in loop["copies"]],
        "matrix": [_product(one) for one in loop["matrix"]],
        "tensor memory": [f"{one['count']} {one['opcode']}.x{one['registers']}" for one in loop["tensor_memory"]],
        "guards": [f"{one['name']} ({one['instructions']})" for one in loop["guards"]],
    }
    for name, found in rows.items():
        if found:
            yield f"{pad}  {name:<14}{' · '.join(found)}"


def _sync(one: dict[str, Any]) -> str:
    words = {"commit": "commit ", "expect": "expect ", "arrive": "", "wait": ""}.get(one["kind"], "")
    size = f" {one['amount']} B" if one["kind"] == "expect" and one["amount"] else ""
    return f"{words}{one['barrier']}{size}{' multicast' if one['multicast'] else ''}{_times(one['count'])}"


def _copy(one: dict[str, Any]) -> str:
    where = f" -> {one['barrier']}" if one["barrier"] else ""
    return f"{one['count']} {one['opcode']}{' for the pair' if one['pair'] else ''}{' multicast' if one['multicast'] else ''}{where}"


def _product(one: dict[str, Any]) -> str:
    size = "x".join(map(str, one["shape"])) if one["shape"] else "size unknown"
    return f"{one['count']} {one['opcode']} {size}, A in {one['source']}{', for the pair' if one['pair'] else ''}"


def _times(count: int) -> str:
    return f" x{count}" if count > 1 else ""


def _warps(warps: list[int]) -> str:
    """Warps as ranges: "warps 0-3, 8"."""
    parts: list[list[int]] = []
    for warp in warps:
        if parts and warp == parts[-1][-1] + 1:
            parts[-1].append(warp)
        else:
            parts.append([warp])
    text = ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
    return f"warp{'s' if len(warps) > 1 else ''} {text}"
