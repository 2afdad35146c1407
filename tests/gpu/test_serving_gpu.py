"""`attention_kvcache` and `attention_varlen` on a GPU: against float64, bits alone and in a batch, graphs, compile, refusals."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from support.sanitizer import assert_memcheck_finds_nothing
from support.serving import Problem, error_of, make, parted

import tilecast
from tilecast import AttentionError

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
#: On Hopper kernels take heads of fewer columns than their own.
DIMS = [
    (64, 64),
    (96, 96),
    (128, 128),
    (192, 128),
    (256, 256),
    *([(40, 40), (80, 80), (112, 72), (160, 160)] if HOPPER else []),
]
STEP = ((1, 5), (1, 700), (4, 1300), (1, 0), (2, 64), (1, 5000))
CHUNKS = ((1, 5), (33, 700), (400, 1300), (70, 30), (200, 2500), (1, 4000), (8, 3000))
#: Of 20 to 64 rows where four heads share keys: one tile of 64, without and with parts of the keys.
SOME = ((5, 700), (8, 300), (12, 2500), (16, 9000), (10, 0), (9, 5))
LENGTHS = pytest.mark.parametrize("lengths", [STEP, CHUNKS, SOME], ids=["step", "chunks", "some"])


def call(problem, made, **options):
    """(out, lse) of the public call that takes the layout of the problem."""
    most_q, most_k = (max(pair[i] for pair in problem.lengths) for i in (0, 1))
    shared = {
        "window": problem.window,
        "softcap": problem.softcap,
        "sinks": made.sinks,
        "scale": problem.scale,
        "return_lse": True,
    }
    lists = made.lists
    if problem.layout == "packed":
        return tilecast.attention_varlen(
            made.q, made.k, made.v, lists["cu_seqlens_q"], lists["cu_seqlens_k"], most_q, most_k, **shared, **options
        )
    if problem.packed_q:
        options |= {"cu_seqlens_q": lists["cu_seqlens_q"], "max_seqlen_q": most_q}
    return tilecast.attention_kvcache(
        made.q,
        made.k,
        made.v,
        lists["seqused_k"],
        lists.get("block_table"),
        lists.get("cache_batch_idx"),
        **shared,
        **options,
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@LENGTHS
@pytest.mark.parametrize("layout", ["packed", "cache", "paged"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_is_attention(dims, layout, lengths, dtype) -> None:
    problem = Problem(lengths, dims=dims, layout=layout, dtype=dtype, heads=(8, 2), page=64 if dims[0] == 128 else 16)
    made = make(problem, "cuda")
    assert error_of(problem, made, *call(problem, made, check=True)) <= 1.0


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("lengths", [STEP, SOME], ids=["step", "some"])
def test_layouts_have_the_same_bits(dims, lengths) -> None:
    found = []
    for layout, page in (("packed", 0), ("cache", 0), ("paged", 16), ("paged", 64), ("paged", 128)):
        problem = Problem(lengths, dims=dims, layout=layout, dtype="bfloat16", heads=(8, 2), page=page)
        found.append(call(problem, make(problem, "cuda")))
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("lengths", [STEP, CHUNKS], ids=["step", "chunks"])
@pytest.mark.parametrize("dims", DIMS[:5], ids=str)  # of bytes no kernel takes heads of fewer columns than its own
def test_caches_of_bytes(dims, lengths, dtype) -> None:
    problem = Problem(lengths, dims=dims, layout="paged", dtype=dtype, heads=(8, 2), page=16, narrow=True)
    made = make(problem, "cuda")
    factors = {name: made.lists.pop(name) for name in ("k_descale", "v_descale")}
    assert error_of(problem, made, *call(problem, made, **factors)) <= 1.0


def test_every_byte_is_its_number() -> None:
    """One query that sees one key gets that key's value: all 254 numbers of e4m3, in both columns of a word."""
    numbers = [code for code in range(256) if code & 0x7F != 0x7F]
    v = torch.zeros(len(numbers), 1, 1, 128, dtype=torch.uint8, device="cuda")
    v[:, 0, 0] = torch.tensor(numbers, dtype=torch.uint8, device="cuda")[:, None]
    for dtype in (torch.bfloat16, torch.float16):
        q = torch.zeros(len(numbers), 1, 1, 128, dtype=dtype, device="cuda")
        out = tilecast.attention_kvcache(q, torch.zeros_like(v), v)
        assert torch.equal(out.float(), v.view(torch.float8_e4m3fn).float())


