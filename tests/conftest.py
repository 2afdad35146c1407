"""Shared test options: golden files are rewritten with --update-golden."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis.strategies import none
from support.interpreter import INTERPRETED, quicken
from support.whole import VARIABLE, is_whole

from tilecast.base.garbage import collect_rarely

# A loaded machine is slow, not wrong: no deadline for examples.  The same examples in every run, so that a failure is the
# change's and not luck's; `make fuzz` draws fresh ones.
settings.register_profile("fixed", deadline=None, derandomize=True, database=None)
settings.register_profile("fresh", deadline=None, print_blob=True)
settings.load_profile("fixed")

# Before numpy and torch load: workers fill the cores, and threads inside small products only get in the way.  Those of torch wait for
# each other by spinning: its references took thirty times as long beside another worker.
for threads in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(threads, "1")

# What thousands of tests keep is looked through again and again otherwise: some tenth of the time.  All of it never is by itself:
# of millions of values that takes seconds.
collect_rarely()
gc.set_threshold(*gc.get_threshold()[:2], 1_000_000)

#: Files that take longest, in the order in which they begin.
LONG = {
    name: place
    for place, name in enumerate(
        (
            "docs/test_documented_commands.py", "tilecast/test_one_answer.py",
            "codegen/test_shipped_compile.py", "tilecast/test_forecast_file.py", "calibrate/test_compile.py", "emulator/test_shipped.py", "codegen/test_generate.py", "portable/test_triton_serving.py",
            "portable/test_triton_backward.py", "docs/test_json_keys.py", "gemm/test_gemm_kernels.py", "structure/test_compiled.py",
            "hopper/test_hopper_serving.py", "emulator/test_mutations.py", "portable/test_triton_append.py",
            "blackwell/test_blackwell_ws.py", "tilecast/test_cli.py", "portable/test_triton_portable.py", "hopper/test_hopper_ws.py",
            "validation/test_accuracy.py", "measured/test_gemm.py", "sweep/test_run.py",
            "hopper/test_hopper_prefill.py", "measured/test_backward.py", "codegen/test_lost_descriptors.py",
            "battery/test_other_families.py", "battery/test_battery.py", "compiler/test_complaints.py", "review/test_review.py",
        )
    )
}  # fmt: skip
GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accuracy", action="store_true", help="compute the accuracy tables again: minutes of every core")
    parser.addoption("--fresh", action="store_true", help="property tests draw fresh examples")
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden and the outputs that the pages show"
    )
    parser.addoption("--run-minutes", action="store_true", help="also run documented commands that take minutes")
    parser.addoption("--whole", action="store_true", help="also run what repeats other tests with other numbers")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "interpreted: runs in Triton's interpreter, in a process that run_interpreted starts"
    )
    config.addinivalue_line("markers", "whole: runs with --whole alone (make test-all)")
    # Cases are listed when files are read; processes that tests start inherit it.
    if config.getoption("--whole"):
        os.environ[VARIABLE] = "1"
    if config.getoption("--fresh"):
        settings.load_profile("fresh")
    if INTERPRETED:
        quicken()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What needs Triton's interpreter runs where it is on, and nothing else does; long files come first."""
    if not is_whole():
        for item in items:
            if item.get_closest_marker("whole"):
                item.add_marker(pytest.mark.skip(reason="runs with --whole (make test-all)"))
    # A worker takes one file after the other: a worker that begins a long one last lets the others wait.
    items.sort(key=lambda item: LONG.get("/".join(item.path.parts[-2:]), len(LONG)))
    marked = [item for item in items if item.get_closest_marker("interpreted")]
    if not INTERPRETED:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="runs in the process that run_interpreted starts"))
        return
    config.hook.pytest_deselected(items=[item for item in items if item not in marked])
    items[:] = marked


def pytest_collection_finish() -> None:
    # When Hypothesis first meets numpy's generator it collects, and looks for who holds it: now, when there is little to look through.
    given(none())(lambda _: None)()


def pytest_unconfigure() -> None:
    # pytest collects five times at its end.  What bindings hold must not stay frozen until Python's: they would report it.
    gc.freeze()
    atexit.register(gc.unfreeze)


@pytest.fixture
def collects_own() -> Iterator[None]:
    """For a test that collects: what tests before it have left is not looked through, which takes seconds."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """Compare text with a committed file, or rewrite the file when asked to."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"{path} is missing: run `make golden` and read the diff"
        assert path.read_text(encoding="utf-8") == text, (
            "differs from the golden file: `make golden`, then read the diff"
        )

    return check
