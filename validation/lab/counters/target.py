"""What Nsight Compute profiles: launches every item of a list once, each between start and stop of the profiler.

python -m tilecast.validation.lab.counters.target ITEMS.json VERSION
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tilecast.model.kernel.workload import Workload
from tilecast.validation.lab.measure.plan import Item


def main() -> None:
    """Warm up (compile) outside the profiled range, launch once inside."""
    import torch

    from tilecast.validation.lab.measure.run import tensors
    from tilecast.validation.lab.measure.subjects import subject

    items = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for raw in items:
        item = Item(raw["kernel"], raw["variant"], Workload.from_dict(raw["workload"]), raw["machine"])
        run, _ = subject(item, sys.argv[2]).prepare(item.workload, tensors(item.workload))
        run()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        run()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
