"""The attention operator without a GPU: selection, refusals, shapes, FLOP, fallback, tracing.

Stand-in kernels (`conftest`) run on the CPU, so that everything around the kernel is the product's own code.
"""

from __future__ import annotations

import inspect
import itertools
import json
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from support.stand_in_kernels import AMPERE, HOPPER, KERNEL, SHIPPED, tensors

from tilecast.kernels import registry
from tilecast.kernels.errors import AttentionError, UnsupportedError, limits
from tilecast.kernels.registry import RegistryError, candidates, read_index, reduce_mask, select, usable
from tilecast.model.kernel.workload import Workload


def sees(row, key, left, right, seqlen_q, seqlen_k):
    at = row + seqlen_k - seqlen_q
    return (left < 0 or key >= at - left) and (right < 0 or key <= at + right)


# --- masks and selection: no torch -----------------------------------------------------------------------------


def test_reduced_mask_hides_the_same_keys_and_is_the_cheapest() -> None:
    for lq, lk, left, right in itertools.product(range(1, 6), range(1, 6), range(-1, 7), range(-1, 7)):
        mask, low, high = reduce_mask(left, right, lq, lk)
        before = [[sees(i, j, left, right, lq, lk) for j in range(lk)] for i in range(lq)]
        after = [[sees(i, j, low, high, lq, lk) for j in range(lk)] for i in range(lq)]
        assert before == after
        assert (mask == "none") == all(map(all, before))
        assert mask != "causal" or (low, high) == (-1, 0)


@pytest.mark.parametrize(
    ("causal", "window", "expected"),
    [(False, None, (-1, -1)), (True, None, (-1, 0)), (True, (4, -1), (4, 0)), (True, [4, 0], (4, 0)), (False, (-1, 3), (-1, 3))],
)  # fmt: skip
def test_limits(causal, window, expected) -> None:
    assert limits(causal, window) == expected


def test_selection_prefers_then_narrows_then_names() -> None:
    fast = replace(KERNEL, module="fast", mask="window", preference=20)
    twin = replace(KERNEL, module="a")
    portable = replace(KERNEL, module="portable", exact=frozenset(), minimum=AMPERE, preference=1)
    shelf = [KERNEL, twin, portable, fast]
    for order in itertools.permutations(shelf):
        assert [e.module for e in candidates(HOPPER, "bf16", 64, 64, "none", order)] == ["fast"]
        assert select(HOPPER, "bf16", 64, 64, "none", 9, tuple(e for e in order if e is not fast)) == twin
        assert select((12, 0), "bf16", 64, 64, "none", 9, order) == portable
        assert select((7, 5), "bf16", 64, 64, "none", 9, order) is None
        assert select(HOPPER, "bf16", 64, 64, "causal", 9, order) == fast
    same_rank = replace(fast, preference=10)
    assert select(HOPPER, "fp16", 64, 64, "none", 9, (same_rank, twin)) == twin


def test_selection_by_query_length() -> None:
    decode = replace(KERNEL, module="decode", seqlen_q_max=16, preference=30)
    long = replace(KERNEL, module="long", seqlen_q_min=64, preference=20)
    shelf = (KERNEL, long, decode, replace(KERNEL, module="zz_unreachable"))
    assert [e.module for e in candidates(HOPPER, "bf16", 64, 64, "none", shelf)] == ["decode", "long", "k"]
    chosen = {n: select(HOPPER, "bf16", 64, 64, "none", n, shelf).module for n in (0, 16, 17, 63, 64)}
    assert chosen == {0: "decode", 16: "decode", 17: "k", 63: "k", 64: "long"}


def test_selection_by_key_length() -> None:
    short = replace(KERNEL, module="few_keys", seqlen_q_max=64, seqlen_k_max=512)
    shelf = (short, KERNEL)
    assert [e.module for e in candidates(HOPPER, "bf16", 64, 64, "none", shelf)] == ["few_keys", "k"]
    chosen = [select(HOPPER, "bf16", 64, 64, "none", 64, shelf, keys).module for keys in (0, 512, 513)]
    assert chosen == ["few_keys", "few_keys", "k"]
    assert select(HOPPER, "bf16", 64, 64, "none", 65, shelf).module == "k"


