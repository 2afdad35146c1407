"""Copies for kernels on the GPU at hand: every bit, zeros behind them, one launch for three tensors, and as PyTorch in a graph."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tilecast.kernels.copying import copied, readable  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def lying(how: str, batch: int, heads: int, length: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of all sorts of 16 bits, NaNs of any payload among them."""

    def bits(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device="cuda").view(dtype)

    if how == "odd address":
        return bits(batch * heads * length * columns + 1)[1:].view(batch, heads, length, columns)
    if how == "columns outside":
        return bits(batch, heads, columns, length).transpose(2, 3)
    if how == "one number":
        return bits(1).expand(batch, heads, length, columns)
    if how == "a batch shared":
        return bits(1, length, heads, columns + 3)[..., :columns].transpose(1, 2).expand(batch, -1, -1, -1)
    if how == "every second column":
        return bits(batch, length, heads, 2 * columns)[..., ::2].transpose(1, 2)
    return bits(batch, length, heads, columns + 3)[..., 1 : columns + 1].transpose(1, 2)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.contiguous().view(torch.int16), y.contiguous().view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "columns"),
    [((2, 3, 1), 8), ((1, 1, 77), 256), ((3, 5, 1000), 128), ((2, 7, 33), 80), ((70000, 1, 1), 64)],
)
def test_every_bit_is_copied(shape, columns, dtype) -> None:
    torch.manual_seed(columns)
    kinds = ("odd rows", "odd address", "columns outside", "one number", "a batch shared", "every second column")
    given = [lying(how, *shape, columns, dtype) for how in kinds]
    for x, made in zip(given, readable(*given), strict=True):
        assert made.stride(3) == 1 and not any(n % 8 for n in made.stride()[:3])
        assert same_bits(x, made)
    for x, made in zip(given, copied([(x, 2 * columns) for x in given]), strict=True):
        width = x.shape[3]
        assert same_bits(x, made[..., :width]) and not made[..., width:].any()


def test_copies_in_a_graph_are_of_what_tensors_hold_then() -> None:
    x, y = (lying("odd rows", 2, 3, 65, 64, torch.bfloat16) for _ in range(2))
    for _ in range(2):
        readable(x, y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = readable(x, y)
    x.fill_(2.0)
    graph.replay()
    torch.cuda.synchronize()
    assert all(same_bits(a, b) for a, b in zip((x, y), made, strict=True))
