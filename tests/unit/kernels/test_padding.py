"""Heads of widths that no kernel has: which kernel takes them, on what tensors, and what comes back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.stand_in_kernels import BACKWARD, HOPPER, KERNEL, tensors

from tilecast.kernels import registry
from tilecast.kernels.errors import UnsupportedError

NARROWER = replace(KERNEL, module="narrower", head_dim_qk=128, head_dim_v=128, head_dim_min=72)
KERNELS = (replace(KERNEL, module="d64"), replace(KERNEL, module="d96", head_dim_qk=96, head_dim_v=96), NARROWER)


@pytest.mark.parametrize(
    ("dims", "native", "widened"),
    [
        ((64, 64), ["d64"], (64, 64)),
        ((80, 80), ["narrower"], (96, 96)),
        ((96, 96), ["d96", "narrower"], (96, 96)),
        ((128, 64), ["narrower"], (128, 128)),
        ((100, 100), [], (128, 128)),  # no multiple of 8
        ((40, 64), [], (64, 64)),  # below what the kernel of 128 columns takes
        ((40, 80), ["narrower"], (96, 96)),
        ((136, 8), [], None),
    ],
)
def test_kernels_of_a_width(dims, native, widened) -> None:
    found = registry.candidates(HOPPER, "bf16", *dims, "none", KERNELS)
    # Kernels alike but for their widths: what one hides is asked for by itself.
    assert [e.module for e in KERNELS if e.covers(HOPPER, "bf16", *dims, "none")] == native
    assert [e.module for e in found] == native[:1]
    assert registry.widened(HOPPER, "bf16", *dims, "none", KERNELS) == widened


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    ("d", "dv", "wide"), [(80, 80, (192, 128)), (33, 17, (64, 64)), (64, 100, (192, 128)), (192, 40, (192, 128))]
)
def test_a_kernel_gets_zeros_behind_the_last_column(op, torch, d, dv, wide, layout) -> None:
    q, k, v = tensors(torch, d=d, dv=dv)
    given = [x.transpose(1, 2).contiguous() for x in (q, k, v)] if layout == "bshd" else (q, k, v)
    out, lse = op.attention(*given, causal=True, return_lse=True, layout=layout)
    (_, launched), *more = op.launched
    assert not more and [x.shape[3] for x in launched[:4]] == [wide[0], wide[0], wide[1], wide[1]]
    for x, own in zip(launched[:3], (q, k, v), strict=True):
        assert torch.equal(x[..., : own.shape[3]], own) and not x[..., own.shape[3] :].any()
    assert launched[5] == pytest.approx(d**-0.5)  # of the heads' own width
    wanted, sums = op.attention(
        *(x.double() for x in given), causal=True, return_lse=True, layout=layout, fallback="sdpa"
    )
    torch.testing.assert_close(out.double(), wanted, atol=3e-3, rtol=3e-3)
    torch.testing.assert_close(lse, sums.float(), atol=1e-3, rtol=1e-3)
    assert out.is_contiguous() and out.shape[3] == dv


@pytest.mark.parametrize(("d", "dv"), [(80, 80), (33, 17), (192, 40)])
def test_gradients_come_back_in_their_own_width(op, torch, d, dv) -> None:
    leaves = [x.requires_grad_() for x in tensors(torch, d=d, dv=dv)]
    out, lse = op.attention(*leaves, window=(3, 0), return_lse=True)
    weights = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), leaves, weights)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = op.attention(*wide, window=(3, 0), return_lse=True, fallback="sdpa")
    wanted = torch.autograd.grad(exact, wide, [x.double() for x in weights])
    for x, want, leaf in zip(found, wanted, leaves, strict=True):
        assert x.shape == leaf.shape and x.dtype == leaf.dtype
        torch.testing.assert_close(x.double(), want, atol=1e-2, rtol=1e-2)


def test_wider_heads_than_any_are_refused(op, torch, monkeypatch) -> None:
    with pytest.raises(
        UnsupportedError, match=r"head_dim: expected at most that of a shipped kernel \(192/128\), got 193/8"
    ):
        op.attention(*tensors(torch, d=193, dv=8))
    monkeypatch.setattr(registry, "shipped_backward", lambda: tuple(e for e in BACKWARD if e.head_dim_qk == 64))
    with pytest.raises(UnsupportedError, match=r"at most that of a shipped backward pass \(64\), got 65/64"):
        op.attention(*(x.requires_grad_() for x in tensors(torch, d=65)))
