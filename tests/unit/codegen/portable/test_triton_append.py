"""The `triton_append` family in Triton's interpreter: where keys and values land, bit by bit, what they are turned and rounded to, and
`attention_kvcache` behind it.

TRITON_INTERPRET counts when triton is imported, so the numerics run in a process of their own: one test here starts pytest on
this file again.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from itertools import product

import pytest
from support.interpreter import run_interpreted
from support.whole import is_whole

from tilecast.codegen.portable.append import generate_append
from tilecast.codegen.shipping.ship import KERNELS, read_append_list
from tilecast.model.append import parse_append
from tilecast.model.kernel.header import header_workload, read_header, without_header
from tilecast.model.kernel.variants.append import AppendVariant
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

PAGE, HEADS, NAN = 16, 3, float("nan")


@dataclass
class Batch:
    """A cache that has something in it, and what shall be appended to it."""

    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    used: torch.Tensor
    #: New keys of each sequence, and where the first of them stands in k.
    counts: list[int]
    firsts: list[int]
    lists: dict[str, torch.Tensor]

    def place(self, number: int, position: int) -> tuple[int, int] | None:
        """(row of the pool, place in it) of a position of a sequence; None where the cache has none."""
        if "block_table" in self.lists:
            table = self.lists["block_table"][number]
            if not 0 <= position < PAGE * len(table):
                return None
            return int(table[position // PAGE]), position % PAGE
        slot = int(self.lists["cache_batch_idx"][number]) if "cache_batch_idx" in self.lists else number
        return (slot, position) if 0 <= position < self.k_cache.shape[1] else None


def make(layout: str, packed: bool, used: tuple[int, ...] = (0, 5, 31), dims: tuple[int, int] = (64, 64), narrow: bool = False) -> Batch:  # fmt: skip
    """A batch; caches are NaN (or its code), packed rows of no sequence too, pages are shuffled."""
    draw = torch.Generator().manual_seed(7)
    batch, counts = len(used), [4, 1, 6][: len(used)] if packed else [3] * len(used)
    rows = (sum(counts) + 5,) if packed else (batch, 3)
    k, v = (torch.randn(*rows, HEADS, dim, generator=draw).half() for dim in dims)
    firsts = [sum(counts[:n]) for n in range(batch)]
    lists = {}
    if packed:
        k[sum(counts) :], v[sum(counts) :] = NAN, NAN
        lists["cu_seqlens_k_new"] = torch.tensor([*firsts, sum(counts)], dtype=torch.int32)
    if layout == "paged":
        shape = (4 * batch + 2, PAGE)
        lists["block_table"] = torch.randperm(4 * batch + 2, generator=draw)[: 4 * batch].view(batch, 4).int()
    else:
        shape = (batch + 2, 64)
        if layout == "slots":
            lists["cache_batch_idx"] = torch.randperm(batch + 2, generator=draw)[:batch].int()
    caches = [
        torch.full((*shape, HEADS, dim), 0x7F, dtype=torch.uint8)
        if narrow
        else torch.full((*shape, HEADS, dim), NAN).half()
        for dim in dims
    ]
    return Batch(k, v, *caches, torch.tensor(used, dtype=torch.int32), counts, firsts, lists)


def expected(batch: Batch, turn=None, round_to=lambda x, number: x) -> tuple[torch.Tensor, torch.Tensor]:
    """Both caches after the append, from the definition."""
    caches = batch.k_cache.clone(), batch.v_cache.clone()
    for number, count in enumerate(batch.counts):
        for i in range(count):
            position = int(batch.used[number]) + i
            where = batch.place(number, position)
            for which, (new, cache) in enumerate(zip((batch.k, batch.v), caches, strict=True)):
                x = new[batch.firsts[number] + i] if new.ndim == 3 else new[number, i]
                x = turn(x, position) if turn is not None and not which else x
                if where is not None and 0 <= where[0] < cache.shape[0]:
                    cache[where] = round_to(x, number)
    return caches


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16) if x.dtype == torch.float16 else x


def launch(batch: Batch, module: str = "triton_append", **options) -> torch.Tensor:
    """The lengths that the kernel wrote."""
    lengths = torch.full_like(batch.used, -7)
    kernel = importlib.import_module(f"tilecast.kernels.generated.{module}")
    kernel.launch(batch.k, batch.v, batch.k_cache, batch.v_cache, lengths, batch.used, **batch.lists, **options)
    return lengths


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("layout", "packed", "dims"),
    [("paged", True, (64, 64)), ("paged", False, (192, 128)), ("slots", True, (96, 96)), ("slots", False, (64, 64)), ("cache", True, (192, 128)), ("cache", False, (96, 96))],
)  # fmt: skip
def test_every_row_lands_in_its_place_and_nowhere_else(layout: str, packed: bool, dims: tuple[int, int]) -> None:
    batch = make(layout, packed, dims=dims)
    want = expected(batch)
    lengths = launch(batch)
    assert lengths.tolist() == [int(u) + n for u, n in zip(batch.used, batch.counts, strict=True)]
    for got, wanted in zip((batch.k_cache, batch.v_cache), want, strict=True):
        assert torch.equal(bits(got), bits(wanted))


@pytest.mark.interpreted
@pytest.mark.parametrize("layout", ["paged", "cache"])
def test_what_has_no_room_is_not_written(layout: str) -> None:
    batch = make(layout, True, used=(62, -2, 60))
    if layout == "paged":
        batch.lists["block_table"][1] = torch.tensor([10**6, -1, 0, 0], dtype=torch.int32)
    want = expected(batch)
    launch(batch)
    assert torch.equal(bits(batch.k_cache), bits(want[0]))
    assert torch.equal(bits(batch.v_cache), bits(want[1]))


@pytest.mark.interpreted
def test_more_sequences_than_a_program_looks_at_together() -> None:
    """Of 260 sequences every second has a new key."""
    batch = make("cache", False, used=tuple(n % 60 for n in range(260)))
    batch.counts, batch.firsts = [n % 2 for n in range(260)], [n // 2 for n in range(260)]
    batch.k, batch.v = batch.k.flatten(0, 1)[:130], batch.v.flatten(0, 1)[:130]
    batch.lists["cu_seqlens_k_new"] = torch.tensor([*batch.firsts, 130], dtype=torch.int32)
    want = expected(batch)
    launch(batch)
    assert torch.equal(bits(batch.k_cache), bits(want[0]))


@pytest.mark.interpreted
def test_every_half_precision_number_becomes_the_nearest_byte() -> None:
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).view(1, 64, 8, 128)
    numbers = torch.where(numbers.isnan(), 1.0, numbers)
    cache = torch.zeros(1, 64, 8, 128, dtype=torch.uint8)
    batch = Batch(numbers, numbers, cache, cache.clone(), torch.zeros(1, dtype=torch.int32), [64], [0], {})
    launch(batch, "triton_append_e4m3")
    want = numbers.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(batch.k_cache, want) and torch.equal(batch.v_cache, want)
    launch(batch, "triton_append_e4m3", k_descale=torch.full((1, 8), 0.3), v_descale=torch.full((1, 8), 7.0))
    for got, factor in ((batch.k_cache, 0.3), (batch.v_cache, 7.0)):
        want = (numbers.float() / torch.tensor(factor)).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(got, want)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """(heads, head_dim) rotated by one row of the tables, in float64."""
    half, y = len(cos), x.double().clone()
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))  # fmt: skip
    a, b, c, s = x[:, first].double(), x[:, second].double(), cos.double(), sin.double()
    y[:, first], y[:, second] = a * c - b * s, b * c + a * s
    return y


def tables(half: int, kind: torch.dtype = torch.float16) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(64)[:, None] * 10.0 ** (-torch.arange(half) / half)
    return angles.cos().to(kind), angles.sin().to(kind)


@pytest.mark.interpreted
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("dims", "half"), [((64, 64), 32), ((96, 96), 16), ((192, 128), 96)])
def test_keys_and_queries_turn(dims: tuple[int, int], half: int, interleaved: bool) -> None:
    follows = half != 96
    batch, (cos, sin) = make("paged", True, dims=dims), tables(half, torch.float32 if half == 16 else torch.float16)
    q = torch.randn(14, 2 * HEADS, dims[0], generator=torch.Generator().manual_seed(1)).half()
    turned, starts = torch.full_like(q, NAN), torch.tensor([0, 2, 2, 9], dtype=torch.int32)
    want = expected(
        batch, lambda x, position: turn(x, cos[min(position, 63)], sin[min(position, 63)], interleaved).half()
    )
    launch(
        batch, rotary_cos=cos, rotary_sin=sin, q=q, turned=turned, cu_seqlens_q=starts, interleaved=interleaved, follows=follows
    )  # fmt: skip
    assert torch.equal(bits(batch.v_cache), bits(want[1]))
    assert torch.equal(batch.k_cache.isnan(), want[0].isnan())
    torch.testing.assert_close(batch.k_cache, want[0], rtol=2**-10, atol=1e-6, equal_nan=True)
    for number in range(3):
        for i, row in enumerate(range(starts[number], starts[number + 1])):
            at = min(int(batch.used[number]) + (i if follows else 0), 63)
            exact = turn(q[row], cos[at], sin[at], interleaved)
            torch.testing.assert_close(turned[row].double(), exact, rtol=2**-10, atol=1e-6)
    assert turned[9:].isnan().all()  # rows of no sequence


# --- attention_kvcache with k and v ---------------------------------------------------------------------------------


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("packed", "narrow", "rotary"),
    [(False, False, False), (True, False, True), (False, True, True), (True, True, False)],
)
def test_attention_sees_what_was_appended(monkeypatch, packed: bool, narrow: bool, rotary: bool) -> None:
    """The same bits as an append by hand and a call without one; again with other tensors, where the call was met before."""
    from tilecast.kernels.serving import operator
    from tilecast.kernels.serving.calls import attention_kvcache

    monkeypatch.setattr(operator, "capability_of", lambda kind, device: (8, 0))
    cos, sin = tables(32)
    for turn_of in range(2):
        batch = make("paged", packed, narrow=narrow)
        batch.used[2] = 31 - turn_of
        # What is in the cache already.
        for number, keys in enumerate(batch.used.tolist()):
            for position in range(keys):
                for cache in (batch.k_cache, batch.v_cache):
                    draw = torch.randn(HEADS, 64, generator=torch.Generator().manual_seed(position + 99 * number))
                    cache[batch.place(number, position)] = (
                        draw.to(torch.float8_e4m3fn).view(torch.uint8) if narrow else draw.half()
                    )
        q = torch.randn(
            *((16,) if packed else (3, 3)), 2 * HEADS, 64, generator=torch.Generator().manual_seed(turn_of)
        ).half()
        starts = batch.lists["cu_seqlens_k_new"] if packed else None
        if packed:
            q[11:] = NAN
        factors = {"k_descale": torch.rand(3, HEADS) + 0.5, "v_descale": torch.tensor([0.75])} if narrow else {}
        settings = {
            "causal": True,
            "cu_seqlens_q": starts,
            "max_seqlen_q": 6 if packed else None,
            "return_lse": True,
            **factors,
        }
        caches = [x.clone() for x in (batch.k_cache, batch.v_cache)]
        by_hand = Batch(batch.k, batch.v, *caches, batch.used, batch.counts, batch.firsts, batch.lists)
        turned, more = torch.empty_like(q), {}
        if rotary:
            more = {
                "rotary_cos": cos,
                "rotary_sin": sin,
                "interleaved": False,
                "q": q,
                "turned": turned,
                "cu_seqlens_q": starts,
            }
        wide = {name: x.expand(3, HEADS) if x.numel() == 1 else x for name, x in factors.items()}
        lengths = launch(by_hand, "triton_append_e4m3" if narrow else "triton_append", **more, **wide)
        want, want_lse = attention_kvcache(
            turned if rotary else q, *caches, lengths, batch.lists["block_table"], **settings
        )
        got, lse = attention_kvcache(
            q, batch.k_cache.view(torch.float8_e4m3fn) if narrow else batch.k_cache,
            batch.v_cache.view(torch.float8_e4m3fn) if narrow else batch.v_cache, batch.used, batch.lists["block_table"], k=batch.k, v=batch.v,
            cu_seqlens_k_new=starts, rotary_cos=cos if rotary else None, rotary_sin=sin if rotary else None,
            rotary_interleaved=False, check=turn_of == 0, **settings,
        )  # fmt: skip
        rows = slice(0, 11) if packed else slice(None)
        assert not got[rows].isnan().any()
        assert torch.equal(got[rows], want[rows]) and torch.equal(lse[..., rows], want_lse[..., rows])
        assert torch.equal(bits(batch.k_cache), bits(caches[0])) and torch.equal(bits(batch.v_cache), bits(caches[1]))
        assert batch.used.tolist() == [0, 5, 31 - turn_of]


@pytest.mark.interpreted
def test_nothing_is_written_where_attention_refuses() -> None:
    from tilecast.kernels.errors import UnsupportedError
    from tilecast.kernels.serving.calls import attention_kvcache

    batch = make("paged", False)
    before = batch.k_cache.clone()
    with pytest.raises(UnsupportedError, match="expected tensors on a CUDA device"):
        attention_kvcache(
            torch.zeros(3, 3, HEADS, 64).half(), batch.k_cache, batch.v_cache, batch.used, batch.lists["block_table"],
            k=batch.k, v=batch.v,
        )  # fmt: skip
    assert torch.equal(bits(batch.k_cache), bits(before))


def test_numerics(tmp_path) -> None:
    ran = run_interpreted(__file__, tmp_path)
    assert sum(name.startswith("test_attention_sees") for name in ran) == 4, "all run in the interpreter"


# --- what can be written ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", ["newest", "3.6"])
def test_what_ships_compiles_without_spilling(release: str) -> None:
    from tests.support.shipped_compile import Case, Compiler, missing

    if why := missing(release):
        pytest.skip(why)
    compiler = Compiler(release)
    try:
        # A kernel is a second or two, importing Triton five; where the oldest release goes another way, it does on Hopper.
        targets = ("sm_80", "sm_90a", "sm_100a") if release == "newest" or is_whole() else ("sm_90a",)
        for kernel, target in product(read_append_list(), targets):
            outcome = compiler(Case(kernel.module, target, release))
            assert outcome.stack_bytes == 0 and outcome.registers <= 64 and not outcome.matrix
    finally:
        compiler.close()


def test_a_file_says_what_it_is() -> None:
    for kernel in read_append_list():
        path = KERNELS / "generated" / f"{kernel.module}.py"
        header = read_header(path.read_text(encoding="utf-8"), path)
        assert header["pass"] == "append" and header["family"] == kernel.family
        assert header_workload(header) == kernel.workload


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ("rows=3", "rows must be a power of two, got 3: use 4, 8 or 16"),
        ("rows=64", "a thread would hold 512 elements of 64 heads of 1024, more than 64"),
        ("cache_bits=4", "cache_bits must be 8 or 16, got 4: use 16"),
        ("warps=3", "knob 'warps' takes one of 1, 2, 4, 8, got '3'"),
        ("tile_m=3", "family append has no knob 'tile_m'"),
        ("family=fa4", "expected family append or triton_append, got 'fa4'"),
    ],
)
def test_refuses_what_cannot_be_written(knobs: str, said: str) -> None:
    with pytest.raises(VariantError, match=said):
        generate_append(Workload(), load_machine("a100"), parse_append(knobs, AppendVariant()))


def test_generate_writes_one(tmp_path, capsys) -> None:
    from tilecast.cli import main

    file = tmp_path / "append.py"
    with pytest.raises(SystemExit) as stop:
        main(["generate", "h200", "--pass", "append", "--seqlen", "64", "--variant", "cache_bits=8", "-o", str(file)])
    assert not stop.value.code
    assert "no forecast: kernels that append have none yet" in capsys.readouterr().out
    shipped = (KERNELS / "generated" / "triton_append_e4m3.py").read_text(encoding="utf-8")
    assert without_header(file.read_text(encoding="utf-8")) == without_header(shipped)  # one file for every shape


@pytest.mark.interpreted
def test_compiled_code_appends_too(monkeypatch) -> None:
    """The operator that writes survives functionalisation, and tells the truth about what it writes and returns."""
    from tilecast.kernels.serving import append, operator
    from tilecast.kernels.serving.calls import attention_kvcache

    monkeypatch.setattr(operator, "capability_of", lambda kind, device: (8, 0))
    batch, (cos, sin) = make("paged", False), tables(32)
    batch.k_cache.nan_to_num_(), batch.v_cache.nan_to_num_()
    q = torch.randn(3, 3, 2 * HEADS, 64, generator=torch.Generator().manual_seed(3)).half()

    def step(q, k_cache, v_cache, used, table, k, v):
        out = attention_kvcache(
            q * 1.0, k_cache, v_cache, used, table, k=k, v=v, rotary_cos=cos, rotary_sin=sin, causal=True
        )
        return out + 0.0

    lists = (batch.used, batch.lists["block_table"], batch.k, batch.v)
    caches = [(batch.k_cache.clone(), batch.v_cache.clone()) for _ in range(2)]
    want = step(q, *caches[0], *lists)
    torch._dynamo.reset()
    got = torch.compile(step, backend="aot_eager")(q, *caches[1], *lists)
    assert torch.equal(got, want)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*caches, strict=True))
    given = (q, batch.k, batch.v, *caches[0], None, None, *lists[:2], None, None, None, cos, sin, True, True)
    torch.library.opcheck(append._operator, given, test_utils=("test_schema", "test_faketensor"))
