"""Hopper's decoding kernel in the emulator against float64: pages, caches, packed keys, masks, groups, splits, merges of merges.

Whatever lies beyond a sequence's keys is NaN or infinite (`support.serving`), and every access to shared memory is checked.
"""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.whole import sampled

from tilecast.codegen.serving import generate_serving
from tilecast.emulator.any_kernel import emulated
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.variants.hopper.serving import (
    HopperRunsE4m3Variant,
    HopperRunsVariant,
    HopperServingE4m3Variant,
    HopperServingVariant,
)
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.serving import (
    HOPPER_RUNS,
    HOPPER_RUNS_E4M3,
    HOPPER_SERVING,
    HOPPER_SERVING_E4M3,
    parse_serving,
    writable,
)
from tilecast.model.step.batch import Batch
from tilecast.model.step.launches.variant import launched

torch = pytest.importorskip("torch")
pytest.importorskip("greenlet")

from support.serving import Made, Problem, emulated_kernels, error_of, heads, launch, make, outputs, parted  # noqa: E402

#: Small splits and rings, so that small problems have many: groups of 4 splits, and groups of groups.
SMALL = HopperServingVariant(
    kv_stages=2,
    split_keys=64,
    split_keys_of_many=128,
    many_heads=2,
    whole_keys=64,
    most_splits=16,
    merged=4,
    planned=32,
)
E4M3 = HopperServingE4m3Variant(
    tile_n=64,
    kv_stages=3,
    split_keys=64,
    split_keys_of_many=128,
    many_heads=2,
    whole_keys=64,
    most_splits=16,
    merged=4,
    planned=32,
)
#: Groups of two splits, and groups of two groups.
RUNS = HopperRunsVariant(
    kv_stages=2,
    split_keys=64,
    split_keys_of_many=128,
    many_heads=2,
    whole_keys=64,
    most_splits=16,
    merged=4,
    planned=32,
)
RUNS_WIDE = replace(RUNS, programs=1, dealt_stages=2)
RUNS_E4M3 = HopperRunsE4m3Variant(
    tile_n=64,
    kv_stages=2,
    dealt_stages=3,
    split_keys=64,
    split_keys_of_many=128,
    many_heads=2,
    whole_keys=64,
    most_splits=16,
    merged=4,
    planned=32,
)
NARROW = replace(SMALL, tile_n=32, split_keys=32, split_keys_of_many=32, kv_stages=3)
WIDE = replace(SMALL, tile_n=128, split_keys=128)
STEP = ((1, 5), (1, 70), (1, 130), (1, 0), (4, 33), (2, 64))
MANY = ((1, 700), (3, 450), (1, 64), (1, 65))
FEW = ((1, 300), (3, 250), (1, 65))


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return emulated_kernels(tmp_path_factory, "h200-sxm", "h200")


def stored(made: Made, number: int):
    """(q, k, v) of a sequence as memory holds them."""
    q, *rest = made.sequences[number]
    if made.k.dtype != torch.uint8:
        return q, *rest
    # Exact: float32 holds the products of numbers of four bits and factors of two.
    factors = [made.lists[name][number][None, :, None] for name in ("k_descale", "v_descale")]
    return q, *((x / f).to(torch.float8_e4m3fn).view(torch.uint8) for x, f in zip(rest, factors, strict=True))


