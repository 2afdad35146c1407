"""tilecast.addmm on the CPU, with stand-ins behind the shipped kernels: what runs where, gradients, torch.compile, refusals.

What the kernels compute: tests/unit/codegen/gemm/test_gemm_kernels.py; on a GPU: tests/gpu/test_addmm_gpu.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tilecast
from tilecast.kernels.gemm import registry
from tilecast.kernels.registry import RegistryError

torch = pytest.importorskip("torch")

from tilecast.kernels.again import Memory  # noqa: E402
from tilecast.kernels.gemm import layouts, operator  # noqa: E402
from tilecast.kernels.gemm.choice import choose, tiles_of  # noqa: E402

#: Kernels whose launch was kept for later calls.
STARTED: list[str] = []
#: Matrices that launches of copies took.
COPIED: list[int] = []
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def launched(monkeypatch):  # type: ignore[no-untyped-def]
    """Names of the kernels that ran, on a machine whose CPU is an H200."""
    ran: list[str] = []
    rooms: list[torch.Tensor] = []

    def launcher(entry, made=operator.gemm_launcher):  # type: ignore[no-untyped-def]
        def launch(a, b, c, d, alpha, beta, parts=None, follows=False):  # type: ignore[no-untyped-def]
            assert (parts is not None) == (made is operator.parted_launcher)
            # A launch begins before the one before has ended only where that is ours, k is short and every SM finds one tile at most.
            copied = any(x.data_ptr() in [room.data_ptr() for room in rooms] for x in (a, b))
            tiles = (
                -(-d.shape[0] // entry.tile[0]) * -(-d.shape[1] // entry.tile[1]) * (parts or 1) if entry.tile else 0
            )
            early = (
                entry.use not in registry.PACES and copied and tiles <= operator._device(0)[1] and a.shape[1] <= 1024
            )
            assert follows == early
            ran.append(entry.module + (f" in {parts}" if parts else ""))
            if not entry.any_strides:
                # What the copy engine reads: rows or columns that start at whole 16 bytes.
                for x in (a, b):
                    rows = x.stride() if x.stride(1) == 1 else x.t().stride()
                    assert rows[1] == 1 and rows[0] * x.element_size() % 16 == 0 == x.data_ptr() % 16 and rows[0] > 0
            assert c is None if beta == 0 else c.shape == d.shape
            d.copy_(alpha * (a.double() @ b.double()) + (beta * c.double() if beta else 0.0))

        def started(a, b, c, d, alpha, beta):  # type: ignore[no-untyped-def]
            STARTED.append(entry.module)
            return lambda a, b, c, d: launch(a, b, c, d, alpha, beta)

        launch.started = started  # type: ignore[attr-defined]
        return launch

    def copy(x, to, other=None, other_to=None):  # type: ignore[no-untyped-def]
        for one, its in ((x, to), (other, other_to)):
            if one is not None:
                assert its.stride(1) == 1 and its.stride(0) % 8 == 0 == its.data_ptr() % 16
                its.copy_(one)
                rooms.append(its)
        COPIED.append(1 if other is None else 2)

    monkeypatch.setattr(layouts, "_copier", lambda device: copy)
    monkeypatch.setattr(operator, "_launcher", launcher)
    monkeypatch.setattr(operator, "_memory", Memory())
    monkeypatch.setattr(operator, "capability_of", lambda kind, device: (9, 0))
    monkeypatch.setattr(operator, "_known", {})
    monkeypatch.setattr(operator, "_device", lambda device: ("NVIDIA H200", 132))
    asked = registry.preferring(registry.shipped_gemm(), "gemm_hopper")
    monkeypatch.setattr(registry, "shipped_gemm", lambda: asked)
    return ran


def tensors(m: int = 48, n: int = 40, k: int = 24, kind=BF16, wide=None):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    return torch.randn(m, n).to(wide or kind), torch.randn(m, k).to(kind), torch.randn(k, n).to(kind)


def near(got, c, a, b, beta=1.0, alpha=1.0):  # type: ignore[no-untyped-def]
    want = beta * c.double() + alpha * (a.double() @ b.double())
    return bool(((got.double() - want).abs() <= 2.0**-8 * want.abs() + 1e-6).all())


def test_a_call_met_before_starts_at_once(launched) -> None:  # type: ignore[no-untyped-def]
    STARTED.clear()
    c, a, b = tensors()
    for beta, alpha in ((1.0, 1.0), (0.5, 2), (0, 1.0)):
        for scale in (1, 3):
            got = tilecast.addmm(c, a * scale, b, beta=beta, alpha=alpha)
            assert near(got, c, a * scale, b, beta, alpha)
    row = c[0]
    for scale in (1, 3):
        assert near(tilecast.addmm(row * scale, a, b), (row * scale).expand(c.shape), a, b)
    assert len(launched) == 8 and len(STARTED) == 4
    with pytest.raises(ValueError, match="alpha: expected a finite number, got True"):
        tilecast.addmm(c, a, b, alpha=True)
    # A gradient and an onlooker go through the dispatcher.
    launched.clear()
    tilecast.addmm(c, a.clone().requires_grad_(), b).sum().backward()
    assert len(launched) == 1 and len(STARTED) == 4


def test_a_call_into_a_tensor_met_before_starts_at_once_and_says_that_it_has_written(launched) -> None:  # type: ignore[no-untyped-def]
    """In place, beside C, and by columns; who has kept the tensor for a backward pass is told."""
    STARTED.clear()
    c, a, b = tensors()
    for ways, out in enumerate((torch.empty_like(c), torch.empty(40, 48, dtype=BF16).t()), start=1):
        for scale in (1, 3):
            version = out._version
            assert tilecast.addmm(c, a * scale, b, out=out) is out and near(out, c, a * scale, b)
            # The stand-in for a launch counts once.
            assert out._version == version + 2 and len(STARTED) == ways
    held = torch.ones(48, 40, dtype=BF16, requires_grad=True)
    loss = (held * c).sum()
    for scale in (1, -2):
        before = c.clone()
        assert tilecast.addmm(c, a * scale, b, beta=0.5, out=c) is c and near(c, before, a * scale, b, 0.5)
    assert len(STARTED) == 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    # A row for C is another call than the C that is written over.
    assert near(tilecast.addmm(c[0], a, b, out=torch.empty_like(c)), c[0].expand(c.shape), a, b)
    assert len(STARTED) == 4
    with torch.inference_mode():
        place = torch.empty_like(c)
        assert tilecast.addmm(c, a, b, out=place) is place and near(place, c, a, b)


# -- which kernel ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "wide", "module"),
    [
        (64, BF16, "gemm_hopper_short"), (320, BF16, "gemm_hopper_turns"), (4096, BF16, "gemm_hopper_long"),
        (320, FP32, "gemm_hopper_c32"), (4096, FP32, "gemm_hopper_c32_long"),
    ],
)  # fmt: skip
def test_k_and_the_width_of_c_choose(launched, monkeypatch, k, wide, module) -> None:  # type: ignore[no-untyped-def]
    # So many tiles that a k in parts ends no earlier, and those kept for few make more than two waves or multiply more; of 128 rows and columns as
    # many as multiply least.
    monkeypatch.setattr(operator, "_device", lambda device: ("NVIDIA H200", 1))
    c, a, b = tensors(48, 896, k, wide=wide)
    out = tilecast.addmm(c, a, b, beta=0.5, alpha=2.0)
    assert launched == [module]
    assert out.dtype == wide and near(out, c, a, b, 0.5, 2.0)


@pytest.mark.parametrize(
    ("m", "n", "k", "module"),
    [
        # 32 waves of 128 x 128 against 21 of 192 x 128; 8 against 6; where both take about as long it is the first.
        (8192, 8192, 2048, "gemm_hopper_tall"), (4096, 4096, 2048, "gemm_hopper_long"), (8192, 8192, 1024, "gemm_hopper_long"),
        (8192, 8192, 512, "gemm_hopper_turns"), (8192, 8192, 256, "gemm_hopper_short"),
    ],
)  # fmt: skip
def test_waves_of_tiles_choose_where_k_leaves_several(m, n, k, module) -> None:  # type: ignore[no-untyped-def]
    assert chosen(m, n, k) == (module, 1, (False, False))


def chosen(m, n, k, starts=(128, 128), c_bytes=2, copied=(128, 128)):  # type: ignore[no-untyped-def]
    """(kernel, parts of k, whether A and B are copied) of a product on an H200 whose A and B start so, or cannot be read where that is 0."""
    entries, sums = registry.together((9, 0), c_bytes, k, gpu="NVIDIA H200"), registry.sharing((9, 0), registry.PARTS)
    found = choose(tiles_of(entries), *tiles_of([sums]), m, n, k, tuple(zip(starts, copied, strict=True)), c_bytes, 132)
    return (entries[found.kernel] if found.kernel >= 0 else sums).module, found.parts, found.copies


@pytest.mark.parametrize("asked", ["gemm_hopper", "gemm_triton"])
def test_tensors_may_lie_anyhow(launched, monkeypatch, asked) -> None:  # type: ignore[no-untyped-def]
    entries = registry.preferring(registry.shipped_gemm(), asked)
    monkeypatch.setattr(registry, "shipped_gemm", lambda: entries)
    c, a, b = tensors()
    bias, odd = torch.randn(40).to(BF16), torch.randn(48, 41).to(BF16)[:, 1:]
    for arguments in (
        (c, a, b), (c, a, b.t().contiguous().t()), (c, a.t().contiguous().t(), b), (c, a[:, ::2], b[::2]), (c[:, :39], a, b[:, :39].contiguous()),
        (bias, a, b), (bias, a[:, :23], b[:23].t().contiguous().t()), (bias[:39], a, b[:, :39]), (c.t().contiguous().t(), a, b), (odd, a, b),
        (torch.ones((), dtype=BF16), a, b), (bias, a[:39], b), (c[:, :1], a, b), (c, a[:1].expand(48, -1), b), (bias.float(), a, b),
    ):  # fmt: skip
        for beta in (1.0, 0.5, 0.0):
            for _ in range(2):
                launched.clear()
                assert near(tilecast.addmm(*arguments, beta=beta), *arguments, beta)
                assert len(launched) == 1 and launched[0].startswith(asked)
    # Into tensors that it cannot write, one of them C itself.
    for place in (odd.clone(), torch.empty(48, 41, dtype=BF16)[:, 1:], torch.empty(48, 80, dtype=BF16)[:, ::2]):
        before = place.copy_(odd).clone()
        for given in (place, c, bias):
            assert tilecast.addmm(given, a, b, out=place) is place
            assert near(place, before if given is place else given, a, b)
            place.copy_(before)


@pytest.mark.parametrize(
    ("m", "n", "k", "module"),
    [
        # One launch of a short k, whichever side is the short one; a k that SMs share; a D at odd steps by the kernels of others.
        (3, 40, 24, "gemm_triton_few"), (48, 3, 24, "gemm_triton_few"), (32, 48, 24, "gemm_triton_few"), (1, 96, 2048, "gemm_triton_one"),
        (96, 1, 2048, "gemm_triton_one_column"), (1, 40, 24, "gemm_triton_one"), (48, 40, 4096, "gemm_hopper_parts"), (33, 33, 24, "gemm_hopper_joined_64x64"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("lies", ["rows", "columns", "apart"])
def test_few_rows_and_few_tiles_have_kernels_of_their_own(launched, m, n, k, module, lies) -> None:  # type: ignore[no-untyped-def]
    c, a, b = tensors(m, n, k)
    # What multiplies one row goes by how the matrix lies: turned over, A by rows is one by columns.
    if module == "gemm_triton_one" and lies == "columns":
        module = "gemm_triton_one_column"
    for beta, given in ((1.0, c), (0.5, c[0]), (0.0, c)):
        if lies == "columns":
            given, a, b = given.t().contiguous().t() if given.dim() == 2 else given, a, b.t().contiguous().t()
        elif lies == "apart":
            given, a, b = (x.repeat_interleave(2, -1)[..., ::2] for x in (given, a, b))
        launched.clear()
        assert near(tilecast.addmm(given, a, b, beta=beta, alpha=2.0), given, a, b, beta, 2.0)
        assert launched[0].split()[0] == module and len(launched) == 1 and (" in " in launched[0]) == (k > 24)
    launched.clear()
    out = c.clone()
    assert tilecast.addmm(out, a, b, out=out) is out and near(out, c, a, b) and launched[0].startswith(module)


@pytest.mark.parametrize("use", [*registry.PACES])
def test_k_is_parted_where_tiles_leave_sms_idle_and_not_where_they_fill_them(use) -> None:  # type: ignore[no-untyped-def]
    pace, entry = registry.PACES[use], registry.sharing((9, 0), use)
    rows, columns = entry.tile

    def parts(tiles: int, k: int) -> int:
        return registry.parts_of(pace, entry.tile, rows, columns * tiles, k, 132)

    long = 128 * pace.tile_k
    assert parts(2, long) > 8 and 1 < parts(40, long) <= 132 * pace.programs / 40
    for k in (64, 1024, 8192, 1 << 20):
        # One part where a launch has a whole number of waves of tiles already, and no part without a k-step.
        assert all(parts(132 * pace.programs * waves, k) == 1 for waves in (1, 2, 7))
        assert parts(1, k) <= min(registry.MOST_PARTS, -(-k // pace.tile_k))
    # A k too short for another launch stays whole.
    assert parts(1, int(1 / pace.step_us) * pace.tile_k) == 1


def test_one_launch_copies_what_the_copy_engine_cannot_read_and_keeps_the_order_of_rows_and_columns(launched) -> None:  # type: ignore[no-untyped-def]
    """A weight by columns is read again by columns: turned over in a copy, it took ten times as long."""
    a, b = torch.randn(24, 37).to(BF16), torch.randn(40, 37).to(BF16).t()
    for given, lies, copies in (
        ((a, b), ((40, 1), (1, 40)), [2]), ((a[:, 1:], b[1:]), ((40, 1), (1, 40)), [2]), ((a[:, :32].contiguous(), b[:32]), ((32, 1), (1, 32)), [1]),
        ((torch.randn(24, 80).to(FP16)[:, ::2], torch.randn(40, 24).to(FP16)), ((40, 1), (24, 1)), [1]),
    ):  # fmt: skip
        COPIED.clear()
        unread = tuple(not layouts.starts(x)[0] for x in given)
        made = layouts.copied(given, unread, tuple(0 < x.stride(0) < x.stride(1) for x in given), 0)
        assert all(torch.equal(x, y) for x, y in zip(made, given, strict=True))
        assert tuple(x.stride() for x in made) == lies and copies == COPIED
    # C and D lie as they do.
    COPIED.clear()
    c, a, b = tensors()
    for given in (c[0], c[:, :1], torch.randn(48, 41).to(BF16)[:, 1:]):
        assert near(tilecast.addmm(given, a, b, out=torch.empty(48, 41, dtype=BF16)[:, 1:]), given, a, b)
    assert COPIED == []


def test_how_a_product_runs_goes_by_tiles_waves_and_where_rows_start() -> None:
    """By the times of the kernels: most of these are rows of h100_gemm_choice.csv, where what runs now is faster than what ran before."""
    # Parts of k of few tiles, and of so many that a whole k has a wave of them, none; tiles of half the size where they are one wave.
    assert chosen(512, 512, 8192) == ("gemm_hopper_parts", 8, (False, False))
    assert chosen(1024, 1792, 8192)[:2] == ("gemm_hopper_long", 1)
    # Few tiles: of all shapes those that fill the SMs most evenly, of one wave and of two.
    for size, name in (
        ((384, 640, 1408), "64x64"), ((345, 1536, 2304), "64x128"), ((512, 2816, 4736), "64x192"), ((832, 2304, 1024), "128x128"),
        ((216, 10736, 5248), "128x192"), ((3328, 1152, 4944), "256x128"),
    ):  # fmt: skip
        assert chosen(*size) == (f"gemm_hopper_joined_{name}", 1, (False, False))
    assert chosen(720, 6904, 7872, (32, 16), 4)[0] == "gemm_hopper_c32_joined_128x320"
    for k in (64, 1024, 8192):
        assert all(chosen(128, 128 * 132 * waves, k)[1] == 1 for waves in (1, 2, 7))
    # Rows at odd multiples of 16 and 32 bytes: tiles that copy fewer of them for what they multiply, the more columns the more B is.
    assert chosen(1512, 2816, 6825, (16, 128))[0] == "gemm_hopper_wide"
    assert chosen(3048, 5248, 560, (32, 32))[0] == "gemm_hopper_tall"
    assert chosen(2880, 1168, 3355, (128, 32), 4)[0] == "gemm_hopper_c32_wide"
    # A copy of one, of both, of none: it takes longer than what it saves of a short product, of a matrix that few multiply, of one that lies well.
    assert chosen(12376, 1000, 7080, (16, 16))[2] == (False, True) and chosen(8192, 8192, 4104, (16, 16))[2] == (
        True,
        True,
    )
    assert chosen(512, 512, 520, (16, 16))[2] == (False, False) == chosen(512, 512, 520, (16, 16), copied=(16, 16))[2]
    # What cannot be read has to be copied.
    assert chosen(512, 512, 521, (0, 128))[2] == (True, False) and chosen(64, 64, 17, (0, 0), copied=(16, 16))[2] == (
        True,
        True,
    )
    # A launch that makes D of sums may be asked for, whatever k and m and n are.
    sums = tiles_of([registry.sharing((9, 0), registry.PARTS)])
    for m, n, k in ((100, 100, 16), (4096, 1000, 64), (100, 100, 8192)):
        found = choose((), *sums, m, n, k, ((128, 128), (128, 128)), 2, 132, True)
        assert found.kernel == -1 and (found.parts > 1) == (k == 8192) and not found.early


def test_rows_of_copies_start_at_whole_lines(launched) -> None:  # type: ignore[no-untyped-def]
    """As long rows do, by rows or columns as they lie, and short ones do not."""
    by_16, by_32 = (torch.randn(100, n).to(BF16) for n in (264, 272))
    for x, starts in (
        (by_16, (16, 128)), (by_16.t(), (16, 128)), (by_32, (32, 128)), (torch.randn(100, 288).to(BF16), (64, 128)), (torch.randn(100, 320).to(BF16), (128, 128)),
        (torch.randn(100, 261).to(BF16), (0, 128)), (torch.randn(100, 21).to(BF16), (0, 16)), (torch.randn(100, 528).to(BF16)[:, ::2], (0, 128)),
        (torch.randn(100, 272).to(BF16)[:, 1:], (0, 128)), (torch.randn(1, 264).to(BF16).expand(100, -1), (0, 128)),
    ):  # fmt: skip
        assert layouts.starts(x) == starts
        turned = 0 < x.stride(0) < x.stride(1)
        made, other = layouts.copied((x, by_32), (True, False), (turned, False), 0)
        assert torch.equal(made, x) and other is by_32 and layouts.starts(made)[0] == starts[1]
        assert (made.stride(0) < made.stride(1)) == turned


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 96, 2048), (96, 1, 40), (3, 40, 2048), (48, 3, 24), (48, 40, 4096), (48, 41, 24)]
)
def test_few_rows_and_parts_start_at_once_when_they_are_met_again(launched, monkeypatch, m, n, k) -> None:  # type: ignore[no-untyped-def]
    c, a, b = tensors(m, n, k)
    calls = [(c, a, b), (c[0], a, b), (c[:, :1], a, b)]
    for beta in (1.0, 0.5, 0.0):
        for given in calls:
            assert near(tilecast.addmm(*given, beta=beta, alpha=2.0), *given, beta, 2.0)
    before = list(launched)
    launched.clear()
    with monkeypatch.context() as patch:
        # What takes the host's time is not asked again, but for B at odd steps, of which there is a copy.
        if n != 41:
            patch.setattr(operator, "_compute", None)
        for x in (c, a, b):
            x.mul_(-1.5)
        for beta in (1.0, 0.5, 0.0):
            for given in calls:
                assert near(tilecast.addmm(*given, beta=beta, alpha=2.0), *given, beta, 2.0)
    assert launched == before


@pytest.mark.parametrize(
    ("m", "n", "k", "wide", "module"),
    [
        # 96 tiles of 64 x 128; 160 of 128 x 64, whose warpgroups take turns; 112 of 128 x 192, 128 of 64 x 192; a k so long that parts of it end earlier.
        (2048, 384, 256, BF16, "gemm_hopper_joined_64x128"), (2048, 640, 40, FP32, "gemm_hopper_c32_small"), (2048, 1280, 256, BF16, "gemm_hopper_joined_128x192"),
        (2048, 640, 704, BF16, "gemm_hopper_joined_64x192"), (2048, 384, 704, BF16, "gemm_hopper_joined_64x128"),
        (256, 384, 4096, BF16, "gemm_hopper_parts"),
    ],
)  # fmt: skip
def test_small_tiles_run_where_they_make_one_wave(launched, m, n, k, wide, module) -> None:  # type: ignore[no-untyped-def]
    c, a, b = tensors(m, n, k, wide=wide)
    assert near(tilecast.addmm(c[0], a, b), c[0].expand(c.shape), a, b)
    assert launched[0].split()[0] == module


def test_few_rows_are_loaded_in_vectors_of_what_is_large(launched, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Copies along k of what would be loaded element by element, none of what would not and of small matrices."""
    monkeypatch.setattr(layouts, "_MOST_SINGLE", 24 * 40)

    def lying(rows: int, columns: int, gap: int = 0):  # type: ignore[no-untyped-def]
        return torch.randn(rows, columns + gap).to(BF16)[:, :columns]

    for a, b, copies in (
        (lying(3, 24), lying(24, 48), []), (lying(3, 24), lying(24, 48, 24), []), (lying(3, 24), lying(24, 41), [1]), (lying(3, 24), lying(24, 41, 7), [1]),
        (lying(24, 3).t(), lying(41, 24, 1).t(), [2]), (lying(3, 24), lying(41, 24).t(), []), (lying(3, 23), lying(23, 41), []),
    ):  # fmt: skip
        COPIED.clear()
        made = layouts.in_vectors(a, b, 0)
        assert all(torch.equal(x, y) for x, y in zip(made, (a, b), strict=True)) and copies == COPIED
        if copies:
            assert made[1].stride() == (1, 24)
        COPIED.clear()
        c = torch.randn(3, b.shape[1]).to(BF16)
        assert near(tilecast.addmm(c, a, b), c, a, b) and copies == COPIED


