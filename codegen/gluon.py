"""What the kernels of both Gluon families share: how they are handed their outputs and sizes."""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from tilecast.codegen.host import Descriptor

#: What a kernel gets before its sizes, strides in units of 8 elements, which keep addresses small.
OUTPUTS = ("out", "lse", "stride_b", "stride_h", "stride_s")
#: Strides and sizes as the host passes them.
OUTPUT_ARGUMENTS = "*(n // 8 for n in out.stride()[:3]), *sizes"
#: Columns of a line; what keeps ruff from putting arguments one to a line.
_WIDTH, _SKIP = 120, "  # fmt: skip"


class GluonKernel(ABC):
    """Text that follows from the tensor descriptors and the sizes of a kernel."""

    __slots__ = ()

    @property
    @abstractmethod
    def descriptors(self) -> Sequence[Descriptor]:
        """All tensor descriptors, in the order of the kernel's arguments."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[str, ...]:
        """Numbers that vary from call to call, in the order of the kernel's arguments."""

    @property
    def last_arguments(self) -> tuple[str, ...]:
        """What the kernel gets after its sizes."""
        return ("scale_log2",)

    @property
    def worked_out(self) -> tuple[tuple[str, str], ...]:
        """(name, value at launch) of what roles know besides, once they have worked it out."""
        return ()

    @property
    @abstractmethod
    def in_pieces(self) -> bool:
        """Whether a head's columns are more than one tile: then all tiles go as tuples."""

    def descriptors_of(self, tensor: str) -> str:
        """The descriptors of q, k or v as the roles take them: one, or a tuple."""
        names = [made.name for made in self.descriptors if made.tensor == tensor]
        return f"({', '.join(names)}{',' * (len(names) == 1)})" if self.in_pieces else names[0]

    @property
    def descriptors_as_arguments(self) -> str:
        """All descriptors as the roles take them."""
        return ", ".join(map(self.descriptors_of, "qkv"))

    @property
    def problem(self) -> str:
        """The type of what the roles know of a launch."""
        return problem_statement((*self.sizes, *self.last_arguments, *(name for name, _ in self.worked_out)))

    @property
    def new_problem(self) -> str:
        """The statement that makes one."""
        values = (*OUTPUTS, *self.sizes, *self.last_arguments, *(value for _, value in self.worked_out))
        return in_lines(", ".join(values), "problem = Problem(", ")", _WIDTH - 4)

    @property
    def signature(self) -> str:
        """The head of the kernel."""
        names = (made.name for made in self.descriptors)
        return in_lines(", ".join((*names, *OUTPUTS, *self.sizes, *self.last_arguments)), "def attention(", "):")

    @property
    def unspecialized(self) -> str:
        """Places of strides and sizes among the kernel's arguments."""
        first = len(self.descriptors)
        return f"range({first + 2}, {first + len(OUTPUTS) + len(self.sizes)})"


def quoted(names: Iterable[str]) -> str:
    """Names as a list of strings."""
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def in_lines(text: str, first: str, last: str, width: int = _WIDTH) -> str:
    """``first``, arguments and ``last``, in lines that begin below the first argument."""
    if len(first + text + last) <= width:
        return first + text + last
    room = width - len(first)
    lines = textwrap.wrap(text, room)
    if len(lines[-1] + last + _SKIP) > room:
        lines = textwrap.wrap(text, room - len(last + _SKIP))
    return first + f"\n{' ' * len(first)}".join(lines) + last + _SKIP


def sizes_statement(values: Iterable[str]) -> str:
    """The statement that collects the sizes on the host."""
    return in_lines(", ".join(values), "sizes = (", ")", _WIDTH - 4)


def problem_statement(names: Sequence[str]) -> str:
    """The type of what the roles know of a launch: outputs and ``names``."""
    head, fields = 'Problem = namedtuple("Problem", ', " ".join((*OUTPUTS, *names))
    if len(head) + len(fields) + 3 <= _WIDTH:
        return f'{head}"{fields}")'
    cut = fields.rindex(" ", 0, _WIDTH - len(head) - 2) + 1
    return f'{head}"{fields[:cut]}"\n{" " * len("Problem = namedtuple(")}"{fields[cut:]}"){_SKIP}'
