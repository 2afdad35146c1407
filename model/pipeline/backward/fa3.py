"""A Hopper backward of five products as `hopper_bwd` writes it: two warpgroups with 64 keys each, dQ summed by the copy engine.

A warpgroup has S^T = K Q^T and dP^T = V dO^T of its keys, so that P^T and dS^T are the register operands of dV and dK.
dQ = dS K sums over the keys of both: dS goes through shared memory and a barrier, each warpgroup multiplies half of dQ, and
what it gets goes through shared memory once more, from where warps have it added to a float32 sum in L2.

Steps of 128 queries (head_dim 64) go in two halves: S and dP of the second are under way while the first is exponentiated.
Both warpgroups do the same at about the same time; what lies between them is the dS that each waits for.

With `folded` a product of scores takes 16 columns more, in which three bf16 pieces of the LSE of each query meet ones, and with
"both" that of dP does so with D: what comes out is less those numbers, which no thread loads then.  With `held` the operands from
K and V are registers.

With `persistent` programs stay: the next block's Q and dO are fetched under the last steps of the one before, and so are K and V that
are held; those that are not follow the last products that read them.  dK and dV leave by way of the slots of dQ, and the warps that add dQ
wait until they are stored.

At 192/128 (`thirds`) dK and dV leave few registers: dP^T is issued once P^T is there, dV and dK once dS^T is stored, dK from there.  A
warpgroup makes 64 columns of dQ and by turns the last 64, each told of as soon as it is in shared memory, and dO has one tile.

With `ahead` a lap of the loop begins with S^T of its step, issued while dQ of the step before is under way; that dQ is stored
next, and the other products follow once S^T is there.
"""

from __future__ import annotations

from tilecast.model.kernel.variants.fa3_backward import (
    KEYS,
    ONCE_ROWS,
    PIECES,
    STAGES,
    TILE_N,
    Fa3BackwardVariant,
    abreast,
    chains,
    dout_stages,
    loaded_terms,
    piece_bytes,
    piece_slots,
    sums,
    thirds,
)
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline import softmax_cost as common
from tilecast.model.pipeline.backward import kernels
from tilecast.model.pipeline.backward.arithmetic import differences, probabilities, step_work
from tilecast.model.pipeline.backward.parts import parts_of
from tilecast.model.pipeline.backward.warps import TERM_LOADS, WARPS, Warpgroups, term_port_bytes
from tilecast.model.pipeline.fa3 import arithmetic, product
from tilecast.model.pipeline.graph import Buffer, Edge, Engine, Op, Pipeline, Role, Step
from tilecast.model.pipeline.hopper.order import ROWS

#: Instructions of a warp and half step that do not scale with the tile: on the ALU, on the FMA pipe, others (machine code of the
#: generated kernels, `tilecast inspect --kernel gradients`).
_STEP = 40.0, 10.0, 80.0
_GROUPS = (0, 1)


