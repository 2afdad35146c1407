"""`triton_copy` in Triton's interpreter: every bit of tensors that lie in many ways, zeros behind them, and what it refuses.

TRITON_INTERPRET counts when triton is imported, so the numerics run in a process of their own: one test here starts pytest on
this file again.
"""

from __future__ import annotations

import pytest
from support.interpreter import run_interpreted

from tilecast.codegen.portable.copy import generate_copy_rows
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tilecast.kernels.copying import empty_output  # noqa: E402
from tilecast.kernels.generated import triton_copy as kernel  # noqa: E402


def lying(how: str, batch: int, heads: int, length: int, columns: int) -> torch.Tensor:
    """A tensor of all sorts of 16 bits, NaNs of any payload among them."""

    def bits(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16)

    if how == "odd address":
        return bits(batch * heads * length * columns + 1)[1:].view(batch, heads, length, columns)
    if how == "columns outside":
        return bits(batch, heads, columns, length).transpose(2, 3)
    if how == "one number":
        return bits(1).expand(batch, heads, length, columns)
    if how == "a batch shared":
        return bits(1, length, heads, columns + 3)[..., :columns].transpose(1, 2).expand(batch, -1, -1, -1)
    return bits(batch, length, heads, columns + 3)[..., 1 : columns + 1].transpose(1, 2)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("kinds", "shape", "columns", "wide"),
    [
        (("odd rows", "odd address", "odd rows"), (2, 3, 25), (64, 64, 64), (64, 64, 64)),
        (("columns outside",), (1, 2, 40), (80,), (80,)),
        (("one number", "a batch shared"), (3, 1, 33), (96, 96), (96, 96)),
        (("odd rows", "odd rows", "odd rows"), (2, 3, 1), (100, 100, 36), (128, 128, 64)),
        (("odd rows", "one number", "odd address"), (0, 3, 1), (8, 8, 8), (8, 8, 8)),
    ],
)
def test_every_bit_is_copied_and_zeros_come_behind(kinds, shape, columns, wide) -> None:
    torch.manual_seed(len(kinds))
    # Each tensor has another number of heads, and so of blocks.
    given = [
        lying(how, shape[0], shape[1] * (n + 1), shape[2], width)
        for n, (how, width) in enumerate(zip(kinds, columns, strict=True))
    ]
    rooms = [empty_output(x, n).fill_(7.0) for x, n in zip(given, wide, strict=True)]
    kernel.launch(given, rooms)
    for x, room in zip(given, rooms, strict=True):
        width = x.shape[3]
        assert torch.equal(room[..., :width].contiguous().view(torch.int16), x.contiguous().view(torch.int16))
        assert not room[..., width:].any()


def test_numerics(tmp_path) -> None:
    ran = run_interpreted(__file__, tmp_path)
    assert sum(name.startswith("test_every_bit") for name in ran) == 5, "all run in the interpreter"


@pytest.mark.parametrize(
    ("columns", "room", "text"),
    [
        (64, torch.zeros(1, 2, 3, 64), r"got 64 columns, \('torch.float32'"),
        (64, torch.zeros(1, 2, 4, 64).bfloat16(), r"got 64 columns, .* \(1, 2, 4\)"),
        (64, torch.zeros(1, 2, 6, 64).bfloat16()[:, :, ::2], "got 64 columns, .* False, True"),
        (64, torch.zeros(1, 2, 3, 56).bfloat16(), "room without gaps of at least 64 columns, .* got 56 columns"),
        (60, torch.zeros(1, 2, 3, 60).bfloat16(), "a multiple of 8 up to 1024, .* got 60 columns"),
        (64, torch.zeros(1 + 2 * 3 * 64).bfloat16()[1:].view(1, 2, 3, 64), r"got 64 columns, .* 2, device"),
    ],
)
def test_launches_refuse_in_one_sentence(columns, room, text) -> None:
    with pytest.raises(ValueError, match=f"tensors, rooms: expected .*{text}"):
        kernel.launch([torch.zeros(1, 2, 3, columns).bfloat16()], [room])


def test_more_tensors_than_a_launch_has_are_refused() -> None:
    x = torch.zeros(1, 2, 3, 64).bfloat16()
    with pytest.raises(ValueError, match="expected as many of both, 1 to 3, got 4 and 4"):
        kernel.launch([x] * 4, [x] * 4)


def test_other_types_are_not_written() -> None:
    with pytest.raises(VariantError, match="dtype must be bf16 or fp16, got 'fp8'"):
        generate_copy_rows(Workload(dtype="fp8"), load_machine("h200-sxm"))
