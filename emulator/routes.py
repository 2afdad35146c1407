"""One tile of a generated kernel by three routes: what its source executed, the pipeline simulation, its machine code.

The routes share the rates of the machine file, and nothing else: the source knows order and counts of what it executed, the
pipeline what the algorithm needs, the machine code what the compiler made of it, instruction by instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilecast.emulator.replay.compare import compare
from tilecast.emulator.run import emulate
from tilecast.emulator.source import Source
from tilecast.model.chip.launch import play
from tilecast.model.chip.tiles import head_tiles
from tilecast.model.compiled.code import CodeError
from tilecast.model.compiled.evaluate import CompiledVariant
from tilecast.model.compiled.forecast import forecast
from tilecast.model.compiled.roles.costs import role_costs
from tilecast.model.compiled.roles.launch import cta_cost
from tilecast.model.families import build_pipeline, parse_variant
from tilecast.model.kernel.header import header_workload
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, load_machine
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.sm.simulate import steady_state

#: Iterations of the tile.
BLOCKS = 16
#: The machine code of a variant for a workload on a machine; PredictError where there is none.
Compile = Callable[[Workload, Machine, Variant], CompiledVariant]


@dataclass(frozen=True, slots=True)
class Route:
    """Cycles of an iteration and of a whole tile, from its first instruction to its last, by one route."""

    name: str
    ii_cycles: float
    #: None where the route does not reach to the ends of a tile.
    tile_cycles: float | None
    #: What the numbers stand on.
    by: str


@dataclass(frozen=True, slots=True)
class OneTile:
    """A tile of a kernel on a machine, by its routes; the source comes first."""

    workload: Workload
    machine: str
    routes: tuple[Route, ...]
    #: Why there is no machine code; "" where there is.
    without_code: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "workload": self.workload.as_dict(), "machine": self.machine, "without_code": self.without_code,
            "routes": [{"name": r.name, "ii_cycles": r.ii_cycles, "tile_cycles": r.tile_cycles, "by": r.by} for r in self.routes],
        }  # fmt: skip


def by_all_routes(file: str, machine: str | None, code: Compile) -> OneTile:
    """The routes of ``file``, a generated kernel; ``code``: where its machine code comes from, CodeError or ValueError where there is none."""
    source = Source(file)
    header = source.header()
    chip = load_machine(machine or str(header["machine"]))
    written, variant = header_workload(header), parse_variant(str(header["variant"]))
    pipeline = build_pipeline(written, variant, chip)
    work = _one_tile(written, pipeline)
    done = emulate(file, *_inputs(work), machine=machine, sms=2 * pipeline.cta_group, window=work.window)
    found = compare(header, done.traces[0], chip)
    routes = [
        Route("source", found.ii_cycles, found.timeline.cycles, "what this tile executed"),
        Route("pipeline", steady_state(pipeline).ii_cycles, _pipeline_tile(work, variant, pipeline, chip), "before compilation"),
    ]  # fmt: skip
    try:
        made = code(work, chip, variant)
        routes.append(_machine_code(made, work, pipeline, chip))
    except (CodeError, ValueError) as error:
        return OneTile(work, chip.title, tuple(routes), str(error))
    return OneTile(work, chip.title, tuple(routes), "")


def as_text(file: str, found: OneTile) -> str:
    """The routes as a table."""
    first = found.routes[0]
    lines = [f"{file}: one tile, {found.workload.label()}, on {found.machine}", ""]
    lines.append(f"{'':14s}{'an iteration':>14s}{'':10s}{'a tile':>12s}")
    for route in found.routes:
        tile = f"{route.tile_cycles:12,.0f}" if route.tile_cycles else f"{'-':>12s}"
        apart = f"{route.ii_cycles / first.ii_cycles - 1:+8.1%}" if route is not first else ""
        longer = (
            f"{route.tile_cycles / first.tile_cycles - 1:+8.1%}"
            if route is not first and route.tile_cycles and first.tile_cycles
            else ""
        )
        lines.append(f"{route.name:14s}{route.ii_cycles:14,.0f}{apart:10s}{tile}{longer:10s}  {route.by}".rstrip())
    if found.without_code:
        lines += ["", f"no machine code: {found.without_code}"]
    return "\n".join([*lines, "", "Cycles; a tile without its launch; docs/emulator.md says where the routes differ."])


def _one_tile(written: Workload, pipeline: Pipeline) -> Workload:
    rows, keys = pipeline.rows_per_cta * pipeline.cta_group, BLOCKS * pipeline.keys_per_iteration
    return replace(written, batch=1, heads_q=1, heads_kv=1, seqlen_q=rows, seqlen_k=keys, dtype="fp16")


def _inputs(work: Workload) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    shapes = ((work.seqlen_q, work.head_dim_qk), (work.seqlen_k, work.head_dim_qk), (work.seqlen_k, work.head_dim_v))
    return tuple(rng.standard_normal((1, 1, *shape)).astype(np.float16) for shape in shapes)


def _pipeline_tile(work: Workload, variant: Variant, pipeline: Pipeline, chip: Machine) -> float:
    return play(work, variant, pipeline, chip, 0.0).makespan_cycles


def _machine_code(made: CompiledVariant, work: Workload, pipeline: Pipeline, chip: Machine) -> Route:
    if made.code is not None:
        # A tile on every SM, of heads that share K and V, so that these come from L2 as in any larger launch.
        everywhere = replace(work, heads_q=int(chip["chip.sm_count"]))
        seen = forecast(made.code, everywhere, chip, chip["chip.clock_rated_mhz"])
        by = f"{made.compiler}, {made.registers} registers"
        return Route("machine code", seen.cycles_per_block, seen.span_cycles, by)
    if made.roles is None:
        raise CodeError("neither its tiles nor its loop can be followed")
    # A lap of the loop may be several blocks of keys; of a window a tile sees some of them.
    tiles = head_tiles(work, pipeline.rows_per_cta * pipeline.cta_group, pipeline.keys_per_iteration)
    visible = int(tiles.iterations.max())
    block = 2.0 * pipeline.rows_per_cta * pipeline.keys_per_iteration * (work.head_dim_qk + work.head_dim_v)
    blocks = max(1, round(made.roles.flop / block))
    cost = cta_cost(made.roles, role_costs(chip))
    return Route("machine code", cost.steady.cycles / blocks, cost.cycles(max(1, visible // blocks)), made.compiler)
