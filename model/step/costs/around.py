"""What an item of a serving kernel costs around its loop, in cycles: starting, handing a split over, merging.

Counts are those of the machine code that Triton 3.6 makes for sm_90a at head_dim 128.  A program begins with nothing in the caches:
its instructions come from far the first time; later each mostly waits for the one before, as in the loop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilecast.model.compiled.units.fetch import far_cycles, near_cycles
from tilecast.model.kernel.variants.serving import DECODE_ROWS
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.softmax_cost import barrier_cycles

_REGISTERS_OF_MERGE, _MOST_MERGED = 32, 16


@dataclass(frozen=True, slots=True)
class Counts:
    """Instructions of a warp around the loop, and barriers of its warpgroup among them."""

    #: Until a program knows its item, and then until its first copy.
    plan: int
    plan_barriers: int
    set_up: int
    #: From the last block to the item's end.
    finish: int
    finish_barriers: int
    #: Of a merge: a turn of the loop over rows, a step of the loop over splits within.
    merge_rows: int
    merge_rows_barriers: int
    merge_step: int
    merge_step_barriers: int
    merge_step_shuffles: int
    #: Cycles that a step has the shared memory's port.
    merge_step_smem: int
    #: Rows merged at a time, of a tile that decodes and of one with more.
    merged_rows: tuple[int, int]
    #: Splits merged at a time; 0: as many as a thread has registers for.
    merged: int
    #: Instructions until those that multiply know a program's further items, whose blocks come meanwhile; 0: blocks are asked for then.
    ahead: int = 0
    #: Parts of columns that are merged apart, by whichever programs of the splits are there; 0: the last one merges all.
    merged_parts: int = 0
    #: Whether blocks come by the copy engine, by maps of the tensors.
    copied: bool = True
    #: Behind the first block's copies, until Q of up to 16 rows is asked for, and of more; not counted where Q is short.
    queries: tuple[int, int] = (0, 0)
    #: Before a program's roles part, and how often the load warp asks L2 for lengths again until it knows the first blocks.
    begin: int = 0
    lookups: int = 0
    #: Of a warpgroup between parts of an item's keys whose results L2 adds to those of the parts before, and, where programs
    #: have many parts, all that the first of them run through before their code is near: what is left, added, comes back.
    added: int = 0
    joined: int = 0
    #: Of a warpgroup until it knows again what it has done apart, and of a part of it that then joins.
    again: int = 0
    joined_later: int = 0
    #: Of other roles, until the load warp's first copy, each no more than that has: an SM fetches code of its own for each of them, at one
    #: rate for all.  And warpgroups with code of their own that come to an item's end at the same time.
    beside: int = 0
    finishers: int = 1
    #: Of a warpgroup's loop, which comes from far the first time, where that is counted.
    looped: int = 0
    #: Of the load warp for a block, beside its copies; 0: never what others wait for.
    load_block: int = 0
    #: Whether programs whose splits are one group know which parts each of them merges; else each is taken by a count of its own.
    shares: bool = False


#: Of the portable kernel; 75 accesses of four warps to shared memory a step of its merge, with bank conflicts of about four ways.
POINTERS = Counts(300, 5, 400, 370, 4, 250, 6, 375, 8, 6, 1200, (4, 16), 0, copied=False)
#: Of the kernels whose blocks come by the copy engine: the load warp finds items and their pages, the matrix warpgroup leaves what it
#: has, the third warpgroup merges 16 splits of 4 rows at a time (`tilecast inspect kernels/generated/hopper_serve_d128.py --arch sm_90a`).  What the
#: others run beside it is not counted: the clock read in this kernel leaves no room for that (docs/notes/forecast-accuracy.md).
COPY_ENGINE = Counts(269, 1, 299, 250, 4, 0, 0, 264, 6, 0, 0, (4, 4), 16, 320)
#: The same at 256 columns (`hopper_serve_d256.py`), whose load warp copies Q of 64 rows before a block's keys, by threads: 182 instructions until roles
#: part, 1335 of it until its first copy, 630 of the matrix warpgroup beside, 620 in the loop of that and 620 behind it.
COPY_ENGINE_WIDE = replace(COPY_ENGINE, begin=182, plan=123, set_up=1212, beside=630, looped=620, finish=620)
#: The same for e4m3 caches (`hopper_serve_d128_e4m3.py`): Q becomes float16 before the first block, and sums of the warps meet in shared
#: memory after the last.
COPY_ENGINE_E4M3 = Counts(264, 1, 286, 419, 12, 0, 0, 264, 6, 0, 0, (4, 4), 16, 647)
#: The same where each warp multiplies 16-bit tiles for itself and those warps also merge (`hopper_serve_d128_runs.py`): where each split has a program.
#: Of several queries the load warp has 121 instructions more.
COPY_ENGINE_RUNS = Counts(150, 1, 163, 320, 5, 0, 0, 810, 2, 0, 0, (8, 8), 16, begin=38, looped=395, load_block=131)
COPY_ENGINE_SEVERAL = 121
#: And where launches keep half of a tile's rows, for no sequence has more.
COPY_ENGINE_HALF_RUNS = replace(COPY_ENGINE_RUNS, finish=217, looped=313)
#: Of the latent kernel (`hopper_mla_d576_512.py`): a turn of its merge has 8 splits of 4 rows, and half of the columns.  Until the load
#: warp's first copy, 431 instructions, the warpgroups run as many and 401, the one that merges 238; between parts 590 and 460.
LATENT = Counts(
    198, 1, 186, 706, 6, 140, 3, 661, 0, 0, 0, (4, 4), 8, 224, merged_parts=2, queries=(68, 627), begin=335, added=527, joined=776,
    beside=1070, finishers=2,
)  # fmt: skip
#: The same where programs share all splits in runs: 848 instructions from the load warp's first to its first copy, as many of both
#: warpgroups; and what they run through once more for splits that were done apart.
LATENT_RUNS = replace(LATENT, plan=600, set_up=248, lookups=3, beside=1696, again=665, joined_later=430)
#: And where tiles have few rows: each split mostly has a program of its own, 225 instructions of the load warp from its begin to its first
#: copy, 100, 196 and 100 of the others until then, and at its end each warpgroup has a quarter of what it has of 64 rows; it merges a fourth of the
#: columns of some rows.  The first block goes through three loops, one after the other: 257 instructions of scores, 136 of the softmax, 295 of O.
LATENT_TURNED = replace(
    LATENT, plan=120, set_up=105, begin=160, beside=396, finish=190, looped=688, merge_rows=100, merge_step=450, merged_parts=4, shares=True,
)  # fmt: skip
PARTIAL_BYTES = 4
#: Cycles from one warm instruction to the next, of code with more than one on its way: stalls in the control words, and waits for results in registers.
WARM = 2.4
#: Bytes of a row of a box.
BOX_BYTES = 128
#: Rows of an accumulator that a warp has.
WARP_ROWS = 16
#: Of L2's latency: a count in memory with its release and acquire (1,300 cycles by the clock read in the decode kernel, docs/notes/serving-kernels.md).
COUNT_TRIPS = 4.0


def _of_warps(rows: int) -> int:
    """Rows of the warps that have some of ``rows``."""
    return -(-rows // WARP_ROWS) * WARP_ROWS


@dataclass(frozen=True, slots=True)
class Loops:
    """Shares of items that run through a loop over blocks: at the diagonal, over whole ones, at a window's left edge."""

    diagonal: float = 1.0
    whole: float = 1.0
    left: float = 0.0


