"""The `triton_serving` family in Triton's interpreter against float64: pages, packed sequences, caches, masks, groups, splits.

TRITON_INTERPRET counts when triton is imported, so the numerics run in a process of their own: one test here starts pytest on
this file again.  They use fp16: the interpreter's bf16 tl.dot gives wrong numbers.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.interpreter import run_interpreted
from support.whole import sampled

from tilecast.codegen.serving import generate_serving
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.variants.serving import ServingVariant
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.serving import TRITON_SERVING, parse_serving, writable

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from support.serving import Made, Problem, error_of, make, outputs, parted  # noqa: E402

#: Small tiles and splits, so that small problems have many.
DECODE = ServingVariant(tile_n=16, split_keys=32, whole_keys=32, most_splits=4)
APART = ServingVariant(tile_n=64, apart=1, split_keys=64, whole_keys=64, most_splits=4)
LATENT = ServingVariant(
    tile_m=64, tile_n=32, warps=8, kv_stages=2, split_keys=32, whole_keys=64, most_splits=4, latent=1
)
PREFILL = ServingVariant(tile_m=32, tile_n=32, split_keys=64, whole_keys=64, most_splits=4)


def work(dims: tuple[int, int] = (64, 64), **more: int) -> Workload:
    return Workload(head_dim_qk=dims[0], head_dim_v=dims[1], **more)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    made = {}

    def of(variant: ServingVariant, dims: tuple[int, int] = (64, 64)):
        if (variant, dims) not in made:
            path = tmp_path_factory.mktemp("kernels") / f"made{len(made)}.py"
            path.write_text(generate_serving(work(dims), load_machine("a100"), variant).source)
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            made[variant, dims] = module
        return made[variant, dims]

    return of


def launch(module, problem: Problem, made: Made | None = None):
    """(what was made, out, lse) of a launch."""
    made = make(problem) if made is None else made
    out, lse = outputs(made, problem)
    most_q, most_k = (max(pair[i] for pair in problem.lengths) for i in (0, 1))
    module.launch(
        made.q, made.k, made.v, out, lse, problem.factor, sinks=made.sinks, max_seqlen_q=max(most_q, 1),
        max_seqlen_k=max(most_k, 1), window=problem.window, softcap=problem.softcap, **made.lists,
    )  # fmt: skip
    return made, out, lse


STEP = ((1, 5), (1, 70), (1, 130), (1, 0), (4, 33), (2, 64))
CHUNKS = ((34, 65), (5, 170), (40, 20), (1, 1), (40, 0), (33, 110))
PROBLEMS = [
    *[(DECODE, Problem(STEP, layout=layout)) for layout in ("packed", "cache", "paged")],
    *[(PREFILL, Problem(CHUNKS, layout=layout)) for layout in ("packed", "cache", "paged")],
    *[(DECODE, Problem(STEP, page=page)) for page in (32, 64)],
    *[(PREFILL, Problem(CHUNKS, page=page)) for page in (32, 128)],
    *[(v, Problem(n, dims=dims)) for v, n in ((DECODE, STEP), (PREFILL, CHUNKS)) for dims in ((96, 96), (192, 128))],
    *[(DECODE, Problem(STEP[:4], heads=heads)) for heads in ((2, 2), (16, 2), (3, 1))],
    *sampled([(v, Problem(n, window=window)) for v, n in ((DECODE, STEP), (PREFILL, CHUNKS))
      for window in ((-1, -1), (20, 0), (13, 7), (0, 0), (-1, 3), (64, -1))]),
    *[(v, Problem(n, softcap=2.0, sinks=True)) for v, n in ((DECODE, STEP), (PREFILL, CHUNKS))],
    (DECODE, Problem(((4, 5), (4, 90), (4, 0)), packed_q=False, layout="cache")),
    (PREFILL, Problem(((40, 50), (40, 90), (40, 7)), packed_q=False, layout="paged", sinks=True)),
    # More sequences than a program plans at a time, most without queries; the last of them are split.
    (DECODE, Problem(((1, 3), *((0, 2),) * 250, *((1, 5),) * 7, *((1, 90),) * 3), heads=(1, 1), page=64)),
    (DECODE, Problem(STEP, scale=0.5)),
    *[(APART, Problem(STEP, page=page, layout=layout)) for page, layout in ((16, "paged"), (128, "paged"), (16, "packed"))],
    (APART, Problem(STEP, dims=(192, 128), window=(40, 3), softcap=2.0, sinks=True)),
    *[(LATENT, Problem(lengths, heads=(heads, 1), dims=(96, 64), latent=True, page=page, sinks=heads == 16))
      for lengths, heads, page in ((STEP, 16, 16), (((1, 5), (2, 200), (4, 150), (9, 40)), 48, 64), (((1, 300),), 128, 64))],
    (LATENT, Problem(((1, 90), (2, 40)), heads=(16, 1), dims=(576, 512), latent=True, page=64)),
    *sampled([(replace(variant, cache_bits=8), Problem(lengths, dims=dims, layout=layout, narrow=True, softcap=cap))
      for variant, lengths in ((DECODE, STEP), (APART, STEP), (PREFILL, CHUNKS))
      for dims, layout, cap in (((64, 64), "paged", 0.0), ((192, 128), "cache", 0.0), ((96, 96), "packed", 2.0))]),
]  # fmt: skip


@pytest.mark.interpreted
@pytest.mark.parametrize(("variant", "problem"), PROBLEMS, ids=lambda value: "")
def test_is_attention(variant, problem, kernel) -> None:
    made, out, lse = launch(kernel(variant, problem.dims), problem)
    assert error_of(problem, made, out, lse) <= 1.0


@pytest.mark.interpreted
@settings(max_examples=8)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 200)), min_size=2, max_size=5),
    layout=st.sampled_from(["packed", "paged"]),
    window=st.sampled_from([(-1, 0), (40, 0)]),
    data=st.data(),
)
def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch(kernel, lengths, layout, window, data) -> None:
    module = kernel(DECODE)
    problem = Problem(tuple(lengths), layout=layout, window=window, page=32)
    made, out, lse = launch(module, problem)
    assert error_of(problem, made, out, lse) <= 1.0
    number = data.draw(st.integers(0, len(lengths) - 1))
    alone = replace(problem, lengths=(lengths[number],))
    single = make(alone)
    for given_rows, drawn in zip((single.q, single.k, single.v), made.sequences[number], strict=True):
        if layout == "packed" or given_rows is single.q:
            given_rows.copy_(drawn)
    if layout == "paged":
        for pool, drawn in ((single.k, made.sequences[number][1]), (single.v, made.sequences[number][2])):
            for page in range(-(-lengths[number][1] // 32)):
                rows = drawn[page * 32 : (page + 1) * 32]
                pool[int(single.lists["block_table"][0, page]), : rows.shape[0]] = rows
    _, out_alone, lse_alone = launch(module, alone, single)
    got, sums = parted(problem, out, lse)[number]
    assert torch.equal(out_alone.view(torch.int16), got.contiguous().view(torch.int16))
    assert torch.equal(lse_alone.view(torch.int32), sums.contiguous().view(torch.int32))


@pytest.mark.interpreted
def test_counters_are_left_at_zero_and_lengths_beyond_the_bound_count_as_the_bound(kernel) -> None:
    module, problem = kernel(DECODE), Problem(((1, 130), (2, 100)))
    made = make(problem)
    scratch = [
        torch.zeros(size, dtype=kind)
        for size, kind in zip(module.scratch(2, 1, 4, 2, 130, 1), (torch.float32, torch.int32), strict=True)
    ]
    results = []
    for used in (made.lists["seqused_k"], torch.tensor([2**30, 100], dtype=torch.int32)):
        out, lse = outputs(made, problem)
        module.launch(
            made.q, made.k, made.v, out, lse, problem.factor, max_seqlen_q=2, max_seqlen_k=130, window=(-1, 0),
            work=scratch, sms=1, **{**made.lists, "seqused_k": used},
        )  # fmt: skip
        assert not scratch[1].any()
        results.append(out)
    assert torch.equal(*results)


@pytest.mark.interpreted
def test_the_calls_run_what_ships(monkeypatch) -> None:
    """`attention_kvcache` and `attention_varlen` on the shipped kernels: decode and prefill share a batch."""
    from tilecast.kernels.serving import operator
    from tilecast.kernels.serving.calls import attention_kvcache, attention_varlen

    monkeypatch.setattr(operator, "capability_of", lambda kind, device: (8, 0))
    problem = Problem(((1, 600), (30, 70), (4, 20)), layout="packed", window=(50, 0), softcap=3.0, sinks=True)
    made = make(problem)
    starts = made.lists["cu_seqlens_q"], made.lists["cu_seqlens_k"]
    out, lse = attention_varlen(
        made.q, made.k, made.v, *starts, 30, 600, window=(50, 0), softcap=3.0, sinks=made.sinks, return_lse=True, check=True
    )  # fmt: skip
    assert error_of(problem, made, out, lse) <= 1.0
    problem = Problem(((2, 600), (2, 70), (2, 1)), packed_q=False, page=32)
    made = make(problem)
    for _ in range(2):
        out, lse = attention_kvcache(
            made.q, made.k, made.v, made.lists["seqused_k"], made.lists["block_table"], causal=True, return_lse=True, check=True
        )  # fmt: skip
        assert error_of(problem, made, out, lse) <= 1.0
    problem = Problem(((1, 9), (1, 40)), packed_q=False, layout="cache", sinks=True)
    made = make(problem)
    out, lse = attention_kvcache(
        made.q, made.k, made.v, made.lists["seqused_k"], None, made.lists["cache_batch_idx"], causal=True,
        sinks=made.sinks, return_lse=True,
    )  # fmt: skip
    assert error_of(problem, made, out, lse) <= 1.0
    problem = Problem(((1, 600), (30, 70)), layout="paged", page=32, narrow=True)
    made = make(problem)
    lists = made.lists
    for bytes_are in (torch.uint8, torch.float8_e4m3fn, torch.float8_e4m3fn):
        out, lse = attention_kvcache(
            made.q, made.k.view(bytes_are), made.v.view(bytes_are), lists["seqused_k"], lists["block_table"],
            cu_seqlens_q=lists["cu_seqlens_q"], max_seqlen_q=30, causal=True, k_descale=lists["k_descale"],
            v_descale=lists["v_descale"], return_lse=True,
        )  # fmt: skip
        assert error_of(problem, made, out, lse) <= 1.0
    # One factor for all of K is the same as a larger scale.
    settings = {"cu_seqlens_q": lists["cu_seqlens_q"], "max_seqlen_q": 30, "causal": True}
    given = made.q, made.k, made.v, lists["seqused_k"], lists["block_table"]
    assert torch.equal(
        attention_kvcache(*given, k_descale=torch.tensor([0.5]), **settings), attention_kvcache(*given, scale=0.5 / 8, **settings)
    )  # fmt: skip


@pytest.mark.interpreted
def test_rows_of_no_sequence_hide_none(monkeypatch) -> None:
    """As many rows of q as if each sequence had the most: the kernel for few rows is left out, and the other takes them."""
    from tilecast.kernels.serving import operator
    from tilecast.kernels.serving.calls import attention_varlen

    monkeypatch.setattr(operator, "_known", {})
    monkeypatch.setattr(operator, "capability_of", lambda kind, device: (8, 0))
    problem = Problem(((30, 70), (1, 600), (0, 50), (4, 20)), layout="packed")
    made = make(problem)
    padded = made.q.new_full((4 * 30, *made.q.shape[1:]), float("nan"))
    padded[: made.q.shape[0]] = made.q
    starts = made.lists["cu_seqlens_q"], made.lists["cu_seqlens_k"]
    for q in (padded, made.q):
        out, lse = attention_varlen(q, made.k, made.v, *starts, 30, 600, causal=True, return_lse=True)
        assert error_of(problem, made, out[: made.q.shape[0]], lse[:, : made.q.shape[0]]) <= 1.0


@pytest.mark.interpreted
def test_latent_attention_runs_what_ships(monkeypatch) -> None:
    from tilecast.kernels import registry
    from tilecast.kernels.errors import AttentionError
    from tilecast.kernels.serving import operator
    from tilecast.kernels.serving.calls import attention_kvcache, attention_mla

    monkeypatch.setattr(operator, "capability_of", lambda kind, device: (9, 0))
    # Gluon's kernel, which goes first, is not for the interpreter.
    portable = tuple(entry for entry in registry.shipped_serving() if entry.family == "triton_serving")
    monkeypatch.setattr(registry, "shipped_serving", lambda: portable)
    problem = Problem(((2, 70), (2, 600)), heads=(80, 1), dims=(576, 512), latent=True, packed_q=False, page=64)
    made = make(problem)
    given = made.q, made.k, made.lists["seqused_k"], made.lists["block_table"]
    for _ in range(2):
        out, lse = attention_mla(*given, causal=True, return_lse=True)
        assert error_of(problem, made, out, lse) <= 1.0
    # Values of their own are no columns of the keys, also where such a call was met before.
    with pytest.raises(ValueError, match="v the first columns of k"):
        attention_kvcache(made.q, made.k, made.v.clone(), *given[2:], causal=True, return_lse=True)
    assert issubclass(AttentionError, ValueError)


def test_numerics(tmp_path) -> None:
    ran = run_interpreted(__file__, tmp_path)
    assert sum(name.startswith("test_is_attention") for name in ran) == len(PROBLEMS), (
        "every problem runs in the interpreter"
    )


# --- what can be written ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", ["a100", "rtx-5090", "h200-sxm", "b200"])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("queries", [1, 512])
def test_the_chosen_variant_can_be_written_and_round_trips(machine, dims, queries) -> None:
    chip, workload = load_machine(machine), work(dims, heads_q=32, heads_kv=8, seqlen_q=queries, seqlen_k=4096)
    chosen = TRITON_SERVING.chosen(workload, chip)
    assert writable(chosen, workload, chip).legal
    assert parse_serving(variant_text(chosen), TRITON_SERVING.variant()) == chosen
    assert all(writable(variant, workload, chip).legal for variant in TRITON_SERVING.space(workload, chip))


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ("tile_n=24", "tile_n must be a power of two of at least 16, got 24: use 16, 64 or 128"),
        ("split_keys=500", "split_keys must be a multiple of tile_n 64, got 500"),
        ("tile_m=128,tile_n=256", "shared memory needs"),
        ("tile_m=128,warps=1", "a thread needs"),
        ("tile_k=2", "family serving has no knob 'tile_k'"),
        ("warps=3", "knob 'warps' takes one of 1, 2, 4, 8, got '3'"),
        (
            "family=fa4",
            "expected family serving or triton_serving or .*hopper_serving or .*blackwell_serving, got 'fa4'",
        ),
    ],
)
def test_refuses_what_cannot_be_written(knobs, said) -> None:
    with pytest.raises(VariantError, match=said.replace("(", r"\(")):
        generate_serving(work((128, 128)), load_machine("a100"), parse_serving(knobs, ServingVariant()))


def test_generate_writes_one(tmp_path, capsys) -> None:
    from tilecast.cli import main

    file = tmp_path / "decode.py"
    with pytest.raises(SystemExit) as stop:
        main(["generate", "h200", "--pass", "serve", "--seqlen", "1", "--head-dim", "64", "-o", str(file)])
    assert not stop.value.code
    assert "forecast: of whole steps, tilecast step" in capsys.readouterr().out
    assert '"pass": "serve"' in file.read_text()