def test_a_triton_that_cannot_compile_a_kernel_does_not_get_it() -> None:
    new = replace(KERNEL, module="new", preference=20, triton_min=(3, 9))
    assert usable((KERNEL, new), (3, 6)) == (KERNEL,)
    assert (
        usable((KERNEL, new), (3, 9)) == usable((KERNEL, new), (4, 0)) == usable((KERNEL, new), None) == (KERNEL, new)
    )


def test_a_family_goes_first_when_asked_for() -> None:
    slow = replace(KERNEL, module="slow", family="slow", preference=1)
    ranked = usable((KERNEL, slow), None, "slow")
    assert [e.module for e in candidates(HOPPER, "bf16", 64, 64, "none", ranked)] == ["slow"]
    # Where it has no kernel the others still serve.
    assert (
        select(HOPPER, "bf16", 64, 64, "none", 9, usable((KERNEL, replace(slow, head_dim_qk=96)), None, "slow"))
        == KERNEL
    )
    with pytest.raises(RegistryError, match=r"TILECAST_FAMILY: expected .*slow.*, got 'fast'"):
        usable((KERNEL, slow), None, "fast")


def test_selection_knows_nothing_of_the_batch() -> None:
    for function in (select, candidates, reduce_mask):
        assert not any("batch" in name or "heads" in name for name in inspect.signature(function).parameters)


ROW = {
    "module": "m", "family": "f", "capability": [[9, 0]], "head_dim_qk": 64, "head_dim_v": 64, "mask": "none",
    "dtypes": ["bf16"], "preference": 1,
}  # fmt: skip


def test_index_is_read_as_documented(tmp_path) -> None:
    path = tmp_path / "index.json"
    rows = [
        ROW,
        ROW
        | {"module": "n", "capability": {"min": [8, 0]}, "seqlen_q_min": 1, "seqlen_q_max": 8, "triton_min": [3, 9]},
    ]
    path.write_text(json.dumps([*rows, ROW | {"module": "o", "capability": [10, 3], "seqlen_q_max": None}]))
    one, two, three = read_index(path)
    assert one.runs_on((9, 0)) and not one.runs_on((9, 1)) and (one.seqlen_q_min, one.seqlen_q_max) == (0, 2**62)
    assert two.runs_on((8, 0)) and two.runs_on((12, 1)) and not two.runs_on((7, 5)) and two.seqlen_q_max == 8
    assert (one.triton_min, two.triton_min) == ((0, 0), (3, 9))
    assert three.runs_on((10, 3)) and not three.runs_on((10, 0))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({}, "expected a JSON list of kernels, got dict"),
        ([3], "entry 0: expected an object, got int"),
        ([{k: v for k, v in ROW.items() if k != "mask"}], "entry 0: field 'mask' is missing"),
        ([ROW | {"triton_min": "3.9"}], r"field 'triton_min': expected \[major, minor\], got '3.9'"),
        ([ROW | {"smem": 1}], "unknown field 'smem'"),
        ([ROW | {"mask": "alibi"}], r"entry 0 \(m\): field 'mask': expected none, causal, window, got 'alibi'"),
        ([ROW | {"dtypes": ["fp4"]}], "field 'dtypes': expected some of bf16, fp16, fp8, e5m2, got"),
        ([ROW | {"capability": {"max": [9, 0]}}], "field 'capability': expected"),
        ([ROW | {"capability": [[9]]}], "field 'capability': expected"),
        ([ROW | {"capability": []}], "field 'capability': expected"),
        ([ROW | {"head_dim_v": "64"}], "field 'head_dim_v': expected a whole number of at least 0, got '64'"),
        ([ROW | {"module": "../m"}], "field 'module': expected a module name"),
        ([ROW | {"taller": {"module": "n"}}], "field 'taller': expected a module and a time above 0 and at most 1"),
        ([ROW | {"taller": {"module": "n", "time": 1.5}}], "field 'taller': expected a module and a time"),
        ([ROW, ROW], "expected every module once, got 'm' 2 times"),
    ],
)
def test_index_refuses(tmp_path, rows, message) -> None:
    path = tmp_path / "index.json"
    path.write_text(json.dumps(rows))
    with pytest.raises(RegistryError, match=message):
        read_index(path)


