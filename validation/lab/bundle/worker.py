"""The process that touches the GPU: takes requests as lines of JSON on stdin, answers on stdout.

Whatever a kernel nobody has run before does (crash, lost context, hang), it does to this process and not to the run.
Started as ``python -P -m tilecast.validation.lab.bundle.worker``; it ends with the process that started it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilecast.model.kernel.workload import Workload
from tilecast.validation.lab.measure.plan import Item

Tell = Callable[[str, float], None]
#: What a worker can be asked, by name: (request, progress) -> answer.
Tasks = Mapping[str, Callable[[dict[str, Any], Tell], dict[str, Any]]]


def item_to(item: Item) -> dict[str, Any]:
    """An item as JSON takes it."""
    return asdict(item)


def item_from(raw: dict[str, Any]) -> Item:
    """Inverse of `item_to`."""
    shape = dict(raw["workload"])
    shape["window"] = None if shape["window"] is None else tuple(shape["window"])
    return Item(**{**raw, "workload": Workload(**shape)})


def identify(_request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """Which GPU, and which software drives it; BundleError says what is missing."""
    from tilecast.validation.lab.bundle.manifest import BundleError

    elsewhere = "run tilecast bundle on a machine with one; bundles are read anywhere with tilecast validate compare"
    try:
        import torch
        import triton
    except ImportError as error:
        raise BundleError(f"tilecast bundle needs torch and triton ({error}): pip install 'tilecast[gpu]'") from None
    if not torch.cuda.is_available():
        raise BundleError(
            f"tilecast bundle needs an NVIDIA GPU and a torch built for CUDA, and there is none here: {elsewhere}"
        )
    try:
        from tilecast.validation.lab.measure.telemetry import Nvml

        driver = Nvml(torch.cuda.current_device()).driver
    except ImportError:
        raise BundleError(
            "tilecast bundle reads clock and power through nvidia-ml-py: pip install 'tilecast[gpu]'"
        ) from None
    from tilecast.validation.lab.measure.run import device_uuid

    major, minor = torch.cuda.get_device_capability()
    return {
        "gpu": torch.cuda.get_device_name(), "capability": 10 * major + minor, "driver": driver,
        "torch": str(torch.__version__), "triton": str(triton.__version__),
        "uuid": device_uuid(torch.cuda.current_device()),
    }  # fmt: skip


def calibrate(request: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Run the benchmarks that the store lacks (less those in ``skip``) and write the machine file."""
    from tilecast.base.files import write_text_atomically
    from tilecast.validation.lab.calibrate.gpu import Gpu
    from tilecast.validation.lab.calibrate.groups import all_cases
    from tilecast.validation.lab.calibrate.report import machine_text
    from tilecast.validation.lab.calibrate.run import chosen, run_cases

    gpu = Gpu()
    cases = chosen(all_cases(()), gpu.identity.compute_capability, request["quick"], gpu.identity.smem_per_cta)
    cases = [case for case in cases if case.label() not in request["skip"]] if request["measure"] else []

    def told(_stage: str, done: float, total: float, case: str = "", /) -> None:
        if case:  # the run takes the last name it heard for the benchmark that a crash came from
            tell(case, done / max(total, 1e-9))

    outcome = run_cases(gpu, cases, request["store"], request["command"], told)
    text = machine_text(outcome.rows, gpu.identity, request["name"])
    write_text_atomically(request["machine"], text)
    return {"failed": list(outcome.failed), "measured": outcome.measured, "skipped": outcome.skipped}


def check(request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """Write, compile and run one kernel once, and hold its output against float64."""
    import torch

    from tilecast.validation.lab.measure.accuracy import WRONG, relative_error
    from tilecast.validation.lab.measure.run import tensors
    from tilecast.validation.lab.measure.subjects import subject

    item = item_from(request["item"])
    inputs = tensors(item.workload)
    run, output = subject(item, request["version"]).prepare(item.workload, inputs)
    run()
    torch.cuda.synchronize()
    error = relative_error(item.workload, *inputs, output())
    wrong = f"wrong output: relative error {error:.3g} against float64, at most {WRONG} expected"
    return {"reason": "" if error <= WRONG else wrong, "error": error if error == error else -1.0}


def measure(request: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Time the items of one shape and append them to the table."""
    from tilecast.validation.lab.measure.run import Options
    from tilecast.validation.lab.measure.run import measure as run

    items = [item_from(raw) for raw in request["items"]]
    # One process: the kernels are compiled by now, and each was run once where it could do no harm.
    options = Options(**request["options"], workers=1)
    failures = run(items, Path(request["table"]), options, lambda _done, text: tell(text, 0.0))
    return {"failed": [[items.index(failure.item), failure.reason] for failure in failures]}


def profile(request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """Compile one kernel for the target that the simulator reads, and keep what it reads."""
    from tilecast.codegen.compiler.profile import profile as read
    from tilecast.model.compiled.code import dump_codes

    item = item_from(request["item"])
    return {"code": dump_codes([read(item.kernel, item.variant, item.workload, item.machine)]).strip()}


TASKS: Tasks = {"identify": identify, "calibrate": calibrate, "check": check, "measure": measure, "profile": profile}


def serve(tasks: Tasks) -> None:
    """Answer requests, each by the task that its "do" names, until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    def answer(kind: str, value: object) -> None:
        try:
            answers.write(json.dumps({kind: value}) + "\n")
            answers.flush()
        except BrokenPipeError:  # nobody is left to hear it
            os._exit(0)

    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer("done", tasks[request["do"]](request, lambda text, share: answer("at", [text, share])))
        except Exception as error:  # everything a compiler, a driver or a kernel can raise is this request's failure
            answer("error", (" ".join(str(error).split()) or type(error).__name__)[:300])


def _end_with(parent: int) -> None:
    """Kill this process and its compilers when the one that started it is gone: no orphan may hold the GPU."""
    while os.getppid() == parent:
        time.sleep(0.25)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    serve(TASKS)