PROBLEMS = [
    *[(SMALL, Problem(STEP, layout=layout)) for layout in ("packed", "cache", "paged")],
    *[(SMALL, Problem(MANY, page=page)) for page in (32, 64, 128, 256)],
    *[(variant, Problem(MANY, page=page)) for variant, page in ((NARROW, 16), (NARROW, 64), (WIDE, 16), (WIDE, 128), (WIDE, 256))],
    *[(SMALL, Problem(MANY, layout=layout)) for layout in ("packed", "cache")],
    *[(SMALL, Problem(STEP, dims=dims)) for dims in ((128, 128), (192, 128), (256, 256))],
    (replace(SMALL, tile_n=32, split_keys=32, kv_stages=3, merged=16), Problem(MANY, dims=(256, 256), page=64)),
    *[(SMALL, Problem(MANY[:2], heads=heads, page=64)) for heads in ((2, 2), (16, 2), (3, 1))],
    *[(SMALL, Problem(MANY, window=window, page=64)) for window in ((-1, -1), (100, 0), (13, 7), (0, 0), (-1, 3))],
    (SMALL, Problem(STEP, softcap=2.0, sinks=True)),
    (SMALL, Problem(MANY, sinks=True, page=64)),
    (SMALL, Problem(((4, 5), (4, 190), (4, 0)), packed_q=False, layout="cache")),
    # As many rows as a tile has, and more than one tile, which is not split.
    (SMALL, Problem(((16, 200), (17, 200), (40, 300)), page=64)),
    # More sequences than a program plans at a time; the last of them are split.
    (SMALL, Problem(((1, 3),) * 34 + ((1, 190),) * 3, heads=(1, 1), packed_q=False, page=64)),
    (SMALL, Problem(MANY, dtype="bfloat16", page=64)),
    # Bytes of e4m3, NaN (0x7f) beyond a sequence's keys; factors of each sequence and head.
    *[(E4M3, Problem(STEP, layout=layout, dtype=dtype, narrow=True))
      for layout, dtype in (("packed", "float16"), ("cache", "bfloat16"), ("paged", "bfloat16"))],
    *[(E4M3, Problem(FEW, dims=dims, page=page, dtype="bfloat16", narrow=True))
      for dims, page in (((128, 128), 32), ((128, 128), 256), ((192, 128), 64))],
    (E4M3, Problem(FEW, dims=(128, 128), heads=(16, 2), page=64, sinks=True, softcap=2.0, narrow=True)),
    (E4M3, Problem(FEW, dims=(128, 128), window=(100, 0), page=64, dtype="bfloat16", narrow=True)),
    (E4M3, Problem(((16, 200), (17, 200), (40, 300)), page=64, narrow=True)),
    (replace(E4M3, tile_n=128, split_keys=128), Problem(FEW, page=16, narrow=True)),
    *[(replace(E4M3, tile_n=128, split_keys=128, kv_stages=2), Problem(FEW, dims=(128, 128), page=page, dtype="bfloat16", narrow=True))
      for page in (16, 256)],
    # Each warp for itself, in runs of splits: every layout; as many splits as programs or more, so that programs take in one, a group or all.
    *[(RUNS, Problem(STEP, layout=layout)) for layout in ("packed", "cache", "paged")],
    *[(RUNS, Problem(MANY, page=page, dtype=dtype)) for page, dtype in ((16, "float16"), (64, "bfloat16"), (256, "float16"))],
    *[(RUNS, Problem(STEP, dims=dims)) for dims in ((128, 128), (192, 128))],
    # O of each warp in all registers: Q is read in each block, a program to an SM; items of their own, and in turns.
    *[(RUNS_WIDE, Problem(STEP, dims=(256, 256), layout=layout, dtype="bfloat16")) for layout in ("packed", "paged")],
    (RUNS_WIDE, Problem(((1, 300), (1, 40), (1, 0)), dims=(256, 256), heads=(2, 2), packed_q=False, sinks=True)),
    (RUNS_WIDE, Problem(((4, 200), (5, 200), (9, 300)), dims=(256, 256), page=64)),
    *sampled([(RUNS, Problem(FEW, window=window, page=64)) for window in ((-1, -1), (100, 0), (13, 7), (0, 0), (-1, 3))]
             + [(RUNS, Problem(((1, 300), (1, 40), (1, 0)), heads=heads, packed_q=False)) for heads in ((2, 2), (16, 2), (3, 1))]),
    (RUNS, Problem(((1, 600),) * 5, packed_q=False, page=64)),
    (RUNS, Problem(((1, 190),) * 37, heads=(1, 1), packed_q=False)),
    (RUNS, Problem(FEW, sinks=True, softcap=2.0, page=64)),
    (RUNS, Problem(((4, 200), (5, 200), (9, 300)), page=64)),
    (replace(RUNS, tile_n=128, split_keys=128, kv_stages=3, programs=1), Problem(FEW, page=16)),
    # The same from bytes of e4m3.
    *[(RUNS_E4M3, Problem(STEP, layout=layout, dtype=dtype, narrow=True))
      for layout, dtype in (("packed", "float16"), ("cache", "bfloat16"), ("paged", "bfloat16"))],
    *[(RUNS_E4M3, Problem(FEW, dims=dims, page=page, dtype="bfloat16", narrow=True)) for dims, page in (((128, 128), 32), ((192, 128), 64))],
    (RUNS_E4M3, Problem(FEW, dims=(128, 128), heads=(16, 2), page=64, sinks=True, softcap=2.0, narrow=True)),
    (RUNS_E4M3, Problem(FEW, window=(100, 0), page=64, dtype="bfloat16", narrow=True)),
    (RUNS_E4M3, Problem(((1, 600),) * 5, packed_q=False, page=64, narrow=True)),
    (replace(RUNS_E4M3, tile_n=128, split_keys=128, programs=1), Problem(((4, 200), (5, 200), (9, 300)), page=16, narrow=True)),
    # Items of more blocks than any ring has slots.
    (replace(E4M3, whole_keys=2048), Problem(((1, 700), (1, 40)), page=64, narrow=True)),
]  # fmt: skip


