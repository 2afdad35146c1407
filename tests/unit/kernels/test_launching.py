"""What a launcher keeps between launches of a shape, on kernels that the emulator runs; and which tensor goes where."""

from __future__ import annotations

import csv
import gc
import importlib
import weakref
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tilecast.base.data import MEASURED
from tilecast.emulator.language.arrays import Array
from tilecast.emulator.run import kernel_path, load, new_session
from tilecast.emulator.source import Source
from tilecast.emulator.verify import reference
from tilecast.model.machine.machine import load_machine

pytest.importorskip("torch")
from tilecast.kernels import launching, registry

KERNELS = {"hopper_ws_d64_window": "h200-sxm", "blackwell_ws_d64_window": "b200"}


class Launches:
    """A shipped kernel on the emulator; counts how often it works out what a shape needs."""

    def __init__(self, name: str = "hopper_ws_d64_window") -> None:
        session = new_session(Source(kernel_path(name)), load_machine(KERNELS[name]), sms=2)
        self.module: ModuleType = load(session)
        self.planned = 0
        plan = self.module.plan

        def counted(*arguments: Any) -> Any:
            self.planned += 1
            return plan(*arguments)

        self.module.plan = counted
        self.launch = launching.launcher(self.module)

    def __call__(self, seed: int, rows: int, keys: int, window: tuple[int, int]) -> None:
        """Launch on random tensors of one shape and compare with float64."""
        rng = np.random.default_rng(seed)
        shapes = ((1, 2, rows, 64), (1, 1, keys, 64), (1, 1, keys, 64))
        q, k, v = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)
        out, lse = np.full(q.shape, np.nan, np.float16), np.full(q.shape[:3], np.nan, np.float32)
        arrays = [Array(data, name) for data, name in ((q, "q"), (k, "k"), (v, "v"), (out, "out"), (lse, "lse"))]
        self.launch(*arrays, 0.125, *window)
        expected, expected_lse = reference(q, k, v, 0.125, window)
        assert np.abs(out - expected).max() < 2e-3
        assert np.abs(lse - expected_lse).max() < 2e-3
        self.last = [weakref.ref(array) for array in arrays]


def measured_beside_each_other() -> list[tuple[tuple[int, int, int], dict[str, float]]]:
    """(batch, heads, seqlen) and the time of each of two kernels without a mask at head_dim 64."""
    with (MEASURED / "h200_short_rounds.csv").open(encoding="utf-8") as file:
        return [
            (
                (int(row["batch"]), int(row["heads"]), int(row["seqlen"])),
                {"hopper_ws_d64_full": float(row["full_us"]), "hopper_ws_d64_full_short": float(row["short_us"])},
            )
            for row in csv.DictReader(file)
        ]


@pytest.mark.parametrize(("shape", "times"), measured_beside_each_other(), ids=str)
def test_of_two_kernels_with_the_same_bits_the_faster_runs_or_nearly(shape, times, monkeypatch) -> None:
    torch = launching.torch
    entry = next(e for e in registry.read_index(registry.INDEX) if e.module == "hopper_ws_d64_full_short")
    name, time = entry.taller
    modules = [importlib.import_module(f"{registry.PACKAGE}.{module}") for module in (entry.module, name)]
    monkeypatch.setattr(launching, "_plan", lambda module, *given: module.__name__.rpartition(".")[2])
    monkeypatch.setattr(launching, "sm_count", lambda device: 132)
    q = torch.empty(1, 1, 1, 64).expand(*shape, 64)
    taken = launching._plan_of_sooner((*modules, time), (q, q), -1, -1)
    assert times[taken] <= 1.06 * min(times.values())


