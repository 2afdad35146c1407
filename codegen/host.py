"""The host side of a generated kernel as `templates/host.j2` reads it: the same for all families but for its boxes and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: A window that reaches beyond all keys and queries has no limit: the sizes of the kernel stay small.
WINDOW_STATEMENTS = (
    "no_limit = seqlen_q + seqlen_k",
    "window_left = no_limit if window_left < 0 else min(window_left, no_limit)",
    "window_right = no_limit if window_right < 0 else min(window_right, no_limit)",
)
#: SMs of the device that holds q.
SMS_STATEMENT = 'sms = triton.runtime.driver.active.utils.get_device_properties(q.device.index)["multiprocessor_count"]'
_NO_WINDOW = 'raise ValueError(f"window: this kernel has no window, got ({window_left}, {window_right})")'
_BAD_LIMITS = 'raise ValueError(f"window: expected limits of at least -1 (none), got ({window_left}, {window_right})")'


@dataclass(frozen=True, slots=True)
class Host:
    """What `prepare` and `launch` of one kernel do."""

    mask: str
    head_dim_qk: int
    head_dim_v: int
    #: The tensor of each descriptor, in the order of the kernel's arguments; none where it takes pointers.
    described: tuple[str, ...]
    #: Statements that make `descriptors` where there are some, then `programs` and `numbers`.
    statements: tuple[str, ...]

    @property
    def refuse_window(self) -> tuple[str, ...]:
        """Statements that refuse limits which the kernel does not take."""
        if self.mask == "window":
            return ("if min(window_left, window_right) < -1:", f"    {_BAD_LIMITS}")
        taken = "((-1, -1), (-1, 0))" if self.mask == "causal" else "((-1, -1),)"
        return (f"if (window_left, window_right) not in {taken}:", f"    {_NO_WINDOW}")

    @property
    def window_text(self) -> str:
        """A line of `launch`'s docstring."""
        if self.mask != "window":
            return ""
        return "\n    window_left, window_right: keys before and after the diagonal that a row sees, -1 for no limit."

    @property
    def shapes(self) -> str:
        """Expected shapes by name."""
        qk, v = self.head_dim_qk, self.head_dim_v
        return f'{{"q": (*rows, {qk}), "k": (*keys, {qk}), "v": (*keys, {v}), "out": (*rows, {v})}}'

    @property
    def _results(self) -> str:
        return "lse" if "out" in self.described else "out, lse"

    @property
    def prepared(self) -> str:
        """Tensors as the kernel is compiled for them."""
        return f"{'*descriptors' if self.described else 'q, k, v'}, {self._results}"

    @property
    def launched(self) -> str:
        """Tensors as a launch passes them."""
        tensors = f"*map(on, descriptors, ({', '.join(self.described)}))" if self.described else "q, k, v"
        return f"{tensors}, {self._results}"

    @property
    def kept(self) -> str:
        """The descriptors without their tensors, which a plan must not keep alive."""
        return "[on(made, None) for made in descriptors]" if self.described else "()"


def box_loops(boxes: Sequence[tuple[str, str, int]], splits: Sequence[str] = ()) -> tuple[str, ...]:
    """Heads of loops over ``tensor``, ``row_count`` and ``columns`` of descriptors, without their colons.

    ``boxes`` are (tensor, constant of its rows, columns), a tensor's one after the other; ``splits`` says for each which
    dimension a pair of CTAs divides, as a ``cga_layout``: ``split`` in the loop.  None without pairs.
    """
    widths: dict[tuple[str, ...], list[int]] = {}
    for i, (tensor, rows, columns) in enumerate(boxes):
        widths.setdefault((tensor, rows, *splits[i : i + 1]), []).append(columns)
    several = any(len(found) > 1 for found in widths.values())
    names = ["tensor", "row_count", *(["split"] if splits else []), "widths" if several else "columns"]
    entries = []
    for key, found in widths.items():
        listed = ", ".join(map(str, found))
        entries.append(f"({', '.join(key)}, {f'[{listed}]' if several else listed})")
    outer = f"for {', '.join(names)} in ({', '.join(entries)})"
    return (outer, "for columns in widths") if several else (outer,)


def box_statements(boxes: Sequence[tuple[str, str, int]], splits: Sequence[str] = ()) -> tuple[str, ...]:
    """Statements that make Gluon's tensor descriptors; arguments as for `box_loops`."""
    loops = box_loops(boxes, splits)
    cga = ", cga_layout=[split]" if splits else ""
    body = (
        "block = [1, 1, row_count.value, columns]",
        f"layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[str(q.dtype)]{cga})",
        "descriptors.append(TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout))",
    )
    heads = [f"{'    ' * depth}{loop}:" for depth, loop in enumerate(loops)]
    return ("descriptors = []", *heads, *(f"{'    ' * len(loops)}{line}" for line in body))
