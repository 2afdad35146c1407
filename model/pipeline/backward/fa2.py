"""A portable backward of two or three kernels as `triton_bwd` writes it: warps that load, multiply and exponentiate in turn.

As in the forward of this class (`pipeline.fa2`) four warps, one on each sub-partition, are a stream in which everything is in
order, and overlap comes from the other streams of the SM; with wgmma a product that is summed up runs under what comes next,
one whose result is needed is waited for at once, and streams of one program keep step.  Programs on one SM do not: a step is
long, and they begin at different times.  Programs that own keys have S^T, dP^T
and sums dV, dK; apart, one kernel has S^T and dV, the other S^T, dP^T and dK.  Programs that own queries have S, dP and dQ.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model.kernel.variants.fa2_backward import (
    ONCE_ROWS,
    Fa2BackwardVariant,
    keeps_tiles,
    registers,
    shared_bytes,
)
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.machine.occupancy import ctas_that_fit
from tilecast.model.pipeline import softmax_cost as common
from tilecast.model.pipeline.backward import kernels
from tilecast.model.pipeline.backward.arithmetic import differences, probabilities, step_work
from tilecast.model.pipeline.backward.parts import parts_of
from tilecast.model.pipeline.backward.warps import TERM_LOADS, Warpgroups, term_port_bytes
from tilecast.model.pipeline.fa2 import AHEAD_OF_QK_CYCLES, BEHIND_PV_CYCLES, MMA_FLOP
from tilecast.model.pipeline.fa3 import arithmetic, product
from tilecast.model.pipeline.graph import Buffer, Edge, Op, Pipeline, Role, Step, of_tile
from tilecast.model.pipeline.hopper.order import ROWS
from tilecast.model.pipeline.tensor_core import mma_sync_tile_cycles

#: Instructions of a warp and step that do not scale with the tile: on the ALU, on the FMA pipe, others (machine code of the
#: generated kernels for sm_90a, `tilecast inspect`), of loops over queries and over keys.
_STEP = {"keys": (43.0, 20.0, 120.0), "queries": (1.0, 9.0, 86.0)}
#: Barriers of a step: before the exponentials, and before the copies of a later block (machine code).
_BARRIERS = (1, 2)
#: Registers of a thread beside sums and score tiles, by loop, those of addresses where loads are by pointers, and the most a
#: thread can have (what the compiler took for the variants of h200_backward_sweep.csv).
_OTHER_REGISTERS, _POINTER_REGISTERS, _MOST_REGISTERS = {"dkv": 48, "dq": 24}, 32, 255
#: Bytes of a warp instruction that copies 16 bytes a lane.
_COPY_BYTES = 512
_LAPS = {
    ("keys", "dk dv"): ("s", "exp", "dv", "dp", "ds", "dk"),
    ("keys", "dk"): ("s", "exp", "dp", "ds", "dk"),
    ("keys", "dv"): ("s", "exp", "dv"),
    ("queries", "dq"): ("s", "exp", "dp", "ds", "dq"),
}
_NAMES = {"dk dv": "key gradients", "dk": "key gradients", "dv": "value gradients", "dq": "query gradients"}


@dataclass(frozen=True, slots=True)
class _Walk:
    """One of the kernels: what its programs own, which gradients they sum up, their tile and warps."""

    owns: str
    sums: str
    rows: int
    step: int
    warps: int
    stages: int
    described: bool
    ctas: int

    @property
    def lap(self) -> tuple[str, ...]:
        return _LAPS[self.owns, self.sums]


def build(workload: Workload, variant: Fa2BackwardVariant, machine: Machine) -> kernels.BackwardPass:
    """The launches of ``variant``; legality is the caller's business."""
    parts = parts_of(workload, variant.dkv_tile_n, ONCE_ROWS, 0.0, machine)
    return kernels.BackwardPass(
        (
            kernels.row_terms(workload),
            *(_kernel(workload, walk, machine, parts) for walk in _walks(workload, variant, machine)),
            *kernels.sum_parts(workload, parts),
        )
    )


