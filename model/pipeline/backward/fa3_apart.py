"""A Hopper backward of two kernels as `hopper_bwd_apart` writes it: no sum crosses programs, S and dP are computed twice.

Keys, where dK and dV of 64 fit one warpgroup beside what makes them (192/128, but for windows): two warpgroups have 64 each, and S^T, P^T, dP^T and
dS^T of them.  Else one has S^T, P^T and dV of 64 keys, the other dP^T, dS^T and dK of the same; P goes from the first to the second
through shared memory in float32.  Queries: two warpgroups have 64 rows each and S, dP and dQ of them.  A warpgroup begins a step with
its scores and ends it with its sum; what one computes runs under the products of the other.
"""

from __future__ import annotations

from tilecast.model.kernel.variants.fa3_backward_apart import (
    BESIDE,
    ONCE_ROWS,
    STAGES,
    TILE,
    Fa3BackwardApartVariant,
    keys,
    own_keys,
    value_stages,
)
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline import softmax_cost as common
from tilecast.model.pipeline.backward import kernels
from tilecast.model.pipeline.backward.arithmetic import differences, probabilities, step_work
from tilecast.model.pipeline.backward.parts import parts_of
from tilecast.model.pipeline.backward.warps import TERM_LOADS, WARPS, Warpgroups, term_port_bytes
from tilecast.model.pipeline.fa3 import arithmetic, product
from tilecast.model.pipeline.graph import Buffer, Edge, Op, Pipeline, Role, Step

#: Instructions of a warp and step that do not scale with the tile, on the ALU, on the FMA pipe, others, of the warpgroups of dV
#: and dK, of those of dQ, and of those that have keys of their own (machine code of the generated kernels, `tilecast inspect`).
_VALUE_STEP, _KEY_STEP, _QUERY_STEP, _OWN_STEP = (
    (45.0, 4.0, 84.0),
    (6.0, 3.0, 84.0),
    (51.0, 5.0, 132.0),
    (43.0, 3.0, 129.0),
)


def build(workload: Workload, variant: Fa3BackwardApartVariant, machine: Machine) -> kernels.BackwardPass:
    """The launches of ``variant``; legality is the caller's business."""
    w, d, dv, size = workload, workload.head_dim_qk, workload.head_dim_v, workload.dtype_bytes
    moving = (d + dv) * size + 2 * kernels.FLOAT
    own = own_keys(w)
    parts = parts_of(w, keys(w), ONCE_ROWS, BESIDE, machine)
    for_keys = kernels.LoopKernel(
        "key gradients", "keys", (_OwnKeys if own else _Keys)(w, machine).pipeline(), 2.0 * (2 * d + 2 * dv), step_bytes=TILE * moving,
        row_bytes=moving, heads_abreast=variant.heads_abreast, parts=parts,
    )  # fmt: skip
    queries = kernels.LoopKernel(
        "query gradients", "queries", _Queries(w, machine).pipeline(), 2.0 * (2 * d + dv), step_bytes=TILE * (d + dv) * size,
        row_bytes=(d + dv) * size, heads_abreast=variant.heads_abreast, last_first=True, beside=True,
    )  # fmt: skip
    return kernels.BackwardPass((kernels.row_terms(w), for_keys, queries, *kernels.sum_parts(w, parts)))


