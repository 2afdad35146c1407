"""Few queries over many keys go to the serving kernels, short sequences to their own: which, with what, and when not."""

from __future__ import annotations

import pytest

from tilecast.kernels import registry
from tilecast.kernels.errors import UnsupportedError


@pytest.fixture
def served(op, torch, monkeypatch):
    """The operator with a stand-in behind the serving kernels; ``served`` lists their arguments."""
    from tilecast.kernels.fallback import sdpa_attention
    from tilecast.kernels.serving import few_rows, operator

    calls = []

    def into(q, k, v, out, lse, lists, scale, softcap, seqlen_q, seqlen_k, window):
        if q.dtype == torch.float16:
            raise UnsupportedError("dtype")
        calls.append((tuple(q.shape), lists, softcap, seqlen_q, seqlen_k, window))
        values, sums = sdpa_attention(*(x.transpose(1, 2) for x in (q, k, v)), scale, *window, True)
        out.copy_(values.transpose(1, 2))
        if lse is not None:
            lse.copy_(sums)

    monkeypatch.setattr(operator, "into", into)
    monkeypatch.setattr(operator, "launches", lambda *_: [])
    few_rows._without.clear()
    few_rows._wanted.cache_clear()
    op.served = calls
    yield op
    del op.served
    few_rows._without.clear()
    few_rows._wanted.cache_clear()


def problem(torch, rows, keys, heads=(4, 2)):
    source = torch.Generator().manual_seed(0)
    shapes = ((2, heads[0], rows, 64), (2, heads[1], keys, 64), (2, heads[1], keys, 64))
    return [torch.randn(shape, generator=source).bfloat16() for shape in shapes]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    ("rows", "mask", "window"),
    [(1, {}, (-1, -1)), (1, {"causal": True}, (-1, -1)), (16, {"causal": True}, (-1, 0)), (3, {"window": (200, 0)}, (200, 0))],
)  # fmt: skip
def test_few_queries_are_served(served, torch, rows, mask, window, layout) -> None:
    q, k, v = problem(torch, rows, 513)
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    out, lse = served.attention(q, k, v, **mask, return_lse=True, layout=layout)
    assert not served.launched
    assert served.served == [((2, rows, 4, 64), (None,) * 8, 0.0, rows, 513, window)]
    want, sums = served.attention(
        q.double(), k.double(), v.double(), **mask, return_lse=True, layout=layout, fallback="sdpa"
    )
    torch.testing.assert_close(out.double(), want, atol=0.01, rtol=0.01)
    torch.testing.assert_close(lse.double(), sums.double(), atol=1e-3, rtol=1e-3)
    # The output follows the query in memory, as with the other kernels.
    assert out.stride() == q.stride()


@pytest.mark.parametrize(
    ("rows", "keys", "heads"), [(17, 600, (4, 2)), (1, 511, (4, 2)), (16, 600, (18, 2)), (16, 16, (4, 2))]
)
def test_others_are_not(served, torch, rows, keys, heads) -> None:
    served.attention(*problem(torch, rows, keys, heads))
    assert not served.served and len(served.launched) == 1


def test_more_queries_are_served_where_a_kernel_parts_their_keys(served, torch, monkeypatch) -> None:
    from tilecast.kernels.serving import operator

    asked = []
    monkeypatch.setattr(operator, "parted", lambda q, k, v, left: asked.append(left) or q.shape[1] == 20)
    monkeypatch.setattr(operator, "tiles", lambda q, k, v: (q.shape[1] * q.shape[2], 1))
    for rows, keys in ((20, 2048), (24, 2048), (20, 2047)):
        served.attention(*problem(torch, rows, keys), window=(1500, 0))
    assert [call[3] for call in served.served] == [20]
    assert asked == [1500, 1500] and len(served.launched) == 2


