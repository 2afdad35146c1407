"""Rules for the facts of one SM: matrix unit, pipes, registers, shared memory, synchronisation."""

from __future__ import annotations

from functools import partial
from statistics import fmean

from tilecast.validation.lab.calibrate.facts.rule import Found, Rule, Table, spread
from tilecast.validation.lab.calibrate.store import Row

#: Lanes of four sub-partitions: a warp instruction in c cycles on each is 128 / c lanes a clock.
_LANES = 128.0


def _wgmma_rate(table: Table, n: int, a: str, dtype: str = "bf16", warpgroups: int = 2) -> Row | None:
    return table.one("tensor/wgmma_rate", "cycles_per_mma", n=n, a=a, dtype=dtype, b="k-major", warpgroups=warpgroups)


def _any_wgmma_rate(table: Table, n: int, a: str, dtype: str = "bf16") -> Row | None:
    """Two warpgroups hide the gap between groups; one is what the short list has."""
    return _wgmma_rate(table, n, a, dtype) or _wgmma_rate(table, n, a, dtype, warpgroups=1)


def _tensor_rate(table: Table, dtype: str) -> Found | None:
    """FLOP a clock of the largest instruction; the range over N from 128 on and both homes of A."""
    if table.all("tensor/tcgen05_latency", "wait_cycles"):
        return _tcgen05_rate(table) if dtype == "bf16" else None
    if not table.all("tensor/wgmma_rate", "cycles_per_mma"):
        return _mma_sync_rate(table) if dtype == "bf16" else None
    best = _any_wgmma_rate(table, 256, "smem", dtype)
    if best is None:
        return None
    work = 2.0 * 64 * (32 if dtype == "fp8" else 16)
    others = [(n, _any_wgmma_rate(table, n, a, dtype)) for n in (128, 256) for a in ("smem", "register")]
    rates = [work * n / row.value for n, row in others if row]
    return Found(work * 256 / best.value, min(rates), max(rates), (best,))


def _tcgen05_rate(table: Table) -> Found | None:
    """FLOP a clock from what eight more k-steps of 128 x 256 take; the range over homes of A."""
    rates, rows = [], []
    for a in ("smem", "tmem"):
        short, long = (
            table.one("tensor/tcgen05_latency", "wait_cycles", ctas=1, a=a, n=256, steps=steps) for steps in (8, 16)
        )
        if short is not None and long is not None:
            rates.append(8 * 2.0 * 128 * 256 * 16 / (long.value - short.value))
            rows += [short, long]
    return Found(rates[0], min(rates), max(rates), tuple(rows)) if rates else None


def _mma_sync_rate(table: Table) -> Found | None:
    row = table.one("tensor/mma_sync_m16n8k16", "cycles_per_mma", warps=16, chains=8) or table.one(
        "tensor/mma_sync_m16n8k16", "cycles_per_mma", warps=8, chains=8
    )
    return spread([row], lambda c: 4 * 2.0 * 16 * 8 * 16 / c)


def _mma_latency(table: Table, a: str) -> Found | None:
    """Issue of a group to its wait's return, less the group's k-steps at the steady rate; over N and group length."""
    found: list[tuple[float, Row, bool]] = []
    for row in table.all("tensor/wgmma_latency", "wait_cycles", a=a, warpgroups=1, b="k-major", steps=(4, 8, 16)):
        params = table.params(row)
        rate = _wgmma_rate(table, int(str(params["n"])), a, warpgroups=1)
        if rate is not None:
            steps = int(str(params["steps"]))
            found.append((row.value - steps * rate.value, row, steps == 8 and params["n"] == 128))
    chosen = [value for value, _, usual in found if usual]
    if not chosen:
        return _mma_sync_latency(table) if a == "smem" else None
    values = [value for value, _, _ in found]
    return Found(
        chosen[0], min(values), max(values), tuple(row for _, row, usual in found if usual), "range over N and k-steps"
    )


def _mma_sync_latency(table: Table) -> Found | None:
    if table.all("tensor/tcgen05_latency", "wait_cycles"):
        return None
    return spread([table.one("tensor/mma_sync_m16n8k16", "cycles_per_mma", warps=1, chains=1)])


