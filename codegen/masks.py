"""Which keys a query sees, as the descriptions of kernels say it."""

from __future__ import annotations

_SEEN = {
    "none": "every query sees every key",
    "causal": "query i sees keys up to i + seqlen_k - seqlen_q",
    "window": "query i sees keys from window_left before to window_right after position i + seqlen_k - seqlen_q",
}
_TITLES = {"causal": "Causal: ", "window": "Sliding window: "}
#: Of kernels for packed sequences and caches, which know every mask.
SEEN_OF_SEQUENCE = "Query i of a sequence sees keys from left before to right after position i + keys - queries."


def keys_seen(mask: str) -> str:
    """The sentence that says which keys a query sees."""
    return f"{_capital(_SEEN[mask])}."


def keys_seen_and_masked(mask: str, blocks: str = "block") -> str:
    """The same, and which blocks (or ``blocks``) of a backward pass are masked."""
    return f"{_capital(_SEEN[mask])}; {_masked(mask, blocks)}."


def titled_keys_seen(mask: str) -> str:
    """The sentence with the mask's name, what a limit of -1 means, and which blocks are masked."""
    if mask == "none":
        return keys_seen(mask)
    unlimited = " (-1: no limit)" if mask == "window" else ""
    return f"{_TITLES[mask]}{_SEEN[mask]}{unlimited}; {_masked(mask, 'block')}."


def _masked(mask: str, blocks: str) -> str:
    return {
        "none": f"only the {blocks} of keys that reaches over the last one is masked",
        "causal": f"only {blocks}s on that diagonal are masked",
        "window": f"only {blocks}s on the two edges of that band are masked",
    }[mask]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
