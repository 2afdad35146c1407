"""Instruction fetch: how fast code runs by its length, and by how many warpgroups run copies of their own."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tilecast.validation.calibrate.cases import Case, Reading, repeats
from tilecast.validation.calibrate.gpu import Gpu, Launch

_LENGTHS = (64, 128, 192, 256, 384, 512, 640, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
_BLOCK = 64


def _prelude() -> str:
    """``BLOCK(x, k)``: adds on 16 chains in one statement, which compiles much faster than as many statements."""
    lines = "".join(f"add.rn.f32 %{i % 16}, %{i % 16}, %16; " for i in range(_BLOCK))
    outputs = ", ".join(f'"+f"(x[{i}])' for i in range(16))
    return f'#define BLOCK(x, k) asm volatile("{lines}" : {outputs} : "f"(k));\n'


def _measure(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    length, groups = int(str(case.defines["LENGTH"])), int(str(case.defines["WARPGROUPS"]))
    rounds = max(4, 65536 // length)

    def once() -> dict[str, float]:
        found, _ = gpu.records(case, Launch(gpu.identity.sm_count, 128 * groups, rounds=rounds))
        cycles = float(np.median((found[:, :, 1] - found[:, :, 0]).max(axis=1)))
        # Cycles of a sub-partition for an instruction of each of its warps.
        return {"cycles": cycles / (rounds * length * groups)}

    return repeats(5, once, {"cycles": "cycles/inst"})


def cases() -> list[Case]:
    """Lengths to 16384 instructions; one to three warpgroups, with copies of their own or one for all."""
    found = []
    for groups in (1, 2, 3):
        for shared in (0, 1) if groups > 1 else (0,):
            for length in _LENGTHS:
                found.append(
                    Case(
                        "code", "length", {"instructions": length, "warpgroups": groups, "shared": bool(shared)},
                        "code_size.cu", _measure, _prelude(), defines={"LENGTH": length, "WARPGROUPS": groups, "SHARED": shared},
                        quick=groups == 2 and length in (256, 1024, 4096, 8192),
                    )
                )  # fmt: skip
    return found
