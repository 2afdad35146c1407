"""A Blackwell backward as FlashAttention-4 arranges it: one matrix role, two warpgroups that compute, one that hands dQ on.

All score tiles are transposed (keys on the lanes of tensor memory), so that P^T and dS^T are the left operands of dV and dK from
there; dQ = dS K has dS from shared memory.  The computing warpgroups share the queries of a step.  dQ is read from tensor
memory, stored to shared memory in pieces, and added to a float32 sum in L2 by the copy engine.

Of query heads that share keys a program goes through all, or has one (`heads_apart`).  Then its dK and dV are added to float32 sums
as well, which begin at zero and are rounded afterwards (FlashAttention-4's host code: `dKV_postprocess`); of two kernels they are
written and summed up by another (cudnn-frontend's graph).

"pipelined" issues S of the next step, then dK and dQ of this one around dP of the next, then dV of the next; "own slots" has P and
dS beside S and dP, so that S is free once it is in registers; "serial" issues one step's products after the other.
Two kernels (head_dim 256): pairs with 64 keys a CTA without dQ, and pairs with 128 queries a CTA that compute S and dP again.
"""

from __future__ import annotations

from tilecast.model.kernel.variants.blackwell.backward import (
    DQ_COLUMNS,
    DQ_SLOTS,
    NARROW_N,
    TILE_M,
    TILE_N,
    Fa4BackwardVariant,
)
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline import softmax_cost as common
from tilecast.model.pipeline.backward import kernels
from tilecast.model.pipeline.backward.arithmetic import differences, probabilities
from tilecast.model.pipeline.graph import Buffer, Edge, Op, Pipeline, Role, Step
from tilecast.model.pipeline.tensor_core import (
    INSTRUCTIONS_PER_MMA,
    mma_completion_latency_cycles,
    mma_smem_bytes,
    mma_tile_cycles,
)

_COMPUTE = (0, 1)
_COLUMN = 512
#: Laps of the matrix role: (product, step it belongs to).
_LAPS = {
    "pipelined 1": (("s", 1), ("dk", 0), ("dq", 0), ("dp", 1), ("dv", 1)),
    # dQ as an operation of the step after its own: it lies over the tail of that one's S.
    "pipelined 2": (("s", 1), ("dk", 0), ("dp", 1), ("dq", 1), ("dv", 1)),
    "own slots 1": (("s", 1), ("dv", 0), ("dk", 0), ("dq", 0), ("dp", 1)),
    "serial": (("s", 0), ("dp", 0), ("dk", 0), ("dv", 0), ("dq", 0)),
    "keys": (("s", 1), ("dk", 0), ("dp", 1), ("dv", 1)),
    "queries": (("s", 1), ("dq", 0), ("dp", 1)),
}


def build(workload: Workload, variant: Fa4BackwardVariant, machine: Machine) -> kernels.BackwardPass:
    """The launches of ``variant``; legality is the caller's business."""
    w, d, dv, size = workload, workload.head_dim_qk, workload.head_dim_v, workload.dtype_bytes
    pair = variant.cta_group
    moving = (d + dv) * size + 2 * kernels.FLOAT
    parts = w.group_size if variant.heads_apart else 1
    # Programs with a mask begin with the longest: FlashAttention-4 deals them so.
    if variant.apart:
        keys = kernels.LoopKernel(
            "key gradients", "keys", _Walk(w, variant, machine, "keys").pipeline(), 2.0 * (2 * d + 2 * dv),
            step_bytes=2 * pair * TILE_M / 2 * moving, row_bytes=moving, parts=parts,
        )  # fmt: skip
        queries = kernels.LoopKernel(
            "query gradients", "queries", _Walk(w, variant, machine, "queries").pipeline(), 2.0 * (2 * d + dv),
            step_bytes=NARROW_N * (2 * d + dv) * size, row_bytes=(d + dv) * size, last_first=w.mask != "none",
        )  # fmt: skip
        return kernels.BackwardPass((kernels.row_terms(w), queries, keys, *kernels.sum_parts(w, parts)))
    tile = TILE_M * d * kernels.FLOAT
    main = kernels.LoopKernel(
        "gradients", "keys", _Walk(w, variant, machine, "gradients").pipeline(), 2.0 * (3 * d + 2 * dv),
        step_bytes=TILE_M * moving * pair, added_bytes=tile, row_bytes=moving, sum_row_bytes=d * kernels.FLOAT,
        parts=parts,
    )  # fmt: skip
    zeros, rounded = kernels.key_sums(w) if parts > 1 else ((), ())
    return kernels.BackwardPass((*zeros, kernels.row_terms_and_zeros(w), main, kernels.round_sums(w), *rounded))


