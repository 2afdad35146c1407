"""tilecast: forecast what a tiled attention kernel does on a GPU, and why.

    >>> import tilecast
    >>> answer = tilecast.predict(tilecast.Workload(batch=4, seqlen_q=8192, seqlen_k=8192), "b200")

Names load on first use, so that ``import tilecast`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "attention": "tilecast.kernels.operator",
    "AttentionError": "tilecast.kernels.errors",
    "UnsupportedError": "tilecast.kernels.errors",
    "predict": "tilecast.model.predict",
    "best_variant": "tilecast.model.predict",
    "Prediction": "tilecast.model.predict",
    "PredictError": "tilecast.model.predict",
    "Workload": "tilecast.model.workload",
    "WorkloadError": "tilecast.model.workload",
    "Machine": "tilecast.model.machine",
    "MachineError": "tilecast.model.machine",
    "load_machine": "tilecast.model.machine",
    "machine_names": "tilecast.model.machine",
    "what_if": "tilecast.model.whatif",
    "WhatIf": "tilecast.model.whatif",
    "sensitivities": "tilecast.model.sensitivity",
    "break_evens": "tilecast.model.breakeven",
    "asymmetry_map": "tilecast.model.asymmetry",
    "parse_variant": "tilecast.model.variant",
    "VariantError": "tilecast.model.variant",
    "preset": "tilecast.model.presets",
    "preset_names": "tilecast.model.presets",
    "read_shapes": "tilecast.model.shapes_csv",
    "sweep": "tilecast.validation.sweep.api",
    "SweepError": "tilecast.validation.sweep.errors",
    "SweepTable": "tilecast.validation.sweep.table",
}
__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from tilecast.kernels.errors import AttentionError, UnsupportedError
    from tilecast.kernels.operator import attention
    from tilecast.model.asymmetry import asymmetry_map
    from tilecast.model.breakeven import break_evens
    from tilecast.model.machine import Machine, MachineError, load_machine, machine_names
    from tilecast.model.predict import PredictError, Prediction, best_variant, predict
    from tilecast.model.presets import preset, preset_names
    from tilecast.model.sensitivity import sensitivities
    from tilecast.model.shapes_csv import read_shapes
    from tilecast.model.variant import VariantError, parse_variant
    from tilecast.model.whatif import WhatIf, what_if
    from tilecast.model.workload import Workload, WorkloadError
    from tilecast.validation.sweep.api import sweep
    from tilecast.validation.sweep.errors import SweepError
    from tilecast.validation.sweep.table import SweepTable


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tilecast' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
