"""Cross-compile FlashAttention-4's forward kernels for Blackwell, no GPU needed, and keep their steady loops: data/published/fa4_loops.txt.

    pip install flash-attn-4==4.0.0b36 "nvidia-cutlass-dsl[cu13]==4.8.1"
    python tools/fa4_loops.py FOLDER            # for the cubins; some ten seconds each, those that are there are kept

Kernels that the reader refuses are named and left out.  The share of emulated exponentials is the authors' own but where a
published row states another one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
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
from tilecast.validation.published.loops import LOOPS, loop_name

#: Head dimensions, masks, dtypes and targets; `interface.py` of the package takes another kernel for 256.
_KERNELS = tuple(
    product(((64, 64), (128, 128), (192, 128)), ("none", "causal"), ("bf16", "fp8"), ("sm_100a", "sm_103a"))
)
#: Kernel, the share that a row states, and how many exponentials there are to one that is emulated (0: none; None: as shipped).
_STATED = (
    (((64, 64), "none", "bf16", "sm_100a"), 0.0, 0),
    (((64, 64), "none", "fp8", "sm_100a"), 0.0, 0),
    (((128, 128), "causal", "fp8", "sm_100a"), 0.125, 16),
    (((128, 128), "causal", "fp8", "sm_100a"), 0.25, None),
)
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
    from flash_attn.cute import flash_fwd_sm100, interface
    from torch._subclasses.fake_tensor import FakeTensorMode

    if frequency is not None:
        for table in (flash_fwd_sm100._TUNING_CONFIG, flash_fwd_sm100._FP8_TUNING_CONFIG):
            for key in product((False, True), (False, True), (head_dims[0],), (target == "sm_103a",)):
                if key in table or table is flash_fwd_sm100._TUNING_CONFIG:
                    table[key] = {**table.get(key, {}), "ex2_emu_freq": frequency}
    kind = torch.float8_e4m3fn if dtype == "fp8" else torch.bfloat16
    with FakeTensorMode():
        q, k, v = (
            torch.empty(4, 8192, 16, width, dtype=kind, device="cuda")
            for width in (head_dims[0], head_dims[0], head_dims[1])
        )
        interface._flash_attn_fwd(q, k, v, causal=mask == "causal")


def cubin(folder: Path, kernel: tuple[tuple[int, int], str, str, str], frequency: int | None) -> Path:
    """The cubin of a kernel in ``folder``, compiled by a process of its own where it is not there."""
    (qk, v), mask, dtype, target = kernel
    out = folder / f"{qk}-{v}-{mask}-{dtype}-{target}-{frequency}"
    found = sorted(out.glob("*.cubin"))
    if not found:
        out.mkdir(parents=True, exist_ok=True)
        settings = {
            "FLASH_ATTENTION_ARCH": target, "CUTE_DSL_ARCH": target, "FLASH_ATTENTION_NUM_SMS": str(_SMS), "CUTE_DSL_KEEP": "cubin",
            "CUTE_DSL_KEEP_CUBIN": "1", "CUTE_DSL_DUMP_DIR": str(out), "FLASH_ATTENTION_FAKE_TENSOR": "1",
        }  # fmt: skip
        one = ["--one", str(qk), str(v), mask, dtype, target, str(frequency)]
        subprocess.run([sys.executable, __file__, *one], env={**os.environ, **settings}, check=True)
        found = sorted(out.glob("*.cubin"))
    return found[0]


def steady(path: Path, target: str) -> KernelRoles:
    """The loops of a cubin, which the simulator can follow; CodeError and ShapeError otherwise."""
    roles = kernel_roles(kernel_shape(read_binary(path)))
    run_roles(roles, role_costs(load_machine(_MACHINES[target])))
    loops = tuple(replace(role, begin=(), end=()) for role in roles.roles)
    return replace(roles, kernel=f"flash-attn-4 {version('flash-attn-4')}", roles=loops)


def main() -> None:
    """Compile, read, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="for the cubins")
    parser.add_argument("--one", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        qk, v, mask, dtype, target, often = arguments.one
        compile_here((int(qk), int(v)), mask, dtype, target, None if often == "None" else int(often))
        return
    if not arguments.folder:
        parser.error("expected a folder for the cubins")
    kept = []
    for kernel, share, frequency in (*((kernel, None, None) for kernel in _KERNELS), *_STATED):
        head_dims, mask, dtype, target = kernel
        name = loop_name(target, head_dims, mask, dtype, share)
        try:
            kept.append((name, steady(cubin(Path(arguments.folder), kernel, frequency), target)))
        except (BinaryError, ShapeError, CodeError) as error:
            print(f"left out: {name}: {error}")
    write_text_atomically(LOOPS, dump_roles(kept))
    print(f"{LOOPS}: {len(kept)} kernels")


if __name__ == "__main__":
    main()
