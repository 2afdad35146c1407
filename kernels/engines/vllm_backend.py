"""tilecast's serving kernels as an attention backend of vLLM (0.30 to 0.33): decode, chunked prefill and both in one call.

Importing this module imports vLLM; `vllm_plugin` names it to vLLM without doing so.  Queries are packed, keys and values lie in
pages of 16 to 256 tokens, K and V of a token side by side in the last dimension, as vLLM lays them out; nothing is planned ahead
and no number is read back from the GPU, so that CUDA graphs of decode batches replay with any lengths up to the model's.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tilecast.kernels import registry
from tilecast.kernels.errors import UnsupportedError
from tilecast.kernels.selection import DTYPE_NAMES
from tilecast.kernels.serving.calls import attention_kvcache
from tilecast.kernels.serving.checks import PAGES

_vllm: Any = importlib.import_module("vllm.v1.attention.backend")
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class TilecastMetadata(_vllm.AttentionMetadata):  # type: ignore[misc]
    """What a forward pass needs to know of a batch: lists stay on the device."""

    num_actual_tokens: int
    max_query_len: int
    #: No sequence is longer, now or in any replay of a graph that is captured with this.
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool


class TilecastMetadataBuilder(_vllm.AttentionMetadataBuilder):  # type: ignore[misc]
    """From vLLM's metadata of a batch to ours: the same tensors."""

    _cudagraph_support = _vllm.AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._longest = int(vllm_config.model_config.max_model_len)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> TilecastMetadata:
        """Metadata of a batch; `common_prefix_len` and ``fast_build`` make no difference."""
        return self._made(common_attn_metadata, int(common_attn_metadata.max_seq_len))

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> TilecastMetadata:
        """Metadata that a graph keeps: its launches must be right for sequences as long as the model allows."""
        return self._made(common_attn_metadata, max(self._longest, int(common_attn_metadata.max_seq_len)))

    @staticmethod
    def _made(given: Any, longest: int) -> TilecastMetadata:
        if not isinstance(given.causal, bool):
            raise UnsupportedError(
                "causal: expected True or False for the whole batch, got a tensor; use another attention backend"
            )
        return TilecastMetadata(
            num_actual_tokens=given.num_actual_tokens, max_query_len=given.max_query_len, max_seq_len=longest,
            query_start_loc=given.query_start_loc, seq_lens=given.seq_lens, block_table=given.block_table_tensor,
            slot_mapping=given.slot_mapping, causal=given.causal,
        )  # fmt: skip


class TilecastBackend(_vllm.AttentionBackend):  # type: ignore[misc]
    """What vLLM asks before it chooses."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """The name of its place in vLLM's registry, by which layers look it up again."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TilecastImpl]:
        """The class of a layer's attention."""
        return TilecastImpl

    @staticmethod
    def get_builder_cls() -> type[TilecastMetadataBuilder]:
        """The class that makes metadata."""
        return TilecastMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Tokens of a page; larger blocks of the engine are made of several."""
        return list(PAGES)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Head dimensions that kernels take, of whatever GPU (`supports_combination`)."""
        alike = [entry for entry in registry.shipped_serving() if entry.head_dim_qk == entry.head_dim_v]
        fewer = (range(entry.head_dim_min, entry.head_dim_qk, 8) for entry in alike if entry.head_dim_min)
        return sorted({entry.head_dim_qk for entry in alike}.union(*fewer))

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Ampere and newer."""
        return bool(capability.major >= 8)

    @classmethod
    def supports_sink(cls) -> bool:
        """A logit of each head that every row counts."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Windows of causal attention."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """A sequence gets the same bits in every batch."""
        return True

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: Any, kv_cache_dtype: Any, block_size: int | None, use_mla: bool, has_sink: bool,
        use_sparse: bool, use_mm_prefix: bool, device_capability: Any,
    ) -> str | None:  # fmt: skip
        """Why not; None where nothing speaks against it."""
        if kv_cache_dtype in _DTYPES and _DTYPES[kv_cache_dtype] != dtype:
            return f"kv_cache_dtype {kv_cache_dtype} beside queries of {dtype}"
        here = device_capability.major, device_capability.minor
        kernels = tuple(entry for entry in registry.shipped_serving() if not entry.cache)
        # Dtypes and GPUs that it takes nothing of have a reason of their own.
        if (
            dtype in DTYPE_NAMES
            and here[0] >= 8
            and not registry.candidates(here, DTYPE_NAMES[dtype], head_size, head_size, "window", kernels)
        ):
            return f"head size {head_size} on a GPU of compute capability {here[0]}.{here[1]}"
        return None


class TilecastImpl(_vllm.AttentionImpl):  # type: ignore[misc]
    """Attention of one layer."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = _vllm.AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None, sinks: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        if alibi_slopes is not None:
            raise UnsupportedError("alibi_slopes: expected None, got slopes; use another attention backend")
        if attn_type != _vllm.AttentionType.DECODER:
            raise UnsupportedError(
                f"attn_type: expected decoder attention, got {attn_type}; use another attention backend"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        # vLLM counts the query's own key, (left, right) does not.
        self.window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.softcap = logits_soft_cap or 0.0
        self.sinks = sinks

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: TilecastMetadata | None, output: torch.Tensor, output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Write attention of the batch's tokens into ``output`` (tokens, heads, head size), from the cache alone.

        query: (tokens, heads, head size).  kv_cache: (blocks, key/value heads, block size, 2 * head size) of any strides.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError(
                "output_scale: expected None, got a scale: outputs are not quantised; use another attention backend"
            )
        if attn_metadata is None:
            return output.fill_(0)  # a profiling run
        m, tokens = attn_metadata, attn_metadata.num_actual_tokens
        k_cache, v_cache = self.caches(kv_cache)
        sinks = self.sinks
        if sinks is not None and sinks.dtype not in (query.dtype, torch.float32):
            sinks = sinks.float()
        room = m.block_table.shape[1] * k_cache.shape[1]
        made: Any = attention_kvcache(
            query[:tokens], k_cache, v_cache, m.seq_lens, m.block_table, cu_seqlens_q=m.query_start_loc,
            max_seqlen_q=m.max_query_len, max_seqlen_k=min(m.max_seq_len, room), causal=m.causal,
            window=None if self.window == (-1, -1) else self.window, scale=self.scale, softcap=self.softcap, sinks=sinks,
        )  # fmt: skip
        output[:tokens].view(made.shape).copy_(made)
        return output

    def caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, each (blocks, block size, key/value heads, head size): views of vLLM's tensor."""
        k_cache, v_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return k_cache, v_cache

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write the step's keys and values to their slots of the cache, by vLLM's own kernel."""
        cache = importlib.import_module("vllm.v1.attention.ops.triton_reshape_and_cache_flash")
        k_cache, v_cache = self.caches(kv_cache)
        cache.triton_reshape_and_cache_flash(
            key, value, k_cache, v_cache, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale
        )
