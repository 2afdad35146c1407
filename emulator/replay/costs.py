"""What synchronisation, copies and matrix products cost on a machine, from its file; `work` has the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from tilecast.emulator.errors import UnsupportedError
from tilecast.emulator.replay.sharing import Load
from tilecast.emulator.trace import CopyIssue, MatrixIssue, Work
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.tensor_core import (
    K_BYTES,
    element_bytes,
    mma_completion_latency_cycles,
    mma_instruction_cycles,
    mma_smem_bytes,
    mma_tile_cycles,
)

DTYPES = {"fp16": "fp16", "bf16": "bf16", "fp8e4nv": "fp8", "fp8e5": "fp8"}
#: Rows of a wgmma, and columns of the widest matrix instruction.
_ROWS, _COLUMNS = 64, 256


@dataclass(frozen=True, slots=True)
class Synchronisation:
    """What barriers cost a role, in cycles, as machines are measured for it."""

    #: A wait whose phase is complete already.
    poll: float
    #: From an arrival until who waits for it goes on, in the CTA and across a pair.
    handover: float
    across: float
    #: An arrival itself, and the barrier of all warps of the role that Triton puts before it.
    arrive: float
    meet: float

    def arrival(self, warps: int) -> float:
        """What an arrival takes a role of so many warps."""
        return self.arrive + (self.meet if warps > 1 else 0.0)


def synchronisation(machine: Machine) -> Synchronisation:
    """From the ``sync`` facts of a machine file."""
    m = machine
    local = m.get("sync.mbarrier_one_way_cycles", m["sync.mbarrier_roundtrip_cycles"])
    return Synchronisation(
        m["sync.wait_done_cycles"], local, max(local, m.get("sync.cluster_arrive_cycles", 0.0)),
        m.get("sync.arrive_cycles", 0.0), m.get("sync.barrier_cycles", m["sync.named_barrier_cycles"]),
    )  # fmt: skip


def start_cycles(machine: Machine, barriers: int) -> float:
    """From the start of a CTA until its roles begin; it initialises so many barriers."""
    per_barrier = machine.get("launch.barrier_setup_cycles", 0.0)
    return machine["launch.cta_start_cycles"] + machine.get("launch.cta_setup_cycles", 0.0) + barriers * per_barrier


def copy_latency(machine: Machine, cold: bool) -> float:
    """From the last byte that the copy engine has moved until who waits for it may go on; ``cold``: not from L2."""
    return machine["tma.latency_hbm_cycles" if cold else "tma.latency_l2_cycles"]


def is_rescale(work: Work) -> bool:
    """Whether the work takes an accumulator through registers and puts it back."""
    counts = work.counts
    return "tmem_load" in counts and "tmem_store" in counts and "mufu" not in counts


def product_load(issue: MatrixIssue, machine: Machine) -> Load:
    """A matrix product on the tensor core: of tcgen05 all of it, of wgmma one of its instructions (`wgmma_instructions`).

    UnsupportedError where it was not measured: other types than 16 and 8 bits, other shapes.
    """
    if issue.dtype not in DTYPES:
        raise UnsupportedError(f"no rate of products of {issue.dtype} is known here")
    try:
        return _product_load(issue, machine)
    except ValueError as error:
        raise UnsupportedError(f"no rate of this product is known: {error}") from None


def _product_load(issue: MatrixIssue, machine: Machine) -> Load:
    dtype, rows = DTYPES[issue.dtype], issue.m * issue.pair
    steps = issue.k * element_bytes(dtype) / K_BYTES
    if machine.tensor_kind == "wgmma":
        columns = issue.n / _wide(issue)
        cycles = mma_instruction_cycles(machine, _ROWS, int(columns), dtype, issue.a_home)
        read, issued = mma_smem_bytes(_ROWS, int(columns), K_BYTES // element_bytes(dtype), dtype, issue.a_home), 1.0
    else:
        cycles = mma_tile_cycles(machine, rows, issue.n, issue.k, dtype, issue.a_home, issue.pair)
        read, issued = mma_smem_bytes(rows, issue.n, issue.k, dtype, issue.a_home, issue.pair), steps
    port = min(read / machine["smem.bytes_per_clk"], cycles)
    demand = (("tensor", cycles), ("smem", port), ("issue", min(issued, cycles)))
    hidden = machine.get("tensor.mma_hidden_fma_share", inf) if machine.tensor_kind == "wgmma" else inf
    return Load("product", demand, cycles, demand, cycles, issue_cycles=issued, hidden_fma=hidden)


def _wide(issue: MatrixIssue) -> int:
    """Instructions beside each other for the columns of a product."""
    return -(-issue.n // _COLUMNS)


def wgmma_instructions(issue: MatrixIssue) -> int:
    """Instructions of a product: 64 rows, at most 256 columns, 32 bytes of K each."""
    steps = issue.k * element_bytes(DTYPES[issue.dtype]) // K_BYTES
    return max(1, -(-issue.m // _ROWS) * _wide(issue) * steps)


def completion_cycles(issue: MatrixIssue, machine: Machine) -> float:
    """From the end of a product to the role that waits for it."""
    rows = min(issue.m, _ROWS) if machine.tensor_kind == "wgmma" else issue.m * issue.pair
    return mma_completion_latency_cycles(machine, rows, issue.n, DTYPES[issue.dtype], issue.a_home, issue.pair)


def copy_load(issue: CopyIssue, machine: Machine) -> Load:
    """A tile through the copy engine."""
    busy = max(issue.bytes / machine["tma.bytes_per_clk"], 1e-3)
    demand = (("tma", busy),)
    return Load("copy", demand, busy, demand, busy, issue_cycles=machine["tma.issue_cycles"])