@pytest.mark.skipif(not HOPPER, reason="latent attention is written for Hopper")
@pytest.mark.parametrize("heads", [128, 64, 16, 24])
@pytest.mark.parametrize("lengths", [STEP, ((1, 9000),), ((3, 800), (70, 900))], ids=["step", "alone", "chunks"])
def test_latent_attention(heads, lengths) -> None:
    problem = Problem(lengths, dims=(576, 512), heads=(heads, 1), dtype="bfloat16", page=64, latent=True)
    made = make(problem, "cuda")
    assert error_of(problem, made, *call(problem, made)) <= 1.0


@pytest.mark.skipif(not HOPPER, reason="latent attention is written for Hopper")
@pytest.mark.parametrize(
    ("count", "heads", "dtype"),
    [(132, 128, "bfloat16"), (132, 16, "bfloat16"), (132, 48, "float16"), (70, 128, "bfloat16"), (200, 192, "float16")],
)
def test_latent_attention_gets_the_same_bits_alone_and_in_a_batch_that_fills_the_device(count, heads, dtype) -> None:
    """Splits of a sequence alone, chunks of one program in a batch, or of two where its run ends inside a tile: lengths with few of them,
    and with as many as there may be.  The counters are as they were: a second call gets the same bits."""
    several = (*((1 + number % 2, 700 * (number % 5) + 37 * number) for number in range(count - 1)), (1, 20000))
    problem = Problem(several, dims=(576, 512), heads=(heads, 1), dtype=dtype, page=64, latent=True, sinks=True)
    made = make(problem, "cuda")
    out, lse = call(problem, made)
    again, sums_again = call(problem, made)
    assert torch.equal(out, again) and torch.equal(lse, sums_again)
    starts, lists = made.lists["cu_seqlens_q"].tolist(), made.lists
    for number in (0, 3, 4, 9, 33, 34, 35, 36, count // 2, count - 2, count - 1):
        first, end = starts[number : number + 2]
        alone, sums = tilecast.attention_kvcache(
            made.q[first:end][None], made.k, made.v, lists["seqused_k"][number : number + 1],
            lists["block_table"][number : number + 1], causal=True, sinks=made.sinks, return_lse=True,
        )  # fmt: skip
        assert torch.equal(alone[0], out[first:end]), number
        assert torch.equal(sums[0], lse[:, first:end]), number
    few = replace(problem, lengths=several[:9])
    made = make(few, "cuda")
    assert error_of(few, made, *call(few, made)) <= 1.0


@pytest.mark.skipif(not HOPPER, reason="runs of splits are written for Hopper")
@pytest.mark.parametrize(
    ("lengths", "heads"),
    [(((1, 8192),) * 8, (32, 8)), (((1, 8100), (1, 0), (1, 5), *((1, 1000 * n) for n in range(1, 6))), (64, 8)), (((1, 2048),) * 8, (32, 32))],
    ids=["alike", "unequal", "many heads"],
)  # fmt: skip
def test_runs_of_splits_with_a_program_of_their_own_have_the_bits_of_a_sequence_alone(lengths, heads) -> None:
    problem = Problem(lengths, dims=(128, 128), heads=heads, dtype="bfloat16", page=64, packed_q=False)
    made = make(problem, "cuda")
    out, lse = call(problem, made)
    again, sums_again = call(problem, made)
    assert torch.equal(out, again) and torch.equal(lse, sums_again)
    assert error_of(problem, made, out, lse) <= 1.0
    used, table = made.lists["seqused_k"], made.lists["block_table"]
    for number in range(len(lengths)):
        one = slice(number, number + 1)
        alone, sums = tilecast.attention_kvcache(
            made.q[one], made.k, made.v, used[one], table[one], causal=True, return_lse=True
        )
        assert torch.equal(alone, out[one]) and torch.equal(sums, lse[one])


@pytest.mark.parametrize("seed", range(24))
def test_random_problems(seed) -> None:
    draw = random.Random(seed)
    heads_kv = draw.choice([1, 2, 4])
    problem = Problem(
        tuple((draw.choice([1, 1, 1, 2, 4, 8, 100]), draw.randrange(0, 3000)) for _ in range(draw.randrange(1, 9))),
        heads=(heads_kv * draw.choice([1, 2, 3, 4, 8]), heads_kv), dims=draw.choice(DIMS),
        layout=draw.choice(["packed", "cache", "paged"]), page=draw.choice([16, 32, 64, 128, 256]),
        window=draw.choice([(-1, 0), (-1, -1), (100, 0), (1000, 20)]), softcap=draw.choice([0.0, 0.0, 20.0]),
        sinks=draw.random() < 0.3, dtype=draw.choice(["float16", "bfloat16"]), seed=seed,
    )  # fmt: skip
    made = make(problem, "cuda")
    assert error_of(problem, made, *call(problem, made)) <= 1.0


@pytest.mark.parametrize("seed", range(8))
def test_random_caches_of_bytes(seed) -> None:
    draw = random.Random(seed)
    heads_kv = draw.choice([1, 2, 4])
    problem = Problem(
        tuple((draw.choice([1, 1, 1, 2, 4, 8]), draw.randrange(0, 3000)) for _ in range(draw.randrange(1, 9))),
        heads=(heads_kv * draw.choice([1, 2, 4, 8]), heads_kv), dims=[(64, 64), (128, 128), (192, 128)][seed % 3],
        page=draw.choice([16, 32, 64, 128, 256]), window=draw.choice([(-1, 0), (-1, -1), (100, 0)]), softcap=draw.choice([0.0, 20.0]),
        sinks=draw.random() < 0.3, dtype=draw.choice(["float16", "bfloat16"]), narrow=True, seed=seed,
    )  # fmt: skip
    made = make(problem, "cuda")
    factors = {name: made.lists.pop(name) for name in ("k_descale", "v_descale")}
    assert error_of(problem, made, *call(problem, made, **factors)) <= 1.0


@pytest.mark.parametrize(("dim", "heads"), [(128, (8, 2)), (64, (24, 2)), (256, (8, 1))])
def test_same_bits_alone_in_a_batch_and_again(dim, heads) -> None:
    """Random batches out of one pool of pages: a sequence's bits depend on no other."""
    everyone = Problem(
        tuple((queries, keys) for queries in (1, 4, 7, 40) for keys in (3, 400, 513, 2000, 9000)), dims=(dim, dim), heads=heads, dtype="bfloat16"
    )  # fmt: skip
    made = make(everyone, "cuda")
    table, used = made.lists["block_table"], made.lists["seqused_k"]
    starts = made.lists["cu_seqlens_q"].tolist()
    first: dict[int, torch.Tensor] = {}
    draw = random.Random(0)
    for batch in [[number] for number in range(len(starts) - 1)] + [
        [draw.randrange(len(starts) - 1) for _ in range(draw.randrange(1, 40))] for _ in range(200)
    ]:
        counts = [starts[n + 1] - starts[n] for n in batch]
        cu = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
        out = tilecast.attention_kvcache(
            torch.cat([made.q[starts[n] : starts[n + 1]] for n in batch]), made.k, made.v, used[batch], table[batch],
            cu_seqlens_q=cu, max_seqlen_q=max(counts), causal=True,
        )  # fmt: skip
        for number, got in zip(batch, out.split(counts), strict=True):
            bits = got.view(torch.int16)
            assert torch.equal(first.setdefault(number, bits.clone()), bits)


@pytest.mark.parametrize(("dim", "heads"), [(128, (32, 8)), (64, (4, 1))])
def test_one_list_of_queries_and_keys_has_the_bits_of_two(dim, heads) -> None:
    """Of 4/1 heads long sequences are parted; one list and two by turns, as calls of a shape are remembered."""
    problem = Problem(((3000, 3000), (7, 7), (150, 150), (40, 40)), dims=(dim, dim), heads=heads, layout="packed", dtype="bfloat16")  # fmt: skip
    made = make(problem, "cuda")
    starts = made.lists["cu_seqlens_q"]
    found = [
        tilecast.attention_varlen(made.q, made.k, made.v, starts, other, 3000, 3000, causal=True, return_lse=True)
        for other in (starts, starts.clone(), starts, starts.clone())
    ]
    assert error_of(problem, made, *found[0]) <= 1.0
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))


