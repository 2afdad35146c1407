"""Tiles of K and V that share an address under different swizzles: refused where ptxas 12.8 loses their descriptors.

Found on an H200 (Triton 3.6, head_dim 96, one stage): wrong numbers, and for 8 warps on 64 rows an illegal memory access.
Two groups of wgmma operands lie at one address, as tiles of a loop without a pipeline do, with two swizzles, so with two
upper halves of their descriptors: the assembler drops the lower half of one of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT
from support.whole import whole

from tilecast.model.families import writable
from tilecast.model.kernel.variants.fa2 import Fa2Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

OLD = Path(sys.prefix) / "triton-3.6"
#: (head_dim_qk, head_dim_v) whose tiles of K and V take more than one swizzle, and such as take one.
MIXED = [(96, 96), (48, 48), (80, 80), (112, 112), (144, 144), (160, 160), (224, 224), (64, 32), (32, 64), (96, 64)]
PLAIN = [(32, 32), (64, 64), (128, 128), (192, 128), (128, 64)]


def verdict(dims: tuple[int, int], machine: str = "h200-sxm", mask: str = "causal", tile_m: int = 64, stages: int = 1):
    work = Workload(head_dim_qk=dims[0], head_dim_v=dims[1], mask=mask, window=(9, 0) if mask == "window" else None)
    variant = Fa2Variant(tile_m=tile_m, tile_n=32, warps=8 if tile_m > 32 else 4, kv_stages=stages, scheduler="grid")
    return writable(variant, work, load_machine(machine))


@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("dims", MIXED, ids=str)
def test_one_stage_is_refused_where_swizzles_differ(dims, mask) -> None:
    for tile_m in (64, 128):
        found = verdict(dims, mask=mask, tile_m=tile_m)
        assert not found.legal
        assert "kv_stages must be 2 or more on h200-sxm" in found.sentence()
        assert "use kv_stages=2, or tile_m=32" in found.sentence()
        assert "wgmma descriptor" in found.sentence()
    assert verdict(dims, mask=mask, stages=2).legal
    # Fewer rows than a wgmma has, and machines without it.
    assert verdict(dims, mask=mask, tile_m=32).legal
    for machine in ("a100", "rtx-5090", "b200"):
        assert verdict(dims, machine, mask).legal


@pytest.mark.parametrize("dims", PLAIN, ids=str)
def test_one_stage_is_written_where_they_agree(dims) -> None:
    assert verdict(dims).legal


@pytest.fixture(scope="module")
def lost():
    """Lost descriptors of a variant, compiled by Triton 3.6; a process for the family as it is and one without its rule."""
    if not (OLD / "triton").is_dir():
        pytest.skip(f"no Triton 3.6 in {OLD}: make test installs it")
    path = os.pathsep.join([str(OLD), str(ROOT), str(ROOT / "tests")])
    processes = {
        rule: subprocess.Popen(
            [sys.executable, "-m", "support.descriptors"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        for rule in ("ruled", "unruled")
    }  # fmt: skip
    for process in processes.values():
        assert process.stdout.readline().startswith("triton 3.6")

    def ask(rule: str, mask: str, dims: tuple[int, int], *numbers: int) -> int:
        process = processes[rule]
        print(rule, mask, *dims, *numbers, file=process.stdin, flush=True)
        return int(process.stdout.readline())

    yield ask
    for process in processes.values():
        process.stdin.close()
        process.wait(60)


#: (mask, head dims, stages, tile_m, warps, tile_n): the second one is that which faulted.
LOST = [
    pytest.param(("causal", (96, 96), 1, 64, 4, 32), marks=whole),
    ("causal", (96, 96), 1, 64, 8, 32),
    pytest.param(("none", (64, 32), 1, 128, 8, 64), marks=whole),
    # A pipeline in the long loop alone does not help: the block over the edge went without one.
    ("none", (64, 32), 2, 128, 8, 64),
]


@pytest.mark.parametrize("case", LOST, ids=str)
def test_without_the_rule_triton_3_6_loses_descriptors(case, lost) -> None:
    assert lost("unruled", *case) > 0


@pytest.mark.parametrize(
    "case",
    [
        ("causal", (96, 96), 2, 64, 8, 32),
        ("none", (64, 32), 2, 128, 8, 64),
        pytest.param(("none", (96, 64), 2, 64, 8, 32), marks=whole),
        ("causal", (96, 96), 1, 32, 4, 32),
        pytest.param(("causal", (192, 128), 1, 64, 8, 32), marks=whole),
    ],
    ids=str,
)
def test_what_is_written_keeps_its_descriptors_under_triton_3_6(case, lost) -> None:
    assert lost("ruled", *case) == 0
