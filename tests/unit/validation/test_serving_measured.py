"""The forecast of serving steps against the measured table: the gate, and tables that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.paths import ROOT

from tilecast.model.kernel.workload import Workload
from tilecast.model.step.batch import Batch
from tilecast.model.step.forecast import forecast_step
from tilecast.model.step.render import VALIDATED_AGAINST, as_dict, as_text
from tilecast.validation.measured.serving import _MACHINES, TABLE, ServingTableError, run_serving
from tilecast.validation.measured.serving_tables import read_table


@pytest.fixture(scope="module")
def report():
    return run_serving()


def test_steps_are_within_the_gate(report) -> None:
    """2026-11-28: mean 3.3 %, worst 17.8 % of 87 rows (8 queries of four heads a sequence); the aim is 8 %."""
    assert report.everything().count == report.held_out().count == 87
    assert report.everything().mean < 0.04
    assert report.everything().worst < 0.19
    assert all(summary.mean < 0.08 for summary in report.by_point().values())


#: Tables that the page shows, whose numbers are computed again where its commands are run: rows, largest mean and worst error.
SHOWN = {
    "h200_serving.csv": (87, 0.055, 0.15),
    # Measured with L2 full of written data.
    # Of prefill's kernels before 2026-11-28, when one warp took tiles and copied: 4.3 % with the loops of then, of which parted ones at 64
    # columns took a third longer than today's.
    "h200_chunks.csv": (16, 0.085, 0.23),
    "h200_decode_e4m3_hopper.csv": (40, 0.065, 0.16),
    # Of the latent kernel before 2026-11-28, which took up to three fifths as long again for few rows; 13.9 % until 2026-11-29, when
    # the clock of a launch became that of its length at that clock (h200_mla.csv, of what ships: 6.5 and then 6.8 %).
    "h100_mla.csv": (18, 0.16, 0.39),
    # Whole calls of the kernels that ship, on 2026-11-28.
    "h200_prefill.csv": (20, 0.045, 0.14),
    # Of the decode kernel before 2026-11-28, which took 1 to 6 % longer where both were timed, as the drawn tables' decodes are.
    "h100_decode_runs.csv": (33, 0.02, 0.06),
    # Problems drawn by a rule, in view when rules were looked for; prefill's kernels have changed as well.
    "h200_serving_drawn.csv": (35, 0.085, 0.30),
    "h200_serving_drawn_2.csv": (10, 0.08, 0.16),
    # Seen by nobody before it was measured.
    "h200_serving_drawn_4.csv": (23, 0.06, 0.19),
}


@pytest.mark.parametrize("name", SHOWN)
def test_other_tables_are_within_their_gates(name: str) -> None:
    """2026-11-28: 5.3, 4.3, 6.0, 11.7, 4.2, 1.8, 8.6, 9.1 and 7.7 % mean; in the morning the fourth was 7.3, the last four 2.3, 9.2, 9.8 and 10.6."""
    page = (ROOT / "docs" / "serving-step.md").read_text(encoding="utf-8")
    table = page.partition(f"{name} on {name[:4]}-sxm: ")[2]
    rows, mean, _, _, worst, _ = next(line.split()[1:] for line in table.splitlines() if line.startswith("all "))
    shares = [float(text.rstrip("%")) / 100 for text in (mean, worst)]
    assert int(rows) == SHOWN[name][0] and all(a <= b for a, b in zip(shares, SHOWN[name][1:], strict=True))


def test_the_chosen_split_is_near_the_fastest(report) -> None:
    assert len(report.splits) == 7
    assert max(choice.regret for choice in report.splits) < 0.02
    assert min(choice.tau for choice in report.splits) > 0.9


def test_what_events_add_is_small(report) -> None:
    assert 0.0 < report.added_us < 3.0


def test_rows_that_make_no_sense_are_named(tmp_path: Path) -> None:
    for table, old, new, words in (
        (
            "h200_mla.csv",
            "1,128,65536,",
            "1,many,65536,",
            "row 2: heads: expected a whole number, got 'many'",
        ),
        (
            "h200_chunks.csv",
            "128,32768,119.3",
            "128,32768,-1",
            "row 2: tilecast_us: expected microseconds above 0, got '-1'",
        ),
        (
            "h200_decode_e4m3_hopper.csv",
            "kv_stages=3,",
            "kv_stages=x,",
            "row 5: --variant: knob 'kv_stages' takes a whole number",
        ),
    ):
        (tmp_path / table).write_text(TABLE.with_name(table).read_text().replace(old, new, 1))
        with pytest.raises(ServingTableError, match=f"{table}: {words}"):
            run_serving(tmp_path / table)


def test_machines_without_the_kernels_are_refused() -> None:
    with pytest.raises(
        ServingTableError, match=r"h200_mla.csv: row 2: latent caches are forecast on H100 and H200 only"
    ):
        run_serving(TABLE.with_name("h200_mla.csv"), "b200")


def test_tables_that_cannot_be_read(tmp_path: Path) -> None:
    lines = TABLE.read_text().splitlines()
    for name, content, words in (
        ("empty.csv", "", "row 1: expected a column 'point'"),
        ("none.csv", lines[0] + "\n", "expected at least one row"),
        (
            "gpu.csv",
            lines[0] + "\n" + lines[1].replace("NVIDIA H200", "Abacus"),
            "no machine is known for GPU 'Abacus'",
        ),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(ServingTableError, match=words):
            run_serving(tmp_path / name)


def test_a_step_says_which_tables_of_its_machine_it_was_held_against() -> None:
    held = {
        _MACHINES[read_table(path)[0][1]["gpu"]]
        for path in (TABLE, *(ROOT / "data" / "measured" / name for name in SHOWN))
    }
    assert held == set(VALIDATED_AGAINST)
    for machine, (_, command) in VALIDATED_AGAINST.items():
        table = command.removeprefix("tilecast validate serving").strip()
        path = ROOT / table if table else TABLE
        assert _MACHINES[read_table(path)[0][1]["gpu"]] == machine
        assert path in (TABLE, *(ROOT / "data" / "measured" / name for name in SHOWN))
    batch = Batch(((1, 1024),), Workload(1, 32, 8, 1))
    for machine in ("h200-sxm", "h100-sxm"):
        assert as_dict(forecast_step(batch, machine))["notes"] == [
            f"validated against {' ('.join(VALIDATED_AGAINST[machine])})"
        ]
    assert "no step was measured on b200" in as_text(forecast_step(batch, "b200"))
