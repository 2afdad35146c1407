"""What `kernels/engines/vllm_backend.py` relies on of vLLM 0.30 to 0.33, as modules that stand in where vLLM is not installed.

Names and signatures only.  Where vLLM is installed the same tests run on the real ones and hold them against this.
"""

from __future__ import annotations

import enum
import types
from dataclasses import dataclass
from typing import Any

MODULES = ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backend", "vllm.v1.attention.backends",
           "vllm.v1.attention.backends.registry", "vllm.v1.attention.ops",
           "vllm.v1.attention.ops.triton_reshape_and_cache_flash")  # fmt: skip


class AttentionType(enum.StrEnum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionMetadata:
    pass


@dataclass
class CommonAttentionMetadata:
    query_start_loc: Any
    query_start_loc_cpu: Any
    seq_lens: Any
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Any
    slot_mapping: Any
    causal: Any = True


class AttentionBackend:
    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in cls.get_supported_head_sizes()

    @classmethod
    def supports_dtype(cls, dtype: Any) -> bool:
        return dtype in cls.supported_dtypes

    @classmethod
    def supports_combination(
        cls,
        head_size,
        dtype,
        kv_cache_dtype,
        block_size,
        use_mla,
        has_sink,
        use_sparse,
        use_mm_prefix,
        device_capability,
    ):
        return None

    @classmethod
    def validate_configuration(
        cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix,
        use_per_head_quant_scales, device_capability, attn_type, has_sliding_window=False, use_non_causal=False,
        use_batch_invariant=False,
    ):  # fmt: skip
        """Shorter than vLLM's: what our answers decide."""
        problems = {
            "head_size not supported": not cls.supports_head_size(head_size),
            "dtype not supported": not cls.supports_dtype(dtype),
            "kv_cache_dtype not supported": kv_cache_dtype not in cls.supported_kv_cache_dtypes,
            "block_size not supported": all(block_size % size for size in cls.get_supported_kernel_block_sizes()),
            "compute capability not supported": not cls.supports_compute_capability(device_capability),
            "MLA not supported": use_mla,
            "non-causal attention not supported": use_non_causal,
        }
        found = [name for name, wrong in problems.items() if wrong]
        reason = cls.supports_combination(
            head_size,
            dtype,
            kv_cache_dtype,
            block_size,
            use_mla,
            has_sink,
            use_sparse,
            use_mm_prefix,
            device_capability,
        )
        return [*found, *([reason] if reason else [])]


class AttentionMetadataBuilder:
    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = (
            kv_cache_spec,
            layer_names,
            vllm_config,
            device,
        )

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
        return cls._cudagraph_support

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        raise NotImplementedError

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(0, common_attn_metadata)


class AttentionImpl:
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto",
        logits_soft_cap=None, attn_type=AttentionType.DECODER, kv_sharing_target_layer_name=None,
    ):  # fmt: skip
        raise NotImplementedError

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ):
        raise NotImplementedError


def stand_ins() -> dict[str, types.ModuleType]:
    """Modules by name."""
    made = {name: types.ModuleType(name) for name in MODULES}
    for name, module in made.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, module)
    backend = made["vllm.v1.attention.backend"]
    for thing in (AttentionType, AttentionCGSupport, AttentionMetadata, CommonAttentionMetadata, AttentionBackend,
                  AttentionMetadataBuilder, AttentionImpl):  # fmt: skip
        setattr(backend, thing.__name__, thing)
    registered: dict[str, str] = {}

    class AttentionBackendEnum(enum.Enum):
        CUSTOM = None

        def get_path(self) -> str:
            if self.name not in registered:
                raise ValueError(f"Backend {self.name} must be registered before use")
            return registered[self.name]

    def register_backend(backend: AttentionBackendEnum, class_path: str) -> None:
        registered[backend.name] = class_path

    registry = made["vllm.v1.attention.backends.registry"]
    registry.AttentionBackendEnum, registry.register_backend = AttentionBackendEnum, register_backend  # type: ignore[attr-defined]
    registry.registered = registered  # type: ignore[attr-defined]
    return made
