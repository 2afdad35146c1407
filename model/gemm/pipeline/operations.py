"""The operations of a GEMM's stream of tiles: copies of A and B by k-steps, products, epilogue, C on its way in, D out."""

from __future__ import annotations

from tilecast.model.gemm.code import CodeCycles
from tilecast.model.gemm.families import boxes, column_pieces, ctas_per_sm, stage_bytes
from tilecast.model.gemm.traffic import l2_rates, memory_bytes, memory_latency_cycles, tiling
from tilecast.model.gemm.variant import GemmVariant
from tilecast.model.gemm.workload import Gemm
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline import softmax_cost as common
from tilecast.model.pipeline.graph import Engine, Op
from tilecast.model.pipeline.tensor_core import (
    INSTRUCTIONS_PER_MMA,
    mma_completion_latency_cycles,
    mma_smem_bytes,
    mma_sync_tile_cycles,
    mma_tile_cycles,
)

#: Instructions of an epilogue that do not scale with the tile: addresses, barriers, the tile's coordinates (as a step of the
#: attention kernels; not counted in machine code yet).
_EPILOGUE_INSTRUCTIONS = 56
#: Barriers of a warpgroup in an epilogue (before the store, after it) and polls of an mbarrier (accumulator, C).
_BARRIERS, _POLLS = 2, 2
#: Of the memory's rate: no launch finds more left than if it used so much of it.
_LEAST_BUSY = 0.05
#: What stands for no bytes, as an operation takes time.
_NOTHING = 1e-6
#: Share of k-steps that come from the memory from which on all are taken to.
_MOSTLY = 0.75
#: Bytes of a line of L2, and what it asks the memory for at a time (the L2 promotion of Triton's tensor maps).
LINE_BYTES = 128


