"""Copies whose lines leave L2 first: what is read once need not take the place of what others left there, which may have to be written back.

The copy engine takes a policy with each copy, but Triton writes it only from 3.9 on.  So it is put into the PTX of a compiled kernel, which is
`assembled_again`.
"""

from __future__ import annotations

import re

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
