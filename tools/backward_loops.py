"""Compile the Hopper backward kernels of the measured table again, without a GPU, and keep their steady loops.

    python tools/backward_loops.py

Needs Triton (3.6, with which they were measured).  Written is data/measured/h200_backward_loops.txt, from which `tilecast validate backward`
forecasts by machine code.  Loops that are recorded stay: of most measured variants the templates of their day wrote them, and today's do not.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tilecast.base.files import write_text_atomically
from tilecast.codegen.backward import generate_backward
from tilecast.codegen.compiler.binary import from_cubin
from tilecast.codegen.compiler.compile import compile_kernels
from tilecast.codegen.compiler.structure.assemble import kernel_shape
from tilecast.codegen.compiler.structure.steady import kernel_roles
from tilecast.model.backward import TRITON_BACKWARD, BackwardVariant, build_backward, family_of, writable
from tilecast.model.compiled.roles.code import KernelRoles
from tilecast.model.compiled.roles.store import dump_roles
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, load_machine
from tilecast.validation.measured.backward import measured_variants
from tilecast.validation.measured.backward_code import LOOPS, key_of, masked_key, recorded_loops


def loops_of(work: Workload, variant: BackwardVariant, machine: Machine) -> list[tuple[str, KernelRoles]]:
    """The loops of a pass by name, with those of iterations that mask where some do."""
    made = generate_backward(work, machine, variant)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "backward.py"
        path.write_text(made.source, encoding="utf-8")
        compiled = {one.name: one for one in compile_kernels(path, machine.arch, work.dtype)}
    found = []
    for loop in build_backward(work, variant, machine).loops:
        one = compiled[loop.name.replace(" ", "_")]
        shape = kernel_shape(from_cubin(one.cubin, loop.name, machine.arch, one.name), one.warps)
        key, size = key_of(work, variant, loop.name), int(loop.added_bytes)
        found.append((key, kernel_roles(shape, size)))
        if work.mask != "none":
            found.append((masked_key(key), kernel_roles(shape, size, masked=True)))
    return found


def main() -> None:
    """Compile every measured variant of the Hopper classes once that is not recorded and can be written."""
    machine = load_machine("h200-sxm")
    kept: dict[str, KernelRoles] = dict(recorded_loops(machine).kernels)
    for work, variant in measured_variants(machine):
        loops = build_backward(work, variant, machine).loops
        if family_of(variant) is TRITON_BACKWARD or key_of(work, variant, loops[0].name) in kept:
            continue
        if not writable(variant, work, machine).legal:
            continue
        kept |= dict(loops_of(work, variant, machine))
        print(f"{len(kept)} loops, last of {work.label()}, {variant}", flush=True)
    write_text_atomically(LOOPS, dump_roles(sorted(kept.items())))


if __name__ == "__main__":
    main()