@dataclass(frozen=True, slots=True)
class Around:
    """Cycles around the loop of an item, by what happens."""

    machine: Machine
    counts: Counts
    #: Rows of a tile, and warps of a program of the portable kernel, whose registers hold what is merged at a time.
    tile_m: int
    warps: int = 4
    most_splits: int = 128
    #: The SMs' clock, beside which L2 keeps its own.
    mhz: float = 0.0
    #: Whether no program has two items: what comes behind its loop runs for the first time, too.
    once: bool = False

    @property
    def merged_rows(self) -> int:
        """Rows merged at a time: those of one query of most models, and more where a tile has more."""
        return self.counts.merged_rows[self.tile_m > DECODE_ROWS]

    def merged_splits(self, head_dim_v: int) -> int:
        """Splits merged at a time."""
        if self.counts.merged:
            return self.counts.merged
        fitting = _REGISTERS_OF_MERGE * 32 * self.warps // (self.merged_rows * head_dim_v)
        return 1 << max(0, min(fitting, self.most_splits, _MOST_MERGED).bit_length() - 1)

    def instructions(self, count: float, barriers: int, cold: bool = False, roles: int = 1) -> float:
        """``count`` instructions in a row, with barriers behind which warps read what others wrote; cold ones of so many ``roles`` at the
        same time, each with code of its own, share the rate at which an SM fetches code."""
        m = self.machine
        each = m["alu.latency_cycles"]
        if cold:
            each = max(each, far_cycles(m) * roles)
        barrier = barrier_cycles(m) + m.get("sync.barrier_spread_cycles", 0.0) + m["smem.latency_cycles"]
        return count * each + barriers * barrier

    def plan(self, cold: bool) -> float:
        """Until a program knows its item: lengths of all sequences, added up."""
        lengths = self.machine["hbm.latency_cycles" if cold else "l2.latency_cycles"]
        again = self.counts.lookups * self.machine["l2.latency_cycles"]
        c = self.counts
        beside = c.beside * far_cycles(self.machine) if cold else 0.0
        return self.instructions(c.begin + c.plan, c.plan_barriers, cold) + beside + lengths + again

    def counted_out(self) -> float:
        """Until a program that finds nothing is counted, where the last one of them sets the counters back."""
        return 0.0

    def set_up(self, page: int, cold: bool) -> float:
        """Until an item's first copy is issued: its lengths again, then the numbers of its first pages."""
        lookup = self.machine["hbm.latency_cycles"] if page else 0.0
        return self.instructions(self.counts.set_up, 1, cold) + self.machine["l2.latency_cycles"] + lookup

    def maps(self) -> float:
        """Until the first program's copy engine knows the tensors: their maps are in no cache."""
        return self.machine["tma.latency_hbm_cycles"] if self.counts.copied else 0.0

    def queries(self, rows: int, several: bool) -> float:
        """From a program's first copy until Q of its first item is there: one warp copies ``several`` queries, behind the first block, and
        the copy engine one."""
        count = self.counts.queries[rows > WARP_ROWS] if several else 0
        return self.instructions(count, 0, True) + self.machine["hbm.latency_cycles"] if count else 0.0

    def next_item(self, page: int, fill: float, restart: float) -> float:
        """Until an item that follows another one has its first block, ``fill`` cycles after its first copy is issued; of one whose blocks are
        there its loop takes ``restart`` beyond a period for each block."""
        del restart
        if self.counts.ahead:
            return self.instructions(self.counts.ahead, self.counts.plan_barriers)
        return self.set_up(page, False) + fill

    def finish(self, head_dim_v: int, rows: int) -> float:
        """After the last block of an item of so many rows that is whole."""
        # Four threads of a row store 16 bytes at a time: half of what each of L2's sectors takes, so 16-bit results take as long as float32.
        stored = self.left(head_dim_v, _of_warps(rows)) if self.counts.added else 0.0
        return self.ended(head_dim_v) + self.machine["l2.latency_cycles"] + stored

    def ended(self, head_dim_v: int) -> float:
        """Instructions behind the last block."""
        del head_dim_v
        return self.instructions(self.counts.finish, self.counts.finish_barriers, self.once, self.counts.finishers)

    def hand_over(self, head_dim_v: int, rows: int) -> float:
        """After the last block of a split of so many rows: stored, seen by all, counted in."""
        stored = self.left(head_dim_v, rows) if self.counts.merged_parts else 0.0
        return self.ended(head_dim_v) + 2.0 * self.machine["l2.latency_cycles"] + stored

    def left(self, head_dim_v: int, rows: int) -> float:
        """O of so many rows on its way to L2, while all SMs leave theirs: programs come to the end of a split together."""
        m = self.machine
        port = m["tma.store_bytes_per_clk"]
        if m.has("l2.store_tbps"):
            port = min(port, m.bytes_per_clk(m["l2.store_tbps"], self.mhz or m["chip.clock_max_mhz"]))
        return rows * head_dim_v * PARTIAL_BYTES / port

    def back(self, head_dim_v: int, rows: int, keys: float) -> float:
        """O of so many rows on its way from L2, beside ``keys`` bytes of the next part's first blocks, which take half of the port."""
        mine = rows * head_dim_v * PARTIAL_BYTES
        return (mine + min(mine, keys)) / self.machine["l2.bytes_per_clk_per_sm"]

    def join(self, head_dim_v: int, rows: int) -> float:
        """Between parts of an item that a program takes in one after the other: half of what it has leaves under the next part's first
        scores, and L2 adds it to what waits."""
        return self.left(head_dim_v, _of_warps(rows)) / 2.0 + self.adding() if self.counts.added else 0.0

    def adding(self) -> float:
        """Instructions with which what a part has leaves, and a message between the warpgroups.

        With the loops' own they are more than the first instruction cache holds: each time they come from the next one.
        """
        m, c = self.machine, self.counts
        return c.added * max(4.0 / m["issue.warp_inst_per_clk"], near_cycles(m) * c.finishers) + m["l2.latency_cycles"]

    def join_first(self) -> float:
        """What of joining runs for the first time, beyond what it takes then."""
        c = self.counts
        return self.instructions(c.joined, 0, True, c.finishers) - self.instructions(c.joined, 0)

    def join_again(self) -> float:
        """From a program's last block until it knows what it has done apart."""
        c = self.counts
        return self.instructions(c.again, 1, True, c.finishers) + c.lookups * self.machine["l2.latency_cycles"]

    def join_on(self) -> float:
        """From one program that joins what it has done apart to the next, whose code for that has not run yet: a word in memory, seen."""
        c = self.counts
        seen = COUNT_TRIPS * self.machine["l2.latency_cycles"]
        return self.instructions(c.joined_later, 0, True, c.finishers) + seen

    def join_ends(self, head_dim_v: int, rows: int, keys: float) -> float:
        """What joins of a tile take beyond one for each but its first part: with the last one all comes back."""
        if not self.counts.added:
            return 0.0
        whole = _of_warps(rows)
        return max(0.0, self.back(head_dim_v, whole, keys) - self.left(head_dim_v, whole) / 2.0)

    def join_later(self, head_dim_v: int, rows: int) -> float:
        """A part that was done apart joins those before it, which are in registers: it comes back."""
        if not self.counts.added:
            return 0.0
        return self.back(head_dim_v, _of_warps(rows), 0.0) + self.adding()

    def first_time(self, head_dim_v: int, loops: Loops) -> float:
        """What a program's first item takes beyond others where code of loops is fetched, too."""
        del head_dim_v, loops
        return self.counts.looped * far_cycles(self.machine)

    def masked(self) -> float:
        """Of a block that crosses an edge of the mask or the end of the keys, beyond others, beside what its loop takes."""
        return 0.0

    def hidden(self, head_dim_v: int) -> float:
        """Of what is around an item's loop, what other warpgroups may multiply beside."""
        del head_dim_v
        return 0.0

    def take_item(self) -> float:
        """From the question for an item until it is said what that is, where one warp takes items for others; 0: never what others wait for."""
        return 0.0

    def load_item(self, page: int) -> float:
        """From then until the first block of an item is there; 0: never what others wait for."""
        del page
        return 0.0

    def load_queries(self, head_dim_qk: int) -> float:
        """From then until its Q is there; 0: never what others wait for."""
        del head_dim_qk
        return 0.0

    def load_block(self, page: int, tile_n: int, row_bytes: int) -> float:
        """Between blocks of the load warp, whose boxes are of a page and 128 of the bytes that K and V have for a key; 0: never what others wait for.
        A copy takes what it took where copies with as many instructions between them were timed."""
        boxes = -(-row_bytes // BOX_BYTES) * (tile_n // min(page, tile_n) if page else 1)
        count = self.counts.load_block
        return count * self.each_loaded() + boxes * self.machine["tma.issue_cycles"] if count else 0.0

    def each_loaded(self) -> float:
        """Cycles of an instruction of the load warp's loop, where no other warp has many."""
        return WARM

    def merge(self, splits: int, rows: int, workload: Workload, there: int) -> float:
        """Merging a tile's splits in their order, some rows and some splits at a time, with ``there`` programs on the SM."""
        m, c = self.machine, self.counts
        step = self.instructions(c.merge_step, c.merge_step_barriers) + m["l2.latency_cycles"]
        step += c.merge_step_shuffles * m["shuffle.latency_cycles"] + c.merge_step_smem * there
        turn = self.instructions(c.merge_rows, c.merge_rows_barriers)
        first = self.instructions(c.merge_rows + c.merge_step, 0, self.once) - self.instructions(
            c.merge_rows + c.merge_step, 0
        )
        pieces, at_once = -(-rows // self.merged_rows), self.merged_splits(workload.head_dim_v)
        groups = -(-splits // at_once)
        if not c.merged:
            return m["l2.latency_cycles"] + first + pieces * (turn + groups * step)
        # Splits of a group are merged by their programs, groups side by side, and the groups then by those of all.
        cycles = first
        levels = ((splits, splits),) if groups == 1 else ((at_once, at_once), (groups, splits))
        for level, (members, programs) in enumerate(levels):
            turns, counted = float(pieces), float(level)
            if c.merged_parts:
                taken = -(-pieces * c.merged_parts // min(pieces * c.merged_parts, programs))
                turns, counted = taken / c.merged_parts, 1.0 if c.shares and groups == 1 else taken + 2.0
            steps = -(-members // at_once)
            cycles += (1.0 + COUNT_TRIPS * counted) * m["l2.latency_cycles"] + turns * (turn + steps * step)
        return cycles + (COUNT_TRIPS * m["l2.latency_cycles"] if c.merged_parts else 0.0)
