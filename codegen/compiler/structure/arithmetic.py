"""Integer instructions as functions of 32-bit words: what the reader needs to follow an address or a choice.

Words are unsigned 32-bit; predicates 0 or 1.  Semantics: NVIDIA's PTX instructions that these implement (lop3, prmt, shf,
mad, bfe), checked against listings of kernels whose addresses are known.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable

MASK = 0xFFFFFFFF
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "EQ": operator.eq, "NE": operator.ne, "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge,
}  # fmt: skip


def signed(word: int) -> int:
    """A word as a two's complement number."""
    return word - (1 << 32) if word & 0x80000000 else word


def lop3(a: int, b: int, c: int, table: int) -> int:
    """Bitwise function of three words: bit abc of ``table`` is the result for such bits."""
    out = 0
    for row in range(8):
        if table >> row & 1:
            out |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return out & MASK


def prmt(a: int, selector: int, b: int) -> int:
    """Bytes of b:a in the order of the selector's four digits; its high bit spreads a byte's sign."""
    words, out = a | b << 32, 0
    for i in range(4):
        digit = selector >> 4 * i & 15
        byte = words >> 8 * (digit & 7) & 255
        out |= (255 * (byte >> 7) if digit & 8 else byte) << 8 * i
    return out


def shift(modifiers: str, low: int, amount: int, high: int) -> int | None:
    """SHF and USHF; None for a form that no listing had."""
    by = min(amount, 64)
    if modifiers == ".L.U32":
        return low << by & MASK
    if modifiers == ".R.U32.HI":
        return high >> by
    if modifiers == ".R.S32.HI":
        return signed(high) >> by & MASK
    if modifiers in (".L.U64.HI", ".L.U32.HI"):
        return (low | high << 32) << by >> 32 & MASK
    if modifiers in (".R.U64", ".R.S64"):
        return (low | (signed(high) if "S" in modifiers else high) << 32) >> by & MASK
    return None


def compare(modifiers: str, a: int, b: int, other: int) -> int | None:
    """ISETP and UISETP: a comparison, and AND or OR with another predicate; None for a form that takes carries."""
    parts = modifiers.strip(".").split(".")
    if "EX" in parts or parts[0] not in _COMPARE:
        return None
    x, y = (a, b) if "U32" in parts else (signed(a), signed(b))
    found = int(_COMPARE[parts[0]](x, y))
    return found | other if "OR" in parts else found & other if "AND" in parts else found ^ other


def extend(modifiers: str, word: int, bits: int) -> int:
    """SGXT and USGXT: the low bits, their sign spread unless unsigned."""
    if bits >= 32:
        return word
    low = word & (1 << bits) - 1
    return low if ".U32" in modifiers or not low >> max(bits - 1, 0) & 1 else (low | MASK << bits) & MASK


def halves(high: str, low: str) -> int | None:
    """Two numbers as a word of packed half floats, which is how compilers write some constants; None for no numbers."""
    try:
        return int(struct.unpack("<I", struct.pack("<ee", float(low), float(high)))[0])
    except (ValueError, OverflowError, struct.error):
        return None


def wide(a: int, b: int, low: int, high: int, unsigned: bool) -> tuple[int, int]:
    """a*b + high:low as (low word, high word)."""
    product = a * b if unsigned else signed(a) * signed(b)
    total = product + (low | high << 32)
    return total & MASK, total >> 32 & MASK
