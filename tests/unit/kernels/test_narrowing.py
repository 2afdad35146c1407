"""Products of heads of fewer columns than their kernel's: which are left out, and that nothing else of a kernel changes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tilecast.codegen.compiler.compile import compile_kernel
from tilecast.kernels.narrowing import with_fewer_columns

GENERATED = Path(__file__).parents[3] / "kernels" / "generated"
PRODUCT = re.compile(r"^\twgmma\.mma_async\S*m64n(\d+)k16\S* \{([^}]*)\}, (\S)", re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "kernel", "heads", "steps"),
    [("hopper_ws_d128_causal", (128, 128), (96, 80), 6), ("hopper_ws_d256_full", (256, 256), (136, 240), 9)],
)
def test_products_of_zeros_are_left_out_and_nothing_else(name, kernel, heads, steps, tmp_path) -> None:
    source = (GENERATED / f"{name}.py").read_text()
    plain = compile_kernel(GENERATED / f"{name}.py", "sm_90a").ptx
    made = with_fewer_columns(plain, kernel, heads)
    before, after = PRODUCT.findall(plain), PRODUCT.findall(made)
    scores = [n for n, _, left in before if left == "%"]
    assert len([n for n, _, left in after if left == "%"]) * kernel[0] // 16 == len(scores) * steps
    values = [(n, sums.split(",")) for n, sums, left in after if left == "{"]
    whole = [sums.split(",") for _, sums, left in before if left == "{"]
    assert [sums for _, sums in values] == [sums[: heads[1] // 2] for sums in whole]
    assert {n for n, _ in values} == {str(heads[1])}
    others = [[line for line in text.split("\n") if "wgmma.mma_async" not in line and "// zeros" not in line] for text in (plain, made)]  # fmt: skip
    assert others[0] == others[1]
    (tmp_path / "made.ptx").write_text(made)
    file = tmp_path / f"{name}.py"
    fusion = '"enable_fp_fusion": True'
    file.write_text(source.replace(fusion, f'{fusion}, "ir_override": "{tmp_path / "made.ptx"}"'))
    assert compile_kernel(file, "sm_90a").ptx == made, "the assembler takes it"


def test_all_columns_change_nothing() -> None:
    plain = compile_kernel(GENERATED / "hopper_ws_d64_full.py", "sm_90a").ptx
    assert with_fewer_columns(plain, (64, 64), (64, 64)) == plain


def test_kernels_of_other_products_stay() -> None:
    plain = compile_kernel(GENERATED / "hopper_ws_d96_full.py", "sm_90a").ptx  # in pieces of 64 and 32 columns
    assert with_fewer_columns(plain, (96, 96), (80, 80)) == plain