@pytest.mark.parametrize(("variant", "problem"), PROBLEMS, ids=lambda value: "")
def test_is_attention(variant, problem, kernel) -> None:
    made, out, lse = launch(kernel(variant, problem.dims), problem)
    assert error_of(problem, made, out, lse) <= 1.0


@pytest.mark.parametrize(
    ("variant", "columns", "problem"),
    [
        (SMALL, 64, Problem(STEP, dims=(40, 40))),
        (SMALL, 64, Problem(STEP[:3], dims=(48, 24), layout="packed")),
        (SMALL, 256, Problem(STEP, dims=(160, 160))),
        (RUNS, 64, Problem(STEP, dims=(56, 56), page=64)),
        (RUNS, 64, Problem(STEP[:3], dims=(8, 64), layout="cache")),
        (RUNS_WIDE, 256, Problem(STEP, dims=(136, 200))),
    ],
)
def test_heads_of_fewer_columns_than_the_kernel(variant, columns, problem, kernel) -> None:
    made, out, lse = launch(kernel(variant, (columns, columns)), problem)
    assert error_of(problem, made, out, lse) <= 1.0


@pytest.mark.parametrize("dims", [(72, 72), (44, 44), (60, 64)])
def test_heads_that_no_kernel_takes_are_refused(dims, kernel) -> None:
    with pytest.raises(ValueError, match="head_dim of at most 64, a multiple of 8"):
        launch(kernel(SMALL, (64, 64)), Problem(STEP[:1], dims=dims))


def test_results_have_the_columns_of_v(kernel) -> None:
    made = make(Problem(STEP[:1]))
    made = replace(made, v=made.v[..., :32])
    with pytest.raises(ValueError, match="the same of q and k and of v and out"):
        launch(kernel(SMALL, (64, 64)), Problem(STEP[:1]), made)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("variant", [SMALL, E4M3, RUNS, RUNS_E4M3], ids=["16 bits", "e4m3", "runs", "runs e4m3"])
def test_is_attention_whatever_goes_first(variant, seed, kernel) -> None:
    problem = Problem(FEW, narrow=variant.family.endswith("e4m3"))
    made, out, lse = launch(kernel(variant, problem.dims, "random", seed), problem)
    assert error_of(problem, made, out, lse) <= 1.0


