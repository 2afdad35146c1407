"""The knobs of a GEMM kernel, and its variants as text."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tilecast.base.words import nearest
from tilecast.model.kernel.knobs import check_value, parse_knobs, value_like
from tilecast.model.kernel.verdict import VariantError

FAMILY_NAMES = ("gemm_hopper", "gemm_blackwell", "gemm_triton")
_CHOICES: dict[str, tuple[int, ...]] = {
    "tile_m": (1, 16, 64, 128, 192, 256), "tile_n": (4, 32, 64, 96, 128, 160, 192, 256, 320), "tile_k": (16, 32, 64, 128, 512), "accumulators": (1, 2),
    "c_parts": (1, 2, 3, 4, 5, 6, 8, 10), "joined": (0, 1), "early": (0, 1), "cta_group": (1, 2), "warps": (4, 8),
}  # fmt: skip
_RANGES = {"stages": (1, 16), "c_stages": (1, 16), "group_m": (0, 1024), "in_step": (0, 1024), "parts": (1, 32)}


@dataclass(frozen=True, slots=True)
class GemmVariant:
    """One GEMM kernel.

    The tile is what one accumulator holds.  With two ``accumulators`` the next tile multiplies while this one's epilogue runs:
    on Hopper two consumer warpgroups take turns with a tile each (ping-pong; with one they work on halves of a tile), on
    Blackwell tensor memory holds two.  ``c_stages`` are slots of shared memory into which C is copied ahead and from which D
    goes out; each holds one of ``c_parts`` ranges of columns of a tile.  ``group_m`` rows of tiles (0: all) are walked column by
    column, so that B stays in L2.  With ``in_step`` the programs meet every so many k-steps of a tile, its first the first (0:
    never): each waits for the others, but not for long, so that they ask L2 for the same lines together.  ``parts`` programs share the k
    of a tile, and a second launch adds up the sums that they leave and C.  With ``joined`` Hopper's two warpgroups that work on halves of
    a tile are one role of eight warps, so that both run, and fetch, the same code.  Where they are ``early`` Hopper's first copies are ordered before
    the roles start (kernels measured before 2026-11-28 order them in the warps that copy).
    """

    family: str = "gemm_hopper"
    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 64
    stages: int = 4
    accumulators: int = 2
    c_stages: int = 2
    c_parts: int = 1
    group_m: int = 8
    #: CTAs that multiply one tile together (tcgen05); the tile is of one CTA.
    cta_group: int = 1
    #: Warps of a CTA of the portable kernel.
    warps: int = 8
    in_step: int = 0
    parts: int = 1
    joined: int = 0
    early: int = 1


def check_family(name: str) -> None:
    """VariantError unless ``name`` is a GEMM family."""
    if name not in FAMILY_NAMES:
        raise VariantError(f"--variant: unknown GEMM family '{name}'{nearest(name, FAMILY_NAMES)}")


def parse_gemm_variant(text: str, base: GemmVariant) -> GemmVariant:
    """``base`` with the knobs that ``text`` names; VariantError with the nearest names for what is unknown."""

    def same_family(name: str) -> None:
        check_family(name)
        if name != base.family:
            raise VariantError(f"--variant: family {name} does not run here: use family {base.family}")

    return parse_knobs(text, base, same_family, _value)


def _value(key: str, text: str, current: object) -> object:
    value = value_like(key, text, current)
    check_value(key, text, value, _CHOICES.get(key), _RANGES.get(key))
    return value


def gemm_variant_text(variant: GemmVariant) -> str:
    """The variant as --variant takes it: family first, then every knob, of those that came late what is not as it mostly is, and
    of Hopper's always ``early``: older texts are of kernels that are not."""
    late = {"parts": 1, "joined": 0} | ({} if variant.family == "gemm_hopper" else {"early": variant.early})
    told = [f for f in fields(variant) if getattr(variant, f.name) != late.get(f.name)]
    return ",".join(f"{f.name}={getattr(variant, f.name)}" for f in told)
