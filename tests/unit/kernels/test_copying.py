"""Copies for kernels: which tensors are copied, how they lie, and what becomes one launch of the generated kernel."""

from __future__ import annotations

import types

import pytest

torch = pytest.importorskip("torch")

from tilecast.kernels import copying  # noqa: E402
from tilecast.kernels.copying import copied, empty_output, readable  # noqa: E402
from tilecast.kernels.padding import padded  # noqa: E402


def rows(heads_inside: bool = False, columns: int = 64, more: int = 3) -> torch.Tensor:
    made = torch.randn(2, 5, 3, columns + more).bfloat16()[..., :columns]
    return made.transpose(1, 2) if heads_inside else made


@pytest.mark.parametrize("heads_inside", [False, True])
def test_a_copy_has_the_memory_order_of_its_tensor(heads_inside: bool) -> None:
    x = rows(heads_inside)
    (made,) = readable(x)
    assert torch.equal(made, x) and made.stride() == empty_output(x, 64).stride()
    assert (made.stride(1) < made.stride(2)) == heads_inside


def test_what_kernels_read_stays_itself() -> None:
    plain, wide, thin = torch.zeros(2, 5, 3, 64).bfloat16(), rows(more=8), rows(columns=60)
    assert all(x is y for x, y in zip(readable(plain, wide, thin), (plain, wide, thin), strict=True))
    one, other = readable(plain, rows())
    assert one is plain and other.stride() == plain.stride()
    for other in (plain.transpose(2, 3), torch.zeros(1921).bfloat16()[1:].view(2, 5, 3, 64)):
        assert readable(other)[0] is not other


def test_zeros_come_behind_the_last_column() -> None:
    x, y = rows(columns=60), rows(columns=64)
    made, kept = copied([(x, 72), (y, None)])
    assert kept is y and made.shape == (2, 5, 3, 72)
    assert torch.equal(made, torch.nn.functional.pad(x, (0, 12)))


def test_three_tensors_are_one_launch_and_others_go_by_pytorch(monkeypatch) -> None:
    launches: list[tuple[int, ...]] = []

    def launch(tensors, rooms) -> None:
        launches.append(tuple(x.shape[3] for x in rooms))
        for x, to in zip(tensors, rooms, strict=True):
            to.zero_()[..., : x.shape[3]].copy_(x)

    launch.most, launch.widest = 3, 64
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    monkeypatch.setattr(copying, "_known", {0: launch})
    given = [rows() for _ in range(4)]
    assert all(
        torch.equal(x, y) for x, y in zip(readable(*given, given[0].contiguous()), (*given, given[0]), strict=True)
    )
    assert launches == [(64, 64, 64), (64,)]
    # No whole 16 bytes, another type, and where the kernel does not run.
    copied([(rows(columns=60).transpose(1, 2), 60)])
    copied([(rows().float(), 64)])
    copied([(given[0], 72)])  # wider than the kernel takes
    monkeypatch.setattr(copying, "_known", {0: None})
    assert torch.equal(copied([(given[0], 72)])[0][..., :64], given[0])
    assert len(launches) == 2


def test_where_the_kernel_does_not_run(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert copying._find(0) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(copying, "_MODULE", "no_such_module")
    assert copying._find(0) is None


def test_a_shape_is_planned_once_and_keeps_no_tensor(monkeypatch) -> None:
    plans: list = []
    starts: list = []
    monkeypatch.setattr(
        copying, "compiled_starter",
        lambda kernel, options, grid, arguments, takes, given: starts.append((grid, takes, given)) or (lambda *tensors: plans.append(tensors)),
    )  # fmt: skip

    def plan(tensors, rooms):
        return ((7, 1, 1), (*tensors, *rooms)) if tensors[0].numel() else ()

    launch = copying.copier(types.SimpleNamespace(plan=plan, copy=None, OPTIONS={}, MOST=3, WIDEST=1024))
    x = rows()
    for _ in range(2):
        launch((x, x), (empty_output(x, 64), empty_output(x, 64)))
    # The same tensor twice is still two arguments.
    assert starts == [((7, 1, 1), {0: 0, 1: 1, 2: 2, 3: 3}, 4)] and len(plans) == 2
    launch((x[:0],), (empty_output(x[:0], 64),))
    assert len(starts) == 1


def test_heads_that_no_kernel_has_are_copied_for_both_passes() -> None:
    seen: list = []
    launch = padded(lambda *given: seen.append(given), 64, 64, "bwd")
    q, k, v, out, dout = (rows(columns=60) for _ in range(5))
    lse, gradients = torch.zeros(2, 5, 3), [torch.full_like(x, 7.0) for x in (q, k, v)]
    launch(q, k, v, out, lse, dout, *gradients, 0.5)
    assert len(seen[0]) == 10 and seen[0][4] is lse and seen[0][9] == 0.5
    for x, given in zip((q, k, v, out, dout), (*seen[0][:4], seen[0][5]), strict=True):
        assert torch.equal(given, torch.nn.functional.pad(x, (0, 4)))
