"""transformers' continuous batching (``generate_batch``) on tilecast's serving kernels.

    >>> from tilecast.kernels.engines.transformers_paged import NAME, register
    >>> register()
    >>> model = AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16", attn_implementation=NAME)
    >>> model.generate_batch(prompts, generation_config=config)

Continuous batching takes implementations of flash-attn's functions alone, and knows them by name or from the Hub.  `register` adds
`engines.flash` to those that it knows by name; batches of decodes then append to the paged cache in the call (block tables), others read it packed.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from tilecast.kernels.engines import flash

#: transformers reads from the name that it is flash-attn's interface, and that there are block tables as in version 2.
NAME = "tilecast_flash2"
#: What it becomes for continuous batching in those versions (5.17) that give paged attention functions of their own.
_PAGED = f"paged|{NAME}"


def register() -> None:
    """Make ``attn_implementation=NAME`` known in this process, as often as it is called.

    ImportError when transformers is missing or not one of those that this was written for (5.17 to 5.23).
    """
    try:
        transformers = importlib.import_module("transformers")
        functions, masks = transformers.AttentionInterface, transformers.AttentionMaskInterface
        utils: Any = importlib.import_module("transformers.modeling_flash_attention_utils")
        forward = importlib.import_module("transformers.integrations.flash_attention").flash_attention_forward
        mask = importlib.import_module("transformers.masking_utils").flash_attention_mask
        imports, pads = utils._lazy_imports, (utils._pad_input, utils._unpad_input)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"tilecast.kernels.engines.transformers_paged: expected transformers 5.17 to 5.23, got '{error}'; "
            "pip install 'transformers>=5.17'"
        ) from error
    functions.register(NAME, forward)
    masks.register(NAME, mask)
    if hasattr(utils, "lazy_import_paged_flash_attention"):
        functions.register(_PAGED, paged_attention)
        masks.register(_PAGED, mask)
    if getattr(imports, "of_tilecast", False):
        return

    # There is no public place to say where the functions of a name are: this is where transformers looks them up.
    def lazy_imports(implementation: str | None, *rest: Any, **more: Any) -> Any:
        if implementation in (NAME, _PAGED):
            return flash.flash_attn_func, flash.flash_attn_varlen_func, flash.flash_attn_with_kvcache, *pads
        return imports(implementation, *rest, **more)

    lazy_imports.of_tilecast = True  # type: ignore[attr-defined]
    utils._lazy_imports = lazy_imports


def paged_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, cache: Any = None, cu_seq_lens_q: Any = None,
    cu_seq_lens_k: Any = None, max_seqlen_q: int = 0, max_seqlen_k: Any = 0, block_table: Any = None, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Any = None, **kwargs: Any,
) -> tuple[Any, None]:  # fmt: skip
    """Attention of one layer in transformers 5.17, whose own function for it takes no heed of soft caps and of some models' windows.

    query, key, value: (1, heads, tokens, head_dim); lengths and block tables as transformers' ``PagedAttentionArgs`` has them.
    """
    options: dict[str, Any] = {"softmax_scale": scaling, "causal": True, "softcap": softcap or 0.0, "s_aux": s_aux}
    if sliding_window:
        options["window_size"] = (sliding_window - 1, 0)
    if isinstance(cu_seq_lens_k, dict):
        kind = "sliding_attention" if sliding_window else "full_attention"
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k[kind], max_seqlen_k[kind]
    if s_aux is not None:
        options["s_aux"] = s_aux.to(query.dtype)
    if block_table is None:
        key, value = cache.update(
            key_states=key, value_states=value, layer_idx=module.layer_idx, read_index=kwargs["read_index"],
            write_index=kwargs["write_index"],
        )  # fmt: skip
        starts_q, starts_k = (starts.to(torch.int32) for starts in (cu_seq_lens_q, cu_seq_lens_k))
        rows = query.transpose(1, 2).squeeze(0)
        return flash.flash_attn_varlen_func(
            rows, key, value, starts_q, starts_k, max_seqlen_q, max_seqlen_k, **options
        ), None
    group, place = cache.layer_index_to_group_indices[module.layer_idx]
    pages = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
    rows, key, value = (x.permute(2, 0, 1, 3) for x in (query, key, value))
    sequences = key.shape[0]
    used = (cu_seq_lens_k[1 : sequences + 1] - cu_seq_lens_k[:sequences] - 1).to(torch.int32)
    made = flash.flash_attn_with_kvcache(
        rows, cache.key_cache[place].view(pages), cache.value_cache[place].view(pages), key, value, cache_seqlens=used,
        block_table=block_table[group], **options,
    )  # fmt: skip
    return made.squeeze(1), None