@pytest.mark.parametrize(
    ("heads", "queries", "keys", "most", "rows"),
    [((32, 8), 94, 10008, 194, 94), ((4, 1), 380, 13158, 420, 420), ((5, 5), 605, 20657, 645, 645)],
)
def test_a_sequence_of_fewer_queries_than_its_call_allows_has_room_for_its_parts(
    heads, queries, keys, most, rows
) -> None:
    problem = Problem(((queries, keys),), dims=(128, 128), heads=heads, layout="cache", dtype="bfloat16")
    made = make(problem, "cuda")
    padded = made.q.new_zeros(rows, heads[0], 128)
    padded[:queries] = made.q
    out, lse = tilecast.attention_kvcache(
        padded, made.k, made.v, made.lists["seqused_k"], None, made.lists["cache_batch_idx"], causal=True, return_lse=True,
        cu_seqlens_q=made.lists["cu_seqlens_q"], max_seqlen_q=most,
    )  # fmt: skip
    assert error_of(problem, made, out[:queries], lse[:, :queries]) <= 1.0


@pytest.mark.parametrize(("dim", "heads"), [(128, (32, 8)), (64, (14, 2)), (256, (8, 1))])
def test_rows_of_no_sequence_hide_none(dim, heads) -> None:
    """As many rows of q as if each sequence had the most: kernels for fewer rows are left out, and the one launched takes theirs."""
    problem = Problem(((60, 5000), (1, 9000), (0, 50), (7, 20)), dims=(dim, dim), heads=heads, dtype="bfloat16")
    made = make(problem, "cuda")
    padded = made.q.new_full((4 * 60, *made.q.shape[1:]), float("nan"))
    padded[: made.q.shape[0]] = made.q
    for q in (padded, made.q):
        out, lse = tilecast.attention_kvcache(
            q, made.k, made.v, made.lists["seqused_k"], made.lists["block_table"], causal=True, return_lse=True,
            cu_seqlens_q=made.lists["cu_seqlens_q"], max_seqlen_q=60,
        )  # fmt: skip
        assert error_of(problem, made, out[: made.q.shape[0]], lse[:, : made.q.shape[0]]) <= 1.0


