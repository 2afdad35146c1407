"""Products of heads of fewer columns than their kernel's: which are left out, and that nothing else of a kernel changes."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tilecast.codegen.compiler.compile import compile_kernel, compile_kernels, load_source
from tilecast.codegen.generate import generate
from tilecast.codegen.hopper import narrowing
from tilecast.kernels.narrowing import with_fewer_columns
from tilecast.model.families import find_family, parse_variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

GENERATED = Path(__file__).parents[3] / "kernels" / "generated"
PRODUCT = re.compile(r"^\twgmma\.mma_async\S*m64n(\d+)k16\S* \{([^}]*)\}, (\S).*?(\d, \d|\d);$", re.MULTILINE)


def products(ptx: str) -> list[tuple[str, str, str, str]]:
    """(columns, sums, first of the left operand, whether operands lie with their rows in a column) of each."""
    return PRODUCT.findall(ptx)


def longest(kernels) -> str:
    return max((one.ptx for one in kernels), key=len)


@pytest.mark.parametrize(
    ("name", "kernel", "heads", "steps"),
    [
        ("hopper_ws_d128_causal", 128, 96, 6),
        ("hopper_ws_d256_full", 256, 136, 9),
        ("hopper_bwd_d128_causal", 128, 80, 5),
    ],
)
def test_products_of_zeros_are_left_out_and_nothing_else(name, kernel, heads, steps) -> None:
    path = GENERATED / f"{name}.py"
    plain = longest(compile_kernels(path, "sm_90a"))
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
    work = {**load_source(path).TILECAST["workload"], "head_dim_qk": heads, "head_dim_v": heads}
    compiled = products(longest(compile_kernels(path, "sm_90a", shape=work)))
    assert [(n, left, flags) for n, _, left, flags in compiled] == [(n, left, flags) for n, _, left, flags in after]


def test_all_columns_change_nothing() -> None:
    plain = compile_kernel(GENERATED / "hopper_ws_d64_full.py", "sm_90a").ptx
    assert with_fewer_columns(plain, (64,), 64) == plain


def test_a_head_in_tiles_has_fewer_columns_in_the_last(tmp_path) -> None:
    machine = load_machine("h200-sxm")
    variant = parse_variant(
        "family=fa3,warpgroups=2,tile_n=64,kv_stages=2,q_stages=1,ping_pong=false,rescale=anchored,scheduler=grid"
    )
    made = generate(
        Workload(1, 2, 2, 512, 512, 192, 192), machine, find_family("fa3"), variant, compiler=None, narrower=True
    )
    file = tmp_path / "kernel.py"
    file.write_text(made.source)
    plain = compile_kernel(file, "sm_90a").ptx
    narrow = with_fewer_columns(plain, (128, 64), 136)
    count = Counter(n for n, _, left, _ in products(narrow) if left == "{")
    assert set(count) == {"128", "8"} and count["8"] == count["128"]
    scores = [sum(one[2] == "%" for one in products(ptx)) for ptx in (plain, narrow)]
    assert scores[1] * 12 == scores[0] * 9
    gone = with_fewer_columns(plain, (128, 64), 128)
    assert {n for n, _, left, _ in products(gone) if left == "{"} == {"128"}


def test_a_kernel_of_96_columns_is_compiled_for_them() -> None:
    found = products(compile_kernel(GENERATED / "hopper_ws_d96_causal.py", "sm_90a").ptx)
    assert {n for n, _, left, _ in found if left == "{"} == {"96"}


def test_kernels_have_the_same_file() -> None:
    assert Path(narrowing.__file__).read_bytes() == (GENERATED.parent / "narrowing.py").read_bytes()
