"""The stream of tiles of a GEMM kernel as a Pipeline: copy A and B, multiply, epilogue; C copied ahead, D stored.

One iteration of the loop is a tile of every accumulator that takes turns (on Hopper two, where two warpgroups do) or of every
CTA on the SM; `GemmPipeline.tiles` says how many.  The k-steps of a tile are operations of their own, as is every slot of
the ring; of a tile of very many steps the first `MOST_STEPS` stand for all (`GemmPipeline.steps_left`).

The memory of the chip is a unit too: an SM has its share of the bandwidth, in bytes a clock, and what its copy engine brings from
there or sends there goes in the order in which it was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model.gemm.code import CodeCycles
from tilecast.model.gemm.families import consumer_warps, slot_bytes, stage_bytes
from tilecast.model.gemm.pipeline.edges import Edges
from tilecast.model.gemm.traffic import Tiling
from tilecast.model.gemm.variant import GemmVariant
from tilecast.model.gemm.workload import Gemm
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.graph import Buffer, Pipeline, Role, Space, Step

#: k-steps of a tile that are operations of their own: those beyond go on at the same pace.
MOST_STEPS = 64


@dataclass(frozen=True, slots=True)
class GemmPipeline:
    """The loop, and how its iterations make up a launch."""

    pipeline: Pipeline
    #: Tiles of one iteration.
    tiles: int
    tiling: Tiling
    #: k-steps of a tile beyond those in the loop.
    steps_left: int


def build(
    gemm: Gemm, variant: GemmVariant, machine: Machine, mhz: float, *, memory: bool = True, most_steps: int = MOST_STEPS,
    code: CodeCycles | None = None, memory_busy: float = 0.5,
) -> GemmPipeline:  # fmt: skip
    """The loop of ``variant`` at an SM clock of ``mhz``; legality is the caller's business (`families.legality`).

    Without ``memory`` the chip's memory is as fast as the SMs can ask: what is left is the SM's own pace; with it ``memory_busy``
    is the share of its rate that the launch uses, which copies wait for.  With ``code`` epilogues
    and the warps that copy take what their machine code takes.
    """
    return _Parts(gemm, variant, machine, mhz, memory, most_steps, code, memory_busy).pipeline()


class _Parts(Edges):
    """The pieces of one GEMM pipeline."""

    def roles(self) -> list[Role]:
        tiles, steps = range(self.tiles), range(self.steps)
        if self.portable:
            out = []
            for t in tiles:
                c = (Step(f"load_c{t}"),) if self.gemm.adds_c else ()
                program = (*(Step(f"mma{t}_{s}") for s in steps), *c, Step(f"epilogue{t}"), Step(f"store{t}"))
                out.append(Role(f"load{t}", tuple(Step(f"load{t}_{s}") for s in steps), 0))
                out.append(Role(f"warps{t}", program, self.v.warps))
            return out
        names = {"load": [f"{t}_{s}" for t in tiles for s in steps]}
        if self.gemm.adds_c:
            names["load_c"] = [f"{t}{end}" for t in tiles for end in self.box_ends()]
        out = []
        for copy, each in names.items():
            out.append(Role(copy, tuple(Step(self.ordered_by(copy) + name) for name in each), 1))
            if copy == "load" and self.fresh_steps:
                out.append(Role("queue", tuple(Step("ask" + name) for name in each), 0))
            if self.in_turn:
                # What the copy engine does is a stream of its own.
                out.append(Role(copy.replace("load", "arrive"), tuple(Step(copy + name) for name in each), 0))
        out.append(Role("store", tuple(Step(f"store{t}{end}") for t in tiles for end in self.box_ends()), 1))
        if not self.hopper:
            out.append(Role("mma", tuple(Step(f"mma0_{s}") for s in steps), 1))
            out.append(Role("epilogue", tuple(Step(f"epilogue0{end}") for end in self.ends(0)), 4))
            return out
        if self.halves == 1:
            for t in tiles:
                turn = (Step(f"turn{t}"),) if self.tiles == 2 else ()
                products = (*(Step(f"mma{t}_{s}") for s in steps), *turn)
                epilogues = tuple(Step(f"epilogue{t}{end}") for end in self.ends(0))
                out.append(Role(f"consumer{t}", (*products, *epilogues), consumer_warps(self.v)))
            return out
        for half in range(2):
            epilogues = tuple(Step(f"epilogue0{end}") for end in self.ends(half))
            out.append(Role(f"consumer{half}", (*(Step(f"mma0_{s}h{half}") for s in steps), *epilogues), 4))
        return out

    def buffers(self) -> tuple[Buffer, ...]:
        v, g, end, half = self.v, self.gemm, self.ends(0)[0], self.suffix(0)
        out = [Buffer("A/B", "smem", stage_bytes(v, g) * self.ctas, v.stages, "load0_0", f"mma0_0{half}")]
        if slot_bytes(v, g):
            first = f"load_c0{end}" if g.adds_c else ""
            out.append(Buffer("C/D", "smem", slot_bytes(v, g), v.c_stages, first, f"store0{end}"))
        space: Space = "tmem" if self.m.tensor_kind == "tcgen05" else "registers"
        size = v.tile_m * v.tile_n * 4
        out.append(Buffer("accumulator", space, size, v.accumulators * self.ctas, f"mma0_0{half}", f"epilogue0{end}"))
        return tuple(out)

    def pipeline(self) -> GemmPipeline:
        v = self.v
        ops = [op for t in range(self.tiles) for s in range(self.steps) for op in self.loads(t, s)]
        ops += [self.mma(t, h, s) for t in range(self.tiles) for h in range(self.halves) for s in range(self.steps)]
        for t in range(self.tiles):
            ops += [self.epilogue(t, half, end) for half in range(self.halves) for end in self.ends(half)]
            ops += self.c_and_d(t)
            if self.hopper and self.tiles == 2:
                ops.append(self.turn(t))
        edges = self.ring()
        for t in range(self.tiles):
            edges += self.tile_edges(t)
        buffers = "1 accumulator" if v.accumulators == 1 else "2 accumulators"
        found = Pipeline(
            name=f"{v.family} {v.tile_m * v.cta_group}x{v.tile_n}x{v.tile_k} {buffers}", machine=self.m.name,
            ops=tuple(ops), edges=tuple(edges), roles=tuple(self.roles()), buffers=self.buffers(),
            rows_per_cta=v.tile_m, keys_per_iteration=v.tile_n, ctas_per_sm=self.ctas,
            prologue_cycles=self.m["launch.cta_start_cycles"] + self.m.get("launch.cta_setup_cycles", 0.0),
            epilogue_cycles=0.0, cta_group=v.cta_group, tiles_overlap=v.accumulators == 2,
        )  # fmt: skip
        return GemmPipeline(found, self.tiles, self.on_chip, self.on_chip.steps - self.steps)
