"""The last kernel of every backward pass, where programs took parts of query heads.  Its text is `templates/backward/sum_parts.j2`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from inspect import getsource

from tilecast.codegen.gluon import in_lines
from tilecast.codegen.host import Host
from tilecast.codegen.pieces import Piece, pieces
from tilecast.model.pipeline.backward.parts import query_head_parts

#: Keys beside the diagonal that queries see.
_LIMITS = {"none": "-1, -1", "causal": "-1, 0", "window": "window_left, window_right"}


class PartSums(ABC):
    """What the text of the kernel, and of what the host asks before, asks of a backward pass."""

    __slots__ = ()

    @property
    @abstractmethod
    def host(self) -> Host:
        """The problems that it takes."""

    @property
    @abstractmethod
    def key_rows(self) -> str:
        """The constant of the keys of a program."""

    @property
    @abstractmethod
    def once_rows(self) -> int:
        """Query rows that take as long as what a program does once."""

    @property
    def beside(self) -> float:
        """Time of programs that run on SMs which those of the keys leave, over that of these."""
        return 0.0

    @property
    def sums_beside(self) -> bool:
        """Whether it begins beside the launch before, which writes nothing that it reads."""
        return False

    @property
    def part_sums(self) -> tuple[tuple[str, int, tuple[Piece, ...]], ...]:
        """(tensor, its columns, the same as blocks)."""
        return tuple((x, d, pieces(d)) for x, d in (("dk", self.host.head_dim_qk), ("dv", self.host.head_dim_v)))

    @property
    def narrower_pieces(self) -> bool:
        """Whether heads with fewer columns than the kernel's may end in any of several pieces."""
        return self.host.narrower and any(len(found) > 1 for _, _, found in self.part_sums)

    @property
    def query_head_parts(self) -> str:
        """The function that says how many parts there are."""
        return getsource(query_head_parts).removeprefix("@lru_cache(maxsize=256)\n")

    @property
    def parts_statement(self) -> str:
        """The statement that asks it."""
        sizes = f"heads_q // heads_kv, heads_kv, seqlen_q, seqlen_k, {_LIMITS[self.host.mask]}, {self.key_rows}.value, {self.once_rows}, {self.beside}"
        return in_lines(f"{sizes}, multiprocessors(q.device.index)", "parts = query_head_parts(", ")", 110)

    @property
    def workspaces_text(self) -> str:
        """What launches need beside terms and sums of parts, for a docstring."""
        return ""

    @property
    def workspaces_statements(self) -> tuple[str, ...]:
        """Statements that return what launches need beside terms."""
        return ("return dk_parts, dv_parts",)
