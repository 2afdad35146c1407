"""launch.c as a module, compiled once for a machine as Triton compiles its own launchers, and kept where those are."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path
from typing import Any

import torch

#: Set to "triton", every launch is Triton's own.  Read once.
VARIABLE = "TILECAST_LAUNCH"
#: Releases of Triton whose launches launch.c repeats: what parameters are and how, attributes, tensor maps.  Others launch
#: themselves.
TRITONS = ((3, 6), (3, 7), (3, 8), (3, 9))
_SOURCE = Path(__file__).with_name("launch.c")


@functools.cache
def library() -> Any:
    """The module; None without a compiler, with a Triton or a Python that it does not know, and where the environment says so."""
    if os.environ.get(VARIABLE, "") == "triton":
        return None
    try:
        from triton.backends.nvidia.driver import include_dirs
        from triton.runtime.build import compile_module_from_src

        if triton_release() not in TRITONS:
            return None
        made = compile_module_from_src(
            _SOURCE.read_text(encoding="utf-8"), "tilecast_launch", include_dirs=include_dirs
        )
        # What PyTorch 2.10 and later let C see of tensors.
        made.know(torch.Tensor, getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))
    except (AttributeError, ImportError, OSError, RuntimeError, TypeError, subprocess.SubprocessError):
        return None
    return made


@functools.cache
def triton_release() -> tuple[int, int]:
    """(major, minor) of Triton."""
    import triton

    major, minor, *_ = triton.__version__.split(".")
    return int(major), int(minor)