def test_short_sequences_are_served_where_heads_of_a_group_fill_tiles(served, torch, monkeypatch) -> None:
    from tilecast.kernels.serving import operator

    monkeypatch.setattr(
        operator, "tiles", lambda q, k, v: (-(-q.shape[1] * q.shape[2] // k.shape[2] // 128) * k.shape[2], 128)
    )
    for rows, keys, heads in (
        (22, 77, (32, 2)),  # 32 tiles of 22 rows, or 6 of 117
        (165, 77, (32, 2)),  # 64 tiles, or 42
        (100, 77, (32, 2)),  # 32 tiles, or 26
        (22, 22, (2, 2)),  # no head shares another's keys
        (256, 77, (32, 2)),
    ):
        served.attention(*problem(torch, rows, keys, heads), causal=True)
    assert [call[3] for call in served.served] == [22, 165] and len(served.launched) == 3


def test_short_sequences_of_one_block_of_keys_have_tiles_of_their_own_while_sms_last(
    served, torch, monkeypatch
) -> None:
    from tilecast.kernels.serving import operator

    monkeypatch.setattr(
        operator, "tiles", lambda q, k, v: (-(-q.shape[1] * q.shape[2] // k.shape[2] // 128) * k.shape[2], 128)
    )
    for batch, keys in ((2, 64), (2, 65), (16, 64), (17, 64)):  # of 32 heads
        q, k, v = (torch.zeros(batch, heads, n, 64).bfloat16() for heads, n in ((32, 22), (2, keys), (2, keys)))
        served.attention(q, k, v)
    assert [(call[0][0], call[4]) for call in served.served] == [(2, 65), (17, 64)]
    assert len(served.launched) == 2


@pytest.fixture
def short(served, monkeypatch):
    """`served` on a Hopper GPU, where kernels of short sequences are; ``served.short`` lists (module, left, right) of their launches."""
    from tilecast.kernels.fallback import sdpa_attention
    from tilecast.kernels.serving import few_rows

    others, calls = registry.launcher, []

    def launcher(entry):
        if entry.direction != "short":
            return others(entry)

        def launch(q, k, v, out, lse, scale, left, right):
            calls.append((entry.module, left, right))
            values, sums = sdpa_attention(q, k, v, scale, left, right, True)
            out.copy_(values)
            if lse is not None:
                lse.copy_(sums)

        launch.started = lambda q, k, v, out, lse, scale, left, right: (
            lambda q, k, v, out, lse: launch(q, k, v, out, lse, scale, left, right)
        )
        return launch

    monkeypatch.setattr(registry, "launcher", launcher)
    monkeypatch.setattr(few_rows, "capability_of", lambda *_: (9, 0))
    few_rows._short_kernels.clear()
    served.short = calls
    yield served
    del served.short
    few_rows._short_kernels.clear()


@pytest.mark.parametrize(
    ("rows", "keys", "heads", "module"),
    [
        (1, 1, (14, 2), "triton_short_d64_few"),
        (4, 64, (4, 1), "triton_short_d64_few"),
        (5, 64, (4, 1), "triton_short_d64"),
        (64, 64, (2, 2), "triton_short_d64"),
        (65, 64, (2, 2), ""),  # 4 tiles, or 2
        (186, 19, (24, 8), "triton_short_d64"),  # 72, or 48: of one block
        (186, 65, (24, 8), "triton_short_d64"),
        (36, 512, (4, 1), "triton_short_d64"),  # 3 tiles, or 4
        (128, 100, (5, 1), ""),  # 10, or 5
        (64, 500, (2, 2), "triton_short_d64"),
        (65, 500, (2, 2), ""),  # 4 tiles, or 2
        (20, 1024, (2, 2), "triton_short_d64"),
        (20, 1025, (2, 2), "triton_short_d64_parts"),
        (16, 600, (3, 1), "triton_short_d64_parts"),  # few queries: on as many keys as decoding takes
        (17, 600, (3, 1), "triton_short_d64"),
        (20, 2047, (2, 2), "triton_short_d64_parts"),
        (4, 513, (5, 1), "triton_short_d64_parts"),  # rows of more than a tile that decodes
        (20, 2048, (2, 2), "triton_short_d64_parts"),
        (60, 10239, (20, 10), "triton_short_d64_parts"),
        (20, 10240, (2, 2), ""),
        (68, 2047, (8, 8), ""),  # 16 tiles, or 8
        (119, 2048, (19, 1), "triton_short_d64_parts"),  # 36, or 19
        (122, 2048, (19, 1), ""),  # 37
        (240, 300, (2, 1), ""),  # 8 tiles, or 4
        (220, 300, (2, 1), "triton_short_d64"),  # 7
        (256, 300, (4, 4), ""),
    ],
)  # fmt: skip
def test_short_sequences_have_kernels_of_their_own(short, torch, monkeypatch, rows, keys, heads, module) -> None:
    from tilecast.kernels.serving import operator

    monkeypatch.setattr(operator, "tiles", lambda q, k, v: (q.shape[1] * q.shape[2], 1))
    q, k, v = problem(torch, rows, keys, heads)
    for _ in range(2):  # the second call starts what the first one found
        out, lse = short.attention(q, k, v, causal=True, return_lse=True)
        want, sums = short.attention(q.double(), k.double(), v.double(), causal=True, return_lse=True, fallback="sdpa")
        torch.testing.assert_close(out.double(), want, atol=0.01, rtol=0.01)
        torch.testing.assert_close(lse.double(), sums.double(), atol=1e-3, rtol=1e-3)
    # One query sees all keys: the cheapest mask has no limit.
    assert short.short == ([(module, -1, -1 if rows == 1 else 0)] * 2 if module else [])
    assert bool(short.launched) != bool(module) and not short.served


@pytest.mark.parametrize(
    ("dims", "rows", "keys", "heads", "module"),
    [
        ((128, 128), 75, 64, (24, 8), "d128"),  # 32 tiles, or 24
        ((128, 128), 88, 512, (24, 8), ""),  # 40, or 24
        ((96, 128), 84, 379, (8, 1), "d128"),  # 11, or 8
        ((96, 128), 84, 513, (8, 1), ""),
        ((128, 128), 49, 1500, (8, 1), "d128_parts"),
        ((128, 128), 16, 1500, (8, 1), "d128_parts"),
        ((96, 96), 17, 1600, (5, 5), "d128_parts"),
        ((192, 128), 16, 600, (8, 1), ""),
        ((128, 128), 49, 8191, (8, 1), "d128_parts"),
        ((128, 128), 49, 8192, (8, 1), ""),
        ((128, 128), 80, 2047, (8, 1), "d128_parts"),  # 10 tiles, or 8
        ((128, 128), 81, 2047, (8, 1), ""),  # 11
        ((96, 96), 81, 2048, (8, 1), "d128_parts"),
        ((160, 160), 49, 2048, (8, 1), ""),
        ((192, 128), 30, 32, (24, 8), "d192_128_32"),
        ((192, 128), 30, 64, (24, 8), "d192_128"),
        ((192, 128), 30, 640, (24, 8), "d192_128_blocks"),  # 16 tiles, or 24
        ((192, 128), 26, 256, (2, 2), "d192_128_blocks"),
        ((192, 128), 26, 257, (2, 2), ""),
        ((192, 192), 26, 65, (2, 2), ""),
        ((256, 256), 30, 33, (4, 1), "d256"),
        ((256, 256), 30, 32, (4, 1), "d256_32"),
        ((200, 256), 26, 65, (2, 2), "d256_blocks"),
        ((256, 256), 80, 144, (4, 1), "d256_blocks"),  # 5 tiles, or 4
        ((256, 256), 80, 145, (4, 1), ""),
        ((256, 256), 38, 256, (32, 8), "d256_blocks"),  # 24, or 32
        ((256, 256), 38, 257, (32, 8), ""),
        ((256, 256), 32, 512, (4, 1), "d256_blocks"),  # 2 tiles, or 4
        ((160, 128), 32, 512, (4, 1), ""),
        ((256, 256), 33, 512, (4, 1), ""),  # 3
        ((256, 256), 32, 513, (4, 1), ""),
        ((256, 256), 4, 64, (4, 1), "d256_few"),
    ],
)  # fmt: skip
def test_more_tiles_than_heads_would_have_are_taken_by_width_and_keys(
    short, torch, dims, rows, keys, heads, module
) -> None:
    from tilecast.kernels.serving import few_rows

    q, k, v = (
        torch.zeros(1, h, n, d).bfloat16()
        for h, n, d in ((heads[0], rows, dims[0]), (heads[1], keys, dims[0]), (heads[1], keys, dims[1]))
    )
    few_rows._wanted.cache_clear()
    served = few_rows.attend(q, k, v, q.new_zeros(*q.shape[:3], dims[1]), None, 0.125, -1, -1)
    assert [name for name, *_ in short.short] == ([f"triton_short_{module}"] if module else []), served


def test_rows_of_one_tile_on_more_keys_than_their_kernel_takes_are_served(short, torch) -> None:
    for rows, keys, heads in ((4, 129, (4, 1)), (16, 511, (2, 2)), (4, 128, (4, 1)), (17, 511, (2, 2))):
        short.attention(*problem(torch, rows, keys, heads))
    assert [call[3:5] for call in short.served] == [(4, 129), (16, 511)]
    assert [name for name, *_ in short.short] == ["triton_short_d64_few", "triton_short_d64"]


@pytest.mark.parametrize("batch", [1, 2, 300])
def test_kernels_of_short_sequences_do_not_depend_on_the_batch(short, torch, batch) -> None:
    from tilecast.kernels.serving import few_rows

    found = []
    for rows, keys, heads in ((1, 1, (14, 2)), (30, 200, (8, 1)), (4, 300, (4, 1))):
        q, k, v = (
            torch.zeros(batch, h, n, 64).half() for h, n in ((heads[0], rows), (heads[1], keys), (heads[1], keys))
        )
        short.short.clear()
        few_rows.attend(q, k, v, torch.zeros_like(q), None, 0.125, -1, -1)
        found.append([name for name, *_ in short.short])
    assert found == [["triton_short_d64_few"], ["triton_short_d64"], []]


def test_a_family_asked_for_goes_before_kernels_of_short_sequences(short, torch, monkeypatch) -> None:
    from tilecast.kernels.serving import few_rows

    for family in ("hopper_ws", "triton_short"):
        monkeypatch.setenv(registry.FAMILY_VARIABLE, family)
        few_rows._wanted.cache_clear()
        few_rows._short_kernels.clear()
        short.attention(*problem(torch, 3, 3))
        assert [name for name, *_ in short.short] == ([] if family == "hopper_ws" else ["triton_short_d64_few"])


def test_more_queries_are_served_where_their_tiles_have_an_sm_each_and_others_would_not(
    served, torch, monkeypatch
) -> None:
    from tilecast.kernels.serving import operator

    monkeypatch.setattr(operator, "parted", lambda *_: False)
    monkeypatch.setattr(
        operator, "tiles", lambda q, k, v: (-(-q.shape[1] * q.shape[2] // k.shape[2] // 192) * k.shape[2], 192)
    )
    few, many = (34, 2), (68, 68)
    for rows, keys, heads, causal in (
        (390, 4096, few, True),  # 102 tiles of 192 rows for each head by itself
        (580, 4096, few, True),  # 136, of which the last of a head has 4 rows; heads of a group share 104
        (500, 4096, few, False),  # those without a mask are of 192 rows
        (500, 4095, few, True),
        (384, 4096, few, True),  # 102 tiles
        (200, 4096, many, True),  # 136 of either
    ):
        q, k, v = (x[:1] for x in problem(torch, rows, keys, heads))
        served.attention(q, k, v, causal=causal)
    assert [call[3] for call in served.served] == [580]
    assert len(served.launched) == 5


def test_without_a_serving_kernel_the_others_run(served, torch, monkeypatch) -> None:
    from tilecast.kernels.serving import few_rows

    for _ in range(2):
        served.attention(*(x.half() for x in problem(torch, 1, 600)))
    assert not served.served and len(served.launched) == 2
    monkeypatch.setenv(registry.FAMILY_VARIABLE, "triton")
    few_rows._wanted.cache_clear()
    served.attention(*problem(torch, 1, 600))
    assert not served.served and len(served.launched) == 3


def test_gradients_pass_through(served, torch) -> None:
    q, k, v = (x.requires_grad_() for x in problem(torch, 4, 600))
    served.attention(q, k, v, causal=True).float().square().sum().backward()
    assert len(served.served) == 1 and all(x.grad.isfinite().all() for x in (q, k, v))