@pytest.mark.parametrize("variant", [SMALL, E4M3, RUNS, RUNS_E4M3], ids=["16 bits", "e4m3", "runs", "runs e4m3"])
def test_a_sequence_gets_the_same_bits_alone_and_counters_are_left_at_zero(variant, kernel) -> None:
    together = Problem(MANY, page=64, narrow=variant.family.endswith("e4m3"))
    module = kernel(variant, together.dims)
    made, out, lse = launch(module, together)
    for number, (got, sums) in enumerate(parted(together, out, lse)):
        q, k, v = stored(made, number)
        alone = Problem((MANY[number],), page=64, narrow=together.narrow)
        single = make(alone)
        single.lists |= {name: made.lists[name][number : number + 1] for name in made.lists if name.endswith("descale")}
        assert module.scratch(1, 1, 4, MANY[number][0], MANY[number][1], 3)[1] >= 1
        pages = -(-MANY[number][1] // 64)
        for pool, own in ((single.k, k), (single.v, v)):
            for page in range(pages):
                rows = own[page * 64 : page * 64 + 64]
                pool[int(single.lists["block_table"][0, page]), : len(rows)] = rows
        single.q.copy_(q)
        work_memory = [
            torch.zeros(n, dtype=kind)
            for n, kind in zip(module.scratch(1, 1, 4, *MANY[number], 7), (torch.float32, torch.int32), strict=True)
        ]
        single.lists["work"] = work_memory
        _, other, other_lse = launch(module, alone, single, sms=7)
        assert torch.equal(other, got)
        assert torch.equal(other_lse, sums)
        assert not work_memory[1].any()


@pytest.mark.parametrize("variant", [RUNS, RUNS_E4M3], ids=["16 bits", "e4m3"])
def test_runs_of_splits_change_no_bit(variant, kernel) -> None:
    """The same sequences with fewer and fewer SMs: programs take in one split, a group of them, or all, and merge what there is left."""
    problem = Problem(((1, 900), (1, 130), (1, 515), (1, 2)), page=64, packed_q=False, narrow=variant is RUNS_E4M3)
    module = kernel(variant, problem.dims)
    results = [launch(module, problem, sms=sms)[1:] for sms in (60, 20, 7, 3, 1)]
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.parametrize("mode", [("late",), ("random", 3)], ids=str)
@pytest.mark.parametrize("lengths", [((1, 330), (1, 330)), ((1, 40), (1, 330))], ids=["alike", "one long"])
def test_runs_with_a_program_of_their_own_change_no_bit(lengths, mode, kernel, monkeypatch) -> None:
    problem, variant = (
        Problem(lengths, heads=(8, 8), dims=(128, 128), page=64, packed_q=False),
        replace(RUNS, merged=16),
    )
    module, found, levels = kernel(variant, problem.dims, *mode), [], []
    plan = module.plan

    def planned(*given, **options):
        made = plan(*given, **options)
        levels.append(made[2][4])
        return made

    monkeypatch.setattr(module, "plan", planned)
    for sms in (9, 9, 1):
        made = make(problem)
        sizes = module.scratch(len(lengths), 8, 1, 1, 330, sms)
        work = [torch.zeros(n, dtype=kind) for n, kind in zip(sizes, (torch.float32, torch.int32), strict=True)]
        made.lists["work"] = work
        _, out, lse = launch(module, problem, made, sms)
        assert error_of(problem, made, out, lse) <= 1.0
        assert not work[1].any()
        found.append((out, lse))
    assert levels == [2, 2, 0]
    assert all(torch.equal(one, other) for made in found[1:] for one, other in zip(found[0], made, strict=True))
    model = Workload(heads_q=8, heads_kv=8, seqlen_q=1, seqlen_k=330, head_dim_qk=128, mask="causal")
    dealt = [launched(variant, Batch(lengths, model, 64), sms) for sms in (9, 1)]
    assert [(one.direct, one.own_run) for one in dealt] == [(True, 4), (False, 1)]


@pytest.mark.parametrize(
    ("batch", "heads_kv", "keys", "dim", "own"),
    [(8, 8, 8192, 128, 4), (8, 32, 2048, 128, 4), (8, 8, 8192, 64, 1), (128, 1, 4096, 128, 1), (8, 32, 8192, 128, 1), (5, 8, 8192, 128, 1), (4, 8, 8192, 128, 1)],
)  # fmt: skip
def test_runs_have_a_program_of_their_own_as_timed(batch, heads_kv, keys, dim, own) -> None:
    """So many heads of 128 columns, so few bytes, and nearly all places: elsewhere a split has one or none."""
    chip = load_machine("h200-sxm")
    model = Workload(heads_q=heads_kv, heads_kv=heads_kv, seqlen_q=1, seqlen_k=keys, head_dim_qk=dim, mask="causal")
    dealt = launched(HOPPER_RUNS.chosen(model, chip), Batch(((1, keys),) * batch, model, 64), 132)
    assert dealt.own_run == own


#: Decodes beside chunks of more rows than they have, of which some do not fit a tile of the other launch.
MIXED = (
    ((1, 700), (1, 500), (1, 3), (3, 450), (120, 600)),
    (*(((1, 300),) * 40), (40, 900), (33, 70)),
    ((1, 700), (1, 64)),
)


@pytest.mark.parametrize("lengths", MIXED, ids=["one chunk", "more sequences than are planned at a time", "no chunk"])
def test_decodes_that_leave_sms_to_a_chunk_get_the_same_bits(lengths, kernel, monkeypatch) -> None:
    problem = Problem(lengths, page=64)
    module, made = kernel(replace(RUNS, beside_stages=5), problem.dims), make(problem)
    most = max(q for q, _ in lengths), max(k for _, k in lengths)
    expected = launch(module, problem, made, rows=(0, 16), sms=12)[1:]
    plan = module.plan
    monkeypatch.setattr(module, "plan", lambda *given: plan(*given, beside=1))
    for sms in (2, 5, 12):
        sizes = module.scratch(len(lengths), problem.heads[1], problem.heads[0] // problem.heads[1], *most, sms)
        work = [torch.zeros(n, dtype=kind) for n, kind in zip(sizes, (torch.float32, torch.int32), strict=True)]
        _, *found = launch(module, problem, made, rows=(0, 16), sms=sms, work=work)
        assert all(
            torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)) for one, other in zip(found, expected, strict=True)
        )
        assert not work[1].any()


