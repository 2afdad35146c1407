"""The process that computes: work items as lines of JSON on stdin, results on stdout, until stdin ends.

Started as ``python -P -m tilecast.explore.sweep.run.worker``.  It ends with the process that started it, whatever ended that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from tilecast.explore.sweep.spec.items import machine_from, run_item, source_hash
from tilecast.model.machine.machine import Machine
from tilecast.validation.lab.measure.plan import item_from
from tilecast.validation.lab.worker.serve import Tell, gpu_is_lost, one_line, serve

#: The machines of the sweep by name, sent once at the start instead of with every item.
_MACHINES: dict[str, Machine] = {}


def hello(request: Mapping[str, Any], _tell: Tell) -> dict[str, Any]:
    """Take the machines; say which program this is, so that no other tilecast answers under this one's keys."""
    _MACHINES.update({document["name"]: machine_from(document) for document in request["machines"]})
    return {"source": source_hash(request["kind"])}


def forecast(request: Mapping[str, Any], _tell: Tell) -> dict[str, Any]:
    """Compute one item."""
    return run_item(request["item"], _MACHINES)


def gpus(_request: Mapping[str, Any], _tell: Tell) -> dict[str, Any]:
    """The GPUs CUDA shows to this process, and the software; raises with one sentence where there is none."""
    from tilecast.validation.lab.measure.detect import device_uuid, gpu_here

    here = gpu_here("measuring")
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        found.append([device_uuid(index), torch.cuda.get_device_name(index), 10 * major + minor])
    return {"gpus": found, "torch": here.torch, "triton": here.triton}


def compile_ahead(request: Mapping[str, Any], _tell: Tell) -> dict[str, Any]:
    """Compile a measured item's kernel for ``target`` into Triton's cache on disk; touches no GPU."""
    from tilecast.base.files import cache_folder
    from tilecast.codegen.compiler.compile import compile_kernel
    from tilecast.validation.lab.measure.subjects import CACHE, subject

    item = item_from(json.loads(request["item"]))
    kernel = subject(item, request["version"])
    source = cache_folder(CACHE) / f"{item.kernel}_{kernel.source_sha}.py"
    compile_kernel(source, request["target"], item.workload.dtype, shape=item.workload.as_dict())
    return {"compiled": kernel.source_sha}


def measure(request: Mapping[str, Any], _tell: Tell) -> dict[str, Any]:
    """Check and time one kernel on the one GPU this process sees; begin and end in Unix seconds."""
    import torch

    from tilecast.validation.lab.measure.detect import device_uuid
    from tilecast.validation.lab.measure.plan import Options
    from tilecast.validation.lab.measure.shape import measure_shape

    value = json.loads(request["item"])
    options = Options(
        rounds=value["rounds"], mode=value["mode"], command=request["command"], version=request["version"]
    )
    where = {"gpu_uuid": device_uuid(0) if torch.cuda.is_available() else "", "begin_unix_s": time.time()}
    try:
        rows, failed = measure_shape([item_from(value)], options)
        reason = failed[0][1] if failed else ""
    except Exception as error:  # a kernel may break anything; the parent replaces this process when it says so
        rows, reason = [], one_line(error)
    where["end_unix_s"] = time.time()
    if not rows:
        return {"status": "failed", "reason": reason or "nothing was measured", "lost": gpu_is_lost(), **where}
    row = rows[0]
    found = {name: getattr(row, name) for name in row.__dataclass_fields__}
    return {"status": "ok", "reason": "", **found, "tflops": row.workload().flops / row.ms / 1e9, **where}


TASKS = {"hello": hello, "forecast": forecast, "gpus": gpus, "compile": compile_ahead, "measure": measure}

if __name__ == "__main__":
    serve(TASKS)
