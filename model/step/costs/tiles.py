"""What a tile costs around its loops, in cycles, in kernels that prefill: their load warp copies tile after tile, while warpgroups with code
of their own multiply.

Counts are those of the machine code that Triton 3.6 makes for sm_90a.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilecast.model.compiled.units.fetch import far_cycles, near_cycles
from tilecast.model.kernel.variants.hopper.prefill import JOIN_AHEAD, JOIN_COLUMNS, PLANNED
from tilecast.model.kernel.workload import Workload
from tilecast.model.pipeline.softmax_cost import barrier_cycles
from tilecast.model.step.costs.around import COUNT_TRIPS, PARTIAL_BYTES, WARP_ROWS, Around, Counts, Loops

#: Of the launch that merges parts (`attention_join` of `hopper_prefill_d128.py`): instructions from the end of the launch before until the first
#: parts are asked for, and of results; of a round of parts, and of each; programs of an SM.
_JOIN_ENDS, _JOIN_ROUND, _JOIN_PART, _JOIN_PROGRAMS = 190, 270, 50, 2
#: Columns of Q that a thread copies at a time.
_COLUMNS = 64
#: Instructions of a warpgroup beside the load warp's first.
_BESIDE = 289


@dataclass(frozen=True, slots=True, kw_only=True)
class TileCounts(Counts):
    """Instructions of a warpgroup for a tile, beside its loops, and of the loops; a number, and one for each column of V."""

    item: tuple[float, float]
    #: Of the loops over blocks at the diagonal, at a window's left edge and over whole ones.
    diagonal: tuple[float, float]
    left: tuple[float, float]
    whole: tuple[float, float]
    #: Of the warp that takes tiles: for up to `PLANNED` sequences whose lengths it looks at together, how often it goes through all of them, and
    #: from the answer to its question for a tile until it has said what that is; beside that for 16 rows of its Q and each 64 columns of those.
    lap: int
    laps: int = 1
    take_item: int
    load_rows: int
    load_piece: int
    #: Of the warp that copies K and V, for a tile.
    load_item: int
    #: Sequences that the first warp looks at.
    sequences: int = 1
    #: Of a warpgroup for a tile beside that for a part of it, and whether that stays in registers from one part of its keys to the next.
    around_parts: int = 0
    kept: bool = False
    #: How long its loop takes by columns of Q and K, as a share of that of the kernel that does not part keys.
    loops: tuple[tuple[int, float], ...] = ()

    def loop(self, head_dim_qk: int) -> float:
        """Of heads with so many columns."""
        return dict(self.loops).get(head_dim_qk, 1.0)

    def of_one_part(self) -> TileCounts:
        """Of tiles of one part, which warpgroups do as where no sequence has more, though the load warp looks whether it has."""
        return replace(self, around_parts=0, loops=())


#: At 64, 128 and 256 columns of V (`tilecast inspect` of `hopper_prefill_d64.py`, `_d128.py`, `_d256.py`: 931, 1124
#: and 1490 instructions a tile; 414, 477 and 640 in the loop at the diagonal, 330, 361 and 466 at a window's left edge, 186, 217 and 320 in
#: that over whole blocks; 85, 105 and 129 for 16 rows of Q of 128, 192 and 256 columns; of the warp that copies K and V 145 a block beside 8 for each box), and where keys are
#: parted 670 more of a warpgroup.  At 128 (`_d128.py`): 254 until the roles part, 205 of the warp that takes tiles until it has said what the first
#: is, 189 of the one that copies K and V from then on to the first copy; where keys are parted 220, 462 and 222.
PREFILL = TileCounts(
    begin=254, plan=205, plan_barriers=1, set_up=189, finish=0, finish_barriers=4, merge_rows=0, merge_rows_barriers=0,
    merge_step=264, merge_step_barriers=2, merge_step_shuffles=0, merge_step_smem=0, merged_rows=(64, 64), merged=1, ahead=320,
    item=(750.0, 2.9), diagonal=(330.0, 1.2), left=(285.0, 0.7), whole=(150.0, 0.67),
    lap=72, take_item=165, load_rows=42, load_piece=22, load_item=189, load_block=145,
)  # fmt: skip
#: Where keys are parted, and parts are dealt out, or those of a tile are taken in one after the other beside such as are dealt out: other
#: compilations of the file, which spill 8 to 240 bytes (`tilecast forecast` of each on an H200: 1206, 1674 and 1230 cycles a block of 64 keys at
#: head_dim 64, 1156, 1141 and 1269 at 128, 1358, 1554 and 1712 at 192/128, 4207, 4218 and 4263 at 256).
PARTED = replace(
    PREFILL, begin=220, plan=462, set_up=222, lap=230, take_item=256, load_item=222, around_parts=670, loops=((64, 1674 / 1206), (128, 1141 / 1156), (192, 1554 / 1358), (256, 4218 / 4207))
)  # fmt: skip
#: Of one warpgroup at 256 columns, whose parts a launch of its own merges: 717 instructions behind the last product for 612.
AROUND_PARTS_ASIDE = 105
CHAINED = replace(PARTED, loops=((64, 1230 / 1206), (128, 1269 / 1156), (192, 1712 / 1358), (256, 4263 / 4207)))


def of_warpgroups(counts: TileCounts, count: int) -> TileCounts:
    """Of a kernel with so many warpgroups."""
    return replace(counts, finishers=count, beside=_BESIDE * count)


@dataclass(frozen=True, slots=True)
class AroundTiles(Around):
    """Cycles around the loops of a tile, or of a part of its keys, by what happens."""

    counts: TileCounts

    def plan(self, cold: bool) -> float:
        """Lengths are looked at some sequences at a time, of which all but the first come by code that is there."""
        c, m = self.counts, self.machine
        laps = c.laps * -(-c.sequences // PLANNED)
        again = c.lap * m["alu.latency_cycles"] + m["l2.latency_cycles"]
        return super(AroundTiles, self).plan(cold) + (laps - 1) * again

    def counted_out(self) -> float:
        return COUNT_TRIPS * self.machine["l2.latency_cycles"]

    def next_item(self, page: int, fill: float, restart: float) -> float:
        """The load warp is a tile ahead: `load_item` says where it is not."""
        del page, fill
        return restart

    def ended(self, head_dim_v: int) -> float:
        """Behind the last block and before the next loop: that code comes from the next cache, for the loops fill the first one."""
        c = self.counts
        return self.instructions(0, c.finish_barriers) + self.part(head_dim_v) + c.around_parts * self.near()

    def part(self, head_dim_v: int) -> float:
        """Instructions of a tile, or of a part of its keys, around the loops."""
        return (self.counts.item[0] + self.counts.item[1] * head_dim_v) * self.near()

    def near(self) -> float:
        """Of an instruction of code that loops have put out of the first cache, while other warpgroups fetch their own."""
        return max(self.machine["alu.latency_cycles"], near_cycles(self.machine) * self.counts.finishers)

    def hidden(self, head_dim_v: int) -> float:
        return self.ended(head_dim_v) if self.counts.finishers > 1 else 0.0

    def first_time(self, head_dim_v: int, loops: Loops) -> float:
        """Code of the warpgroups comes from far, that of loops too."""
        c = self.counts
        parts = ((1.0, c.item), (loops.whole, c.whole), (loops.diagonal, c.diagonal), (loops.left, c.left))
        count = sum(share * (number + each * head_dim_v) for share, (number, each) in parts) + c.around_parts
        fetched = count * c.finishers - c.beside
        return fetched * far_cycles(self.machine) - self.part(head_dim_v) - c.around_parts * self.near()

    def take_item(self) -> float:
        """From the question for a tile, a count in memory, until it is said what that is."""
        return self.counts.take_item * self.machine["alu.latency_cycles"] + 2.0 * self.machine["l2.latency_cycles"]

    def load_item(self, page: int) -> float:
        """Pages of a tile that is known are looked up, and its first block is copied."""
        m = self.machine
        lookup = m["hbm.latency_cycles"] if page else 0.0
        return self.counts.load_item * m["alu.latency_cycles"] + lookup + m["tma.latency_hbm_cycles"]

    def load_queries(self, head_dim_qk: int) -> float:
        """Q of a tile that is known is copied by threads, 16 rows at a time."""
        c, m = self.counts, self.machine
        rows = -(-self.tile_m // WARP_ROWS) * (c.load_rows + c.load_piece * -(-head_dim_qk // _COLUMNS))
        return rows * m["alu.latency_cycles"] + m["hbm.latency_cycles"]

    def each_loaded(self) -> float:
        return float(self.machine["alu.latency_cycles"])

    def hand_over(self, head_dim_v: int, rows: int) -> float:
        """A warpgroup leaves and merges whole tiles of its rows, one part after the other."""
        del rows
        return self.ended(head_dim_v) + 2.0 * self.machine["l2.latency_cycles"] + self.whole_tile(head_dim_v)

    def whole_tile(self, head_dim_v: int) -> float:
        """O of a tile through this SM's port of the L2 cache."""
        return self.tile_m * head_dim_v * PARTIAL_BYTES / self.machine["l2.bytes_per_clk_per_sm"]

    def join(self, head_dim_v: int, rows: int) -> float:
        """What a tile has so far is left, or stays in registers, and is merged; that runs through most of a tile's code."""
        del rows
        m, c = self.machine, self.counts
        merged = c.merge_step / m["issue.warp_inst_per_clk"] * 4 + c.merge_step_barriers * barrier_cycles(m)
        merged += self.part(head_dim_v)
        # What is left is on its way while the next part's first blocks are multiplied.
        return merged if c.kept else self.whole_tile(head_dim_v) + merged + m["l2.latency_cycles"]

    def joined(self, parts: int, tiles: int, left_rows: int, head_dim_v: int) -> float:
        """Of the launch that merges up to ``parts`` parts of each of ``tiles`` tiles, which programs have left ``left_rows`` rows of, from the
        end of the one before on: its programs have found their tiles by then."""
        m, rounds = self.machine, -(-(parts - 1) // JOIN_AHEAD)
        programs = tiles * self.counts.finishers * (head_dim_v // JOIN_COLUMNS)
        at_once = min(programs, _JOIN_PROGRAMS * int(m["chip.sm_count"]))
        of_round = _JOIN_ROUND + JOIN_AHEAD * _JOIN_PART
        first = (_JOIN_ENDS + of_round) * far_cycles(m) + m["l2.latency_cycles"]
        later = of_round * m["alu.latency_cycles"] + m["l2.latency_cycles"]
        moved = (
            left_rows
            * (head_dim_v + 2)
            * PARTIAL_BYTES
            / (min(at_once, int(m["chip.sm_count"])) * m["l2.bytes_per_clk_per_sm"])
        )
        # That the launch before has ended goes through the memory.
        seen = 2.0 * m["l2.latency_cycles"]
        return seen + max(moved, first + (-(-programs // at_once) * rounds - 1) * later)

    def merge(self, splits: int, rows: int, workload: Workload, there: int) -> float:
        """Part after part comes back, whole."""
        del rows, there
        one = self.whole_tile(workload.head_dim_v) + self.machine["l2.latency_cycles"] + self.counts.merge_step
        return splits * one
