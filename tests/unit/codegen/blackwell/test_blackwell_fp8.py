"""8-bit kernels of the blackwell_ws family on the emulator, and what the family refuses in 8 bits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tilecast.codegen.generate import generate
from tilecast.codegen.shipping.ship import KERNELS, read_e4m3_list
from tilecast.model.families import find_family, parse_variant, writable
from tilecast.model.kernel.variants.fa4 import Fa4Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

pytest.importorskip("torch")

from tests.support.eight_bits import E5M2, GROWN, SINK, judge

B200 = load_machine("b200")
SHIPPED = {kernel.module: kernel for kernel in read_e4m3_list() if kernel.family == "blackwell_ws"}
#: Alternate key blocks, one softmax group, small blocks, O rescaled in every step; all that ships has two query tiles of 128 keys.
OTHERS = (
    ("split=k,kv_stages=4,scheduler=longest-first,rescale_threshold=4", 64, "causal"),
    ("softmax_tiles=1,tile_n=64,split_p=false,scheduler=grid,rescale_threshold=0", 96, "window"),
)


@pytest.mark.parametrize("module", SHIPPED)
def test_shipped_kernels_compute_attention(module: str) -> None:
    path, work = KERNELS / "generated" / f"{module}.py", SHIPPED[module].workload
    machine = SHIPPED[module].machine
    judge(path, work, 150, 333, (2, 1), "late", machine=machine, window=(100, 5))
    # Several tiles of rows to a program, and causal rows without a key.
    judge(path, work, 300, 140, (2, 2), "random", machine=machine, window=(-1, 30), dtype=E5M2, scores=SINK)


@pytest.mark.parametrize(("knobs", "dim", "mask"), OTHERS)
def test_other_variants_compute_attention(knobs: str, dim: int, mask: str, tmp_path: Path) -> None:
    window = (60, 20) if mask == "window" else None
    work = Workload(1, 2, 1, 150, 300, dim, mask=mask, window=window, dtype="fp8")
    file = tmp_path / "kernel.py"
    file.write_text(generate(work, B200, find_family("fa4"), parse_variant(f"family=fa4,{knobs}")).source)
    judge(file, work, 150, 300, (2, 1), "random", machine="b200", window=window or (-1, -1))


def test_rows_may_outgrow_their_reference_and_do_not_saturate(tmp_path: Path) -> None:
    module = "blackwell_fp8_d64_full"
    path, work = KERNELS / "generated" / f"{module}.py", SHIPPED[module].workload
    judge(path, work, 100, 200, (1, 1), "late", machine="b200", scores=GROWN)
    # As other libraries had it: exponentials of 2^8 at the reference, and 4 octaves of growth.
    source, changed = re.subn(r"LIFT = gl.constexpr\(4.0\)", "LIFT = gl.constexpr(8.0)", path.read_text())
    assert changed == 1
    file = tmp_path / "saturating.py"
    file.write_text(source)
    with pytest.raises(AssertionError):
        judge(file, work, 100, 200, (1, 1), "late", machine="b200", scores=GROWN)


@pytest.mark.parametrize(("dim", "mask"), [(64, "causal"), (128, "none")])
def test_the_chosen_variant_can_be_written(dim: int, mask: str) -> None:
    made = generate(Workload(head_dim_qk=dim, mask=mask, dtype="fp8"), B200, find_family("fa4"))
    assert isinstance(made.variant, Fa4Variant)
    assert made.variant.rescale_threshold == 4
    assert "float8e4nv" in made.source


@pytest.mark.parametrize(
    ("knobs", "dim", "text"),
    [
        ("rescale_threshold=8", 128, "must be at most 4 in e4m3"),
        ("tile_n=64,rescale_threshold=4", 128, "split_p leaves the last product 16 keys, an fp8 instruction takes 32"),
        ("rescale_threshold=4", 80, "head_dim_qk must be a multiple of 32 in fp8, got 80"),
        ("rescale_threshold=4,split=k", 256, "use cta_group=2"),
    ],
)
def test_refusals_name_reason_and_lever(knobs: str, dim: int, text: str) -> None:
    verdict = writable(parse_variant(f"family=fa4,{knobs}"), Workload(head_dim_qk=dim, dtype="fp8"), B200)
    assert not verdict.legal and text in verdict.sentence()
