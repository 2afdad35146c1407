"""What items cost around their loops, in cycles, where four warps multiply apart and programs take runs of splits until there are none.

Counts are those of the machine code that Triton 3.6 makes for sm_90a (`hopper_serve_d64_runs.py`, `_d128_`, `_d192_128_` and `_d256_`): code
with more than one instruction a warp on its way, so that warm it takes what the compiler says between them and not an ALU's latency each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilecast.model.compiled.units.fetch import far_cycles, near_cycles
from tilecast.model.kernel.workload import Workload
from tilecast.model.step.costs.around import COUNT_TRIPS, PARTIAL_BYTES, WARM, Around, Counts, Loops

#: Sequences that the load warp looks at together, where a batch has no more of them and where it has.
_FEW, _MANY = 32, 128
#: Instructions with which it works out how many programs are to take items.
_CHOICE, _CHOICE_OF_MANY = 1069, 1606


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsCounts(Counts):
    """Instructions of a warp; of some a number, and one for each column of V."""

    #: Of a program that takes one item after another: from an item's end until the next one's Q and facts are in registers; before and
    #: behind the loop over a split's blocks; for a group of splits; for results, or for what is left for others; rows of V that are cleared.
    told: int
    split: tuple[float, float]
    group: tuple[float, float]
    results: tuple[float, float]
    kept: int
    cleared: int
    #: Of a block, and of a merge of all splits of a group, of up to 4 rows and of 8.
    block: tuple[float, float]
    merges: tuple[int, int]
    #: Of the load warp for further sequences, whose lengths it looks at in turns: how many turns, and instructions of one.
    turns: int = 0
    turn: int = 391


#: Where a program first adds up the batch to know its share: 230 before its load warp begins, 669 and 272 until its first copy.
SHARES = RunsCounts(
    begin=230, plan=669, plan_barriers=0, set_up=272, finish=0, finish_barriers=0, merge_rows=0, merge_rows_barriers=0, merge_step=0,
    merge_step_barriers=0, merge_step_shuffles=0, merge_step_smem=0, merged_rows=(8, 8), merged=16, told=190, split=(144.0, 1.7),
    group=(35.0, 0.37), results=(160.0, 0.27), kept=170, cleared=166, block=(100.0, 1.1), merges=(905, 1500), load_block=131,
)  # fmt: skip
#: The same of more sequences.
_SHARES_OF_MANY = replace(SHARES, plan=1055, set_up=341)


def shares_of(sequences: int, half: bool = False, beside: bool = False) -> RunsCounts:
    """Where a launch has so many sequences, and keeps ``half`` of a tile's rows, for none has more; ``beside`` another one each program first works
    out how many of them are to take items."""
    found = SHARES if sequences <= _FEW else replace(_SHARES_OF_MANY, turns=-(-sequences // _MANY) - 1)
    if beside:
        found = replace(found, plan=found.plan + (_CHOICE if sequences <= _FEW else _CHOICE_OF_MANY))
    return replace(found, split=(90.0, 0.72), group=(29.0, 0.19), results=(85.0, 0.33), kept=157) if half else found


@dataclass(frozen=True, slots=True)
class AroundRuns(Around):
    """Cycles around the loops of a run of splits, by what happens."""

    counts: RunsCounts
    #: Share of merges that are the first on their SM.
    first_merges: float = 1.0

    def warm(self, *counts: int | float | tuple[float, float], columns: int = 0) -> float:
        """Instructions that have run before."""
        return WARM * self.count(*counts, columns=columns)

    def count(self, *counts: int | float | tuple[float, float], columns: int = 0) -> float:
        """Instructions, of so many columns of V."""
        return sum(x[0] + x[1] * columns if isinstance(x, tuple) else x for x in counts)

    def plan(self, cold: bool) -> float:
        """Lengths of all sequences are added up, twice, and those of the next ones come from memory."""
        again = self.warm(self.counts.turn) + self.machine["hbm.latency_cycles"]
        return super(AroundRuns, self).plan(cold) + self.counts.turns * again

    def set_up(self, page: int, cold: bool) -> float:
        """The item is told and the next one asked for, while its first pages are on their way."""
        m, c = self.machine, self.counts
        each = far_cycles(m) if cold else WARM
        # The warps that multiply fetch what they do with an item's facts meanwhile.
        looked_up = max(c.set_up * each + m["l2.latency_cycles"], m["hbm.latency_cycles"] if page else 0.0)
        return looked_up + (c.told * each if cold else 0.0)

    def counted_out(self) -> float:
        return COUNT_TRIPS * self.machine["l2.latency_cycles"]

    def next_item(self, page: int, fill: float, restart: float) -> float:
        """The load warp is an item ahead."""
        del page, fill, restart
        return self.warm(self.counts.told)

    def first_time(self, head_dim_v: int, loops: Loops) -> float:
        del loops
        c = self.counts
        count = self.count(c.split, c.group, c.results, c.block, c.cleared, columns=head_dim_v)
        return count * (far_cycles(self.machine) - WARM)

    def masked(self) -> float:
        """Rows of V without a key become zeros."""
        return self.warm(self.counts.cleared)

    def finish(self, head_dim_v: int, rows: int) -> float:
        del rows
        c = self.counts
        return self.warm(c.split, c.group, c.results, columns=head_dim_v)

    def hand_over(self, head_dim_v: int, rows: int) -> float:
        """Left, seen by all, counted in."""
        del rows
        c = self.counts
        stored = self.warm(c.split, c.group, c.kept, columns=head_dim_v)
        return stored + (1.0 + COUNT_TRIPS) * self.machine["l2.latency_cycles"]

    def join(self, head_dim_v: int, rows: int) -> float:
        """From one split of a run to the next."""
        del rows
        return self.warm(self.counts.split, columns=head_dim_v)

    def merge(self, splits: int, rows: int, workload: Workload, there: int) -> float:
        """All splits of a group at once, and then the groups; the first time on an SM that code comes from far, later from the next cache."""
        del there
        m, c = self.machine, self.counts
        many = rows > c.merged_rows[0] // 2
        at_once = c.merged_rows[0] // (1 if many else 2)
        pieces, groups = -(-rows // at_once), -(-splits // c.merged)
        code, near = c.merges[many], max(WARM, near_cycles(m))
        cycles = 0.0
        for level, members in enumerate((splits,) if groups == 1 else (c.merged, groups)):
            # That of groups has code of its own.
            cycles += code * (near + (1.0 if level else self.first_merges) * (far_cycles(m) - near) - WARM)
            back = members * rows * workload.head_dim_v * PARTIAL_BYTES / m["l2.bytes_per_clk_per_sm"]
            each = self.warm(code) + m["l2.latency_cycles"]
            cycles += pieces * each + back + COUNT_TRIPS * level * m["l2.latency_cycles"]
        return cycles
