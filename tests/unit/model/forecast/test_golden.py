"""Whole texts a user reads, compared with committed files (`make golden` rewrites them; read the diff)."""

from __future__ import annotations

from tilecast.model.closed_forms import demand_report
from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.drawing import draw_sm
from tilecast.model.machine.machine import load_machine


def test_forecast_of_an_h200(golden) -> None:
    work = Workload(
        batch=2, heads_q=32, heads_kv=8, seqlen_q=8192, seqlen_k=8192, head_dim_qk=64, head_dim_v=64, mask="causal"
    )
    golden("predict-h200-d64.txt", predict(work, "h200-sxm").text() + "\n")


def test_forecast_of_a_pair_in_fp8(golden) -> None:
    work = Workload(
        heads_q=128, heads_kv=128, seqlen_q=4096, seqlen_k=4096, head_dim_qk=192, head_dim_v=128, dtype="fp8"
    )
    golden("predict-gb300-mla-fp8.txt", predict(work, "gb300").text() + "\n")


def test_drawing_of_a_b300(golden) -> None:
    golden("machine-b300.txt", "\n".join(draw_sm(load_machine("b300"))) + "\n")


def test_demand_of_a_b200(golden) -> None:
    golden("demand-b200.txt", demand_report(load_machine("b200"), Workload()) + "\n")
