"""tilecast's serving kernels as an attention backend of sglang (0.5.15 to 0.5.23): decode, extend with and without a prefix, both mixed.

Importing this module imports sglang; `sglang_plugin` names it to sglang without doing so.  Block tables are made on the device from
sglang's map of tokens, inside the graph where one is captured, so that a replay follows the batch of its time; nothing is read back.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from tilecast.kernels.errors import UnsupportedError
from tilecast.kernels.serving.calls import attention_kvcache
from tilecast.kernels.serving.checks import PAGES

_sglang: Any = importlib.import_module("sglang.srt.layers.attention.base_attn_backend")
_E4M3 = torch.float8_e4m3fn


@dataclass
class TilecastForward:
    """What the layers of a forward pass need to know of its batch: lists stay on the device."""

    #: Keys of each sequence, those of this pass included: int32 (batch,).
    seq_lens: torch.Tensor
    #: Pages of each sequence, int32 (batch, pages of the longest).
    block_table: torch.Tensor
    #: Where the queries of each sequence begin, None where each has one.
    query_start_loc: torch.Tensor | None
    max_query_len: int | None
    #: No sequence is longer, now or in any replay of a graph that is captured with this.
    max_seq_len: int


class TilecastAttnBackend(_sglang.AttentionBackend):  # type: ignore[misc]
    """Attention of all layers of a runner."""

    #: Lengths on the host only make scratch memory smaller.
    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        refuse_runner(model_runner)
        self.page_size = int(model_runner.page_size)
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.kv_cache_dtype = model_runner.kv_cache_dtype
        self._longest = self._most = int(model_runner.model_config.context_len)
        self.forward_metadata: TilecastForward | None = None

    # --- once a pass ------------------------------------------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing: what a captured pass needs is made inside its graph."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Keys of the rows that fill up a captured batch."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """How long sequences may be: as the model allows in a graph, as they are where the host knows."""
        known = None if in_capture else forward_batch.seq_lens_cpu
        self._longest = self._most if known is None or not len(known) else max(1, min(int(known.max()), self._most))

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Lists of the batch, by operations that a graph records; UnsupportedError for speculative and diffusion passes."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.forward_metadata = None
            return
        if forward_batch.spec_info is not None or not (mode.is_decode() or mode.is_extend()) or mode.is_dllm_extend():
            raise UnsupportedError(
                f"forward_mode: expected decode or extend without speculation, got {mode}; use another attention backend"
            )
        starts, longest_q = None, None
        if not mode.is_decode():
            starts = torch.nn.functional.pad(forward_batch.extend_seq_lens.cumsum(0), (1, 0)).to(torch.int32)
            longest_q = max(1, *map(int, forward_batch.extend_seq_lens_cpu))
        # A page's tokens lie side by side: every page_size-th says which page it is.
        first = self.req_to_token[:, : -(-self._longest // self.page_size) * self.page_size : self.page_size]
        table = torch.div(first[forward_batch.req_pool_indices], self.page_size, rounding_mode="floor").to(torch.int32)
        self.forward_metadata = TilecastForward(
            forward_batch.seq_lens.to(torch.int32), table, starts, longest_q, min(self._longest, table.shape[1] * self.page_size)
        )  # fmt: skip

    # --- once a layer -----------------------------------------------------------------------------------------------

    def forward_decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """(tokens, heads * head_dim_v) of one query a sequence, whose key and value go to the cache first."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """The same of the last queries of each sequence, packed; rows of no sequence are left as they are."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: Any, forward_batch: Any, save: bool,
        more: dict[str, Any],
    ) -> torch.Tensor:  # fmt: skip
        refuse_layer(layer, more)
        if save and k is not None and v is not None:
            # sglang's pool writes, and divides by the scales where it holds bytes.
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v, layer.k_scale, layer.v_scale)
        batch = self.forward_metadata
        assert batch is not None, "init_forward_metadata comes first"
        k_cache, v_cache = (
            x.view(-1, self.page_size, *x.shape[1:])
            for x in (self.token_to_kv_pool.get_key_buffer(layer.layer_id), self.token_to_kv_pool.get_value_buffer(layer.layer_id))
        )  # fmt: skip
        rows = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        sinks = more.get("sinks")
        if sinks is not None and sinks.dtype not in (q.dtype, torch.float32):
            sinks = sinks.float()
        # sglang's windows count the keys before the query's own, as ours do.
        window = (
            None
            if layer.sliding_window_size is None or layer.sliding_window_size < 0
            else (layer.sliding_window_size, 0)
        )
        narrow = k_cache.dtype == _E4M3
        made: Any = attention_kvcache(
            rows if batch.query_start_loc is not None else rows[:, None], k_cache, v_cache, batch.seq_lens, batch.block_table,
            cu_seqlens_q=batch.query_start_loc, max_seqlen_q=batch.max_query_len, max_seqlen_k=batch.max_seq_len, causal=True,
            window=window, scale=float(layer.scaling), softcap=float(layer.logit_cap or 0.0), sinks=sinks,
            k_descale=_factor(layer.k_scale, narrow), v_descale=_factor(layer.v_scale, narrow),
        )  # fmt: skip
        return made.view(rows.shape[0], -1)