def _tcgen05_latency(table: Table, ctas: int, a: str) -> Found | None:
    """Two group lengths give the steady rate and what is left: commit, completion and the barrier."""
    ends = []
    rows = []
    for n in (64, 128, 256):
        short, long = (
            table.one("tensor/tcgen05_latency", "wait_cycles", ctas=ctas, a=a, n=n, steps=steps) for steps in (8, 16)
        )
        if short is None or long is None:
            continue
        ends.append((n, short.value - 8 * (long.value - short.value) / 8))
        rows += [short, long]
    values = [value for _, value in ends]
    chosen = [value for n, value in ends if n == 128] or values
    return Found(chosen[0], min(values), max(values), tuple(rows), "includes the barrier wait") if values else None


def _queue_depth(table: Table) -> Found | None:
    """Matrix instructions accepted ahead: k-steps of a long group that need not wait for the array before the commit."""
    depths = []
    rows = []
    for n in (128, 256):
        row = table.one("tensor/wgmma_latency", "issue_cycles", n=n, a="smem", warpgroups=1, b="k-major", steps=16)
        rate = _wgmma_rate(table, n, "smem", warpgroups=1)
        if row is not None and rate is not None:
            depths.append(16 - row.value / rate.value)
            rows.append(row)
    return Found(depths[0], min(depths), max(depths), tuple(rows)) if depths else None


def _beside_copies(table: Table) -> Found | None:
    """Cycles by which a copied byte lengthens the matrix instruction that it lands beside, whatever that reads."""
    found: list[tuple[float, Row, bool]] = []
    for row in table.all("smem/beside_mma", "cycles_per_mma", stream="none", fill=True):
        params = table.params(row)
        columns = int(str(params["n"]))
        copied = table.one("smem/beside_mma", "fill_bytes_per_clk", **params)
        if copied is not None:
            found.append(((row.value / (columns / 2) - 1.0) / copied.value, row, columns == 128))
    chosen = [value for value, _, usual in found if usual]
    values = [value for value, _, _ in found]
    rows = tuple(row for _, row, usual in found if usual)
    return Found(fmean(chosen), min(values), max(values), rows, "range over N") if chosen else None


def _rate(table: Table, stream: str, warps: int = 4) -> Row | None:
    quantity = "cycles_per_instruction" if stream in ("pack_e4m3x2", "compare_select") else "cycles_per_step"
    for tried in (warps, 2):
        row = table.one("arithmetic/rate", quantity, stream=stream, warps_per_partition=tried)
        if row is not None:
            return row
    return None


def _lanes(table: Table, *streams: str) -> Found | None:
    return spread([_rate(table, name) for name in streams], lambda c: _LANES / c)


def _latency(table: Table, *streams: str) -> Found | None:
    return spread([table.one("arithmetic/latency", "cycles_per_step", stream=name) for name in streams])


def _achieved_fma(table: Table) -> Found | None:
    return _lanes(table, "ffma_3src") if _rate(table, "ffma_3src") else None


def _emulation(table: Table) -> Found | None:
    """A degree-3 polynomial exponential's time in FMAs' time: its adds, FMAs and what its ALU work does not hide."""
    poly, fma = _rate(table, "ex2_poly3"), _rate(table, "ffma_3src")
    if poly is None or fma is None:
        return None
    return spread([poly], lambda cycles: cycles / fma.value)


def _fresh_sources(table: Table) -> Found | None:
    return spread([_rate(table, "ffma_3src_own")])


def _exposed(table: Table) -> Found | None:
    """What one warp cannot hide: (mix on one warp - its MUFU time) over the time of its other pipes."""
    fma, alu, ex2 = (_rate(table, name) for name in ("ffma_3src", "max2", "ex2"))
    if fma is None or alu is None or ex2 is None:
        return None
    # Multiply-add, add and, in the online mix, maximum; half a pack an element.
    other = {"softmax_online": 2 * fma.value + 1.5 * alu.value, "softmax_anchored": 2 * fma.value + 0.5 * alu.value}
    shares = []
    rows = []
    for name, work in other.items():
        row = table.one("arithmetic/rate", "cycles_per_step", stream=name, warps_per_partition=1)
        if row is None:
            return None
        shares.append(max(0.0, (row.value - ex2.value) / work))
        rows.append(row)
    return Found(shares[0], min(shares), max(shares), tuple(rows), "online mix; the range includes the anchored one")


def _beside(table: Table, stream: str) -> list[Row]:
    """A stream of two warpgroups beside one that runs wgmma, N from 128 on."""
    return table.all(
        "corun/beside_mma", "cycles_per_step", stream=stream, mma_warpgroups=1, stream_warpgroups=2, n=(128, 256)
    )


