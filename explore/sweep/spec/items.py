"""Work items: canonical JSON in, JSON out, and the key that says when two of them are the same work.

An item holds everything its result depends on except the program: workload, variant, clock, and the machine by name and
by the hash of its facts.  The key adds the hash of the sources that compute it, so results of different versions of the
model never mix.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from tilecast.explore.sweep.spec.backward import BACKWARD
from tilecast.explore.sweep.spec.choice import FLUID
from tilecast.explore.sweep.spec.variants import FORWARD
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.compiled.loops.shelf import loops_digest
from tilecast.model.forecast.answer import Explained
from tilecast.model.forecast.level import LEVELS
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload, WorkloadError
from tilecast.model.machine.machine import Fact, Machine, MachineError

#: Changes when results gain, lose or redefine a field.
FORMAT = 2
#: Folders beside this package whose Python (and templates) a result of each kind depends on.
_SOURCES = {"forecast": ("model",), "measure": ("model", "codegen", "validation/lab/measure")}
_SUFFIXES = (".py", ".j2")


def canonical(value: object) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text, whatever order they were written in.

    Raises ValueError for NaN and infinities, which equal nothing.

    >>> canonical({"b": 1.0, "a": [True]})
    '{"a":[true],"b":1.0}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


@lru_cache(maxsize=4)
def source_hash(do: str) -> str:
    """SHA-256 over the sources that compute items of a kind ("forecast" or "measure"), names and contents."""
    root = Path(__file__).parents[3]
    digest = hashlib.sha256()
    for folder in _SOURCES[do]:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in _SUFFIXES:
                digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
                digest.update(path.read_bytes())
                digest.update(b"\0")
    return digest.hexdigest()


def content_key(text: str, do: str) -> str:
    """SHA-256 of an item's canonical text and of the sources that compute it: 64 hex digits."""
    return hashlib.sha256(f"{source_hash(do)}\n{text}".encode()).hexdigest()


def machine_document(machine: Machine) -> dict[str, Any]:
    """A machine as plain values, complete: `machine_from` gives back an equal one."""
    head = {name: getattr(machine, name) for name in ("name", "title", "arch", "family", "tensor_kind")}
    return {**head, "facts": {key: asdict(fact) for key, fact in machine.facts.items()}}


def machine_from(document: Mapping[str, Any]) -> Machine:
    """Inverse of `machine_document`."""
    return Machine(**{**document, "facts": {key: Fact(**fact) for key, fact in document["facts"].items()}})


@lru_cache(maxsize=1024)
def machine_hash(machine: Machine) -> str:
    """First 16 hex digits of SHA-256 over what forecasts read: values, units, kinds, ranges.  Not sources and notes."""
    facts = {key: (f.value, f.unit, f.kind, f.low, f.high) for key, f in machine.facts.items()}
    text = canonical([machine.arch, machine.family, machine.tensor_kind, facts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def forecast_item(
    workload: Workload, machine: Machine, variant: str, clock: str | float, interval: bool, level: str = LEVELS[0],
    swept: str = "fwd",
) -> dict[str, Any]:  # fmt: skip
    """The item of one forecast; ``variant`` is "best:FAMILY", "published:FAMILY" or a variant's full text.

    Of a ``level`` of machine code the loops at hand are part of the item; of another pass than the forward its name is.
    """
    stands_on: dict[str, Any] = (
        {} if level == FLUID or swept != FORWARD.name else {"level": level, "loops": loops_digest()}
    )
    if swept != FORWARD.name:
        stands_on["pass"] = swept
    return {
        "do": "forecast", "format": FORMAT, "machine": machine.name, "machine_sha": machine_hash(machine),
        "workload": workload.as_dict(), "variant": variant, "clock": clock if isinstance(clock, str) else float(clock),
        "interval": interval, **stands_on,
    }  # fmt: skip


def run_item(text: str, machines: Mapping[str, Machine]) -> dict[str, Any]:
    """The result of a forecast item: a pure function of its text (``machines`` only resolves its hash).

    ``status`` is "ok", "infeasible" (the model refuses it: ``reason`` says why) or "failed" (the model broke on it).
    """
    item = json.loads(text)
    machine = machines[item["machine"]]
    if machine_hash(machine) != item["machine_sha"]:
        return {"status": "failed", "reason": f"machine {machine.name} changed after the sweep was planned"}
    try:
        return _columns(SWEPT[item.get("pass", FORWARD.name)].predict(item, machine))
    except (PredictError, VariantError, WorkloadError, MachineError) as error:
        return {"status": "infeasible", "reason": str(error)}
    except Exception as error:  # one item that breaks the model must not end ten thousand others
        return {"status": "failed", "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


#: The passes by their names.
SWEPT = {swept.name: swept for swept in (FORWARD, BACKWARD)}


def _columns(p: Explained) -> dict[str, Any]:
    """What a row of the table shows; units in the names.  The loop is that of the kernel that takes longest."""
    main = p.main
    sits = main.binding.as_dict()
    return {
        "status": "ok", "reason": "", "variant": variant_text(p.variant),
        "pipeline": "; ".join(kernel.pipeline.name for kernel in p.kernels), "level": p.level,
        "time_ms": p.time_ms, "tflops": p.tflops, "tflops_low": p.tflops_interval[0],
        "tflops_high": p.tflops_interval[1], "clock_mhz": p.clock.mhz, "clock_bound": p.clock.bound,
        "power_w": p.clock.power_w, "binding_kind": sits["kind"], "binding": sits["name"], "ii_cycles": main.trace.ii_cycles,
        "res_mii_cycles": main.bounds.res.cycles, "rec_mii_cycles": main.bounds.rec.cycles,
        "busy": main.trace.unit_shares(), "tiles": main.chip.tiles, "l2_bytes": sum(k.chip.l2_bytes for k in p.kernels),
        "hbm_bytes": p.hbm_bytes, "outside_calibrated_range": "; ".join(p.outside_calibrated_range),
    }  # fmt: skip
