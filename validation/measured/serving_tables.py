"""Tables of measured serving steps, each in the words of the tool that made it: batches, the kernels that were timed, microseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilecast.base.csv_file import Row, check_whole, number_in, numbered_rows, whole_in
from tilecast.base.words import did_you_mean
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.kernel.knobs import family_named
from tilecast.model.kernel.variants.hopper.prefill import HopperPrefillVariant
from tilecast.model.kernel.variants.hopper.serving import HopperServingVariant
from tilecast.model.kernel.variants.serving import ServingVariant
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload, WorkloadError
from tilecast.model.machine.machine import Machine
from tilecast.model.serving import HOPPER_SERVING_E4M3, parse_serving
from tilecast.model.step.batch import MOST_KEYS, Batch, parse_requests
from tilecast.model.step.forecast import check_step, shipped_pair
from tilecast.model.step.launches.classes import StepVariant
from tilecast.model.step.launches.variant import launched

#: The row of the kernel that does nothing, and rows that a forecast is not for: a cache full of written data.
NOTHING, _READING = "nothing", "reading"
#: Keys of one sequence from which merging dominates: rows of a single such sequence were looked at to infer what merging costs.
_LOOKED_AT_KEYS = 32768
#: What knobs that a table does not name are, by family; the portable kernels' rows name those of the one that decodes.
_DECODE, _PREFILL = ServingVariant(), ServingVariant(tile_m=128, warps=8, programs=1)
_BASES: dict[str, tuple[StepVariant, StepVariant]] = {
    _DECODE.family: (_DECODE, _PREFILL),
    HopperServingVariant().family: (HopperServingVariant(), HopperPrefillVariant()),
}
#: Kernels of `h200_decode_e4m3_hopper.csv` that are forecast, with their knobs in brackets.
_E4M3 = "hopper_serve_d128_e4m3 ("
#: The kernel of `h100_decode_runs.csv` that is forecast.
_RUNS = "hopper_serve_d128_runs"


class ServingTableError(ValueError):
    """A table that cannot be compared: file, row, column, expected, got."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured step."""

    point: str
    batch: Batch
    variants: tuple[StepVariant, ...]
    us: float
    #: Whether a constant was inferred with the row in view.
    looked_at: bool = False
    #: Whether L2 was full of data that had been written.
    written: bool = False


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of table: the columns that tell it, and its rows as steps (None: the row is not forecast)."""

    columns: tuple[str, ...]
    step: Callable[[dict[str, str], Machine], Measured | None]


def read_table(table: Path) -> list[tuple[int, Row]]:
    """(line, row) of a table of a known kind; ServingTableError."""
    header, rows = numbered_rows(table, "the table", ServingTableError)
    if _kind(header) is None:
        missing = next(name for name in _STEPS.columns if name not in header)
        near = did_you_mean(missing, header)
        raise ServingTableError(f"{table.name}: row 1: expected a column '{missing}', got none{near}")
    if not rows:
        raise ServingTableError(f"{table.name}: expected at least one row, got none")
    check_whole(table, rows, ServingTableError)
    return rows


def steps(rows: list[tuple[int, Row]], machine: Machine, table: str) -> Iterator[Measured]:
    """The steps of a table that are forecast; ServingTableError names the row that makes no sense."""
    kind = _kind(list(rows[0][1]))
    assert kind is not None  # `read_table` has seen to that
    for number, row in rows:
        try:
            found = kind.step(row, machine)
        except (KeyError, TypeError, ValueError, WorkloadError, VariantError) as error:
            raise ServingTableError(f"{table}: row {number}: {error}") from None
        if found is not None:
            try:
                check_step(found.batch, machine, found.variants)
            except PredictError as error:
                raise ServingTableError(f"{table}: row {number}: {error}") from None
            yield found


def _kind(header: list[str]) -> _Kind | None:
    return next((kind for kind in _KINDS if all(name in header for name in kind.columns)), None)


def _whole(row: dict[str, str], *names: str) -> list[int]:
    return [whole_in(row, name) for name in names]


def _us(row: dict[str, str], name: str = "us") -> float:
    value = number_in(row, name)
    if not value > 0.0:
        raise WorkloadError(f"{name}: expected microseconds above 0, got '{row[name]}'")
    return value


def _heads(heads_q: int, heads_kv: int, head_dim: int, head_dim_v: int = 0) -> Workload:
    made = Workload(heads_q=heads_q, heads_kv=heads_kv, seqlen_q=1, head_dim_qk=head_dim, mask="causal")
    return replace(made, head_dim_v=head_dim_v or head_dim)


def _of_requests(row: dict[str, str], _machine: Machine) -> Measured | None:
    """`tools/time_batches.py`: batches in words, and the kernels that were timed, whatever ships by now."""
    family = family_named(row["decode"]) or _DECODE.family
    if row["point"] == NOTHING or row["evicted_by"] != _READING or family not in _BASES:
        return None
    heads_q, heads_kv, page = _whole(row, "heads_q", "heads_kv", "page")
    lengths = parse_requests(row["requests"])
    bases: Any = _BASES[family]
    # Rows that time one kernel have no sequence for the other.
    if "part_keys" not in row["prefill"]:  # a kernel from before keys were parted
        bases = tuple(
            replace(base, part_keys=MOST_KEYS) if isinstance(base, HopperPrefillVariant) else base for base in bases
        )
    pair = tuple(parse_serving(row[name], base) for name, base in zip(("decode", "prefill"), bases, strict=True))
    # What merging costs in the portable kernels was inferred from theirs.
    looked_at = family == _DECODE.family and len(lengths) == 1 and lengths[0][1] >= _LOOKED_AT_KEYS
    return Measured(row["point"], Batch(lengths, _heads(heads_q, heads_kv, 128), page), pair, _us(row), looked_at)


def _of_chunks(row: dict[str, str], machine: Machine) -> Measured | None:
    """`tools/h200_chunks.py`: few queries over many keys, of which those are forecast whose keys are parted."""
    dim, batch, heads_q, heads_kv, queries, keys = _whole(
        row, "head_dim", "batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k"
    )
    asked = Batch(((queries, keys),) * batch, _heads(heads_q, heads_kv, dim), 0)
    kernels = shipped_pair(asked, machine)
    dealt = [launched(variant, asked, int(machine["chip.sm_count"])) for variant in kernels]
    if not any(one.parting is not None and one.takes(queries * heads_q // heads_kv) for one in dealt):
        return None
    return Measured(f"parted, head_dim {dim}", asked, kernels, _us(row, "tilecast_us"), written=True)


def _of_e4m3(row: dict[str, str], machine: Machine) -> Measured | None:
    """Decoding from e4m3 caches by variants of the kernel for Hopper."""
    if not row["kernel"].startswith(_E4M3):
        return None
    batch, keys, heads_q, heads_kv, page, queries = _whole(
        row, "batch", "keys", "heads_q", "heads_kv", "page", "queries"
    )
    heads = _heads(heads_q, heads_kv, 128)
    # What the timed source had beside its knobs is said in words after them.
    knobs = ",".join(part for part in row["kernel"].removeprefix(_E4M3).rstrip(")").split(",") if "=" in part)
    variant = parse_serving(knobs, HOPPER_SERVING_E4M3.chosen(heads, machine))
    return Measured(
        f"e4m3, blocks of {variant.tile_n}",
        Batch(((queries, keys),) * batch, heads, page, cache="e4m3"),
        (variant,),
        _us(row),
        written=True,
    )


def _of_decodes(row: dict[str, str], machine: Machine) -> Measured | None:
    """Decoding of one query a sequence by the kernel in runs of splits as it ships, whatever L2 held having been read."""
    if row["kernel"] != _RUNS or row["evicted_by"] != _READING:
        return None
    batch, keys, heads_q, heads_kv, page = _whole(row, "batch", "keys", "heads_q", "heads_kv", "page")
    asked = Batch(((1, keys),) * batch, _heads(heads_q, heads_kv, 128), page)
    return Measured(f"decode, {heads_q}/{heads_kv}", asked, shipped_pair(asked, machine), _us(row))


def _of_drawn(row: dict[str, str], machine: Machine) -> Measured | None:
    """`tools/serving_drawn.py`: problems of all kinds, but for those of kernels that others replaced since."""
    if row.get("replaced") == "1":
        return None
    heads_q, heads_kv, dim, dim_v, page, window = _whole(
        row, "heads_q", "heads_kv", "head_dim", "head_dim_v", "page", "window"
    )
    heads = replace(_heads(heads_q, heads_kv, dim, dim_v), dtype="fp16" if row["dtype"] == "float16" else "bf16")
    if window >= 0:
        heads = replace(heads, mask="window", window=(window, 0))
    asked = Batch(parse_requests(row["requests"]), heads, page, capped=float(row["softcap"] or 0) > 0.0)
    return Measured(row["kind"], asked, shipped_pair(asked, machine), _us(row))


def _of_prefill(row: dict[str, str], machine: Machine) -> Measured | None:
    """`tools/sweep_prefill.py`: chunks of prompts beside decodes, and packed prompts, whole calls."""
    heads_q, heads_kv, dim, page = _whole(row, "heads_q", "heads_kv", "head_dim", "page")
    heads = replace(_heads(heads_q, heads_kv, dim), mask="causal" if row["causal"] == "True" else "none")
    asked = Batch(parse_requests(row["lengths"]), heads, page)
    return Measured(row["point"], asked, shipped_pair(asked, machine), _us(row, "tilecast_us"), written=True)


def _of_latent(row: dict[str, str], machine: Machine) -> Measured:
    """`tools/sweep_mla.py`: latent attention of one query a sequence, pages of 64."""
    batch, heads, keys = _whole(row, "batch", "heads", "keys")
    asked = Batch(((1, keys),) * batch, _heads(heads, 1, 576, 512), 64, latent=True)
    return Measured(f"latent, {heads} heads", asked, shipped_pair(asked, machine), _us(row), written=True)


_STEPS = _Kind(
    ("point", "requests", "heads_q", "heads_kv", "page", "decode", "prefill", "evicted_by", "us"), _of_requests
)
_KINDS = (
    _STEPS,
    _Kind(("head_dim", "batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "tilecast_us"), _of_chunks),
    _Kind(("batch", "keys", "heads_q", "heads_kv", "page", "queries", "kernel", "us"), _of_e4m3),
    _Kind(("evicted_by", "batch", "keys", "heads_q", "heads_kv", "page", "kernel", "us"), _of_decodes),
    _Kind(("batch", "heads", "keys", "us", "flashmla_us"), _of_latent),
    _Kind(("point", "lengths", "heads_q", "heads_kv", "head_dim", "page", "causal", "tilecast_us"), _of_prefill),
    _Kind(
        (
            "kind",
            "requests",
            "heads_q",
            "heads_kv",
            "head_dim",
            "head_dim_v",
            "page",
            "window",
            "softcap",
            "dtype",
            "us",
        ),
        _of_drawn,
    ),
)