def _mean(rows: list[Row]) -> float:
    return sum(row.value for row in rows) / len(rows)


def _port_share(table: Table) -> Found | None:
    """Share of the register ports that a wgmma takes: what the online mix loses beside it."""
    alone = table.one(
        "corun/beside_mma", "cycles_per_step", stream="softmax_online", mma_warpgroups=0, stream_warpgroups=2
    )
    under = _beside(table, "softmax_online") + [
        row for n in (128, 256) for row in table.all(
            "corun/beside_mma", "cycles_per_step", stream="softmax_online", mma_warpgroups=(1, 2), stream_warpgroups=1, n=n)
    ]  # fmt: skip
    if alone is None or not under:
        return None
    two = _beside(table, "softmax_online")
    shares = [1 - alone.value / row.value for row in under]
    return Found(
        1 - alone.value / _mean(two), min(shares), max(shares), (alone, *two), "two warps; the range includes one"
    )


def _port_cycles(table: Table, stream: str) -> Found | None:
    """Register port time of one instruction: its cycles beside wgmma, scaled so that the online mix adds up.

    Streams of one kind use the ports less evenly than a mix does: the sum of their parts exceeds the mix.
    """
    share = _port_share(table)
    parts = {name: _beside(table, name) for name in ("ex2", "max2", "pack_bf16x2")}
    fma = _rate(table, "ffma_3src")
    mix = _beside(table, "softmax_online")
    if share is None or fma is None or not mix or not all(parts.values()):
        return None
    # A pure FMA stream starves wgmma instead of sharing with it; its own rate over the free share stands in.
    fma_under = fma.value / (1 - share.value)
    total = _mean(parts["ex2"]) + 2 * fma_under + _mean(parts["max2"]) + 0.5 * _mean(parts["pack_bf16x2"])
    scale = (1 - share.value) * _mean(mix) / total
    if stream == "ffma_3src":
        return Found(fma_under * scale, fma_under * scale * 0.8, fma_under * (1 - share.value), (fma, *mix))
    values = [row.value * scale for row in parts[stream]]
    unscaled = max(row.value for row in parts[stream]) * (1 - share.value)
    return Found(sum(values) / len(values), min(values), max(unscaled, *values), (*parts[stream], *mix))


def _smem_rate(table: Table, streams: tuple[str, ...], mma: int) -> Found | None:
    """Bytes a clock of the first stream with the port to itself (two warpgroups), or beside wgmma with N from 128 on."""
    if mma == 0:
        rows = [
            table.one("smem/beside_mma", "stream_bytes_per_clk", stream=name, mma_warpgroups=0, stream_warpgroups=2, fill=False)
            for name in streams
        ]  # fmt: skip
        return spread(rows)
    beside = table.all(
        "smem/beside_mma", "stream_bytes_per_clk", stream=streams, mma_warpgroups=(1, 2), fill=False, n=(128, 256)
    )
    usual = [row for row in beside if table.params(row)["n"] == 128 and table.params(row)["a"] == "register"]
    if not usual:
        return None
    values = [row.value for row in beside]
    return Found(usual[0].value, min(values), max(values), tuple(usual))


def _handover(table: Table, by: str, usual: tuple[int, int]) -> Found | None:
    row = table.one("sync/handover", "handover_cycles", by=by, left_warps=usual[0], right_warps=usual[1])
    others = table.all("sync/handover", "handover_cycles", by=by)
    return spread([row, *others]) if row is not None else None


def _mbarrier(table: Table) -> Found | None:
    elected = _handover(table, "mbarrier_elected", (1, 4))
    every = _handover(table, "mbarrier_all_threads", (1, 4))
    if elected is None or every is None:
        return elected
    return Found(
        elected.value, min(elected.low, every.low), elected.high, elected.rows, "range over warps and who arrives"
    )


def _cluster_arrive(table: Table) -> Found | None:
    """Arrival with the instruction's default scope; the range includes the one that releases to the whole cluster."""
    rows = [table.one("sync/cluster", "cycles", operation=name) for name in ("handover", "handover_release_cluster")]
    return spread([row for row in rows if row is not None])


def _cost(table: Table, operation: str) -> Found | None:
    return spread([table.one("sync/cost", "cycles", operation=operation)])


def _tmem(table: Table, access: str, quantity: str, one_at_a_time: bool) -> Found | None:
    return spread([table.one("tensor/tmem", quantity, access=access, one_at_a_time=one_at_a_time)])


