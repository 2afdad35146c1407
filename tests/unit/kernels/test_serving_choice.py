"""Which serving kernels the operator runs: rows that no two of them share, and caches that the best one does not take."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tilecast.kernels import registry  # noqa: E402
from tilecast.kernels.serving import operator  # noqa: E402
from tilecast.kernels.serving.launching import FEWER, FOLLOWS, LEADS  # noqa: E402


@pytest.fixture
def found(monkeypatch):
    """The kernels for a cache of a (capability, head dimension)."""
    monkeypatch.setattr(operator, "_known", {})

    def of(capability, dim, k):
        monkeypatch.setattr(operator, "capability_of", lambda kind, device: capability)
        q = torch.zeros(1, 1, 4, dim, dtype=torch.bfloat16)
        kernels = operator._find(q, k, dim, dim).of(k, k)
        return sorted((first, last, launcher._module.TILECAST["family"]) for first, last, launcher, _ in kernels)

    return of


def cache(*shape: int, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "families"),
    [
        (torch.bfloat16, {16: "hopper_serving_runs", 64: "hopper_prefill", registry.NO_LIMIT: "hopper_prefill"}),
        (torch.uint8, {16: "hopper_serving_runs_e4m3", 32: "hopper_serving_e4m3", registry.NO_LIMIT: "triton_serving"}),
    ],
)
@pytest.mark.parametrize("dim", [128, 256])
def test_hopper_decodes_what_the_copy_engine_takes_and_no_two_kernels_take_the_same_rows(
    found, dim, dtype, families
) -> None:
    if dim == 256 and dtype is torch.uint8:
        families = {16: "triton_serving", registry.NO_LIMIT: "triton_serving"}
    kernels, begin = found((9, 0), dim, cache(4, 16, 1, dim, dtype=dtype)), 0
    for kernel, (most, family) in zip(kernels, families.items(), strict=True):
        assert kernel == (begin, most, family)
        begin = most + 1


def test_of_three_launches_each_lets_the_next_begin_beside_it(monkeypatch) -> None:
    monkeypatch.setattr(operator, "_known", {})
    monkeypatch.setattr(operator, "capability_of", lambda kind, device: (9, 0))
    k = cache(4, 16, 1, 128)
    kernels = operator._find(torch.zeros(1, 1, 4, 128, dtype=torch.bfloat16), k, 128, 128).of(k, k)

    def order(least: int, most: int, surely: int = 0) -> list[tuple[str, int]]:
        wanted = operator._wanted(kernels, operator._Rows(surely or least, least, most))
        return [(launcher._module.TILECAST["family"].removeprefix("hopper_"), beside) for launcher, _, beside in wanted]

    # 1: the next one may begin before it ends; 2: it may begin before the one before has ended.
    # Rows of half a tile have a launch of their own there, and what is left of the tile's comes last.
    assert order(1, 400) == [("serving_runs", 1), ("prefill", 3), ("prefill", 3), ("serving_runs", 2)]
    assert order(9, 400) == [("serving_runs", 1), ("prefill", 3), ("prefill", 2)]
    assert order(20, 400) == [("prefill", 1), ("prefill", 2)]
    assert order(1, 40) == [("serving_runs", 1), ("prefill", 2)]
    assert order(4, 4) == [("serving_runs", 0)]
    # FEWER: a kernel for fewer rows is left out although a sequence may have them after all, so the first launch takes those too.
    assert order(132, 132, surely=4) == [("prefill", FEWER)]
    assert order(20, 400, surely=4) == [("prefill", 1 + FEWER), ("prefill", 2)]
    assert order(8, 8, surely=4) == [("serving_runs", 0)]


def test_launches_beside_each_other_work_in_memory_of_their_own(monkeypatch) -> None:
    """What a launch works in is given back only when all are made, and counters are one kernel's."""
    alive, seen = [0], []

    class Work:
        def __init__(self) -> None:
            alive[0] += 1
            seen.append(alive[0])

        def __del__(self) -> None:
            alive[0] -= 1

    class Launch:
        halves = ()

        leads = follows = True

    kernels = tuple(
        (first, last, Launch(), lambda *given: (Work(), None)) for first, last in ((0, 16), (17, 64), (65, 400))
    )
    monkeypatch.setattr(operator, "_found", lambda *given: operator._Found(kernels, None, ()))
    q, k = torch.zeros(100, 4, 128), cache(4, 16, 1, 128)
    lists = (torch.tensor([0, 50, 100]), *[None] * 7)
    operator.into(q, k, k, q, None, lists, 1.0, 0.0, 100, 64, (-1, 0))
    assert seen == [1, 2, 3] and alive == [0]
    monkeypatch.undo()
    monkeypatch.setattr(operator, "_known", {})
    monkeypatch.setattr(operator, "capability_of", lambda kind, device: (9, 0))
    found = operator._find(torch.zeros(1, 1, 4, 128, dtype=torch.bfloat16), k, 128, 128).of(k, k)
    assert len({id(launcher._counters) for _, _, launcher, _ in found}) == 3


