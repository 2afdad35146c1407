"""The kernels that ship, as generated, and the operator users call.  Names load on first use: this imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "addmm": "tilecast.kernels.gemm.operator",
    "attention": "tilecast.kernels.operator",
    "attention_kvcache": "tilecast.kernels.serving.calls",
    "attention_mla": "tilecast.kernels.serving.calls",
    "attention_varlen": "tilecast.kernels.serving.calls",
    "AttentionError": "tilecast.kernels.errors",
    "UnsupportedError": "tilecast.kernels.errors",
    "quantize_e4m3": "tilecast.kernels.quantize",
    "register_flash_attention": "tilecast.kernels.pytorch",
}
__all__ = [
    "AttentionError", "UnsupportedError", "addmm", "attention", "attention_kvcache", "attention_mla", "attention_varlen", "quantize_e4m3",
    "register_flash_attention",
]  # fmt: skip

if TYPE_CHECKING:
    from tilecast.kernels.errors import AttentionError, UnsupportedError
    from tilecast.kernels.gemm.operator import addmm
    from tilecast.kernels.operator import attention
    from tilecast.kernels.pytorch import register_flash_attention
    from tilecast.kernels.quantize import quantize_e4m3
    from tilecast.kernels.serving.calls import attention_kvcache, attention_mla, attention_varlen


def _without_torch(*_: Any, **__: Any) -> Any:
    """Attention and products on the shipped kernels; needs torch and triton: pip install 'tilecast[gpu]'."""
    raise ModuleNotFoundError("tilecast's kernels need torch: pip install 'tilecast[gpu]'", name="torch")


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tilecast.kernels' has no attribute '{name}'")
    try:
        value = getattr(importlib.import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return _without_torch
    globals()[name] = value
    return value