def test_shipped_index_names_files_that_exist() -> None:
    for entry in registry.shipped():
        assert (registry.INDEX.parent / f"{entry.module}.py").is_file(), entry.module


def test_importing_the_kernels_loads_neither_torch_nor_the_simulator() -> None:
    code = "import sys, tilecast.kernels, tilecast.kernels.registry, tilecast.kernels.transformers_adapter; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "tilecast.kernels" in loaded
    assert not [m for m in loaded if m.startswith(("torch", "triton", "numpy", "tilecast.model", "tilecast.codegen"))]


def test_the_operator_loads_no_simulator_and_no_compiler(torch) -> None:
    code = "import sys; from tilecast.kernels import attention; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not [m for m in loaded if m.startswith(("torch._dynamo", "tilecast.model", "tilecast.codegen"))]


# --- refusals --------------------------------------------------------------------------------------------------

MISTAKES = [
    ({"q": 3}, "q: expected a torch tensor, got int"),
    ({"k": lambda q, k, v: k[0]}, "k: expected 4 dimensions"),
    ({"q": lambda q, k, v: q[0, 0], "layout": "bshd"}, "q: expected 4 dimensions"),
    ({"k": lambda q, k, v: k.float()}, "k: expected dtype torch.float16 as q has, got torch.float32"),
    ({"v": lambda q, k, v: v[:1]}, "v: expected batch 2 as q has, got 1"),
    ({"v": lambda q, k, v: v[:, :1]}, "v: expected 2 heads as k has, got 1"),
    ({"q": lambda q, k, v: q[:, :3]}, "q: expected heads a multiple of the 2 key/value heads, got 3"),
    ({"v": lambda q, k, v: v[:, :, :3]}, "v: expected seqlen 7 as k has, got 3"),
    ({"k": lambda q, k, v: k[..., :32]}, "k: expected head_dim 64 as q has, got 32"),
    ({"q": lambda q, k, v: q[..., :0], "k": lambda q, k, v: k[..., :0]}, "q: expected head_dim of at least 1, got 0"),
    ({"k": lambda q, k, v: k.to('meta'), "v": lambda q, k, v: v.to('meta')}, "k: expected device cpu as q has, got meta"),
    ({"causal": lambda q, k, v: q > 0}, "causal: expected True or False, got a tensor; attention takes no mask tensor"),
    ({"causal": 1}, "causal: expected True or False, got 1"),
    ({"window": 5}, "window: expected two whole numbers"),
    ({"window": (-2, 0)}, "window: expected left a whole number of at least -1"),
    ({"window": (0, 1.5)}, "window: expected right a whole number"),
    ({"window": (4, 4), "causal": True}, "window: expected right 0 or -1 together with causal=True, got 4"),
    ({"scale": float("nan")}, "scale: expected a finite number, got nan"),
    ({"scale": "big"}, "scale: expected a number, got 'big'"),
    ({"layout": "sbhd"}, "layout: expected 'bhsd' or 'bshd', got 'sbhd'"),
    ({"fallback": "math"}, "fallback: expected None or 'sdpa', got 'math'"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), MISTAKES, ids=[m for _, m in MISTAKES])
@pytest.mark.parametrize("fallback", [None, "sdpa"])
def test_mistakes_are_errors_with_and_without_fallback(torch, op, change, message, fallback) -> None:
    q, k, v = tensors(torch)
    change = {name: value(q, k, v) if callable(value) else value for name, value in change.items()}
    with pytest.raises(AttentionError, match=message.replace("(", r"\(")) as caught:
        op.attention(**({"q": q, "k": k, "v": v, "fallback": fallback} | change))
    assert not isinstance(caught.value, UnsupportedError)
    assert not op.launched


