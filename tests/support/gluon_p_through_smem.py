"""Attention of 64 rows and 64 keys on Hopper with P through shared memory: what the emulator's fence check is tried on."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TILECAST = {
    "machine": "h200-sxm",
    "family": "hopper_ws",
    "workload": {"head_dim_qk": 64, "head_dim_v": 64, "mask": "none", "window": None},
}

copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.constexpr_function
def accumulator():
    """wgmma accumulator of 64 x 64."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])


@gluon.jit
def attention(q_desc, k_desc, v_desc, out, lse, scale_log2):
    """One tile."""
    q = gl.allocate_shared_memory(gl.float16, [1, 1, 64, 64], q_desc.layout)
    k = gl.allocate_shared_memory(gl.float16, [1, 1, 64, 64], k_desc.layout)
    v = gl.allocate_shared_memory(gl.float16, [1, 1, 64, 64], v_desc.layout)
    p_smem = gl.allocate_shared_memory(gl.float16, [64, 64], gl.NVMMASharedLayout(128, 16, 2))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.expect(full, 3 * 8192)
    copy_tile(q_desc, [0, 0, 0, 0], full, q)
    copy_tile(k_desc, [0, 0, 0, 0], full, k)
    copy_tile(v_desc, [0, 0, 0, 0], full, v)
    mbarrier.wait(full, 0)
    zero = gl.zeros([64, 64], gl.float32, layout=accumulator())
    keys = k.reshape([64, 64]).permute((1, 0))
    s = warpgroup_mma(q.reshape([64, 64]), keys, zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    m = gl.max(s, 1)
    p = gl.exp2((s - m[:, None]) * scale_log2)
    total = gl.sum(p, 1)
    p_smem.store(p.to(gl.float16))
    fence_async_shared()
    o = warpgroup_mma(p_smem, v.reshape([64, 64]), zero, use_acc=False, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, accumulator()))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, accumulator()))
    o = o * (1.0 / total)[:, None]
    gl.store(out + (rows * 64)[:, None] + columns[None, :], o.to(gl.float16))
    gl.store(lse + rows, (m * scale_log2 + gl.log2(total)) * 0.6931471805599453)


def launch(q, k, v, out, lse, scale, window_left=-1, window_right=-1):
    """One head of 64 rows and 64 keys, fp16."""

    def descriptor(tensor):
        layout = gl.NVMMASharedLayout.get_default_for([1, 1, 64, 64], gl.float16)
        return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, 64, 64], layout)

    attention[(1,)](descriptor(q), descriptor(k), descriptor(v), out, lse, scale * 1.4426950408889634, num_warps=4)
