"""Blackwell's decoding kernel in the emulator against float64, at random moments too: no Blackwell GPU has run it.

Whatever lies beyond a sequence's keys is NaN or infinite (`support.serving`), and every access to shared and tensor memory is
checked.  The parts that it shares with Hopper's (pages, splits, merges) have more cases in `test_hopper_serving`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilecast.codegen.serving import generate_serving
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.variants.blackwell_serving import BlackwellServingVariant
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.machine.machine import load_machine
from tilecast.model.serving import BLACKWELL_SERVING, parse_serving, writable

torch = pytest.importorskip("torch")
pytest.importorskip("greenlet")

from support.serving import Problem, emulated_kernels, error_of, heads, launch, make, parted  # noqa: E402

#: Small splits and rings, so that small problems have many: groups of 4 splits, and groups of groups.
SMALL = BlackwellServingVariant(
    kv_stages=2, split_keys=64, split_keys_of_many=128, many_heads=2, whole_keys=64, most_splits=16, merged=4, planned=32,
)  # fmt: skip
NARROW = replace(SMALL, tile_n=32, split_keys=32, split_keys_of_many=32, kv_stages=3)
WIDE = replace(SMALL, tile_n=128, split_keys=128)
#: A sequence is never split: items of many blocks, in which maxima grow.
WHOLE = replace(SMALL, whole_keys=4096)
STEP = ((1, 5), (1, 70), (1, 130), (1, 0), (4, 33), (2, 64))
MANY = ((1, 700), (3, 450), (1, 64), (1, 65))


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return emulated_kernels(tmp_path_factory, "b200", "b200")


PROBLEMS = [
    *[(SMALL, Problem(STEP, layout=layout)) for layout in ("packed", "cache", "paged")],
    (SMALL, Problem(MANY, page=256)),
    *[(variant, Problem(MANY, page=page)) for variant, page in ((NARROW, 64), (WIDE, 16), (WIDE, 256))],
    *[(SMALL, Problem(STEP, dims=dims)) for dims in ((128, 128), (192, 128))],
    *[(SMALL, Problem(MANY[:2], heads=heads, page=64)) for heads in ((2, 2), (16, 2), (3, 1))],
    *[(SMALL, Problem(MANY, window=window, page=64)) for window in ((-1, -1), (100, 0), (-1, 3))],
    (SMALL, Problem(STEP, softcap=2.0, sinks=True)),
    (SMALL, Problem(MANY, sinks=True, page=64)),
    (SMALL, Problem(((4, 5), (4, 190), (4, 0)), packed_q=False, layout="cache")),
    # As many rows as a tile has, and more than one tile, which is not split.
    (SMALL, Problem(((32, 200), (33, 200)), page=64)),
    (SMALL, Problem(MANY, dtype="bfloat16", page=64)),
    # Weights that leave all but a few keys nothing: maxima grow by more than O is left as it is for.
    (WHOLE, Problem(MANY, scale=1.0, page=64)),
]


@pytest.mark.parametrize(("variant", "problem"), PROBLEMS, ids=lambda value: "")
def test_is_attention(variant, problem, kernel) -> None:
    made = make(problem)
    assert error_of(problem, *launch(kernel(variant, problem.dims), problem, made)) <= 1.0


@pytest.mark.parametrize(("seed", "machine"), [(0, "b200"), (1, "b200"), (2, "b300")])
def test_is_attention_whatever_goes_first(seed, machine, kernel) -> None:
    for problem, variant in ((Problem(MANY), SMALL), (Problem(STEP, scale=1.0), WHOLE)):
        made = make(problem)
        found = launch(kernel(variant, problem.dims, "random", seed, machine), problem, made)
        assert error_of(problem, *found) <= 1.0


def test_maxima_that_grow_block_by_block_are_followed(kernel) -> None:
    problem = Problem(((1, 320),), layout="packed")
    made = make(problem)
    q, k, _ = made.sequences[0]
    # Scores of block n lie about 3 n above those of the first in powers of two: some blocks rescale O, others do not.
    k.copy_(k * 0.25 + torch.arange(320)[:, None, None] // 64 * 0.35)
    q.copy_(q * 0.25 + 0.75)
    made.q.copy_(q), made.k.copy_(k)
    assert error_of(problem, *launch(kernel(WHOLE, problem.dims), problem, made)) <= 1.0


def test_factors_of_a_cache_and_nothing_left_of_another_item(kernel) -> None:
    problem = Problem(((1, 150), (1, 0), (1, 70)), layout="packed", heads=(4, 2))
    made = make(problem)
    factors = torch.tensor([[0.5, 2.0], [1.0, 1.0], [0.25, 4.0]])
    made.lists |= {"k_descale": factors, "v_descale": factors.flip(0).contiguous()}
    made.sequences[:] = [
        (q, k * a[None, :, None], v * b[None, :, None])
        for (q, k, v), a, b in zip(made.sequences, factors, factors.flip(0), strict=True)
    ]
    module = kernel(SMALL, problem.dims)
    assert error_of(problem, *launch(module, problem, made, sms=1)) <= 1.0
    # A sequence whose values are NaN keeps that to itself.
    made.v[:150] = torch.nan
    _, out, _ = launch(module, problem, made, sms=1)
    assert out[0].isnan().all()
    assert not out[1].any()
    assert out[2].isfinite().all()


def test_a_sequence_gets_the_same_bits_alone_and_counters_are_left_at_zero(kernel) -> None:
    together = Problem(MANY, page=64)
    module = kernel(SMALL, together.dims)
    found = parted(together, *launch(module, together)[1:])
    alone = Problem(MANY[:1], page=64)  # sequence 0 holds the same in both
    made = make(alone)
    sizes = module.scratch(1, 1, 4, *MANY[0], 7)
    made.lists["work"] = [
        torch.zeros(n, dtype=kind) for n, kind in zip(sizes, (torch.float32, torch.int32), strict=True)
    ]
    _, out, lse = launch(module, alone, made, sms=7)
    assert torch.equal(out, found[0][0])
    assert torch.equal(lse, found[0][1])
    assert not made.lists["work"][1].any()


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)])
@pytest.mark.parametrize("machine", ["b200", "b300"])
def test_the_chosen_variant_can_be_written_and_round_trips(dims, machine) -> None:
    chip, workload = load_machine(machine), heads(dims, heads_q=32, heads_kv=8, seqlen_q=1, seqlen_k=4096)
    chosen = BLACKWELL_SERVING.chosen(workload, chip)
    assert writable(chosen, workload, chip).legal
    assert parse_serving(variant_text(chosen), BLACKWELL_SERVING.variant()) == chosen
    space = list(BLACKWELL_SERVING.space(workload, chip))
    assert len(space) > 2
    assert all(writable(variant, workload, chip).legal for variant in space)


@pytest.mark.parametrize(
    ("dims", "machine", "knobs", "said"),
    [
        ((96, 96), "b200", "", "head_dim_qk must be a multiple of 64 up to 256 for family serving-blackwell"),
        ((64, 256), "b200", "", "head_dim_v must be 64 or 128 for family serving-blackwell, got 256"),
        ((128, 128), "h200-sxm", "", "has no tcgen05"),
        ((128, 128), "b200", "kv_stages=6", "shared memory needs"),
        ((128, 128), "b200", "kv_stages=1", "kv_stages must be 2 or more, got 1"),
        ((128, 128), "b200", "family=serving", "expected knobs of family serving-blackwell, got family 'serving'"),
    ],
)
def test_refuses_what_cannot_be_written(dims, machine, knobs, said) -> None:
    with pytest.raises(VariantError, match=said):
        generate_serving(heads(dims), load_machine(machine), parse_serving(knobs, BlackwellServingVariant()))