UNSUPPORTED = [
    ({"dtype": "float32"}, {}, "expected dtype torch.bfloat16 or torch.float16, got torch.float32"),
    ({"d": 200, "dv": 200}, {}, r"head_dim: expected at most that of a shipped kernel \(192/128\), got 200"),
    ({"d": 64, "dv": 136}, {}, "got 64/136"),
    ({}, {"scale": 0}, "scale: expected a number above 0"),
    ({}, {"scale": -1.0}, "scale: expected a number above 0"),
]


@pytest.mark.parametrize(("shape", "options", "message"), UNSUPPORTED, ids=[m for *_, m in UNSUPPORTED])
def test_unsupported_problems_raise_unless_the_fallback_was_asked_for(torch, op, shape, options, message) -> None:
    q, k, v = tensors(torch, **shape)
    for error in (UnsupportedError, ValueError, NotImplementedError):
        with pytest.raises(error, match=message):
            op.attention(q, k, v, **options)
    assert op.attention(q, k, v, **options, fallback="sdpa").shape == (2, 4, 5, v.shape[3])
    assert not op.launched


def test_cpu_tensors_are_refused_by_name(torch) -> None:
    from tilecast.kernels import attention

    q, k, v = tensors(torch)
    with pytest.raises(UnsupportedError, match="expected tensors on a CUDA device, got device 'cpu'"):
        attention(q, k, v)
    with pytest.raises(UnsupportedError, match="got device 'cpu'"):
        torch.ops.tilecast.attention_forward(q, k, v, None, -1, -1, False)


def test_no_kernel_for_the_query_length_or_without_triton(torch, op, monkeypatch) -> None:
    q, k, v = tensors(torch)
    monkeypatch.setattr(registry, "shipped", lambda: (replace(KERNEL, seqlen_q_min=6),))
    with pytest.raises(UnsupportedError, match="kernels for head_dim 64/64 none start at 6 query rows, got 5"):
        op.attention(q, k, v)
    op.forward_kernels.clear()
    monkeypatch.setattr(registry, "shipped", lambda: SHIPPED)
    monkeypatch.setattr(registry, "launcher", lambda entry: __import__("triton_that_is_not_there"))
    with pytest.raises(UnsupportedError, match="the kernels need Triton"):
        op.attention(q, k, v)


# --- what reaches the kernel, and what comes back --------------------------------------------------------------


def test_cheapest_kernel_is_launched_with_the_reduced_window(torch, op) -> None:
    calls = [
        ({}, "none", (-1, -1)),
        ({"causal": True}, "causal", (-1, -1)),
        ({"window": (-1, 0)}, "causal", (-1, -1)),
        ({"window": (6, 4)}, "none", (-1, -1)),
        ({"window": (5, 4)}, "window", (5, -1)),
        ({"causal": True, "window": (100, -1)}, "causal", (-1, -1)),
        ({"causal": True, "window": (2, 0)}, "window", (2, 0)),
    ]
    q, k, v = tensors(torch)
    for options, mask, window in calls:
        op.attention(q, k, v, **options)
        module, arguments = op.launched[-1]
        assert (module, arguments[-2:]) == (f"k64_64_{mask}", window), options
    op.attention(q[:, :, :1], k, v, causal=True)
    assert op.launched[-1][0] == "k64_64_none"


def test_kernel_does_not_depend_on_batch_or_heads(torch, op) -> None:
    for batch, heads, heads_kv in ((1, 1, 1), (64, 2, 1), (2, 32, 8), (7, 3, 3)):
        op.attention(*tensors(torch, batch, heads, heads_kv, d=192, dv=128), causal=True)
    assert {module for module, _ in op.launched} == {"k192_128_causal"}


