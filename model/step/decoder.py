"""A whole step of a dense decoder: attention of every layer, and a floor for its matrix products.

A product takes at least its weights' bytes at the memory's bandwidth, or its FLOP at the rate of the matrix units, and a launch.
Norms, rotary embedding, activations, sampling and the engine's own time are left out, so a step takes at least what this says.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tilecast.model.chip.memory import memory_seconds
from tilecast.model.kernel.workload import DTYPES, Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.step.batch import Batch


@dataclass(frozen=True, slots=True)
class Decoder:
    """Sizes of a dense decoder with gated feed-forward layers."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    source: str

    def layer_products(self, heads: Workload) -> tuple[tuple[str, int, int], ...]:
        """(name, inputs, outputs) of the matrices of a layer."""
        qkv = heads.heads_q * heads.head_dim_qk + heads.heads_kv * (heads.head_dim_qk + heads.head_dim_v)
        return (
            ("Q, K and V", self.hidden, qkv),
            ("output", heads.heads_q * heads.head_dim_v, self.hidden),
            ("gate and up", self.hidden, 2 * self.intermediate),
            ("down", self.intermediate, self.hidden),
        )

    def weight_bytes(self, heads: Workload, dtype: str = "bf16") -> int:
        """Bytes of all matrices, the vocabulary's once."""
        layer = sum(inputs * outputs for _, inputs, outputs in self.layer_products(heads))
        return (self.layers * layer + self.hidden * self.vocabulary) * DTYPES[dtype]


@dataclass(frozen=True, slots=True)
class DecoderFloor:
    """What a step takes besides attention, at least."""

    decoder: Decoder
    #: Products of all layers, and that with the vocabulary, in seconds.
    layers_seconds: float
    vocabulary_seconds: float
    weight_bytes: int
    #: Bytes of the caches of all layers.
    cache_bytes: int

    @property
    def seconds(self) -> float:
        """Seconds of all products."""
        return self.layers_seconds + self.vocabulary_seconds


@lru_cache(maxsize=1)
def decoders() -> dict[str, Decoder]:
    """All decoders by the preset's name."""
    raw = tomllib.loads((Path(__file__).parent / "decoders.toml").read_text(encoding="utf-8"))
    return {name: Decoder(name, **sizes) for name, sizes in raw.items()}


def product_seconds(machine: Machine, tokens: int, inputs: int, outputs: int, dtype: str) -> float:
    """Seconds below which no product of ``tokens`` rows with a matrix can be: bytes or FLOP, and a launch."""
    read = memory_seconds(machine, inputs * outputs * DTYPES[dtype])
    rate = machine[f"tensor.{dtype}_flop_per_clk"] * machine["chip.sm_count"] * machine["chip.clock_max_mhz"] * 1e6
    multiply = 2.0 * tokens * inputs * outputs / (rate * machine["power.tensor_clock_share"])
    return max(read, multiply) + machine["launch.kernel_us"] * 1e-6


def decoder_floor(decoder: Decoder, batch: Batch, machine: Machine) -> DecoderFloor:
    """The products of a step: of each token in every layer, of each sequence's last token with the vocabulary."""
    heads = batch.heads
    layer = sum(
        product_seconds(machine, batch.queries, inputs, outputs, heads.dtype)
        for _, inputs, outputs in decoder.layer_products(heads)
    )
    last = product_seconds(machine, len(batch.lengths), decoder.hidden, decoder.vocabulary, heads.dtype)
    return DecoderFloor(
        decoder,
        decoder.layers * layer,
        last,
        decoder.weight_bytes(heads, heads.dtype),
        decoder.layers * batch.cache_bytes,
    )
