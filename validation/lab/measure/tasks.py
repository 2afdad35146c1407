"""What measuring asks of its worker processes, started as ``python -P -m tilecast.validation.lab.measure.tasks``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tilecast.validation.lab.measure.plan import Options, item_from
from tilecast.validation.lab.worker.serve import Tasks, Tell, serve


def check(request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """Write, compile and run one kernel once, and hold its output against float64."""
    from tilecast.validation.lab.measure import shape

    return {"reason": shape.check(item_from(request["item"]), request["version"])}


def measure(request: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Time the items of one shape and append them to the table; tells the index of the item at hand."""
    from tilecast.validation.lab.measure import shape
    from tilecast.validation.lab.measure.records import append

    items = [item_from(raw) for raw in request["items"]]
    rows, failed = shape.measure_shape(items, Options(**request["options"]), lambda index: tell(str(index), 0.0))
    append(Path(request["table"]), rows)
    return {"failed": failed}


TASKS: Tasks = {"check": check, "measure": measure}

if __name__ == "__main__":
    serve(TASKS)
