"""What Nsight Compute profiles: launches every item of a list once, each between start and stop of the profiler.

python -m tilecast.validation.lab.counters.target ITEMS.json FATES.jsonl VERSION

FATES.jsonl gets a line for every item that the process got through: "" or why it could not be launched.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tilecast.validation.lab.measure.plan import item_from
from tilecast.validation.lab.worker.serve import gpu_is_lost, one_line


def main() -> None:
    """Warm up (compile) outside the profiled range, launch once inside."""
    import torch

    from tilecast.validation.lab.measure.shape import tensors
    from tilecast.validation.lab.measure.subjects import subject

    items = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with Path(sys.argv[2]).open("a", encoding="utf-8") as fates:
        for item in map(item_from, items):
            fate = ""
            try:
                run, _ = subject(item, sys.argv[3]).prepare(item.workload, tensors(item.workload))
                run()
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
                run()
                torch.cuda.synchronize()
                torch.cuda.profiler.stop()
            except Exception as error:  # that item's failure, if it left a context to go on with
                if gpu_is_lost():
                    raise
                fate = one_line(error)
            fates.write(json.dumps(fate) + "\n")
            fates.flush()


if __name__ == "__main__":
    main()
