"""Hopper's prefill kernel in the emulator against float64: pages, caches, packed keys, masks, groups, tiles of several warpgroups.

Whatever lies beyond a sequence's keys is NaN or infinite (`support.serving`), and every access to shared memory is checked.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tilecast.codegen.serving import generate_serving
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.variants.hopper.prefill import HopperPrefillVariant
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.machine.machine import load_machine
from tilecast.model.serving import HOPPER_PREFILL, parse_serving, writable

torch = pytest.importorskip("torch")
pytest.importorskip("greenlet")

from support.serving import Problem, emulated_kernels, error_of, heads, launch, make, outputs, parted  # noqa: E402

TWO = HopperPrefillVariant(kv_stages=2)
NARROW = replace(TWO, tile_n=32, kv_stages=3)
WIDE = replace(TWO, tile_n=128)
THREE = replace(TWO, warpgroups=3, planned=32)
ONE = replace(TWO, warpgroups=1, kv_stages=1)
ONE_WIDE = replace(TWO, warpgroups=1)
#: (queries, keys): two tiles and a bit, a decode that is others' business, more queries than keys, no keys, keys that end a block.
CHUNKS = ((70, 200), (1, 90), (40, 33), (20, 0), (33, 128))


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return emulated_kernels(tmp_path_factory, "h200-sxm", "h200")


PROBLEMS = [
    *[(TWO, Problem(CHUNKS, layout=layout)) for layout in ("packed", "cache", "paged")],
    *[(variant, Problem(CHUNKS, page=page)) for variant, page in ((TWO, 64), (TWO, 256), (NARROW, 16), (WIDE, 32))],
    *[(TWO, Problem(CHUNKS[:3], dims=dims, page=32)) for dims in ((128, 128), (192, 128), (256, 256))],
    *[(TWO, Problem(((150, 300), (64, 64)), heads=heads, page=64)) for heads in ((2, 2), (3, 1), (14, 2))],
    *[(TWO, Problem(((130, 300), (33, 90)), window=window, page=64)) for window in ((-1, -1), (100, 0), (13, 7), (0, 0), (-1, 3))],
    (THREE, Problem(((130, 300), (33, 90)), heads=(2, 1), window=(50, 0))),
    (ONE, Problem(CHUNKS)),
    *[(ONE_WIDE, Problem(((11, 300), (16, 200), (5, 0)), dims=(256, 256), page=page)) for page in (16, 64)],
    (TWO, Problem(CHUNKS, softcap=2.0, sinks=True)),
    (TWO, Problem(((4, 5), (4, 190), (4, 0)), packed_q=False, layout="cache")),
    # More sequences than a program plans at a time.
    (THREE, Problem(((1, 3),) * 31 + ((30, 90),) * 2, heads=(1, 1), page=64)),
    (TWO, Problem(CHUNKS, dtype="bfloat16", page=64)),
]  # fmt: skip


@pytest.mark.parametrize(("variant", "problem"), PROBLEMS, ids=lambda value: "")
def test_is_attention(variant, problem, kernel) -> None:
    made, out, lse = launch(kernel(variant, problem.dims), problem)
    assert error_of(problem, made, out, lse) <= 1.0


@pytest.mark.parametrize("dims", [(40, 40), (64, 32)], ids=str)
def test_heads_of_fewer_columns_than_the_kernel(dims, kernel) -> None:
    problem = Problem(((70, 150), (1, 40)), dims=dims, page=32)
    made, out, lse = launch(kernel(TWO, (64, 64)), problem)
    assert error_of(problem, made, out, lse) <= 1.0


def test_is_attention_whatever_goes_first(kernel) -> None:
    problem = Problem(CHUNKS)
    made, out, lse = launch(kernel(TWO, problem.dims, "random"), problem)
    assert error_of(problem, made, out, lse) <= 1.0


def test_rows_that_outgrow_their_reference_and_factors_of_a_cache(kernel) -> None:
    problem = Problem(((40, 300),), scale=8.0)
    module, made = kernel(TWO, problem.dims), make(problem)
    assert error_of(problem, *launch(module, problem, made)) <= 1.0
    factors = {f"{name}_descale": torch.full((1, 1), value) for name, value in (("k", 0.5), ("v", 2.0))}
    _, out, lse = launch(module, problem, made, **factors)
    _, plain, plain_lse = launch(module, replace(problem, scale=4.0), made)
    assert torch.allclose(lse, plain_lse, rtol=1e-5)
    assert torch.allclose(out, plain * 2, rtol=1e-2, atol=1e-2)


def test_a_sequence_gets_the_same_bits_alone_others_rows_stay_and_counters_are_left_at_zero(kernel) -> None:
    together = Problem(CHUNKS, page=64)
    module = kernel(TWO, together.dims)
    made, out, lse = launch(module, together)
    for number, (queries, keys) in enumerate(CHUNKS):
        alone = Problem(((queries, keys),), page=64)
        single, (q, k, v) = make(alone), made.sequences[number]
        for pool, own in ((single.k, k), (single.v, v)):
            for page in range(-(-keys // 64)):
                rows = own[page * 64 : page * 64 + 64]
                pool[int(single.lists["block_table"][0, page]), : len(rows)] = rows
        single.q.copy_(q)
        memory = [
            torch.zeros(n, dtype=kind)
            for n, kind in zip(module.scratch(1, 1, 4, queries, keys, 7), (torch.float32, torch.int32), strict=True)
        ]
        _, other, other_lse = launch(module, alone, single, sms=7, work=memory)
        got, sums = list(parted(together, out, lse))[number]
        assert torch.equal(other, got)
        assert torch.equal(other_lse, sums)
        assert not memory[1].any()
    some = make(together)
    few, few_lse = outputs(some, together)
    few.fill_(7.0)
    module.launch(some.q, some.k, some.v, few, few_lse, together.factor, max_seqlen_q=70, max_seqlen_k=200, window=(-1, 0), sms=3,
                  rows=(65, 1 << 29), **some.lists)  # fmt: skip
    rows = [got for got, _ in parted(together, few, few_lse)]
    whole = [got for got, _ in parted(together, out, lse)]
    for number, (queries, _) in enumerate(CHUNKS):
        want = whole[number] if queries * 4 >= 65 else torch.full_like(whole[number], 7.0)
        assert torch.equal(rows[number], want)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_the_chosen_variant_can_be_written_and_round_trips(dims) -> None:
    chip, workload = load_machine("h200-sxm"), heads(dims, heads_q=32, heads_kv=8, seqlen_q=512, seqlen_k=4096)
    chosen = HOPPER_PREFILL.chosen(workload, chip)
    assert writable(chosen, workload, chip).legal
    assert parse_serving(variant_text(chosen), HOPPER_PREFILL.variant()) == chosen
    assert all(writable(variant, workload, chip).legal for variant in HOPPER_PREFILL.space(workload, chip))


@pytest.mark.parametrize(
    ("dims", "machine", "knobs", "said"),
    [
        ((96, 96), "h200-sxm", "", "head_dim_qk must be 64, 128, 192 or 256, got 96"),
        ((128, 128), "b200", "", "has no wgmma"),
        ((128, 128), "h200-sxm", "kv_stages=5", "shared memory needs"),
        ((128, 128), "h200-sxm", "tile_n=16", "tile_n must be 32, 64 or 128, got 16"),
        (
            (128, 128),
            "h200-sxm",
            "warpgroups=3,kv_stages=2",
            "head_dim_v and tile_n together must be at most 128 with 3",
        ),
        ((64, 64), "h200-sxm", "warpgroups=4", "warpgroups must be 1, 2 or 3, got 4"),
        ((128, 128), "h200-sxm", "planned=100", "planned must be 32, 64, 128 or 256"),
        ((128, 128), "h200-sxm", "split_keys=512", "no knob 'split_keys'"),
    ],
)
def test_refuses_what_cannot_be_written(dims, machine, knobs, said) -> None:
    with pytest.raises(VariantError, match=said):
        generate_serving(heads(dims), load_machine(machine), parse_serving(knobs, HopperPrefillVariant()))


def test_refuses_more_heads_to_a_key_head_than_rows_are_dealt_with(kernel) -> None:
    problem = Problem(((1, 3),), heads=(513, 1))
    with pytest.raises(ValueError, match="heads of q a multiple of k's, at most 512 times, got"):
        launch(kernel(TWO, problem.dims), problem)


PARTED = replace(TWO, part_keys=64)
#: (queries, keys) whose keys are parted: several tiles with their own last blocks, one with few rows, fewer keys than a part, none.
LONG = ((40, 700), (4, 420), (20, 90), (5, 0))


def room(module, problem: Problem, sms: int):
    """Memory of a launch, and how parts are taken in there."""
    tokens = sum(queries for queries, _ in problem.lengths)
    most = [max(pair[i] for pair in problem.lengths) for i in (0, 1)]
    given = (
        len(problem.lengths),
        problem.heads[1],
        problem.heads[0] // problem.heads[1],
        *most,
        sms,
        tokens,
        1,
        problem.window[0],
    )
    sizes = module.scratch(*given)
    return [
        torch.zeros(n, dtype=kind) for n, kind in zip(sizes, (torch.float32, torch.int32), strict=True)
    ], module._dealing(*given)[0]


@pytest.mark.parametrize(
    "problem",
    [
        Problem(LONG, page=64),
        Problem(LONG[:2], heads=(2, 2), layout="packed", window=(300, 0), sinks=True),
        Problem(((150, 400),), heads=(1, 1), layout="cache", window=(-1, -1), dims=(128, 128)),
        Problem(((50, 330),), heads=(2, 1), window=(220, 9), page=32, softcap=3.0),
        Problem(((50, 260),), heads=(2, 1), page=64, dims=(256, 256)),
    ],
    ids=["paged", "window", "full", "capped", "wide"],
)
def test_keys_are_parted_with_the_same_bits_in_one_program_and_in_several(problem, kernel) -> None:
    module = kernel(PARTED, problem.dims)
    made, found = make(problem), {}
    for sms in (1, 40):
        memory, how = room(module, problem, sms)
        memory[0].fill_(float("nan"))
        _, out, lse = launch(module, problem, made, sms=sms, work=memory)
        assert error_of(problem, made, out, lse) <= 1.0
        assert not memory[1].any()
        found[how] = out, lse
    one = 3 if len(problem.lengths) > 1 else 1
    assert sorted(found) == sorted((one, 2))
    assert torch.equal(found[one][0], found[2][0])
    assert torch.equal(found[one][1], found[2][1])


def test_one_warpgroup_at_256_columns_parts_keys_with_the_same_bits(kernel) -> None:
    problem = Problem(((12, 700), (16, 90)), dims=(256, 256), page=64)
    module, made = kernel(replace(ONE_WIDE, part_keys=64), problem.dims), make(problem)
    found = []
    for sms in (1, 3, 40):
        memory, _ = room(module, problem, sms)
        memory[0].fill_(float("nan"))
        _, out, lse = launch(module, problem, made, sms=sms, work=memory)
        assert error_of(problem, made, out, lse) <= 1.0
        assert not memory[1].any()
        found.append((out, lse))
    assert all(torch.equal(found[0][i], other[i]) for other in found[1:] for i in (0, 1))


@pytest.mark.parametrize("dims", [(64, 64), (256, 256)], ids=str)
def test_parts_of_a_far_longer_tile_than_others_are_dealt_out_with_the_same_bits(dims, kernel) -> None:
    """Of three programs; one alone takes in all parts one after the other, and of 40 each has one."""
    problem, found = Problem(((30, 700), (20, 90), (25, 70)), heads=(2, 1), dims=dims, page=64), []
    module, made = kernel(PARTED, dims), make(problem)
    for sms, expected in ((1, 3), (3, 3), (40, 2)):
        memory, how = room(module, problem, sms)
        assert how == expected
        memory[0].fill_(float("nan"))
        _, out, lse = launch(module, problem, made, sms=sms, work=memory)
        assert error_of(problem, made, out, lse) <= 1.0
        assert not memory[1].any()
        # Who leaves something: of two warpgroups the one that has rows, of 11 parts of the long tile, and of two of each other; and where what a
        # tile has so far does not stay in registers, that of a program in two places.
        left = int((~memory[0].view(-1, module.UNIT.value)[:, 0].isnan()).sum())
        found.append((out, lse, left))
    assert all(torch.equal(found[0][i], other[i]) for other in found[1:] for i in (0, 1))
    assert [left for _, _, left in found] == ([2, 13, 15] if dims[1] > 192 else [0, 11, 15])


@pytest.mark.parametrize("beside", [1, 2, 3])
@pytest.mark.parametrize("lengths", [((30, 700), (20, 90), (25, 70)), ((2, 400),)], ids=["some", "less than programs"])
def test_programs_that_begin_beside_another_launch_take_every_tile_once(lengths, beside, kernel, monkeypatch) -> None:
    """None has a tile of its own that would wait for it, and who comes when they have run out goes at once."""
    problem = Problem(lengths, heads=(2, 1), page=64)
    module, made = kernel(PARTED, problem.dims), make(problem)
    _, out, lse = launch(module, problem, made, sms=7)
    plan = module.plan
    monkeypatch.setattr(module, "plan", lambda *given, **more: plan(*given, beside=beside, **more))
    for sms in (1, 3, 40):
        memory, _ = room(module, problem, sms)
        memory[0].fill_(float("nan"))
        _, other, other_lse = launch(module, problem, made, sms=sms, work=memory)
        assert torch.equal(other, out)
        assert torch.equal(other_lse, lse)
        assert not memory[1].any()


@pytest.mark.parametrize("name", ["d64", "d128", "d192_128"])
def test_what_is_spilled_between_parts_is_out_of_the_loops_of_products(name) -> None:
    """What a tile has so far is in registers beside a part: of a loop that multiplies nothing may lie in memory."""
    from tilecast.codegen.compiler.compile import compile_kernels
    from tilecast.codegen.compiler.sass import disassemble

    (made,) = compile_kernels(
        Path(__file__).parents[4] / "kernels" / "generated" / f"hopper_prefill_{name}.py", "sm_90a"
    )
    code = disassemble(made.cubin)
    place = {one.address: i for i, one in enumerate(code)}
    spans = (code[place[target] : i] for i, one in enumerate(code) for target in one.targets if target < one.address)
    loops = [span for span in spans if len(span) < 900 and sum(one.opcode == "HGMMA" for one in span) >= 8]
    assert (
        len(loops) >= 12
    )  # without mask, with, and the first ones, of each of two or three warpgroups, of tiles of one part and of others
    spilled = sum(one.opcode in ("LDL", "STL") for span in loops for one in span)
    # With Triton 3.9 three warpgroups keep one number in memory in two of the loops at the diagonal that parts have.
    assert spilled <= (4 if name == "d64" else 0)


@pytest.mark.parametrize("name", ["d64_few", "d256_few", "d256"])
def test_the_launch_that_merges_waits_for_what_it_reads(name) -> None:
    """The emulator runs launches one after the other: that this one waits can only be read."""
    from tilecast.codegen.compiler.compile import compile_kernels, load_source

    path = Path(__file__).parents[4] / "kernels" / "generated" / f"hopper_prefill_{name}.py"
    shape = {
        **load_source(path).TILECAST["workload"],
        "batch": 1,
        "heads_q": 4,
        "heads_kv": 2,
        "seqlen_q": 20,
        "seqlen_k": 9000,
    }
    parts, join = (kernel.ptx for kernel in compile_kernels(path, "sm_90a", shape=shape))
    assert "griddepcontrol.launch_dependents" in parts
    before, wait, after = join.partition("griddepcontrol.wait")
    assert wait and "ld.global.cg" not in before and "ld.global.cg.v4" in after
    # Whole 16 bytes at a time, though some rows are not there.
    assert "st.global.v4.b32" in parts and len(after.split("ld.global.cg.v4")) > 16


#: Sequences of as many keys as queries: where lengths alone are known some might be parted, and with one list it is known that none is.
ALIKE = Problem(((130, 130), (21, 21)), heads=(64, 4), layout="packed")
SMALL_TILES = replace(ONE, part_keys=64)


def one_list(made):
    """The same with one tensor for where queries and keys begin."""
    return replace(made, lists={**made.lists, "cu_seqlens_k": made.lists["cu_seqlens_q"]})


def test_one_list_of_queries_and_keys_has_the_bits_of_two_and_of_each_sequence_alone(kernel, monkeypatch) -> None:
    from tilecast.kernels.scratch import Counters
    from tilecast.kernels.serving.launching import Launcher

    module, dealt = kernel(SMALL_TILES, ALIKE.dims), []
    plan = module.plan

    def planned(*given, **options):
        found = plan(*given, **options)
        dealt.append(found[2][-2])
        return found

    monkeypatch.setattr(module, "plan", planned)
    made = make(ALIKE)
    _, two, two_lse = launch(module, ALIKE, made)
    _, one, one_lse = launch(module, ALIKE, one_list(made))
    assert dealt == [3, 0]
    assert error_of(ALIKE, made, one, one_lse) <= 1.0
    assert torch.equal(one, two) and torch.equal(one_lse, two_lse)
    # As the operator calls it, which tells tensors apart that come twice.
    launcher = Launcher(module, (1, 1 << 29), torch.device("cpu"), Counters(torch.device("cpu")))
    starts = made.lists["cu_seqlens_q"]
    for number, (other, used, most) in enumerate(
        (
            (starts, None, 130),
            (starts.clone(), None, 130),
            (starts, starts.diff().to(torch.int32), 130),
            (starts, None, 129),
        )
    ):
        out, lse = outputs(made, ALIKE)
        lists = (starts, other, used, None, None, None, None, None)
        launcher(made.q, made.k, made.v, out, lse, lists, ALIKE.factor, 0.0, most, 130, ALIKE.window)
        assert dealt[2 + number] == (0 if number == 0 else 3)
        assert number == 3 or torch.equal(out, two)
    launcher(
        made.q, made.k, made.v, out, lse, (starts, starts, *(None,) * 6), ALIKE.factor, 0.0, 130, 130, ALIKE.window
    )
    assert len(dealt) == 6 and torch.equal(out, two)
    for number, lengths in enumerate(ALIKE.lengths):
        alone = replace(ALIKE, lengths=(lengths,))
        q, k, v = made.sequences[number]
        single = replace(make(alone), q=q, k=k, v=v)
        _, other, other_lse = launch(module, alone, one_list(single))
        got, sums = parted(ALIKE, one, one_lse)[number]
        assert torch.equal(other, got) and torch.equal(other_lse, sums)


def test_sequences_of_few_heads_are_parted_with_one_list_too(kernel) -> None:
    problem = Problem(((200, 200), (90, 90), (33, 33)), heads=(2, 1), layout="packed")
    module, made = kernel(PARTED, problem.dims), make(problem)
    _, two, two_lse = launch(module, problem, made, sms=40)
    sizes = module.scratch(3, 1, 2, 200, 200, 40, 323, 1, problem.window[0], True)
    around = [
        torch.full((n + 999,), 7, dtype=kind) for n, kind in zip(sizes, (torch.float32, torch.int32), strict=True)
    ]
    memory = [x[:n] for x, n in zip(around, sizes, strict=True)]
    memory[1].zero_()
    _, one, one_lse = launch(module, problem, one_list(made), sms=40, work=memory)
    assert module._dealing(3, 1, 2, 200, 200, 40, 323, 1, -1, True)[0] == 2
    assert torch.equal(one, two) and torch.equal(one_lse, two_lse)
    assert not memory[1].any() and all((x[n:] == 7).all() for x, n in zip(around, sizes, strict=True))


@pytest.mark.parametrize("heads", [(4, 1), (32, 8), (16, 2), (5, 5)], ids=str)
def test_there_is_room_for_whatever_a_batch_may_hold(heads, kernel) -> None:
    """Of every batch that two lists, or one, may describe: parts that its sequences have, by their own lengths, and places for them."""
    module, draw = kernel(TWO, (64, 64)), random.Random(11)
    (_, heads_kv), group = heads, heads[0] // heads[1]

    def places(lengths) -> tuple[int, int]:
        found = [(-(-q * group // module.TILE_M.value), module.parts(q, k, group, heads_kv)) for q, k in lengths if q]
        return sum(tiles * parts for tiles, parts in found) * heads_kv, max(parts for _, parts in found)

    seen = set()
    for _ in range(1500):
        alike, batch = draw.random() < 0.5, draw.choice((1, 1, 2, 5))
        queries = [round(2 ** draw.uniform(0, 11)) for _ in range(batch)]
        keys = queries if alike else [max(q, round(2 ** draw.uniform(0, 16))) for q in queries]
        most_q, most_k = (max(x) + draw.choice((0, 0, 40)) for x in (queries, keys))
        total = sum(queries) + draw.choice((0, 0, 40))
        how, room, _, most = module._dealing(
            batch, heads_kv, group, max(most_q, most_k) if alike else most_q, most_k, 132, total, 1, -1, alike
        )
        needed, parts = places(zip(queries, keys, strict=True))
        seen.add((how, alike))
        assert how != 2 or needed <= room
        # Of one sequence it is known how many there are, where it has all queries.
        assert parts <= most or (batch == 1 and total > queries[0])
        assert how or parts == 1 or (batch == 1 and total > queries[0])
    assert {how for how, _ in seen} >= {0, 2}