def _factor(scale: Any, narrow: bool) -> torch.Tensor | None:
    """What a cache of bytes is multiplied by, as one float32 number; None for none."""
    if scale is None or not narrow:
        return None
    one: torch.Tensor = scale.reshape(1).float()
    return one


def refuse_runner(runner: Any) -> None:
    """UnsupportedError for models and caches that the backend does not serve."""
    if runner.page_size not in PAGES:
        raise UnsupportedError(
            f"page_size: expected {', '.join(map(str, PAGES))} tokens, got {runner.page_size}; start with --page-size 64"
        )
    if runner.use_mla_backend:
        raise UnsupportedError("model: expected attention with keys and values, got latent attention (MLA); use another attention backend")  # fmt: skip
    if runner.model_config.is_encoder_decoder or getattr(runner, "attention_chunk_size", None) is not None:
        raise UnsupportedError("model: expected a decoder without attention chunks, got another; use another attention backend")  # fmt: skip
    if runner.kv_cache_dtype not in (torch.float16, torch.bfloat16, _E4M3):
        raise UnsupportedError(
            f"kv_cache_dtype: expected bfloat16, float16 or float8_e4m3fn, got {runner.kv_cache_dtype}; start with --kv-cache-dtype auto"
        )
    if hasattr(runner.token_to_kv_pool, "translate_loc_from_full_to_swa"):
        raise UnsupportedError(
            "token_to_kv_pool: expected one pool for all layers, got one apart for sliding windows; start with --disable-hybrid-swa-memory"
        )
    if getattr(getattr(runner, "kv_index_translator", None), "is_translating", False):
        raise UnsupportedError("token_to_kv_pool: expected places as allocated, got a unified pool; start without --enable-unified-memory")  # fmt: skip


def refuse_layer(layer: Any, more: dict[str, Any]) -> None:
    """UnsupportedError for what a layer asks beyond the kernels."""
    kind = getattr(layer.attn_type, "value", layer.attn_type)
    if kind != "decoder" or layer.is_cross_attention:
        raise UnsupportedError(f"attn_type: expected decoder attention, got {'cross attention' if layer.is_cross_attention else kind}; use another attention backend")  # fmt: skip
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise UnsupportedError(f"logit_capping_method: expected tanh, got {layer.logit_capping_method}; use another attention backend")  # fmt: skip
    if layer.xai_temperature_len > 0:
        raise UnsupportedError("xai_temperature_len: expected none, got a temperature; use another attention backend")
    for name, value in more.items():
        if name != "sinks" and value is not None and value is not False:
            raise UnsupportedError(f"{name}: expected None, got {type(value).__name__}; use another attention backend")
