"""Random legal variants on the emulator: does it complain about a kernel that is right?

Draws machines, shapes and variants of Hopper's and Blackwell's forward families by a seed, generates each kernel, runs it
on a small problem, late or at random moments, and holds the result against float64.  Prints what fails; exit code 1 then.

    python tools/emulate_variants.py --kernels 100 --seed 1
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tilecast.codegen.generate import generate
from tilecast.emulator.errors import EmulationError
from tilecast.emulator.run import emulate
from tilecast.emulator.verify import judge
from tilecast.model.families import Variant, find_family, legal_space, writable
from tilecast.model.kernel.header import header_window
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

MACHINES = {"h200-sxm": "fa3", "b200": "fa4", "b300": "fa4"}
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
#: Draws for one kernel before its shape is given up: few variants of some spaces can be written.
_DRAWS = 200


def draw(rng: random.Random) -> tuple[str, Workload, Variant] | None:
    """A machine, a small problem and a variant that can be written for it; None where the draws found none."""
    machine_name = rng.choice(list(MACHINES))
    machine, dims = load_machine(machine_name), rng.choice(HEAD_DIMS)
    mask = rng.choice(("none", "causal", "window"))
    window = (rng.choice((0, 1, 37, 250)), rng.choice((0, 21, 300))) if mask == "window" else None
    group, heads_kv = rng.choice((1, 1, 2, 3)), rng.choice((1, 2))
    work = Workload(
        rng.choice((1, 2)), group * heads_kv, heads_kv, rng.randint(1, 400), rng.randint(1, 500), *dims, mask, window,
        rng.choice(("fp16", "bf16")),
    )  # fmt: skip
    space = legal_space(MACHINES[machine_name], work, machine)
    for _ in range(_DRAWS if space else 0):
        variant = rng.choice(space)
        if writable(variant, work, machine).legal:
            return machine_name, work, variant
    return None


def attend(file: Path, machine: str, work: Workload, rng: random.Random) -> None:
    """One run against float64; raises a subclass of EmulationError."""
    import ml_dtypes

    dtype = np.float16 if work.dtype == "fp16" else ml_dtypes.bfloat16
    numbers = np.random.default_rng(rng.randrange(2**31))
    shapes = (
        (work.batch, work.heads_q, work.seqlen_q, work.head_dim_qk),
        (work.batch, work.heads_kv, work.seqlen_k, work.head_dim_qk),
        (work.batch, work.heads_kv, work.seqlen_k, work.head_dim_v),
    )
    q, k, v = (numbers.standard_normal(shape) for shape in shapes)
    if rng.random() < 0.3:
        # Row maxima grow from block to block.
        q, k = np.abs(q), np.abs(k) * np.linspace(6, 0.1, work.seqlen_k)[None, None, :, None]
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    done = emulate(
        file, q, k, v, mode=rng.choice(("late", "random")), seed=rng.randrange(1000), machine=machine,
        sms=rng.choice((2, 4, 148)),
    )  # fmt: skip
    # A window that hides nothing on one side is written as the simpler mask that it is.
    judge(done, q, k, v, q.shape[3] ** -0.5, header_window(done.header)).require()


def main() -> int:
    """Run it; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kernels", type=int, default=100, help="how many (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    asked = parser.parse_args()
    rng, started, wrong, ran = random.Random(asked.seed), time.perf_counter(), 0, 0
    families: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        while ran < asked.kernels:
            found = draw(rng)
            if found is None:
                continue
            machine, work, variant = found
            ran += 1
            families[machine] = families.get(machine, 0) + 1
            file = Path(folder) / f"kernel{ran}.py"
            family = find_family(MACHINES[machine])
            file.write_text(
                generate(work, load_machine(machine), family, variant, compiler=None).source, encoding="utf-8"
            )
            try:
                attend(file, machine, work, rng)
            except EmulationError as error:
                wrong += 1
                print(f"{ran}: {machine} {work.label()} {variant}\n  {type(error).__name__}: {error}", flush=True)
    shares = ", ".join(f"{machine} {count}" for machine, count in sorted(families.items()))
    print(f"{ran} kernels ({shares}), seed {asked.seed}: {wrong} complaints, {time.perf_counter() - started:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
