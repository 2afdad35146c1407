"""What waits for what in a GEMM's stream of tiles: slots of A and B, accumulators, C and D."""

from __future__ import annotations

from tilecast.model.gemm.families import stage_bytes
from tilecast.model.gemm.pipeline.operations import Operations
from tilecast.model.pipeline.graph import Edge, EdgeKind


class Edges(Operations):
    """The edges between the operations."""

    def ring(self) -> list[Edge]:
        """A/B slots: one ring for all tiles of an iteration, one for each CTA of the portable kernel."""
        v = self.v
        rings = [[t] for t in range(self.tiles)] if self.portable else [list(range(self.tiles))]
        done = self.done()
        release = done + (0.0 if self.portable else self.arrive)
        first = self.ordered_by("load")
        edges = []
        for tiles in rings:
            order = [(t, s) for t in tiles for s in range(self.steps)]
            for at, (t, s) in enumerate(order):
                lap, before = divmod(at - v.stages, len(order))
                bt, bs = order[before]
                for half in range(self.halves):
                    suffix = self.suffix(half)
                    edges += self.landing(t, s, f"mma{t}_{s}{suffix}", 0, 0.0, "data", "A and B")
                    edges.append(Edge(f"mma{bt}_{bs}{suffix}", f"{first}{t}_{s}", -lap, release, "buffer", "A/B slot"))
                if self.hopper and bs + 1 < self.steps:
                    # A warpgroup asks whether its last product is done once it has issued the next: with that one's k-step.
                    edges += self.landing(bt, bs + 1, f"{first}{t}_{s}", -lap, self.queued + self.arrive, "buffer", "A/B slot")  # fmt: skip
                if self.fresh_steps:
                    edges += [
                        Edge(f"order{t}_{s}", f"{copy}{t}_{s}", 0, 0.0, "data", "its turn") for copy in ("ask", "load")
                    ]
                elif self.in_turn:
                    edges.append(Edge(f"ask{t}_{s}", f"load{t}_{s}", 0, 0.0, "data", "its turn"))
        return edges

    def landing(self, t: int, s: int, to: str, distance: int, more: float, kind: EdgeKind, why: str) -> list[Edge]:
        """From a k-step's being there to what waits for it, ``more`` cycles later.

        What the memory sends is on its way at L2's rate meanwhile, so that the later of both counts; what L2 holds waits its turn there, and
        then for its way.
        """
        load = f"load{t}_{s}"
        if not self.fresh_steps:
            return [Edge(load, to, distance, max(0.0, self.latency - self.overlap) + more, kind, why)]
        way = self.latency + stage_bytes(self.v, self.gemm) / self.port
        return [Edge(load, to, distance, more, kind, why), Edge(f"ask{t}_{s}", to, distance, way + more, kind, why)]

    def tile_edges(self, t: int) -> list[Edge]:
        """Accumulator, C and D of one tile."""
        m, v = self.m, self.v
        edges = []
        for half in range(self.halves):
            ends = self.ends(half)
            edges.append(Edge(f"mma{t}_{self.steps - 1}{self.suffix(half)}", f"epilogue{t}{ends[0]}", 0, self.done(), "data", "accumulator"))  # fmt: skip
            if not (self.hopper or self.portable):
                edges.append(Edge(f"epilogue{t}{ends[-1]}", f"mma{t}_0", v.accumulators, self.arrive, "buffer", "accumulator free"))  # fmt: skip
            for part, end in enumerate(ends):
                edges += self.part_edges(t, part, end, ends)
        if self.tiles == 2 and self.hopper:
            begin = self.code.begin if self.code else 0.0
            edges.append(Edge(f"turn{1 - t}", f"mma{t}_0", 1 - t, self.notice + begin, "order", "turn"))
        if self.portable:
            # A CTA is one tile; the next one starts when it has ended.
            again = m.get("launch.cta_turnaround_cycles", m["launch.cta_start_cycles"])
            edges.append(Edge(f"epilogue{t}", f"load{t}_0", 1, again, "order", "next CTA"))
        return edges

    def part_edges(self, t: int, part: int, end: str, ends: list[str]) -> list[Edge]:
        """C and D of one range of columns; ``ends``: of all ranges of the same rows."""
        epilogue, store, load_c = (f"{name}{t}{end}" for name in ("epilogue", "store", "load_c"))
        edges = [Edge(epilogue, store, 0, 0.0 if self.portable else self.notice, "data", "D")]
        if self.gemm.adds_c:
            edges.append(Edge(load_c, epilogue, 0, self.c_latency_of(part), "data", "C"))
            begin, _ = self.line_of(part)
            if self.in_turn and begin != part:
                # The rest of its lines is there when their first part is.
                edges.append(Edge(f"load_c{t}{ends[begin]}", epilogue, 0, self.c_latency, "data", "C"))
            if self.in_turn:
                edges.append(Edge(f"ask_c{t}{end}", load_c, 0, 0.0, "data", "its turn"))
        if not self.portable:
            # Warpgroups that take turns have slots of their own, and a tile each in an iteration.
            lap, before = divmod(part - self.v.c_stages // self.tiles, len(ends))
            first = f"{self.ordered_by('load_c')}{t}{end}" if self.gemm.adds_c else epilogue
            edges.append(Edge(f"store{t}{ends[before]}", first, -lap, self.arrive, "buffer", "C/D slot"))
        return edges

    def c_latency_of(self, part: int) -> float:
        """Cycles from the order to copy a box of C to its being there: L2 asks the memory for whole lines, so that the range of
        columns that a line ends in finds it there."""
        return self.c_latency if self.line_of(part)[0] == part else self.m["tma.latency_l2_cycles"]
