"""How far forecasts were off where they could be checked: read from a table that `validation.accuracy` writes."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import lru_cache

from tilecast.base.data import MODEL_ERROR
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine


@dataclass(frozen=True, slots=True)
class ModelError:
    """Relative errors of time forecasts on ``rows`` kernels; shares, not percent.  ``rows`` is 0 where none was checked."""

    rows: int
    mean: float
    p90: float
    #: Mean signed error of the forecast TFLOP/s: positive where forecasts were too fast.
    bias: float
    #: Which kernels: "published kernels on gb200, 16 bit".
    where: str

    def sentence(self) -> str:
        """For people."""
        if not self.rows:
            return f"model error unknown: {self.where}"
        return (
            f"model error {self.mean:.0%} mean, {self.p90:.0%} p90, {self.bias:+.0%} bias over {self.rows} {self.where}"
        )


def model_error(workload: Workload, machine: Machine) -> ModelError:
    """Error of the nearest region that has rows: this GPU and dtype, its kind of tensor core and dtype, or that kind alone."""
    dtype = "fp8" if workload.dtype == "fp8" else "16 bit"
    regions = _regions()
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
            where = f"{found['kernels']} on {found['machine']}{dtype_text}"
            return ModelError(int(found["rows"]), mean, p90, bias, where)
    return ModelError(0, 0.0, 0.0, 0.0, f"no kernel was checked on a GPU with {machine.name}'s kind of tensor core")


@lru_cache(maxsize=1)
def _regions() -> tuple[dict[str, str], ...]:
    if not MODEL_ERROR.is_file():
        return ()
    with MODEL_ERROR.open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))
