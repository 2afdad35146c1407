"""Which plan a GPU gets, and how long it will take: what packaged plan files say, cut for ``--quick``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tilecast.model.chip.evaluate import PredictError
from tilecast.model.families import parse_variant
from tilecast.model.forecast.predict import predict
from tilecast.model.machine.machine import Machine
from tilecast.validation.lab.bundle.manifest import BundleError
from tilecast.validation.lab.measure.plan import EXTERNAL, Item, Plan, load_plan

_FOLDER = Path(__file__).parents[1] / "plans"
#: Compute capability -> packaged plan.
PLANS = {80: "sm80", 90: "sm90", 100: "sm100", 103: "sm100", 120: "sm120"}
_QUICK_ITEMS = 12
_QUICK_SUSTAINED = 3


@dataclass(frozen=True, slots=True)
class Work:
    """Items to time in short runs and in sustained ones, and where they come from."""

    name: str
    sha256: str
    short: tuple[Item, ...]
    sustained: tuple[Item, ...]
    left_out: tuple[str, ...]

    def kernels(self) -> tuple[Item, ...]:
        """One item for every distinct generated kernel, the quickest shape of each."""
        found: dict[tuple[object, ...], Item] = {}
        for item in sorted((*self.short, *self.sustained), key=lambda i: i.workload.flops):
            if item.kernel not in EXTERNAL:
                found.setdefault(code_key(item), item)
        return tuple(found.values())


def code_key(item: Item) -> tuple[str, str, int, int, str, str]:
    """What decides a kernel's machine code: items of one key share it."""
    work = item.workload
    return (item.kernel, item.variant, work.head_dim_qk, work.head_dim_v, work.mask, work.dtype)


def plan_path(capability: int, given: str | None) -> Path:
    """The plan file of a compute capability (90 for sm_90), or the one given; BundleError for an unknown chip."""
    if given is not None:
        return Path(given)
    if capability not in PLANS:
        known = ", ".join(f"sm_{number}" for number in PLANS)
        raise BundleError(f"no plan for sm_{capability} (known: {known}): write one and pass it as --plan PLAN.toml")
    return _FOLDER / f"{PLANS[capability]}.toml"


def load_work(path: Path, machine: Machine, quick: bool) -> Work:
    """The items of a plan for a machine; PlanError for a plan that makes no sense, BundleError for one without items."""
    plans = {
        run: load_plan(path, machine, run) for run in (("quick", "sustained") if quick else ("short", "sustained"))
    }
    short, sustained = plans["quick" if quick else "short"].items, plans["sustained"].items
    if quick:
        # A plan of one's own need not say what is quick.
        short = short or load_plan(path, machine, "short").items[:_QUICK_ITEMS]
        sustained = _spread(sustained)
    if not short and not sustained:
        raise BundleError(f"{path}: has nothing that {machine.name} runs: {_first(plans.values())}")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    left_out = dict.fromkeys(line for plan in plans.values() for line in plan.left_out)
    return Work(path.name, digest, short, sustained, tuple(left_out))


def _spread(items: tuple[Item, ...]) -> tuple[Item, ...]:
    """The first item of every kernel, at most a few."""
    by_kernel = {item.kernel: item for item in reversed(items)}
    return tuple(list(by_kernel.values())[::-1][:_QUICK_SUSTAINED])


def _first(plans: Iterable[Plan]) -> str:
    return next((line for plan in plans for line in plan.left_out), "no items")


# --- time estimates, in seconds -------------------------------------------------------------------------------

#: Writing, compiling and running one kernel for the first time in one process, and reading its machine code.
COMPILE_S = 4.0
PROFILE_S = 3.0
#: Making tensors, the check against float64 and the capture, for one item.
_SETUP_S = 0.2
#: A process that imports torch and opens the GPU.
START_S = 4.0
#: What a peer takes to compile for a shape.
_PEER_S = {"flash-attn-4": 12.0, "flex": 12.0}


def item_seconds(item: Item, machine: Machine, rounds: int, sustained_s: float) -> float:
    """Seconds to time one item; ``sustained_s`` of back-to-back launches, or 0 for a short run."""
    launch = _launch_seconds(item, machine)
    once = _SETUP_S + _PEER_S.get(item.kernel, 0.0)
    return once + (sustained_s if sustained_s else (rounds + 2) * max(2e-3, launch))


def _launch_seconds(item: Item, machine: Machine) -> float:
    """Forecast seconds of a launch; of a peer, 60 % of the tensor cores' peak."""
    if item.kernel in EXTERNAL:
        peak = machine["tensor.bf16_flop_per_clk"] * machine["chip.sm_count"] * machine["chip.clock_max_mhz"] * 1e6
        return float(item.workload.flops / (0.6 * peak))
    try:
        return (
            predict(
                item.workload, machine, parse_variant(item.variant), clock="short", interval=False, compiler=None
            ).time_ms
            / 1e3
        )
    except PredictError:
        return 2e-3