class _Keys(Warpgroups):
    """dK and dV of 64 keys."""

    def pipeline(self) -> Pipeline:
        w, m = self.w, self.m
        d, dv, size = w.head_dim_qk, w.head_dim_v, w.dtype_bytes
        elements = float(TILE * TILE)
        exp, ds = probabilities(m, w, elements), differences(m, w, elements)
        # As registers hold it, 16 bytes of a thread at a time.
        p_bytes, accesses = elements * kernels.FLOAT, elements / 128 / 4
        values, keys = "values", "keys"
        value_ops = [
            self.hold("begin0", values, self.poll),
            product(w, m, "s", "s", values, 0, TILE, d, "smem"),
            self.shared("lse", "terms", values, 0, term_port_bytes(), TERM_LOADS, loads=True),
            self.hold("have_s", values, 2 * self.signal),
            arithmetic(m, "exp", "exp", values, 0, exp, common.ramp_latency(m), common.one_warp_cycles(m, exp)),
            self.hold("room", values, self.poll + self.barrier),
            self.shared("store_p", "p to shared memory", values, 0, p_bytes, accesses, loads=False),
            self.hold("tell", values, self.signal),
            self.hold("turn0", values, self.poll),
            product(w, m, "dv", "dv", values, 0, dv, TILE, "register"),
            arithmetic(m, "step0", "bookkeeping", values, 0, step_work(m, *_VALUE_STEP), 0.0),
            self.hold("have_dv", values, self.signal),
        ]
        key_ops = [
            self.hold("begin1", keys, self.poll),
            product(w, m, "dp", "dp", keys, 1, TILE, dv, "smem"),
            self.shared("delta", "terms", keys, 1, term_port_bytes(), TERM_LOADS, loads=True),
            self.hold("have_dp", keys, 2 * self.signal),
            self.hold("have_p", keys, self.poll),
            self.shared("load_p", "p from shared memory", keys, 1, p_bytes, accesses, loads=True),
            self.hold("taken", keys, self.signal),
            arithmetic(m, "ds", "ds", keys, 1, ds, m["fma.latency_cycles"] + m["alu.latency_cycles"], common.one_warp_cycles(m, ds)),
            self.hold("turn1", keys, self.poll),
            product(w, m, "dk", "dk", keys, 1, d, TILE, "register"),
            arithmetic(m, "step1", "bookkeeping", keys, 1, step_work(m, *_KEY_STEP), 0.0),
            self.hold("have_dk", keys, self.signal),
        ]  # fmt: skip
        owned = TILE * (d + dv) * size
        return Pipeline(
            name=f"fa3 backward apart, keys {TILE}x{TILE}", machine=m.name,
            ops=(self.copy("load_q", "load_q", TILE * d * size), self.copy("load_do", "load_do", TILE * dv * size),
                 *value_ops, *key_ops),
            edges=self._edges(),
            roles=(Role("load_q", (Step("load_q"),), 1, 24), Role("load_do", (Step("load_do"),), 1, 24),
                   Role(values, tuple(Step(op.name) for op in value_ops), WARPS, 240),
                   Role(keys, tuple(Step(op.name) for op in key_ops), WARPS, 240)),
            buffers=(
                Buffer("K", "smem", TILE * d * size, 1, "", "s"), Buffer("V", "smem", TILE * dv * size, 1, "", "dp"),
                Buffer("Q", "smem", TILE * d * size, STAGES, "load_q", "dk"),
                Buffer("dO", "smem", TILE * dv * size, STAGES, "load_do", "dv"),
                Buffer("P", "smem", int(p_bytes), STAGES, "store_p", "load_p"),
                Buffer("dK", "registers", TILE * d * kernels.FLOAT, 1, "dk", ""),
                Buffer("dV", "registers", TILE * dv * kernels.FLOAT, 1, "dv", ""),
            ),
            rows_per_cta=TILE, keys_per_iteration=TILE, ctas_per_sm=1, prologue_cycles=self.start(14),
            epilogue_cycles=self.leave(TILE * max(d, dv)), edge_read_bytes=owned, edge_write_bytes=owned,
            tiles_overlap=False, mask_demand=(("exp", common.mask_work(m, elements * 2.0)),),
        )  # fmt: skip

    def _edges(self) -> tuple[Edge, ...]:
        """What waits for what: S to dV in one warpgroup, dP to dK in the other, and P between them."""
        done, summed = self.done("smem"), self.done("register")
        return (
            Edge("load_q", "begin0", 0, self.landed, "data", "Q"), Edge("load_do", "begin1", 0, self.landed, "data", "dO"),
            Edge("load_do", "turn0", 0, self.landed, "data", "dO"), Edge("load_q", "turn1", 0, self.landed, "data", "Q"),
            Edge("s", "have_s", 0, done, "data", "S accumulator"), Edge("have_s", "exp", 0, 0.0, "data", "S accumulator"),
            Edge("lse", "exp", 0, 0.0, "data", "LSE"), Edge("exp", "store_p", 0, 0.0, "data", "P registers"),
            Edge("exp", "dv", 0, 0.0, "data", "P registers"), Edge("dv", "have_dv", 0, summed, "data", "dV accumulator"),
            Edge("taken", "room", STAGES, self.arrive, "buffer", "P slot"), Edge("room", "store_p", 0, 0.0, "order", "P slot"),
            Edge("store_p", "tell", 0, 0.0, "data", "P in shared memory"),
            Edge("tell", "have_p", 0, self.arrive, "data", "P in shared memory"),
            Edge("have_p", "load_p", 0, 0.0, "data", "P in shared memory"), Edge("load_p", "ds", 0, 0.0, "data", "P registers"),
            Edge("load_p", "taken", 0, 0.0, "data", "P registers"),
            Edge("dp", "have_dp", 0, done, "data", "dP accumulator"), Edge("have_dp", "ds", 0, 0.0, "data", "dP accumulator"),
            Edge("delta", "ds", 0, 0.0, "data", "D"), Edge("ds", "dk", 0, 0.0, "data", "dS registers"),
            Edge("dk", "have_dk", 0, summed, "data", "dK accumulator"),
            # A tile is free again when both warpgroups have multiplied by it.
            Edge("have_s", "load_q", STAGES, self.arrive, "buffer", "Q slot"),
            Edge("have_dk", "load_q", STAGES, self.arrive, "buffer", "Q slot"),
            Edge("have_dp", "load_do", STAGES, self.arrive, "buffer", "dO slot"),
            Edge("have_dv", "load_do", STAGES, self.arrive, "buffer", "dO slot"),
        )  # fmt: skip


