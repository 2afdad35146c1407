"""Problems that tools draw by a rule: the same from a seed, of every kind, within limits, and tensors that lie as a problem says."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import replace
from typing import Any

import pytest
from support.paths import ROOT

DRAWING = ("serving_drawn", "training_drawn", "gemm_drawn")


@pytest.fixture
def tool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    pytest.importorskip("torch")
    return importlib.import_module(request.param)


@pytest.mark.parametrize("tool", DRAWING, indirect=True)
def test_a_seed_gives_the_same_problems_of_every_kind_and_more_of_them_begin_alike(tool: Any) -> None:
    problems = tool.drawn(3, 150)
    assert len(problems) == 150 and problems[:20] == tool.drawn(3, 20) and problems[0] != tool.drawn(4, 1)[0]
    assert {p.kind for p in problems} == set(tool.KINDS)
    assert max(p.flop for p in problems) <= tool.MOST_FLOP


@pytest.mark.parametrize("tool", ["measuring"], indirect=True)
def test_shares_have_each_problem_once_under_its_number(tool: Any) -> None:
    problems = list("abcdefg")
    shares = [tool.share_of(problems, f"{i}/3") for i in range(3)]
    assert sorted(itertools.chain(*shares)) == list(enumerate(problems))
    assert tool.share_of(problems, "1/2", "6,0,3") == [(3, "d")]


@pytest.mark.parametrize("tool", ["training_drawn"], indirect=True)
def test_attention_has_tensors_of_its_shapes_that_lie_as_users_have_them(tool: Any) -> None:
    torch = pytest.importorskip("torch")
    problem = replace(tool.drawn(1, 1)[0], heads=(4, 2), dims=(24, 16), batch=3, queries=5, keys=5, window=(-1, -1))
    lie: dict[str, Any] = {}
    for layout in dict.fromkeys(tool.LAYOUTS):
        q, k, v, dout = tool.tensors(replace(problem, layout=layout), "cpu")
        assert (q.shape, k.shape, v.shape, dout.shape) == ((3, 4, 5, 24), (3, 2, 5, 24), (3, 2, 5, 16), (3, 4, 5, 16))
        assert q.dtype == getattr(torch, problem.dtype)
        lie[layout] = (q.stride(), k.stride())
    assert len(set(lie.values())) == len(lie)
    assert lie["fused"][0] == (5 * (4 * 24 + 2 * 40), 24, 4 * 24 + 2 * 40, 1) and lie["shared keys"][1][0] == 0
    assert lie["odd"][0][2] % 8 and not lie["wide"][0][2] % 8
    apart = tool.tensors(replace(problem, layout="fused", keys=9), "cpu")
    assert apart[0].shape[2] == 5 and apart[1].shape[2] == 9 and apart[1].stride(2) == 2 * 40


@pytest.mark.parametrize("tool", ["training_drawn"], indirect=True)
def test_attention_draws_masks_whose_peers_are_those_that_compute_them(tool: Any) -> None:
    pytest.importorskip("torch")
    problem = replace(tool.drawn(1, 1)[0], queries=64, keys=64, causal=True, window=(-1, -1))
    assert problem.limits == ("causal", -1, 0) and set(tool.peers(problem, None)) == {"cudnn", "flash"}
    assert set(tool.peers(replace(problem, keys=100), None)) == {"flash"}  # SDPA's diagonal would begin top left
    assert set(tool.peers(replace(problem, queries=1, keys=100), len)) == {"cudnn", "flash", "fa3"}
    assert replace(problem, window=(16, 0)).limits == ("window", 16, 0)
    assert replace(problem, window=(64, 64), causal=False).limits == ("none", -1, -1)
    whole = 2 * 4.0 * 64 * 64 * (8 + 8)
    assert replace(problem, causal=False, batch=1, heads=(4, 4), dims=(8, 8)).flop == pytest.approx(3.5 * whole)


@pytest.mark.parametrize("tool", ["gemm_drawn"], indirect=True)
def test_products_have_matrices_of_their_shapes_that_lie_as_said(tool: Any) -> None:
    torch = pytest.importorskip("torch")
    lie = {name: tool.matrix(6, 10, name, torch.float16, "cpu") for name in {*tool.LAYOUTS, *tool.C_LAYOUTS}}
    for name, x in lie.items():
        assert x.expand(6, 10).shape == (6, 10), name
    assert {name: x.stride() for name, x in lie.items()} == {
        "rows": (10, 1), "columns": (1, 6), "slice": (74, 1), "odd": (11, 1), "row": (1,), "column": (1, 1), "number": (1,),
    }  # fmt: skip
    for problem in tool.drawn(2, 300):
        assert 16 <= problem.k <= 8192 and 1 <= problem.m <= 16384 and 1 <= problem.n <= 16384
        assert problem.place != "in place" or problem.c not in ("row", "column", "number")


@pytest.mark.parametrize("tool", ["gemm_drawn"], indirect=True)
def test_results_in_place_are_compared_from_the_same_c(tool: Any) -> None:
    torch = pytest.importorskip("torch")
    kept = torch.ones(2, 2)
    c = kept.clone()
    assert tool.difference(lambda: c.add_(1), lambda: c.add_(1), c, kept) == 0.0
    assert tool.difference(lambda: c.add_(3), lambda: c.add_(1), c, kept) == 1.0
