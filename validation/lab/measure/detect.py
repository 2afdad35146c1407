"""Which GPU is at hand, with which software, and which machine file describes it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tilecast.model.machine.machine import Machine, load_machine, machine_names
from tilecast.validation.lab.measure.plan import PlanError

_INSTALL = "pip install 'tilecast[gpu]'"
#: Words of a GPU's name that tell machines of one compute capability apart.
_WORDS = {
    "h200-sxm": ("H200",), "h100-sxm": ("H100",), "gb200": ("GB200",), "gb300": ("GB300",), "b200": ("B200",),
    "b300": ("B300",), "a100": ("A100",), "rtx-5090": ("5090",), "rtx-pro-6000": ("PRO 6000",), "gb10": ("GB10",),
}  # fmt: skip


def match_machine(gpu: str, capability: tuple[int, int]) -> Machine:
    """The shipped machine with the GPU's name, else the first of its compute capability; PlanError when there is none.

    >>> match_machine("NVIDIA H200", (9, 0)).name
    'h200-sxm'
    """
    number = 10 * capability[0] + capability[1]
    same = [m for m in map(load_machine, machine_names()) if m["chip.compute_capability"] == number]
    named = [m for m in same if any(word in gpu.upper() for word in _WORDS.get(m.name, ()))]
    # "GB200" also holds "B200": the longest word that matches is the GPU's.
    named.sort(key=lambda m: -max(len(w) for w in _WORDS[m.name] if w in gpu.upper()))
    if named or same:
        return (named or same)[0]
    known = ", ".join(f"{m['chip.compute_capability']:.0f}" for m in map(load_machine, machine_names()))
    raise PlanError(
        f"no machine file for {gpu} (sm_{number}; known: {known}): write one and pass it as --machine FILE.toml"
    )


@dataclass(frozen=True, slots=True)
class GpuHere:
    """The current CUDA device and what drives it."""

    name: str
    #: Compute capability times ten.
    capability: int
    #: As NVML and CUDA_VISIBLE_DEVICES take it.
    uuid: str
    torch: str
    triton: str
    #: How many GPUs CUDA shows to this process.
    visible: int

    def environment(self) -> dict[str, str] | None:
        """The environment of a process whose current device this one is; None where this process's own will do."""
        return None if self.visible == 1 else {**os.environ, "CUDA_VISIBLE_DEVICES": self.uuid}


def gpu_here(verb: str) -> GpuHere:
    """The current CUDA device; PlanError in one sentence where ``verb`` lacks one, or software to use it."""
    try:
        import torch
        import triton
    except ImportError as error:
        raise PlanError(f"{verb} needs torch and triton ({error}): {_INSTALL}") from None
    if not torch.cuda.is_available():
        raise PlanError(
            f"{verb} needs a CUDA GPU and a torch built for it; forecasts need neither: tilecast predict --machine h200-sxm"
        )
    index = torch.cuda.current_device()
    major, minor = torch.cuda.get_device_capability(index)
    return GpuHere(
        torch.cuda.get_device_name(index), 10 * major + minor, device_uuid(index), str(torch.__version__),
        str(triton.__version__), torch.cuda.device_count(),
    )  # fmt: skip


def driver_version(verb: str, uuid: str) -> str:
    """The driver of a GPU; PlanError where NVML, which tells clock and power too, cannot be asked."""
    try:
        from tilecast.validation.lab.measure.telemetry import Nvml

        return Nvml(uuid).driver
    except ImportError:
        raise PlanError(f"{verb} reads clock and power through nvidia-ml-py, which is not here: {_INSTALL}") from None


def device_uuid(index: int) -> str:
    """The UUID of a CUDA device, as NVML and CUDA_VISIBLE_DEVICES take it."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def machine_here(verb: str) -> Machine:
    """The machine file of the current CUDA device; PlanError without one."""
    here = gpu_here(verb)
    return match_machine(here.name, divmod(here.capability, 10))