def test_a_result_by_columns_is_the_transposed_product_by_the_kernels_of_others(launched) -> None:  # type: ignore[no-untyped-def]
    c, a, b = tensors()
    by_columns = c.t().contiguous().t()
    for beta, given, out, module in (
        (1.0, by_columns, by_columns.clone(), "gemm_hopper_joined_64x64"), (0.5, by_columns, None, "gemm_hopper_joined_64x64"),
        (0.0, c, by_columns.clone(), "gemm_hopper_joined_64x64"), (1.0, c, by_columns.clone(), "gemm_hopper_joined_64x64"),
    ):  # fmt: skip
        launched.clear()
        place = given.clone() if out is None else out
        assert place.stride() == (1, 48)
        got = tilecast.addmm(place if out is None else given, a, b, beta=beta, out=place)
        assert got is place and near(got, given, a, b, beta) and launched == [module]


def test_a_launch_makes_d_of_sums_where_c_and_d_lie_anyhow_and_it_pays(launched, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Beside a whole C by rows, of a long k or in 16 bits in place, of neither few elements nor more than their sums may take."""
    monkeypatch.setattr(operator, "_LEAST_SUMS", 48 * 41)
    monkeypatch.setattr(operator, "_MOST_SUMS", 96 * 41)

    def odd(m: int, wide: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(m, 43).to(wide)[:, 1:42]

    by_columns, even = torch.randn(41, 96).to(BF16).t(), torch.randn(96, 48).to(BF16)[:, :41]
    for m, k, c, out, sums in (
        (96, 256, odd(96), odd(96), True), (96, 24, odd(96), odd(96), False), (96, 24, odd(96), None, True), (96, 24, odd(96, FP32), None, False),
        (48, 256, odd(48), odd(48), False), (144, 256, odd(144), odd(144), False), (96, 256, odd(1)[0], odd(96), False),
        (96, 256, odd(96)[:, :1], odd(96), False), (96, 256, by_columns, odd(96), False), (96, 256, odd(96), even, False),
    ):  # fmt: skip
        launched.clear()
        a, b = torch.randn(m, k).to(BF16), torch.randn(41, k).to(BF16).t()
        before = c.clone()
        assert near(tilecast.addmm(c, a, b, out=c if out is None else out), before.expand(m, 41), a, b)
        assert (launched[0].split()[0] == "gemm_hopper_parts") == sums
    launched.clear()
    assert near(tilecast.addmm(c, a, b, beta=0.0, out=odd(96)), c, a, b, 0.0) and "parts" not in launched[0]


def test_a_c_by_columns_is_added_by_the_launch_that_multiplies(launched, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """A launch that adds up parts of k reads rows: it has C by columns of few elements alone."""
    monkeypatch.setattr(operator, "_MOST_MERGED", 256 * 384)
    for m, by_columns, parts in ((256, False, True), (256, True, True), (257, False, True), (257, True, False)):
        c, a, b = tensors(m, 384, 4096)
        given = c.t().contiguous().t() if by_columns else c
        launched.clear()
        assert near(tilecast.addmm(given, a, b, out=torch.empty_like(c)), given, a, b)
        assert (launched[0].split()[0] == "gemm_hopper_parts") == parts


def test_small_programs_begin_early_where_they_do_not_crowd(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    from types import SimpleNamespace

    from tilecast.kernels.gemm import launching

    monkeypatch.setattr(
        launching.torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132)
    )
    device = torch.device("cuda", 0)
    assert [launching._crowds(programs, device) for programs in (1, 264, 265, 1583, 1584)] == [
        False,
        False,
        True,
        True,
        False,
    ]


def test_gpus_other_than_hopper_take_the_portable_kernel_until_others_are_measured_or_asked_for() -> None:
    for capability in ((10, 0), (8, 0), (12, 0)):
        found = registry.candidates(capability, 2, 512)
        assert found[0].module == "gemm_triton"
    preferred = registry.preferring(registry.shipped_gemm(), "gemm_blackwell")
    assert [e.module for e in registry.together((10, 0), 2, 512, preferred)] == ["gemm_blackwell"]
    # Those kept for few tiles are for every Hopper GPU.
    tiles = [
        f"gemm_hopper_joined_{tile}"
        for tile in ("64x64", "64x128", "64x192", "128x128", "128x192", "256x128", "128x320", "256x192")
    ]
    found = [e.module for e in registry.together((9, 0), 2, 2048, gpu="NVIDIA H100 80GB HBM3")]
    assert found == ["gemm_hopper_small", *tiles, "gemm_hopper_rows4"]
    assert {e.c_bytes for e in registry.together((9, 0), 2, 512)} == {2} and {
        e.c_bytes for e in registry.together((9, 0), 4, 512)
    } == {4}
    assert [e.module for e in registry.together((8, 0), 2, 512)] == ["gemm_triton"]
    assert [e.module for e in registry.candidates((10, 0), 2, 512, preferred)] == ["gemm_blackwell", "gemm_blackwell_c32", "gemm_triton"]  # fmt: skip
    assert [e.module for e in registry.candidates((9, 0), 2, 512)] == ["gemm_hopper_turns", "gemm_hopper_tall", "gemm_hopper_wide", "gemm_hopper_broad", "gemm_hopper_c32_long", "gemm_hopper_c32_tall", "gemm_hopper_c32", "gemm_hopper_c32_wide", "gemm_hopper_c32_broad", "gemm_triton"]  # fmt: skip
    preferred = registry.preferring(registry.shipped_gemm(), "gemm_triton")
    assert [e.module for e in registry.candidates((9, 0), 2, 512, preferred)] == ["gemm_triton"]
    with pytest.raises(RegistryError, match="TILECAST_GEMM_FAMILY: expected gemm_blackwell, gemm_hopper"):
        registry.preferring(registry.shipped_gemm(), "fa3")
    assert registry.candidates((7, 5), 2, 512) == ()


# -- programs that wait for each other ---------------------------------------------------------------------------------


def test_all_launches_of_a_device_share_counters_and_a_capture_makes_none_that_lasts(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    from types import SimpleNamespace

    from tilecast.kernels.gemm import launching

    at, made = {"capturing": True}, []
    monkeypatch.setattr(launching, "_met", {})
    monkeypatch.setattr(launching, "capturing", lambda: at["capturing"])
    monkeypatch.setattr(
        launching, "lasting_zeros", lambda count, kind, device: made.append((count, kind, device.index)) or len(made)
    )
    monkeypatch.setattr(launching.torch, "zeros", lambda *size, dtype, device: ("the graph's", device.index))
    first, second = (SimpleNamespace(type="cuda", index=i) for i in (0, 1))
    assert launching.meeting_counters(first) == ("the graph's", 0)
    at["capturing"] = False
    assert [launching.meeting_counters(d) for d in (first, first, second)] == [1, 1, 2]
    at["capturing"] = True
    assert launching.meeting_counters(first) == 1
    assert made == [(32, torch.int32, 0), (32, torch.int32, 1)]


# -- calls -------------------------------------------------------------------------------------------------------------


def test_out_and_in_place(launched) -> None:  # type: ignore[no-untyped-def]
    c, a, b = tensors(wide=FP32)
    out = torch.empty_like(c)
    assert tilecast.addmm(c, a, b, out=out) is out and near(out, c, a, b)
    before = c.clone()
    assert tilecast.addmm(c, a, b, alpha=-1.0, out=c) is c and near(c, before, a, b, alpha=-1.0)


def test_empty_products(launched) -> None:  # type: ignore[no-untyped-def]
    c, a, b = tensors()
    assert tilecast.addmm(c[:0], a[:0], b).shape == (0, 40)
    nothing = tilecast.addmm(c, a[:, :0], b[:0], beta=3.0)
    assert torch.equal(nothing, c * 3.0)
    assert not tilecast.addmm(torch.full_like(c, float("nan")), a[:, :0], b[:0], beta=0.0).any()
    assert launched == []


@pytest.mark.parametrize("broadcast", [False, True])
def test_gradients_are_those_of_pytorch(launched, broadcast) -> None:  # type: ignore[no-untyped-def]
    c, a, b = tensors(kind=FP16)
    c = torch.randn(40).to(FP16) if broadcast else c
    mine = [x.clone().requires_grad_() for x in (c, a, b)]
    theirs = [x.double().requires_grad_() for x in (c, a, b)]
    weight = torch.randn(48, 40)
    (tilecast.addmm(*mine, beta=0.5, alpha=2.0) * weight).sum().backward()
    (torch.addmm(*theirs, beta=0.5, alpha=2.0) * weight).sum().backward()
    for x, y in zip(mine, theirs, strict=True):
        assert torch.allclose(x.grad.double(), y.grad, rtol=4e-3, atol=2e-2)


def test_the_operators_pass_opcheck_and_compile(launched) -> None:  # type: ignore[no-untyped-def]
    c, a, b = tensors(kind=FP16)
    ops = torch.ops.tilecast
    torch.library.opcheck(ops.addmm.default, (c.clone().requires_grad_(), a, b, 1.0, 1.0))
    torch.library.opcheck(ops.addmm_.default, (c.clone(), a, b, 1.0, 1.0))
    torch.library.opcheck(ops.addmm_out.default, (c, a, b, 1.0, 1.0, torch.empty_like(c)))
    compiled = torch.compile(
        lambda c, a, b: tilecast.addmm(c, a, b, alpha=2.0) + 1, backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(c, a, b), tilecast.addmm(c, a, b, alpha=2.0) + 1)
    into = torch.compile(lambda c, a, b: tilecast.addmm(c, a, b, out=c), backend="aot_eager", fullgraph=True)
    kept = c.clone()
    into(kept, a, b)
    assert torch.equal(kept, tilecast.addmm(c, a, b))


def test_flops_are_counted(launched) -> None:  # type: ignore[no-untyped-def]
    from torch.utils.flop_counter import FlopCounterMode

    c, a, b = tensors()
    with FlopCounterMode(display=False) as counter:
        tilecast.addmm(c, a, b)
    assert counter.get_total_flops() == 2 * 48 * 40 * 24


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c, a, b: ((c, a, 3), {}), "b: expected a torch tensor, got int"),
        (lambda c, a, b: ((c, a[None], b), {}), "a: expected 2 dimensions, got 3"),
        (lambda c, a, b: ((c, a, b[:8]), {}), "b: expected 24 rows as a has columns, got 8"),
        (lambda c, a, b: ((c, a, b.half()), {}), "b: expected dtype torch.bfloat16"),
        (lambda c, a, b: ((c[:7], a, b), {}), r"c: expected what expands to \(48, 40\)"),
        (lambda c, a, b: ((c, a.float(), b.float()), {}), "cast them, or use torch.addmm"),
        (lambda c, a, b: ((c.double(), a, b), {}), "c: expected dtype"),
        (lambda c, a, b: ((c, a, b), {"beta": True}), "beta: expected a finite number, got True"),
        (lambda c, a, b: ((c, a, b), {"alpha": float("nan")}), "alpha: expected a finite number"),
        (lambda c, a, b: ((c, a, b), {"out": c.float()}), "out: expected torch.bfloat16"),
        (lambda c, a, b: ((c, a, b), {"out": c[:1].expand(48, 40)}), "out: expected a tensor whose elements lie apart"),
        (lambda c, a, b: ((c, a.requires_grad_(), b), {"out": c}), "leave out= away"),
    ],
)
def test_mistakes_are_one_sentence(launched, change, words) -> None:  # type: ignore[no-untyped-def]
    arguments, options = change(*tensors())
    with pytest.raises(tilecast.AttentionError, match=words) as error:
        tilecast.addmm(*arguments, **options)
    assert "\n" not in str(error.value) and launched == []


def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(tilecast.UnsupportedError, match="expected tensors on an NVIDIA GPU, got device 'cpu'"):
        tilecast.addmm(*tensors())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stages": 3}, "unknown field 'stages'"),
        ({"preference": -1}, "'preference': expected a whole number"),
        ({"capability": [9, 0]}, "field 'capability'"),
        ({"module": None}, "field 'module' is missing"),
    ],
)
def test_an_index_that_breaks_the_schema_is_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    row = json.loads(registry.GEMM_INDEX.read_text(encoding="utf-8"))[0] | change
    file = tmp_path / "gemm.json"
    file.write_text(json.dumps([{key: value for key, value in row.items() if value is not None}]))
    with pytest.raises(RegistryError, match=words):
        registry.read_gemm_index(file)


@pytest.mark.parametrize("two", [False, True])
def test_a_launcher_remembers_shapes_and_no_tensor(two: bool) -> None:
    """``two``: B has another map, of the columns of a tile's second product."""
    from types import SimpleNamespace

    from tilecast.kernels.gemm.launching import gemm_launcher

    calls, planned = [], []

    class Kernel:
        def warmup(self, *arguments, **options):  # type: ignore[no-untyped-def]
            return None

        def __getitem__(self, grid):  # type: ignore[no-untyped-def]
            return lambda *arguments: calls.append((grid, arguments))

    class Box:
        def __init__(self, base: object) -> None:
            self.base, self.block_shape = base, [64, 64]

    def plan(a, b, c, d, alpha, beta):  # type: ignore[no-untyped-def]
        planned.append(a)
        adds = c is not None and beta != 0
        boxes = [Box(x) for x in (a, b, c if adds else d, d, *([b] if two else []))]
        return (7, 1, 1), (*boxes, 1, 2, 3, alpha, beta, True, False, adds, alpha != 1 or beta not in (0, 1))

    launch = gemm_launcher(SimpleNamespace(plan=plan, multiply=Kernel(), OPTIONS={}))
    first, second = tensors(), tensors()
    for (c, a, b), alpha in ((first, 2.0), (second, 3.0)):
        launch(a, b, c, c, alpha, 1.0)
    assert len(planned) == 1
    (_, one), (grid, again) = calls
    assert grid == (7, 1, 1)
    assert [box.base for box in one[:4]] == [first[1], first[2], first[0], first[0]]
    assert [box.base for box in again[:4]] == [second[1], second[2], second[0], second[0]]
    assert [box.base for box in again[4 : 4 + two]] == [second[2]] * two
    assert again[4 + two :] == (1, 2, 3, 3.0, 1.0, True, False, True, True)
    launch(a, b, None, c, 1.0, 0.0)
    assert len(planned) == 2 and calls[-1][1][4 + two :] == (1, 2, 3, 1.0, 0.0, True, False, False, False)