def test_of_two_heights_of_causal_tiles_the_faster_runs_or_nearly(monkeypatch) -> None:
    """54 calls on an H200 (data/measured/h200_causal_heights.csv): 2 % slower than the faster at most."""
    entries = {entry.module: entry for entry in registry.read_index(registry.INDEX)}
    monkeypatch.setattr(launching, "_plan", lambda module, *given: module.name)
    monkeypatch.setattr(launching, "sm_count", lambda device: 132)
    with (MEASURED / "h200_causal_heights.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 54
    for row in rows:
        entry = entries[f"hopper_ws_d{96 if int(row['head_dim']) <= 96 else 128}_causal"]
        name, time = entry.taller
        found = {}
        for module, column in ((entry.module, "rows_128_us"), (name, "rows_192_us")):
            made: Any = importlib.import_module(f"{registry.PACKAGE}.{module}")
            found[module] = SimpleNamespace(name=column, launch_of=made.launch_of)
        batch, heads, heads_kv, queries, keys = (
            int(row[x]) for x in ("batch", "heads_q", "heads_kv", "queries", "keys")
        )
        whole = launching.torch.empty(1, 1, 1, 64)
        q, k = whole.expand(batch, heads, queries, 64), whole.expand(batch, heads_kv, keys, 64)
        taken = launching._plan_of_sooner((*found.values(), time), (q, k), -1, 0)
        assert float(row[taken]) <= 1.02 * min(float(row["rows_128_us"]), float(row["rows_192_us"])), row


HEIGHTS = [  # (name of a tile of 128 rows, of 192, heads of q and k, of v, keys, window_right)
    ("hopper_ws_d64_full_short", "hopper_ws_d64_full", 64, 64, 200, -1),
    ("hopper_ws_d64_full_short", "hopper_ws_d64_full", 64, 64, 197, -1),
    ("hopper_ws_d96_causal", "hopper_ws_d96_causal_long", 96, 96, 213, 0),
    ("hopper_ws_d128_causal", "hopper_ws_d128_causal_long", 128, 128, 213, 0),
    ("hopper_ws_d192_128_full", "hopper_ws_d192_128_full_long", 192, 128, 197, -1),
]


@pytest.mark.parametrize("sizes", [(1, 2, 2, 0, 5), (1, 2, 2, 5, 0), (0, 2, 2, 5, 5), (1, 0, 0, 5, 5)])
@pytest.mark.parametrize(("low", "tall", "columns", "columns_v", "_", "right"), HEIGHTS)
def test_nothing_is_launched_where_a_tensor_is_empty(
    low: str, tall: str, columns: int, columns_v: int, _: int, right: int, sizes: tuple[int, ...]
) -> None:
    modules = [importlib.import_module(f"{registry.PACKAGE}.{name}") for name in (low, tall)]
    batch, heads, heads_kv, queries, keys = sizes
    q, k, v, out = (
        launching.torch.empty(batch, *shape, dtype=launching.torch.bfloat16)
        for shape in ((heads, queries, columns), (heads_kv, keys, columns), (heads_kv, keys, columns_v), (heads, queries, columns_v))
    )  # fmt: skip
    tensors = (q, k, v, out, launching.torch.empty(batch, heads, queries))
    assert launching._plan_of_sooner((*modules, 1.5), tensors, -1, right) is False


@pytest.mark.parametrize(("low", "tall", "columns", "columns_v", "keys", "right"), HEIGHTS)
def test_tiles_of_another_height_give_the_same_bits(
    low: str, tall: str, columns: int, columns_v: int, keys: int, right: int
) -> None:
    entries = {entry.module: entry for entry in registry.read_index(registry.INDEX)}
    assert entries[low].taller is not None and entries[low].taller[0] == tall
    found = []
    for name in (low, tall):
        rng = np.random.default_rng(0)
        module: Any = load(new_session(Source(kernel_path(name)), load_machine("h200-sxm"), sms=2))
        shapes = ((197, columns), (keys, columns), (keys, columns_v))
        q, k, v = (rng.standard_normal((1, 2, *shape)).astype(np.float16) for shape in shapes)
        # Sharp scores that rise along the keys move the references of rows.
        q, k = q * np.float16(4), k * np.linspace(0.1, 3.0, keys, dtype=np.float16)[None, None, :, None]
        out = np.full((*q.shape[:3], columns_v), np.nan, np.float16)
        lse = np.full(q.shape[:3], np.nan, np.float32)
        given = (Array(x, n) for x, n in ((q, "q"), (k, "k"), (v, "v"), (out, "out"), (lse, "lse")))
        module.launch(*given, 0.125, -1, right)
        assert not np.isnan(out).any()
        found.append((out, lse))
    assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("name", KERNELS)
def test_one_shape_is_planned_once_whatever_its_tensors(name: str) -> None:
    launch = Launches(name)
    launch(0, 70, 90, (30, 0))
    launch(1, 70, 90, (30, 0))
    assert launch.planned == 1
    launch(2, 70, 90, (30, 5))
    launch(3, 70, 91, (30, 0))
    assert launch.planned == 3
    launch(4, 70, 90, (30, 0))
    assert launch.planned == 3


def test_a_plan_keeps_no_tensor_alive(collects_own: None) -> None:
    launch = Launches()
    launch(0, 5, 5, (-1, -1))
    # The emulator remembers who stored what; a launcher must not.
    launch.module.attention.session.traces.clear()
    gc.collect()
    assert [found() for found in launch.last] == [None] * 5


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)])
def test_empty_tensors_give_zeros_every_time(name: str, lengths: tuple[int, int]) -> None:
    launch = Launches(name).launch
    rows, keys = lengths
    for _ in range(2):
        out, lse = np.full((1, 2, rows, 64), np.nan, np.float16), np.full((1, 2, rows), np.nan, np.float32)
        q, k = np.zeros((1, 2, rows, 64), np.float16), np.zeros((1, 1, keys, 64), np.float16)
        launch(Array(q, "q"), Array(k, "k"), Array(k, "v"), Array(out, "out"), Array(lse, "lse"), 0.125)
        assert not out.any() and np.isneginf(lse).all()


