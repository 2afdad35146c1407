"""The entry point that vLLM calls in each of its processes (group ``vllm.general_plugins``).

    vllm serve MODEL --attention-backend CUSTOM

It only tells vLLM's registry where the backend is; nothing of vLLM's choice changes unless CUSTOM is asked for.  That name is the
one place vLLM leaves to others in all its processes: names of one's own are not known yet where its settings are read.
"""

from __future__ import annotations

import importlib
import logging

BACKEND = "tilecast.kernels.engines.vllm_backend.TilecastBackend"
_log = logging.getLogger("tilecast")


def register() -> None:
    """Make the backend known to vLLM, as often as it is called.  A vLLM that cannot take it is told so in its log, and runs on."""
    try:
        registry = importlib.import_module("vllm.v1.attention.backends.registry")
        place, add = registry.AttentionBackendEnum.CUSTOM, registry.register_backend
    except (ImportError, AttributeError) as error:
        _log.warning("tilecast: no attention backend registered: expected vLLM 0.30 or newer, got '%s'", error)
        return
    try:
        taken = place.get_path()
    except ValueError:
        taken = ""
    if taken not in ("", BACKEND):
        _log.warning("tilecast: no attention backend registered: CUSTOM is taken by %s", taken)
        return
    add(place, BACKEND)
