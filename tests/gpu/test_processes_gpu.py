"""Other processes end while a kernel runs: the GPU puts it aside and takes it up again, and its bits stay.

A kernel whose shared memory holds a barrier that was never invalidated under something else comes back with 32 bytes of it
changed (docs/notes/serving-kernels.md): every process that ended beside latent attention made its results NaN.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import tilecast  # noqa: E402

#: A process that multiplies matrices from when it says so, and ends after some seconds.
NEIGHBOUR = """
import sys, time
import torch
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
print("begins", flush=True)
until = time.time() + float(sys.argv[1])
while time.time() < until:
    (a @ a).sum().item()
"""


def random(*shape: int) -> Any:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def paged(batch: int, keys: int, *row: int) -> tuple[Any, Any, Any]:
    """(pool, table, keys of each sequence)."""
    pages = batch * keys // 64
    table = torch.randperm(pages, device="cuda").to(torch.int32).view(batch, -1)
    used = (torch.arange(batch, device="cuda") % 7 * 500 + keys - 3200).to(torch.int32)
    return random(pages, 64, *row), table, used


def latent(batch: int, keys: int):
    cache, table, used = paged(batch, keys, 1, 576)
    q = random(batch, 1, 128, 576)
    return lambda: tilecast.attention_mla(q, cache, used, table, causal=True)


def serving(batch: int, queries: int, dim: int):
    k, table, used = paged(batch, 4096, 8, dim)
    v, q = torch.randn_like(k), random(batch, queries, 32, dim)
    return lambda: tilecast.attention_kvcache(q, k, v, used, table, causal=True)


def forward(dim: int):
    q, k, v = (random(4, 16, 8192, dim) for _ in range(3))
    return lambda: tilecast.attention(q, k, v, causal=True)


def gradients(dim: int):
    q, k, v = (random(2, 16, 4096, dim).requires_grad_() for _ in range(3))
    given = random(2, 16, 4096, dim)
    return lambda: torch.stack(torch.autograd.grad(tilecast.attention(q, k, v, causal=True), (q, k, v), given))


def product():
    a, b, c = random(8192, 512), random(512, 8192), random(8192, 8192)
    return lambda: tilecast.addmm(c, a, b)


CALLS = {
    "latent attention in a full batch": lambda: latent(132, 4096),
    "latent attention in splits": lambda: latent(4, 16384),
    "decode": lambda: serving(64, 1, 128),
    "decode at head_dim 256": lambda: serving(64, 1, 256),
    "40 queries": lambda: serving(64, 40, 128),
    "chunks": lambda: serving(16, 512, 128),
    "forward": lambda: forward(128),
    "forward at head_dim 256": lambda: forward(256),
    "gradients": lambda: gradients(128),
    "gradients at head_dim 256": lambda: gradients(256),
    "product": product,
}


@pytest.mark.parametrize("name", CALLS)
def test_bits_stay_while_other_processes_end(name: str) -> None:
    torch.manual_seed(0)
    call = CALLS[name]()
    first = call().detach().clone()
    call()
    torch.cuda.synchronize()
    neighbours = [
        subprocess.Popen([sys.executable, "-c", NEIGHBOUR, str(seconds)], stdout=subprocess.PIPE, text=True)
        for seconds in (1, 1.5, 2, 2.5)
    ]
    try:
        for one in neighbours:
            assert one.stdout is not None and one.stdout.readline() == "begins\n"
        calls, changed = 0, 0
        while any(one.poll() is None for one in neighbours):
            calls += 1
            changed += not torch.equal(call(), first)
        assert calls and not changed, f"{changed} of {calls} calls"
    finally:
        for one in neighbours:
            one.kill()
            one.wait()