class _OwnKeys(Warpgroups):
    """dK and dV of 128 keys, half of them in each warpgroup."""

    def group(self, g: int) -> tuple[list[Op], list[Edge], tuple[Step, ...]]:
        w, m, role = self.w, self.m, f"keys{g}"
        d, dv, elements = w.head_dim_qk, w.head_dim_v, float(TILE * TILE)
        exp, ds = probabilities(m, w, elements), differences(m, w, elements)
        ops = [
            self.hold(f"begin{g}", role, self.poll),
            product(w, m, f"s{g}", "s", role, g, TILE, d, "smem"),
            self.hold(f"have_s{g}", role, 0.0),
            self.shared(f"lse{g}", "terms", role, g, term_port_bytes(), TERM_LOADS, loads=True),
            arithmetic(m, f"exp{g}", "exp", role, g, exp, common.ramp_latency(m), common.one_warp_cycles(m, exp)),
            self.hold(f"turn{g}", role, self.poll),
            product(w, m, f"dp{g}", "dp", role, g, TILE, dv, "smem"),
            product(w, m, f"dv{g}", "dv", role, g, dv, TILE, "register"),
            self.hold(f"have_dp{g}", role, 0.0),
            self.shared(f"delta{g}", "terms", role, g, term_port_bytes(), TERM_LOADS, loads=True),
            arithmetic(m, f"ds{g}", "ds", role, g, ds, m["fma.latency_cycles"] + m["alu.latency_cycles"], common.one_warp_cycles(m, ds)),
            self.hold(f"have_dv{g}", role, self.signal),
            product(w, m, f"dk{g}", "dk", role, g, d, TILE, "register"),
            arithmetic(m, f"step{g}", "bookkeeping", role, g, step_work(m, *_OWN_STEP), 0.0),
            self.hold(f"have_dk{g}", role, self.signal),
        ]  # fmt: skip
        done, summed = self.done("smem"), self.done("register")
        edges = [
            Edge("load_q", f"begin{g}", 0, self.landed, "data", "Q"), Edge("load_do", f"turn{g}", 0, self.landed, "data", "dO"),
            Edge(f"s{g}", f"have_s{g}", 0, done, "data", "S accumulator"), Edge(f"have_s{g}", f"exp{g}", 0, 0.0, "data", "S accumulator"),
            Edge(f"lse{g}", f"exp{g}", 0, 0.0, "data", "LSE"), Edge(f"exp{g}", f"dv{g}", 0, 0.0, "data", "P registers"),
            Edge(f"exp{g}", f"ds{g}", 0, 0.0, "data", "P registers"), Edge(f"dp{g}", f"have_dp{g}", 0, done, "data", "dP accumulator"),
            Edge(f"have_dp{g}", f"ds{g}", 0, 0.0, "data", "dP accumulator"), Edge(f"delta{g}", f"ds{g}", 0, 0.0, "data", "D"),
            Edge(f"dv{g}", f"have_dv{g}", 0, summed, "data", "dV accumulator"), Edge(f"ds{g}", f"dk{g}", 0, 0.0, "data", "dS registers"),
            Edge(f"dk{g}", f"have_dk{g}", 0, summed, "data", "dK accumulator"),
            Edge(f"have_dk{g}", "load_q", STAGES, self.arrive, "buffer", "Q slot"),
            Edge(f"have_dv{g}", "load_do", STAGES, self.arrive, "buffer", "dO slot"),
        ]  # fmt: skip
        return ops, edges, tuple(Step(op.name) for op in ops)

    def pipeline(self) -> Pipeline:
        w, m = self.w, self.m
        d, dv, size, rows = w.head_dim_qk, w.head_dim_v, w.dtype_bytes, 2 * TILE
        groups, owned = [self.group(g) for g in (0, 1)], rows * (d + dv) * size
        return Pipeline(
            name=f"fa3 backward apart, keys {rows}x{TILE}", machine=m.name,
            ops=(self.copy("load_q", "load", TILE * d * size), self.copy("load_do", "load", TILE * dv * size),
                 *(op for ops, _, _ in groups for op in ops)),
            edges=tuple(edge for _, edges, _ in groups for edge in edges),
            roles=(Role("load", (Step("load_q"), Step("load_do")), 1, 24),
                   *(Role(f"keys{g}", groups[g][2], WARPS, 240) for g in (0, 1))),
            buffers=(
                Buffer("K", "smem", rows * d * size, 1, "", "s0"), Buffer("V", "smem", rows * dv * size, 1, "", "dp0"),
                Buffer("Q", "smem", TILE * d * size, STAGES, "load_q", "dk0"),
                Buffer("dO", "smem", TILE * dv * size, STAGES, "load_do", "dv0"),
                Buffer("dK", "registers", rows * d * kernels.FLOAT, 1, "dk0", ""),
                Buffer("dV", "registers", rows * dv * kernels.FLOAT, 1, "dv0", ""),
            ),
            rows_per_cta=rows, keys_per_iteration=TILE, ctas_per_sm=1, prologue_cycles=self.start(9),
            epilogue_cycles=self.leave(TILE * (d + dv)), edge_read_bytes=owned, edge_write_bytes=owned,
            tiles_overlap=False,
            mask_demand=tuple((f"exp{g}", common.mask_work(m, TILE * TILE * 2.0)) for g in (0, 1)),
        )  # fmt: skip


