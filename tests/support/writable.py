"""Random kernels among those that the generator calls writable, and the process that runs one and checks it.

The sample is drawn here, without a GPU; ``python -m support.writable`` is a worker that writes, compiles and runs a kernel.
"""

from __future__ import annotations

import math
import random
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilecast.codegen.generate import generate
from tilecast.model.families import find_family, parse_variant, writable
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, load_machine
from tilecast.validation.lab.worker.serve import serve

#: What is drawn from for each knob; what cannot be written together is drawn again.
KNOBS: dict[str, dict[str, tuple[object, ...]]] = {
    "triton": {
        "tile_m": (16, 32, 64, 128, 256), "tile_n": (16, 32, 64, 128, 256), "warps": (1, 2, 4, 8), "kv_stages": (1, 2, 3, 4),
        "scheduler": ("grid", "longest-first"),
    },
    "hopper_ws": {
        "warpgroups": (1, 2, 3), "tile_n": (32, 64, 128, 256), "kv_stages": (1, 2, 3, 4), "q_stages": (1, 2),
        "overlap": ("true", "false"), "ping_pong": ("true", "false"), "rescale": ("always", "conditional", "anchored"),
        "emulated_share": (0, 0, 0.125, 0.25, 0.5), "poly_degree": (3, 4, 5),
        "scheduler": ("grid", "persistent", "longest-first", "paired"),
    },
    "blackwell_ws": {
        "tile_n": (32, 64, 128), "softmax_tiles": (1, 2), "split": ("q", "k"), "kv_stages": (0, 2, 3, 4), "cta_group": (1, 2),
        "emulated_share": (0, 0, 0.125, 0.25, 0.5), "poly_degree": (3, 4, 5), "rescale_threshold": (0, 8),
        "split_p": ("true", "false"), "stats_slots": (1, 2), "load_max": ("true", "false"),
        "scheduler": ("grid", "persistent", "longest-first", "paired"),
    },
}  # fmt: skip
#: Families of a compute capability; what is not listed gets the portable one alone.
FAMILIES = {90: ("hopper_ws", "triton"), 100: ("blackwell_ws", "triton"), 103: ("blackwell_ws", "triton")}
DIMS = ((16, 16), (32, 32), (48, 48), (64, 64), (64, 32), (80, 80), (96, 96), (96, 64), (112, 112), (128, 128), (128, 64),
        (144, 144), (160, 160), (192, 128), (192, 192), (224, 224), (256, 256))  # fmt: skip
