"""Hooks for `@triton.autotune`: forecasts instead of timing every configuration of a user's own attention kernel.

    @triton.autotune(configs=[...], key=["seqlen_q", "seqlen_k"], prune_configs_by=tilecast.prune_configs_by())
    @triton.jit
    def attention(Q, K, V, Out, ..., BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ...): ...

Configurations that cannot run are dropped before they are compiled, the others ranked by forecast, and only ``top_k`` timed.
The hooks need neither triton nor torch themselves: Triton calls them with its own objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tilecast.base.words import nearest
from tilecast.model.chip.evaluate import evaluate_seconds, refuse_unknown
from tilecast.model.families import legality
from tilecast.model.kernel.variants.fa2 import Fa2Variant
from tilecast.model.kernel.workload import Workload, WorkloadError
from tilecast.model.machine.machine import Machine, load_machine

#: Tensors of the kernel, (batch, heads, seqlen, head_dim); their shapes give the workload.
TENSORS = {"q": "Q", "k": "K", "v": "V"}
#: What the workload and the tile are read from, by the names of the kernel's arguments and meta-parameters.
ARGUMENTS = {"block_m": "BLOCK_M", "block_n": "BLOCK_N", "causal": "IS_CAUSAL"}
_OPTIONAL = (
    "batch",
    "heads_q",
    "heads_kv",
    "seqlen_q",
    "seqlen_k",
    "head_dim",
    "head_dim_v",
    "causal",
    "window",
    "scheduler",
)
#: Warps of a CTA that the model of the `triton` family knows.
_WARPS = (4, 8)
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}


class AutotuneError(ValueError):
    """A mapping that does not fit the kernel: which name, what was expected, what there is; one sentence."""


@dataclass(frozen=True, slots=True)
class _Mapping:
    """Which argument of the kernel says what."""

    names: tuple[tuple[str, str], ...]
    fixed: tuple[tuple[str, object], ...]
    given: Workload | None

    def workload(self, arguments: Mapping[str, Any]) -> Workload:
        if self.given is not None:
            return self.given
        return _workload(dict(self.names), dict(self.fixed), arguments)

    def variant(self, arguments: Mapping[str, Any], workload: Workload) -> Fa2Variant:
        names = dict(self.names)
        scheduler = dict(self.fixed).get("scheduler", "longest-first" if workload.mask != "none" else "grid")
        return Fa2Variant(
            tile_m=int(_need(arguments, names["block_m"])),
            tile_n=int(_need(arguments, names["block_n"])),
            warps=int(arguments.get("num_warps", 4)),
            kv_stages=int(arguments.get("num_stages", 3)),
            scheduler=str(scheduler),
        )


def prune_configs_by(
    machine: Machine | str | None = None,
    *,
    top_k: int | float = 5,
    workload: Workload | None = None,
    names: Mapping[str, str] | None = None,
    **fixed: object,
) -> dict[str, Any]:
    """The value of `triton.autotune`'s ``prune_configs_by`` for an attention forward kernel.

    ``machine``: a name, a file or None for the GPU at hand.  ``top_k``: configurations left to time (a share up to 1.0 as a
    float, as Triton takes it).  ``names`` renames what the mapping reads: keys q, k, v (tensors), block_m, block_n, causal,
    batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v; values are the kernel's own argument names.  ``fixed``
    gives values instead of names, e.g. ``causal=True``, ``scheduler="grid"``; ``workload`` gives them all.
    Raises AutotuneError for a key that is not one of these.
    """
    known = (*TENSORS, *ARGUMENTS, *_OPTIONAL)
    for key in (*(names or {}), *fixed):
        if key not in known:
            raise AutotuneError(f"prune_configs_by: unknown name '{key}'{nearest(key, tuple(dict.fromkeys(known)))}")
    if (
        not isinstance(top_k, int | float)
        or isinstance(top_k, bool)
        or top_k <= 0
        or (isinstance(top_k, float) and top_k > 1)
    ):
        raise AutotuneError(f"prune_configs_by: top_k takes a whole number or a share up to 1.0, got {top_k!r}")
    merged = {**TENSORS, **ARGUMENTS, **(names or {})}
    mapping = _Mapping(tuple(merged.items()), tuple(fixed.items()), workload)
    chip: Callable[[], Machine] = lru_cache(maxsize=1)(lambda: _machine(machine))

    def early_config_prune(configs: list[Any], named_args: Mapping[str, Any], **kwargs: Any) -> list[Any]:
        """Configurations that can run; the first as it is where none can, so that the kernel's own error shows."""
        legal = []
        for config in configs:
            arguments = {**named_args, **kwargs, **config.all_kwargs()}
            work = mapping.workload(arguments)
            if _runs(mapping.variant(arguments, work), work, chip()):
                legal.append(config)
        return legal or configs[:1]

    def perf_model(**arguments: Any) -> float:
        """Forecast seconds of one configuration; infinite for numbers of warps that the model does not know."""
        work = mapping.workload(arguments)
        refuse_unknown(work, chip())
        variant = mapping.variant(arguments, work)
        return float(evaluate_seconds(work, chip(), variant)) if variant.warps in _WARPS else float("inf")

    return {"early_config_prune": early_config_prune, "perf_model": perf_model, "top_k": top_k}


