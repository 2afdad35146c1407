"""Machine code of the backward kernels that were measured: their loops as compiled, by the pass they are of."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from tilecast.base.data import MEASURED
from tilecast.model.backward import BackwardVariant
from tilecast.model.compiled.roles.code import KernelRoles
from tilecast.model.compiled.roles.loop_code import LoopCode, loop_code
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.variants.fa3_backward import Fa3BackwardVariant
from tilecast.model.kernel.variants.fa3_backward_apart import Fa3BackwardApartVariant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.validation.loops_file import read_roles

#: Written by tools/backward_loops.py: the loops of `key_of`, and of iterations that mask where a mask has them.
LOOPS = MEASURED / "h200_backward_loops.txt"
_MASKED, _NOT_USED = " masked", (",persistent=false", ",folded=none,held=false")


def key_of(workload: Workload, variant: BackwardVariant, loop: str) -> str:
    """Name of a loop's machine code: what it does not depend on is left out, or at one value."""
    w = workload
    # The order of the heads is outside of the loop.
    same: BackwardVariant = variant
    if isinstance(variant, Fa3BackwardVariant | Fa3BackwardApartVariant):
        same = replace(variant, heads_abreast=1)
    text = variant_text(same)
    # Knobs that came after the loops were recorded are told where they are used, the last first.
    for knobs in _NOT_USED:
        text = text.removesuffix(knobs)
    return f"{w.head_dim_qk}/{w.head_dim_v} {w.mask} {loop} {text}"


def masked_key(key: str) -> str:
    """Name of the code of iterations that mask their scores."""
    return key + _MASKED


@dataclass(slots=True)
class RecordedLoops:
    """The loops of a file, each simulated when it is first asked for."""

    kernels: dict[str, KernelRoles]
    machine: Machine
    _found: dict[str, LoopCode] = field(default_factory=dict)

    def code(self, key: str) -> LoopCode | None:
        """The loop of a name; None where it is not recorded."""
        kernel = self.kernels.get(key)
        if kernel is None:
            return None
        if key not in self._found:
            self._found[key] = loop_code(kernel, self.kernels.get(masked_key(key), kernel), self.machine)
        return self._found[key]

    def codes(
        self, workload: Workload, variant: BackwardVariant, loops: tuple[str, ...]
    ) -> tuple[tuple[str, LoopCode], ...]:
        """All ``loops`` of a pass; none where one of them is not recorded."""
        found = {loop: self.code(key_of(workload, variant, loop)) for loop in loops}
        known = tuple((loop, code) for loop, code in found.items() if code is not None)
        return known if len(known) == len(found) else ()


def recorded_loops(machine: Machine, path: Path = LOOPS) -> RecordedLoops:
    """The loops of a file; CodeError, naming it, for one that is something else."""
    return RecordedLoops(read_roles(path, "the loops of backward passes"), machine)
