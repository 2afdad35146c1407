"""The forecast of short sequences knows the kernels that ship, and their code as Triton 3.6 compiles it.

What it knows is `model/step/short_kernels.toml`, written here with --update-golden: what of a source has changed is compiled again.  Every
kernel must be there as it is now, what is there must be what the record of everything that ships says of it (test_shipped_compile.py), and one,
drawn by its hash, is compiled and must come out the same; with `--whole` all are.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from support.whole import is_whole

from tests.support.shipped_compile import OLD, OLDEST, Case, missing, read_record
from tilecast.codegen.shipping.ship import Shipped, read_short_list
from tilecast.model.families import parse_variant
from tilecast.model.kernel.variants.fa2 import Fa2Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.step.short import CODES, KERNELS, WARPS, ShortKernel, short_kernels

SHIPPED = {kernel.module: kernel for kernel in read_short_list()}
HEAD = """\
# The kernels of short sequences that ship, in the order in which they are asked, and what Triton 3.6 makes of them for sm_90a (instructions of
# the whole kernel), where all keys are one block, where they are several, and by halves of V and O; written by
# `pytest tests/unit/codegen/test_short_kernels.py --update-golden`.
"""
#: Prints what a file takes of so many sequences with so many keys.
WORKER = """
import json, sys
from tilecast.codegen.compiler.compile import compile_kernels, load_source
from tilecast.codegen.compiler.sass import disassemble, resources
path = sys.argv[1]
for batch, keys in (map(int, shape.split("x")) for shape in sys.argv[2:]):
    few = {"heads_q": 4, "heads_kv": 1} if batch == 1 else {}
    shape = {**load_source(path).TILECAST["workload"], "batch": batch, "seqlen_k": keys, **few}
    for made in compile_kernels(path, "sm_90a", shape=shape):
        used = resources(made.cubin)
        assert made.warps == 4
        print(json.dumps({"instructions": len(disassemble(made.cubin)), "shared_bytes": made.shared_bytes, "registers": used.registers}))
"""


def case(module: str) -> Case:
    return Case(module, "sm_90a", OLDEST)


def at_once(module: str) -> int:
    """More programs than these, or tiles that have parts, take another form, as the file's host says; 0: there is none."""
    found = re.search(
        r"(?:many = programs if .*?programs >|\nPARTS, AT_ONCE = \(.*\),) (\d+)",
        case(module).path.read_text(encoding="utf-8"),
    )
    return int(found[1]) if found else 0


def facts(kernel: Shipped) -> dict[str, Any]:
    """A kernel's row but its code: what the list and its variant say."""
    variant, work, known = parse_variant(f"family=fa2,{kernel.variant}"), kernel.workload, kernel.facts
    assert isinstance(variant, Fa2Variant) and variant.warps == WARPS
    row = {"module": kernel.module, "source": case(kernel.module).sha, "head_dim_qk": work.head_dim_qk, "head_dim_v": work.head_dim_v,
           "tile_m": variant.tile_m, "tile_n": variant.tile_n, "stages": variant.kv_stages, "keys": known["seqlen_k_max"]}  # fmt: skip
    names = {"head_dim_min": "head_dim_min", "seqlen_q_min": "rows_min", "seqlen_q_max": "rows_max"}
    if most := at_once(kernel.module):
        row["at_once"] = most
    if kernel.parts:
        row["parts"] = kernel.parts
    return {**row, **{name: known[fact] for fact, name in names.items() if fact in known}}


def order(kernel: Shipped) -> tuple[int, int, str]:
    """As `registry.candidates` puts kernels that fit."""
    return (
        -int(str(kernel.facts["preference"])),
        kernel.workload.head_dim_qk + kernel.workload.head_dim_v,
        kernel.module,
    )


def compiled(row: dict[str, Any]) -> dict[str, Any]:
    """A row's code under Triton 3.6."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(OLD), os.environ.get("PYTHONPATH", "")]))
    work = SHIPPED[row["module"]].workload
    shapes = {"one": (1, row["tile_n"]), "several": (1, row["keys"]), "many": (work.batch, work.seqlen_k)}
    wanted = ["one"] + ["several"] * (row["keys"] > row["tile_n"]) + ["many"] * ("at_once" in row)
    asked = [f"{batch}x{keys}" for batch, keys in map(shapes.__getitem__, wanted)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WORKER, str(case(row["module"]).path), *asked],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    if "parts" in row:
        wanted.insert(2, "join")
    return dict(zip(wanted, map(json.loads, done.stdout.splitlines()), strict=True))


def known(kernel: ShortKernel) -> dict[str, Any]:
    """What the forecast knows of a kernel's code."""
    return {name: code for name in CODES if (code := asdict(kernel)[name]) is not None}


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {number}' for key, number in value.items())} }}"
    return json.dumps(value)


