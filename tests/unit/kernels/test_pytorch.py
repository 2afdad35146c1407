"""tilecast under PyTorch's flash attention, as far as a machine without a GPU shows it: on tensors without data.

The kernels underneath are PyTorch's fake ones, which an activation for "Meta" overrides as one for "CUDA" overrides the real
ones; `tests/gpu/test_pytorch_gpu.py` has the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.nn.attention", reason="PyTorch with a registry")

from torch.nn import attention  # noqa: E402

import tilecast  # noqa: E402
from tilecast.kernels import UnsupportedError  # noqa: E402
from tilecast.kernels import pytorch as subject  # noqa: E402

pytestmark = pytest.mark.skipif(
    not hasattr(attention, "register_flash_attention_impl"), reason="PyTorch before 2.10 has no registry"
)
FLASH = torch.ops.aten._scaled_dot_product_flash_attention
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """What reaches our kernels."""
    seen: list[tuple[str, tuple[Any, ...]]] = []
    monkeypatch.setattr(subject, "forward_into", lambda *a: seen.append(("forward", a)))
    monkeypatch.setattr(subject, "backward_into", lambda *a: seen.append(("backward", a)))
    return seen


@pytest.fixture
def active() -> Iterator[None]:
    made = subject._Active("Meta")
    yield
    made.remove()


def tensors(*shape: int, dtype: Any = torch.bfloat16) -> tuple[Any, Any, Any]:
    return tuple(torch.empty(shape, dtype=dtype, device="meta") for _ in range(3))  # type: ignore[return-value]


def test_registering_activates_nothing() -> None:
    before = attention.current_flash_attention_impl()
    tilecast.register_flash_attention()
    tilecast.register_flash_attention()
    assert "tilecast" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() == before


def test_without_a_registry_the_refusal_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(attention, "register_flash_attention_impl")
    with pytest.raises(UnsupportedError, match=r"expected PyTorch 2.10 or newer, .* got .*; call tilecast.attention"):
        tilecast.register_flash_attention()


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("causal", [False, True])
def test_calls_that_mean_the_same_run_on_ours(calls: list[Any], causal: bool) -> None:
    q, k, v = tensors(2, 8, 100, 64)
    made = FLASH(q, k, v, 0.0, causal, scale=0.5)
    (name, (out, lse, *given)) = calls.pop()
    assert name == "forward" and given == [q, k, v, 0.5, -1, 0 if causal else -1]
    assert made[0] is out and made[1] is lse and made[4:6] == (100, 100)
    assert out.stride() == q.stride() and lse.shape == (2, 8, 100) and lse.dtype == torch.float32
    gradients = BACKWARD(out, q, k, v, out, lse, None, None, 100, 100, 0.0, causal, made[6], made[7], scale=0.5)
    (name, (written, *given)) = calls.pop()
    assert name == "backward" and given == [out, q, k, v, out, lse, None, 0.5, -1, 0 if causal else -1, True]
    assert all(ours is theirs for ours, theirs in zip(gradients, written, strict=True))


@pytest.mark.usefixtures("active", "calls")
@pytest.mark.parametrize(("asked", "everywhere"), [(True, False), (False, False), (False, True)])
def test_gradients_are_deterministic_unless_asked_otherwise(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, asked: bool, everywhere: bool
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: everywhere)
    made = subject._Active("Meta", asked)
    try:
        q, k, v = tensors(1, 2, 64, 64)
        BACKWARD(q, q, k, v, q, q[..., 0].float(), None, None, 64, 64, 0.0, False, q, q)
    finally:
        made.remove()
    assert calls.pop()[1][-1] is (asked or everywhere)


def test_outputs_follow_the_memory_of_the_query() -> None:
    # Sequence first, as torch.nn.MultiheadAttention has it: the batch inside.
    q = torch.empty((100, 2, 8, 64), dtype=torch.bfloat16, device="meta").permute(1, 2, 0, 3)
    out = FLASH(q, q, q)[0]
    assert out.stride() == q.stride() == (512, 64, 1024, 1)


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((2, 8, 100, 64), (2, 8, 100, 64)), {"dropout_p": 0.1}),
        (((2, 8, 100, 64), (2, 8, 120, 64)), {"is_causal": True}),
        (((2, 8, 100, 64), (2, 8, 0, 64)), {}),
        (((2, 8, 100, 64), (2, 8, 100, 64)), {"return_debug_mask": True}),
    ],
    ids=["dropout", "causal over unequal lengths", "no keys", "debug mask"],
)
def test_what_is_not_ours_goes_underneath(calls: list[Any], shapes: Any, options: dict[str, Any]) -> None:
    q = torch.empty(shapes[0], dtype=torch.bfloat16, device="meta")
    k = torch.empty(shapes[1], dtype=torch.bfloat16, device="meta")
    assert FLASH(q, k, k, **options)[0].shape == q.shape
    assert not calls


@pytest.mark.usefixtures("active")
def test_a_problem_that_no_kernel_runs_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def refuse(*arguments: Any) -> None:
        asked.append(arguments)
        raise UnsupportedError("no kernel")

    monkeypatch.setattr(subject, "forward_into", refuse)
    monkeypatch.setattr(subject, "backward_into", refuse)
    q, k, v = tensors(2, 8, 100, 80)
    for _ in range(3):
        out, lse, *_, seed, offset, _ = FLASH(q, k, v)
        assert out.shape == q.shape
        grads = BACKWARD(out, q, k, v, out, lse, None, None, 100, 100, 0.0, False, seed, offset)
        assert [g.shape for g in grads] == [q.shape] * 3
    assert len(asked) == 2
    other = tensors(2, 8, 100, 64)
    FLASH(*other)
    assert len(asked) == 3


def test_restored_kernels_are_those_of_before(calls: list[Any]) -> None:
    q, k, v = tensors(2, 8, 100, 64)
    made = subject._Active("Meta")
    FLASH(q, k, v)
    assert len(calls) == 1
    made.remove()
    made.remove()
    assert FLASH(q, k, v)[0].shape == q.shape and len(calls) == 1


@pytest.mark.usefixtures("calls")
def test_pytorch_activates_and_restores_it(monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    monkeypatch.setattr(subject, "_activate", lambda deterministic: subject._Active("Meta", deterministic))
    subject.register_flash_attention()
    q, k, v = tensors(2, 8, 100, 64)
    attention.activate_flash_attention_impl("tilecast")
    try:
        assert attention.current_flash_attention_impl() == "tilecast"
        FLASH(q, k, v)
        assert len(calls) == 1
    finally:
        attention.restore_flash_attention_impl()
        monkeypatch.undo()
        subject.register_flash_attention()
    FLASH(q, k, v)
    assert len(calls) == 1 and attention.current_flash_attention_impl() is None
