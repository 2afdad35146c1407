"""Every shipped Hopper and Blackwell kernel on the emulator, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.whole import whole

import tilecast.kernels.generated as generated
from tilecast.emulator.replay.costs import is_rescale
from tilecast.emulator.run import Emulation, emulate, kernel_path
from tilecast.emulator.source import Source
from tilecast.emulator.trace import Work
from tilecast.emulator.verify import judge
from tilecast.model.kernel.header import header_window

KERNELS = sorted(path.stem for path in Path(str(generated.__file__)).parent.glob("*_ws_*.py"))


@dataclass(frozen=True)
class Case:
    """Lengths, heads and inputs of one run; ``window`` is what window kernels get."""

    rows: int
    keys: int
    heads: tuple[int, int]
    dtype: Any
    mode: str
    window: tuple[int, int]
    rising: bool = False
    sharp: float = 1.0
    release: str = "3.9"


CASES = {
    # Several tiles and key blocks to a program, lengths that divide nothing; two query heads to a K/V head.
    "several tiles": Case(530, 300, (2, 1), np.float16, "late", (100, 20), sharp=4.0),
    "long keys": Case(130, 700, (1, 1), ml_dtypes.bfloat16, "random", (64, -1)),
    # Causal rows without any key.
    "more rows than keys": Case(257, 70, (3, 1), ml_dtypes.bfloat16, "random", (30, 0), sharp=8.0),
    # Row maxima grow by more than a fixed reference can hold: O is rescaled again and again, Hopper moves its reference.
    "rising scores": Case(190, 333, (1, 1), np.float16, "late", (250, 250), rising=True, release="3.6"),
}


def newest_only(kernel: str) -> bool:
    text = kernel_path(kernel).read_text(encoding="utf-8")
    return "Triton 3.9 or later" in text.split("def row_per_thread")[0]


def inputs(kernel: str, case: Case, seed: int = 0) -> tuple[Any, Any, Any]:
    shape = Source(kernel_path(kernel)).header()["workload"]
    rng = np.random.default_rng(seed)
    (hq, hk), dq, dv = case.heads, shape["head_dim_qk"], shape["head_dim_v"]
    q = rng.standard_normal((1, hq, case.rows, dq)) * case.sharp
    k, v = rng.standard_normal((1, hk, case.keys, dq)), rng.standard_normal((1, hk, case.keys, dv))
    if case.rising:
        # Earlier keys weigh more: kernels go through keys from the last to the first.
        q, k = np.abs(q), np.abs(k) * np.linspace(6, 0.1, case.keys)[None, None, :, None]
    return q.astype(case.dtype), k.astype(case.dtype), v.astype(case.dtype)


def run(kernel: str, case: Case, release: str | None = None) -> Emulation:
    q, k, v = inputs(kernel, case)
    header = Source(kernel_path(kernel)).header()
    window = case.window if header["workload"]["mask"] == "window" else header_window(header)
    done = emulate(kernel, q, k, v, mode=case.mode, sms=2, window=window, release=release or case.release)
    judge(done, q, k, v, q.shape[3] ** -0.5, window).require()
    return done


def case_of(place: int, kernel: str, name: str) -> Any:
    """A kernel and a case; with `--whole` alone where it is neither the first case nor, of the others, that whose turn it is."""
    first, *others = CASES
    taken = name in (first, others[place % len(others)])
    return pytest.param(kernel, name, marks=() if taken else whole, id=f"{kernel}-{name}")


@pytest.mark.parametrize(
    ("kernel", "name"), [case_of(place, kernel, name) for place, kernel in enumerate(KERNELS) for name in CASES]
)
def test_computes_attention(kernel: str, name: str) -> None:
    case = CASES[name]
    run(kernel, case, "3.9" if newest_only(kernel) else None)


def rescales(done: Emulation) -> int:
    return sum(
        isinstance(event, Work) and is_rescale(event)
        for one in done.traces
        for role in one.roles
        if role.name == "correction_role"
        for event in role.events
    )


def test_rescaling_is_taken_and_skipped() -> None:
    kernel = "blackwell_ws_d128_full"
    assert rescales(run(kernel, Case(256, 600, (1, 1), np.float16, "late", (-1, -1)))) == 0
    assert rescales(run(kernel, CASES["rising scores"])) > 0


def test_hopper_moves_a_reference_only_when_scores_outgrow_it() -> None:
    """Rows that outgrow theirs cost the exponentials of the factors for O, and of scores where those overflowed."""

    def exponentials(done: Emulation) -> float:
        return sum(
            event.counts.get("mufu", 0)
            for one in done.traces
            for role in one.roles
            for event in role.events
            if isinstance(event, Work)
        )

    kernel = "hopper_ws_d128_full"
    case = Case(64, 320, (1, 1), np.float16, "late", (-1, -1))
    q, k, v = inputs(kernel, case)
    k[:, :, 0] = 0
    even = exponentials(emulate(kernel, q, k, v, sms=1))
    # Blocks go from the last to the first: a sink at key 0 that half of the rows see is met by all references.
    q[:, :, :32, 0], q[:, :, 32:, 0] = 8, 0
    k[:, :, :, 0] = 0
    for score, again in ((64.0, 0), (4000.0, 1)):
        k[:, :, 0, 0] = score
        done = emulate(kernel, q, k, v, sms=1)
        judge(done, q, k, v, 128**-0.5, (-1, -1)).require()
        # 64 factors, and the block's 64 x 128 scores where they overflowed.  The CTA's other 64 rows do not exist.
        assert exponentials(done) == even + 64 + again * 64 * 128


def test_a_pair_needs_the_newest_names() -> None:
    with pytest.raises(ImportError, match=r"needs Triton 3\.9"):
        run("blackwell_ws_d128_full_pair", CASES["several tiles"], "3.6")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_moments_change_nothing(seed: int) -> None:
    """Two schedules of one program give the same bits: nothing depends on who comes first."""
    case = CASES["several tiles"]
    for kernel in ("hopper_ws_d64_causal", "blackwell_ws_d64_causal"):
        q, k, v = inputs(kernel, case)
        late = emulate(kernel, q, k, v, sms=2)
        other = emulate(kernel, q, k, v, sms=2, mode="random", seed=seed)
        assert late.out.tobytes() == other.out.tobytes()
        assert late.lse.tobytes() == other.lse.tobytes()
