"""The hopper_ws family over its knobs: twelve variants run on the emulator, eight of them compiled and read as machine code."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from support.whole import whole

from tilecast.codegen.generate import generate
from tilecast.emulator.run import emulate
from tilecast.emulator.verify import judge
from tilecast.model.families import find_family
from tilecast.model.kernel.header import header_window
from tilecast.model.kernel.variants.fa3 import SCHEDULERS, Fa3Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
H200 = load_machine("h200-sxm")
#: (head_dim_qk, head_dim_v), mask, (warpgroups, tile_n, kv_stages, q_stages), overlap, ping-pong, rescale, share of emulated
#: exponentials, degree of their polynomial, scheduler: drawn at random, those kept that compile in seconds.
SAMPLE = [
    ((64, 64), "none", (3, 64, 4, 1), True, False, "always", 0.0, 4, "paired"),
    ((128, 128), "none", (2, 32, 1, 2), True, True, "always", 0.0, 5, "persistent"),
    ((64, 64), "none", (2, 32, 2, 2), False, False, "anchored", 0.25, 3, "grid"),
    ((64, 64), "causal", (1, 64, 3, 1), True, True, "conditional", 0.5, 4, "longest-first"),
    ((96, 96), "causal", (2, 64, 3, 1), True, True, "conditional", 0.0, 4, "paired"),
    ((128, 128), "causal", (2, 32, 2, 2), False, False, "anchored", 0.5, 3, "longest-first"),
    ((192, 128), "causal", (1, 64, 2, 1), True, True, "always", 0.5, 5, "paired"),
    ((192, 128), "window", (2, 32, 2, 1), True, True, "conditional", 0.25, 3, "grid"),
    ((256, 256), "causal", (1, 32, 3, 1), True, True, "anchored", 0.5, 4, "paired"),
    ((96, 96), "window", (2, 32, 3, 1), True, False, "anchored", 0.125, 5, "persistent"),
    ((256, 256), "window", (1, 32, 1, 2), False, False, "always", 0.0, 5, "paired"),
    ((64, 64), "none", (2, 128, 2, 2), False, True, "anchored", 0.0, 3, "longest-first"),
]
#: So many of them, from the first on, are compiled, every second one by `make test`: wide and anchored ones take longest and have shipped kernels.
COMPILED = 8


def cases() -> list[tuple[Workload, Fa3Variant]]:
    return [
        (
            Workload(1, 2, 1, 150, 213, *dims, mask, (37, 21) if mask == "window" else None, "fp16"),
            Fa3Variant("fa3", *tile, overlap, turns, rescale, 8.0, share, degree, scheduler),
        )
        for dims, mask, tile, overlap, turns, rescale, share, degree, scheduler in SAMPLE
    ]


def test_the_sample_has_every_value_of_every_knob() -> None:
    variants = [variant for _, variant in cases()]
    wanted = {
        "warpgroups": {1, 2, 3}, "tile_n": {32, 64, 128}, "kv_stages": {1, 2, 3, 4}, "q_stages": {1, 2},
        "overlap": {True, False}, "ping_pong": {True, False}, "rescale": {"always", "conditional", "anchored"},
        "scheduler": set(SCHEDULERS), "poly_degree": {3, 4, 5}, "emulated_share": {0.0, 0.125, 0.25, 0.5},
    }  # fmt: skip
    assert {knob: {getattr(variant, knob) for variant in variants} for knob in wanted} == wanted
    works = [work for work, _ in cases()]
    assert {work.head_dim_qk for work in works} == {64, 96, 128, 192, 256}
    assert {work.mask for work in works} == {"none", "causal", "window"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Files of the sample's kernels."""
    folder = tmp_path_factory.mktemp("hopper_ws")
    files = []
    for number, (work, variant) in enumerate(cases()):
        files.append(folder / f"kernel{number}.py")
        files[-1].write_text(generate(work, H200, find_family("fa3"), variant).source, encoding="utf-8")
    return files


@pytest.mark.parametrize("number", range(len(SAMPLE)))
@pytest.mark.parametrize("rising", [False, True], ids=["even scores", "rising scores"])
def test_computes_attention(number: int, rising: bool, written: list[Path]) -> None:
    work, _ = cases()[number]
    draw = np.random.default_rng(number)
    q = draw.standard_normal((1, work.heads_q, work.seqlen_q, work.head_dim_qk))
    k = draw.standard_normal((1, work.heads_kv, work.seqlen_k, work.head_dim_qk))
    v = draw.standard_normal((1, work.heads_kv, work.seqlen_k, work.head_dim_v))
    if rising:
        # Earlier keys weigh more, and kernels go from the last to the first: O is rescaled, also where the reference stays while it can.
        q, k = np.abs(q), np.abs(k) * np.linspace(6, 0.1, work.seqlen_k)[None, None, :, None]
    q, k, v = (x.astype(np.float16) for x in (q, k, v))
    window = header_window({"workload": work.as_dict()})
    mode, release = ("random", "3.6") if rising else ("late", "3.9")
    done = emulate(written[number], q, k, v, mode=mode, seed=number, sms=2, release=release)
    judge(done, q, k, v, work.head_dim_qk**-0.5, window).require()


@NEEDS_TRITON
@pytest.mark.parametrize("number", [n if n % 4 == 1 else pytest.param(n, marks=whole) for n in range(COMPILED)])
def test_compiles_to_code_that_is_read(number: int, written: list[Path]) -> None:
    from tilecast.codegen.compiler.profile import profile_source
    from tilecast.model.kernel.variant import variant_text

    work, variant = cases()[number]
    found = profile_source(written[number].read_text(), "hopper_ws", variant_text(variant), work, "sm_90a")
    assert found.code is not None, found.unread
    loops = {"none": ["main"], "causal": ["edge", "main"], "window": ["edge", "main", "left"]}[work.mask]
    assert len(found.code.consumers) == variant.warpgroups
    for program in found.code.consumers:
        assert [stretch.role for stretch in program if stretch.role not in ("once", "pass")] == loops
        # Warpgroups that see fewer blocks than their CTA give the others back, after the tile only under a window.
        uneven = work.mask != "none" and variant.warpgroups > 1
        assert sum(stretch.role == "pass" for stretch in program) == uneven * (1 + (work.mask == "window"))
        for stretch in program:
            if stretch.role in loops:
                products = sum(64 * i.amount * 16 for i in stretch.instructions if i.kind == "mma")
                assert products == 64 * variant.tile_n * (work.head_dim_qk + work.head_dim_v)