def write(rows: list[dict[str, Any]]) -> None:
    texts = ["[[kernel]]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in row.items()) for row in rows]
    KERNELS.write_text("\n".join([HEAD, *texts]), encoding="utf-8")


def test_the_forecast_knows_every_kernel_as_it_is_now(request) -> None:
    rows = [facts(kernel) for kernel in sorted(SHIPPED.values(), key=order)]
    if request.config.getoption("--update-golden"):
        before = (
            {(kernel.source, kernel.keys): known(kernel) for kernel in short_kernels()} if KERNELS.is_file() else {}
        )
        write([{**row, **(before.get((row["source"], row["keys"])) or compiled(row))} for row in rows])
        short_kernels.cache_clear()
    assert [ShortKernel(**row, **{name: getattr(kernel, name) for name in CODES}) for row, kernel in zip(rows, short_kernels(), strict=True)] == [
        *short_kernels()
    ], "`pytest tests/unit/codegen/test_short_kernels.py --update-golden`, then read the diff"  # fmt: skip
    assert all((kernel.several is None) == (kernel.keys <= kernel.tile_n) for kernel in short_kernels())
    assert all((kernel.many is not None) == (kernel.at_once > 0) for kernel in short_kernels())


@pytest.mark.parametrize("module", SHIPPED)
def test_its_code_is_what_is_recorded(module: str) -> None:
    """The record has every file on the shape of its header, which is of many programs."""
    kernel = next(one for one in short_kernels() if one.module == module)
    work = SHIPPED[module].workload
    assert work.seqlen_k == kernel.tile_n or kernel.keys > kernel.tile_n
    sha, outcome = read_record()[case(module)]
    assert sha == kernel.source
    code = kernel.code(work, 1000)
    assert (code.registers, code.shared_bytes, outcome.stack_bytes) == (outcome.registers, outcome.shared_bytes, 0)


@pytest.mark.parametrize("module", [*filter(at_once, SHIPPED)])
def test_more_programs_than_are_at_work_at_once_take_another_form(module: str) -> None:
    """And fewer do not; of one block neither do heads of fewer columns.  The file's host and the forecast say the same."""
    import torch

    from tilecast.codegen.compiler.compile import load_source

    kernel, source = next(one for one in short_kernels() if one.module == module), load_source(case(module).path)

    def another(batch: int, columns: int) -> bool:
        q, k = (torch.zeros(batch, 1, length, columns).bfloat16() for length in (64, kernel.keys))
        if kernel.parts:  # which tell tiles, as many as sequences
            found = not source.scratch(q, k)
            assert found == (kernel.in_turn(Workload(batch, 1, 1, 64, kernel.keys, columns, columns), batch) > 0)
            return found
        _, arguments = source.plan(q, k, k, q, torch.zeros(batch, 1, 64), -1, -1)
        found = dict(zip(source.attention.arg_names, arguments, strict=False))["many"] is not None
        assert found == (kernel.code(Workload(batch, 1, 1, 64, kernel.keys, columns, columns), batch) is kernel.many)
        return found

    wide = kernel.head_dim_qk
    most = kernel.part(Workload(1, 1, 1, 64, kernel.keys, wide, wide))[2] if kernel.parts else kernel.at_once
    assert another(most + 1, wide) and not another(most, wide)
    if kernel.head_dim_min:
        assert another(most + 1, wide - 8) == (kernel.several is not None)


@pytest.mark.parametrize("module", SHIPPED if is_whole() else [min(SHIPPED, key=lambda module: case(module).sha)])
def test_it_compiles_as_the_forecast_has_it(module: str) -> None:
    if why := missing(OLDEST):
        pytest.skip(why)
    kernel = next(one for one in short_kernels() if one.module == module)
    assert compiled(facts(SHIPPED[module])) == known(kernel)