@pytest.mark.parametrize(("dim", "heads"), [(128, (32, 8)), (64, (14, 2)), (256, (8, 1))])
def test_sequences_of_one_number_of_queries_have_the_bits_of_a_mixed_batch(dim, heads) -> None:
    """Where q says that all have as many queries one kernel is launched, otherwise all that may have a sequence."""
    problem = Problem(((33, 5000), (33, 700), (33, 20000)), dims=(dim, dim), heads=heads, dtype="bfloat16")
    made = make(problem, "cuda")
    table, used = made.lists["block_table"], made.lists["seqused_k"]

    def call(counts, q, numbers):
        starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device="cuda")
        return tilecast.attention_kvcache(
            q, made.k, made.v, used[numbers], table[numbers], causal=True, cu_seqlens_q=starts, max_seqlen_q=max(counts)
        )

    alike = call((33,) * 3, made.q, [0, 1, 2])
    mixed = call((33, 1, 33, 20, 33, 100), torch.cat([made.q, made.q, made.q])[[*range(33), 0, *range(33, 66), *range(20), *range(66, 99), *range(100)]],
                 [0, 0, 1, 0, 2, 2])  # fmt: skip
    again = torch.cat([mixed[:33], mixed[34:67], mixed[87:120]])
    assert torch.equal(alike.view(torch.int16), again.view(torch.int16))


