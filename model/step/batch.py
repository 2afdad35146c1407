"""The batch of a serving step: how many queries and keys each sequence has, the heads, the pages.  Not a word about kernels.

Lengths come from a CSV (`read_batch`) or a line of text (`parse_requests`): ``64x8192,2x512:4096`` are 64 sequences of one query
and 8192 keys and 2 of 512 queries and 4096 keys.  Keys include those of the step's own tokens, as `cache_seqlens` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from tilecast.base.csv_file import miscounted, numbered_rows
from tilecast.model.kernel.workload import Workload, WorkloadError

#: Columns of a file of lengths: queries, keys, and how many sequences have them.
COLUMNS = ("seqlen_q", "seqlen_k", "count")
#: Tokens of a page that serving kernels take; 0: each sequence's keys lie together.
PAGES = (0, 16, 32, 64, 128, 256)
#: What caches hold: as q is, or bytes.
CACHES = ("", "e4m3")
MOST_SEQUENCES = 1 << 16
#: Keys of a sequence that the kernels count to.
MOST_KEYS = 1 << 29

#: (queries, keys) of each sequence.
Lengths = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of a step, with the heads that all of them have.

    ``heads`` is one sequence of the model: its head counts, dimensions, mask and dtype; its lengths do not count.
    """

    lengths: Lengths
    heads: Workload
    page: int = 64
    #: What the caches hold: "" as q is, "e4m3" a byte an element.
    cache: str = ""
    #: Whether V is the first columns of K (MLA): all query heads share one key, which is there once.
    latent: bool = False
    #: Whether scores have a soft cap.
    capped: bool = False

    def __post_init__(self) -> None:
        if not self.lengths:
            raise WorkloadError("batch: expected at least one sequence, got none")
        if len(self.lengths) > MOST_SEQUENCES:
            raise WorkloadError(f"batch: expected at most {MOST_SEQUENCES} sequences, got {len(self.lengths)}")
        for seqlen_q, seqlen_k in dict.fromkeys(self.lengths):
            check_lengths(seqlen_q, seqlen_k)
        if self.page not in PAGES:
            raise WorkloadError(f"page: expected {', '.join(map(str, PAGES))} tokens, got {self.page}")
        if self.cache not in CACHES:
            raise WorkloadError(
                f"cache: expected {' or '.join(CACHES[1:])}, or nothing for caches with the dtype of q, got '{self.cache}'"
            )
        h = self.heads
        if self.latent and (h.heads_kv != 1 or h.head_dim_v > h.head_dim_qk or self.cache):
            got = f"{h.heads_kv} key heads of {h.head_dim_qk}/{h.head_dim_v}" + (
                f" in {self.cache}" if self.cache else ""
            )
            raise WorkloadError(
                f"latent: expected one key head with the dtype of q and V as its first columns, as in 576/512, got {got}"
            )

    @property
    def queries(self) -> int:
        """Queries of all sequences: tokens that the step computes."""
        return sum(q for q, _ in self.lengths)

    @property
    def keys(self) -> int:
        """Keys of all sequences."""
        return sum(k for _, k in self.lengths)

    @property
    def key_bytes(self) -> int:
        """Bytes of K and V of one token and key head."""
        columns = self.heads.head_dim_qk + (0 if self.latent else self.heads.head_dim_v)
        return columns * (1 if self.cache else self.heads.dtype_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token of one layer."""
        return self.heads.heads_kv * self.key_bytes

    @property
    def packed(self) -> bool:
        """Whether sequences have different numbers of queries, which then lie one after another."""
        return len({queries for queries, _ in self.lengths}) > 1

    @property
    def cache_bytes(self) -> int:
        """Bytes of the pages that hold the keys of one layer."""
        page = self.page or 1
        return sum(-(-k // page) * page for _, k in self.lengths) * self.token_bytes

    def workload(self) -> Workload:
        """The batch as one problem of its longest sequences: what kernels are chosen by."""
        longest_q, longest_k = (max(values) for values in zip(*self.lengths, strict=True))
        return replace(self.heads, batch=len(self.lengths), seqlen_q=longest_q, seqlen_k=longest_k)

    def with_requests(self, lengths: Iterable[tuple[int, int]]) -> Batch:
        """The batch and more sequences behind it."""
        return replace(self, lengths=(*self.lengths, *lengths))

    def label(self) -> str:
        """The batch in one short line."""
        h = self.heads
        heads = f"{h.heads_q}/{h.heads_kv} heads"
        pages = f"pages of {self.page}" if self.page else "no pages"
        kind = (
            h.dtype
            + (f", {self.cache} caches" if self.cache else "")
            + (", latent" if self.latent else "")
            + (", soft cap" if self.capped else "")
        )
        mask = f"window {h.window[0]},{h.window[1]}" if h.window else h.mask.replace("none", "no mask")
        return f"{shortened(requests_text(self.lengths))}, {heads}, head_dim {h.dims}, {kind}, {mask}, {pages}"


def check_lengths(seqlen_q: int, seqlen_k: int) -> None:
    """WorkloadError unless a sequence can have so many queries and keys."""
    for name, value in (("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
        if not 1 <= value <= MOST_KEYS:
            raise WorkloadError(f"{name}: expected 1 to {MOST_KEYS}, got {value}")
    if seqlen_q > seqlen_k:
        raise WorkloadError(
            f"seqlen_k: expected at least the {seqlen_q} queries of the step, whose keys are in the cache too, got {seqlen_k}"
        )


# --- lengths as text -----------------------------------------------------------------------------------------------


def parse_requests(text: str) -> Lengths:
    """(queries, keys) of each sequence of "64x8192,2x512:4096"; WorkloadError names the part that makes no sense."""
    out: list[tuple[int, int]] = []
    for part in text.split(","):
        count, times, rest = part.strip().rpartition("x")
        queries, colon, keys = rest.rpartition(":")
        try:
            number, one = int(count) if times else 1, (int(queries) if colon else 1, int(keys))
        except ValueError:
            raise WorkloadError(
                f"requests: expected COUNTxKEYS or COUNTxQUERIES:KEYS with commas between, as in 64x8192,2x512:4096, got '{part.strip()}'"
            ) from None
        out += _times(one, number, len(out))
    return tuple(out)


def _times(one: tuple[int, int], count: int, already: int) -> list[tuple[int, int]]:
    if not 1 <= count <= MOST_SEQUENCES - already:
        raise WorkloadError(f"count: expected 1 to {MOST_SEQUENCES} sequences in all, got {already + count}")
    check_lengths(*one)
    return [one] * count


def requests_text(lengths: Iterable[tuple[int, int]]) -> str:
    """The text that `parse_requests` reads: neighbours with the same lengths as one part."""
    parts = []
    for (queries, keys), same in groupby(lengths):
        count = sum(1 for _ in same)
        parts.append(f"{count}x{keys}" if queries == 1 else f"{count}x{queries}:{keys}")
    return ",".join(parts)


def shortened(text: str, most: int = 60) -> str:
    """A list of requests for a headline: its first parts and how many more."""
    parts = text.split(",")
    shown = len(parts)
    while shown > 1 and len(",".join(parts[:shown])) > most:
        shown -= 1
    return ",".join(parts[:shown]) + (f" and {len(parts) - shown} more" if shown < len(parts) else "")


# --- lengths from a file -------------------------------------------------------------------------------------------


def read_batch(path: str | Path) -> Lengths:
    """Lengths of a CSV with columns seqlen_q (1 where left out), seqlen_k and count (1 where left out).

    WorkloadError names file, row (the header is row 1), column, expected and got.
    """
    file = Path(path)
    out: list[tuple[int, int]] = []
    header, rows = numbered_rows(path, "the batch", WorkloadError)
    _check_header([name.strip() for name in header], file.name)
    for line, row in rows:
        try:
            out += _row(row, len(out))
        except WorkloadError as error:
            raise WorkloadError(f"{file.name}: row {line}: {error}") from None
    if not out:
        raise WorkloadError(f"{file.name}: expected at least one row of lengths, got none")
    return tuple(out)


def _check_header(header: list[str], name: str) -> None:
    unknown = [column for column in header if column not in COLUMNS]
    twice = [column for i, column in enumerate(header) if column in header[:i]]
    got = (
        "an empty file" if not header
        else f"unknown column '{unknown[0]}'" if unknown
        else f"'{twice[0]}' twice" if twice
        else "no seqlen_k" if "seqlen_k" not in header
        else ""
    )  # fmt: skip
    if got:
        raise WorkloadError(f"{name}: row 1: expected seqlen_k and, if wanted, seqlen_q and count, got {got}")


def _row(row: dict[Any, Any], already: int) -> list[tuple[int, int]]:
    if wrong := miscounted(row):
        raise WorkloadError(wrong)
    values = {name.strip(): text.strip() for name, text in row.items()}
    queries, keys, count = (_whole(values, column) for column in COLUMNS)
    return _times((queries, keys), count, already)


def _whole(values: dict[str, str], column: str) -> int:
    text = values.get(column, "")
    if not text and column != "seqlen_k":
        return 1
    try:
        return int(text)
    except ValueError:
        raise WorkloadError(f"{column}: expected a whole number, got '{text}'") from None
