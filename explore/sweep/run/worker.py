"""The process that computes: work items as lines of JSON on stdin, results on stdout, until stdin ends.

Started as ``python -P -m tilecast.explore.sweep.run.worker``.  It ends with the process that started it, whatever ended that.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilecast.explore.sweep.spec.items import machine_from, run_item, source_hash
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.validation.lab.bundle.worker import Tell, serve

#: The machines of the sweep by name, sent once at the start instead of with every item.
_MACHINES: dict[str, Machine] = {}
#: After one of these the CUDA context of the process is gone.
_LOST = ("CUDA error", "context is lost", "CUDA driver error")


def hello(request: Mapping[str, Any], _tell: Tell) -> dict[str, Any]:
    """Take the machines; say which program this is, so that no other tilecast answers under this one's keys."""
    _MACHINES.update({document["name"]: machine_from(document) for document in request["machines"]})
    return {"source": source_hash(request["kind"])}


def forecast(request: Mapping[str, Any], _tell: Tell) -> dict[str, Any]:
    """Compute one item."""
    return run_item(request["item"], _MACHINES)


def gpus(_request: Mapping[str, Any], _tell: Tell) -> dict[str, Any]:
    """The GPUs CUDA shows to this process, and the software; raises with one sentence where there is none."""
    try:
        import torch
        import triton
    except ImportError as error:
        raise RuntimeError(f"measuring needs torch and triton ({error}): pip install 'tilecast[gpu]'") from None
    if not torch.cuda.is_available():
        raise RuntimeError("measuring needs a CUDA GPU and a torch built for it: forecasts need neither")
    from tilecast.validation.lab.measure.run import device_uuid

    found = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        found.append([device_uuid(index), torch.cuda.get_device_name(index), 10 * major + minor])
    return {"gpus": found, "torch": str(torch.__version__), "triton": str(triton.__version__)}


def compile_ahead(request: Mapping[str, Any], _tell: Tell) -> dict[str, Any]:
    """Compile a measured item's kernel for ``target`` into Triton's cache on disk; touches no GPU."""
    from tilecast.codegen.compiler.compile import compile_kernel
    from tilecast.validation.lab.measure.subjects import cache_folder, subject

    item = _plan_item(json.loads(request["item"]))
    kernel = subject(item, request["version"])
    source = cache_folder() / f"{item.kernel}_{kernel.source_sha}.py"
    compile_kernel(source, request["target"], item.workload.dtype, shape=item.workload.as_dict())
    return {"compiled": kernel.source_sha}


def measure(request: Mapping[str, Any], _tell: Tell) -> dict[str, Any]:
    """Check and time one kernel on the one GPU this process sees; begin and end in Unix seconds."""
    import torch

    from tilecast.validation.lab.measure.records import read
    from tilecast.validation.lab.measure.run import Options, device_uuid
    from tilecast.validation.lab.measure.run import measure as run

    value = json.loads(request["item"])
    options = Options(
        rounds=value["rounds"], mode=value["mode"], workers=1, command=request["command"], version=request["version"]
    )
    where = {"gpu_uuid": device_uuid(0) if torch.cuda.is_available() else "", "begin_unix_s": time.time()}
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "measured.csv"
        try:
            failures = run([_plan_item(value)], table, options)
            reason = failures[0].reason if failures else ""
        except Exception as error:  # a kernel may break anything; the parent replaces this process when it says so
            reason = (" ".join(str(error).split()) or type(error).__name__)[:300]
        rows = read(table) if table.exists() else []
    where["end_unix_s"] = time.time()
    if reason or not rows:
        lost = any(words in reason for words in _LOST)
        return {"status": "failed", "reason": reason or "nothing was measured", "lost": lost, **where}
    row = rows[0]
    found = {name: getattr(row, name) for name in row.__dataclass_fields__}
    return {"status": "ok", "reason": "", **found, "tflops": row.workload().flops / row.ms / 1e9, **where}


def _plan_item(value: Mapping[str, Any]) -> Any:
    from tilecast.validation.lab.measure.plan import Item

    return Item(value["kernel"], value["variant"], Workload.from_dict(value["workload"]), value["machine"])


TASKS = {"hello": hello, "forecast": forecast, "gpus": gpus, "compile": compile_ahead, "measure": measure}

if __name__ == "__main__":
    serve(TASKS)
