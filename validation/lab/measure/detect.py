"""Which machine file describes the GPU at hand."""

from __future__ import annotations

from tilecast.model.machine.machine import Machine, load_machine, machine_names
from tilecast.validation.lab.measure.plan import PlanError

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


def machine_here() -> Machine:
    """The machine file of the current CUDA device; PlanError without one."""
    import torch

    if not torch.cuda.is_available():
        raise PlanError(
            "no CUDA GPU here: this verb measures; forecasts need no GPU: tilecast predict --machine h200-sxm"
        )
    return match_machine(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