LENGTHS = (1, 2, 7, 63, 64, 127, 129, 257, 500, 1000, 1153)
WINDOWS = ((37, 21), (64, 0), (0, 0), (2, 1), (300, 5))
_DRAWS = 10_000


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel and the problem that it is written for and given."""

    family: str
    variant: str
    work: Workload
    machine: str

    def label(self) -> str:
        """For the report of a failure: enough to write it again."""
        return f"{self.family}:{self.variant} of {self.work}"


def sample(machine: Machine, count: int, seed: int) -> list[Case]:
    """``count`` distinct writable cases, families in turns; the same for the same seed."""
    draw = random.Random(seed)
    families = FAMILIES.get(int(machine["chip.compute_capability"]), ("triton",))
    found: dict[Case, None] = {}
    for _ in range(_DRAWS):
        if len(found) == count:
            return list(found)
        case = _draw(draw, families[len(found) % len(families)], machine)
        if case is not None:
            found[case] = None
    raise AssertionError(
        f"{len(found)} of {_DRAWS} draws can be written for {machine.name}: the knobs drawn from are too odd"
    )


def _draw(draw: random.Random, name: str, machine: Machine) -> Case | None:
    family = find_family(name)
    heads_kv = draw.choice((1, 2))
    queries = draw.choice(LENGTHS)
    keys = queries if draw.random() < 0.5 else draw.choice(LENGTHS)
    dims, mask = draw.choice(DIMS), draw.choice(("none", "causal", "window"))
    work = Workload(
        draw.choice((1, 2)), heads_kv * draw.choice((1, 2, 3)), heads_kv, queries, keys, *dims, mask,
        draw.choice(WINDOWS) if mask == "window" else None, draw.choice(("bf16", "fp16")),
    )  # fmt: skip
    knobs = [f"{knob}={draw.choice(values)}" for knob, values in KNOBS[name].items()]
    try:
        variant = parse_variant(",".join([f"family={family.name}", *knobs]))
    except VariantError:
        return None
    if not writable(variant, work, machine).legal:
        return None
    return Case(name, variant_text(variant), work, machine.name)


def request(case: Case) -> dict[str, Any]:
    """What the worker is asked."""
    return {"do": "check", **asdict(case), "work": case.work.as_dict()}


def check(request: dict[str, Any], _tell: object) -> dict[str, Any]:
    """Why a case is wrong, or "", with its errors: the project's rule on random inputs, and nothing written elsewhere."""
    import torch

    from support.attention import exact, plain
    from tilecast.codegen.compiler.compile import load_source

    work = Workload.from_dict(request["work"])
    variant = parse_variant(request["variant"])
    source = generate(work, load_machine(request["machine"]), find_family(request["family"]), variant).source
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.py"
        file.write_text(source, encoding="utf-8")
        launch = load_source(file).launch
        generator = torch.Generator("cuda").manual_seed(1)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[work.dtype]

        def make(heads: int, rows: int, width: int) -> torch.Tensor:
            return torch.randn(work.batch, heads, rows, width, generator=generator, device="cuda").to(dtype)

        q = make(work.heads_q, work.seqlen_q, work.head_dim_qk)
        k = make(work.heads_kv, work.seqlen_k, work.head_dim_qk)
        v = make(work.heads_kv, work.seqlen_k, work.head_dim_v)
        window = work.window or (-1, 0 if work.mask == "causal" else -1)
        out, out_frame = _framed((*q.shape[:3], work.head_dim_v), dtype)
        lse, lse_frame = _framed(q.shape[:3], torch.float32)
        # A window that hides nothing is generated as a plainer kernel, which takes no limits.
        launch(q, k, v, out, lse, work.head_dim_qk**-0.5, *(work.reduced().window or ()))
        torch.cuda.synchronize()
    expected, expected_lse = exact(q, k, v, window)
    error = (out.double() - expected).abs().max().item()
    # Twice the error of attention in PyTorch's operations at the same dtype, or a step of the dtype.
    allowed = max(
        2 * (plain(q, k, v, window).double() - expected).abs().max().item(),
        torch.finfo(dtype).eps * expected.abs().max().item(),
    )
    seen = expected_lse > -math.inf
    lse_error = (lse.double() - expected_lse)[seen].abs().max().item() if seen.any() else 0.0
    reasons = [
        (not error <= allowed, f"error {error:.3g}, at most {allowed:.3g}"),
        (not torch.equal(lse > -math.inf, seen), "rows that see no key have another lse than -inf"),
        (not lse_error <= 5e-4, f"lse error {lse_error:.3g}"),
        (not (out_frame() and lse_frame()), "memory beside the outputs is written"),
    ]
    return {"reason": "; ".join(text for wrong, text in reasons if wrong), "error": error, "allowed": allowed}


def _framed(shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
    """A tensor of NaN, and whether the memory on both sides of it is as it was."""
    import torch

    size, frame = math.prod(shape), 4096
    memory = torch.full((size + 2 * frame,), 7.0, dtype=dtype, device="cuda")
    memory[frame : frame + size] = math.nan
    return memory[frame : frame + size].view(shape), lambda: bool(
        (memory[:frame] == 7).all() and (memory[frame + size :] == 7).all()
    )


if __name__ == "__main__":
    serve({"check": check})
