"""Hopper's kernel for latent attention in the emulator against float64: pages, caches, masks, parts of heads, splits, chunks.

Whatever lies beyond a sequence's keys is NaN or infinite (`support.serving`), and every access to shared memory is checked.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilecast.codegen.serving import generate_serving
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.variants.hopper.mla import HopperMlaVariant
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.serving import HOPPER_MLA, parse_serving, writable

torch = pytest.importorskip("torch")
pytest.importorskip("greenlet")

from support.serving import Problem, emulated_kernels, error_of, launch, make, parted  # noqa: E402
from support.whole import whole  # noqa: E402

#: Small splits, so that small problems have many.
SMALL = HopperMlaVariant(split_keys=64, split_keys_of_many=128, whole_keys=64)
STEP = ((1, 5), (1, 70), (1, 130), (1, 0), (4, 33), (2, 64))
MANY = ((1, 700), (3, 450), (1, 64), (1, 65))
#: Narrow heads take a quarter of the time: one piece to a half of V.
NARROW = (192, 128)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return emulated_kernels(tmp_path_factory, "h200-sxm", "h200")


def latent(lengths, heads: int = 16, dims: tuple[int, int] = NARROW, **more) -> Problem:
    return Problem(lengths, heads=(heads, 1), dims=dims, latent=True, **{"page": 64, **more})


PROBLEMS = [
    (SMALL, latent(STEP, heads=128, sinks=True, softcap=2.0)),
    *[(SMALL, latent(MANY, page=page)) for page in (16, 128)],
    *[(SMALL, latent(STEP, layout=layout)) for layout in ("packed", "cache")],
    *[(SMALL, latent(MANY[:2], window=window)) for window in ((100, 0), (13, 7))],
    # One query a sequence: the copy engine brings Q, the heads of a part and others behind them, packed or not.
    *[
        (SMALL, latent(((1, 5), (1, 70), (1, 0), (1, 130)), heads=heads, packed_q=packed))
        for heads, packed in ((128, False), (24, True))
    ],
    # More queries than are split, tiles that begin inside a token's heads, and more rows than a tile of few has.
    (SMALL, latent(((70, 90), (5, 200), (1, 150)), heads=24)),
    (replace(SMALL, kv_stages=3), latent(MANY[1:])),
    # The real width: tiles of four pieces abreast.
    (SMALL, latent(((1, 90), (2, 40), (1, 600)), dims=(576, 512))),
    (SMALL, latent(((2, 300),), heads=128, dims=(576, 512), dtype="bfloat16", packed_q=False)),
]


@pytest.mark.parametrize(("variant", "problem"), PROBLEMS, ids=lambda value: "")
def test_is_attention(variant, problem, kernel) -> None:
    made, out, lse = launch(kernel(variant, problem.dims), problem)
    assert error_of(problem, made, out, lse) <= 1.0


@pytest.mark.parametrize("seed", range(2))
def test_is_attention_whatever_goes_first(seed, kernel) -> None:
    problem = latent(MANY)
    made, out, lse = launch(kernel(SMALL, problem.dims, "random", seed), problem)
    assert error_of(problem, made, out, lse) <= 1.0


def test_a_sequence_gets_the_same_bits_alone_and_with_its_heads_in_other_parts(kernel) -> None:
    """128 heads are two parts in a batch on few SMs, and eight parts of 16 where there are SMs for them."""
    together = latent(((1, 1200), (2, 130)), heads=128)
    module = kernel(SMALL, together.dims)
    made, out, lse = launch(module, together)
    for number, (got, sums) in enumerate(parted(together, out, lse)):
        alone = latent((together.lengths[number],), heads=128)
        single = make(alone)
        own = made.sequences[number][1]
        for page in range(-(-len(own) // 64)):
            rows = own[page * 64 : page * 64 + 64]
            single.k[int(single.lists["block_table"][0, page]), : len(rows)] = rows
        single.q.copy_(made.sequences[number][0])
        sizes = module.scratch(1, 1, 128, *alone.lengths[0], 132)
        work = [torch.zeros(n, dtype=kind) for n, kind in zip(sizes, (torch.float32, torch.int32), strict=True)]
        single.lists["work"] = work
        _, other, other_lse = launch(module, alone, single, 132)
        assert torch.equal(other, got)
        assert torch.equal(other_lse, sums)
        assert not work[1].any()


@pytest.mark.parametrize(
    ("heads", "programs", "mode"),
    [
        (16, 3, ("late",)),
        (16, 3, ("random", 2)),
        (128, 4, ("late",)),
        # Runs shorter than tiles: chunks are done apart, and join later.
        (16, 7, ("late",)),
        (16, 7, ("random", 3)),
        # Runs no shorter than a group of chunks, which are done by groups.
        (16, 5, ("late",)),
        (16, 5, ("random", 4)),
        pytest.param(16, 2, ("random", 1), marks=whole),
        pytest.param(128, 4, ("random", 1), marks=whole),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_runs_of_chunks_that_end_inside_tiles_give_the_bits_of_splits(heads, programs, mode, kernel) -> None:
    """On few SMs programs take runs of chunks and hand tiles over, with more than one group behind them; on many each split has a program,
    and the programs of a tile share its merge."""
    problem = latent(((1, 1200), (1, 700), (2, 500), (1, 0), (1, 330)), heads=heads)
    module = kernel(SMALL, problem.dims, *mode)
    found = []
    for sms in (programs, 132):
        made = make(problem)
        parts, group = module._parts(5, 1, heads, 1200, sms)
        assert module._chained(5, parts, group, 2, 1200, sms) == (sms < 132)
        sizes = module.scratch(5, 1, heads, 2, 1200, sms)
        work = [torch.zeros(n, dtype=kind) for n, kind in zip(sizes, (torch.float32, torch.int32), strict=True)]
        made.lists["work"] = work
        _, out, lse = launch(module, problem, made, sms)
        assert not work[1].any()
        found.append((out, lse))
    assert all(map(torch.equal, *found))


FEW = ((1, 300), (1, 5), (1, 0), (1, 64), (1, 129))
#: Keys are the M of the products where a split has up to eight rows, here with a program for each split, or on few SMs items in turn.
TURNED = [
    (latent(FEW, heads=16), 132),
    (latent(FEW, heads=8, packed_q=False, sinks=True, softcap=2.0, page=128), 132),
    (latent(FEW, heads=8, window=(100, 0), page=16), 132),
    (latent(FEW, heads=4, layout="cache"), 132),
    (latent(((1, 1500), (0, 70), (1, 900)), heads=8), 132),
    # Splits are dealt out where that takes as many rounds as a tile has splits: few SMs, few rows.
    (latent(((1, 60), (1, 5), (1, 33), (1, 64)), heads=8), 2),
    (latent(((2, 300), (1, 5), (2, 64)), heads=4), 132),
    (latent(((1, 300), (1, 70)), heads=16, dims=(576, 512), dtype="bfloat16"), 132),
    # Of 16 and 32 rows, and more splits than are merged at once.
    (latent(((1, 700),), heads=16), 12),
    (latent(((1, 300),), heads=32), 6),
]


@pytest.mark.parametrize(("problem", "sms"), TURNED, ids=lambda value: "")
@pytest.mark.parametrize("mode", [("late",), ("random", 6)], ids=str)
def test_few_rows_are_attention_with_keys_in_the_place_of_rows(problem, sms, mode, kernel) -> None:
    module = kernel(SMALL, problem.dims, *mode)
    made = make(problem)
    batch, longest = len(problem.lengths), [max(pair[i] for pair in problem.lengths) for i in (0, 1)]
    work = [
        torch.zeros(n, dtype=kind)
        for n, kind in zip(
            module.scratch(batch, 1, problem.heads[0], *longest, sms), (torch.float32, torch.int32), strict=True
        )
    ]
    work[0].fill_(float("nan"))
    parts, group = module._parts(batch, 1, problem.heads[0], longest[1], sms)
    assert longest[0] * group <= 32 and not module._chained(batch, parts, group, *longest, sms)
    made.lists["work"] = work
    for _ in range(2):
        _, out, lse = launch(module, problem, made, sms)
        assert error_of(problem, made, out, lse) <= 1.0
        assert not work[1].any()


#: Chunks of a group, programs, heads, and slots that chunks wait in.  Of runs of 12, 11, 11 and 11, no shorter than a group: 8-11, 4-7, 0-3; 4-6, 0-3, 12-15;
#: 4, 0-3, 12, 8-11; 12-15, 8-11, while 7 and 5-7 join what the run before has left.  Of runs of 8, 8, 8, 7, 7, 7: 8-15; 8-12; 2 to 7 and 8; 9 to 15.
WAITING = [(4, 4, 16, 12), (8, 6, 64, 16)]


@pytest.mark.parametrize(("merged", "programs", "heads", "slots"), WAITING, ids=lambda value: "")
@pytest.mark.parametrize("mode", [("late",), ("random", 4)], ids=str)
def test_chunks_done_apart_wait_by_groups_with_the_bits_of_splits(merged, programs, heads, slots, mode, kernel) -> None:
    """Chunks of a run that begins inside a tile join those of their group before they wait, where the run is no shorter than a group all of them."""
    problem, columns = latent(((1, 1000), (1, 830), (1, 1000)), heads=heads), NARROW[1]
    module = kernel(replace(SMALL, merged=merged, most_splits=16), problem.dims, *mode)
    found = []
    for sms in (programs, 132):
        made = make(problem)
        sizes = module.scratch(3, 1, heads, 1, 1000, sms)
        work = [torch.zeros(n, dtype=kind) for n, kind in zip(sizes, (torch.float32, torch.int32), strict=True)]
        work[0].fill_(float("nan"))
        made.lists["work"] = work
        _, out, lse = launch(module, problem, made, sms)
        assert not work[1].any()
        found.append((out, lse))
        if sms == programs:
            unit = 64 * (columns + 2)
            apart = work[0][sms * 64 * (4 + 4 * columns) :]
            apart = apart[: len(apart) // unit * unit].view(-1, unit)
            waiting = int((~apart[:, 0].isnan()).sum())
            assert waiting == slots
    assert all(map(torch.equal, *found))


def test_the_chosen_variant_can_be_written_and_round_trips() -> None:
    chip = load_machine("h200-sxm")
    workload = Workload(batch=2, heads_q=128, heads_kv=1, seqlen_q=1, seqlen_k=8192, head_dim_qk=576, head_dim_v=512)
    chosen = HOPPER_MLA.chosen(workload, chip)
    assert writable(chosen, workload, chip).legal
    assert parse_serving(variant_text(chosen), HOPPER_MLA.variant()) == chosen
    space = list(HOPPER_MLA.space(workload, chip))
    assert chosen in space
    assert all(writable(variant, workload, chip).legal for variant in space)


@pytest.mark.parametrize(
    ("dims", "machine", "knobs", "said"),
    [
        ((128, 128), "h200-sxm", "", "head_dim_v of 128, 256 or 512 and a wider head_dim_qk in steps of 64, got 128/128"),
        ((576, 512), "b200", "", "has no wgmma"),
        ((576, 512), "h200-sxm", "kv_stages=3", "shared memory needs"),
        ((576, 512), "h200-sxm", "split_keys=500", "split_keys must be a power of two of at least 64, got 500"),
        ((576, 512), "h200-sxm", "most_splits=128", "most_splits must be a power of two from 2 to 64, merged times merged, got 128"),
    ],
)  # fmt: skip
def test_refuses_what_cannot_be_written(dims, machine, knobs, said) -> None:
    work = Workload(head_dim_qk=dims[0], head_dim_v=dims[1])
    with pytest.raises(VariantError, match=said):
        generate_serving(work, load_machine(machine), parse_serving(knobs, HopperMlaVariant()))


def test_refuses_values_that_are_no_columns_of_the_keys(kernel) -> None:
    problem = latent(((1, 40),))
    made = make(problem)
    made.v = made.v.clone()
    with pytest.raises(ValueError, match="v the first columns of k"):
        launch(kernel(SMALL, problem.dims), problem, made=made)