class _Walk:
    """The pieces of one loop; a namespace for values that most pieces need."""

    def __init__(self, w: Workload, v: Fa4BackwardVariant, m: Machine, kernel: str) -> None:
        self.w, self.v, self.m, self.kernel, self.pair = w, v, m, kernel, v.cta_group
        self.arrive = m["sync.mbarrier_roundtrip_cycles"]
        if self.pair == 2:
            self.arrive = max(self.arrive, m["sync.cluster_arrive_cycles"])
        self.d, self.dv = w.head_dim_qk, w.head_dim_v
        #: Rows that a CTA owns, and of a step.
        self.own = {"gradients": TILE_N, "keys": NARROW_N, "queries": TILE_M}[kernel]
        self.step = NARROW_N if kernel == "queries" else TILE_M
        self.elements = float(self.own * self.step)
        name = kernel if kernel != "gradients" else v.order if v.order == "serial" else f"{v.order} {v.cta_group}"
        self.lap = _LAPS[name]
        self.names = tuple(name for name, _ in self.lap)

    # -- operations --------------------------------------------------------------------------------------------------

    def extents(self, name: str) -> tuple[int, int, int, str]:
        """Rows of the whole pair, columns and depth of a product, and where its left operand is."""
        own, d, dv = self.own * self.pair, self.d, self.dv
        if name == "dq":
            return (own, d, self.step, "tmem") if self.kernel == "queries" else (TILE_M, d, own, "smem")
        return {
            "s": (own, self.step, d, "smem"), "dp": (own, self.step, dv, "smem"), "dv": (own, dv, self.step, "tmem"),
            "dk": (own, d, self.step, "tmem"),
        }[name]  # fmt: skip

    def mma(self, name: str) -> Op:
        rows, n, k, home = self.extents(name)
        m, dtype = self.m, self.w.dtype
        cycles = mma_tile_cycles(m, rows, n, k, dtype, home, self.pair)
        read = mma_smem_bytes(rows, n, k, dtype, home, self.pair) / m["smem.bytes_per_clk"]
        steps = k * self.w.dtype_bytes / 32
        count = steps * INSTRUCTIONS_PER_MMA / 4 / self.pair
        return Op(
            name, name, "mma", (("tensor", cycles), ("smem", min(read, cycles)), ("issue", count)), cycles, engine="tensor",
            issue_cycles=steps, instructions=(("other", count),),
        )  # fmt: skip

    def done(self, name: str) -> float:
        rows, n, _, home = self.extents(name)
        return mma_completion_latency_cycles(self.m, rows, n, self.w.dtype, home, self.pair)

    def compute(self, name: str, work: common.Work, to_shared: bool) -> list[Op]:
        """What each computing warpgroup does of a score tile: read it, compute, write the operand of the next product."""
        m, half = self.m, self.elements / len(_COMPUTE)
        port = m["smem.bytes_per_clk"]
        read = half * 4 / m["tmem.read_bytes_per_clk"]
        write = half * self.w.dtype_bytes / m["tmem.write_bytes_per_clk"]
        # A number for each query, four at a time, the same for all lanes (keys on lanes); with queries there, one a thread.
        loads = self.step / len(_COMPUTE) / 4 if self.kernel != "queries" else 0.0
        shared = (4 * loads * 128.0 + (half * self.w.dtype_bytes if to_shared else 0.0)) / port
        done = common.add(work, common.work(m, {}, {"other": loads}))
        demand = (*done.cycles, ("tmem_read", read), ("tmem_write", write), *((("smem", shared),) if shared else ()))
        alone = (
            m["tmem.load_latency_cycles"]
            + max(read, write, shared, common.one_warp_cycles(m, done))
            + common.ramp_latency(m)
        )
        return [
            Op(f"{name}{g}", name, f"compute{g}", demand, alone, tile=g, instructions=done.instructions) for g in _COMPUTE
        ]  # fmt: skip

    def loads(self) -> tuple[tuple[str, int, tuple[str, ...]], ...]:
        """Copies of a step: name, width and the products that take them.  A pair has halves, each orientation for itself."""
        d, dv = self.d, self.dv
        if self.kernel == "queries":
            return ("load_k", d, ("s",)), ("load_kt", d, ("dq",)), ("load_v", dv, ("dp",))
        if self.pair == 1:
            return ("load_q", d, ("s", "dk")), ("load_do", dv, ("dp", "dv"))
        return ("load_q", d, ("s",)), ("load_qt", d, ("dk",)), ("load_do", dv, ("dp",)), ("load_dot", dv, ("dv",))

    def copies(self) -> list[Op]:
        m, found = self.m, []
        for name, width, _ in self.loads():
            size = self.step * width * self.w.dtype_bytes / self.pair
            busy, port = common.load_cycles(m, size), size / m["smem.bytes_per_clk"]
            found.append(
                Op(name, "load", name, (("tma", busy), ("smem", port)), max(busy, port), engine="tma",
                   issue_cycles=m["tma.issue_cycles"], instructions=(("other", 2.0),))
            )  # fmt: skip
        return found

    def out(self) -> list[Op]:
        """dQ from tensor memory to shared memory, piece by piece, and added from there."""
        m, rows = self.m, TILE_M // self.pair
        size = rows * self.d * kernels.FLOAT
        read, port = size / m["tmem.read_bytes_per_clk"], size / m["smem.bytes_per_clk"]
        pieces = self.d / 32
        alone = pieces * m["tmem.load_latency_cycles"] / 2 + max(read, port) + m["tmem.load_latency_cycles"] / 2
        added = max(kernels.add_cycles(m, size), port)
        return [
            Op("out", "dq to shared memory", "reduce", (("tmem_read", read), ("smem", port)), alone),
            Op("add", "add dq", "reduce", (("smem", port),), added, engine="tma", issue_cycles=m["tma.issue_cycles"]),
        ]

    def exchange(self) -> list[Op]:
        """Half of dS from each CTA of a pair to the other, SM to SM."""
        m = self.m
        size = self.elements / 2 * self.w.dtype_bytes
        # Read here and written there: half a tile leaves, half a tile comes, and what came is read once more to be multiplied.
        port = 3 * size / m["smem.bytes_per_clk"]
        alone = m.get("dsmem.latency_cycles", m["l2.latency_cycles"]) + max(port, common.load_cycles(m, size))
        return [
            Op(
                "exchange",
                "exchange ds",
                "relay",
                (("smem", port),),
                alone,
                engine="tma",
                issue_cycles=m["tma.issue_cycles"],
            )
        ]

    # -- dependences -------------------------------------------------------------------------------------------------

    def edges(self) -> list[Edge]:
        v, landed, local = self.v, self.m["tma.latency_l2_cycles"], self.m["sync.mbarrier_roundtrip_cycles"]
        serial, own_slots = v.order == "serial" and not v.apart, v.order == "own slots"
        late = int(self.pair == 2 and self.kernel == "gradients" and not serial)
        found: list[Edge] = []
        for load, _, users in self.loads():
            stages = v.q_stages if load.startswith("load_q") and self.kernel == "gradients" else 1
            for user in users:
                found.append(Edge(load, user, 0, landed, "data", "tile"))
                found.append(Edge(user, load, stages, local, "buffer", "tile slot"))
        if serial and self.pair == 2:
            # The second orientation comes where the first one was.
            found += [
                Edge(first, load, back, local, "buffer", "tile slot")
                for first, load, back in (("s", "load_qt", 0), ("dk", "load_q", 1), ("dp", "load_dot", 0), ("dv", "load_do", 1))
            ]  # fmt: skip
        for g in _COMPUTE:
            found += [
                Edge("s", f"p{g}", 0, self.done("s"), "data", "S"), Edge("dp", f"ds{g}", 0, self.done("dp"), "data", "dP"),
                Edge(f"p{g}", f"ds{g}", 0, 0.0, "data", "P registers"),
            ]  # fmt: skip
            if "dv" in self.names:
                found.append(Edge(f"p{g}", "dv", 0, self.arrive, "data", "P in tensor memory"))
            if "dk" in self.names:
                found.append(Edge(f"ds{g}", "dk", 0, self.arrive, "data", "dS in tensor memory"))
            if self.kernel == "queries":
                found.append(Edge(f"ds{g}", "dq", 0, self.arrive, "data", "dS in tensor memory"))
                # S and dP have their columns to themselves, dS lies over dP.
                found.append(Edge(f"p{g}", "s", 1, self.arrive, "buffer", "S"))
                found.append(Edge("dq", "dp", 1, 0.0, "buffer", "dS over dP"))
                continue
            if own_slots:
                # Scores are free once they are in registers.
                found.append(Edge(f"p{g}", "s", 1, self.arrive, "buffer", "S"))
                found.append(Edge(f"ds{g}", "dp", 1, self.arrive, "buffer", "dP"))
            if self.kernel == "gradients":
                if self.pair == 2:
                    found.append(Edge(f"ds{g}", "exchange", 0, local, "data", "dS in shared memory"))
                else:
                    found.append(Edge(f"ds{g}", "dq", 0, self.arrive, "data", "dS in shared memory"))
                # One tile of dS: the next one is written when this one has been multiplied.
                found.append(Edge("dq", f"ds{g}", 1 - late, self.done("dq"), "buffer", "dS in shared memory"))
                if late:
                    found.append(Edge(f"p{g}", "dq", 0, self.arrive, "buffer", "tail of S"))
        if not own_slots and "dv" in self.names:
            found.append(Edge("dv", "s", 1, 0.0, "buffer", "P over S"))
            found.append(Edge("dk", "dp", 1, 0.0, "buffer", "dS over dP"))
        if self.kernel == "gradients":
            if self.pair == 2:
                found.append(Edge("exchange", "dq", late, self.arrive, "data", "dS of both"))
            found += [
                Edge("dq", "out", 0, self.done("dq"), "data", "dQ"), Edge("out", "add", 0, local, "data", "dQ in shared memory"),
                # A tile leaves in pieces; the pieces of the next one find their slots free when most of it is added.
                Edge("add", "out", 1, 0.0, "buffer", "dQ slots"),
                Edge("out", "s" if self.pair == 2 or serial else "dp", 1, local, "buffer", "dQ over scores"),
            ]  # fmt: skip
        return found

    def pipeline(self) -> Pipeline:
        w, m, v = self.w, self.m, self.v
        size = w.dtype_bytes
        exp, ds = probabilities(m, w, self.elements / 2), differences(m, w, self.elements / 2)
        bookkeeping = common.bookkeeping_work(m)
        ops = [
            *self.copies(), *(self.mma(name) for name in self.names), *self.compute("p", exp, False),
            *self.compute("ds", common.add(ds, bookkeeping), self.kernel == "gradients"),
        ]  # fmt: skip
        # One warp asks for all copies, in whatever order their slots are free: its registers count once.
        loads = [name for name, _, _ in self.loads()]
        roles = [
            *(Role(name, (Step(name),), 1, 0 if i else 88) for i, name in enumerate(loads)), Role("mma", tuple(Step(n, s) for n, s in self.lap), 1, 88),
            *(Role(f"compute{g}", (Step(f"p{g}"), Step(f"ds{g}")), 4, 136) for g in _COMPUTE),
        ]  # fmt: skip
        if self.kernel == "gradients":
            ops += self.out()
            roles.append(Role("reduce", (Step("out"), Step("add")), 4, 152))
            if self.pair == 2:
                ops += self.exchange()
                roles.append(Role("relay", (Step("exchange"),), 1, 88))
        owned = self.own * (self.d + self.dv) * size
        sums = {"dv": self.dv, "dk": self.d, "dq": self.d}
        written = sum(sums[name] for name in self.names if name in sums and (name != "dq" or self.kernel == "queries"))
        out = self.own * written
        # dK and dV as they leave: rounded, or added to sums.
        left = kernels.FLOAT if self.kernel == "gradients" and v.heads_apart else size
        return Pipeline(
            name=f"fa4 backward {'2-CTA' if self.pair == 2 else '1-CTA'} {self.kernel} {self.own}x{self.step}"
            + ("" if v.apart else f" {v.order}"),
            machine=m.name, ops=tuple(ops), edges=tuple(self.edges()), roles=tuple(roles), buffers=self.buffers(),
            rows_per_cta=self.own, keys_per_iteration=self.step, ctas_per_sm=1, cta_group=self.pair,
            prologue_cycles=m["launch.cta_start_cycles"],
            epilogue_cycles=self.done("s") + m["tmem.load_latency_cycles"] + out * 4 / m["tmem.read_bytes_per_clk"]
            + out * left / m["smem.bytes_per_clk"] + m["l2.latency_cycles"],
            edge_read_bytes=owned, edge_write_bytes=out * left, tiles_overlap=False,
            mask_demand=tuple((f"p{g}", common.mask_work(m, self.elements)) for g in _COMPUTE),
        )  # fmt: skip

    def buffers(self) -> tuple[Buffer, ...]:
        """Tiles in shared memory, and columns that are not shared between values of one step."""
        v, size = self.v, self.w.dtype_bytes
        d, dv, half = self.d, self.dv, 1 if self.pair == 1 else 2
        wide = 2 if self.own == NARROW_N else 1
        found = [
            Buffer("stays", "smem", self.own * (d + dv) * size, 1, "", "s"),
            Buffer("moves", "smem", self.step * (d + dv) * size // half, 1, "load_k" if self.kernel == "queries" else "load_q", "s"),
            Buffer("S", "tmem", self.step * _COLUMN // wide, 1, "s", "p0"),
            Buffer("dP", "tmem", self.step * _COLUMN // wide, 1, "dp", "ds0"),
        ]  # fmt: skip
        if self.kernel == "gradients":
            found.append(Buffer("dS", "smem", TILE_M * TILE_N * size, 1, "ds0", "dq"))
            found.append(Buffer("dQ", "smem", 4 * TILE_M * DQ_COLUMNS[self.pair], DQ_SLOTS[self.pair], "out", "add"))
            if v.order == "serial":
                found[2:4] = [Buffer("S, dP", "tmem", 3 * TILE_M // 2 * _COLUMN, 1, "s", "ds0")]
        found += [
            Buffer(name, "tmem", width * _COLUMN // wide, 1, name, "")
            for name, width in (("dv", dv), ("dk", d), ("dq", d))
            if name in self.names and (name != "dq" or self.kernel == "queries")
        ]
        return tuple(found)