#: Key of the machine file -> how it follows from the rows.
RULES: dict[str, Rule] = {
    "tensor.bf16_flop_per_clk": partial(_tensor_rate, dtype="bf16"),
    "tensor.fp16_flop_per_clk": partial(_tensor_rate, dtype="bf16"),
    "tensor.fp8_flop_per_clk": partial(_tensor_rate, dtype="fp8"),
    "tensor.mma_sync_flop_per_clk": _mma_sync_rate,
    "tensor.mma_latency_cycles": lambda t: _mma_latency(t, "smem") or _tcgen05_latency(t, 1, "smem"),
    "tensor.mma_latency_register_cycles": partial(_mma_latency, a="register"),
    "tensor.mma_latency_ts_cycles": partial(_tcgen05_latency, ctas=1, a="tmem"),
    "tensor.mma_latency_2cta_cycles": partial(_tcgen05_latency, ctas=2, a="smem"),
    "tensor.mma_latency_2cta_ts_cycles": partial(_tcgen05_latency, ctas=2, a="tmem"),
    "tensor.mma_rs_floor_cycles": lambda t: spread([_wgmma_rate(t, 8, "register"), _wgmma_rate(t, 16, "register")]),
    "tensor.mma_queue_depth": _queue_depth,
    "tensor.mma_cycles_per_copied_byte": _beside_copies,
    "mufu.ex2_per_clk": lambda t: _lanes(t, "ex2"),
    "mufu.ex2_latency_cycles": lambda t: _latency(t, "ex2"),
    "mufu.ex2_emulation_fma_slots": _emulation,
    "fma.achieved_lanes": _achieved_fma,
    "fma.fresh_sources_cycles": _fresh_sources,
    "fma.latency_cycles": lambda t: _latency(t, "ffma_3src", "fadd", "fmul"),
    "alu.lanes": lambda t: _lanes(t, "max2", "lop3", "iadd3", "prmt"),
    "alu.latency_cycles": lambda t: _latency(t, "max2", "lop3", "iadd3"),
    "cvt.f32x2_to_bf16x2_per_clk": lambda t: _lanes(t, "pack_bf16x2"),
    "cvt.f32x2_to_fp8x2_per_clk": lambda t: _lanes(t, "pack_e4m3x2"),
    "shuffle.lanes": lambda t: _lanes(t, "shuffle"),
    "shuffle.latency_cycles": lambda t: _latency(t, "shuffle"),
    "issue.one_warp_exposed_share": _exposed,
    "regs.mma_share": _port_share,
    "regs.cycles_per_mufu": partial(_port_cycles, stream="ex2"),
    "regs.cycles_per_alu": partial(_port_cycles, stream="max2"),
    "regs.cycles_per_fma": partial(_port_cycles, stream="ffma_3src"),
    "smem.bytes_per_clk": partial(_smem_rate, streams=("ld_shared", "ldmatrix"), mma=0),
    "smem.load_bytes_per_clk_under_mma": partial(_smem_rate, streams=("ld_shared", "ldmatrix"), mma=1),
    "smem.store_bytes_per_clk_under_mma": partial(_smem_rate, streams=("st_shared", "stmatrix"), mma=1),
    "smem.latency_cycles": lambda t: spread(
        [t.one("smem/latency", "latency_cycles", access=name) for name in ("ld_shared", "ldmatrix")]
    ),
    "sync.mbarrier_roundtrip_cycles": _mbarrier,
    "sync.named_barrier_cycles": partial(_handover, by="named_barrier", usual=(1, 4)),
    "sync.wait_done_cycles": partial(_cost, operation="mbarrier_wait_done"),
    "sync.arrive_cycles": partial(_cost, operation="mbarrier_arrive_elected"),
    "sync.fence_async_cycles": partial(_cost, operation="fence_proxy_async"),
    "sync.cluster_arrive_cycles": _cluster_arrive,
    "dsmem.latency_cycles": lambda t: spread([t.one("sync/cluster", "cycles", operation="load")]),
    "tmem.read_bytes_per_clk": partial(_tmem, access="load", quantity="bytes_per_clk", one_at_a_time=False),
    "tmem.write_bytes_per_clk": partial(_tmem, access="store", quantity="bytes_per_clk", one_at_a_time=False),
    "tmem.load_latency_cycles": partial(_tmem, access="load", quantity="cycles_per_access", one_at_a_time=True),
}
