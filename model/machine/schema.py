"""What a machine file may and must say: one table of keys with unit, allowed range and who needs them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tilecast.base.words import nearest

TENSOR_KINDS = ("tcgen05", "wgmma", "mma_sync")
FAMILIES = ("ampere", "hopper", "blackwell", "blackwell-consumer")
KINDS = ("spec", "measured", "inferred", "assumed", "given", "what-if")
TEXT_KEYS = ("name", "title", "arch", "family", "tensor_kind", "inherits")


#: Units that only come whole.
WHOLE_UNITS = ("SM", "CTA", "columns", "warps", "registers", "inputs", "flag", "sm")


class MachineError(ValueError):
    """A machine that is unknown or a machine file that is wrong: one sentence with file, field, expected, got."""


class Key(NamedTuple):
    """One fact a machine file can hold."""

    unit: str
    low: float
    high: float
    #: Tensor kinds that cannot do without it; empty when optional.
    needed_by: tuple[str, ...]
    meaning: str


_ALL = TENSOR_KINDS
_TC = ("tcgen05",)

KEYS: dict[str, Key] = {
    "chip.sm_count": Key("SM", 1, 1024, _ALL, "enabled streaming multiprocessors"),
    "chip.clock_max_mhz": Key("MHz", 100, 5000, _ALL, "highest SM clock under light load"),
    "chip.clock_rated_mhz": Key("MHz", 100, 5000, (), "rated or usual SM clock"),
    "chip.tdp_w": Key("W", 5, 5000, _ALL, "board power limit"),
    "chip.compute_capability": Key("sm", 50, 200, _ALL, "compute capability times ten"),
    "tensor.bf16_flop_per_clk": Key("FLOP/clk/SM", 64, 1e6, _ALL, "dense bf16 matrix rate, FMA counted as two"),
    "tensor.fp16_flop_per_clk": Key("FLOP/clk/SM", 64, 1e6, _ALL, "dense fp16 matrix rate with f32 accumulation"),
    "tensor.fp8_flop_per_clk": Key("FLOP/clk/SM", 64, 1e6, (), "dense fp8 matrix rate"),
    "tensor.fp4_flop_per_clk": Key("FLOP/clk/SM", 64, 1e6, (), "dense block-scaled fp4 matrix rate"),
    "tensor.mma_sync_flop_per_clk": Key(
        "FLOP/clk/SM", 64, 1e6, (), "what mma.sync reaches where it is the legacy path"
    ),
    "tensor.mma_latency_cycles": Key("cycles", 0, 2000, _ALL, "end of the last MMA to its result being visible"),
    "tensor.mma_latency_register_cycles": Key("cycles", 0, 2000, (), "same, A in registers (wgmma)"),
    "tensor.mma_latency_ts_cycles": Key("cycles", 0, 2000, _TC, "same, A in tensor memory"),
    "tensor.mma_latency_2cta_cycles": Key("cycles", 0, 2000, _TC, "same, pair of CTAs"),
    "tensor.mma_latency_2cta_ts_cycles": Key("cycles", 0, 2000, _TC, "same, pair of CTAs, A in tensor memory"),
    "tensor.mma_rs_floor_cycles": Key("cycles", 0, 100, (), "shortest wgmma with A in registers"),
    "tensor.mma_cycles_per_copied_byte": Key(
        "cycles/B", 0, 1, (), "matrix instructions beside a bulk copy into shared memory take longer by"
    ),
    "tensor.mma_queue_depth": Key("inst", 0, 100, (), "MMAs accepted ahead before the issuing warps are held up"),
    "tensor.batch_start_cycles": Key("cycles", 0, 200, (), "start-up of a batch of MMAs"),
    "tensor.mma_hidden_fma_share": Key(
        "share", 0, 1, (), "FMA that may issue for each cycle of a matrix instruction without delaying it"
    ),
    "mma_load.alu_cycles": Key("cycles/inst", 0, 100, (), "ALU instruction while the tensor core runs"),
    "mma_load.slot_cycles": Key(
        "cycles/inst", 0, 100, (), "between FMA or ALU instructions of a sub-partition while the tensor core runs"
    ),
    "mma_load.arrive_hold_cycles": Key(
        "cycles/inst", 0, 1000, (), "until a warp goes on after an arrival beside a product that reads all of the port"
    ),
    "mma_load.access_hold_cycles": Key(
        "cycles/inst", 0, 1000, (), "same, after an access to shared memory or a spilled word"
    ),
    "mma_load.shuffle_hold_cycles": Key("cycles/inst", 0, 1000, (), "same, after a shuffle"),
    "mma_load.mufu_cycles": Key("cycles/inst", 0, 100, (), "ex2 while the tensor core runs"),
    "mma_load.fma_cycles": Key("cycles/inst", 0, 100, (), "FMA while the tensor core runs"),
    "mma_load.shared_cycles": Key(
        "cycles/inst", 0, 100, (), "shuffle or shared-memory access while the tensor core runs"
    ),
    "mma_load.alu_port_cycles": Key("cycles/inst", 0, 100, (), "register port time of an ALU instruction then"),
    "mma_load.mufu_port_cycles": Key("cycles/inst", 0, 100, (), "register port time of an ex2 then"),
    "mma_load.fma_port_cycles": Key("cycles/inst", 0, 100, (), "register port time of an FMA then"),
    "mma_load.alu_gap_cycles": Key(
        "cycles/inst", 0, 100, (), "longer wait before the same warp's next instruction then"
    ),
    "mma_load.mufu_gap_cycles": Key("cycles/inst", 0, 100, (), "same, after an ex2"),
    "mma_load.fma_gap_cycles": Key("cycles/inst", 0, 100, (), "same, after an FMA"),
    "warp.constant_latency_cycles": Key("cycles", 1, 1000, (), "load from constant memory"),
    "warp.special_latency_cycles": Key("cycles", 1, 1000, (), "read of a special register"),
    "warp.convert_latency_cycles": Key("cycles", 1, 1000, (), "conversion between integers and floats"),
    "warp.vote_latency_cycles": Key("cycles", 1, 1000, (), "result of a warp for the uniform datapath"),
    "warp.counted_latency_cycles": Key("cycles", 1, 1000, (), "any other result that raises a counter of the warp"),
    "warp.operand_release_cycles": Key(
        "cycles", 0, 1000, (), "issue to the operands being read, where a counter tells"
    ),
    "warp.control_cycles": Key("cycles/inst", 1, 100, (), "pipe of barriers, special registers and constants"),
    "sync.barrier_cycles": Key("cycles", 0, 1000, (), "barrier of the warps of one warpgroup"),
    "sync.mbarrier_one_way_cycles": Key("cycles", 1, 1000, (), "arrival to the return of a wait for it"),
    "sync.barrier_spread_cycles": Key("cycles", 0, 1000, (), "spread of arrivals at such a barrier"),
    "sync.box_beside_mma_cycles": Key(
        "cycles", 0, 10000, (), "of a box of C and D beside the other warpgroup's products, beyond its machine code"
    ),
    "code.l1_bytes": Key("B", 1024, 1e8, (), "first instruction cache of an SM"),
    "code.l2_bytes": Key("B", 1024, 1e9, (), "second instruction cache"),
    "code.fetch_cycles": Key(
        "cycles/inst", 0, 1000, (), "instruction of code just larger than code.l1_bytes, by an SM"
    ),
    "code.fetch_full_cycles": Key("cycles/inst", 0, 1000, (), "same, of code as large as code.l2_bytes"),
    "code.fetch_far_cycles": Key("cycles/inst", 0, 1000, (), "same, of code twice as large, from L2"),
    "l1.bytes": Key("B", 1024, 1e8, (), "L1 and shared memory of an SM together"),
    "l1.reserved_bytes": Key("B", 0, 1e8, (), "part of L1 that never holds spilled registers"),
    "local.latency_cycles": Key("cycles", 1, 500, (), "load of a spilled register that L1 holds"),
    "local.store_queue_depth": Key("inst", 0, 64, (), "stores of spilled registers a sub-partition lets wait"),
    "l2.reduce_tbps": Key("TB/s", 0.01, 1000, (), "additions to float32 numbers in L2 by all SMs"),
    "l2.store_tbps": Key("TB/s", 0.01, 1000, (), "stores of all SMs"),
    "l2.dirty_share": Key("share", 0, 1, (), "of lines that reads take from L2 after other data was written"),
    "launch.barrier_setup_cycles": Key("cycles", 0, 10000, (), "initialisation of one mbarrier"),
    "launch.cta_setup_cycles": Key(
        "cycles", 0, 100000, (), "CTA start to the first instruction of its roles, barriers apart"
    ),
    "mufu.ex2_per_clk": Key("op/clk/SM", 1, 1024, _ALL, "base-2 exponentials"),
    "mufu.ex2_latency_cycles": Key("cycles", 1, 500, _ALL, "latency of ex2"),
    "mufu.issue_cycles": Key("cycles", 1, 100, (), "from an ex2 to its warp's next instruction at least"),
    "mufu.ex2_emulation_fma_slots": Key("FMA lane slots/op", 1, 100, _ALL, "FMA work of one emulated ex2, degree 3"),
    "fma.lanes": Key("lanes/clk/SM", 1, 4096, _ALL, "FP32 FMA lanes"),
    "fma.achieved_lanes": Key("lanes/clk/SM", 1, 4096, (), "FP32 lanes a plain stream reaches"),
    "fma.fresh_sources_cycles": Key("cycles/inst", 0.1, 100, (), "FMA that reads three other registers every time"),
    "fma.packed_f32x2": Key("flag", 0, 1, _ALL, "two FMAs in one instruction"),
    "fma.latency_cycles": Key("cycles", 1, 100, _ALL, "latency of an FMA"),
    "alu.lanes": Key("lanes/clk/SM", 1, 4096, _ALL, "integer, logic and min/max lanes"),
    "alu.minmax_inputs": Key("inputs", 2, 3, _ALL, "operands of one min/max instruction"),
    "alu.latency_cycles": Key("cycles", 1, 100, _ALL, "latency of an ALU instruction"),
    "cvt.f32x2_to_bf16x2_per_clk": Key("inst/clk/SM", 1, 1024, _ALL, "instructions that pack two floats to 16 bit"),
    "cvt.f32x2_to_fp8x2_per_clk": Key("inst/clk/SM", 1, 1024, (), "instructions that pack two floats to fp8"),
    "shuffle.lanes": Key("lanes/clk/SM", 1, 1024, (), "warp shuffle"),
    "shuffle.latency_cycles": Key("cycles", 1, 200, _ALL, "latency of a warp shuffle"),
    "issue.warp_inst_per_clk": Key("inst/clk/SM", 1, 64, _ALL, "warp schedulers"),
    "issue.one_warp_exposed_share": Key("share", 0, 1, (), "work of other pipes one in-order warp cannot hide"),
    "regs.mma_share": Key("share", 0, 1, (), "register file ports a running wgmma takes"),
    "regs.cycles_per_mufu": Key("cycles/inst", 0, 100, (), "register port time of an ex2 per sub-partition"),
    "regs.cycles_per_alu": Key("cycles/inst", 0, 100, (), "register port time of an ALU instruction"),
    "regs.cycles_per_fma": Key("cycles/inst", 0, 100, (), "register port time of an FMA"),
    "smem.bytes_per_clk": Key("B/clk/SM", 1, 4096, _ALL, "shared memory port"),
    "smem.load_bytes_per_clk_under_mma": Key("B/clk/SM", 1, 4096, (), "shared memory to registers while wgmma runs"),
    "smem.store_bytes_per_clk_under_mma": Key("B/clk/SM", 1, 4096, (), "registers to shared memory while wgmma runs"),
    "smem.line_least": Key("inst", 1, 1000, (), "accesses in line for the port while their warps go on, at least"),
    "smem.line_most": Key("inst", 1, 1000, (), "the same, at most"),
    "smem.latency_cycles": Key("cycles", 1, 500, _ALL, "shared memory load"),
    "smem.per_cta_bytes": Key("B", 1024, 1e8, _ALL, "shared memory one CTA may use"),
    "smem.per_sm_bytes": Key("B", 1024, 1e8, _ALL, "shared memory of an SM"),
    "reg.file_bytes": Key("B/SM", 1024, 1e8, _ALL, "register file"),
    "reg.max_per_thread": Key("registers", 1, 4096, _ALL, "architectural limit"),
    "sm.max_warps": Key("warps", 1, 1024, _ALL, "resident warps"),
    "sm.max_ctas": Key("CTA", 1, 1024, (), "resident CTAs"),
    "tmem.columns": Key("columns", 32, 4096, _TC, "tensor memory columns of 512 bytes"),
    "tmem.lanes": Key("lanes", 32, 1024, (), "tensor memory lanes"),
    "tmem.read_bytes_per_clk": Key("B/clk/SM", 1, 8192, _TC, "tensor memory to registers"),
    "tmem.write_bytes_per_clk": Key("B/clk/SM", 1, 8192, _TC, "registers to tensor memory"),
    "tmem.load_latency_cycles": Key("cycles", 1, 2000, _TC, "tcgen05.ld to value, under matrix load"),
    "tmem.load_reduce": Key("flag", 0, 1, (), "tcgen05.ld.red returns row maxima with the load"),
    "sync.mbarrier_roundtrip_cycles": Key("cycles", 1, 5000, _ALL, "arrive on an mbarrier to the waiter running"),
    "sync.named_barrier_cycles": Key("cycles", 1, 5000, _ALL, "named barrier between two warps"),
    "tmem.idle_latency_cycles": Key("cycles", 0, 1000, (), "load from tensor memory that nothing competes with"),
    "sync.wait_done_cycles": Key("cycles", 0, 1000, (), "mbarrier wait whose phase is already complete"),
    "sync.arrive_cycles": Key("cycles", 0, 1000, (), "one elected arrive on an mbarrier, to its warp"),
    "sync.fence_async_cycles": Key("cycles", 0, 1000, (), "fence between ordinary and asynchronous accesses"),
    "sync.cluster_arrive_cycles": Key(
        "cycles", 1, 5000, _ALL, "arrive on another CTA's mbarrier to its waiter running"
    ),
    "tma.latency_l2_cycles": Key("cycles", 1, 20000, _ALL, "tile copy that hits L2, first byte to visible"),
    "tma.latency_hbm_cycles": Key("cycles", 1, 20000, _ALL, "tile copy from memory"),
    "tma.latency_hbm_loaded_cycles": Key("cycles", 1, 20000, (), "tile copy from memory that all SMs load"),
    "tma.bytes_per_clk": Key("B/clk/SM", 1, 4096, _ALL, "copy engine of one SM"),
    "tma.store_bytes_per_clk": Key("B/clk/SM", 1, 4096, (), "tile stores of one SM"),
    "tma.reduce_bytes_per_clk": Key("B/clk/SM", 1, 4096, (), "additions of tiles to float32 numbers in L2 by one SM"),
    "tma.reduce_latency_cycles": Key("cycles", 0, 20000, (), "such an addition beside its bytes"),
    "tma.issue_cycles": Key("cycles", 0, 1000, _ALL, "issue of one bulk copy"),
    "l2.bytes": Key("B", 1e5, 1e12, _ALL, "L2 capacity"),
    "l2.latency_cycles": Key("cycles", 1, 20000, _ALL, "L2 hit, near"),
    "l2.bytes_per_clk_per_sm": Key("B/clk/SM", 0.1, 4096, _ALL, "L2 bandwidth, all SMs reading"),
    "l2.bytes_per_clk_per_sm_lockstep": Key("B/clk/SM", 0.1, 4096, (), "same, all SMs reading one tile at one time"),
    "hbm.capacity_gb": Key("GB", 0.01, 1e6, (), "memory that programs can use"),
    "hbm.tbps_spec": Key("TB/s", 0.01, 1000, (), "memory bandwidth, data sheet"),
    "hbm.tbps_achieved": Key("TB/s", 0.01, 1000, _ALL, "memory bandwidth a copy reaches"),
    "hbm.read_ratio": Key("ratio", 0.5, 2, (), "bandwidth of reads alone, by the copy engine, over that of a copy"),
    "hbm.latency_cycles": Key("cycles", 1, 20000, (), "memory load"),
    "dsmem.latency_cycles": Key("cycles", 1, 20000, (), "another SM's shared memory, round trip"),
    "launch.kernel_us": Key("us", 0, 1000, _ALL, "launch to first CTA and last CTA to completion"),
    "launch.cta_start_cycles": Key("cycles", 0, 100000, _ALL, "CTA dispatch and set-up"),
    "launch.cta_turnaround_cycles": Key("cycles", 0, 100000, (), "end of a CTA to its successor's first instruction"),
    "launch.graph_kernel_us": Key("us", 0, 1000, (), "what a kernel in a graph takes beside its body"),
    "power.idle_w": Key("W", 0, 5000, _ALL, "board with clocks up and no work"),
    "power.short_run_w": Key("W", 1, 10000, _ALL, "power the limiter lets through in tens of milliseconds"),
    "power.reaction_s": Key(
        "s", 0.001, 1000, (), "how long the limiter lets that through before it holds the board's limit"
    ),
    "power.active_w_at_1ghz": Key("W", 0, 5000, _ALL, "clock tree and schedulers of active SMs"),
    "power.energy_exponent": Key("exponent", 0, 4, _ALL, "growth of energy per operation with the set clock"),
    "power.l2_energy_exponent": Key("exponent", 0, 4, (), "the same of a byte from L2; without it as an operation"),
    "power.tensor_pj_per_flop_bf16": Key("pJ/FLOP", 0, 100, _ALL, "16-bit matrix work at 1 GHz, operands fed"),
    "power.tensor_pj_per_flop_fp8": Key("pJ/FLOP", 0, 100, (), "fp8 matrix work at 1 GHz, operands fed"),
    "power.mufu_pj_per_op": Key("pJ/op", 0, 1000, _ALL, "one ex2 at 1 GHz"),
    "power.fma_pj_per_op": Key("pJ/op", 0, 1000, _ALL, "one FMA at 1 GHz"),
    "power.alu_pj_per_op": Key("pJ/op", 0, 1000, _ALL, "one ALU operation at 1 GHz"),
    "power.smem_pj_per_byte": Key("pJ/B", 0, 1000, (), "shared memory byte at 1 GHz"),
    "power.l2_pj_per_byte": Key("pJ/B", 0, 1000, _ALL, "L2 byte at 1 GHz"),
    "power.hbm_pj_per_byte": Key("pJ/B", 0, 1000, _ALL, "memory byte"),
    "power.tensor_clock_share": Key(
        "share", 0.1, 1, _ALL, "SM clock under matrix load over the set clock, which NVML reports"
    ),
    "power.tensor_clock_busy": Key(
        "share", 0.001, 1, (), "of the time with matrix products, from which the SM clock is that"
    ),
}


def check_fact(where: str, key: str, entry: Any) -> None:
    """Raise MachineError unless ``entry`` is a well-formed fact for ``key``; ``where`` names the file."""
    if key not in KEYS:
        raise MachineError(f"{where}: unknown field '{key}'{nearest(key, tuple(KEYS))}")
    rule = KEYS[key]
    if not isinstance(entry, dict):
        raise MachineError(f"{where}: field '{key}' takes {{value, unit, kind, source}}, got {entry!r}")
    extra = set(entry) - {"value", "unit", "kind", "source", "low", "high", "note"}
    if extra:
        raise MachineError(f"{where}: field '{key}' has unknown entry '{sorted(extra)[0]}'")
    for name in ("value", "unit", "kind", "source"):
        if name not in entry:
            raise MachineError(
                f"{where}: field '{key}' lacks '{name}': add it, every fact carries value, unit, kind, source"
            )
    for name in ("value", "low", "high"):
        number = entry.get(name)
        if number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
            raise MachineError(f"{where}: field '{key}' {name} takes a number in {rule.unit}, got {number!r}")
        if rule.unit in WHOLE_UNITS and number != int(number):
            raise MachineError(f"{where}: field '{key}' {name} takes a whole number ({rule.unit}), got {number:g}")
        if not rule.low <= number <= rule.high:
            raise MachineError(
                f"{where}: field '{key}' {name} takes {rule.low:g} to {rule.high:g} {rule.unit}, got {number:g}"
            )
    if entry["unit"] != rule.unit:
        raise MachineError(f"{where}: field '{key}' takes unit '{rule.unit}', got '{entry['unit']}'")
    if entry["kind"] not in KINDS:
        raise MachineError(f"{where}: field '{key}' takes kind {', '.join(KINDS[:4])}, got '{entry['kind']}'")
    if not str(entry["source"]).strip():
        raise MachineError(f"{where}: field '{key}' has an empty source: name where the value comes from")
    low, high = entry.get("low", entry["value"]), entry.get("high", entry["value"])
    if not low <= entry["value"] <= high:
        raise MachineError(
            f"{where}: field '{key}' value {entry['value']:g} lies outside its own range {low:g} to {high:g}"
        )


def check_complete(where: str, tensor_kind: str, keys: set[str]) -> None:
    """Raise MachineError naming what a machine of ``tensor_kind`` still lacks."""
    missing = [key for key, rule in KEYS.items() if tensor_kind in rule.needed_by and key not in keys]
    if missing:
        named = ", ".join(f"{key} [{KEYS[key].unit}]" for key in missing[:6])
        more = f" and {len(missing) - 6} more" if len(missing) > 6 else ""
        raise MachineError(
            f"{where}: a {tensor_kind} machine lacks {named}{more}: add them or inherit a machine that has them"
        )


def machine_json_schema() -> dict[str, Any]:
    """JSON schema of a machine file, for editors (Draft 2020-12)."""
    sections: dict[str, Any] = {}
    for key, rule in KEYS.items():
        section, field = key.split(".", 1)
        number = {"type": "number", "minimum": rule.low, "maximum": rule.high}
        fact = {
            "type": "object",
            "description": rule.meaning,
            "additionalProperties": False,
            "required": ["value", "unit", "kind", "source"],
            "properties": {
                "value": number,
                "unit": {"const": rule.unit},
                "kind": {"enum": list(KINDS[:4])},
                "source": {"type": "string", "minLength": 1},
                "low": number,
                "high": number,
                "note": {"type": "string"},
            },
        }
        sections.setdefault(section, {"type": "object", "additionalProperties": False, "properties": {}})
        sections[section]["properties"][field] = fact
    text: dict[str, Any] = {name: {"type": "string"} for name in TEXT_KEYS}
    text["tensor_kind"] = {"enum": list(TENSOR_KINDS)}
    text["family"] = {"enum": list(FAMILIES)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "tilecast machine",
        "type": "object",
        "additionalProperties": False,
        "required": ["name"],
        "properties": {**text, **sections},
    }