@pytest.mark.parametrize(
    ("queries", "longest", "rows"),
    [
        ((33, 33, 33), 33, (4, 132, 132)),
        ((33, 33, 32), 33, (4, 128, 132)),
        ((1, 1, 33), 33, (4, 4, 132)),
        ((40,), 8192, (4, 160, 160)),
        ((2, 3), 8192, (4, 4, 20)),  # whatever the caller allows, no sequence has more rows than q
        ((), 5, (0, 0, 0)),
    ],
)
def test_shape_of_q_says_how_few_queries_a_packed_sequence_may_have(queries, longest, rows) -> None:
    starts = torch.tensor([0, *itertools.accumulate(queries)])
    q, k = torch.zeros(sum(queries), 32, 128), cache(4, 16, 8, 128)
    assert operator._rows(q, k, starts, longest) == rows
    if queries:
        assert rows[1] <= 4 * min(queries) and rows[2] >= 4 * max(queries)


def test_what_launches_leave_is_merged_when_all_are_made(monkeypatch) -> None:
    """Launches of a step run beside each other: one between two of them, which waits for the first, would hold up the second."""
    told: list[str] = []

    def launch(name: str, merges: bool):
        def made(*given):
            told.append(name)
            return None, (lambda: told.append(f"merge {name}")) if merges else None

        return made

    class Launch:
        halves = ()

        leads = follows = True

    kernels = tuple(
        (first, last, Launch(), launch(name, merges))
        for first, last, name, merges in ((0, 16, "few", False), (17, 64, "some", True), (65, 400, "many", True))
    )
    monkeypatch.setattr(operator, "_found", lambda *given: operator._Found(kernels, None, ()))
    q, k = torch.zeros(100, 4, 128), cache(4, 16, 1, 128)
    operator.into(q, k, k, q, None, (torch.tensor([0, 50, 100]), *[None] * 7), 1.0, 0.0, 100, 64, (-1, 0))
    assert told == ["few", "many", "some", "merge many", "merge some"]


@pytest.mark.parametrize(
    "k",
    [
        cache(0, 16, 1, 128),
        cache(4, 16, 1, 128).expand(4, 16, 2, 128),
        cache(0, 16, 1, 128, dtype=torch.uint8),
    ],
)
def test_other_caches_go_to_the_portable_kernels(found, k) -> None:
    assert found((9, 0), 128, k) == [(0, 16, "triton_serving"), (17, registry.NO_LIMIT, "triton_serving")]