def test_a_graph_follows_the_lengths_of_its_replay() -> None:
    problem = Problem(((1, 3000), (1, 1000), (1, 17)), dims=(128, 128), heads=(8, 2), dtype="bfloat16", packed_q=False)
    made = make(problem, "cuda")
    used = made.lists["seqused_k"].clone()

    def step():
        return tilecast.attention_kvcache(
            made.q, made.k, made.v, used, made.lists["block_table"], causal=True, return_lse=True
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for lengths in ([3000, 1000, 17], [5, 900, 1], [2999, 0, 16]):
        used.copy_(torch.tensor(lengths))
        graph.replay()
        want, want_lse = step()
        assert torch.equal(out, want)
        assert torch.equal(lse, want_lse)
    used.copy_(made.lists["seqused_k"])
    graph.replay()
    assert error_of(problem, made, out, lse) <= 1.0


def test_compiled_code_is_the_same_operator() -> None:
    problem = Problem(((1, 700), (1, 90)), dims=(128, 128), heads=(8, 2), dtype="bfloat16", packed_q=False)
    made = make(problem, "cuda")

    def step(q, k, v, used, table):
        return tilecast.attention_kvcache(q * 1.0, k, v, used, table, causal=True) + 0.0

    given = (made.q, made.k, made.v, made.lists["seqused_k"], made.lists["block_table"])
    assert torch.equal(torch.compile(step, fullgraph=True)(*given), step(*given))
    arguments = (*given[:3], None, None, given[3], given[4], None, None, None, None, 1, 704, None, 0.0, -1, 0, True)
    torch.library.opcheck(
        torch.ops.tilecast.attention_serving.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


def test_a_cache_of_more_than_two_to_the_31_elements() -> None:
    pages = 2**31 // (16 * 2 * 128) + 8
    k = torch.zeros(pages, 16, 2, 128, dtype=torch.bfloat16, device="cuda")
    problem = Problem(((1, 900),), dims=(128, 128), heads=(8, 2), dtype="bfloat16", packed_q=False)
    made = make(problem, "cuda")
    needed = -(-900 // 16)
    far = torch.arange(pages - needed, pages, device="cuda", dtype=torch.int32)
    k[far.long()] = made.k[made.lists["block_table"][0, :needed].long()]
    v = torch.zeros_like(k)
    v[far.long()] = made.v[made.lists["block_table"][0, :needed].long()]
    out, lse = tilecast.attention_kvcache(
        made.q, k, v, made.lists["seqused_k"], far[None], causal=True, return_lse=True
    )
    assert error_of(problem, made, out, lse) <= 1.0


def test_streams_side_by_side_do_not_share_counters() -> None:
    problem = Problem(((1, 9000),) * 4, dims=(128, 128), heads=(8, 2), dtype="bfloat16", packed_q=False)
    made = make(problem, "cuda")
    given = (made.q, made.k, made.v, made.lists["seqused_k"], made.lists["block_table"])
    want = tilecast.attention_kvcache(*given, causal=True)
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(4)], []
    for turn in range(80):
        with torch.cuda.stream(streams[turn % 4]):
            found.append(tilecast.attention_kvcache(*given, causal=True))
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in found)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_table": [[0, 99]]}, "block_table: expected pages 0 to"),
        ({"seqused_k": [10**6]}, "cache_seqlens: expected 0 to"),
        ({"seqused_k": [-1]}, "cache_seqlens: expected 0 to"),
    ],
)
def test_check_finds_numbers_that_make_no_sense(change, said) -> None:
    problem = Problem(((1, 20),), packed_q=False)
    made = make(problem, "cuda")
    for name, value in change.items():
        made.lists[name] = torch.tensor(value, dtype=torch.int32, device="cuda")
    with pytest.raises(AttentionError, match=said):
        call(problem, made, check=True)


