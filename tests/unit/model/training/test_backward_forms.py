"""Closed forms of the backward pass: the paper's numbers, and for Hopper those of the loops that are simulated."""

from __future__ import annotations

import json

import pytest

from tilecast.cli import main
from tilecast.model.backward import build_backward
from tilecast.model.kernel.variants.fa3_backward import Fa3BackwardVariant
from tilecast.model.kernel.variants.fa3_backward_apart import Fa3BackwardApartVariant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.training.closed_forms import (
    apart_traffic,
    backward_demand_dict,
    backward_demand_report,
    five_product_traffic,
)
from tilecast.model.training.evaluate import evaluate_backward

H200 = load_machine("h200")


def cycles(found: dict, kernel: str) -> dict[str, float]:  # type: ignore[type-arg]
    return {row["name"]: row["cycles"] for row in found["kernels"][kernel]["forms"]}


def test_the_papers_numbers_come_out() -> None:
    """FA4 paper, head_dim 128, 128 x 128: matrix unit 2560, shared memory 3328 for one CTA and 2688 for each of a pair."""
    found = backward_demand_dict(load_machine("b200"), Workload())
    one, pair = cycles(found, "one_cta"), cycles(found, "cta_pair")
    assert (one["T_MMA"], one["T_SMEM"], one["T_EXP"]) == (2560, 3328, 1024)
    assert (pair["T_MMA"], pair["T_SMEM"], pair["smem dS exchange"]) == (2560, 2688, 384)
    # Five products of depth d take as long as the exponentials where 10 d / 8192 is 1 / 16.
    assert found["kernels"]["one_cta"]["break_even"][
        "head_dim at which exponentials equal matrix work"
    ] == pytest.approx(51.2)


@pytest.mark.parametrize(("dim", "port"), [(64, 2816 + 256), (128, 2944)])
def test_hoppers_port_is_the_fact_sheets(dim: int, port: float) -> None:
    """The port model's table for FlashAttention's tiles: d64 128x128 2560 and 2816 cycles, d128 64x128 2560 and 2944, without
    LSE and D; at head_dim 64 ours takes 64 queries at a time, so that K and V are read once more."""
    found = cycles(backward_demand_dict(H200, Workload(head_dim_qk=dim)), "five_products")
    assert found["T_MMA"] == 2560 and found["T_SMEM"] - found["smem row terms"] == port


@pytest.mark.parametrize(("dim", "dim_v"), [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256)])
def test_forms_are_the_demand_of_the_loops(dim: int, dim_v: int) -> None:
    work = Workload(head_dim_qk=dim, head_dim_v=dim_v)
    found = backward_demand_dict(H200, work)
    if dim <= 128:
        loops = {"five_products": build_backward(work, Fa3BackwardVariant(tile_m=128 if dim == 64 else 64, folded="none"), H200).loops[0].pipeline}  # fmt: skip
    else:
        keys, queries = build_backward(work, Fa3BackwardApartVariant(), H200).loops
        loops = {"keys": keys.pipeline, "queries": queries.pipeline}
    for kernel, pipeline in loops.items():
        forms, demand = cycles(found, kernel), pipeline.demand()
        m, n = found["kernels"][kernel]["tile"]
        assert {m, n} == {pipeline.rows_per_cta, pipeline.keys_per_iteration}
        assert (demand["tensor"], demand["mufu"]) == pytest.approx((forms["T_MMA"], forms["T_EXP"]))
        assert demand["smem"] == pytest.approx(forms["T_SMEM"])


@pytest.mark.parametrize(
    ("variant", "traffic", "dim"),
    [(Fa3BackwardVariant(folded="none"), five_product_traffic, 128), (Fa3BackwardApartVariant(), apart_traffic, 256)],
)
def test_bytes_are_those_of_the_launches(variant, traffic, dim: int) -> None:  # type: ignore[no-untyped-def]
    # Heads enough to be in L2 one after the other; counters of whose turn it is are not in the forms.
    # And key heads enough that no program takes a part of their query heads.
    work = Workload(1, 64, 32, 1024, head_dim_qk=dim)
    run = evaluate_backward(work, H200, variant, 1500.0)
    assert run.hbm_bytes == pytest.approx(traffic(work).total, rel=2e-2)


def test_the_verb_prints_its_tables_and_takes_tiles(capsys: pytest.CaptureFixture[str]) -> None:
    def out(*words: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(["demand", *words])
        text = capsys.readouterr()
        assert not end.value.code, text.err
        return text.out

    assert "One kernel, five products, 64 x 128" in out("h200", "--pass", "bwd")
    found = json.loads(out("h200", "--pass", "bwd", "--tile-m", "128", "--json"))
    assert found["kernels"]["five_products"]["tile"] == [128, 128] and found["pass"] == "bwd"
    assert cycles(found, "five_products")["T_MMA"] == 5120
    # mma.sync has neither the port's forms nor a kernel of five products.
    portable = backward_demand_dict(load_machine("a100"), Workload())
    assert set(portable["kernels"]) == {"keys", "queries"} and "five_products" not in portable["hbm_bytes"]
    assert "T_SMEM" not in backward_demand_report(load_machine("a100"), Workload(), portable)
