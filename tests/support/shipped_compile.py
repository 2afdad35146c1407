"""Compiling what ships under two releases of Triton, and the record of what came out.

One worker process a release compiles everything: importing triton costs more than most compilations.  Triton 3.6 lives
beside the environment's own (`make test` puts it there).
"""

from __future__ import annotations

import csv
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path

from tilecast.codegen.gemm.ship import ShippedGemm, read_gemm_list
from tilecast.codegen.shipping.ship import (
    KERNELS,
    Shipped,
    read_append_list,
    read_backward_list,
    read_copy_list,
    read_e4m3_list,
    read_list,
    read_quantize_list,
    read_serving_list,
    read_short_list,
)
from tilecast.model.kernel.header import without_header

OLD = Path(sys.prefix) / "triton-3.6"
RECORD = Path(__file__).parents[1] / "golden" / "shipped_compile.csv"
SHIPPED: dict[str, Shipped | ShippedGemm] = {
    kernel.module: kernel
    for kernel in (
        *read_list(),
        *read_backward_list(),
        *read_serving_list(),
        *read_gemm_list(),
        *read_e4m3_list(),
        *read_append_list(),
        *read_quantize_list(),
        *read_copy_list(),
        *read_short_list(),
    )
}
#: A kernel's registry capability (or minimum) as targets of the compiler.
TARGET = {(8, 0): "sm_80", (9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
NEWEST, OLDEST = "newest", "3.6"

WORKER = """
import json, sys
import triton
from tilecast.codegen.compiler.compile import CompileError, compile_kernels, load_source
from tilecast.codegen.compiler.flow import steady_loops
from tilecast.codegen.compiler.profile import profile_code
from tilecast.codegen.compiler.sass import compile_and_read, resources
from tilecast.model.kernel.header import header_workload
def portable(path, target):
    # A file of several kernels, or of one that nothing simulates: the most that one of them takes, and what all of them multiply with.
    found = compile_kernels(path, target)
    used = [resources(kernel.cubin) for kernel in found]
    matrix = [name for name in ("wgmma", "tcgen05.mma", "mma.sync") if any(name in kernel.ptx for kernel in found)]
    return {"triton": triton.__version__, "registers": max(one.registers for one in used),
            "stack_bytes": max(one.stack_bytes for one in used), "shared_bytes": max(k.shared_bytes for k in found),
            "tmem_columns": max(k.tmem_columns for k in found), "matrix": " ".join(matrix), "unread": "",
            "softmax_instructions": 0, "softmax_mufu": 0}
for line in sys.stdin:
    path, target = json.loads(line)
    try:
        if load_source(path).TILECAST.get("pass") in ("bwd", "serve", "short", "append", "quantize", "gemm", "copy", "copy rows"):
            print(json.dumps(portable(path, target)), flush=True)
            continue
        code = compile_and_read(path, target)
        done, used = code.compiled, code.resources
        header, unread = load_source(path).TILECAST, ""
        if target == "sm_90a":
            unread = profile_code(code, header["family"], header["variant"], header_workload(header)).unread
        matrix = [name for name in ("wgmma", "tcgen05.mma", "mma.sync") if name in done.ptx]
        instructions = mufu = 0
        if "/blackwell_" in path and not triton.__version__.startswith("3.6"):  # whose disassembler is too old
            loops = steady_loops(code.instructions())
            loop = min((loop for loop in loops if loop.pipes()["mufu"] >= 8), key=lambda loop: len(loop.instructions))
            instructions, mufu = len(loop.instructions), loop.pipes()["mufu"]
        answer = {"triton": triton.__version__, "registers": used.registers, "stack_bytes": used.stack_bytes,
                  "shared_bytes": done.shared_bytes, "tmem_columns": done.tmem_columns, "matrix": " ".join(matrix),
                  "unread": unread, "softmax_instructions": instructions, "softmax_mufu": mufu}
    except CompileError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)
"""


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """A shipped kernel, what it is compiled for, and with which of the two releases of Triton."""

    module: str
    target: str
    release: str

    @property
    def path(self) -> Path:
        return KERNELS / "generated" / f"{self.module}.py"

    @property
    def sha(self) -> str:
        """Of the source without its header, which has forecasts in it."""
        return _sha(self.path)


@functools.cache
def _sha(path: Path) -> str:
    return hashlib.sha256(without_header(path.read_text(encoding="utf-8")).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a compiler made of a kernel."""

    #: The release in full.
    triton: str
    #: A thread's.
    registers: int
    stack_bytes: int
    shared_bytes: int
    tmem_columns: int
    #: Matrix instructions of the PTX.
    matrix: str
    #: Why the simulator of compiled code cannot follow it, "" where it can.
    unread: str
    #: The softmax loop of Blackwell kernels; 0 where it was not looked for.
    softmax_instructions: int
    softmax_mufu: int


def _targets(kernel: Shipped | ShippedGemm) -> list[str]:
    capability = kernel.facts["capability"]
    if isinstance(capability, dict):
        return [TARGET[tuple(capability["min"])]]
    return [TARGET[tuple(pair)] for pair in capability]


def cases(release: str, every: bool = False) -> list[Case]:
    """What is compiled with a release; ``every`` one that could be.

    A Hopper kernel compiles under both.  Of the others, which have several targets, each takes one of them under the
    newest release and every second one another under 3.6, and targets go round from kernel to kernel (a Blackwell kernel
    takes up to 15 s).  3.6 lacks barriers for two CTAs and tcgen05.ld.red: the list says so, and the registry passes those by.
    """
    found = []
    for number, (module, kernel) in enumerate(SHIPPED.items()):
        targets = _targets(kernel)
        if release == OLDEST and "triton_min" in kernel.facts:
            continue
        if every or len(targets) == 1:
            found += [Case(module, target, release) for target in targets]
        elif release == NEWEST or number % 2:
            turn = number if release == NEWEST else number // 2
            found.append(Case(module, targets[turn % len(targets)], release))
    return found


def missing(release: str) -> str:
    """Why nothing is compiled with a release here; empty where it is."""
    old = version("triton").startswith(OLDEST)
    if release == NEWEST:
        return f"the Triton of this environment is {OLDEST}" if old else ""
    return "" if old or OLD.is_dir() else f"no Triton {OLDEST} in {OLD}: make test installs it"


class Compiler:
    """A process that compiles with one release."""

    def __init__(self, release: str) -> None:
        environment = dict(os.environ)
        if release == OLDEST:
            environment["PYTHONPATH"] = os.pathsep.join([str(OLD), environment.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip

    def __call__(self, case: Case) -> Outcome:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([str(case.path), case.target]), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline() or '{"error": "the compiling process died"}')
        assert "error" not in answer, answer["error"]
        return Outcome(**answer)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def read_record() -> dict[Case, tuple[str, Outcome]]:
    """Case -> (hash of the source that was compiled, what came out)."""
    if not RECORD.is_file():
        return {}
    found = {}
    with RECORD.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            case = Case(row["module"], row["target"], row["release"])
            numbers = {f.name: int(row[f.name]) if f.type == "int" else row[f.name] for f in fields(Outcome)}
            found[case] = (row["sha"], Outcome(**numbers))
    return found


def write_record(record: dict[Case, tuple[str, Outcome]]) -> None:
    rows = [{**asdict(case), "sha": sha, **asdict(outcome)} for case, (sha, outcome) in sorted(record.items())]
    with RECORD.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def compile_again(asked: Iterable[Case]) -> None:
    """Bring the record to ``asked``: what was recorded of the same source stays, the rest is compiled and kept one by one."""
    asked, known = sorted(asked, key=lambda case: case.release), read_record()
    record = {case: known[case] for case in asked if case in known and known[case][0] == case.sha}
    for release in (NEWEST, OLDEST):
        compiler = Compiler(release)
        try:
            for case in asked:
                if case.release == release and case not in record:
                    record[case] = (case.sha, compiler(case))
                    write_record(record)
        finally:
            compiler.close()
    write_record(record)
