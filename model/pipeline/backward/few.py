"""A backward of few query rows as `triton_few_bwd` writes it: all rows of a key/value head stay, one pass over the keys, five products.

Programs have a part of the keys each.  Of a step's keys S^T = K Q^T and dP^T = V dO^T are made, dV and dK leave for memory at once, and
dQ^T = K^T dS^T stays in registers until the part is over; a second launch adds the parts up.  So to a program the problem is one of as many
sequences as there are parts, whose keys are a part's.

Where a program has all keys and walks over rows it is the same with both changed over (`changed_over`), in one part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from tilecast.model.kernel.variants.hopper.few_backward import (
    FewBackwardVariant,
    changed_over,
    columns,
    registers,
    rows_of,
    shared_bytes,
    tile_rows,
)
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.machine.occupancy import ctas_that_fit
from tilecast.model.pipeline import softmax_cost as common
from tilecast.model.pipeline.backward import kernels
from tilecast.model.pipeline.backward.arithmetic import differences, probabilities, step_work
from tilecast.model.pipeline.backward.parts import part_keys
from tilecast.model.pipeline.backward.warps import WARPS, Warpgroups
from tilecast.model.pipeline.fa2 import AHEAD_OF_QK_CYCLES, BEHIND_PV_CYCLES
from tilecast.model.pipeline.fa3 import arithmetic, product
from tilecast.model.pipeline.graph import Buffer, Edge, Op, Pipeline, Role, Step, of_tile
from tilecast.model.pipeline.hopper.order import ROWS

#: Instructions of a warp and step that are neither products nor softmax, counted in the machine code of what ships with 16 to 128 rows
#: (Triton 3.6): on the ALU and the FMA pipe for each 16 bytes that a thread copies (addresses and bounds, of stores too), on the ALU for
#: each score (is there a key), others: whatever it has, and for each product (descriptors).
_PIECE, _SCORE, _OTHERS = (15.0, 5.5), 1.75, (10.0, 3.3)
#: Barriers of a step: of dS, and before and behind what changes layout, which more than 128 columns do in three rounds.
_BARRIERS, _ROUNDS = 3, 3
#: Instructions of a program ahead of its loop, of the loop, and behind it, counted likewise: whatever it has; for each element of Q, dO and O
#: that a thread has, and row; for each product, piece and score; for each element of dQ.
_AHEAD, _LOOP, _BEHIND = (535.0, 5.9, 8.0), (90.0, 4.0, 19.0, 7.2), (70.0, 4.1)
#: The same of the launch that adds parts up, ahead and for each sixteen of them, whose loads share so few registers that they wait for
#: memory five times, one after the other.
_SUM, _SUM_PARTS, _SUM_WAITS = (130.0, 330.0), 16, 5
#: Registers of a thread beside sums and score tiles, of which addresses take many, and the most it can have.
_OTHER_REGISTERS, _MOST_REGISTERS = 96, 255
#: Bytes of a warp instruction that copies or stores 16 bytes a lane.
_LANE_BYTES = 512
_PRODUCTS = ("s", "dp", "dv", "dk", "dq")


def build(workload: Workload, variant: FewBackwardVariant, machine: Machine) -> kernels.BackwardPass:
    """The launches of ``variant``; legality is the caller's business."""
    v, w = changed_over(variant, workload)
    keys = part_keys(
        w.heads_kv, rows_of(w), w.seqlen_k, v.tile_n, columns(w.head_dim_qk), int(machine["chip.sm_count"])
    )
    parts = 1 if variant.step else -(-w.seqlen_k // keys)
    rows, wide = rows_of(w), w.head_dim_qk + w.head_dim_v
    seen = replace(
        w,
        batch=w.batch * parts,
        heads_q=w.heads_kv,
        seqlen_q=rows,
        seqlen_k=-(-w.seqlen_k // parts),
        mask="none",
        window=None,
    )
    # K and V come and dK and dV go, once.
    row = 2 * wide * w.dtype_bytes
    main = kernels.LoopKernel(
        "gradients", "queries", _pipeline(w, v, machine, parts), 2.0 * (3 * w.head_dim_qk + 2 * w.head_dim_v),
        step_bytes=v.tile_n * row, row_bytes=row, problem=seen, instructions=instructions(w, v),
    )  # fmt: skip
    if parts == 1:
        return kernels.BackwardPass((main,))
    elements = float(w.batch * w.heads_kv * rows * w.head_dim_qk)
    rounds = -(-parts // _SUM_PARTS)
    added = kernels.RowKernel(
        "sum of dQ", parts * elements * kernels.FLOAT, elements * w.dtype_bytes, instructions=sum(_SUM),
        again=(rounds - 1) * _SUM[1], waits=rounds * _SUM_WAITS - 1,
    )  # fmt: skip
    return kernels.BackwardPass((main, added))


def instructions(workload: Workload, variant: FewBackwardVariant) -> tuple[float, float, float]:
    """Instructions of a program ahead of its loop, in it, and behind it."""
    w, v, rows, threads = workload, variant, tile_rows(workload), 32 * variant.warps
    d, dv = columns(w.head_dim_qk), columns(w.head_dim_v)
    held, summed = rows * (d + 2 * dv) / threads, d * rows / threads
    loop = _Warpgroup.counted(w, v)
    return (
        _AHEAD[0] + _AHEAD[1] * held + _AHEAD[2] * rows,
        _LOOP[0] + _LOOP[1] * loop.products + _LOOP[2] * loop.pieces + _LOOP[3] * loop.scores,
        _BEHIND[0] + _BEHIND[1] * summed,
    )


def ctas_per_sm(variant: FewBackwardVariant, workload: Workload, machine: Machine) -> int:
    """CTAs that an SM holds by its shared memory, registers and warps."""
    each = min(_MOST_REGISTERS, registers(variant, workload) + _OTHER_REGISTERS)
    return ctas_that_fit(machine, shared_bytes(variant, workload), each, variant.warps)


def _pipeline(w: Workload, v: FewBackwardVariant, m: Machine, parts: int) -> Pipeline:
    """The loop of the programs of one SM, which do not keep step."""
    groups, programs = v.warps // WARPS, w.batch * w.heads_kv * parts
    # Programs go to SMs that have none before they share one.
    ctas = min(ctas_per_sm(v, w, m), -(-programs // int(m["chip.sm_count"])))
    loops = [_Warpgroup(w, v, m, s, programs) for s in range(ctas * groups)]
    ops, rows = loops[0].ops(), rows_of(w)
    d, dv, size = w.head_dim_qk, w.head_dim_v, w.dtype_bytes
    owned = rows * (d + 2 * dv) * size
    written = rows * d * (size if parts == 1 else kernels.FLOAT)
    return Pipeline(
        name=f"few queries backward, {rows} rows x {v.tile_n} {v.warps} warps, {ctas} CTA/SM", machine=m.name,
        ops=tuple(of_tile(op, s) for s in range(len(loops)) for op in ops),
        edges=tuple(edge for loop in loops for edge in loop.edges()),
        roles=tuple(role for loop in loops for role in loop.roles()),
        buffers=(
            Buffer("Q, dO", "smem", tile_rows(w) * (columns(d) + columns(dv)) * size * ctas, 1, "", "s0"),
            Buffer("K, V", "smem", v.tile_n * (columns(d) + columns(dv)) * size * ctas, v.stages, "load_k0", "s0"),
            Buffer("dS", "smem", v.tile_n * tile_rows(w) * size * ctas, 1, "share0", "dq0"),
        ),
        rows_per_cta=tile_rows(w), keys_per_iteration=v.tile_n, ctas_per_sm=ctas,
        # Rows are there before the first keys are asked for.
        prologue_cycles=m["launch.cta_start_cycles"] + m["tma.latency_hbm_cycles"],
        epilogue_cycles=written / m["smem.bytes_per_clk"] + m["l2.latency_cycles"],
        edge_read_bytes=owned, edge_write_bytes=written, tiles_overlap=False,
        mask_demand=tuple((f"exp{s}", common.mask_work(m, loops[0].elements * 2.0)) for s in range(len(loops))),
    )  # fmt: skip


class _Step(NamedTuple):
    """What a thread of a program does in a step, in instructions of its warp: products, copies of 16 bytes, scores."""

    products: float
    pieces: float
    scores: float


class _Warpgroup(Warpgroups):
    """A warpgroup of one program: its share of the rows of every product.

    Of 64 keys two warpgroups have half of the columns of dV and dK each, and both all of the scores, which those are made from.
    """

    def __init__(self, w: Workload, v: FewBackwardVariant, m: Machine, index: int, programs: int) -> None:
        super().__init__(w, m)
        #: Bytes a clock that memory has for an SM.
        self.share = m.bytes_per_clk(m["hbm.tbps_achieved"], m.rated_mhz) * max(1.0, m["chip.sm_count"] / programs)
        self.v, self.s, self.role = v, index, f"warps{index}"
        self.groups = v.warps // WARPS
        self.rows = tile_rows(w)
        #: Warpgroups that the keys of a step are divided among.
        self.apart = min(self.groups, v.tile_n // ROWS)
        #: Elements of its part of a score tile.
        self.elements = float(v.tile_n * self.rows) / self.apart
        # K and V are read once, so they come from memory.
        self.landed = m["tma.latency_hbm_cycles"]

    @staticmethod
    def counted(w: Workload, v: FewBackwardVariant) -> _Step:
        """Instructions of a step that go by its tiles."""
        rows, d, dv = tile_rows(w), columns(w.head_dim_qk), columns(w.head_dim_v)
        groups = v.warps // WARPS
        apart = min(groups, v.tile_n // ROWS)
        halves, keys = groups // apart, v.tile_n / ROWS / apart
        deep = 16.0
        scores = keys * halves * (d + dv) / deep
        sums = 2.0 * keys * max(1.0, rows / deep)
        queries = d / ROWS / groups * v.tile_n / deep
        pieces = v.tile_n * (d + dv) * w.dtype_bytes / 16.0 / (32 * v.warps)
        return _Step(scores + sums + queries, pieces, v.tile_n * rows / (128.0 * apart))

    def mma(self, name: str) -> Op:
        """One product of a step: keys down, but of dQ^T columns."""
        w, v, rows = self.w, self.v, self.rows
        d, dv = columns(w.head_dim_qk), columns(w.head_dim_v)
        down, n, k, home = {
            "s": (v.tile_n, rows, d, "smem"), "dp": (v.tile_n, rows, dv, "smem"), "dv": (v.tile_n, dv, rows, "register"),
            "dk": (v.tile_n, d, rows, "register"), "dq": (d, rows, v.tile_n, "smem"),
        }[name]  # fmt: skip
        halves = self.groups // self.apart
        if name != "dq":
            # Where keys are not divided columns are: of scores each warpgroup makes all, one half after the other.
            n //= halves
        one = product(w, self.m, f"{name}{self.s}", name, self.role, self.s, n, k, home)
        tiles = down / ROWS / (self.groups if name == "dq" else self.apart) * (halves if name in ("s", "dp") else 1)
        return one._replace(
            demand=tuple((unit, tiles * cycles) for unit, cycles in one.demand), min_cycles=tiles * one.min_cycles,
            issue_cycles=tiles * one.issue_cycles, instructions=tuple((pipe, tiles * n) for pipe, n in one.instructions),
        )  # fmt: skip

    def loads(self, name: str, width: int) -> Op:
        """Its part of a tile of K or V, copied by its threads."""
        m, size = self.m, self.v.tile_n * width * self.w.dtype_bytes / self.groups
        # As fast as memory serves all SMs that have programs; of keys that are not there nothing comes.
        there = min(1.0, self.w.seqlen_k / self.v.tile_n)
        busy, count = max(common.load_cycles(m, size), there * size / self.share), size / _LANE_BYTES / WARPS
        demand = (("tma", busy), ("smem", size / m["smem.bytes_per_clk"]), ("issue", count))
        return Op(
            f"{name}{self.s}", "load", f"load{self.s}", demand, max(busy, *(c for _, c in demand)), engine="tma", issue_cycles=count,
            tile=self.s, instructions=(("other", count),),
        )  # fmt: skip

    def leaves(self, name: str, width: int) -> Op:
        """Its part of dK or dV of a step: through shared memory into the order of rows, and out."""
        size = self.v.tile_n * width * self.w.dtype_bytes / self.groups
        return self.shared(
            f"{name}{self.s}", "store", self.role, self.s, 2 * size, 3 * size / _LANE_BYTES / WARPS, loads=False
        )

    def ops(self) -> list[Op]:
        w, m, s = self.w, self.m, self.s
        exp, ds = probabilities(m, w, self.elements), differences(m, w, self.elements)
        share = self.elements * w.dtype_bytes * self.apart / self.groups
        rounds = sum(_ROUNDS if columns(width) > 128 else 1 for width in (w.head_dim_qk, w.head_dim_v))
        # That of dS is waited for by the other warpgroup's product.
        holds = {
            "ahead": self.poll + AHEAD_OF_QK_CYCLES, "have_s": self.poll, "have_dp": self.poll, "have_dv": self.poll,
            "have_dk": self.poll, "behind": BEHIND_PV_CYCLES + (_BARRIERS + rounds - 1) * self.barrier,
        }  # fmt: skip
        counted = self.counted(w, self.v)
        alu, fma = (each * counted.pieces for each in _PIECE)
        return [
            self.loads("load_k", w.head_dim_qk), self.loads("load_v", w.head_dim_v), *(self.mma(name) for name in _PRODUCTS),
            arithmetic(m, f"exp{s}", "exp", self.role, s, exp, common.ramp_latency(m), common.one_warp_cycles(m, exp)),
            arithmetic(m, f"ds{s}", "ds", self.role, s, ds, m["fma.latency_cycles"] + m["alu.latency_cycles"], common.one_warp_cycles(m, ds)),
            self.shared(f"share{s}", "store", self.role, s, share, share / _LANE_BYTES / WARPS, loads=False),
            self.leaves("out_v", w.head_dim_v), self.leaves("out_k", w.head_dim_qk),
            arithmetic(m, f"step{s}", "step", self.role, s, step_work(m, alu + _SCORE * counted.scores, fma, _OTHERS[0] + _OTHERS[1] * counted.products), 0.0),
            *(self.hold(f"{name}{s}", self.role, cycles, s) for name, cycles in holds.items()),
        ]  # fmt: skip

    def edges(self) -> list[Edge]:
        s, stages, done, summed = self.s, self.v.stages, self.done("smem"), self.done("register")
        found = [
            Edge(f"s{s}", f"have_s{s}", 0, done, "data", "S accumulator"),
            Edge(f"dp{s}", f"have_dp{s}", 0, done, "data", "dP accumulator"),
            Edge(f"dv{s}", f"have_dv{s}", 0, summed, "data", "dV accumulator"),
            Edge(f"dk{s}", f"have_dk{s}", 0, summed, "data", "dK accumulator"),
            Edge(f"dq{s}", f"have_s{s}", 1, done, "data", "dQ accumulator"),
        ]
        program = s // self.groups * self.groups
        for other in range(program, program + self.groups):
            found.append(Edge(f"load_k{other}", f"ahead{s}", 0, self.landed, "data", "tile"))
            found.append(Edge(f"load_v{other}", f"exp{s}", 0, self.landed, "data", "tile"))
            found += [
                Edge(f"behind{other}", f"{x}{s}", max(1, stages - 1), 0.0, "buffer", "tile slot")
                for x in ("load_k", "load_v")
            ]
            if other != s:
                found.append(Edge(f"share{other}", f"dq{s}", 0, self.barrier, "data", "dS"))
                found.append(Edge(f"behind{other}", f"ahead{s}", 1, 0.0, "order", "barrier of the CTA"))
        return found

    def roles(self) -> tuple[Role, Role]:
        s = self.s
        lap = (
            "ahead", "s", "have_s", "exp", "dp", "have_dp", "ds", "share", "dv", "have_dv", "out_v", "dk", "have_dk", "out_k", "dq", "step",
            "behind",
        )  # fmt: skip
        loads = Role(f"load{s}", (Step(f"load_k{s}"), Step(f"load_v{s}")), 0)
        return loads, Role(self.role, tuple(Step(f"{name}{s}") for name in lap), WARPS)
