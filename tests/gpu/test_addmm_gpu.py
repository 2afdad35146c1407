"""`tilecast.addmm` on a GPU: against float64 over shapes, layouts and dtypes, in place, the same bits, graphs, compile, gradients."""

from __future__ import annotations

import itertools

import pytest
import torch

import tilecast
from tilecast.kernels.gemm import launching, operator, registry
from tilecast.kernels.gemm.registry import candidates, preferring, shipped_gemm

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(1, 8, 8), (128, 128, 64), (264, 392, 200), (1000, 1024, 72), (2048, 2048, 256), (520, 4104, 512), (3000, 808, 1000),
          (4096, 4096, 2048), (16384, 136, 4096)]  # fmt: skip


@pytest.fixture(autouse=True, params=["gluon", "portable"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that the operator prefers: those of the GPU, where it has some, and the portable one."""
    entries = shipped_gemm()
    here = [e for e in entries if e.family != "gemm_triton" and e.runs_on(torch.cuda.get_device_capability())]
    if request.param == "gluon" and not here:
        pytest.skip("no kernels of this GPU's own")
    asked = preferring(entries, here[0].family if request.param == "gluon" else "gemm_triton")
    monkeypatch.setattr(registry, "shipped_gemm", lambda: asked)
    monkeypatch.setattr(operator, "_known", {})


def matrix(rows: int, columns: int, kind: torch.dtype, by_columns: bool = False) -> torch.Tensor:
    first, second = (columns, rows) if by_columns else (rows, columns)
    made = torch.randn(first, -(-second // 8) * 8, device="cuda").to(kind)[:, :second]
    return made.t() if by_columns else made


def right(got: torch.Tensor, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: float, alpha: float) -> bool:
    """Within D's own rounding and that of float32 sums."""
    want = beta * c.double() + alpha * (a.double() @ b.double())
    scale = abs(alpha) * (a.double().abs() @ b.double().abs()) + abs(beta) * c.double().abs()
    rounded = (want.to(got.dtype).double() - want).abs()
    # Tensor cores add with fewer bits than float32 has.
    return bool(
        (
            (got.double() - want).abs() <= rounded * 1.01 + 2e-6 * scale + torch.finfo(got.dtype).eps * 0.1 * want.abs()
        ).all()
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "wide"), [(BF16, BF16), (FP16, FP16), (BF16, FP32)])
def test_computes_the_product(shape: tuple[int, int, int], kind: torch.dtype, wide: torch.dtype) -> None:
    torch.manual_seed(0)
    m, n, k = shape
    for a_columns, b_columns, (beta, alpha), place in itertools.product(
        (False, True), (False, True), ((1.0, 1.0), (0.5, -2.0), (0.0, 1.0)), ("new", "c", "out", "columns")
    ):
        a, b, c = matrix(m, k, kind, a_columns), matrix(k, n, kind, b_columns), matrix(m, n, wide)
        before = c.clone()
        nothing = torch.full_like(c, float("nan"))
        out = {"new": None, "c": c, "out": nothing, "columns": nothing.t().contiguous().t()}[place]
        got = tilecast.addmm(c, a, b, beta=beta, alpha=alpha, out=out)
        assert right(got, before, a, b, beta, alpha), (a_columns, b_columns, beta, place)


@pytest.mark.parametrize(
    "shape",
    [
        (300, 200, 136),
        (1000, 1023, 71),
        (2048, 4096, 1024),
        (16, 4095, 513),
        (4096, 24, 4095),
        (1, 3001, 1025),
        (2500, 1, 700),
        (4100, 1027, 72),
    ],
)
@pytest.mark.parametrize(("kind", "wide"), [(BF16, BF16), (FP16, FP16), (BF16, FP32)])
def test_tensors_that_lie_anyhow(shape: tuple[int, int, int], kind: torch.dtype, wide: torch.dtype) -> None:
    torch.manual_seed(0)
    m, n, k = shape

    def some(rows: int, columns: int, of: torch.dtype, how: str) -> torch.Tensor:
        if how in ("row", "column", "number"):
            return torch.randn(1 if how != "column" else rows, 1 if how != "row" else columns, device="cuda").to(of)
        if how == "columns":
            return matrix(rows, columns, of, True)
        whole = torch.randn(rows, 2 * columns + 3, device="cuda").to(of)
        return whole[:, 1 : columns + 1] if how == "odd" else whole[:, : 2 * columns : 2]

    for i, (how_a, how_b, how_c) in enumerate(itertools.product(("odd", "apart"), ("odd", "apart"), ("row", "odd", "column", "number", "columns"))):  # fmt: skip
        a, b, c = some(m, k, kind, how_a), some(k, n, kind, how_b), some(m, n, wide, how_c)
        if i % 3 == 0:
            a, b = a.contiguous(), b.t().contiguous().t()
        for beta, place in ((1.0, None), (0.5, some(m, n, wide, "odd")), (0.0, None), (1.0, None)):
            got = tilecast.addmm(c, a, b, beta=beta, out=place)
            assert right(got, c.expand(m, n), a, b, beta, 1.0), (how_a, how_b, how_c, beta)


@pytest.mark.parametrize("entry", shipped_gemm(), ids=lambda entry: entry.module)
def test_every_kernel_that_runs_here(entry) -> None:  # type: ignore[no-untyped-def]
    if not entry.runs_on(torch.cuda.get_device_capability()):
        pytest.skip("for another GPU")
    wide = FP32 if entry.c_bytes == 4 else BF16
    if entry.use and entry.use != registry.SMALL:
        launch = operator._launcher(entry, launching.parted_launcher)
        for (m, n, k), parts in (
            ((24, 392, 200), 2),
            ((1, 4100, 4096), 7),
            ((300, 1001, 3000), 5),
            ((130, 200, 8200), 32),
        ):
            torch.manual_seed(1)
            a, b, c = matrix(m, k, BF16), matrix(k, n, BF16, True), matrix(m, n, wide)
            for beta, alpha in ((1.0, 1.0), (0.5, -2.0), (0.0, 1.0)):
                d = torch.full_like(c, float("nan")).t().contiguous().t()
                launch(a, b, c, d, alpha, beta, parts)
                assert right(d, c, a, b, beta, alpha)
        return
    for m, n, k in ((264, 392, 200), (4096, 4096, 512), (130, 8200, 4096)):
        torch.manual_seed(1)
        a, b, c = matrix(m, k, BF16), matrix(k, n, BF16), matrix(m, n, wide)
        d = torch.full_like(c, float("nan"))
        operator._launcher(entry)(a, b, c, d, 1.0, 1.0)
        assert right(d, c, a, b, 1.0, 1.0)
        # What the copy engine does not bring and does not take: C by columns, D at odd steps, both in place.
        operator._launcher(entry)(a, b, c.t().contiguous().t(), d, 0.5, 1.0)
        assert right(d, c, a, b, 1.0, 0.5)
        odd = torch.full((m, n + 3), float("nan"), device="cuda", dtype=wide)[:, 1 : n + 1]
        operator._launcher(entry)(a, b, c.t().contiguous().t(), odd, 1.0, -0.5)
        assert right(odd, c, a, b, -0.5, 1.0)
        odd.copy_(c)
        operator._launcher(entry)(a, b, odd, odd, 1.0, 1.0)
        assert right(odd, c, a, b, 1.0, 1.0)


@pytest.mark.parametrize(
    "shape", [(1, 4096, 4096), (1, 5001, 4097), (3000, 9, 2048), (128, 1024, 8192), (520, 392, 7000)]
)
def test_parts_of_k_give_the_same_bits_on_every_stream_and_on_replay(shape: tuple[int, int, int]) -> None:
    """Every launch has sums of its own."""
    torch.manual_seed(5)
    m, n, k = shape
    a, b, c = matrix(m, k, BF16), matrix(k, n, BF16, True), matrix(m, n, BF16)
    first = tilecast.addmm(c, a, b)
    assert right(first, c, a, b, 1.0, 1.0)
    outs = [torch.empty_like(first) for _ in range(5)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tilecast.addmm(c, a, b, out=outs[-1])
    streams = [torch.cuda.Stream() for _ in outs[:-1]]
    torch.cuda.synchronize()
    for _ in range(10):
        for stream, out in zip(streams, outs, strict=False):
            with torch.cuda.stream(stream):
                tilecast.addmm(c, a, b, out=out)
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(first, out) for out in outs)


def test_nothing_beyond_the_tensors_is_written() -> None:
    torch.manual_seed(2)
    holder = torch.full((400, 520), 7.0, device="cuda", dtype=BF16)
    c = holder[100:300, 8:400]
    c.normal_()
    a, b = matrix(200, 136, BF16), matrix(136, 392, BF16)
    tilecast.addmm(c, a, b, out=c)
    untouched = torch.ones_like(holder, dtype=torch.bool)
    untouched[100:300, 8:400] = False
    assert bool((holder[untouched] == 7.0).all())


@pytest.mark.parametrize("k", [128, 512, 2048])
def test_the_same_bits_every_time_and_on_replay(k: int) -> None:
    torch.manual_seed(3)
    a, b, c = matrix(3000, k, BF16), matrix(k, 2056, BF16), matrix(3000, 2056, BF16)
    first = tilecast.addmm(c, a, b)
    assert all(torch.equal(first, tilecast.addmm(c, a, b)) for _ in range(20))
    out = torch.empty_like(c)
    tilecast.addmm(c, a, b, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tilecast.addmm(c, a, b, out=out)
    out.zero_()
    graph.replay()
    assert torch.equal(first, out)


@pytest.mark.parametrize("shape", [(3000, 2056), (200, 392)])
@pytest.mark.parametrize("how", ["rows", "row", "none"])
@pytest.mark.parametrize("wide", [BF16, FP32])
def test_kernels_among_which_waves_choose_give_the_same_bits(wide: torch.dtype, how: str, shape: tuple[int, int]) -> None:  # fmt: skip
    """So that a row's result does not go by how many others there are: of one wave and of several, those kept for few tiles among them."""
    (m, n), size = shape, torch.empty((), dtype=wide).element_size()
    _, launches, *_ = operator._find(torch.cuda.get_device_capability(), torch.cuda.current_device(), size, 2048)
    if len(launches) < 2:
        pytest.skip("no such kernels of this GPU's own")
    torch.manual_seed(7)
    a, b, c = matrix(m, 2048, BF16), matrix(2048, n, BF16), matrix(m, n, wide)
    c = c if how == "rows" else c[:1].clone().expand(m, n)
    beta = 0.5 if how != "none" else 0.0
    outs = [torch.full((m, n), float("nan"), device="cuda", dtype=wide) for _ in launches]
    for launch, out in zip(launches, outs, strict=True):
        launch(a, b, c if beta else None, out, 1.5, beta)
    assert all(torch.equal(outs[0], out) for out in outs[1:])
    assert right(outs[0], c, a, b, beta, 1.5)


def test_launches_that_overlap_share_counters_and_leave_them_at_zero(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """A kernel whose programs meet, on three streams and in a graph at once; then with counts that never come or are there before."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("programs of Hopper's kernels meet")
    from tilecast.base.module_file import module_of
    from tilecast.codegen.gemm.generate import generate_gemm
    from tilecast.model.gemm.variant import GemmVariant
    from tilecast.model.gemm.workload import Gemm
    from tilecast.model.machine.machine import load_machine

    file = tmp_path / "meets.py"
    variant = GemmVariant(stages=6, c_stages=4, c_parts=4, in_step=16)
    file.write_text(generate_gemm(Gemm(4096, 4096, 2048), load_machine("h200"), variant).source, encoding="utf-8")
    launch = launching.gemm_launcher(module_of(file))
    torch.manual_seed(6)
    sets = [(matrix(3000, k, BF16), matrix(k, 2056, BF16), matrix(3000, 2056, BF16)) for k in (1024, 2048, 4096)]
    outs = [torch.empty_like(c) for _, _, c in sets]
    replayed = torch.empty_like(outs[0])
    for (a, b, c), out in zip(sets, outs, strict=True):
        launch(a, b, c, out)
    assert all(right(out, c, a, b, 1.0, 1.0) for (a, b, c), out in zip(sets, outs, strict=True))
    first = [out.clone() for out in outs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(*sets[0], replayed)
    streams = [torch.cuda.Stream() for _ in sets]
    torch.cuda.synchronize()
    for _ in range(10):
        for stream, given, out in zip(streams, sets, outs, strict=True):
            with torch.cuda.stream(stream):
                launch(*given, out)
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip([*first, first[0]], [*outs, replayed], strict=True))
    counters = launching.meeting_counters(torch.device("cuda", torch.cuda.current_device()))
    assert not counters.any()
    try:
        for wrong in (-(1 << 20), 1 << 20):
            counters.fill_(wrong)
            for given, out, x in zip(sets, outs, first, strict=True):
                out.fill_(float("nan"))
                launch(*given, out)
                assert torch.equal(out, x)
            assert bool((counters == wrong).all())
    finally:
        counters.zero_()


def test_other_tensors_of_a_shape_go_through_the_remembered_launch() -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        a, b, c = matrix(512, 256, BF16), matrix(256, 512, BF16), matrix(512, 512, BF16)
        assert right(tilecast.addmm(c, a, b, alpha=1.0 + seed), c, a, b, 1.0, 1.0 + seed)
        for shape in ((512, 512, 256), (256, 192, 4096), (4, 512, 256)):
            a, b, c = matrix(shape[0], shape[2], BF16), matrix(shape[2], shape[1], BF16), matrix(*shape[:2], BF16)
            out, before = torch.full_like(c, float("nan")), c.clone()
            assert right(tilecast.addmm(c, a, b, out=out), c, a, b, 1.0, 1.0)
            version = c._version
            assert right(tilecast.addmm(c, a, b, out=c), before, a, b, 1.0, 1.0) and c._version == version + 1


def test_compile_and_gradients() -> None:
    torch.manual_seed(4)
    a, b, c = (matrix(*shape, BF16).requires_grad_() for shape in ((512, 256), (256, 384), (512, 384)))
    fast = torch.compile(lambda c, a, b: torch.relu(tilecast.addmm(c, a, b, alpha=0.5)), fullgraph=True)
    got = fast(c, a, b)
    assert torch.allclose(got, torch.relu(torch.addmm(c, a, b, alpha=0.5)), rtol=2e-2, atol=2e-2)
    weight = torch.randn_like(got)
    mine = torch.autograd.grad((tilecast.addmm(c, a, b) * weight).sum(), (c, a, b))
    theirs = torch.autograd.grad((torch.addmm(c, a, b) * weight).sum(), (c, a, b))
    assert all(
        torch.allclose(x, y, rtol=2e-2, atol=2e-2 * float(y.abs().max())) for x, y in zip(mine, theirs, strict=True)
    )


def test_this_gpu_has_a_kernel_for_every_k() -> None:
    capability = torch.cuda.get_device_capability()
    for k, c_bytes in itertools.product((1, 64, 319, 320, 768, 2048, 1 << 20), (2, 4)):
        assert candidates(capability, c_bytes, k)