def test_plans_do_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launching.MOST_PLANS == 256
    monkeypatch.setattr(launching, "MOST_PLANS", 2)
    launch = Launches()
    for keys in (5, 6, 5, 6):
        launch(0, 5, keys, (-1, -1))
    assert launch.planned == 2
    launch(0, 5, 7, (-1, -1))  # the third shape: all are forgotten, and it alone is known
    launch(1, 5, 7, (-1, -1))
    assert launch.planned == 3
    launch(0, 5, 5, (-1, -1))
    assert launch.planned == 4


# --- a kernel that only says what it was given ----------------------------------------------------------------------


class Described:
    """A descriptor: of a tensor, with something that a launch must not lose."""

    def __init__(self, base: Any) -> None:
        self.base, self.box = base, (64, 64)


class Recorder:
    """A module whose kernel notes its arguments."""

    def __init__(self, arguments: Any) -> None:
        self.OPTIONS = {"num_warps": 4}
        self.arguments = arguments
        self.planned = 0
        self.given: list[tuple[Any, ...]] = []
        self.compiled: list[dict[str, Any]] = []
        self.attention = SimpleNamespace(warmup=self.warmup)

    def plan(self, *call: Any) -> Any:
        self.planned += 1
        return (3, 1, 1), self.arguments(*call[:5])

    def warmup(self, *_: Any, **options: Any) -> Any:
        self.compiled.append(options)
        return {(3, 1, 1): lambda *given: self.given.append(given)}


def tensors(dtype: str = "float16") -> list[Any]:
    import torch

    return [*(torch.zeros(1, 2, 8, 64, dtype=getattr(torch, dtype)) for _ in range(4)), torch.zeros(1, 2, 8)]


def all_described(q: Any, k: Any, v: Any, out: Any, lse: Any) -> tuple[Any, ...]:
    return (Described(q), Described(q), Described(k), Described(v), Described(out), lse, 7, 8)


ARGUMENTS = {
    "descriptors and pointers": lambda q, k, v, out, lse: (Described(q), Described(k), Described(v), out, lse, 7, 8),
    "descriptors but for lse": all_described,
    "pointers": lambda q, k, v, out, lse: (q, k, v, out, lse, 7, 8),
}


@pytest.fixture(params=ARGUMENTS)
def recorder(request: pytest.FixtureRequest) -> Iterator[Recorder]:
    yield Recorder(ARGUMENTS[request.param])