@pytest.mark.parametrize(("capability", "dim"), [((8, 0), 128), ((10, 0), 128), ((10, 3), 64), ((8, 0), 96)])
def test_other_devices_and_heads_keep_them_too(found, capability, dim) -> None:
    assert found(capability, dim, cache(4, 16, 1, dim)) == [
        (0, 16, "triton_serving"), (17, registry.NO_LIMIT, "triton_serving"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("dim", "own"), [(8, 64), (56, 64), (72, 128), (80, 128), (96, 128), (120, 128), (136, 256), (192, 256), (248, 256)]
)
def test_hopper_takes_heads_of_fewer_columns_by_the_kernels_for_the_next_more(dim, own, found, monkeypatch) -> None:
    kernels = found((9, 0), dim, cache(4, 16, 1, dim))
    assert [family for _, _, family in kernels] == ["hopper_serving_runs", "hopper_prefill", "hopper_prefill"]
    taken = operator._known[(-1, torch.bfloat16, torch.bfloat16, dim, dim)].kernels
    assert {launcher._module.TILECAST["workload"]["head_dim_v"] for _, _, launcher, _ in taken} == {own}


@pytest.mark.parametrize(("capability", "dims"), [((9, 0), (84, 84)), ((9, 0), (264, 264)), ((10, 0), (80, 80))])
def test_other_heads_are_refused_in_a_sentence(capability, dims, monkeypatch) -> None:
    monkeypatch.setattr(operator, "_known", {})
    monkeypatch.setattr(operator, "capability_of", lambda kind, device: capability)
    q = torch.zeros(1, 1, 4, dims[0], dtype=torch.bfloat16)
    said = operator.refusal(q, cache(4, 16, 1, dims[0]), *dims)
    assert said is not None and "head_dim: expected one that a serving kernel has" in said
    assert ("or a multiple of 8 up to 256" in said) == (capability == (9, 0))


def test_heads_with_kernels_of_their_own_keep_them_where_wider_ones_take_fewer_columns() -> None:
    for family in ("", "hopper_serving", "hopper_prefill"):
        asked = registry.usable(registry.read_index(registry.INDEX), None, family)
        serving = tuple(e for e in asked if e.direction == "serve" and not e.cache)
        for dims in ((192, 128), (128, 128), (64, 64), (256, 256)):
            kept = registry.candidates((9, 0), "bf16", *dims, "window", serving)
            assert {(e.head_dim_qk, e.head_dim_v) for e in kept} == {dims}, (family, dims)


def test_latent_attention_has_a_kernel_of_its_own_on_hopper(monkeypatch) -> None:
    monkeypatch.setattr(operator, "_known", {})
    monkeypatch.setattr(operator, "capability_of", lambda kind, device: (9, 0))
    q, k = torch.zeros(1, 1, 16, 576, dtype=torch.bfloat16), cache(4, 64, 1, 576)
    found = operator._find(q, k, 576, 512)
    for kernels, family in (
        (found.of(k, k[..., :512]), "hopper_mla"),
        (found.of(k[:0], k[:0, ..., :512]), "triton_serving"),
    ):
        ((first, last, launcher, _),) = kernels
        assert (first, last, launcher._module.TILECAST["family"]) == (0, registry.NO_LIMIT, family)


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_blackwells_kernel_decodes_where_somebody_asks_for_it(capability, found, monkeypatch) -> None:
    asked = registry.usable(registry.read_index(registry.INDEX), None, "blackwell_serving")
    monkeypatch.setattr(registry, "shipped_serving", lambda: tuple(e for e in asked if e.direction == "serve"))
    assert found(capability, 128, cache(4, 16, 1, 128)) == [
        (0, 128, "blackwell_serving"), (129, registry.NO_LIMIT, "triton_serving"),
    ]  # fmt: skip
    # What the copy engine does not take, and head dimensions without one, are the portable kernels'.
    for dim, k in ((128, cache(0, 16, 1, 128)), (256, cache(4, 16, 1, 256))):
        monkeypatch.setattr(operator, "_known", {})
        assert found(capability, dim, k) == [(0, 16, "triton_serving"), (17, registry.NO_LIMIT, "triton_serving")]


def test_heads_of_fewer_columns_are_forecast_with_the_kernels_that_run_them() -> None:
    from tilecast.model.kernel.variants.hopper.serving import own_columns

    entries = [entry for entry in registry.shipped_serving() if entry.head_dim_min]
    for dim in range(8, 257, 4):
        for dim_v in {dim, 64, max(8, dim - 24)}:
            taken = {(e.head_dim_qk, e.head_dim_v) for e in entries if e.covers((9, 0), "bf16", dim, dim_v, "window")}
            assert taken == {own_columns(dim, dim_v)} & {(64, 64), (128, 128), (256, 256)}
            assert bool(taken) == (dim % 8 == dim_v % 8 == 0)


@pytest.mark.parametrize("heads", [(32, 8), (96, 8), (16, 16), (71, 1)], ids=str)
@pytest.mark.parametrize("queries", [(1, 512), (1, 3), (1, 12), (5, 20), (64, 512), (1, 1), (8, 8)], ids=str)
def test_a_forecast_step_has_the_launches_that_the_operator_makes(monkeypatch, heads, queries) -> None:
    from tilecast.model.kernel.workload import Workload
    from tilecast.model.machine.machine import load_machine
    from tilecast.model.step.batch import Batch
    from tilecast.model.step.forecast import shipped_pair
    from tilecast.model.step.launches.variant import launches

    monkeypatch.setattr(operator, "_known", {})
    monkeypatch.setattr(operator, "capability_of", lambda kind, device: (9, 0))
    q, k = torch.zeros(sum(queries), heads[0], 128, dtype=torch.bfloat16), cache(4, 16, heads[1], 128)
    starts = None if queries[0] == queries[1] else torch.tensor([0, queries[0], sum(queries)])
    kernels = operator._find(q, k, 128, 128).of(k, k)
    made = [
        (max(launcher._rows[0], 1), launcher._rows[1], beside & (LEADS | FOLLOWS))
        for launcher, _, beside in operator._wanted(kernels, operator._rows(q, k, starts, max(queries)))
    ]
    model = Workload(heads_q=heads[0], heads_kv=heads[1], seqlen_q=1, head_dim_qk=128, mask="causal")
    batch, machine = Batch(tuple((n, 4096) for n in queries), model, 16), load_machine("h200-sxm")
    forecast = [d for _, d in launches(shipped_pair(batch, machine), batch, 132)]
    assert [(d.least_rows, d.most_rows, d.beside + 2 * d.follows) for d in forecast] == [
        (first, min(last, 1 << 29), beside) for first, last, beside in made
    ]
