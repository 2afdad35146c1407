"""Compiled kernels made again from changed PTX, by Triton's own override of a stage (`ir_override`, 3.6 and later), and kept in its cache like any other.

`make kernels` writes this file of `codegen/compiler` to `kernels` as well, which import nothing else of ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: PTX -> PTX; the same text where there is nothing to change.
Change = Callable[[str], str]
_NAME = "changed.ptx"
#: What ptxas says to PTX of a release after its own.
_OLDER = "Unsupported .version"


def assembled_again(compiled: Any, change: Change, compile_with: Callable[..., Any]) -> Any:
    """``compiled`` from changed PTX, made by ``compile_with(ir_override=path)``; itself where nothing changes, where Triton keeps no PTX or
    overrides none, and where its assembler is older than that PTX: a cache that processes share may hold what torch.compile, which brings
    an assembler of its own, has had compiled."""
    from triton.runtime.cache import get_cache_manager
    from triton.runtime.errors import PTXASError

    try:
        ptx = compiled.asm["ptx"]
    except (AttributeError, KeyError):
        return compiled
    made = change(ptx)
    if made == ptx:
        return compiled
    cache = get_cache_manager(hashlib.sha256(made.encode()).hexdigest())
    path = cache.get_file(_NAME) or cache.put(made, _NAME, binary=False)
    if not Path(path).is_file():
        return compiled
    try:
        return compile_with(ir_override=str(path))
    except (KeyError, TypeError):  # no option of this release
        return compiled
    except PTXASError as error:
        if _OLDER not in str(error):
            raise
        return compiled
