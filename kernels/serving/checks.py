"""What a serving call may not be: one sentence each, from shapes and dtypes alone, before anything is launched.

`check_values` looks at numbers on the device as well, which waits for it: only where the caller asks with ``check=True``.
"""

from __future__ import annotations

import itertools
from typing import Any

from tilecast.kernels.errors import AttentionError, UnsupportedError

PAGES = (16, 32, 64, 128, 256)
#: Keys of a sequence that the kernels count to.
MOST_KEYS = 1 << 29


#: Dtypes of a cache of e4m3 bytes.
NARROW = ("torch.float8_e4m3fn", "torch.uint8")


def check_tensors(q: Any, k: Any, v: Any, queries: str, keys: str) -> None:
    """AttentionError unless q (``queries`` names its dimensions), k and v (``keys``) fit together."""
    narrow = str(getattr(k, "dtype", "")) in NARROW
    for name, tensor, dims in (("q", q, queries), ("k", k, keys), ("v", v, keys)):
        shape = getattr(tensor, "shape", None)
        if shape is None or not hasattr(tensor, "dtype"):
            raise AttentionError(f"{name}: expected a torch tensor, got {type(tensor).__name__}")
        if len(shape) != dims.count(",") + 1:
            raise AttentionError(f"{name}: expected dimensions ({dims}), got {len(shape)}: {tuple(shape)}")
        wanted, whose = (k.dtype, "k") if narrow and name == "v" else (q.dtype, "q")
        if tensor.dtype != wanted and not (narrow and name == "k"):
            raise AttentionError(f"{name}: expected dtype {wanted} as {whose} has, got {tensor.dtype}")
        if tensor.device != q.device:
            raise AttentionError(f"{name}: expected device {q.device} as q has, got {tensor.device}")
    if tuple(v.shape[:-1]) != tuple(k.shape[:-1]):
        raise AttentionError(f"v: expected ({keys}) = {(*k.shape[:-1], 'head_dim_v')} as k has, got {tuple(v.shape)}")
    if k.shape[-1] != q.shape[-1]:
        raise AttentionError(f"k: expected head_dim {q.shape[-1]} as q has, got {k.shape[-1]}")
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if heads_kv == 0 or heads_q % heads_kv:
        raise AttentionError(f"q: expected heads a multiple of the {heads_kv} key/value heads, got {heads_q}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        strides, unit = tensor.stride(), 16 if narrow and name != "q" else 8
        if strides[-1] != 1 or any(n % unit for n in strides[:-1]):
            # Caches are not copied unasked.
            raise AttentionError(
                f"{name}: expected a last stride of 1 and other strides in multiples of {unit}, got {strides}; "
                "store it contiguous"
            )


def check_new(q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, batch: int, packed: bool) -> None:
    """AttentionError unless new keys and values fit to checked queries and caches of ``batch`` sequences."""
    dims = "total_new, heads_kv, head_dim" if packed else "batch, seqlen_new, heads_kv, head_dim"
    for name, tensor, cache in (("k", k, k_cache), ("v", v, v_cache)):
        shape = getattr(tensor, "shape", None)
        if shape is None or not hasattr(tensor, "dtype"):
            raise AttentionError(f"{name}: expected a torch tensor to append, got {type(tensor).__name__}")
        if len(shape) != dims.count(",") + 1:
            raise AttentionError(f"{name}: expected dimensions ({dims}), got {len(shape)}: {tuple(shape)}")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise AttentionError(
                f"{name}: expected {q.dtype} on {q.device} as q has, got {tensor.dtype} on {tensor.device}"
            )
        if tuple(shape[-2:]) != tuple(cache.shape[-2:]):
            raise AttentionError(
                f"{name}: expected (..., heads_kv, head_dim) = {tuple(cache.shape[-2:])} as {name}_cache has, got {tuple(shape)}"
            )
        if not packed and shape[0] != batch:
            raise AttentionError(f"{name}: expected a batch of {batch} as q has, got {shape[0]}")
        if tensor.stride(-1) != 1 or any(n % 8 for n in tensor.stride()[:-1]):
            raise AttentionError(
                f"{name}: expected a last stride of 1 and others in multiples of 8, got {tensor.stride()}; "
                "store it contiguous"
            )
    if k.shape[:-1] != v.shape[:-1]:
        raise AttentionError(
            f"v: expected as many new values as there are keys, {tuple(k.shape)}, got {tuple(v.shape)}"
        )


def check_list(name: str, given: Any, shape: tuple[int | None, ...], device: Any, dtype: str = "torch.int32") -> None:
    """AttentionError unless ``given`` is a contiguous int32 tensor of ``shape``, None for any extent, on ``device``."""
    if not hasattr(given, "dtype") or not hasattr(given, "shape"):
        raise AttentionError(f"{name}: expected a tensor of {dtype}, got {type(given).__name__}")
    if str(given.dtype) != dtype:
        raise AttentionError(f"{name}: expected dtype {dtype}, got {given.dtype}")
    if given.device != device:
        raise AttentionError(f"{name}: expected device {device} as q has, got {given.device}")
    if name.startswith("cu_seqlens") and given.shape and not given.shape[0]:
        raise AttentionError(f"{name}: expected where each sequence begins, and the end, got no number")
    want = ", ".join("any" if n is None else str(n) for n in shape)
    if len(given.shape) != len(shape) or any(n not in (None, m) for n, m in zip(shape, given.shape, strict=True)):
        raise AttentionError(f"{name}: expected shape ({want}), got {tuple(given.shape)}")
    if given.stride(-1) != 1 and given.shape[-1] > 1:
        raise AttentionError(f"{name}: expected a last stride of 1, got strides {given.stride()}")


def factors(name: str, given: Any, batch: int, heads_kv: int, device: Any) -> Any:
    """What an e4m3 cache is multiplied by as float32 (batch, heads_kv), of one number or as many; None stays None."""
    import torch

    if given is None:
        return None
    if not hasattr(given, "dtype") or given.dtype != torch.float32 or given.device != device:
        got = f"{given.dtype} on {given.device}" if hasattr(given, "dtype") else type(given).__name__
        raise AttentionError(f"{name}: expected a float32 tensor on {device}, got {got}")
    if given.numel() != 1 and tuple(given.shape) != (batch, heads_kv):
        raise AttentionError(
            f"{name}: expected one number or shape (batch, heads_kv) = ({batch}, {heads_kv}), got {tuple(given.shape)}"
        )
    return given.reshape(1, 1).expand(batch, heads_kv) if given.numel() == 1 else given


def check_page(size: int) -> None:
    """UnsupportedError unless there are kernels for pages of ``size`` tokens."""
    if size not in PAGES:
        raise UnsupportedError(f"k_cache: expected pages of {', '.join(map(str, PAGES))} tokens, got {size}")


def check_length(name: str, value: Any, most: int) -> int:
    """A whole number of 1 to ``most``; AttentionError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise AttentionError(f"{name}: expected a whole number of 1 to {most}, got {value!r}")
    return value


def check_softcap(value: Any) -> float:
    """The softcap as a float, 0 for none."""
    try:
        cap = float(value)
    except (TypeError, ValueError):
        raise AttentionError(f"softcap: expected a number, 0 for none, got {value!r}") from None
    if not 0.0 <= cap < 1e30:
        raise AttentionError(f"softcap: expected a number of at least 0, got {value!r}")
    return cap


def check_no_gradients(*tensors: Any) -> None:
    """UnsupportedError where autograd will ask for gradients."""
    import torch

    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise UnsupportedError(
            "q, k, v: expected tensors without gradients, got requires_grad: serving kernels have no backward pass; use "
            "torch.no_grad(), or tilecast.attention"
        )


# --- numbers on the device ----------------------------------------------------------------------------------------


def check_values(lists: tuple[Any, ...], k: Any, seqlen_q: int, seqlen_k: int, total_q: int | None) -> None:
    """AttentionError for numbers on the device that make no sense; waits for the device."""
    import torch

    if k.is_cuda and torch.cuda.is_current_stream_capturing():
        raise AttentionError(
            "check: expected False while a CUDA graph is captured, for numbers cannot be looked at there"
        )
    cu_q, cu_k, used, table, slots = lists[:5]
    if cu_q is not None:
        _check_starts("cu_seqlens_q", cu_q, total_q, seqlen_q, "max_seqlen_q")
    if cu_k is not None:
        _check_starts("cu_seqlens_k", cu_k, k.shape[0], seqlen_k, "max_seqlen_k")
    lengths = [] if used is None else used.tolist()
    name = "cache_seqlens" if cu_k is None else "seqused_k"
    room = [seqlen_k] * len(lengths) if cu_k is None else [min(n, seqlen_k) for n in cu_k.diff().tolist()]
    if used is not None:
        for number, (length, most) in enumerate(zip(lengths, room, strict=True)):
            if not 0 <= length <= most:
                raise AttentionError(f"{name}: expected 0 to {most} keys, got {length} for sequence {number}")
    for name, factor in (("k_descale", lists[6]), ("v_descale", lists[7])):
        if factor is not None and not bool((factor > 0).logical_and(factor.isfinite()).all()):
            raise AttentionError(
                f"{name}: expected finite numbers above 0, got {factor.min().item():g} to {factor.max().item():g}"
            )
    if slots is not None:
        for number, slot in enumerate(slots.tolist()):
            if not 0 <= slot < k.shape[0]:
                raise AttentionError(
                    f"cache_batch_idx: expected 0 to {k.shape[0] - 1}, got {slot} for sequence {number}"
                )
    if table is not None:
        for number, (length, pages) in enumerate(zip(lengths, table.tolist(), strict=True)):
            for place, page in enumerate(pages[: -(-length // k.shape[1])]):
                if not 0 <= page < k.shape[0]:
                    raise AttentionError(
                        f"block_table: expected pages 0 to {k.shape[0] - 1}, got {page} for sequence {number}, entry {place}"
                    )


def check_appended_values(k: Any, k_cache: Any, cu_new: Any, used: Any, table: Any, slots: Any, cos: Any, longest: int) -> None:  # fmt: skip
    """AttentionError for new keys that have no place, or no angle; waits for the device."""
    if cu_new is not None:
        _check_starts("cu_seqlens_k_new", cu_new, k.shape[0], k.shape[0], "total_new")
        counts = [last - first for first, last in itertools.pairwise(cu_new.tolist())]
    else:
        counts = [k.shape[1]] * used.shape[0]
    lengths = used.tolist()
    for number, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        if not 0 <= length <= longest - count:
            raise AttentionError(
                f"cache_seqlens: expected 0 to {longest - count} keys before {count} more, got {length} for sequence {number}"
            )
        if cos is not None and length + count > cos.shape[0]:
            raise AttentionError(
                f"rotary_cos: expected angles of {length + count} positions for sequence {number}, got {cos.shape[0]}"
            )
    owners: dict[int, int] = {}
    if table is not None:
        pages = [row[length // k_cache.shape[1] : -(-(length + count) // k_cache.shape[1])]
                 for row, length, count in zip(table.tolist(), lengths, counts, strict=True)]  # fmt: skip
    else:
        pages = [[slot] for slot in (range(len(lengths)) if slots is None else slots.tolist())]
    name = "cache_batch_idx" if table is None else "block_table"
    for number, written in enumerate(pages):
        for page in written:
            if not 0 <= page < k_cache.shape[0]:
                raise AttentionError(
                    f"{name}: expected 0 to {k_cache.shape[0] - 1} for new keys, got {page} for sequence {number}"
                )
            if owners.setdefault(page, number) != number:
                raise AttentionError(
                    f"{name}: expected places of their own for new keys, got {page} for sequences {owners[page]} and {number}"
                )


def _check_starts(name: str, starts: Any, total: int | None, longest: int, limit: str) -> None:
    """AttentionError unless ``starts`` rises from 0 to at most ``total`` in steps of at most ``longest``."""
    values = starts.tolist()
    if values[0] != 0:
        raise AttentionError(f"{name}: expected 0 first, got {values[0]}")
    for number, (first, last) in enumerate(itertools.pairwise(values)):
        if last < first:
            raise AttentionError(
                f"{name}: expected numbers that do not fall, got {first} and then {last} (sequence {number})"
            )
        if last - first > longest:
            raise AttentionError(
                f"{name}: expected at most {limit} = {longest} in a sequence, got {last - first} (sequence {number})"
            )
    if total is not None and values[-1] > total:
        raise AttentionError(f"{name}: expected at most the {total} rows there are, got {values[-1]}")
