"""The host side of a generated kernel as `templates/host.j2` reads it: the same for all families but for its boxes and sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
class Descriptor:
    """A tensor descriptor of a kernel: its name, the tensor it is of, and its box of ``rows`` (a constant of the file) x columns."""

    name: str
    tensor: str
    rows: str
    columns: int
    #: The dimension that a pair of CTAs divides between them, as a ``cga_layout``; "" where there are no pairs.
    split: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """What `plan` and `launch` of one kernel do."""

    mask: str
    head_dim_qk: int
    head_dim_v: int
    #: Statements that make `descriptors` where there are some, `programs`, and what `numbers` needs.
    statements: tuple[str, ...]
    #: Expressions of the kernel's arguments after the tensors, but the scale.
    numbers: str
    #: Whether the kernel takes descriptors in place of pointers, and whether also of `out`.
    described: bool = True
    out_described: bool = False
    #: Whether heads of fewer columns, a multiple of 8, are taken as well.
    narrower: bool = False
    #: Where a second launch may join what the first leaves in `partials` (`scratch` of the file says how many numbers), the end of what `plan`
    #: returns: grids and arguments of such launches.
    joined: str = ""

    @property
    def width_text(self) -> str:
        """Statements that say how many columns heads have that the kernel takes as well, or what is expected; after another."""
        if not self.narrower:
            return ""
        most, most_v = self.head_dim_qk, self.head_dim_v
        if most != most_v:
            return "".join(
                f'\n    {name} = {x}.shape[-1] if {x}.shape[-1] in range(8, {n + 1}, 8) else "a multiple of 8 up to {n}"'
                for name, x, n in (("head_dim", "q", most), ("head_dim_v", "v", most_v))
            )
        return (
            f'\n    taken = "a multiple of 8 up to {most}"'
            f"\n    head_dim, head_dim_v = (n if n in range(8, {most + 1}, 8) else taken for n in (q.shape[-1], v.shape[-1]))"
        )

    @property
    def columns(self) -> tuple[str, str]:
        """Columns of Q and K, and of V, on the host."""
        return ("head_dim", "head_dim_v") if self.narrower else (str(self.head_dim_qk), str(self.head_dim_v))

    def eighths(self, tensor: str) -> str:
        """The expression of how many times 8 columns Q and K ("qk") or V and O ("v") have where they have fewer than the kernel's, else None."""
        columns, own = ((self.columns[0], self.head_dim_qk), (self.columns[1], self.head_dim_v))[tensor == "v"]
        return f"None if {columns} == {own} else {columns} // 8"

    @property
    def columns_text(self) -> str:
        """What a docstring says of fewer columns."""
        if not self.narrower:
            return ""
        zeros = ": the copy engine brings zeros" if self.described else ""
        return f"\n    Or q and k, or v and out, with fewer columns, a multiple of 8{zeros}."

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
        qk, v = self.columns
        return f'{{"q": (*rows, {qk}), "k": (*keys, {qk}), "v": (*keys, {v}), "out": (*rows, {v})}}'

    @property
    def arguments(self) -> str:
        """The kernel's arguments but the scale."""
        tensors = "*descriptors" if self.described else "q, k, v"
        work = ", partials" if self.joined else ""
        return f"({tensors}, {'lse' if self.out_described else 'out, lse'}{work}, {self.numbers})"


def box_loops(boxes: Sequence[tuple[str, str, int]], splits: Sequence[str] = ()) -> tuple[tuple[str, ...], str]:
    """Heads of loops over the boxes of descriptors: ``x``, ``count`` (of rows); and the expression of their columns.

    ``boxes`` are (tensor, constant of its rows, columns), a tensor's one after the other; ``splits`` says for each which
    dimension a pair of CTAs divides, as a ``cga_layout``: ``split`` in the loop.  None without pairs.
    """
    widths = _widths(boxes, splits)
    names, common = ["x", "count", *(["split"] if splits else [])], _common(widths)
    if common:
        outer = f"for {', '.join(names)} in ({', '.join('(' + ', '.join(key) + ')' for key in widths)})"
        return ((outer, f"for columns in {common}"), "columns") if len(common) > 1 else ((outer,), str(common[0]))
    single = all(len(found) == 1 for found in widths.values())
    entries = (f"({', '.join(key)}, {found[0] if single else found})" for key, found in widths.items())
    outer = f"for {', '.join(names)}, {'columns' if single else 'widths'} in ({', '.join(entries)})"
    return (outer,) if single else (outer, "for columns in widths"), "columns"


def box_statements(boxes: Sequence[tuple[str, str, int]], splits: Sequence[str] = ()) -> tuple[str, ...]:
    """Statements that make Gluon's tensor descriptors; arguments as for `box_loops`."""
    loops, columns = box_loops(boxes, splits)
    if not splits and (common := _common(_widths(boxes))):
        made = (
            "TensorDescriptor.from_tensor(x, block, gl.NVMMASharedLayout.get_default_for(block, DTYPES[str(q.dtype)]))"
        )
        blocks = (f"({tensor}, [1, 1, {rows}.value, {width}])" for tensor, rows, width in boxes)
        over: tuple[str, ...] = (f"for x, block in ({', '.join(blocks)})",)
        if len(common) > 1:
            over = (loops[0], f"for block in ({', '.join(f'[1, 1, count.value, {width}]' for width in common)})")
        return ("descriptors = [", f"    {made}", *(f"    {loop}" for loop in over), "]")
    body = (
        f"block = [1, 1, count.value, {columns}]",
        f"layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[str(q.dtype)]{', cga_layout=[split]' if splits else ''})",
        "descriptors.append(TensorDescriptor.from_tensor(x, block, layout))",
    )
    heads = [f"{'    ' * depth}{loop}:" for depth, loop in enumerate(loops)]
    return ("descriptors = []", *heads, *(f"{'    ' * len(loops)}{line}" for line in body))


def _widths(boxes: Sequence[tuple[str, str, int]], splits: Sequence[str] = ()) -> dict[tuple[str, ...], list[int]]:
    """Columns of the boxes of each tensor, by (tensor, constant of its rows, split if any)."""
    found: dict[tuple[str, ...], list[int]] = {}
    for i, (tensor, rows, columns) in enumerate(boxes):
        found.setdefault((tensor, rows, *splits[i : i + 1]), []).append(columns)
    return found


def _common(widths: Mapping[tuple[str, ...], list[int]]) -> list[int]:
    """What all tensors have; empty where they differ."""
    first, *others = widths.values()
    return first if all(found == first for found in others) else []
