"""Cross-compile FlashAttention-4's forward kernels for Blackwell, no GPU needed, and keep their steady loops: data/published/fa4_loops.txt.

    python tools/fa4_loops.py FOLDER --python 4.0.0b21=/path/to/bin/python ...

FOLDER is for the cubins; some ten to twenty seconds each, those that are there are kept.  A release needs a Python that has flash-attn-4 of it,
the compiler that `RELEASES` names beside it (``nvidia-cutlass-dsl[cu13]``) and a torch; kernels of a release without one stay as the file
has them.  Kernels that the reader refuses are named and left out.  The share of emulated exponentials is the authors' own but where a
published row states another one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tilecast.base.files import write_text_atomically
from tilecast.codegen.compiler.binary import BinaryError, read_binary
from tilecast.codegen.compiler.structure.assemble import ShapeError, kernel_shape
from tilecast.codegen.compiler.structure.steady import kernel_roles
from tilecast.model.compiled.code import CodeError
from tilecast.model.compiled.roles.code import KernelRoles
from tilecast.model.compiled.roles.costs import role_costs
from tilecast.model.compiled.roles.run import run_roles
from tilecast.model.compiled.roles.store import dump_roles
from tilecast.model.machine.machine import load_machine
from tilecast.validation.published.loops import LATEST, LOOPS, loop_name, read_loops

#: Releases whose loops are kept, and the compiler of each: the one it is pinned to, else the newest of its day.
RELEASES = {"4.0.0b4": "4.4.1", "4.0.0b10": "4.4.2", "4.0.0b15": "4.5.2", "4.0.0b21": "4.6.0.dev0", LATEST: "4.8.1"}  # fmt: skip
#: (head dimensions, mask, dtype, target)
Kernel = tuple[tuple[int, int], str, str, str]
#: Kernel, the share that a row states, and how many exponentials there are to one that is emulated (0: none; None: as shipped).
_Built = tuple[Kernel, float | None, int | None]
_TARGETS = ("sm_100a", "sm_103a")
_MASKS = ("none", "causal")


def _shipped(head_dims: Iterable[int], masks: Sequence[str], dtypes: Sequence[str], targets: Sequence[str] = _TARGETS) -> list[_Built]:  # fmt: skip
    """Kernels as shipped; `interface.py` of the package takes another kernel for head dimension 256."""
    return [(((d, min(d, 128)), *rest), None, None) for d, *rest in product(head_dims, masks, dtypes, targets)]  # type: ignore[misc]


#: What the rows are of, by release.
_KERNELS: dict[str, list[_Built]] = {
    LATEST: [
        *_shipped((64, 128, 192), _MASKS, ("bf16", "fp8")),
        (((64, 64), "none", "bf16", "sm_100a"), 0.0, 0),
        (((64, 64), "none", "fp8", "sm_100a"), 0.0, 0),
        (((128, 128), "causal", "fp8", "sm_100a"), 0.125, 16),
        (((128, 128), "causal", "fp8", "sm_100a"), 0.25, None),
    ],
    "4.0.0b4": [
        *_shipped((128,), _MASKS, ("bf16",), ("sm_100a",)),
        *_shipped((192,), ("causal",), ("bf16",), ("sm_100a",)),
        (((64, 64), "none", "bf16", "sm_100a"), 0.0, 0),
    ],
    "4.0.0b10": [(((64, 64), "none", "fp8", "sm_100a"), 0.0, 0)],
    "4.0.0b15": _shipped((64, 128), _MASKS, ("bf16",)),
    "4.0.0b21": _shipped((128,), ("none",), ("bf16", "fp8")),
}
_MACHINES = {"sm_100a": "b200", "sm_103a": "b300"}
_SMS = 148


def compile_here(head_dims: tuple[int, int], mask: str, dtype: str, target: str, frequency: int | None) -> None:
    """Compile one kernel as the package does for a call of 4 x 16 heads of 8192 rows; the cubin goes to $CUTE_DSL_DUMP_DIR."""
    import cutlass
    import torch

    capability = (10, 3 if target == "sm_103a" else 0)
    fake: Any = torch.cuda
    fake.get_device_capability = lambda *_, **__: capability
    hardware: Any = cutlass.utils.HardwareInfo
    hardware.__init__ = lambda *_, **__: None
    hardware.get_max_active_clusters = lambda _, cluster_size=1, *__, **___: _SMS // cluster_size
    hardware.get_device_multiprocessor_count = lambda _: _SMS
    # Releases that launch on the spot ask for a stream, which is nobody's here.
    fake.current_stream = lambda *_, **__: SimpleNamespace(cuda_stream=0)
    from flash_attn.cute import flash_fwd_sm100, interface
    from torch._subclasses.fake_tensor import FakeTensorMode

    tables = [getattr(flash_fwd_sm100, name, None) for name in ("_TUNING_CONFIG", "_FP8_TUNING_CONFIG")]
    if frequency is not None and tables[0] is not None:
        for table in filter(None, tables):
            for key in product((False, True), (False, True), (head_dims[0],), (target == "sm_103a",)):
                if key in table or table is tables[0]:
                    table[key] = {**table.get(key, {}), "ex2_emu_freq": frequency}
    elif frequency == 0:
        # Releases before the table have a switch.
        flash_fwd_sm100.FlashAttentionForwardSm100.enable_ex2_emu = property(lambda _: False, lambda *_: None)
    elif frequency is not None:
        raise SystemExit("expected a release with a table of shares")
    kind = torch.float8_e4m3fn if dtype == "fp8" else torch.bfloat16
    with FakeTensorMode():
        q, k, v = (
            torch.empty(4, 8192, 16, width, dtype=kind, device="cuda")
            for width in (head_dims[0], head_dims[0], head_dims[1])
        )
        interface._flash_attn_fwd(q, k, v, causal=mask == "causal")


def cubin(folder: Path, python: str, release: str, kernel: Kernel, frequency: int | None) -> Path | None:
    """The cubin of a kernel in ``folder``, compiled by ``python`` where it is not there; None where that leaves none."""
    (qk, v), mask, dtype, target = kernel
    out = folder / release / f"{qk}-{v}-{mask}-{dtype}-{target}-{frequency}"
    found = sorted(out.glob("*.cubin"))
    if not found:
        out.mkdir(parents=True, exist_ok=True)
        settings = {
            "FLASH_ATTENTION_ARCH": target, "CUTE_DSL_ARCH": target, "FLASH_ATTENTION_NUM_SMS": str(_SMS), "CUTE_DSL_KEEP": "cubin",
            "CUTE_DSL_KEEP_CUBIN": "1", "CUTE_DSL_DUMP_DIR": str(out), "FLASH_ATTENTION_FAKE_TENSOR": "1",
            "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        }  # fmt: skip
        one = [__file__, "--one", str(qk), str(v), mask, dtype, target, str(frequency)]
        # Releases that launch what they compiled end in an error, for there is no GPU: the cubin is there by then.
        with (out / "log").open("w") as log:
            subprocess.run([python, *one], env={**os.environ, **settings}, check=False, stdout=log, stderr=log)
        found = sorted(out.glob("*.cubin"))
    return found[0] if found else None


def steady(path: Path, release: str, target: str) -> KernelRoles:
    """The loops of a cubin, which the simulator can follow; CodeError and ShapeError otherwise."""
    roles = kernel_roles(kernel_shape(read_binary(path)))
    run_roles(roles, role_costs(load_machine(_MACHINES[target])))
    loops = tuple(replace(role, begin=(), end=()) for role in roles.roles)
    return replace(roles, kernel=f"flash-attn-4 {release}", roles=loops)


def main() -> None:
    """Compile, read, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="for the cubins")
    parser.add_argument("--python", action="append", default=[], metavar="RELEASE=PATH", help="what compiles a release")
    parser.add_argument("--one", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        qk, v, mask, dtype, target, often = arguments.one
        compile_here((int(qk), int(v)), mask, dtype, target, None if often == "None" else int(often))
        return
    pythons = dict(one.partition("=")[::2] for one in arguments.python)
    if not arguments.folder or not pythons.keys() <= RELEASES.keys():
        parser.error(f"expected a folder for the cubins, and releases out of {', '.join(RELEASES)}")
    before = read_loops()
    kept = []
    for release, built in _KERNELS.items():
        for kernel, share, frequency in built:
            head_dims, mask, dtype, target = kernel
            name = loop_name(target, head_dims, mask, dtype, share, release)
            if release not in pythons:
                kept += [(name, before[name])] if name in before else []
                continue
            try:
                path = cubin(Path(arguments.folder), pythons[release], release, kernel, frequency)
                if path is None:
                    print(f"left out: {name}: does not compile")
                else:
                    kept.append((name, steady(path, release, target)))
            except (BinaryError, ShapeError, CodeError) as error:
                print(f"left out: {name}: {error}")
    write_text_atomically(LOOPS, dump_roles(kept))
    print(f"{LOOPS}: {len(kept)} kernels")


if __name__ == "__main__":
    main()
