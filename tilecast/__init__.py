"""tilecast: forecast what a tiled attention kernel does on a GPU, and why.

    >>> import tilecast
    >>> answer = tilecast.predict(tilecast.Workload(batch=4, seqlen_q=8192), "b200")

Names load on first use, so that ``import tilecast`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "addmm": "tilecast.kernels",
    "attention": "tilecast.kernels",
    "attention_kvcache": "tilecast.kernels",
    "attention_mla": "tilecast.kernels",
    "attention_varlen": "tilecast.kernels",
    "AttentionError": "tilecast.kernels",
    "UnsupportedError": "tilecast.kernels",
    "quantize_e4m3": "tilecast.kernels",
    "register_flash_attention": "tilecast.kernels",
    "predict": "tilecast.model.forecast.predict",
    "BACKWARD": "tilecast.model.training.passes",
    "predict_backward": "tilecast.model.training.forecast",
    "predict_training": "tilecast.model.training.forecast",
    "best": "tilecast.model.search.best",
    "compiled_variant": "tilecast.codegen.compiler.kept",
    "kept_loop": "tilecast.model.compiled.loops.shelf",
    "loop_at_hand": "tilecast.model.compiled.loops.shelf",
    "Prediction": "tilecast.model.forecast.predict",
    "PredictError": "tilecast.model.chip.evaluate",
    "Gemm": "tilecast.model.gemm.workload",
    "forecast_gemm": "tilecast.model.gemm.forecast",
    "Workload": "tilecast.model.kernel.workload",
    "WorkloadError": "tilecast.model.kernel.workload",
    "Machine": "tilecast.model.machine.machine",
    "MachineError": "tilecast.model.machine.machine",
    "load_machine": "tilecast.model.machine.machine",
    "machine_names": "tilecast.model.machine.machine",
    "what_if": "tilecast.model.whatif.what_if",
    "WhatIf": "tilecast.model.whatif.what_if",
    "sensitivities": "tilecast.model.whatif.sensitivity",
    "break_evens": "tilecast.model.whatif.break_even",
    "asymmetry_map": "tilecast.model.whatif.asymmetry",
    "schedule_kernel": "tilecast.model.schedule.report",
    "parse_variant": "tilecast.model.families",
    "VariantError": "tilecast.model.kernel.verdict",
    "tune": "tilecast.validation.lab.tuning",
    "prune_configs_by": "tilecast.explore.autotune",
    "emulate": "tilecast.emulator.suites.around",
    "emulated": "tilecast.emulator.any_kernel",
    "emulation": "tilecast.emulator.suites.around",
    "preset": "tilecast.model.kernel.presets",
    "preset_names": "tilecast.model.kernel.presets",
    "read_shapes": "tilecast.model.kernel.shapes_csv",
    "sweep": "tilecast.explore.sweep.api",
    "SweepError": "tilecast.explore.sweep.errors",
    "SweepTable": "tilecast.explore.sweep.table",
    "report": "tilecast.explore.review.build",
}
__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from tilecast.codegen.compiler.kept import compiled_variant
    from tilecast.emulator.any_kernel import emulated
    from tilecast.emulator.suites.around import emulate, emulation
    from tilecast.explore.autotune import prune_configs_by
    from tilecast.explore.review.build import report
    from tilecast.explore.sweep.api import sweep
    from tilecast.explore.sweep.errors import SweepError
    from tilecast.explore.sweep.table import SweepTable
    from tilecast.kernels.errors import AttentionError, UnsupportedError
    from tilecast.kernels.gemm.operator import addmm
    from tilecast.kernels.operator import attention
    from tilecast.kernels.pytorch import register_flash_attention
    from tilecast.kernels.quantize import quantize_e4m3
    from tilecast.kernels.serving.calls import attention_kvcache, attention_mla, attention_varlen
    from tilecast.model.chip.evaluate import PredictError
    from tilecast.model.compiled.loops.shelf import kept_loop, loop_at_hand
    from tilecast.model.families import parse_variant
    from tilecast.model.forecast.predict import Prediction, predict
    from tilecast.model.gemm.forecast import forecast_gemm
    from tilecast.model.gemm.workload import Gemm
    from tilecast.model.kernel.presets import preset, preset_names
    from tilecast.model.kernel.shapes_csv import read_shapes
    from tilecast.model.kernel.verdict import VariantError
    from tilecast.model.kernel.workload import Workload, WorkloadError
    from tilecast.model.machine.machine import Machine, MachineError, load_machine, machine_names
    from tilecast.model.schedule.report import schedule_kernel
    from tilecast.model.search.best import best
    from tilecast.model.training.forecast import predict_backward, predict_training
    from tilecast.model.training.passes import BACKWARD
    from tilecast.model.whatif.asymmetry import asymmetry_map
    from tilecast.model.whatif.break_even import break_evens
    from tilecast.model.whatif.sensitivity import sensitivities
    from tilecast.model.whatif.what_if import WhatIf, what_if
    from tilecast.validation.lab.tuning import tune


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tilecast' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