def test_tensors_are_read_in_place_or_copied(torch, op) -> None:
    q, k, v = tensors(torch, heads=2)
    packed = torch.randn(2, 7, 3, 2, 64).half()  # (batch, seqlen, 3, heads, head_dim)
    inplace = [t.transpose(1, 2) for t in packed.unbind(2)]
    odd_address = torch.randn(2 * 2 * 7 * 64 + 1).half()[1:].view(2, 2, 7, 64)
    odd_rows = torch.randn(2, 2, 7, 65).half()[..., :64]
    columns = torch.randn(2, 2, 64, 7).half().transpose(2, 3)
    lone_row = torch.randn(2, 2, 65).half()[:, :, None, :64]
    for tensor, same in [(t, True) for t in (q, *inplace)] + [
        (t, False) for t in (odd_address, odd_rows, columns, lone_row)
    ]:
        out = op.attention(tensor, k, v)
        seen = op.launched[-1][1][0]
        assert (seen.data_ptr() == tensor.data_ptr()) == same
        assert seen.stride(3) == 1 and not any(s % 8 for s in seen.stride()[:3]) and torch.equal(seen, tensor)
        assert torch.equal(out, op.attention(tensor.contiguous(), k, v))
    op.attention(q, k, v)
    assert [t.data_ptr() for t in op.launched[-1][1][:3]] == [t.data_ptr() for t in (q, k, v)]


def test_output_follows_layout_and_memory_order(torch, op) -> None:
    q, k, v = tensors(torch, d=192, dv=128)
    out, lse = op.attention(q, k, v, return_lse=True)
    assert out.shape == (2, 4, 5, 128) and out.is_contiguous()
    assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32 and lse.is_contiguous()
    swapped = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    rows_first, same_lse = op.attention(*swapped, return_lse=True, layout="bshd")
    assert rows_first.is_contiguous() and torch.equal(rows_first.transpose(1, 2), out) and torch.equal(lse, same_lse)
    heads_inside = op.attention(*[t.transpose(1, 2) for t in swapped])
    assert heads_inside.transpose(1, 2).is_contiguous() and torch.equal(heads_inside, out)


@pytest.mark.parametrize("shape", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"heads": 0, "heads_kv": 0}])
def test_nothing_to_attend_to_launches_nothing(torch, op, shape) -> None:
    q, k, v = tensors(torch, **shape)
    for fallback in (None, "sdpa"):
        for options in ({}, {"causal": True}, {"window": (1, 1)}):
            out, lse = op.attention(q, k, v, return_lse=True, fallback=fallback, **options)
            assert out.shape == q.shape and not out.any() and out.dtype == q.dtype
            assert lse.shape == q.shape[:3] and (lse == -float("inf")).all()
    assert not op.launched


# --- the operator as tracers see it ----------------------------------------------------------------------------


def test_fake_kernel_agrees_with_the_real_one(torch, op) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for transpose in (False, True):
        inputs = [
            t.transpose(1, 2).contiguous().transpose(1, 2) if transpose else t for t in tensors(torch, d=192, dv=128)
        ]
        real = op.attention(*inputs, return_lse=True)
        meta = op.attention(*[t.to("meta") for t in inputs], return_lse=True)
        with FakeTensorMode() as mode:
            fake = op.attention(*[mode.from_tensor(t) for t in inputs], return_lse=True)
        for a, b, c in zip(real, meta, fake, strict=True):
            assert (
                a.shape == b.shape == c.shape
                and a.stride() == b.stride() == c.stride()
                and a.dtype == b.dtype == c.dtype
            )
    with FakeTensorMode(), pytest.raises(UnsupportedError, match="expected dtype"):
        op.attention(*[torch.empty(1, 1, 4, 64, device="cuda")] * 3)
    torch.library.opcheck(torch.ops.tilecast.attention_forward.default, (*tensors(torch), None, 3, 0, True))


