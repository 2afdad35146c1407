"""Stand-ins behind the shipped kernels' ``launch``: the fallback forwards, the formulas of gradients backwards, on the CPU."""

from __future__ import annotations

import pytest
from support.stand_in_kernels import BACKWARD, HOPPER, SHIPPED

from tilecast.kernels import registry


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def op(torch, monkeypatch):
    """The operator module with kernels for the CPU; ``op.launched`` lists (module, arguments), ``op.orders`` whether gradients were to be deterministic."""
    from tilecast.kernels import operator, selection
    from tilecast.kernels.fallback import sdpa_attention, visible_keys

    launched, orders = [], []

    def launcher(entry):
        if entry.direction == "bwd":
            return backward_launch(entry)

        def launch(q, k, v, out, lse, scale, window_left=-1, window_right=-1):
            launched.append((entry.module, (q, k, v, out, lse, scale, window_left, window_right)))
            left, right = (-1, 0) if entry.mask == "causal" else (window_left, window_right)
            values, sums = sdpa_attention(q, k, v, scale, left, right, True)
            out.copy_(values)
            if lse is not None:
                lse.copy_(sums)

        return launch

    def backward_launch(entry):
        def launch(
            q, k, v, out, lse, dout, dq, dk, dv, scale, window_left=-1, window_right=-1, dlse=None, terms=None,
            deterministic=True,
        ):  # fmt: skip
            orders.append(deterministic)
            launched.append(
                (entry.module, (q, k, v, out, lse, dout, dq, dk, dv, scale, window_left, window_right, dlse))
            )
            left, right = (-1, 0) if entry.mask == "causal" else (window_left, window_right)
            group = q.shape[1] // k.shape[1]
            rows, dsum, wide_k, wide_v = (
                q.double(),
                dout.double(),
                *(x.double().repeat_interleave(group, 1) for x in (k, v)),
            )
            weights = (rows @ wide_k.mT * scale - lse.double()[..., None]).exp()
            seen = visible_keys(q.shape[2], k.shape[2], left, right, q.device)
            weights = torch.where(
                (lse > -float("inf"))[..., None] & (seen if seen is not None else torch.tensor(True)), weights, 0.0
            )
            delta = (dsum * out.double()).sum(-1) - (0.0 if dlse is None else dlse.double())
            scores = weights * (dsum @ wide_v.mT - delta[..., None]) * scale
            dq.copy_(scores @ wide_k)
            dk.copy_((scores.mT @ rows).unflatten(1, (-1, group)).sum(2))
            dv.copy_((weights.mT @ dsum).unflatten(1, (-1, group)).sum(2))

        return launch

    monkeypatch.setattr(registry, "shipped", lambda: SHIPPED)
    monkeypatch.setattr(registry, "shipped_backward", lambda: BACKWARD)
    monkeypatch.setattr(registry, "launcher", launcher)
    monkeypatch.setattr(selection, "capability_of", lambda kind, device: HOPPER)
    selection.forward_kernels.clear()
    selection.backward_kernels.clear()
    operator.launched, operator.orders = launched, orders
    yield operator
    del operator.launched, operator.orders
    selection.forward_kernels.clear()
    selection.backward_kernels.clear()
