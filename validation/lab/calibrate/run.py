"""Cases to rows: compile ahead on all cores, run one at a time, append each result, skip what is already there."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tilecast.base.pool import cores, spread
from tilecast.base.progress import Progress
from tilecast.validation.lab.calibrate.cases import Case, Reading
from tilecast.validation.lab.calibrate.errors import CalibrateError
from tilecast.validation.lab.calibrate.gpu import Gpu, GpuError, Identity, today
from tilecast.validation.lab.calibrate.nvrtc import CompileError, compile_cubin, source_sha
from tilecast.validation.lab.calibrate.store import Row, append_rows, params_text, read_rows, rows_of


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run did: all rows of this GPU in the store, and the cases that failed with their reasons."""

    rows: tuple[Row, ...]
    measured: int
    skipped: int
    failed: tuple[tuple[str, str], ...]


def chosen(cases: Iterable[Case], compute_capability: int, quick: bool, smem_bytes: int = 1 << 30) -> list[Case]:
    """The cases this chip has, and with ``quick`` the short list; ``smem_bytes`` is what a CTA may use."""
    return [
        case
        for case in cases
        if compute_capability in case.chips and (case.quick or not quick) and case.smem_bytes < smem_bytes
    ]


def case_sha(case: Case) -> str:
    """Hash of the CUDA source and of the Python that launches and reads it: a change of either measures anew."""
    return source_sha(case.text() + Path(inspect.getfile(case.measure)).read_text(encoding="utf-8"))


def key_of(case: Case, identity: Identity) -> tuple[str, ...]:
    """The store's key of a case on this GPU."""
    return (identity.name, identity.driver, case.group, case.benchmark, params_text(case.params), case_sha(case))


def run_cases(gpu: Gpu, cases: list[Case], store: str | Path, command: str, progress: Progress) -> Outcome:
    """Measure what the store lacks.  ``progress`` counts the cases' own estimates in seconds, with the case at hand.

    A case that fails is reported and the rest goes on, unless the GPU itself was lost.
    """
    have = {row.key() for row in read_rows(store)}
    keys = {id(case): key_of(case, gpu.identity) for case in cases}
    todo = [case for case in cases if keys[id(case)] not in have]
    failed: list[tuple[str, str]] = []
    total = sum(case.seconds for case in todo)
    passed = 0.0
    texts = tuple(dict.fromkeys(case.text() for case in todo))
    compiled = spread(_compiled, [(text, gpu.arch) for text in texts], min(16, max(1, cores() - 1)))
    built: dict[str, bytes | CompileError] = {}
    for index, case in enumerate(todo):
        progress("calibrate", passed, total, case.label())
        passed += case.seconds
        while case.text() not in built:
            built[texts[len(built)]] = next(compiled)
        try:
            binary = built[case.text()]
            if isinstance(binary, CompileError):
                raise binary
            gpu.kernel(case, binary)
            readings = case.measure(gpu, case)
        except GpuError as error:
            failed.append((case.label(), str(error)))
            if not gpu.alive():
                raise CalibrateError(
                    f"the GPU was lost in {case.label()} ({error}); {index} results are in {store}: run again to go on"
                ) from None
            continue
        except Exception as error:  # one broken benchmark must not lose the others
            failed.append((case.label(), f"{type(error).__name__}: {error}"))
            continue
        append_rows(store, _rows(gpu.identity, case, readings, command, keys[id(case)][-1]))
    progress("calibrate", total, total)
    mine = tuple(r for r in read_rows(store) if (r.gpu, r.driver) == (gpu.identity.name, gpu.identity.driver))
    return Outcome(mine, len(todo) - len(failed), len(cases) - len(todo), tuple(failed))


def _compiled(asked: tuple[str, str]) -> bytes | CompileError:
    """Machine code of (source, architecture), or why there is none: what ends one compilation must not end the others."""
    try:
        return compile_cubin(*asked)
    except CompileError as error:
        return error


def _rows(identity: Identity, case: Case, readings: object, command: str, sha: str) -> list[Row]:
    assert isinstance(readings, dict)
    typed: dict[str, Reading] = readings
    return rows_of(
        case.group, case.benchmark, case.params, typed, gpu=identity.name, driver=identity.driver,
        clock_mhz=identity.clock_mhz, date=today(), command=command, source_sha=sha,
    )  # fmt: skip