def test_torch_compile_without_graph_breaks(torch, op) -> None:
    def layer(q, k, v):
        out, lse = op.attention(q * 1, k, v, causal=True, return_lse=True)
        return out * 2, lse

    for dynamic in (None, True):
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for seqlen in (5, 6, 7):
            inputs = tensors(torch, seqlen_q=seqlen)
            for a, b in zip(compiled(*inputs), layer(*inputs), strict=True):
                assert torch.equal(a, b) and a.stride() == b.stride()
    fallback = torch.compile(
        lambda *t: op.attention(*t, causal=True, fallback="sdpa"), fullgraph=True, backend="aot_eager"
    )
    q, k, v = tensors(torch, d=32, dv=32, dtype="float32")
    fallback(q.requires_grad_(), k, v).sum().backward()
    assert q.grad is not None and fallback(*[t.detach().double() for t in (q, k, v)]).dtype == torch.float64
    refusal = torch.compile(op.attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="expected at most that of a shipped kernel"):
        refusal(*tensors(torch, d=200, dv=200))


def test_flop_formula_is_the_workloads_own(torch, op) -> None:
    rng = random.Random(0)
    for _ in range(300):
        batch, group, heads_kv = rng.randint(1, 3), rng.choice([1, 4]), rng.randint(1, 3)
        lq, lk = rng.randint(1, 40), rng.randint(1, 40)
        lk = rng.choice([lq, lk])
        mask = rng.choice(["none", "causal", "window"])
        # A window of (-1, 0) is causal, and the operator cannot know which word the caller used.
        window = rng.choice([(3, 0), (0, 9), (50, 60), (-1, 2), (5, -1)]) if mask == "window" else None
        d, dv = rng.choice([(64, 64), (192, 128)])
        work = Workload(batch, group * heads_kv, heads_kv, lq, lk, d, dv, mask, window)
        left, right = window or ((-1, 0) if mask == "causal" else (-1, -1))
        q, k, v = (batch, work.heads_q, lq, d), (batch, heads_kv, lk, d), (batch, heads_kv, lk, dv)
        assert op.attention_flops(q, k, v, None, left, right, False) == work.flops, work


def test_watchers_see_the_operator(torch, op) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = tensors(torch)
    plain = op.attention(q, k, v, causal=True)
    with FlopCounterMode(display=False) as counter:
        counted = op.attention(q, k, v, causal=True)
    assert counter.get_total_flops() == 2 * 2 * 4 * 128 * (3 + 4 + 5 + 6 + 7)

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        watched = op.attention(q, k, v, causal=True)
    with torch.profiler.profile() as profile:
        profiled = op.attention(q, k, v, causal=True)
    assert "tilecast.attention_forward.default" in seen
    assert "tilecast::attention_forward" in {event.name for event in profile.events()}
    parameter = op.attention(torch.nn.Parameter(q, requires_grad=False), k, v, causal=True)
    with torch.device("cpu"):
        moded = op.attention(q, k, v, causal=True)
    for out in (counted, watched, profiled, parameter, moded):
        assert torch.equal(out, plain)


# --- the fallback against float64 ------------------------------------------------------------------------------


def reference(torch, q, k, v, scale, left, right):
    """Float64 attention row by row, from the definition."""
    q, k, v = q.double(), k.double(), v.double()
    batch, heads, lq, _ = q.shape
    lk, group = k.shape[2], heads // k.shape[1]
    out, lse = (
        torch.zeros(batch, heads, lq, v.shape[3]).double(),
        torch.full((batch, heads, lq), -float("inf")).double(),
    )
    for b, h, i in itertools.product(range(batch), range(heads), range(lq)):
        keys = [j for j in range(lk) if sees(i, j, left, right, lq, lk)]
        if keys:
            scores = k[b, h // group, keys] @ q[b, h, i] * scale
            out[b, h, i] = scores.softmax(0) @ v[b, h // group, keys]
            lse[b, h, i] = scores.logsumexp(0)
    return out, lse


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (0, 0), (1, 2), (-1, 1), (3, -1)])
@pytest.mark.parametrize(("lq", "lk"), [(6, 6), (1, 6), (9, 4), (4, 9)])
def test_fallback_is_exact(torch, op, monkeypatch, window, lq, lk) -> None:
    from tilecast.kernels import fallback

    monkeypatch.setattr(fallback, "SCORES_AT_ONCE", 2 * 4 * lk * 2)
    q, k, v = tensors(torch, seqlen_q=lq, seqlen_k=lk, d=24, dv=16, dtype="float64")
    out, lse = op.attention(q, k, v, scale=0.3, window=window, return_lse=True, fallback="sdpa")
    expected, expected_lse = reference(torch, q, k, v, 0.3, *window)
    assert torch.allclose(out, expected, atol=1e-12, rtol=0)
    assert torch.allclose(lse, expected_lse.float(), atol=1e-6, rtol=0) and lse.dtype == torch.float32
    if window[1] >= 0 and lq > lk + window[1]:
        assert not out[:, :, : lq - lk - window[1]].any()