def _walks(w: Workload, v: Fa2BackwardVariant, m: Machine) -> list[_Walk]:
    ctas = ctas_per_sm(v, w, m)
    keys = (v.dkv_tile_n, v.dkv_tile_m, v.dkv_warps, v.dkv_stages, v.dkv_loads == "descriptors", ctas["dkv"])
    queries = (v.dq_tile_m, v.dq_tile_n, v.dq_warps, v.dq_stages, v.dq_loads == "descriptors", ctas["dq"])
    if not v.dkv_apart:
        return [_Walk("keys", "dk dv", *keys), _Walk("queries", "dq", *queries)]
    return [_Walk("keys", "dk", *keys), _Walk("keys", "dv", *keys[:-1], ctas["dv"]), _Walk("queries", "dq", *queries)]


def ctas_per_sm(variant: Fa2BackwardVariant, workload: Workload, machine: Machine) -> dict[str, int]:
    """CTAs of each loop's kernel that an SM holds by its shared memory, registers and warps, by the loop's prefix; "dv" of the
    kernel of dV alone, which has no V."""
    shared, sums = shared_bytes(variant, workload, machine), registers(variant, workload, machine)
    warps = {"dkv": variant.dkv_warps, "dq": variant.dq_warps}
    stays = keeps_tiles(machine)
    v_bytes = stays * variant.dkv_tile_n * workload.head_dim_v * workload.dtype_bytes
    found = {}
    for name, loop, size in (
        ("dkv", "dkv", shared["dkv"]), ("dv", "dkv", shared["dkv"] - v_bytes), ("dq", "dq", shared["dq"])
    ):  # fmt: skip
        pointers = _POINTER_REGISTERS if getattr(variant, f"{loop}_loads") == "pointers" else 0
        each = min(_MOST_REGISTERS, sums[loop] + _OTHER_REGISTERS[loop] + pointers)
        found[name] = ctas_that_fit(machine, size, each, warps[loop])
    return found


def _kernel(w: Workload, walk: _Walk, m: Machine, parts: int) -> kernels.LoopKernel:
    made = _pipeline(w, walk, m, walk.ctas)
    d, dv, size = w.head_dim_qk, w.head_dim_v, w.dtype_bytes
    widths = {"s": d, "dp": dv, "dv": dv, "dk": d, "dq": d}
    terms = 2 * kernels.FLOAT if walk.owns == "keys" else 0
    row = (d + dv) * size + terms
    return kernels.LoopKernel(
        _NAMES[walk.sums], walk.owns, made, 2.0 * sum(widths.get(name, 0) for name in walk.lap),
        step_bytes=walk.step * row, row_bytes=row, last_first=walk.owns == "queries" and w.mask != "none",
        parts=parts if walk.owns == "keys" else 1,
    )  # fmt: skip


def _pipeline(w: Workload, walk: _Walk, m: Machine, ctas: int) -> Pipeline:
    """The loop of ``ctas`` programs on one SM that do not keep step."""
    streams = ctas * walk.warps // 4
    kind = _HopperStream if m.tensor_kind == "wgmma" else _Stream
    first = kind(w, walk, m, 0)
    parts = [kind(w, walk, m, s) for s in range(streams)]
    ops = first.ops()
    d, dv, size = w.head_dim_qk, w.head_dim_v, w.dtype_bytes
    owned = walk.rows * (d if walk.sums == "dv" else d + dv) * size
    written = sum({"dk": d, "dv": dv, "dq": d}[name] for name in walk.sums.split()) * walk.rows * size
    return Pipeline(
        name=f"fa2 backward, {_NAMES[walk.sums]} {walk.rows}x{walk.step} {walk.warps} warps, {ctas} CTA/SM", machine=m.name,
        ops=tuple(of_tile(op, s) for s in range(streams) for op in ops),
        edges=tuple(edge for part in parts for edge in part.edges()),
        roles=tuple(role for part in parts for role in part.roles()),
        buffers=(
            *((Buffer("tiles that stay", "smem", owned * ctas, 1, "", "s0"),) if keeps_tiles(m) else ()),
            Buffer("tiles that move", "smem", walk.step * (d + dv) * size * ctas, walk.stages, "load_a0", "s0"),
        ),
        rows_per_cta=walk.rows, keys_per_iteration=walk.step, ctas_per_sm=ctas,
        prologue_cycles=m["launch.cta_start_cycles"],
        epilogue_cycles=written / m["smem.bytes_per_clk"] + m["l2.latency_cycles"],
        edge_read_bytes=owned, edge_write_bytes=written, tiles_overlap=False,
        legacy_matrix_path=m.tensor_kind == "tcgen05",
        mask_demand=tuple((f"exp{s}", common.mask_work(m, parts[0].elements * 2.0)) for s in range(streams)),
    )  # fmt: skip


