"""What the generator calls writable can be compiled, run and trusted: a random sample of it, each kernel in a worker.

``pytest tests/gpu/test_writable_gpu.py --writable-seed 7 --writable-samples 200`` draws other and more kernels.
"""

from __future__ import annotations

import os

import pytest
from support.paths import ROOT
from support.writable import request as request_of
from support.writable import sample

from tilecast.base.pool import cores
from tilecast.validation.lab.measure.detect import machine_here
from tilecast.validation.lab.worker.process import Worker, WorkerError, farm

#: Compiling is most of the work; a kernel that is silent for longer hangs.
_WORKERS, _SILENCE_S = 12, 120.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "number" in metafunc.fixturenames:
        metafunc.parametrize("number", range(metafunc.config.getoption("--writable-samples", default=48)))


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(label, answer or error) of every case, in the order drawn."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    options = request.config.getoption
    cases = sample(machine_here("the test"), options("--writable-samples", 48), options("--writable-seed", 0))
    log = tmp_path_factory.mktemp("writable") / "log"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])

    def start() -> Worker:
        return Worker(log, "support.writable", {**os.environ, "PYTHONPATH": path})

    requests = [{**request_of(case), "number": number} for number, case in enumerate(cases)]
    found = {asked["number"]: answer for asked, answer in farm(start, requests, min(_WORKERS, cores()), _SILENCE_S)}
    return [(case.label(), found[number]) for number, case in enumerate(cases)]


def test_a_writable_kernel_computes_attention(answers, number: int) -> None:
    label, answer = answers[number]
    assert not isinstance(answer, WorkerError), f"{label}: {answer}"
    assert answer["reason"] == "", f"{label}: {answer['reason']}"
