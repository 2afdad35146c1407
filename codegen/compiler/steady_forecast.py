"""`tilecast forecast FILE`: what the steady loop of anybody's warp-specialised kernel does on a machine, from its machine code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilecast.codegen.compiler.binary import Binary, BinaryError
from tilecast.codegen.compiler.inspection import compile_binary, pipeline_of
from tilecast.codegen.compiler.structure.assemble import kernel_shape
from tilecast.codegen.compiler.structure.steady import kernel_roles
from tilecast.model.compiled.roles.code import KernelRoles
from tilecast.model.compiled.roles.costs import role_costs
from tilecast.model.compiled.roles.run import RolesRun, run_roles
from tilecast.model.machine.machine import Machine
from tilecast.model.sm.simulate import steady_state

#: Machine that code of a target is forecast for where none is named.
MACHINES = {"sm_100a": "b200", "sm_103a": "b300"}
#: Busy shares and waits that are worth a place in the text.
_BUSY, _WAIT = 0.05, 1.0


@dataclass(frozen=True, slots=True)
class SteadyForecast:
    """The steady loop of a kernel on a machine."""

    file: str
    machine: Machine
    kernel: KernelRoles
    run: RolesRun
    #: The same loop before compilation, in cycles; None for a kernel that is not ours.
    before: float | None

    @property
    def tensor_share(self) -> float:
        """Share of the cycles that the tensor core is busy (0..1)."""
        return self.run.busy["tensor"] / self.run.cycles

    @property
    def mhz(self) -> float:
        """The rated clock, at which throughput is given."""
        return self.machine.get("chip.clock_rated_mhz", self.machine["chip.clock_max_mhz"])

    @property
    def tflops(self) -> float:
        """TFLOP/s of all SMs while they run the loop."""
        return self.kernel.flop / self.run.cycles * self.machine["chip.sm_count"] * self.mhz * 1e-6


def forecast_source(path: str, machine: Machine, dtype: str = "bf16") -> SteadyForecast:
    """The steady loop of a generated kernel, compiled for ``machine``; raises what `forecast_binary` does, and CompileError."""
    _, binary, header = compile_binary(path, machine.arch, dtype)
    return forecast_binary(binary, machine, before=steady_state(pipeline_of(header, machine)).ii_cycles)


def forecast_binary(
    binary: Binary, machine: Machine, warps: int | None = None, before: float | None = None
) -> SteadyForecast:
    """The steady loop of a kernel on ``machine``; ``warps`` of a CTA where the file does not say.

    Raises BinaryError where the code is not for this machine, ShapeError for a kernel without loops that can be simulated,
    MachineError for facts that the machine lacks, CodeError where its roles do not fit together.
    """
    if binary.target != machine.arch:
        raise BinaryError(f"{binary.file}: expected code for {machine.arch} ({machine.name}), got {binary.target}")
    roles = kernel_roles(kernel_shape(binary, warps))
    return SteadyForecast(binary.file, machine, roles, run_roles(roles, role_costs(machine)), before)


def as_dict(found: SteadyForecast) -> dict[str, Any]:
    """Plain values for --json."""
    run = found.run
    return {
        "file": found.file,
        "kernel": found.kernel.kernel,
        "arch": found.kernel.target,
        "machine": found.machine.name,
        "level": "machine code, steady loop",
        "cycles_per_iteration": run.cycles,
        "cycles_before_compilation": found.before,
        "flop_per_iteration_and_sm": found.kernel.flop,
        "tensor_share": found.tensor_share,
        "clock_mhz": found.mhz,
        "tflops_in_the_loop": found.tflops,
        "busy": {name: cycles / run.cycles for name, cycles in run.busy.items()},
        "roles": [
            {
                "role": role.name,
                "warp": role.warp,
                "instructions": len(role.loop),
                "waits": {barrier: cycles for (name, barrier), cycles in run.waits.items() if name == role.name},
            }
            for role in found.kernel.roles
        ],
    }


def as_text(found: SteadyForecast) -> str:
    """The forecast for people."""
    run, machine, kernel = found.run, found.machine, found.kernel
    matrix = kernel.roles[kernel.matrix].name
    lines = [
        f"{kernel.kernel[:60] or 'a kernel'} of {Path(found.file).name}, compiled for {kernel.target}, on {machine.title}: its steady loop,",
        "simulated from machine code",
        "",
        f"An iteration of {matrix} takes {run.cycles:,.0f} cycles for {kernel.flop / 1e6:.2f} MFLOP of an SM: the tensor core is busy "
        f"{found.tensor_share:.0%} of them.",
        f"{machine['chip.sm_count']:.0f} SMs at the rated {found.mhz:.0f} MHz make {found.tflops:,.0f} TFLOP/s as long as all run the loop. Start and "
        "end of tiles,",
        "masked blocks, memory and the power limit are not in it.",
    ]
    if found.before is not None:
        lines.append(
            f"Before compilation the same loop is forecast at {found.before:,.0f} cycles ({found.before / run.cycles - 1:+.0%})."
        )
    busy = sorted(((cycles / run.cycles, name) for name, cycles in run.busy.items()), reverse=True)
    lines += ["", "busy   " + " · ".join(f"{name} {share:.0%}" for share, name in busy if share >= _BUSY), ""]
    lines.append("role                 instructions   stands at barriers, cycles an iteration")
    for role in kernel.roles:
        waits = sorted(((c, b) for (name, b), c in run.waits.items() if name == role.name and c >= _WAIT), reverse=True)
        told = " · ".join(f"{barrier} {cycles:.0f}" for cycles, barrier in waits) or "-"
        lines.append(f"{role.name:<20} {len(role.loop):>12}   {told}")
    return "\n".join(lines)