class Operations:
    """The operations of one GEMM pipeline, and values that most of its pieces need."""

    def __init__(self, gemm: Gemm, v: GemmVariant, m: Machine, mhz: float, memory: bool, most_steps: int, code: CodeCycles | None, memory_busy: float) -> None:  # fmt: skip
        self.gemm, self.v, self.m, self.code = gemm, v, m, code
        self.portable = v.family == "gemm_triton"
        self.hopper = v.family == "gemm_hopper"
        self.ctas = ctas_per_sm(v, gemm, m)
        #: Tiles in one iteration, and the warp groups that multiply or that write a tile.
        self.tiles = self.ctas if self.portable else v.accumulators if self.hopper else 1
        self.halves = 2 if self.hopper and v.accumulators == 1 and not v.joined else 1
        #: Boxes of C and D of a tile.
        self.boxes = boxes(v)
        self.pieces = self.halves * self.boxes
        self.on_chip = tiling(gemm, v, m)
        self.steps = min(self.on_chip.steps, most_steps)
        #: From an order to copy to its bytes being there, on average over the tiles: what an earlier wave brought comes from L2.
        self.c_latency = memory_latency_cycles(m, memory_busy) if memory else m["tma.latency_hbm_cycles"]
        fresh = self.on_chip.fresh_share if memory else 0.0
        self.latency = fresh * self.c_latency + (1.0 - fresh) * m["tma.latency_l2_cycles"]
        self.arrive = m["sync.mbarrier_roundtrip_cycles"]
        if v.cta_group == 2:
            self.arrive = max(self.arrive, m["sync.cluster_arrive_cycles"])
        #: From an arrival to who waits for it on the same SM.
        self.notice = m.get("sync.mbarrier_one_way_cycles", m["sync.mbarrier_roundtrip_cycles"] / 2)
        busy_sms = min(m["chip.sm_count"], float(self.on_chip.tiles * v.cta_group))
        #: Bytes a clock that an SM has of the chip's memory; 0 stands for no limit.
        self.share = m["hbm.tbps_achieved"] * 1e6 / mhz / busy_sms if memory else 0.0
        #: A tile's bytes of memory on one SM.
        per = float(self.on_chip.tiles * v.cta_group)
        inputs, c, d = memory_bytes(gemm, v, self.on_chip)
        self.step_bytes = inputs / per / self.on_chip.steps
        self.c_bytes, self.d_bytes = c / per, d / per
        self.port = m["tma.bytes_per_clk"]
        # Neighbours that copy at the same time: no SM gets its k-steps faster.
        self.fill = min(self.port, m.get("l2.bytes_per_clk_per_sm_lockstep", m["l2.bytes_per_clk_per_sm"]))
        self.l2 = l2_rates(v, m, mhz, self.on_chip.rows, self.on_chip.tiles) if memory else None
        #: Whether copies wait for the memory in the order in which they were asked for (the copy engine's).
        self.in_turn = memory and not self.portable
        #: Whether k-steps come from the memory, of whose rate they find what the launch leaves.
        self.fresh_steps = self.in_turn and self.hopper and v.parts == 1 and self.on_chip.most > 1 and fresh >= _MOSTLY
        self.left = self.share / max(memory_busy, _LEAST_BUSY)
        self.queued = self._queued() if self.hopper else 0.0
        #: Of a k-step: cycles in which L2 sends on what has come while the memory sends the rest.
        self.overlap = 0.0
        if self.l2 and self.in_turn:
            size = float(stage_bytes(v, gemm))
            self.overlap = min(self.step_bytes / self.share, max(size / self.fill, size / self.l2.inputs))

    def suffix(self, half: int) -> str:
        """What the name of an operation of a half ends in, where tiles have halves."""
        return f"h{half}" if self.halves == 2 else ""

    def _queued(self) -> float:
        """Cycles from a warpgroup's first product of a k-step that finds the array idle until its last is issued: the array's queue, which
        warpgroups share, takes so many, and the others wait until one of these is done."""
        v, m, g = self.v, self.m, self.gemm
        widths = column_pieces(v.tile_n)
        along = v.tile_k * g.dtype_bytes / 32
        count = v.tile_m / 64 * len(widths) * along
        cycles = v.tile_m / 64 * sum(mma_tile_cycles(m, 64, width, v.tile_k, g.dtype, "smem") for width in widths)
        return max(0.0, count - m.get("tensor.mma_queue_depth", count)) * cycles / count

    def ordered_by(self, copy: str) -> str:
        """The operation that orders a copy: of one that waits its turn, another."""
        if not self.in_turn:
            return copy
        return copy.replace("load", "order" if copy == "load" and self.fresh_steps else "ask")

    def line_of(self, part: int) -> tuple[int, int]:
        """Of the ranges of columns whose rows begin in the line of L2 that those of ``part`` begin in: the first, and how many they are."""
        rows = self.boxes // self.v.c_parts
        column, across = divmod(part, rows)
        bytes_of_row = self.v.tile_n // self.v.c_parts * self.gemm.c_bytes
        share = max(1, LINE_BYTES // bytes_of_row)
        return column // share * share * rows + across, min(share, self.v.c_parts - column // share * share)

    def ends(self, half: int) -> list[str]:
        """What the names of a half's operations on C and D end in, one for every box."""
        parts = range(self.boxes)
        return [self.suffix(half) + (f"p{part}" if len(parts) > 1 else "") for part in parts]

    # -- operations --------------------------------------------------------------------------------------------

    def copy(self, name: str, kind: str, role: str, tile: int, size: float, memory_bytes: float, rate: float, port: float, copies: float = 1.0, least: float = 0.0) -> Op:  # fmt: skip
        """A bulk copy of ``size`` bytes through a port of ``port`` bytes a clock, ``memory_bytes`` of which are the memory's; L2 has it at ``rate``
        bytes a clock for the SM (0: no limit).  Its warp's code takes ``least`` cycles.

        Where the memory counts an SM's copies are served in order, by the memory what is written and by L2 what comes from there.  In the SM's
        own pace a role of copies is held by each for as long as its port is.  How long a copy is on its way after that is for its edges to
        say.  Warps that do other things go on at once.
        """
        demand = [("tma", size / port)]
        if rate:
            demand.append(("l2_store" if kind == "store" else "l2", size / rate))
        if self.share and memory_bytes:
            demand.append(("memory", memory_bytes / self.share))
        issue = max(copies * self.m["tma.issue_cycles"], least)
        taken = max(cycles for _, cycles in demand)
        in_order: Engine = ("memory" if kind == "store" else "l2") if self.in_turn else ""
        engine: Engine = "tma" if role.startswith("warps") else in_order
        return Op(
            name, kind, role, tuple(demand), taken if in_order else max(issue, taken), engine=engine,
            issue_cycles=issue if engine else 0.0, tile=tile, instructions=(("other", 2.0),),
        )  # fmt: skip

    def ask(self, name: str, role: str, tile: int, memory_bytes: float, issue: float) -> Op:
        """The order to copy: behind all that the SM asked the memory for before, for as long as the memory takes for these bytes.

        What L2 holds waits as well: requests of an SM go one way, and where the memory is behind they stand.
        """
        cycles = memory_bytes / self.share
        return Op(name, "load", role, (("memory", cycles),), cycles, engine="memory", issue_cycles=issue, tile=tile)

    def arrival(self, name: str, role: str, tile: int, size: float, rate: float, port: float) -> Op:
        """What was asked for on its way from L2, behind all that was before it; no warp has to do with it."""
        return self.copy(name, "load", role, tile, size, 0.0, rate, port)._replace(issue_cycles=0.0, instructions=())

    def store(self, t: int, end: str) -> Op:
        """Columns of D of a tile or of a half; its warp waits until the copy engine has read them."""
        size = float(self.v.tile_m * self.v.tile_n * self.gemm.d_bytes) / self.pieces
        role, name = f"warps{t}" if self.portable else "store", f"store{t}{end}"
        made = self.copy(name, "store", role, t, size, self.d_bytes / self.pieces, self.l2.writes if self.l2 else 0.0, self.port)  # fmt: skip
        return made._replace(min_cycles=max(made.min_cycles, size / self.m.get("tma.store_bytes_per_clk", self.port)))

    def loads(self, t: int, s: int) -> list[Op]:
        """A k-step of A and B."""
        size, name = float(stage_bytes(self.v, self.gemm)), f"{t}_{s}"
        rate, least = self.l2.inputs if self.l2 else 0.0, self.step_least(s)
        if self.fresh_steps:
            issue = max(2.0 * self.m["tma.issue_cycles"], least)
            sent = self.step_bytes / self.left
            return [
                self.arrival(f"load{name}", "arrive", t, size, rate, self.port),
                Op(f"order{name}", "load", "load", (), issue, tile=t, instructions=(("other", 2.0),)),
                Op(f"ask{name}", "load", "queue", (("memory", sent),), sent, engine="memory", tile=t),
            ]
        if self.in_turn:
            issue = max(2.0 * self.m["tma.issue_cycles"], least)
            arrives = self.arrival(f"load{name}", "arrive", t, size, rate, self.fill)
            return [arrives, self.ask(f"ask{name}", "load", t, self.step_bytes, issue)]
        role = f"load{t}" if self.portable else "load"
        return [self.copy(f"load{name}", "load", role, t, size, self.step_bytes, rate, self.fill, 2.0, least)]

    def step_least(self, s: int) -> float:
        """Cycles of the code of the warp that copies, for a k-step; where programs meet it asks who has come and goes on."""
        return self.code.load_step + (self.code.load_tile if s == 0 else 0.0) if self.code else 0.0

    def mma(self, t: int, half: int, s: int) -> Op:
        """Product of k-step ``s`` into tile ``t``, by warpgroup ``half`` of those that share it."""
        v, m, dtype = self.v, self.m, self.gemm.dtype
        depth = v.tile_k
        role = f"consumer{t + half}" if self.hopper else f"warps{t}" if self.portable else "mma"
        name = f"mma{t}_{s}{self.suffix(half)}"
        if m.tensor_kind == "mma_sync":
            return self._mma_sync(name, role, t, depth)
        if m.tensor_kind == "wgmma":
            rows = v.tile_m / 64 / self.halves
            widths = column_pieces(v.tile_n)
            cycles = rows * sum(mma_tile_cycles(m, 64, width, depth, dtype, "smem") for width in widths)
            read = rows * sum(mma_smem_bytes(64, width, depth, dtype, "smem") for width in widths)
            count = len(widths) * rows * depth * self.gemm.dtype_bytes / 32 * INSTRUCTIONS_PER_MMA
        else:
            rows = v.tile_m * v.cta_group
            cycles = mma_tile_cycles(m, int(rows), v.tile_n, depth, dtype, "smem", v.cta_group)
            read = mma_smem_bytes(int(rows), v.tile_n, depth, dtype, "smem", v.cta_group)
            count = depth * self.gemm.dtype_bytes / 32 * INSTRUCTIONS_PER_MMA / 4 / v.cta_group
        demand = [("tensor", cycles), ("smem", min(read / m["smem.bytes_per_clk"], cycles)), ("issue", min(count, cycles))]  # fmt: skip
        if m.tensor_kind == "wgmma" and m.has("regs.mma_share"):
            demand.append(("regs", cycles * m["regs.mma_share"]))
        # The portable kernel waits for every product but the last one issued.
        return Op(name, "mma", role, tuple(demand), cycles, engine="tensor", issue_cycles=min(count, cycles), tile=t, instructions=(("other", count),))  # fmt: skip

    def _mma_sync(self, name: str, role: str, t: int, depth: int) -> Op:
        v, m = self.v, self.m
        cycles = mma_sync_tile_cycles(m, v.tile_m, v.tile_n, depth, self.gemm.dtype)
        # Warps stand in two rows (8 of them) or one (4): every warp reads its part of A and of B by ldmatrix.
        across = 4
        down = v.warps // across
        read = (v.tile_m * across + v.tile_n * down) * depth * self.gemm.dtype_bytes / m["smem.bytes_per_clk"]
        alone = max(cycles, read) + m["tensor.mma_latency_cycles"] + m["smem.latency_cycles"]
        return Op(name, "mma", role, (("tensor", cycles), ("smem", read)), alone, tile=t)

    def epilogue(self, t: int, half: int, end: str) -> Op:
        """From columns of the accumulator to D in shared memory (or, of the portable kernel, in registers on its way out)."""
        g, v, m = self.gemm, self.v, self.m
        elements = float(v.tile_m * v.tile_n) / self.pieces
        cycles, count = common.fma_cost(m, elements * g.scalings)
        # 16-bit C becomes FP32 by a shift or a mask an element; D is packed two by two.
        unpack = elements if g.c_bytes == 2 else 0.0
        packs = elements / 2.0 if g.d_bytes == 2 else 0.0
        done = common.work(
            m,
            {"fma": cycles, "alu": (unpack + packs) / m["alu.lanes"], "cvt": packs / m["cvt.f32x2_to_bf16x2_per_clk"]},
            {"fma": count, "alu": (unpack + packs) / 128.0, "other": _EPILOGUE_INSTRUCTIONS / self.boxes},
        )
        demand = list(done.cycles)
        through = 0.0 if self.portable else elements * (g.c_bytes + g.d_bytes) / m["smem.bytes_per_clk"]
        if through:
            demand.append(("smem", through))
        read = 0.0
        if m.tensor_kind == "tcgen05":
            read = elements * 4 / m["tmem.read_bytes_per_clk"]
            demand.append(("tmem_read", read))
        # Tensor memory, C, arithmetic and D of neighbouring columns overlap within a warp as straight-line code does.
        exposed = m.get("issue.one_warp_exposed_share", 0.0)
        parts = (common.one_warp_cycles(m, done), through, read)
        alone = max(parts) + exposed * (sum(parts) - max(parts)) + self._epilogue_waits(first=end == self.ends(half)[0])
        beside = 0.0
        if self.code:
            # Behind the last part a warpgroup that does not take turns goes on to its next tile's first product.
            part = self.ends(half).index(end)
            beside = self.code.epilogue_beside[part]
            if beside:
                beside += m.get("sync.box_beside_mma_cycles", 0.0)
            alone = self.code.epilogue[part] + (self.code.begin if self.tiles == 1 and part == self.boxes - 1 else 0.0)
        role = f"consumer{t + half}" if self.hopper else f"warps{t}" if self.portable else "epilogue"
        name = f"epilogue{t}{end}"
        return Op(
            name, "epilogue", role, tuple(demand), max([alone, *(c for _, c in demand)]), tile=t, instructions=done.instructions,
            beside_mma_cycles=beside,
        )  # fmt: skip

    def _epilogue_waits(self, first: bool) -> float:
        """Latencies, barriers and polls of a part of an epilogue; its ``first`` part also asks for the accumulator."""
        m = self.m
        waits = m["smem.latency_cycles"] + m.get("tmem.load_latency_cycles", 0.0) if not self.portable else 0.0
        waits += _BARRIERS * common.barrier_cycles(m)
        return (
            waits
            + (_POLLS if first else _POLLS - 1) * m.get("sync.wait_done_cycles", 0.0)
            + m.get("sync.fence_async_cycles", 0.0)
        )

    def c_and_d(self, t: int) -> list[Op]:
        """C on its way in and D on its way out: of halves, each for its own warpgroup, and of parts of their columns."""
        ops = []
        for end in self.box_ends():
            ops.append(self.store(t, end))
            if self.gemm.adds_c:
                ops += self.c_loads(t, end)
        return ops

    def c_loads(self, t: int, end: str) -> list[Op]:
        """One box of C."""
        size = float(self.v.tile_m * self.v.tile_n * self.gemm.c_bytes) / self.pieces
        of_memory, name = self.c_bytes / self.pieces, f"{t}{end}"
        if self.in_turn:
            # The first of a line has L2 ask for all of it.
            part = int(end.rpartition("p")[2]) if "p" in end else 0
            first, alike = self.line_of(part)
            of_memory *= alike if first == part else _NOTHING
        rate, least = self.l2.reads if self.l2 else 0.0, self.code.load_box if self.code else 0.0
        if self.in_turn:
            arrives = self.arrival(f"load_c{name}", "arrive_c", t, size, rate, self.port)
            return [arrives, self.ask(f"ask_c{name}", "load_c", t, of_memory, max(self.m["tma.issue_cycles"], least))]
        role = f"warps{t}" if self.portable else "load_c"
        return [self.copy(f"load_c{name}", "load", role, t, size, of_memory, rate, self.port, least=least)]

    def box_ends(self) -> list[str]:
        """What the names of a tile's copies of C and D end in, in their order: halves in turn, part after part."""
        return [end for ends in zip(*(self.ends(half) for half in range(self.halves)), strict=True) for end in ends]

    def turn(self, t: int) -> Op:
        """A warpgroup lets the other one multiply, once its own last k-step has landed and its product been issued."""
        return Op(f"turn{t}", "barrier", f"consumer{t}", (), max(1.0, self.m.get("sync.arrive_cycles", 1.0)), tile=t)

    def done(self) -> float:
        """Cycles from the end of a product to its result being there."""
        m, v = self.m, self.v
        if m.tensor_kind == "mma_sync":
            return 0.0
        rows = 64 if m.tensor_kind == "wgmma" else v.tile_m * v.cta_group
        return mma_completion_latency_cycles(m, rows, v.tile_n, self.gemm.dtype, "smem", v.cta_group)