def test_rows_of_half_a_tile_and_the_others_get_the_bits_of_one_launch(kernel, monkeypatch) -> None:
    """As beside a chunk: one launch for sequences of up to 8 rows, which lets the next begin, and one for those of more, which begins early."""
    lengths = MIXED[0]
    problem = Problem(lengths, page=64)
    group = problem.heads[0] // problem.heads[1]
    assert {q * group > 8 for q, _ in lengths if q * group <= 16} == {False, True}
    module, made = kernel(replace(RUNS, beside_stages=5), problem.dims), make(problem)
    out, lse = launch(module, problem, made, rows=(0, 16), sms=12)[1:]
    plan, flags, written = module.plan, [], torch.zeros_like(out, dtype=torch.bool)
    for rows, beside in (((1, module.HALF_ROWS), 1), ((module.HALF_ROWS + 1, 16), 2)):

        def planned(*given, beside=beside):
            made_plan = plan(*given, beside=beside)
            flags.append(made_plan[2])
            return made_plan

        monkeypatch.setattr(module, "plan", planned)
        _, found, found_lse = launch(module, problem, made, rows=rows, sms=12)
        there = ~found.isnan()
        assert there.any() and not (there & written).any()
        assert torch.equal(found[there], out[there])
        written |= there
        there = ~found_lse.isnan()
        assert torch.equal(found_lse[there], lse[there])
    assert torch.equal(written, ~out.isnan())
    assert [one[5:] for one in flags] == [(8, 1), (16, 2)]


_ASKED = """

@gluon.jit
def asked(found, cu_q, used_k, count, heads_kv, group, seqlen_q, seqlen_k, split_bits, split_log2, left, right, sms, PLANNED: gl.constexpr):
    batch = Batch(cu_q, None, used_k, None, None, 0, count, heads_kv, group, seqlen_q, seqlen_k, split_bits, split_log2, left, right, 1, 16, sms)
    gl.store(found, programs_of(batch, PLANNED))
"""


@pytest.fixture(scope="module")
def asking(tmp_path_factory):
    """The kernel that ships for head_dim 128, and one more that says how many programs would take items."""
    source = Path(__file__).parents[4] / "kernels" / "generated" / "hopper_serve_d128_runs.py"
    path = tmp_path_factory.mktemp("asking") / "asking.py"
    path.write_text(source.read_text() + _ASKED)
    return emulated(str(path), machine="h200")


