"""Forms of `triton_short` kernels for many programs in Triton's interpreter: the bits of those for few, and right.

TRITON_INTERPRET counts when triton is imported, so the numerics run in a process of their own: one test here starts pytest on
this file again.
"""

from __future__ import annotations

import importlib

import pytest
from support.interpreter import run_interpreted

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

#: Files with two forms, and keys that each is for.
FILES = {"triton_short_d256_32": 29, "triton_short_d256": 50, "triton_short_d256_blocks": 75}


@pytest.mark.interpreted
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (9, 3)], ids=str)
@pytest.mark.parametrize("module", FILES)
def test_both_forms_give_the_same_bits(module, window) -> None:
    kernel, keys = importlib.import_module(f"tilecast.kernels.generated.{module}"), FILES[module]
    torch.manual_seed(keys)
    q, k = (torch.randn(1, heads, length, 256).half() for heads, length in ((3, 30), (1, keys)))
    # Sums of P V are whole in float32 whatever their order, which NumPy chooses by the machine and by how many columns there are.
    q, v = q / 2, torch.randint(-1, 2, (1, 1, keys, 256)).half()
    made = []
    for many in (None, 1000):
        out, lse = torch.full_like(q, 7.0), torch.full(q.shape[:3], 7.0)
        grid, (*numbers, chosen) = kernel.plan(q, k, v, out, lse, *window)
        assert chosen is None  # two programs
        kernel.attention[grid](*numbers, many, 256**-0.5 * kernel.LOG2E, **kernel.OPTIONS)
        made.append((out, lse))
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    scores = q.float() @ k.float().transpose(2, 3) / 16
    places = torch.arange(30)[:, None] + keys - 30 - torch.arange(keys)[None]
    left, right = (1000 if n < 0 else n for n in window)
    scores = scores.masked_fill((places > left) | (places < -right), float("-inf"))
    want = torch.softmax(scores, -1).nan_to_num(0.0) @ v.float()
    torch.testing.assert_close(made[0][0].float(), want, rtol=0.0, atol=2e-3)
    torch.testing.assert_close(made[0][1], torch.logsumexp(scores, -1), rtol=0.0, atol=1e-4)


@pytest.mark.interpreted
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (600, 3)], ids=str)
@pytest.mark.parametrize(("module", "columns"), [("triton_short_d64_parts", 64), ("triton_short_d128_parts", 80)])
def test_parts_have_the_same_bits_by_programs_of_their_own_and_in_turn(module, columns, window, monkeypatch) -> None:
    """By the file's own launch and by `launching`'s, whose second call starts what the first one found."""
    from tilecast.kernels.launching import launcher

    kernel, keys, queries = importlib.import_module(f"tilecast.kernels.generated.{module}"), 700, 23
    # The interpreter knows no assembly, and has no product under way.
    monkeypatch.setattr(kernel, "ended", lambda o: o)
    monkeypatch.setattr(kernel, "zeros_like", lambda o: o * 0.0)
    torch.manual_seed(columns)
    q, k = (torch.randn(2, heads, length, columns).half() for heads, length in ((6, queries), (2, keys)))
    # As above: of each part sums are whole.
    q, v = q / 2, torch.randint(-1, 2, (2, 2, keys, columns)).half()
    made = []
    # Of eight tiles, three parts each, less of a window: all in turn, all by programs of their own, and two of them behind six in turn.
    for most, at_once, apart in ((0, 8, 0), (8, 8, 8), (2, 6, 2)):
        monkeypatch.setattr(kernel, "PARTS", ((0, 0, 256, most),))
        monkeypatch.setattr(kernel, "AT_ONCE", at_once)
        assert kernel.tiles_of(q, k) == (8, apart, 3, 256)
        assert kernel.scratch(q, k) == apart * 3 * 64 * (kernel.V_COLUMNS.value + 2)
        for call in (kernel.launch, *[launcher(kernel)] * 2):
            out, lse = torch.full_like(q, 7.0), torch.full(q.shape[:3], 7.0)
            call(q, k, v, out, lse, columns**-0.5, *window)
            made.append((out, lse))
    for one in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(one, made[0], strict=True))
    assert not kernel.scratch(q, k[:, :, :256]) and not kernel.scratch(q.new_empty(2, 6, 0, columns), k)
    scores = q.float() @ k.repeat_interleave(3, 1).float().transpose(2, 3) * columns**-0.5
    places = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)[None]
    left, right = (1000 if n < 0 else n for n in window)
    scores = scores.masked_fill((places > left) | (places < -right), float("-inf"))
    want = torch.softmax(scores, -1) @ v.repeat_interleave(3, 1).float()
    torch.testing.assert_close(made[0][0].float(), want, rtol=0.0, atol=2e-3)
    torch.testing.assert_close(made[0][1], torch.logsumexp(scores, -1), rtol=0.0, atol=1e-4)


def test_numerics(tmp_path) -> None:
    ran = run_interpreted(__file__, tmp_path)
    assert sum(name.startswith("test_both_forms") for name in ran) == 9, "all run in the interpreter"
    assert sum(name.startswith("test_parts_have") for name in ran) == 6