class _Stream(Warpgroups):
    """One group of four warps (one on each sub-partition) of one program, where products hold their warps (mma.sync)."""

    def __init__(self, w: Workload, walk: _Walk, m: Machine, index: int) -> None:
        super().__init__(w, m) if m.has("sync.mbarrier_roundtrip_cycles") else self._plain(w, m)
        self.walk, self.s = walk, index
        #: Rows of the stream, and elements of its part of a score tile.
        self.rows = walk.rows * 4 // walk.warps
        self.elements = float(self.rows * walk.step)
        self.role = f"warps{index}"

    def _plain(self, w: Workload, m: Machine) -> None:
        """A machine without barriers in shared memory."""
        self.w, self.m = w, m
        self.arrive = self.poll = self.signal = self.barrier = 0.0
        self.landed = m["l2.latency_cycles"]

    def extents(self, name: str) -> tuple[int, int, str]:
        """Columns and depth of a product, and where its left operand is."""
        d, dv, step = self.w.head_dim_qk, self.w.head_dim_v, self.walk.step
        return {
            "s": (step, d, "smem"), "dp": (step, dv, "smem"), "dv": (dv, step, "register"), "dk": (d, step, "register"),
            "dq": (d, step, "register"),
        }[name]  # fmt: skip

    def mma(self, name: str) -> Op:
        w, m = self.w, self.m
        n, k, _ = self.extents(name)
        cycles = mma_sync_tile_cycles(m, self.rows, n, k, w.dtype)
        count = 2.0 * self.rows * n * k / MMA_FLOP / 4
        # B fragments come by ldmatrix: each warp reads the whole tile; four warps share no registers.
        read = 4 * n * k * w.dtype_bytes / m["smem.bytes_per_clk"]
        issue = count + 4 * n * k * w.dtype_bytes / _COPY_BYTES / 4
        alone = max(cycles, read, issue) + m["tensor.mma_latency_cycles"] + m["smem.latency_cycles"]
        return Op(
            f"{name}{self.s}", name, self.role, (("tensor", cycles), ("smem", read), ("issue", issue)), alone, tile=self.s,
            instructions=(("other", issue),),
        )  # fmt: skip

    def work(self, name: str, done: common.Work, latency: float) -> Op:
        return arithmetic(self.m, f"{name}{self.s}", name, self.role, self.s, done, latency)

    def loads(self) -> list[Op]:
        """Copies of the two tiles of a step, of which each stream issues its part."""
        w, m, walk = self.w, self.m, self.walk
        found = []
        for name, width in (("load_a", w.head_dim_qk), ("load_b", w.head_dim_v)):
            size = walk.step * width * w.dtype_bytes * 4 / walk.warps
            busy = common.load_cycles(m, size)
            count = 2.0 if walk.described else size / _COPY_BYTES / 4
            demand = (("tma", busy), ("smem", size / m["smem.bytes_per_clk"]), ("issue", count))
            found.append(
                Op(f"{name}{self.s}", "load", f"load{self.s}", demand, max(busy, *(c for _, c in demand)), engine="tma",
                   issue_cycles=count, tile=self.s, instructions=(("other", count),))
            )  # fmt: skip
        return found

    def terms(self) -> Op:
        """LSE and D of the queries of a step, for programs that own keys; others keep them in registers."""
        share = self.walk.step / ROWS * 2
        return self.shared(
            f"terms{self.s}", "terms", self.role, self.s, term_port_bytes() * share, TERM_LOADS * share, loads=True
        )

    def ops(self) -> list[Op]:
        w, m, walk = self.w, self.m, self.walk
        others = step_work(m, *_STEP[walk.owns])
        exp = probabilities(m, w, self.elements)
        ds = differences(m, w, self.elements)
        made = {
            "exp": self.work("exp", exp, common.ramp_latency(m)),
            "ds": self.work("ds", ds, m["fma.latency_cycles"] + m["alu.latency_cycles"]),
        }
        found = [*self.loads(), *(made.get(name) or self.mma(name) for name in walk.lap)]
        if walk.owns == "keys":
            found.append(self.terms())
        return [*found, self.work("step", others, 0.0)]

    def edges(self) -> list[Edge]:
        s, stages = self.s, self.walk.stages
        last = self.walk.lap[-1]
        found = []
        for load, users in (("load_a", ("s",)), ("load_b", ("dp", "dv"))):
            first = next((name for name in self.walk.lap if name in users), "")
            if first:
                found.append(Edge(f"{load}{s}", f"{first}{s}", 0, self.landed, "data", "tile"))
            found.append(Edge(f"{last}{s}", f"{load}{s}", stages, 0.0, "buffer", "tile slot"))
        return found

    def lap(self) -> tuple[str, ...]:
        terms = ("terms",) if self.walk.owns == "keys" else ()
        return ("s", *terms, *self.walk.lap[1:], "step")

    def roles(self) -> tuple[Role, Role]:
        s = self.s
        loads = Role(f"load{s}", (Step(f"load_a{s}"), Step(f"load_b{s}")), 0)
        return loads, Role(f"warps{s}", tuple(Step(f"{name}{s}") for name in self.lap()), 4)


