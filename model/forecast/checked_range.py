"""What the model has been held against, how far off it was there, what lies outside, and what its kernels leave out.

Errors come from a table that `validation.accuracy` writes.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import lru_cache

from tilecast.base.data import MODEL_ERROR
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload, WorkloadError
from tilecast.model.machine.machine import Machine

#: Levels of a forecast: made from the variant alone, and from the kernel's own instructions.
BEFORE, COMPILED = "before compilation", "from machine code"
#: What the table calls a forecast from the instructions of a loop at hand.
AT_HAND = "from loops at hand"
_HEAD_DIMS = (64, 256)
_LENGTHS = (512, 131072)
#: Most queries and most rows (queries of all heads that share a key head), and fewest keys, that `tilecast.attention` gives to the
#: kernels for serving (kernels/serving/few_rows.py, which imports nothing of the model; a test holds both to the same numbers).
FEW_QUERIES, FEW_ROWS, FEW_KEYS = 16, 128, 512
#: Queries below which a kernel made for decoding would split the keys over SMs or pack the heads of a group into a tile.
_DECODE_QUERIES = 64


def outside_checked_range(workload: Workload, machine: Machine) -> tuple[str, ...]:
    """Why the workload lies outside what the model has been held against (empty: inside)."""
    fp8 = machine.tensor_kind == "mma_sync" and workload.dtype == "fp8"
    return outside(workload, machine, _LENGTHS, "fp8 through mma.sync (no published attention rows)" if fp8 else "")


def outside(workload: Workload, machine: Machine, lengths: tuple[int, int], path: str) -> tuple[str, ...]:
    """Why a pass checked at ``lengths`` lies outside; ``path`` says what of its way through the machine was not checked, if any."""
    reasons = []
    low, high = _HEAD_DIMS
    dims = (workload.head_dim_qk, workload.head_dim_v)
    if not (low <= min(dims) and max(dims) <= high):
        reasons.append(f"head_dim {'/'.join(str(d) for d in dict.fromkeys(dims))} (checked: {low} to {high})")
    low, high = lengths
    shortest, longest = sorted((workload.seqlen_q, workload.seqlen_k))
    if shortest < low or longest > high:
        reasons.append(f"seqlen {shortest if shortest < low else longest} (checked: {low} to {high})")
    if path:
        reasons.append(path)
    if any(fact.kind == "what-if" for fact in machine.facts.values()):
        reasons.append("a machine changed by what-if")
    return tuple(reasons)


@dataclass(frozen=True, slots=True)
class FewRows:
    """The forecast of the kernel for serving, and the command that says more of it."""

    seconds: float
    command: str


def few_rows(workload: Workload, machine: Machine, clock: str | float = "sustained") -> FewRows | None:
    """The problem on the kernel for serving; None where `tilecast.attention` would not take that one, or none is modelled."""
    rows = workload.seqlen_q * workload.group_size
    if workload.seqlen_q > FEW_QUERIES or rows > FEW_ROWS or not max(FEW_KEYS, workload.seqlen_q) <= workload.seqlen_k:
        return None
    # Problems of more queries need none of what forecasts a serving step.
    from tilecast.model.step.batch import Batch
    from tilecast.model.step.forecast import forecast_step

    # One query at the end of the keys sees all of them: the mask that serving kernels have by default.
    mask = "causal" if workload.seqlen_q == 1 and workload.mask == "none" else workload.mask
    heads = replace(workload, batch=1, seqlen_q=1, seqlen_k=1, mask=mask)
    try:
        batch = Batch(((workload.seqlen_q, workload.seqlen_k),) * workload.batch, heads, page=0)
        found = forecast_step(batch, machine, clock=clock)
    except (PredictError, VariantError, WorkloadError):
        return None
    return FewRows(found.seconds, _command(workload, machine))


def decode_note(workload: Workload, machine: Machine, clock: str | float, seconds: float) -> tuple[str, ...]:
    """What a kernel made for so few queries does, and how long it takes beside ``seconds`` of one that is not; empty for more queries."""
    if workload.seqlen_q >= _DECODE_QUERIES:
        return ()
    queries = f"{workload.seqlen_q} quer{'y' if workload.seqlen_q == 1 else 'ies'} a head"
    group = " and packs the query heads of a group into one tile" if workload.group_size > 1 else ""
    splits = f"a decode kernel splits the keys over SMs{group}"
    found = few_rows(workload, machine, clock)
    if found is None:
        return (
            f"{queries}: {splits}; none of these kernel classes does, so expect it to be faster where keys are many",
        )
    own, above = f"{found.seconds * 1e3:.4g} ms by its forecast", f"{seconds * 1e3:.4g} ms above"
    # Where only the portable kernels serve few queries they may take longer than a kernel of the machine's own would.
    instead = f"instead of the {above}" if found.seconds < seconds else f"and not the kernel of the {above}"
    return (f"{queries}: {splits}. tilecast.attention launches one here: {own} {instead} ({found.command})",)


def _command(workload: Workload, machine: Machine) -> str:
    """The line of `tilecast step` that forecasts it."""
    queries = f"{workload.seqlen_q}:" if workload.seqlen_q > 1 else ""
    dims = f" --head-dim {workload.head_dim_qk}" + (
        f" --head-dim-v {workload.head_dim_v}" if workload.head_dim_v != workload.head_dim_qk else ""
    )
    window = f" --window {workload.window[0]},{workload.window[1]}" if workload.window else ""
    return (
        f"tilecast step {machine.name} --requests {workload.batch}x{queries}{workload.seqlen_k} --heads {workload.heads_q} "
        f"--heads-kv {workload.heads_kv}{dims}{window} --dtype {workload.dtype} --page 0"
    )


@dataclass(frozen=True, slots=True)
class ModelError:
    """Relative errors of time forecasts on ``rows`` kernels; shares, not percent.  ``rows`` is 0 where none was checked."""

    rows: int
    mean: float
    p90: float
    #: Mean signed error of the forecast TFLOP/s: positive where forecasts were too fast.
    bias: float
    #: Which kernels, and the level where it is not before compilation: "published kernels on gb200, 16 bit".
    where: str

    def sentence(self) -> str:
        """For people."""
        if not self.rows:
            return f"model error unknown: {self.where}"
        return f"model error {self.mean:.0%} mean, {self.p90:.0%} p90, {self.bias:+z.0%} bias over {self.rows} {self.where}"


def model_error(workload: Workload, machine: Machine, level: str = BEFORE) -> ModelError:
    """Error of the nearest region that has rows: this GPU and dtype, its kind of tensor core and dtype, or that kind alone.

    ``level`` is `BEFORE`, `COMPILED` for a kernel's own machine code, or `AT_HAND` for that of a loop at hand.
    """
    dtype = "fp8" if workload.dtype == "fp8" else "16 bit"
    regions = [r for r in _regions() if r["level"] == level]
    rungs = (
        [r for r in regions if r["machine"] == machine.name and r["dtype"] == dtype],
        [r for r in regions if r["machine"] == f"any {machine.tensor_kind}" and r["dtype"] == dtype],
        [r for r in regions if r["machine"] == f"any {machine.tensor_kind}" and r["dtype"] == "any"],
    )
    for rung in rungs:
        if rung:
            found = max(rung, key=lambda r: int(r["rows"]))
            mean, p90, bias = (float(found[name]) / 100 for name in ("mean_percent", "p90_percent", "bias_percent"))
            dtype_text = "" if found["dtype"] == "any" else f", {found['dtype']}"
            stated = "" if level == BEFORE else f" {level}"
            where = f"{found['kernels']}{stated} on {found['machine']}{dtype_text}"
            return ModelError(int(found["rows"]), mean, p90, bias, where)
    if level != BEFORE:
        return ModelError(
            0,
            0.0,
            0.0,
            0.0,
            f"no kernel of ours was followed and measured on a GPU with {machine.name}'s kind of tensor core",
        )
    return ModelError(0, 0.0, 0.0, 0.0, f"no kernel was checked on a GPU with {machine.name}'s kind of tensor core")


@lru_cache(maxsize=1)
def _regions() -> tuple[dict[str, str], ...]:
    if not MODEL_ERROR.is_file():
        return ()
    with MODEL_ERROR.open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))
