"""What people show in a notebook: a short repr, and tables that hold the numbers of the value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest

import tilecast
from tilecast import Workload

W = Workload(mask="causal", seqlen_q=1024, seqlen_k=1024)
GEMM = tilecast.Gemm(1024, 1024, 256)
#: (what makes the answer, the numbers that its first or only table must show)
ANSWERS: dict[str, tuple[Callable[[], Any], Callable[[Any], list[str]]]] = {
    "forward": (lambda: tilecast.predict(W, "h200-sxm"), lambda p: [f"{p.time_ms:.4g}", f"{p.clock_mhz:.0f}"]),
    "backward": (
        lambda: tilecast.predict_backward(W, "h200-sxm"),
        lambda p: [f"{p.time_ms:.4g}", f"{p.clock_mhz:.0f}", *(f"{one.seconds * 1e3:.4g}" for one in p.run.launches)],
    ),
    "training": (
        lambda: tilecast.predict_training(W, "h200-sxm"),
        lambda p: [f"{p.time_ms:.4g} ms", f"{p.forward.time_ms:.4g}", f"{p.backward.time_ms:.4g}"],
    ),
    "gemm": (lambda: tilecast.forecast_gemm(GEMM, "h200-sxm"), lambda p: [f"{p.time_ms:.4g}", f"{p.run.clock.mhz:.0f}"]),
    "schedule": (
        lambda: tilecast.schedule_kernel(W, "h200-sxm", time_limit_s=0.1),
        lambda k: [str(k.free.ii_cycles), str(k.own.ii_cycles)],
    ),
    "what if": (lambda: tilecast.what_if(W, "h200-sxm", {"chip.tdp_w": 800}), lambda w: [f"{w.after.time_ms:.4g}"]),
    "map": (
        lambda: tilecast.asymmetry_map(W, "h200-sxm", grid=3, shown=()),
        lambda m: [f"{x:.4g}" for x in (*m.x, *m.y)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_a_notebook_shows_tables_with_the_numbers_and_a_short_repr(name: str) -> None:
    make, numbers = ANSWERS[name]
    answer = make()
    assert len(repr(answer)) < 250
    page = ElementTree.fromstring(f"<div>{answer._repr_html_()}</div>")
    cells = [cell.text or "" for tag in ("th", "td", "p") for cell in page.iter(tag)]
    for number in numbers(answer):
        assert any(number in cell for cell in cells), number


def test_the_map_stands_as_it_is_drawn() -> None:
    found = tilecast.asymmetry_map(W, "h200-sxm", grid=3, shown=())
    rows = list(ElementTree.fromstring(found._repr_html_()).iter("tr"))
    assert [row[0].text for row in rows[1:]] == [f"{y:.4g}" for y in reversed(found.y)]
    assert (rows[1][3].text or "").split(" ", 1)[1] == found.bound_by[2][2]
    assert (rows[3][1].text or "").split(" ", 1)[1] == found.bound_by[0][0]
