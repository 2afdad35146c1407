"""The answer of `tilecast forecast FILE`: as plain values, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilecast.codegen.compiler.steady_forecast import SteadyForecast

#: Busy shares and waits that are worth a place in the text.
_BUSY, _WAIT = 0.05, 1.0


def as_dict(found: SteadyForecast) -> dict[str, Any]:
    """Plain values for --json."""
    run = found.run
    return {
        "file": found.file,
        "kernel": found.kernel.kernel,
        "arch": found.kernel.target,
        "machine": found.machine.name,
        "level": "machine code, steady loop" + (", each role alone: no less than" if found.apart else ""),
        "not_followed": found.apart or None,
        "cycles_per_iteration": found.cycles,
        "cycles_before_compilation": found.before,
        "ctas_per_sm": found.per_sm,
        "flop_per_iteration_and_sm": found.flop,
        "bytes_by_lanes_per_iteration_and_sm": found.moved,
        "memory_cycles_per_iteration": found.memory_cycles,
        "tensor_share": found.tensor_share,
        "products_one_by_one": found.one_by_one,
        "clock_mhz": found.mhz,
        "tflops_in_the_loop": found.tflops,
        "busy": {name: cycles / found.cycles for name, cycles in run.busy.items()},
        "launch": _launch_dict(found),
        "roles": [
            {
                "role": role.name,
                "warp": role.warp,
                "instructions": len(role.loop) // found.kernel.unrolled,
                "other_loops": list(found.left_out.get(role.warp, ())),
                "tile_end_instructions": found.tile_ends.get(role.warp, 0),
                "waits": {barrier: cycles for (name, barrier), cycles in run.waits.items() if name == role.name},
            }
            for role in found.kernel.roles
        ],
    }


def _launch_dict(found: SteadyForecast) -> dict[str, Any] | None:
    if found.grid is None or found.cost is None or found.launch is None:
        return None
    return {
        "ctas": found.grid.ctas,
        "iterations": found.grid.iterations,
        "tiles": len(found.grid.work),
        "cycles": found.launch.cycles,
        "milliseconds": found.milliseconds,
        "memory_milliseconds": found.memory_milliseconds,
        "ends_cycles": None if found.no_ends else found.cost.ends,
        "later_ends_cycles": None if found.no_ends else found.cost.later_ends,
        "peeled_iterations": found.cost.peeled,
        "busy": found.launch.busy,
    }


def _launch_lines(found: SteadyForecast) -> list[str]:
    if found.grid is None or found.cost is None or found.launch is None:
        return []
    whole, grid, least = found.launch, found.grid, _least(found)
    peeled = f"; {found.cost.peeled:.0f} of its iterations stand outside of the loop" if found.cost.peeled else ""
    unit = (
        f"tensor core {whole.busy['tensor']:.0%} busy"
        if found.flop
        else f"{whole.busy['issue']:.0%} of the issue slots taken"
    )
    memory = [] if found.flop or not found.moved else [
        f"Memory alone takes {found.memory_milliseconds:.4g} ms for all that its lanes load and store."
    ]  # fmt: skip
    later = found.cost.later_ends
    tiles = "" if later is None else f" share {grid.tiles:,} tiles"
    after = "" if later is None else f", {later:,.0f} of one that had a tile before"
    return [
        "",
        f"{grid.ctas:,} CTAs{tiles} of {grid.iterations} iterations{', which' * bool(tiles)} take {least}{whole.cycles:,.0f} cycles, {found.milliseconds:.4g} ms at {found.mhz:.0f} MHz: "
        f"{unit}.",
        *memory,
        f"Set-up, first loads and the epilogue of a CTA are not in it: around its loops the code cannot be followed{peeled}."
        if found.no_ends
        else f"Set-up, first loads and the epilogue of a CTA are {found.cost.ends:,.0f} cycles of it{after}{peeled}.",
    ]


def _least(found: SteadyForecast) -> str:
    return "no less than " if found.apart else ""


def _product_lines(found: SteadyForecast, matrix: str) -> list[str]:
    return [
        f"An iteration of {matrix} takes {_least(found)}{found.cycles:,.0f} cycles for {found.flop / 1e6:.2f} MFLOP of an SM: the tensor core is busy "
        f"{found.tensor_share:.0%} of them.",
        f"{found.machine['chip.sm_count']:.0f} SMs at the rated {found.mhz:.0f} MHz make {found.tflops:,.0f} TFLOP/s while all run the loop. Not included: "
        "the code around it,",
        "memory and the power limit.",
    ]


def _mover_lines(found: SteadyForecast, role: str) -> list[str]:
    """Of a kernel without matrix products in its loops."""
    lines = [
        f"It multiplies no matrices there. An iteration of {role} takes {_least(found)}{found.cycles:,.0f} cycles."
    ]
    if found.moved:
        lines.append(
            f"Lanes of an SM load and store {found.moved / 1024:,.1f} KB of global memory in it. That is its time where L2 has them; memory "
            f"alone takes {found.memory_cycles:,.0f} cycles."
        )
    return lines


def as_text(found: SteadyForecast) -> str:
    """The forecast for people."""
    run, machine, kernel = found.run, found.machine, found.kernel
    matrix = kernel.roles[kernel.matrix].name
    if found.per_sm > 1:
        matrix += f" in each of {found.per_sm} CTAs"
    lines = [
        f"{kernel.kernel[:60] or 'a kernel'} of {Path(found.file).name}, compiled for {kernel.target}, on {machine.title}: its steady loop,",
        "simulated from machine code",
        "",
        *(_product_lines if found.flop else _mover_lines)(found, matrix),
    ]
    if found.before is not None:
        lines.append(
            f"Before compilation the same loop is forecast at {found.before:,.0f} cycles ({found.before / found.cycles - 1:+.0%})."
        )
    if found.one_by_one:
        lines.append(
            f"Each of an iteration's {found.one_by_one} products is waited for before the next is issued: ptxas has serialised them."
        )
    if found.without:
        lines.append(found.without)
    if found.apart:
        told = found.apart.removeprefix(f"{kernel.kernel}: ").removesuffix("; the reading of the code is wrong")
        lines.append(f"What its roles hand each other cannot be followed, so each was simulated alone: {told}.")
    lines += _launch_lines(found)
    busy = sorted(((cycles / found.cycles, name) for name, cycles in run.busy.items()), reverse=True)
    lines += ["", "busy   " + " · ".join(f"{name} {share:.0%}" for share, name in busy if share >= _BUSY), ""]
    lines.append("role                 instructions   waits at barriers, cycles an iteration")
    rows: dict[tuple[str, str], list[str]] = {}
    for role in kernel.roles:
        waits = sorted(((c, b) for (name, b), c in run.waits.items() if name == role.name and c >= _WAIT), reverse=True)
        told = " · ".join(f"{barrier} {cycles:.0f}" for cycles, barrier in waits) or "-"
        rows.setdefault((f"{len(role.loop) // kernel.unrolled:>12}", told), []).append(role.name)
    lines += [f"{_together(names):<20} {count}   {told}" for (count, told), names in rows.items()]
    return "\n".join(lines + _tile_end_lines(found) + _left_out_lines(found))


def _tile_end_lines(found: SteadyForecast) -> list[str]:
    """What a loop over the blocks of all tiles runs once a tile."""
    told: dict[int, list[str]] = {}
    for role in found.kernel.roles:
        if ends := found.tile_ends.get(role.warp):
            told.setdefault(ends, []).append(role.name)
    return [
        f"{_together(names)}: {ends} more instructions, under a branch that stores a tile's results, are in no iteration."
        for ends, names in told.items()
    ]


def _together(names: Sequence[str]) -> str:
    """Roles of one row: the first, and how many more do the same on its sub-partition."""
    return names[0] if len(names) == 1 else f"{names[0]}, {len(names) - 1} more"


def _left_out_lines(found: SteadyForecast) -> list[str]:
    """What a kernel with several loops does elsewhere, and what that means for the numbers above."""
    told: dict[tuple[int, ...], list[str]] = {}
    for role in found.kernel.roles:
        if others := found.left_out.get(role.warp):
            told.setdefault(others, []).append(role.name)
    if not told:
        return []
    followed = "the loop with the fewest instructions a product" if found.flop else "the loop that moves most bytes"
    counted = " The launch's iterations are counted as all of this one." if found.launch is not None else ""
    return [
        "",
        f"Each role is simulated in {followed}, its other loops (masks, remainders, other phases) are not.{counted}",
        *(
            f"  {_together(names)}: {len(others)} more loop{'s' if len(others) > 1 else ''}, of {' and '.join(map(str, others))} instructions"
            for others, names in told.items()
        ),
    ]
