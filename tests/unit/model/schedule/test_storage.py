"""What a search calls the best kernel is one that `tilecast schedule` finds to fit the machine."""

from __future__ import annotations

import pytest

from tilecast.model.chip.evaluate import PredictError
from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine, machine_names
from tilecast.model.schedule.solve import storage_limits, storage_of
from tilecast.model.training.forecast import predict_backward

SHAPES = [
    Workload(batch=2, seqlen_q=4096, head_dim_qk=dim, mask=mask) for dim in (64, 96, 128, 256) for mask in ("none", "causal")
]  # fmt: skip


@pytest.mark.parametrize("name", machine_names())
@pytest.mark.parametrize("passes", ["fwd", "bwd"])
def test_the_best_kernel_fits_its_machine(name: str, passes: str) -> None:
    machine = load_machine(name)
    over = []
    for work in SHAPES:
        try:
            answer = (predict if passes == "fwd" else predict_backward)(work, machine, clock=1000.0, interval=False)
        except PredictError:
            continue
        for kernel in answer.kernels:
            limits = storage_limits(kernel.pipeline, storage_of(machine))
            over += [f"{work.label()}: {kernel.name}: {limit.sentence()}" for limit in limits if not limit.holds]
    assert over == []
