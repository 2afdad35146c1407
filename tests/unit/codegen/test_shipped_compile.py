"""Every shipped kernel compiles for its targets, without a GPU, under the newest Triton and under 3.6.

One worker process a Triton version compiles everything: importing triton costs more than most compilations.  Triton 3.6
lives beside the environment's own (`make test` puts it there); where it is missing those cases are skipped.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilecast.base.data import MEASURED

pytest.importorskip("triton")
pytest.importorskip("torch")

from tilecast.codegen.ship import KERNELS, read_list
from tilecast.model.families import parse_variant

OLD = Path(sys.prefix) / "triton-3.6"
MODULES = [kernel.module for kernel in read_list()]
#: A kernel's registry capability (or minimum) as targets of the compiler.
TARGET = {(8, 0): "sm_80", (9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}

WORKER = """
import json, sys
import triton
from tilecast.codegen.compiler.compile import CompileError, load_source
from tilecast.codegen.compiler.flow import steady_loops
from tilecast.codegen.compiler.profile import profile_code
from tilecast.codegen.compiler.sass import compile_and_read
from tilecast.model.kernel.header import header_workload
for line in sys.stdin:
    path, target = json.loads(line)
    try:
        code = compile_and_read(path, target)
        done, used = code.compiled, code.resources
        header, unread = load_source(path).TILECAST, ""
        if target == "sm_90a":
            unread = profile_code(code, header["family"], header["variant"], header_workload(header)).unread
        opcodes = [name for name in ("wgmma", "tcgen05.mma", "mma.sync") if name in done.ptx]
        softmax = {}
        if "blackwell_ws" in path and not triton.__version__.startswith("3.6"):  # whose disassembler is too old
            loops = steady_loops(code.instructions())
            loop = min((loop for loop in loops if loop.pipes()["mufu"] >= 8), key=lambda loop: len(loop.instructions))
            softmax = {"instructions": len(loop.instructions), "mufu": loop.pipes()["mufu"]}
        answer = {"softmax": softmax, "unread": unread, "registers": used.registers, "stack": used.stack_bytes, "shared": done.shared_bytes,
                  "tmem": done.tmem_columns, "matrix": opcodes, "triton": triton.__version__}
    except CompileError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)
"""


class Compiler:
    """A process that compiles with one Triton version."""

    def __init__(self, extra: Path | None) -> None:
        environment = dict(os.environ)
        if extra is not None:
            environment["PYTHONPATH"] = os.pathsep.join([str(extra), environment.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip

    def __call__(self, module: str, target: str) -> dict[str, object]:
        assert self._process.stdin is not None and self._process.stdout is not None
        path = str(KERNELS / "generated" / f"{module}.py")
        print(json.dumps([path, target]), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline() or '{"error": "the compiling process died"}')

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def newest():
    compiler = Compiler(None)
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def oldest():
    if not OLD.is_dir():
        pytest.skip(f"no Triton 3.6 in {OLD}: make test installs it")
    compiler = Compiler(OLD)
    yield compiler
    compiler.close()


def targets(module: str) -> list[str]:
    kernel = next(k for k in read_list() if k.module == module)
    capability = kernel.facts["capability"]
    if isinstance(capability, dict):
        return [TARGET[tuple(capability["min"])]]
    return [TARGET[tuple(pair)] for pair in capability]


#: Of targets times releases of Triton: a Hopper kernel compiles under both releases; of the others, which have several targets,
#: each takes one of them under the newest release and every second one another under 3.6, and targets go round from kernel to
#: kernel (a Blackwell kernel takes up to 15 s).  TILECAST_COMPILE_ALL=1 compiles the whole product.
ALL = bool(os.environ.get("TILECAST_COMPILE_ALL"))
#: Triton 3.6 lacks barriers for two CTAs and tcgen05.ld.red: the list says so, and the registry passes those by.
NEW_ONLY = {kernel.module for kernel in read_list() if "triton_min" in kernel.facts}


def cases(newest: bool) -> list[tuple[str, str]]:
    """(module, target) for one release."""
    found = []
    for number, module in enumerate(MODULES):
        every = targets(module)
        if not newest and module in NEW_ONLY:
            continue
        if ALL or len(every) == 1:
            found += [(module, target) for target in every]
        elif newest or number % 2:
            found.append((module, every[(number if newest else number // 2) % len(every)]))
    return found


MATRIX = {"sm_80": "mma.sync", "sm_90a": "wgmma", "sm_100a": "tcgen05.mma", "sm_103a": "tcgen05.mma"}
SHARED = {"sm_80": 166912, "sm_90a": 232448, "sm_100a": 232448, "sm_103a": 232448}


#: (head_dim, mask, CTAs that multiply together) -> warp instructions of FlashAttention-4's softmax loop for a 128x128 tile.
with (MEASURED / "sm100_softmax_sass.csv").open(encoding="utf-8") as table:
    FLASH_ATTENTION_4 = {
        (row["head_dim"], row["mask"], row["cta_group"]): int(row["count"])
        for row in csv.DictReader(table)
        if row["opcode"] == "all"
    }


def check_softmax(found: dict[str, int], module: str) -> None:
    """The loop is no longer than FlashAttention-4's by more than a tenth, and MUFU takes what the variant leaves it."""
    kernel = next(k for k in read_list() if k.module == module)
    work, variant = kernel.workload, parse_variant(f"family=fa4,{kernel.variant}")
    emulated = round(variant.emulated_share * variant.tile_n)
    factors = 2 if variant.split == "k" else 1
    assert found["mufu"] == variant.tile_n - emulated + factors
    dims = str(work.head_dim_v) if work.head_dim_qk == work.head_dim_v else f"{work.head_dim_qk}/{work.head_dim_v}"
    theirs = FLASH_ATTENTION_4.get((dims, work.mask, str(variant.cta_group)))
    if theirs is not None:
        assert found["instructions"] <= 1.1 * theirs
        if kernel.machine == "b200":
            assert found["instructions"] >= 0.9 * theirs


def check(answer: dict[str, object], module: str, target: str) -> None:
    assert "error" not in answer, answer.get("error")
    assert MATRIX[target] in answer["matrix"]
    # The simulator of compiled code follows every kernel for Hopper.
    assert answer["unread"] == ""
    assert answer["shared"] <= SHARED[target]
    assert answer["tmem"] <= 512
    if module.startswith(("blackwell_ws", "hopper_ws")):
        assert answer["stack"] == 0
    if module.startswith("blackwell_ws") and answer["softmax"]:
        check_softmax(answer["softmax"], module)


@pytest.mark.parametrize(("module", "target"), cases(newest=True))
def test_compiles_with_the_newest_triton(module, target, newest) -> None:
    check(newest(module, target), module, target)


@pytest.mark.parametrize(("module", "target"), cases(newest=False))
def test_compiles_with_triton_3_6(module, target, oldest) -> None:
    answer = oldest(module, target)
    assert str(answer.get("triton", "3.6")).startswith("3.6")
    check(answer, module, target)