def test_fallback_gradients_are_finite_and_right(torch, op) -> None:
    inputs = [t.requires_grad_() for t in tensors(torch, 1, 2, 1, 5, 3, 8, 8, dtype="float64")]

    def layer(*t):
        return op.attention(*t, causal=True, fallback="sdpa")

    assert torch.autograd.gradcheck(layer, inputs)
    out, lse = op.attention(*inputs, return_lse=True, fallback="sdpa")
    (out.sum() + lse.sum()).backward()
    assert all(t.grad.isfinite().all() for t in inputs)


# --- transformers ----------------------------------------------------------------------------------------------


def test_transformers_mask_function_refuses_what_none_would_get_wrong(torch) -> None:
    from tilecast.kernels.transformers_adapter import no_mask

    padding = torch.tensor([[True] * 8, [False] + [True] * 7])
    config = type("Config", (), {"attention_chunk_size": 4})()
    plain = {"batch_size": 2, "q_length": 8, "kv_length": 8, "allow_is_causal_skip": True}
    assert no_mask(**plain) is None
    assert no_mask(**plain, attention_mask=padding[:1], local_size=4) is None
    assert no_mask(**plain | {"q_length": 1, "q_offset": 7}) is None
    # A sliding cache that dropped the padded key.
    assert no_mask(**plain | {"kv_length": 7, "kv_offset": 1, "attention_mask": padding}) is None
    # Padding is handed on, of the keys that there are.
    assert torch.equal(no_mask(**plain, attention_mask=padding), padding)
    assert torch.equal(
        no_mask(**plain | {"kv_length": 4, "q_length": 1, "q_offset": 3}, attention_mask=padding), padding[:, :4]
    )
    for change, message in [
        ({"allow_is_causal_skip": False}, "needs a tensor"),
        ({"kv_length": 64}, "use a DynamicCache"),
        ({"local_size": 4, "config": config}, "chunks of 4 are not supported"),
        ({"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True, "local_size": 4}, "full attention with window 4"),
    ]:  # fmt: skip
        with pytest.raises(UnsupportedError, match=message):
            no_mask(**plain | change)


def test_transformers_function_refuses_what_changes_the_result(torch, op) -> None:
    from tilecast.kernels.transformers_adapter import attention_function

    module = type("Attention", (), {"is_causal": True})()
    function = attention_function()
    q, k, v = tensors(torch, seqlen_q=7)
    out, weights = function(module, q, k, v, None, scaling=0.5, sliding_window=3)
    assert weights is None and torch.equal(out, op.attention(q, k, v, True, 0.5, (2, 0)).transpose(1, 2))
    assert torch.equal(function(module, q, k, v, None, is_causal=False)[0], op.attention(q, k, v).transpose(1, 2))
    for change, message in [
        ({"attention_mask": torch.ones(2, 1, 7, 7)}, "attention_mask: expected None"),
        ({"dropout": 0.1}, "dropout: expected 0, got 0.1"),
        ({"position_bias": q}, "position_bias: expected None, got Tensor; Attention needs another"),
        ({"output_attentions": True}, "output_attentions: expected False"),
        ({"is_causal": False, "sliding_window": 4}, "full attention with window 4"),
    ]:
        with pytest.raises(UnsupportedError, match=message):
            function(module, q, k, v, **({"attention_mask": None} | change))


def test_missing_transformers_is_said(monkeypatch) -> None:
    from tilecast.kernels.transformers_adapter import register

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="expected transformers 5 or newer"):
        register()
