"""What a bundle asks of its worker processes, started as ``python -P -m tilecast.validation.lab.bundle.tasks``."""

from __future__ import annotations

from typing import Any

from tilecast.validation.lab.bundle.manifest import BundleError
from tilecast.validation.lab.measure import tasks as measuring
from tilecast.validation.lab.measure.plan import PlanError, item_from
from tilecast.validation.lab.worker.serve import Tasks, Tell, serve


def identify(_request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """Which GPU, and which software drives it; BundleError says what is missing."""
    from tilecast.validation.lab.measure.detect import driver_version, gpu_here

    try:
        here = gpu_here("tilecast bundle")
        driver = driver_version("tilecast bundle", here.uuid)
    except PlanError as error:
        raise BundleError(f"{error}; bundles are read anywhere with tilecast validate compare") from None
    return {
        "gpu": here.name, "capability": here.capability, "driver": driver, "torch": here.torch,
        "triton": here.triton, "uuid": here.uuid,
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


def profile(request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """Compile one kernel for the target that the simulator reads, and keep what it reads."""
    from tilecast.codegen.compiler.profile import profile as read
    from tilecast.model.compiled.code import dump_codes

    item = item_from(request["item"])
    return {"code": dump_codes([read(item.kernel, item.variant, item.workload, item.machine)]).strip()}


TASKS: Tasks = {**measuring.TASKS, "identify": identify, "calibrate": calibrate, "profile": profile}

if __name__ == "__main__":
    serve(TASKS)