def build(workload: Workload, variant: Fa3BackwardVariant, machine: Machine) -> kernels.BackwardPass:
    """The launches of ``variant``; legality is the caller's business."""
    w, v = workload, variant
    pipeline = _Loop(w, v, machine).pipeline()
    tile = v.tile_m * w.head_dim_qk * kernels.FLOAT
    # A program's tile is added, its turn passed on by way of L2, and seen there by the next one.
    turn = kernels.add_cycles(machine, tile, together=True) + 2 * machine["l2.latency_cycles"]
    terms = loaded_terms(v) * kernels.FLOAT + piece_bytes(v)
    moving = (w.head_dim_qk + w.head_dim_v) * w.dtype_bytes + terms
    parts = parts_of(w, TILE_N, ONCE_ROWS, 0.0, machine)
    made, by_chains = sums(v, w, parts), chains(v, w, parts)
    # Of the blocks before one of its chain only every so many-th holds it up; with a sum for each block none does.
    turn = turn / made if made == by_chains else 0.0
    main = kernels.LoopKernel(
        "gradients", "keys", pipeline, 2.0 * (3 * w.head_dim_qk + 2 * w.head_dim_v),
        step_bytes=v.tile_m * moving, added_bytes=tile, row_bytes=moving, sum_row_bytes=made * w.head_dim_qk * kernels.FLOAT,
        heads_abreast=abreast(v, w, parts), turn_cycles=turn, query_heads=-(-w.group_size // parts), parts=parts,
        turnaround_cycles=_turnaround(w, v, machine) if v.persistent else None,
    )  # fmt: skip
    return kernels.BackwardPass(
        (
            kernels.row_terms(w, v.tile_m, terms),
            main,
            kernels.round_sums(w, made),
            *kernels.sum_parts(w, parts, beside=True),
        )
    )


def _turnaround(w: Workload, v: Fa3BackwardVariant, m: Machine) -> float:
    """Cycles between two tiles of a program that stays: dK and dV into shared memory, K and V out of it or into it."""
    port, engine = m["smem.bytes_per_clk"], m["tma.bytes_per_clk"]
    wide, size = w.head_dim_qk + w.head_dim_v, w.dtype_bytes
    # A tile's end, its sums' slots, and which tile is next.
    told = (3 + 2 * (not v.held)) * m["sync.mbarrier_roundtrip_cycles"]
    sums = TILE_N * wide * size / port
    if v.held:
        return told + sums + TILE_N * wide * size / port
    # They are fetched once the last dQ is there, while the sums go into shared memory.
    return told + max(sums, m["tma.latency_l2_cycles"] + TILE_N * wide * size / engine)


class _Loop(Warpgroups):
    """The pieces of the loop; a namespace for values that most pieces need."""

    def __init__(self, w: Workload, v: Fa3BackwardVariant, m: Machine) -> None:
        super().__init__(w, m)
        self.v = v
        #: Parts of a step of 64 queries, by the letter that its operations end in.
        self.parts = ("a", "b")[: v.tile_m // ROWS]
        #: Whether scores come less LSE, and dP less D.
        self.less_lse, self.less_d = v.folded != "none", v.folded == "both"
        #: Tiles of Q, K and dQ that are a head, where dQ leaves by them.
        self.thirds = w.head_dim_qk // ROWS if thirds(w) else 0

    # -- operations --------------------------------------------------------------------------------------------------

    def group(self, g: int) -> list[Op]:
        """Operations of a warpgroup."""
        w, v, m, role = self.w, self.v, self.m, f"keys{g}"
        elements, ramp = float(KEYS * ROWS), common.ramp_latency(m)
        d, dv = w.head_dim_qk, w.head_dim_v
        exp = probabilities(m, w, elements)
        ds = differences(m, w, elements, 1 if self.less_d else 2)
        home = "register" if v.held else "smem"
        columns, columns_v = d + PIECES * self.less_lse, dv + PIECES * self.less_d
        found = [self.hold(f"ahead{g}", role, self.poll, g)]
        for part in self.parts:
            found += [
                product(w, m, f"s{part}{g}", "s", role, g, ROWS, columns, home),
                product(w, m, f"dp{part}{g}", "dp", role, g, ROWS, columns_v, home),
                *([] if self.less_lse else [self._terms(f"lse{part}{g}", role, g)]),
                arithmetic(m, f"exp{part}{g}", "exp", role, g, exp, ramp, common.one_warp_cycles(m, exp)),
                product(w, m, f"dv{part}{g}", "dv", role, g, dv, ROWS, "register"),
                *([] if self.less_d else [self._terms(f"delta{part}{g}", role, g)]),
                arithmetic(m, f"ds{part}{g}", "ds", role, g, ds, m["fma.latency_cycles"] + m["alu.latency_cycles"],
                           common.one_warp_cycles(m, ds)),
                self.shared(f"store{part}{g}", "ds to shared memory", role, g, elements * w.dtype_bytes, 4, loads=False),
                product(w, m, f"dk{part}{g}", "dk", role, g, d, ROWS, "smem" if self.thirds else "register", self.thirds or 1),
            ]  # fmt: skip
        half = v.tile_m * d / len(_GROUPS)
        others = step_work(m, *_STEP).scaled(len(self.parts))
        return [
            *found,
            self.hold(
                f"tell{g}",
                role,
                m.get("sync.fence_async_cycles", 0.0) + self.signal + self.barrier * (len(self.parts) - 1),
                g,
            ),
            self.hold(f"have_ds{g}", role, self.poll + self.barrier, g),
            product(w, m, f"dq{g}", "dq", role, g, d // 2 if self.thirds else ROWS, TILE_N, "smem", self.thirds / 2 or 1),
            self.hold(f"room{g}", role, self.poll + self.barrier, g),
            # As registers hold it, 16 bytes of a thread and no bank twice; in rows, 8 bytes, of which two go to a bank at a time.
            self.shared(f"out{g}", "dq to shared memory", role, g, half * kernels.FLOAT * (1 if v.fragments else 2),
                        half / (128 if v.fragments else 64) / WARPS, loads=False),
            arithmetic(m, f"step{g}", "bookkeeping", role, g, others, 0.0),
            self.hold(f"done{g}", role, self.signal, g),
        ]  # fmt: skip

    def _terms(self, name: str, role: str, g: int) -> Op:
        return self.shared(name, "terms", role, g, term_port_bytes(), TERM_LOADS, loads=True)

    @property
    def loads(self) -> tuple[str, ...]:
        """Copies of a step."""
        return ("load_q", "load_do", *(("load_pieces",) if self.less_lse else ()))

    def copies(self) -> list[Op]:
        """Loads of Q and dO, and the addition of dQ."""
        w, v, m = self.w, self.v, self.m
        rows = v.tile_m * w.dtype_bytes
        size = v.tile_m * w.head_dim_qk * kernels.FLOAT
        # It looks whether its turn has come, which is a way to L2 and back at least.
        read = size / m["smem.bytes_per_clk"]
        alone = max(m["l2.latency_cycles"] + kernels.add_cycles(m, size), read)
        # A warp waits until its tile is added before it takes the next: two have one each under way.
        by_turns: Engine = "tma" if v.adders > 1 else ""
        add = (
            Op("add", "add dq", "add", (("smem", read),), alone, engine=by_turns,
               issue_cycles=m["tma.issue_cycles"] if by_turns else 0.0)
        )  # fmt: skip
        return [
            self.copy("load_q", "load", rows * w.head_dim_qk),
            self.copy("load_do", "load", rows * w.head_dim_v),
            *([self.copy("load_pieces", "load", v.tile_m * piece_bytes(v))] if self.less_lse else []),
            add,
        ]

    # -- dependences -------------------------------------------------------------------------------------------------

    def edges(self) -> list[Edge]:
        v = self.v
        done, summed = self.done("smem"), self.done("register")
        # Laps from a step's dQ to its way out.
        lag = int(v.ahead)
        found = []
        last = self.parts[-1]
        for g in _GROUPS:
            found += [Edge(load, f"ahead{g}", 0, self.landed, "data", "Q and dO") for load in self.loads]
            for i, part in enumerate(self.parts):
                found += [
                    Edge(f"s{part}{g}", f"exp{part}{g}", 0, done, "data", "S accumulator"),
                    *([] if self.less_lse else [Edge(f"lse{part}{g}", f"exp{part}{g}", 0, 0.0, "data", "LSE")]),
                    Edge(f"exp{part}{g}", f"dv{part}{g}", 0, 0.0, "data", "P registers"),
                    Edge(f"dp{part}{g}", f"ds{part}{g}", 0, done, "data", "dP accumulator"),
                    Edge(f"exp{part}{g}", f"ds{part}{g}", 0, 0.0, "data", "P registers"),
                    *([] if self.less_d else [Edge(f"delta{part}{g}", f"ds{part}{g}", 0, 0.0, "data", "D")]),
                    Edge(f"ds{part}{g}", f"store{part}{g}", 0, 0.0, "data", "dS registers"),
                    Edge(f"ds{part}{g}", f"dk{part}{g}", 0, 0.0, "data", "dS registers"),
                ]
                if i:
                    # The second half's exponentials take the registers of the first half's P, its differences those of dS.
                    before = self.parts[i - 1]
                    found += [
                        Edge(f"dv{before}{g}", f"exp{part}{g}", 0, summed, "buffer", "P registers"),
                        Edge(f"dk{before}{g}", f"ds{part}{g}", 0, summed, "buffer", "dS registers"),
                    ]
            if v.ahead:
                found += [
                    Edge(f"dv{last}{g}", f"sa{g}", 1, summed, "buffer", "dS registers"),
                    Edge(f"dk{last}{g}", f"sa{g}", 1, summed, "buffer", "dS registers"),
                    # A product carried around the loop in flight would be copied: it is waited for first.
                    Edge(f"sa{g}", f"dpa{g}", 0, done, "order", "S accumulator"),
                ]
            found += [Edge(f"store{last}{g}", f"tell{g}", 0, 0.0, "data", "dS in shared memory")]
            found += [Edge(f"tell{other}", f"have_ds{g}", 0, self.arrive, "data", "dS of both") for other in _GROUPS]
            found += [
                Edge(f"have_ds{g}", f"dq{g}", 0, 0.0, "data", "dS of both"),
                # Products end in the order in which they were issued.
                Edge(f"dv{last}{g}", f"room{g}", lag, summed, "data", "dV accumulator"),
                Edge(f"dq{g}", f"room{g}", lag, done, "data", "dQ accumulator"),
                Edge(
                    "add",
                    f"room{g}",
                    v.dq_slots if self.thirds else v.dq_slots - 1 + lag,
                    self.arrive,
                    "buffer",
                    "dQ slot",
                ),
                Edge(f"room{g}", f"out{g}", 0, 0.0, "order", "dQ slot"),
                Edge(f"dk{last}{g}", f"done{g}", lag, summed, "data", "dK accumulator"),
            ]
            if self.thirds:
                found += [
                    Edge(f"out{g}", "add", 0, self.signal + self.arrive, "data", "dQ in shared memory"),
                    Edge(f"dva{g}", "load_do", 1, summed + self.signal + self.arrive, "buffer", "dO slot"),
                    Edge(f"done{g}", "load_q", STAGES, self.arrive, "buffer", "Q slot"),
                ]
                continue
            # The tile of a step goes out with the dS of the next.
            found += [
                Edge(f"out{g}", "add", 1 - lag, 0.0, "data", "dQ in shared memory"),
                Edge(f"tell{g}", "add", 0, self.arrive, "order", "dQ in shared memory"),
            ]
            slots = piece_slots(v)
            found += [
                Edge(f"done{g}", load, STAGES - lag, self.arrive, "buffer", "Q and dO slot")
                for load in self.loads
                if load != "load_pieces" or slots == STAGES
            ]
            if slots == 1:
                # The only tile of pieces, given back as soon as S is there.
                found += [Edge(f"s{last}{g}", "load_pieces", 1, done + self.arrive, "buffer", "pieces of LSE")]
        return found

    def program(self, g: int) -> tuple[Step, ...]:
        if self.thirds:
            lap = ["sa", "lsea", "expa", "dpa", "deltaa", "dsa", "storea", "tell", "dva"]
        elif len(self.parts) == 1:
            lap = ["sa", "dpa", "lsea", "expa", "dva", "deltaa", "dsa", "storea", "tell"]
        else:
            lap = ["sa", "dpa", "sb", "lsea", "expa", "dva", "deltaa", "dsa", "storea", "dka", "dpb", "lseb", "expb", "dvb",
                   "deltab", "dsb", "storeb", "tell"]  # fmt: skip
        last = f"dk{self.parts[-1]}"
        if self.v.ahead:
            lap = ["sa", "done", "room", "out", *lap[1:], last, "have_ds", "dq"]
        elif self.v.dk_first:
            lap += [last, "have_ds", "dq", "done", "room", "out"]
        else:
            lap += ["have_ds", "dq", last, "room", "out", "done"]
        gone = (("lse",) if self.less_lse else ()) + (("delta",) if self.less_d else ())
        return tuple(Step(f"{name}{g}") for name in ("ahead", *lap, "step") if not name.startswith(gone))

    def _name(self) -> str:
        v = self.v
        told = (
            (v.dk_first, " dK first"),
            (v.ahead, " ahead"),
            (v.held, " held"),
            (v.persistent, " persistent"),
            (self.thirds > 0, " thirds"),
            (self.less_lse, f" folded {v.folded}"),
        )
        return "".join(text for holds, text in told if holds)

    def pipeline(self) -> Pipeline:
        w, v, m = self.w, self.v, self.m
        d, size = w.head_dim_qk, w.dtype_bytes
        owned = TILE_N * (d + w.head_dim_v)
        masked = common.mask_work(m, KEYS * ROWS * 2.0)
        return Pipeline(
            name=f"fa3 backward {v.tile_m}x{TILE_N}" + self._name(), machine=m.name,
            ops=(*self.copies(), *(op for g in _GROUPS for op in self.group(g))), edges=tuple(self.edges()),
            roles=(
                Role("load", tuple(Step(load) for load in self.loads), 1, 24), Role("add", (Step("add"),), v.adders, 24),
                *(Role(f"keys{g}", self.program(g), WARPS, 240) for g in _GROUPS),
            ),
            buffers=(
                Buffer("K", "smem", TILE_N * d * size, 1, "", "sa0"),
                Buffer("V", "registers" if v.held else "smem", TILE_N * w.head_dim_v * size, 1, "", "dpa0"),
                *([Buffer("LSE and D", "smem", v.tile_m * piece_bytes(v), piece_slots(v), "load_pieces", f"s{self.parts[-1]}0")] if self.less_lse else []),
                Buffer("Q", "smem", v.tile_m * d * size, STAGES, "load_q", f"dk{self.parts[-1]}0"),
                Buffer("dO", "smem", v.tile_m * w.head_dim_v * size, dout_stages(w), "load_do", f"dv{self.parts[-1]}0"),
                Buffer("dS", "smem", TILE_N * v.tile_m * size, STAGES, f"store{self.parts[-1]}0", "dq0"),
                Buffer("dQ", "smem", v.tile_m * d * kernels.FLOAT, v.dq_slots, "out0", "add"),
                Buffer("dK", "registers", TILE_N * d * kernels.FLOAT, 1, f"dk{self.parts[-1]}0", ""),
                Buffer("dV", "registers", TILE_N * w.head_dim_v * kernels.FLOAT, 1, f"dv{self.parts[-1]}0", ""),
            ),
            rows_per_cta=TILE_N, keys_per_iteration=v.tile_m, ctas_per_sm=1,
            prologue_cycles=self.start(3 * STAGES + v.dq_slots + 1),
            # dV and then dK go through the rows of V, each waited for.
            epilogue_cycles=2 * self.leave(TILE_N * d),
            edge_read_bytes=owned * size, edge_write_bytes=owned * size, tiles_overlap=False,
            mask_demand=tuple((f"exp{part}{g}", masked) for g in _GROUPS for part in self.parts),
        )  # fmt: skip
