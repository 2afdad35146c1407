"""Products of heads of fewer columns than their kernel's: which are left out, and that nothing else of a kernel changes."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tilecast.codegen.compiler.compile import compile_kernel, compile_kernels, tool
from tilecast.kernels.narrowing import with_fewer_columns

GENERATED = Path(__file__).parents[3] / "kernels" / "generated"
PRODUCT = re.compile(r"^\twgmma\.mma_async\S*m64n(\d+)k16\S* \{([^}]*)\}, (\S).*?(\d, \d|\d);$", re.MULTILINE)


def products(ptx: str) -> list[tuple[str, str, str, str]]:
    """(columns, sums, first of the left operand, whether operands lie with their rows in a column) of each."""
    return PRODUCT.findall(ptx)


@pytest.mark.parametrize(
    ("name", "kernel", "heads", "steps"),
    [
        ("hopper_ws_d128_causal", 128, 96, 6),
        ("hopper_ws_d256_full", 256, 136, 9),
        ("hopper_bwd_d128_causal", 128, 80, 5),
    ],
)
def test_products_of_zeros_are_left_out_and_nothing_else(name, kernel, heads, steps, tmp_path) -> None:
    plain = max(compile_kernels(GENERATED / f"{name}.py", "sm_90a"), key=lambda one: len(one.ptx)).ptx
    made = with_fewer_columns(plain, (kernel,), heads)
    before, after = products(plain), products(made)

    def of_scores(found):
        return [one for one in found if one[2] == "%" and one[3] == "0, 0"]

    def of_values(found):
        return [one for one in found if one[2] == "{" and one[3][-1] == "1"]

    assert of_scores(before) and len(of_scores(after)) * kernel == len(of_scores(before)) * steps * 16
    assert [sums.split(",") for _, sums, *_ in of_values(after)] == [
        sums.split(",")[: heads // 2] for _, sums, *_ in of_values(before)
    ]
    assert {n for n, *_ in of_values(before)} == {str(kernel)} and {n for n, *_ in of_values(after)} == {str(heads)}
    others = [[one for one in found if one not in of_scores(found) + of_values(found)] for found in (before, after)]
    assert others[0] == others[1]
    rest = [[line for line in text.split("\n") if "wgmma.mma_async" not in line and "// zeros" not in line] for text in (plain, made)]  # fmt: skip
    assert rest[0] == rest[1]
    (tmp_path / "made.ptx").write_text(made)
    assemble = [tool("ptxas"), "--gpu-name=sm_90a", tmp_path / "made.ptx", "-o", tmp_path / "made.cubin"]
    subprocess.run(assemble, check=True)


def test_all_columns_change_nothing() -> None:
    plain = compile_kernel(GENERATED / "hopper_ws_d64_full.py", "sm_90a").ptx
    assert with_fewer_columns(plain, (64,), 64) == plain


def test_a_head_in_tiles_has_fewer_columns_in_the_last() -> None:
    plain = compile_kernel(GENERATED / "hopper_ws_d96_full.py", "sm_90a").ptx  # tiles of 64 and 32
    made = with_fewer_columns(plain, (64, 32), 72)
    count = Counter(n for n, _, left, _ in products(made) if left == "{")
    assert set(count) == {"64", "8"} and count["8"] == count["64"]
    scores = [sum(one[2] == "%" for one in products(ptx)) for ptx in (plain, made)]
    assert scores[1] * 6 == scores[0] * 5
    gone = with_fewer_columns(plain, (64, 32), 64)
    assert {n for n, _, left, _ in products(gone) if left == "{"} == {"64"}
