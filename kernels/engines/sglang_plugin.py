"""The entry point that sglang calls in each of its processes (group ``sglang.srt.plugins``).

    python -m sglang.launch_server --model MODEL --attention-backend tilecast --page-size 64

It only adds a name to those that may be asked for; nothing of sglang's own choice changes.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

NAME = "tilecast"
_log = logging.getLogger("tilecast")


def register() -> None:
    """Make the backend known to sglang, as often as it is called.  An sglang that cannot take it is told so in its log, and runs on."""
    try:
        registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
        arguments = importlib.import_module("sglang.srt.server_args")
        known, add = registry.ATTENTION_BACKENDS, registry.register_attention_backend
        choices = (
            (arguments.ATTENTION_BACKEND_CHOICES, arguments.add_attention_backend_choices),
            # A sequence gets the same bits in every batch.
            (arguments.DETERMINISTIC_ATTENTION_BACKEND_CHOICES, arguments.add_deterministic_attention_backend_choices),
        )
    except (ImportError, AttributeError) as error:
        _log.warning("tilecast: no attention backend registered: expected sglang 0.5.15 or newer, got '%s'", error)
        return
    if NAME not in known:
        add(NAME)(create)
    for names, more in choices:
        if NAME not in names:
            more([NAME])


def create(runner: Any) -> Any:
    """The backend of a model runner of sglang."""
    return importlib.import_module("tilecast.kernels.engines.sglang_backend").TilecastAttnBackend(runner)
