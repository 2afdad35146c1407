"""What the template of the `hopper_ws` family needs to know: a warp-specialised FlashAttention-3 class forward.

Python decides here, `templates/hopper_ws.py.j2` only writes.  The order in which a consumer issues its matrix products
and the depth of the rings are read off the pipeline of the variant, the same value that the forecast simulates.
"""

from __future__ import annotations

import struct
import textwrap

from tilecast.codegen.exp2 import COEFFICIENTS, emulated_of_eight
from tilecast.codegen.hopper.forward_form import pieces
from tilecast.codegen.hopper.forward_kernel import HopperKernel
from tilecast.codegen.masks import titled_keys_seen
from tilecast.model.families import build_pipeline
from tilecast.model.kernel.variants.fa3 import WIDE, Fa3Variant, written_columns
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.graph import Pipeline

TEMPLATE = "hopper_ws.py.j2"
ROWS = 64
#: (consumer, producer) registers a thread and the cap at entry, by consumer warpgroups: 65536 registers in all.
_REGISTERS = {1: (240, 24, 240), 2: (232, 40, 168), 3: (160, 32, 128)}
#: The same where two warpgroups keep 128 registers of O each, by whether there is a mask: the load warp makes do with
#: what is left, and the default partition, which also does rows again, gets more where that keeps it from spilling.
_WIDE_REGISTERS = {False: (240, 24, 168), True: (232, 24, 168)}
_RESCALE_TEXT = {
    "always": "Online softmax: O is rescaled in every step.",
    "conditional": "Online softmax with conditional rescale: O is only rescaled when the maximum of one of the rows has "
    "grown by more than 2^{threshold:g}.",
    "anchored": "Anchored softmax: the row maximum of the first blocks is the reference of all exponentials, so the steady "
    "state has neither a row maximum nor a rescale of O.  The sums of each block tell where a row outgrew its reference; in "
    "that block it takes the row's maximum, and O is rescaled, by the warps that have such rows.",
}
_DOCSTRING_WIDTH = 118


def issue_order(pipeline: Pipeline) -> tuple[str, ...]:
    """The matrix products a consumer issues in one iteration, in the pipeline's order: "qk" and "pv".

    The pipeline has a product in parts where the compiler issues it so; the source asks for it once.
    """
    role = next(role for role in pipeline.roles if role.name == "consumer0")
    products = (pipeline.op(step.op) for step in role.program)
    return tuple(dict.fromkeys(op.kind for op in products if op.engine == "tensor"))


def ring_depth(pipeline: Pipeline, name: str) -> int:
    """Slots of a buffer of the pipeline."""
    return next(buffer.depth for buffer in pipeline.buffers if buffer.name == name)


def context(variant: Fa3Variant, workload: Workload, machine: Machine) -> HopperKernel:
    """The kernel of a variant as `TEMPLATE` reads it.  The variant must be writable (`model.families.writable`)."""
    pipeline = build_pipeline(workload, variant, machine)
    order = issue_order(pipeline)
    if variant.overlap and order != ("qk", "pv"):
        raise ValueError(f"hopper_ws waits for S while P V runs, so S comes first: got the order {order}")
    scarce = workload.head_dim_v > WIDE and variant.warpgroups == 2
    consumer, load, at_launch = _WIDE_REGISTERS[workload.mask != "none"] if scarce else _REGISTERS[variant.warpgroups]
    workers = variant.warpgroups - 1  # the first consumer is the default partition
    eighths = emulated_of_eight(variant.emulated_share) or 0
    return HopperKernel(
        title=_title(workload),
        description=_description(variant, workload),
        mask=workload.mask,
        warpgroups=variant.warpgroups,
        rows=ROWS,
        tile_m=ROWS * variant.warpgroups,
        tile_n=variant.tile_n,
        kv_stages=ring_depth(pipeline, "K"),
        q_stages=ring_depth(pipeline, "Q"),
        head_dim_qk=workload.head_dim_qk,
        head_dim_v=workload.head_dim_v,
        qk_pieces=pieces(written_columns(workload.head_dim_qk)),
        v_pieces=pieces(written_columns(workload.head_dim_v)),
        rescale=variant.rescale,
        rescale_threshold=variant.rescale_threshold,
        scheduler=variant.scheduler,
        overlap=variant.overlap,
        ping_pong=variant.ping_pong and variant.warpgroups > 1,
        issue_order=order,
        emulated_eighths=eighths,
        polynomial=tuple(_float_bits(c) for c in (1.0, *COEFFICIENTS[variant.poly_degree])) if eighths else (),
        worker_warps=[4] * workers + [1],
        worker_registers=[consumer] * workers + [load],
        registers_at_launch=at_launch,
        fp8=workload.dtype == "fp8",
        promoted=workload.dtype == "fp8" and variant.rescale == "always",
    )


def _float_bits(value: float) -> str:
    """A PTX literal of the float32 nearest ``value``."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def _title(workload: Workload) -> str:
    qk, v = workload.head_dim_qk, workload.head_dim_v
    mask = {"none": "no mask", "causal": "causal", "window": "sliding window"}[workload.mask]
    return f"Attention forward on Hopper: head_dim {qk if qk == v else f'{qk}/{v}'}, {mask}."


def _description(variant: Fa3Variant, workload: Workload) -> str:
    """What the docstring says after the title."""
    how = [
        f"A load warp copies tiles of Q, K and V into rings in shared memory; {variant.warpgroups} consumer "
        f"warpgroup{'s' if variant.warpgroups > 1 else ''} of {ROWS} query rows {'share' if variant.warpgroups > 1 else 'reads'} them.",
        _RESCALE_TEXT[variant.rescale].format(threshold=variant.rescale_threshold),
    ]
    if variant.overlap:
        how.append("Each warpgroup issues Q K^T of the next key block together with P V of this one and works on the next softmax while P V runs.")  # fmt: skip
    if variant.ping_pong and variant.warpgroups > 1:
        how.append("Warpgroups take turns at issuing matrix products, so that one's softmax runs under another's products.")  # fmt: skip
    if variant.emulated_share:
        how.append(f"A share of {variant.emulated_share:g} of the exponentials is a polynomial on the FMA pipe.")
    how.append(titled_keys_seen(workload.mask))
    aligned = "Queries and keys are aligned bottom right"
    how.append(f"{aligned}." if workload.mask == "none" else f"{aligned}; a query that sees no key gives zeros and a log-sum-exp of -inf.")  # fmt: skip
    how.append(
        "Runs on sm_90a with triton and torch alone.  Generated by tilecast: regenerate it instead of editing it."
    )
    return textwrap.fill("  ".join(how), _DOCSTRING_WIDTH)