def _machine(machine: Machine | str | None) -> Machine:
    if isinstance(machine, str):
        return load_machine(machine)
    if machine is not None:
        return machine
    from tilecast.validation.lab.measure.detect import machine_here

    return machine_here("prune_configs_by without a machine")


def _runs(variant: Fa2Variant, workload: Workload, machine: Machine) -> bool:
    """Whether the tile makes sense for Triton and fits shared memory and registers."""
    tiles = (variant.tile_m, variant.tile_n)
    # tl.dot takes 16 or more in every direction, warps split rows in sixteens, and warpgroups are four warps.
    if any(t < 16 or t & (t - 1) for t in tiles) or variant.warps not in (1, 2, 4, 8, 16):
        return False
    return variant.tile_m >= 16 * variant.warps and legality(variant, workload, machine).legal


def _workload(names: dict[str, str], fixed: dict[str, object], arguments: Mapping[str, Any]) -> Workload:
    """The workload of a call: shapes of the tensors, unless a name or a fixed value says otherwise."""
    shapes = {part: tuple(getattr(arguments.get(names[part]), "shape", ())) for part in ("q", "k", "v")}
    layout = {"batch": ("q", 0), "heads_q": ("q", 1), "heads_kv": ("k", 1), "seqlen_q": ("q", 2), "seqlen_k": ("k", 2),
              "head_dim": ("q", 3), "head_dim_v": ("v", 3)}  # fmt: skip
    found: dict[str, int] = {}
    for what, (part, axis) in layout.items():
        if what in fixed:
            found[what] = int(fixed[what])  # type: ignore[call-overload]
        elif what in names:
            found[what] = int(_need(arguments, names[what]))
        elif len(shapes[part]) == 4:
            found[what] = int(shapes[part][axis])
        else:
            raise AutotuneError(
                f"prune_configs_by: {what} is not known: the kernel has no (batch, heads, seqlen, head_dim) tensor "
                f"'{names[part]}': say names={{'{what}': <argument>}} or {what}=<number>; "
                f"arguments: {', '.join(sorted(arguments))}"
            )
    window = fixed.get("window")
    mask = "window" if window is not None else "causal" if _causal(names, fixed, arguments) else "none"
    tensor = arguments.get(names["q"])
    dtype = _DTYPES.get(str(getattr(tensor, "dtype", "bfloat16")).rpartition(".")[2])
    if dtype is None:
        raise AutotuneError(
            f"prune_configs_by: '{names['q']}' is {getattr(tensor, 'dtype', None)}: forecasts know {', '.join(_DTYPES)}"
        )
    try:
        return Workload(
            found["batch"], found["heads_q"], found["heads_kv"], found["seqlen_q"], found["seqlen_k"], found["head_dim"],
            found["head_dim_v"], mask, window, dtype,  # type: ignore[arg-type]
        )  # fmt: skip
    except WorkloadError as error:
        raise AutotuneError(f"prune_configs_by: the arguments make no workload: {error}") from None


def _causal(names: dict[str, str], fixed: dict[str, object], arguments: Mapping[str, Any]) -> bool:
    if "causal" in fixed:
        return bool(fixed["causal"])
    # The mapping's default name may be missing; a name the user gave may not.
    if names["causal"] in arguments or names["causal"] != ARGUMENTS["causal"]:
        return bool(_need(arguments, names["causal"]))
    return False


def _need(arguments: Mapping[str, Any], name: str) -> Any:
    if name not in arguments:
        raise AutotuneError(
            f"prune_configs_by: the kernel has no argument or meta-parameter '{name}'{nearest(name, tuple(sorted(arguments)))}; "
            "say which one it is with names={...}"
        )
    return arguments[name]
