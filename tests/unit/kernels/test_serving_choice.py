"""Which serving kernels the operator runs: rows that no two of them share, and caches that the best one does not take."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tilecast.kernels import registry  # noqa: E402
from tilecast.kernels.serving import operator  # noqa: E402


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
        (torch.bfloat16, {16: "hopper_serving_runs", 64: "hopper_serving", registry.NO_LIMIT: "hopper_prefill"}),
        (torch.uint8, {16: "hopper_serving_runs_e4m3", 32: "hopper_serving_e4m3", registry.NO_LIMIT: "triton_serving"}),
    ],
)
def test_hopper_decodes_what_the_copy_engine_takes_and_no_two_kernels_take_the_same_rows(
    found, dtype, families
) -> None:
    kernels, begin = found((9, 0), 128, cache(4, 16, 1, 128, dtype=dtype)), 0
    for kernel, (most, family) in zip(kernels, families.items(), strict=True):
        assert kernel == (begin, most, family)
        begin = most + 1


def test_of_three_launches_the_two_that_run_at_the_same_time_come_last(monkeypatch) -> None:
    monkeypatch.setattr(operator, "_known", {})
    monkeypatch.setattr(operator, "capability_of", lambda kind, device: (9, 0))
    k = cache(4, 16, 1, 128)
    kernels = operator._find(torch.zeros(1, 1, 4, 128, dtype=torch.bfloat16), k, 128, 128).of(k, k)

    def order(least: int, most: int) -> list[tuple[str, bool]]:
        wanted = operator._wanted(kernels, least, most)
        return [(launcher._module.TILECAST["family"].removeprefix("hopper_"), beside) for launcher, _, beside in wanted]

    assert order(1, 400) == [("serving", False), ("serving_runs", True), ("prefill", True)]
    assert order(20, 400) == [("serving", True), ("prefill", True)]
    assert order(1, 40) == [("serving_runs", False), ("serving", False)]
    assert order(4, 4) == [("serving_runs", False)]


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


@pytest.mark.parametrize(("capability", "dim"), [((8, 0), 128), ((10, 0), 128), ((10, 3), 64), ((9, 0), 96)])
def test_other_devices_and_heads_keep_them_too(found, capability, dim) -> None:
    assert found(capability, dim, cache(4, 16, 1, dim)) == [
        (0, 16, "triton_serving"), (17, registry.NO_LIMIT, "triton_serving"),
    ]  # fmt: skip


def test_head_dim_256_decodes_on_the_portable_kernels_and_has_prefill_of_its_own(found) -> None:
    kernels = found((9, 0), 256, cache(4, 16, 1, 256))
    assert kernels == [(0, 16, "triton_serving"), (17, 64, "triton_serving"), (65, registry.NO_LIMIT, "hopper_prefill")]


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
