"""Copies whose lines leave L2 first: what is read once need not take the place of what others left there, which may have to be written back.

The copy engine takes a policy with each copy, but Triton writes it only from 3.9 on.  So it is put into the PTX of a compiled kernel, which is
assembled again by Triton's own override of a stage (`ir_override`, 3.6 and later) and kept in its cache like any other.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_COPY = re.compile(
    r"(cp\.async\.bulk\.tensor\.\dd\.shared::(?:cluster|cta)\.global\.mbarrier::complete_tx::bytes)( \[[^;]*\]);"
)
_BODY = re.compile(r"(?:\.entry|\.func)\s[^{;]*\{")
_POLICY = "\n\t.reg .b64 \t%evict_first;\n\tcreatepolicy.fractional.L2::evict_first.b64 \t%evict_first, 1.0;"


def with_evict_first(ptx: str) -> str:
    """PTX of one kernel with the policy in each of its copies to shared memory; as it was where it has none, or functions of its own."""
    made, copies = _COPY.subn(r"\1.L2::cache_hint\2, %evict_first;", ptx)
    bodies = list(_BODY.finditer(made))
    if not copies or len(bodies) != 1:
        return ptx
    begin = bodies[0].end()
    return made[:begin] + _POLICY + made[begin:]


def evicting_first(compiled: Any, compile_with: Callable[..., Any]) -> Any:
    """``compiled`` with that policy, made by ``compile_with(ir_override=path)``; itself where Triton keeps no PTX or overrides none."""
    from triton.runtime.cache import get_cache_manager

    try:
        ptx = compiled.asm["ptx"]
    except (AttributeError, KeyError):
        return compiled
    made = with_evict_first(ptx)
    if made == ptx:
        return compiled
    name = "evict_first.ptx"
    cache = get_cache_manager(hashlib.sha256(made.encode()).hexdigest())
    path = cache.get_file(name) or cache.put(made, name, binary=False)
    if not Path(path).is_file():
        return compiled
    try:
        return compile_with(ir_override=str(path))
    except (KeyError, TypeError):  # no option of this release
        return compiled