def test_every_launch_passes_its_own_tensors(recorder: Recorder) -> None:
    launch = launching.launcher(recorder)
    for scale in (0.125, 0.25):
        q, k, v, out, lse = given = tensors()
        launch(*given, scale)
        wanted = [getattr(x, "base", x) for x in recorder.arguments(q, k, v, out, lse)]
        got = [getattr(x, "base", x) for x in recorder.given[-1][:-1]]
        assert all(a is b for a, b in zip(got, wanted, strict=True))
        assert all(x.box == (64, 64) for x in recorder.given[-1] if isinstance(x, Described))
        assert recorder.given[-1][-1] == pytest.approx(scale * launching.LOG2E)
    assert recorder.planned == 1 and recorder.compiled == [{"grid": (3, 1, 1), "num_warps": 4}]


def test_one_tensor_given_twice_does_not_confuse_later_launches(recorder: Recorder) -> None:
    launch = launching.launcher(recorder)
    q, k, v, out, lse = tensors()
    launch(q, q, q, out, lse, 0.125)
    launch(q, k, v, out, lse, 0.125)
    assert recorder.planned == 1
    wanted = [getattr(x, "base", x) for x in recorder.arguments(q, k, v, out, lse)]
    assert all(getattr(a, "base", a) is b for a, b in zip(recorder.given[-1], wanted, strict=False))


def test_a_plan_is_for_one_dtype_shape_stride_alignment_and_window() -> None:
    import torch

    recorder = Recorder(ARGUMENTS["pointers"])
    launch = launching.launcher(recorder)
    q, k, v, out, lse = tensors()
    launch(q, k, v, out, lse, 0.125)
    launch(q, k, v, out, None, 0.125)
    assert recorder.planned == 1 and recorder.given[-1][4].dtype == torch.float32
    shifted = torch.zeros(1 + q.numel(), dtype=q.dtype)[1:].view(q.shape)
    strided = torch.zeros(1, 8, 2, 64, dtype=q.dtype).transpose(1, 2)
    for other in (tensors("bfloat16")[0], torch.zeros(1, 2, 16, 64, dtype=q.dtype), shifted, strided):
        before = recorder.planned
        launch(q, other, v, out, lse, 0.125)
        launch(q, other, v, out, lse, 0.125)
        assert recorder.planned == before + 1
    launch(q, k, v, out, lse, 0.125, 5, 0)
    launch(q, k, v, out, lse, 0.125, 5, 1)
    assert recorder.planned == 7


@pytest.mark.parametrize("scale", [0.0, -0.3, float("nan"), float("inf"), 3e38])
def test_the_scale_is_checked_in_every_launch(scale: float) -> None:
    launch = launching.launcher(Recorder(ARGUMENTS["pointers"]))
    given = tensors()
    launch(*given, 0.125)
    with pytest.raises(ValueError, match="scale: expected a number above 0 and at most 2e"):
        launch(*given, scale)


def test_a_tiny_scale_stays_a_number_that_hides_keys() -> None:
    recorder = Recorder(ARGUMENTS["pointers"])
    launching.launcher(recorder)(*tensors(), 1e-300)
    assert recorder.given[-1][-1] == 1e-37


def test_a_refused_shape_is_asked_about_again() -> None:
    class Refusing(Recorder):
        def plan(self, *call: Any) -> Any:
            self.planned += 1
            raise ValueError("q: no")

    module = Refusing(None)
    launch = launching.launcher(module)
    for _ in range(2):
        with pytest.raises(ValueError, match="q: no"):
            launch(*tensors(), 0.125)
    assert module.planned == 2


def test_an_interpreter_runs_the_kernel_itself() -> None:
    class Interpreted(Recorder):
        def __init__(self) -> None:
            super().__init__(ARGUMENTS["pointers"])
            self.attention = self

        def warmup(self, *_: Any, **options: Any) -> None:
            return None

        def __getitem__(self, grid: Any) -> Any:
            return lambda *given: self.given.append((grid, *given))

    module = Interpreted()
    launching.launcher(module)(*tensors(), 0.125)
    assert module.given[-1][0] == (3, 1, 1)


def test_all_who_ask_for_a_shipped_kernel_share_what_it_remembers() -> None:
    pytest.importorskip("triton")
    from tilecast.kernels import registry

    entry = next(entry for entry in registry.shipped() if entry.module == "triton_d64_full")
    assert registry.launcher(entry) is registry.launcher(entry)
