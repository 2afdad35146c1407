"""What the template of the `triton_few_bwd` family needs to know: gradients of few query rows in plain Triton, one pass over the keys.

Python decides here, `templates/triton_backward_few.py.j2` only writes.  The kernels run from sm_90 on, and in Triton's interpreter but for
the two instructions that let a launch begin early.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from inspect import getsource

from tilecast.codegen.gluon import in_lines
from tilecast.codegen.host import WINDOW_STATEMENTS, Host
from tilecast.codegen.row_terms import STRIDE, strides
from tilecast.model.kernel.header import dims_text
from tilecast.model.kernel.variants.hopper.few_backward import FewBackwardVariant, columns
from tilecast.model.kernel.workload import Workload
from tilecast.model.pipeline.backward.parts import part_keys

TEMPLATE = "triton_backward_few.py.j2"
#: Targets that every variant runs on.
TARGETS = ("sm_90a",)
_TENSORS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
_POINTERS = (*(f"{x}_ptr" for x in _TENSORS), "lse_ptr", "dlse_ptr", "sums_ptr")
_SIZES = (
    "heads_kv", "group", "seqlen_q", "seqlen_k", "parts", "part_keys", "dlse_rows", "window_left", "window_right", "eighths", "eighths_v",
)  # fmt: skip
_FLAGS = ("ROWS", "MASKED", "ALONE")
#: Elements that a program of add_parts asks for at a time: 64 to a thread.
_SUM_ELEMENTS = 8192
_SUM_PARTS = 16


@dataclass(frozen=True, slots=True)
class FewBackward:
    """Everything `TEMPLATE` reads except the header, as ``k``."""

    title: str
    description: str
    variant: FewBackwardVariant
    host: Host
    #: Only heads of whole blocks are cut in pieces, which these kernels' are not.
    narrower_pieces: bool = False

    @property
    def form(self) -> str:
        """What a program has: all query rows and a part of the keys, or all keys."""
        return f"backward/few_{'rows' if self.variant.step else 'keys'}.j2"

    @property
    def columns(self) -> tuple[int, int]:
        """Columns of tiles of Q and K, and of V and O."""
        return columns(self.host.head_dim_qk), columns(self.host.head_dim_v)

    @property
    def sum_parts(self) -> int:
        """Parts that are asked for at a time."""
        return _SUM_PARTS

    @property
    def sum_rows(self) -> int:
        """Rows of a program that adds parts up."""
        return max(1, _SUM_ELEMENTS // (_SUM_PARTS * self.columns[0]))

    @property
    def signature(self) -> str:
        """The head of the kernel."""
        names = [
            *self._pointers,
            *strides(_TENSORS),
            *self._sizes,
            *(f"{name}: tl.constexpr" for name in (("MASKED",) if self.variant.step else _FLAGS)),
            "scale_log2",
            "scale",
        ]
        return in_lines(", ".join(names), "def gradients(", "):")

    @property
    def unspecialized(self) -> str:
        """Places of strides and sizes among the arguments: the compiled code must not depend on them."""
        first = len(self._pointers)
        return f"range({first}, {first + 3 * len(_TENSORS) + len(self._sizes)})"

    @property
    def _pointers(self) -> tuple[str, ...]:
        return _POINTERS[:-1] if self.variant.step else _POINTERS

    @property
    def _sizes(self) -> tuple[str, ...]:
        return tuple(name for name in _SIZES if "part" not in name) if self.variant.step else _SIZES

    @property
    def refuse_keys(self) -> str:
        """Statements that refuse more keys than a program has."""
        if not self.variant.step:
            return ""
        said = 'raise ValueError(f"k: expected up to {TILE_N.value} keys, got {seqlen_k}")'
        return f"    if seqlen_k > TILE_N.value:\n        {said}\n"

    @property
    def places(self) -> tuple[str, ...]:
        """Statements that find the keys of a head."""
        return tuple(
            f"{x}_ptr += (batch * stride_{STRIDE[x]}b + head.to(tl.int64) * stride_{STRIDE[x]}h) * 8"
            for x in ("k", "v", "dk", "dv")
        )

    @property
    def part_keys_text(self) -> str:
        """The function that says how many keys a part has."""
        return getsource(part_keys).removeprefix("@lru_cache(maxsize=256)\n")

    @property
    def window_statements(self) -> tuple[str, ...]:
        """Statements that give windows without limits some."""
        return WINDOW_STATEMENTS


def context(variant: FewBackwardVariant, workload: Workload) -> FewBackward:
    """The kernels of a variant, which must be writable (`few_backward.writable`)."""
    walks = [
        "For sequences of few keys whose query heads that share a key/value head have more query rows together than a tile: a program has",
        f"all keys and walks over the rows, {variant.step} at a time.  It makes LSE and D of its rows itself, keeps dK and dV, and writes dQ of a step at",
        "once: one launch.  Any mask.  The same bits every run.",
    ]
    lines = (
        walks
        if variant.step
        else [
            "For sequences whose query heads that share a key/value head have few query rows together: a program has all of them, and a part",
            f"of the keys, {variant.tile_n} at a time.  It makes its rows' LSE and D itself, reads K and V and writes dK and dV once, five matrix",
            "products, and leaves what its keys add to dQ to add_parts, which sums the parts in their order; of one part it writes dQ.",
            "Any mask.  The same bits every run.",
        ]
    )
    return FewBackward(
        title=f"Attention backward for head_dim {dims_text(workload)} and few {'keys' if variant.step else 'query rows'}, in plain Triton",
        description=textwrap.fill(" ".join(lines), 120),
        variant=variant,
        host=Host("window", workload.head_dim_qk, workload.head_dim_v, (), "", narrower=True),
    )