@given(
    decodes=st.lists(st.integers(1, 40_000), max_size=40),
    chunks=st.lists(st.tuples(st.integers(17, 3000), st.integers(0, 60_000)), max_size=3),
    sms=st.sampled_from([132, 114, 78, 3, 1]),
    heads_kv=st.sampled_from([1, 8]),
    causal=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_the_model_knows_how_many_programs_decode_beside_a_chunk(
    asking, decodes, chunks, sms, heads_kv, causal
) -> None:
    lengths = [*((1, keys) for keys in decodes), *((queries, queries + keys) for queries, keys in chunks)] or [(1, 1)]
    model = Workload(
        heads_q=4 * heads_kv,
        heads_kv=heads_kv,
        seqlen_q=1,
        seqlen_k=1,
        head_dim_qk=128,
        mask="causal" if causal else "none",
    )
    batch, chip = Batch(tuple(lengths), model, 64), load_machine("h200-sxm")
    dealt = launched(HOPPER_RUNS.chosen(replace(model, seqlen_k=4096), chip), batch, sms)
    module = asking
    starts = torch.tensor([0, *itertools.accumulate(q for q, _ in lengths)], dtype=torch.int32)
    used, found = torch.tensor([k for _, k in lengths], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    limit, keys = (getattr(module, name)(heads_kv).bit_length() - 1 for name in ("_split_limit", "_split_keys"))
    longest = [max(pair[i] for pair in lengths) for i in (0, 1)]
    far = module.FAR.value
    module.asked[(1,)](
        found, starts, used, len(lengths), heads_kv, 4, *longest, limit, keys, far, 0 if causal else far, sms, 32, num_warps=1
    )  # fmt: skip
    assert abs(int(found) - (dealt.some or sms)) <= 2  # a float32 may take the neighbour of a float64's choice


@pytest.mark.parametrize(
    ("family", "dims"),
    [
        *[(family, (d, d)) for family in (HOPPER_SERVING, HOPPER_RUNS) for d in (64, 128, 256)],
        *[(family, (d, d)) for family in (HOPPER_SERVING_E4M3, HOPPER_RUNS_E4M3) for d in (64, 128)],
    ]
    + [(family, (192, 128)) for family in (HOPPER_SERVING, HOPPER_SERVING_E4M3, HOPPER_RUNS, HOPPER_RUNS_E4M3)],
)
def test_the_chosen_variant_can_be_written_and_round_trips(family, dims) -> None:
    chip, workload = load_machine("h200-sxm"), heads(dims, heads_q=32, heads_kv=8, seqlen_q=1, seqlen_k=4096)
    chosen = family.chosen(workload, chip)
    assert writable(chosen, workload, chip).legal
    assert parse_serving(variant_text(chosen), family.variant()) == chosen
    assert all(writable(variant, workload, chip).legal for variant in family.space(workload, chip))


@pytest.mark.parametrize(
    ("dims", "machine", "knobs", "said"),
    [
        ((96, 96), "h200-sxm", "", "head_dim_qk must be a multiple of 64 up to 256"),
        ((128, 128), "b200", "", "has no wgmma"),
        ((128, 128), "h200-sxm", "kv_stages=8", "shared memory needs"),
        ((128, 128), "h200-sxm", "tile_n=16", "tile_n must be 32, 64 or 128, got 16"),
        ((128, 128), "h200-sxm", "split_keys=500", "split_keys must be a power of two and a multiple of tile_n 64"),
        ((128, 128), "h200-sxm", "merged=8", "most_splits must be at most 64"),
        ((128, 128), "h200-sxm", "family=serving", "expected knobs of family serving-hopper, got family 'serving'"),
        ((128, 128), "h200-sxm", "warps=8", "no knob 'warps'"),
        ((128, 128), "h200-sxm", "e4m3,kv_stages=9", "shared memory needs"),
        ((64, 64), "h200-sxm", "e4m3,cache_bits=16", "cache_bits must be 8, got 16: use family serving-hopper"),
        ((64, 256), "h200-sxm", "e4m3,kv_stages=1", "head_dim_v needs 256 columns"),
        ((64, 64), "h200-sxm", "e4m3,tile_n=32", "tile_n must be 64 or 128 for family serving-hopper-e4m3"),
        ((64, 64), "b200", "e4m3", "has no wgmma, which family serving-hopper-e4m3 multiplies with"),
        ((128, 128), "h200-sxm", "runs,kv_stages=4", "shared memory needs"),
        ((64, 64), "h200-sxm", "runs,tile_n=32", "tile_n must be 64 or 128 for family serving-hopper-runs"),
        (
            (64, 64),
            "h200-sxm",
            "runs,merged=8,most_splits=64",
            "merged must be 4 or 16 for family serving-hopper-runs, got 8",
        ),
        ((64, 256), "h200-sxm", "runs,kv_stages=1,programs=2", "programs must be 1 for head_dim_v 256, got 2"),
    ],
)
def test_refuses_what_cannot_be_written(dims, machine, knobs, said) -> None:
    bases = {"e4m3": HopperServingE4m3Variant(), "runs": HopperRunsVariant()}
    base = bases.get(knobs[:4], HopperServingVariant())
    with pytest.raises(VariantError, match=said):
        generate_serving(
            heads(dims), load_machine(machine), parse_serving(knobs[4:] if knobs[:4] in bases else knobs, base)
        )


@pytest.mark.parametrize("made", ["no keys", "heads that are one", "last stride"])
def test_refuses_what_the_copy_engine_does_not_take(made, kernel) -> None:
    problem = Problem(((1, 40),), heads=(4, 2))
    module, given = kernel(SMALL, problem.dims), make(problem)
    if made == "no keys":
        given.k = given.k[:0]
    elif made == "heads that are one":
        given.k = given.k[:, :, :1].expand(-1, -1, 2, -1)
    else:
        given.k = given.k.transpose(1, 3).contiguous().transpose(1, 3)
    with pytest.raises(ValueError, match=r"^k: expected "):
        launch(module, problem, given)


def test_generate_writes_one(tmp_path, capsys) -> None:
    from tilecast.cli import main

    file = tmp_path / "decode.py"
    with pytest.raises(SystemExit) as stop:
        main(
            [
                "generate",
                "h200",
                "--pass",
                "serve",
                "--family",
                "hopper_serving",
                "--seqlen",
                "1",
                "--head-dim",
                "64",
                "-o",
                str(file),
            ]
        )
    assert not stop.value.code
    assert "targets   sm_90a" in capsys.readouterr().out
    spec = importlib.util.spec_from_file_location("decode", file)
    assert spec is not None and "def load_role" in file.read_text()


def test_the_operators_launcher_gives_descriptors_their_tensors(kernel) -> None:
    from tilecast.kernels.scratch import Counters
    from tilecast.kernels.serving.launching import Launcher

    problem = Problem(((2, 130), (2, 40)), packed_q=False, page=32)
    made, device = make(problem), torch.device("cpu")
    launcher = Launcher(kernel(SMALL, problem.dims), (1, 64), device, Counters(device))
    names = (
        "cu_seqlens_q",
        "cu_seqlens_k",
        "seqused_k",
        "block_table",
        "cache_batch_idx",
        "sinks",
        "k_descale",
        "v_descale",
    )
    lists = tuple(made.lists.get(name) for name in names)
    settings = (problem.factor, 0.0, 2, 130, (-1, 0))
    out, lse = outputs(made, problem)
    launcher(made.q, made.k, made.v, out, lse, lists, *settings)
    assert error_of(problem, made, out, lse) <= 1.0
    again = launcher.started((made.q, made.k, made.v, out, lse, *lists), *settings)
    other, other_lse = outputs(made, problem)
    again(made.q.clone(), made.k.clone(), made.v.clone(), other, other_lse, lists)
    assert torch.equal(other, out)
    assert torch.equal(other_lse, lse)
