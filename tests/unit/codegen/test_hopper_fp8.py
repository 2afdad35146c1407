"""e4m3 kernels of the hopper_ws family on the emulator, and what the family refuses in e4m3.

Judged beside P rounded to e4m3 in float64: that loses what the format loses, and a kernel, whose blocks have maxima of their
own, may lose half as much again.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tilecast.codegen.generate import generate
from tilecast.codegen.ship import KERNELS, read_e4m3_list
from tilecast.model.families import find_family, legality, parse_variant, writable
from tilecast.model.kernel.variants.fa3 import Fa3Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

torch = pytest.importorskip("torch")

from tilecast.emulator.any_kernel import emulated  # noqa: E402

H200 = load_machine("h200-sxm")
E4M3 = torch.float8_e4m3fn
SHIPPED = {kernel.module: kernel for kernel in read_e4m3_list()}
#: Chained and promoted products, whose exponentials are partly polynomials, in turns, without overlap.
OTHERS = (
    "warpgroups=2,tile_n=128,kv_stages=2,rescale=always,emulated_share=0.125,ping_pong=true,scheduler=grid",
    "warpgroups=1,tile_n=32,kv_stages=3,rescale=conditional,rescale_threshold=2,overlap=false,ping_pong=false,scheduler=longest-first",
)


def exact(q, k, v, causal, rounded):
    """(out, log-sum-exp) in float64, with P rounded to e4m3 or not."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[3])
    if causal:
        rows = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
        s = s.masked_fill(torch.arange(k.shape[2])[None] > rows, -math.inf)
    largest = s.amax(-1, keepdim=True)
    p = torch.exp(s - torch.where(largest.isinf(), 0.0, largest)) * 256
    total = p.sum(-1, keepdim=True)
    p = p.float().to(E4M3).double() if rounded else p
    return torch.where(total > 0, p @ v / total, 0.0), torch.logsumexp(s, -1)


def judge(path, work, rows, keys, heads, mode, along_keys=False, sink=False):
    """Run a file on drawn tensors, each key head with factors of its own, and hold it against float64."""
    torch.manual_seed(rows)
    (hq, hk), dim, causal = heads, work.head_dim_qk, work.mask == "causal"
    q, k, v = torch.randn(1, hq, rows, dim), torch.randn(1, hk, keys, dim), torch.randn(1, hk, keys, dim)
    if sink:
        # Kernels meet the first key last: it outgrows what a reference was by many octaves.
        q, k[:, :, 0] = q + 0.5, 2.0
    q, k, v = (x.to(E4M3) for x in (q, k, v))
    if along_keys:
        v = v.view(torch.uint8).transpose(2, 3).contiguous().transpose(2, 3).view(E4M3)
    factors = [torch.rand(1, hk) + 0.5, torch.tensor([0.8]), torch.rand(1, hk) + 0.5]
    out, lse = torch.full(q.shape, math.nan, dtype=torch.bfloat16), torch.full(q.shape[:3], math.nan)
    names = ("q_descale", "k_descale", "v_descale")
    emulated(str(path), machine="h200", mode=mode, seed=rows, sms=2).launch(
        q, k, v, out, lse, dim**-0.5, **dict(zip(names, factors, strict=True))
    )
    group = hq // hk
    wide = (
        q.double() * factors[0].double().repeat_interleave(group, 1)[..., None, None],
        k.double() * float(factors[1]),
        v.double() * factors[2].double()[..., None, None],
    )
    want, want_lse = exact(*wide, causal, False)
    floor, _ = exact(*wide, causal, True)
    error, allowed = (out.double() - want).norm() / want.norm(), (floor - want).norm() / want.norm()
    assert error <= 1.5 * allowed + 2**-8, (float(error), float(allowed))
    seen = torch.isfinite(want_lse)
    assert torch.equal(torch.isfinite(lse), seen)
    assert (lse.double() - want_lse)[seen].abs().max() < 1e-4


@pytest.mark.parametrize("module", SHIPPED)
def test_shipped_kernels_compute_attention(module: str) -> None:
    path, work = KERNELS / "generated" / f"{module}.py", SHIPPED[module].workload
    judge(path, work, 150, 300, (2, 1), "late")
    judge(path, work, 70, 200, (4, 2), "random", along_keys=True, sink=True)
    judge(path, work, 200, 90, (1, 1), "random")  # causal rows without a key


@pytest.mark.parametrize("variant", OTHERS)
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_other_variants_compute_attention(variant: str, mask: str, tmp_path: Path) -> None:
    work = Workload(1, 2, 1, 150, 300, 64, mask=mask, dtype="fp8")
    file = tmp_path / "kernel.py"
    file.write_text(generate(work, H200, find_family("fa3"), parse_variant(f"family=fa3,{variant}")).source)
    judge(file, work, 150, 300, (2, 1), "random")


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_the_chosen_variant_can_be_written(dim: int, mask: str) -> None:
    made = generate(Workload(head_dim_qk=dim, mask=mask, dtype="fp8"), H200, find_family("fa3"))
    assert isinstance(made.variant, Fa3Variant)
    # O in the accumulator of the matrix unit loses long sums: only who asks for it gets that.
    assert made.variant.rescale == "always"
    assert "float8e4nv" in made.source


@pytest.mark.parametrize(
    ("knobs", "dim", "text"),
    [
        ("rescale=anchored", 128, "use rescale=always or conditional"),
        ("rescale=conditional,rescale_threshold=8", 128, "must be at most 4 in e4m3"),
        ("rescale=conditional,rescale_threshold=2.5", 128, "must be a whole number in e4m3"),
        ("tile_n=256,warpgroups=1,rescale=always", 64, "tile_n must be at most 128 in e4m3"),
        ("tile_n=64,rescale=always", 96, "head_dim_qk must be 32, 64, 128, 256 in e4m3, got 96"),
    ],
)
def test_refusals_name_reason_and_lever(knobs: str, dim: int, text: str) -> None:
    verdict = writable(parse_variant(f"family=fa3,{knobs}"), Workload(head_dim_qk=dim, dtype="fp8"), H200)
    assert not verdict.legal and text in verdict.sentence()


def test_promoted_products_need_registers_that_head_dim_256_does_not_leave() -> None:
    work = Workload(head_dim_qk=256, dtype="fp8")
    promoted, chained = Fa3Variant(tile_n=64), Fa3Variant(tile_n=64, rescale="conditional", rescale_threshold=4)
    assert legality(promoted, work, H200).legal and writable(chained, work, H200).legal
    verdict = writable(promoted, work, H200)
    assert not verdict.legal and "a consumer thread under Triton needs 336 registers" in verdict.sentence()
