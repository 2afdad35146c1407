"""What Triton's compiler says of a generated kernel, asked offline: refused, or compiled with spills.

The compiler is asked in a process of its own: of some kernels that are wrong its assertions end the process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilecast.codegen.compiler.compile import TARGETS, CompileError, compile_kernels
from tilecast.codegen.compiler.sass import resources
from tilecast.codegen.compiler.steady_forecast import MACHINES
from tilecast.model.kernel.header import read_header
from tilecast.model.machine.machine import load_machine

#: The kernel cannot run; it runs, but not as it should; the compiler could not be asked.
REFUSED, WARNING, NOT_ASKED = "refused", "warning", "not asked"
#: Seconds after which the compiler counts as stuck: the largest shipped kernels take about ten.
_PATIENCE_S = 300.0
_INSTALL = "compiling needs"


@dataclass(frozen=True, slots=True)
class Complaint:
    """One thing that the compiler says: how bad (REFUSED, WARNING or NOT_ASKED), and what."""

    severity: str
    text: str


def checked_by_compiler(path: str | Path, target: str | None = None, dtype: str = "bf16") -> list[Complaint]:
    """Complaints of the compiler about the generated kernel in ``path``; empty where it compiles without spills.

    ``target``: a key of TARGETS (default: the first that the header names).  Nothing is raised: a file without a header, or a
    machine without triton, is a complaint of severity NOT_ASKED.
    """
    try:
        header = read_header(Path(path).read_text(encoding="utf-8"), str(path))
        named = target or default_target(header)
    except (OSError, ValueError) as error:
        return [Complaint(NOT_ASKED, str(error))]
    command = [sys.executable, "-c", "from tilecast.codegen.compiler.complaints import answer; answer()"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(place or os.getcwd() for place in sys.path)}
    try:
        done = subprocess.run(
            [*command, str(path), named, dtype], capture_output=True, text=True, check=False, timeout=_PATIENCE_S, env=environment
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return [Complaint(REFUSED, f"{path}: the compiler does not end within {_PATIENCE_S:.0f} s for {named}")]
    if done.returncode:
        return [Complaint(REFUSED, f"{path}: {_crash(done.returncode, done.stderr)} for {named}")]
    found = [Complaint(**one) for one in json.loads(done.stdout.splitlines()[-1])]
    said = _diagnostic(done.stderr)
    return [
        Complaint(one.severity, f"{one.text} ({said})") if one.severity == REFUSED and said else one for one in found
    ]


def as_lines(said: Sequence[Complaint]) -> list[str]:
    """Complaints as lines of a report; one that says so where there are none."""
    if not said:
        return ["  compiler   Triton takes the kernel, without spills"]
    return [f"  compiler   {one.severity}: {one.text}" for one in said]


def default_target(header: Mapping[str, Any]) -> str:
    """The first target that a header names; ValueError where it names none that is known."""
    named = next((name for name in header.get("targets", []) if name in TARGETS), None)
    if named is None:
        raise ValueError(f"expected a header with targets among {', '.join(TARGETS)}, got {header.get('targets')}")
    return str(named)


def complaints(path: str, target: str, dtype: str) -> list[Complaint]:
    """The same in this process."""
    try:
        compiled = compile_kernels(path, target, dtype)
        stacks = [(kernel.name, resources(kernel.cubin, kernel.name).stack_bytes) for kernel in compiled]
    except CompileError as error:
        return [Complaint(NOT_ASKED if str(error).startswith(_INSTALL) else REFUSED, str(error))]
    found = _too_large(path, target, max(kernel.shared_bytes for kernel in compiled))
    return found + [
        Complaint(WARNING, f"{path}: {name} spills {size} bytes a thread for {target}: fewer registers are granted than it needs")
        for name, size in stacks
        if size
    ]  # fmt: skip


def _too_large(path: str, target: str, used: int) -> list[Complaint]:
    """A complaint where the compiler allocates more shared memory, its own included, than a CTA of the target's machine has."""
    if target not in MACHINES:
        return []
    limit = int(load_machine(MACHINES[target])["smem.per_cta_bytes"])
    if used <= limit:
        return []
    return [Complaint(REFUSED, f"{path}: the compiler allocates {used} bytes of shared memory for {target}, a CTA has {limit}")]  # fmt: skip


def answer() -> None:
    """Print the complaints about the kernel that the command line names, for `checked_by_compiler`."""
    print(json.dumps([asdict(complaint) for complaint in complaints(*sys.argv[1:4])]))


def _diagnostic(said: str) -> str:
    """The first error that the compiler prints where it raises something else, without the path before it."""
    told = next((line for line in said.splitlines() if " error: " in line), "")
    return told.partition(" error: ")[2].strip()[:200]


def _crash(code: int, said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told = next(
        (line for line in lines if "ssertion" in line or "rror" in line), lines[-1] if lines else "it is silent"
    )
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"the compiler stops ({how}: {told[:200]})"