class _HopperStream(_Stream):
    """The same four warps where products are wgmma."""

    def mma(self, name: str) -> Op:
        n, k, home = self.extents(name)
        one = product(self.w, self.m, f"{name}{self.s}", name, self.role, self.s, n, k, home)
        tiles = self.rows / ROWS
        return one._replace(
            demand=tuple((unit, tiles * cycles) for unit, cycles in one.demand), min_cycles=tiles * one.min_cycles,
            issue_cycles=tiles * one.issue_cycles, instructions=tuple((pipe, tiles * n) for pipe, n in one.instructions),
        )  # fmt: skip

    def work(self, name: str, done: common.Work, latency: float) -> Op:
        alone = common.one_warp_cycles(self.m, done) if name in ("exp", "ds") else 0.0
        return arithmetic(self.m, f"{name}{self.s}", name, self.role, self.s, done, latency, alone)

    def ops(self) -> list[Op]:
        s, before, behind = self.s, *_BARRIERS
        holds = {
            "ahead": self.poll + AHEAD_OF_QK_CYCLES, "have_s": self.poll + before * self.barrier, "have_dp": self.poll,
            "behind": BEHIND_PV_CYCLES + behind * self.barrier,
        }  # fmt: skip
        if "dp" not in self.walk.lap:
            del holds["have_dp"]
        return [*super().ops(), *(self.hold(f"{name}{s}", self.role, cycles, s) for name, cycles in holds.items())]

    def edges(self) -> list[Edge]:
        s, walk = self.s, self.walk
        done, summed = self.done("smem"), self.done("register")
        has_dp = "dp" in walk.lap
        found = [Edge(f"s{s}", f"have_s{s}", 0, done, "data", "S accumulator")]
        if has_dp:
            found.append(Edge(f"dp{s}", f"have_dp{s}", 0, done, "data", "dP accumulator"))
        for name in ("dv", "dk", "dq"):
            if name in walk.lap:
                # A sum is waited for with the next product that is; its operand's registers are written again after that.
                later = name == "dv" and has_dp
                found.append(Edge(f"{name}{s}", f"{'have_dp' if later else 'have_s'}{s}", 0 if later else 1, summed, "data", f"{name} accumulator"))  # fmt: skip
        streams = walk.warps // 4
        for other in range(s // streams * streams, (s // streams + 1) * streams):
            found.append(Edge(f"load_a{other}", f"ahead{s}", 0, self.landed, "data", "tile"))
            found.append(Edge(f"load_b{other}", f"exp{s}", 0, self.landed, "data", "tile"))
            found += [
                Edge(f"behind{other}", f"{load}{s}", walk.stages - 1, 0.0, "buffer", "tile slot")
                for load in ("load_a", "load_b")
            ]
            if other != s:
                found.append(Edge(f"have_s{other}", f"exp{s}", 0, 0.0, "order", "barrier of the CTA"))
                found.append(Edge(f"behind{other}", f"ahead{s}", 1, 0.0, "order", "barrier of the CTA"))
        return found

    def lap(self) -> tuple[str, ...]:
        out: list[str] = ["ahead"]
        for name in super().lap():
            out.append(name)
            if name in ("s", "dp"):
                out.append(f"have_{name}")
        return (*out, "behind")
