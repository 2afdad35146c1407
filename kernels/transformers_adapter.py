"""Hugging Face transformers models on ``tilecast.attention``.

    >>> from tilecast.kernels.transformers_adapter import register
    >>> register()
    >>> model = AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16", attn_implementation="tilecast")

Written against transformers 5 (AttentionInterface and AttentionMaskInterface).  Masks are never materialised: causal and
sliding-window masks are facts of the call, padding is packed away, and whatever else needs a tensor (packing, chunks, custom
masks) is refused rather than computed wrongly.  Padding, soft caps and attention sinks run on the serving kernels: inference only.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from tilecast.kernels.errors import UnsupportedError

#: Arguments of other attention functions that change the result and that the kernels do not have.
_CHANGES_THE_RESULT = ("position_bias", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k")


def register(name: str = "tilecast", fallback: str | None = None, deterministic: bool = True) -> None:
    """Make ``attn_implementation=name`` mean tilecast's attention in every model of this process.

    ``fallback`` and ``deterministic`` are `tilecast.attention`'s: "sdpa" lets the same model run on a CPU or in float32, False lets
    gradients have other bits every run where that is faster.
    ImportError when transformers is missing or older than its attention interfaces.
    """
    try:
        transformers = importlib.import_module("transformers")
        functions, masks = transformers.AttentionInterface, transformers.AttentionMaskInterface
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"tilecast.kernels.transformers_adapter: expected transformers 5 or newer, got '{error}'; "
            "pip install 'transformers>=5'"
        ) from error
    functions.register(name, attention_function(fallback, deterministic))
    # Looked up here and not where a mask is asked for: torch.compile traces that, and no import.
    causal = getattr(importlib.import_module("transformers.masking_utils"), "causal_mask_function", None)
    masks.register(name, functools.partial(no_mask, plain_causal=causal))


def attention_function(fallback: str | None = None, deterministic: bool = True) -> Callable[..., tuple[Any, None]]:
    """An attention function as transformers calls it: (batch, heads, seqlen, head_dim) in, (batch, seqlen, heads, head_dim) out."""
    from tilecast.kernels.operator import attention

    def tilecast_attention(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, None]:
        static = is_lengths(attention_mask)
        _check(module, None if static else attention_mask, dropout, kwargs)
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        window = None
        if sliding_window is not None:
            if causal:
                # transformers counts the query's own key, (left, right) does not.
                window = (sliding_window - 1, 0)
            elif sliding_window < max(query.shape[2], key.shape[2]):
                raise UnsupportedError(_bidirectional_window(sliding_window))
        if static:
            from tilecast.kernels.engines.padded import attend_static

            if not causal or window is not None:
                raise UnsupportedError(
                    "static cache: expected causal attention without a window, got another; use a DynamicCache (the default)"
                )
            lengths = attention_mask.flatten()
            return attend_static(query, key, value, lengths, scaling, softcap or 0.0, s_aux), None
        if attention_mask is not None or softcap or s_aux is not None:
            from tilecast.kernels.engines.padded import attend

            return attend(query, key, value, attention_mask, causal, window, scaling, softcap or 0.0, s_aux), None
        out = attention(
            query,
            key,
            value,
            causal=causal,
            scale=scaling,
            window=window,
            fallback=fallback,
            deterministic=deterministic,
        )
        # No copy where the projections left heads innermost, as they do in most models: the output follows the query.
        return out.transpose(1, 2).contiguous(), None

    return tilecast_attention


def _check(module: Any, mask: Any, dropout: float, options: dict[str, Any]) -> None:
    """UnsupportedError for what a model asks for and the kernels do not have."""
    if mask is not None and mask.dim() != 2:
        raise UnsupportedError(
            f"attention_mask: expected None, got a tensor of shape {tuple(mask.shape)}; tilecast computes "
            "causal and sliding-window masks itself and takes no other but padding: use attn_implementation='sdpa' for those"
        )
    if dropout:
        raise UnsupportedError(f"dropout: expected 0, got {dropout}; set attention_dropout=0 or call model.eval()")
    if options.get("output_attentions"):
        raise UnsupportedError("output_attentions: expected False, the weights never exist; use 'eager' to see them")
    for argument in _CHANGES_THE_RESULT:
        if options.get(argument) is not None:
            raise UnsupportedError(
                f"{argument}: expected None, got {type(options[argument]).__name__}; "
                f"{type(module).__name__} needs another attn_implementation"
            )


def no_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: Any = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = False,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    plain_causal: Any = None,
    **more: Any,
) -> Any:
    """The mask of a forward pass as transformers asks for it: None, which keys are no padding (batch, kv_length), or with a static cache
    how many keys there are (`lengths_of`).

    UnsupportedError where that is not all there is to the mask.  ``attention_mask`` is the 2-D padding mask (batch, tokens so far), True for real tokens.  transformers sets one of the
    ``allow_..._skip`` flags exactly when nothing but causality, a window or padding is in ``mask_function``; ``plain_causal`` is its mask function of
    causal attention and nothing else.
    """
    reach = int(kv_offset) + kv_length
    if (
        mask_function is not None
        and mask_function is plain_causal
        and not (isinstance(q_offset, int) and q_offset + q_length == reach)
    ):
        # A static cache: how many of its keys are there is known on the device, and never asked for.
        if attention_mask is not None and not bool(attention_mask[:, :reach].all()):
            raise UnsupportedError(
                "attention_mask: expected no padding together with a static cache, got some; use a DynamicCache (the default)"
            )
        device = next((x.device for x in (q_offset, attention_mask) if hasattr(x, "device")), more.get("device"))
        return lengths_of(batch_size, q_offset + q_length, device)
    if not allow_is_causal_skip and not allow_is_bidirectional_skip:
        raise UnsupportedError(
            "attention mask: expected plain causal, sliding-window or full attention with a growing cache, got a mask that "
            "needs a tensor (packed sequences, a custom mask function, a compiled static cache); use 'sdpa', or under "
            "torch.compile, where packing cannot be ruled out, pass use_cache=True"
        )
    padding = None
    if attention_mask is not None:
        begin = int(kv_offset)
        real = attention_mask[:, begin : begin + kv_length].bool()
        padding = None if bool(real.all()) else real
    if allow_is_bidirectional_skip:
        if local_size is not None and kv_length > local_size:
            raise UnsupportedError(_bidirectional_window(local_size))
        return padding
    # The kernels put the last query on the last key; keys beyond it are the unused end of a static cache.
    if int(q_offset) + q_length != reach:
        raise UnsupportedError(
            f"cache: expected keys that end with the last query, got {reach} keys for queries that end at "
            f"{int(q_offset) + q_length}; use a DynamicCache (the default) instead of a static one"
        )
    if local_size is not None and local_size == getattr(config, "attention_chunk_size", None) and reach > local_size:
        raise UnsupportedError(
            f"attention mask: chunks of {local_size} are not supported beyond one chunk, got {reach}"
        )
    return padding


def lengths_of(batch: int, keys: Any, device: Any) -> Any:
    """The "mask" of a static cache whose first ``keys`` (a number, or a tensor of one) are there: int32 (batch, 1, 1, 1), for transformers
    passes tensors of four dimensions on as they are."""
    import torch

    return torch.as_tensor(keys, device=device).to(torch.int32).reshape(1, 1, 1, 1).expand(batch, 1, 1, 1).contiguous()


def is_lengths(mask: Any) -> bool:
    """Whether a mask is one of `lengths_of`."""
    import torch

    return mask is not None and mask.dtype == torch.int32 and mask.shape[1:] == (1, 1, 1)


def _bidirectional_window(size: int) -> str:
    return f"sliding_window: expected causal attention together with a window, got full attention with window {size}"