class _Queries(Warpgroups):
    """dQ of 128 queries."""

    def group(self, g: int) -> tuple[list[Op], list[Edge], tuple[Step, ...]]:
        w, m, role = self.w, self.m, f"queries{g}"
        d, dv, elements = w.head_dim_qk, w.head_dim_v, float(TILE * TILE)
        exp, ds = probabilities(m, w, elements), differences(m, w, elements)
        ops = [
            self.hold(f"begin{g}", role, self.poll),
            product(w, m, f"s{g}", "s", role, g, TILE, d, "smem"),
            self.hold(f"have_v{g}", role, self.poll),
            product(w, m, f"dp{g}", "dp", role, g, TILE, dv, "smem"),
            self.hold(f"have_s{g}", role, 0.0),
            arithmetic(m, f"exp{g}", "exp", role, g, exp, common.ramp_latency(m), common.one_warp_cycles(m, exp)),
            self.hold(f"have_dp{g}", role, self.signal + self.barrier),
            arithmetic(m, f"ds{g}", "ds", role, g, ds, m["fma.latency_cycles"] + m["alu.latency_cycles"], common.one_warp_cycles(m, ds)),
            product(w, m, f"dq{g}", "dq", role, g, d, TILE, "register"),
            arithmetic(m, f"step{g}", "bookkeeping", role, g, step_work(m, *_QUERY_STEP), 0.0),
            self.hold(f"have_dq{g}", role, self.signal),
        ]  # fmt: skip
        done, summed = self.done("smem"), self.done("register")
        edges = [
            Edge("load_k", f"begin{g}", 0, self.landed, "data", "K"), Edge("load_v", f"have_v{g}", 0, self.landed, "data", "V"),
            Edge(f"s{g}", f"have_s{g}", 0, done, "data", "S accumulator"), Edge(f"have_s{g}", f"exp{g}", 0, 0.0, "data", "S accumulator"),
            Edge(f"exp{g}", f"ds{g}", 0, 0.0, "data", "P registers"), Edge(f"dp{g}", f"have_dp{g}", 0, done, "data", "dP accumulator"),
            Edge(f"have_dp{g}", f"ds{g}", 0, 0.0, "data", "dP accumulator"), Edge(f"ds{g}", f"dq{g}", 0, 0.0, "data", "dS registers"),
            Edge(f"dq{g}", f"have_dq{g}", 0, summed, "data", "dQ accumulator"),
            Edge(f"have_dq{g}", "load_k", STAGES, self.arrive, "buffer", "K slot"),
            Edge(f"have_dp{g}", "load_v", value_stages(w), self.arrive, "buffer", "V slot"),
        ]  # fmt: skip
        return ops, edges, tuple(Step(op.name) for op in ops)

    def pipeline(self) -> Pipeline:
        w, m = self.w, self.m
        d, dv, size, rows = w.head_dim_qk, w.head_dim_v, w.dtype_bytes, 2 * TILE
        groups = [self.group(g) for g in (0, 1)]
        return Pipeline(
            name=f"fa3 backward apart, queries {rows}x{TILE}", machine=m.name,
            ops=(self.copy("load_k", "load", TILE * d * size), self.copy("load_v", "load", TILE * dv * size),
                 *(op for ops, _, _ in groups for op in ops)),
            edges=tuple(edge for _, edges, _ in groups for edge in edges),
            roles=(Role("load", (Step("load_k"), Step("load_v")), 1, 24),
                   *(Role(f"queries{g}", groups[g][2], WARPS, 240) for g in (0, 1))),
            buffers=(
                Buffer("Q", "smem", rows * d * size, 1, "", "s0"), Buffer("dO", "smem", rows * dv * size, 1, "", "dp0"),
                Buffer("K", "smem", TILE * d * size, STAGES, "load_k", "dq0"), Buffer("V", "smem", TILE * dv * size, value_stages(w), "load_v", "dp0"),
                Buffer("dQ", "registers", rows * d * kernels.FLOAT, 1, "dq0", ""),
            ),
            rows_per_cta=rows, keys_per_iteration=TILE, ctas_per_sm=1, prologue_cycles=self.start(7),
            epilogue_cycles=self.leave(TILE * d), edge_read_bytes=rows * (d + dv) * size, edge_write_bytes=rows * d * size,
            tiles_overlap=False,
            mask_demand=tuple((f"exp{g}", common.mask_work(m, TILE * TILE * 2.0)) for g in (0, 1)),
        )  # fmt: skip