def test_check_says_that_it_cannot_look_in_a_graph() -> None:
    problem = Problem(((1, 20),), packed_q=False)
    made = make(problem, "cuda")
    call(problem, made)
    with pytest.raises(AttentionError, match="check: expected False while a CUDA graph is captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):  # fmt: skip
        call(problem, made, check=True)


def test_parts_of_a_batch_are_written_once() -> None:
    """Decode and prefill kernels share a batch without touching each other's rows."""
    problem = Problem(CHUNKS, dims=(128, 128), heads=(8, 2), dtype="bfloat16")
    made = make(problem, "cuda")
    both = parted(problem, *call(problem, made))
    for number in (0, 3, 5):
        alone = replace(problem, lengths=(problem.lengths[number],))
        rows = sum(queries for queries, _ in problem.lengths[:number])
        queries, _ = problem.lengths[number]
        out = tilecast.attention_kvcache(
            made.q[rows : rows + queries][None], made.k, made.v, made.lists["seqused_k"][number : number + 1],
            made.lists["block_table"][number : number + 1], causal=True,
        )  # fmt: skip
        assert torch.equal(out[0], both[number][0]), alone


# --- new keys and values -----------------------------------------------------------------------------------------


def appended(problem, made, news, rotary=None, interleaved=True):
    """(a problem whose last ``news`` keys of each sequence are not in its cache yet, what to append as options, the queries).

    Of what the cache holds of them nothing is left; with ``rotary`` (cos, sin) the problem's own keys and queries are
    those after turning, and what comes back is turned the other way.
    """
    lists, page, dtype = made.lists, problem.page, made.q.dtype
    used, table = lists["seqused_k"].tolist(), lists["block_table"].tolist()
    k_new, v_new = [], []
    for number, (keys, pages) in enumerate(zip(used, table, strict=True)):
        for place in range(keys - news, keys):
            for pool in (made.k, made.v):
                pool[pages[place // page], place % page] = float("nan") if pool.is_floating_point() else 0x7F
        k_new.append(made.sequences[number][1][keys - news :])
        v_new.append(made.sequences[number][2][keys - news :])
    k, v, q = torch.stack(k_new).to(dtype), torch.stack(v_new).to(dtype), made.q
    options = {"k": k, "v": v}
    if rotary is not None:
        cos, sin = rotary
        at = torch.tensor(used, device="cuda")[:, None] - news + torch.arange(news, device="cuda")
        options |= {
            "k": turned(k, cos[at], -sin[at], interleaved),
            "rotary_cos": cos,
            "rotary_sin": sin,
            "rotary_interleaved": interleaved,
        }
        q = turned(q, cos[at], -sin[at], interleaved)
    return torch.tensor(used, device="cuda", dtype=torch.int32) - news, options, q


def turned(x, cos, sin, interleaved):
    """(batch, rows, heads, dim) rotated by (batch, rows, half) angles in float64, in x's dtype."""
    half = cos.shape[-1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    )
    y, c, s = x.double(), cos.double()[:, :, None], sin.double()[:, :, None]
    a, b = y[..., first].clone(), y[..., second].clone()
    y[..., first], y[..., second] = a * c - b * s, b * c + a * s
    return y.to(x.dtype)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_appended_keys_are_the_cache_s(dims, dtype) -> None:
    """The same bits as a cache that had them all along, twice: the second call is one met before."""
    problem = Problem(((3, 5), (3, 700), (3, 33)), dims=dims, dtype=dtype, heads=(8, 2), page=32, packed_q=False)
    for _ in range(2):
        made = make(problem, "cuda")
        want, want_lse = call(problem, made)
        caches = made.k.clone(), made.v.clone()
        before, options, q = appended(problem, made, 3)
        out, lse = tilecast.attention_kvcache(
            q, made.k, made.v, before, made.lists["block_table"], window=problem.window, return_lse=True, check=False, **options
        )  # fmt: skip
        assert torch.equal(out, want) and torch.equal(lse, want_lse)
        for got, had in zip((made.k, made.v), caches, strict=True):
            assert torch.equal(got.view(torch.int16), had.view(torch.int16))


@pytest.mark.parametrize("interleaved", [True, False])
def test_appended_keys_and_queries_turn(interleaved) -> None:
    problem = Problem(((2, 50), (2, 900)), dims=(128, 128), dtype="bfloat16", heads=(8, 2), page=16, packed_q=False)
    made = make(problem, "cuda")
    angles = torch.arange(1000, device="cuda")[:, None] * 10000.0 ** (-torch.arange(32, device="cuda") / 32)
    before, options, q = appended(problem, made, 2, (angles.cos(), angles.sin()), interleaved)
    out, _ = tilecast.attention_kvcache(
        q, made.k, made.v, before, made.lists["block_table"], causal=True, return_lse=True, check=True, **options
    )
    # Turned one way in float64 and back by the kernel, each rounded once.
    want, _ = call(problem, make(problem, "cuda"))
    torch.testing.assert_close(out.float(), want.float(), atol=0.03, rtol=0.03)


def test_bytes_are_rounded_to_the_nearest() -> None:
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cuda").to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        new = numbers.view(dtype).view(1, 64, 8, 128)
        new = torch.where(new.isnan(), 1.0, new)
        cache = torch.zeros(1, 64, 8, 128, dtype=torch.uint8, device="cuda")
        values, q = torch.zeros_like(cache), torch.zeros(1, 1, 8, 128, dtype=dtype, device="cuda")
        factor = torch.tensor([0.3], device="cuda")
        tilecast.attention_kvcache(q, cache, values, 0, k=new, v=new, k_descale=factor)
        for got, wide in ((cache, new.float() / factor), (values, new.float())):
            assert torch.equal(got, wide.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))


def test_a_graph_appends_where_the_lengths_of_its_replay_say() -> None:
    problem = Problem(((1, 600), (1, 40)), dims=(128, 128), heads=(8, 2), dtype="bfloat16", packed_q=False)
    made = make(problem, "cuda")
    before, options, q = appended(problem, made, 1)
    start = before.clone()

    def step():
        return tilecast.attention_kvcache(q, made.k, made.v, before, made.lists["block_table"], causal=True, **options)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for back in (0, 7, 30):
        before.copy_(start - back)
        pools = made.k.clone(), made.v.clone()
        graph.replay()
        got = out.clone()
        written = made.k.clone()
        made.k.copy_(pools[0]), made.v.copy_(pools[1])
        assert torch.equal(step(), got) and torch.equal(made.k.view(torch.int16), written.view(torch.int16))


def test_compiled_code_appends() -> None:
    problem = Problem(((1, 700), (1, 90)), dims=(128, 128), heads=(8, 2), dtype="bfloat16", packed_q=False)
    made = make(problem, "cuda")
    before, options, q = appended(problem, made, 1)

    def step(q, k_pool, v_pool, used, table, k, v):
        return tilecast.attention_kvcache(q * 1.0, k_pool, v_pool, used, table, k=k, v=v, causal=True) + 0.0

    given = (q, made.k, made.v, before, made.lists["block_table"], options["k"], options["v"])
    plain = step(*given)
    made.k.nan_to_num_(0.0, 0.0, 0.0)
    assert torch.equal(torch.compile(step, fullgraph=True)(*given), plain)


def test_rows_of_no_sequence_are_not_appended() -> None:
    """Packed rows behind the last sequence are NaN, as an engine's padding may be; no kernel reads or writes them."""
    problem = Problem(((3, 40), (5, 600)), dims=(128, 128), heads=(8, 2), dtype="bfloat16")
    made = make(problem, "cuda")
    want, _ = call(problem, made)
    pool = made.k.clone()
    used, starts = made.lists["seqused_k"], made.lists["cu_seqlens_q"]
    news = starts.diff()
    nothing = [torch.full((4, 2, 128), float("nan"), dtype=torch.bfloat16, device="cuda")]
    k, v = (
        torch.cat([one[i][-int(n) :] for one, n in zip(made.sequences, news, strict=True)] + nothing) for i in (1, 2)
    )
    q = torch.cat([made.q, torch.full((4, 8, 128), float("nan"), dtype=torch.bfloat16, device="cuda")])
    out = tilecast.attention_kvcache(
        q, made.k, made.v, used - news.int(), made.lists["block_table"], k=k.contiguous(), v=v.contiguous(), cu_seqlens_k_new=starts,
        cu_seqlens_q=starts, max_seqlen_q=5, causal=True,
    )  # fmt: skip
    assert torch.equal(out[:8], want) and torch.equal(made.k.view(torch.int16), pool.view(torch.int16))


# --- memory errors ---------------------------------------------------------------------------------------------

SMALL = """
import torch, tilecast
torch.manual_seed(0)
def rand(*shape):
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)
lengths = torch.tensor([5, 700, 1300, 0, 64, 2600], dtype=torch.int32, device="cuda")
pages = 41
tables = torch.randperm(6 * pages, device="cuda").to(torch.int32).view(6, pages)
for queries in (1, 3, 40):
    for dim, dim_v in ((64, 64), (128, 128), (192, 128), (96, 96), *[(80, 72)] * {hopper}):
        k, v = (rand(6 * pages, 64, 2, d) for d in (dim, dim_v))
        tilecast.attention_kvcache(rand(6, queries, 8, dim), k, v, lengths, tables, causal=True, return_lse=True)
        torch.cuda.synchronize()
for dim in (64, 128):
    k, v = (rand(6 * pages, 64, 2, dim).to(torch.float8_e4m3fn) for _ in range(2))
    tilecast.attention_kvcache(rand(6, 1, 8, dim), k, v, lengths, tables, causal=True)
    torch.cuda.synchronize()
if {hopper}:
    cache = rand(6 * pages, 64, 1, 576)
    tilecast.attention_mla(rand(6, 1, 64, 576), cache, lengths, tables, causal=True)
    torch.cuda.synchronize()
"""


def test_compute_sanitizer_finds_nothing() -> None:
    """Tables have just the pages that the longest sequence needs, and the pool no page more than they name."""
    assert_memcheck_finds_nothing(SMALL.format(hopper=HOPPER))
