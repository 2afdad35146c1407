"""Instruction fetch: how fast code runs by its length, and by how many warpgroups run copies of their own."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tilecast.validation.lab.calibrate.cases import Case, Reading, repeats
from tilecast.validation.lab.calibrate.gpu import Gpu, Launch

_LENGTHS = (64, 256, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192)
_BLOCK = 64
#: (SMs, warpgroups, instructions) that the facts rest on.
_QUICK = {("all", 2, n) for n in (4096, 5120)} | {("all apart", 2, n) for n in (1024, 1536, 4096, 8192)} | {
    ("all apart", 3, n) for n in (1024, 2560, 5120)
}  # fmt: skip


def _prelude(chains: int) -> str:
    """``BLOCK(x, k)``: adds on ``chains`` chains in one statement, which compiles much faster than as many statements."""
    lines = "".join(f"add.rn.f32 %{i % chains}, %{i % chains}, %16; " for i in range(_BLOCK))
    outputs = ", ".join(f'"+f"(x[{i}])' for i in range(16))
    return f'#define BLOCK(x, k) asm volatile("{lines}" : {outputs} : "f"(k));\n'


def _measure(gpu: Gpu, case: Case) -> Mapping[str, Reading]:
    length, groups = int(str(case.defines["LENGTH"])), int(str(case.defines["WARPGROUPS"]))
    rounds = max(8, 131072 // length)

    def once() -> dict[str, float]:
        grid = 1 if case.params["sms"] == "one" else gpu.identity.sm_count
        found, _ = gpu.records(case, Launch(grid, 128 * groups, rounds=rounds))
        cycles = float(np.median((found[:, :, 1] - found[:, :, 0]).max(axis=1)))
        # Cycles of a sub-partition for an instruction of each of its warps.
        return {"cycles": cycles / (rounds * length * groups)}

    return repeats(5, once, {"cycles": "cycles/inst"})


def _case(length: int, groups: int, sms: str, shared: bool = False, chains: int = 16) -> Case:
    params: dict[str, int | float | str | bool] = {
        "instructions": length, "warpgroups": groups, "shared": shared, "sms": sms, "chains": chains,
    }  # fmt: skip
    return Case(
        "code", "length", params, "code_size.cu", _measure, _prelude(chains),
        {"LENGTH": length, "WARPGROUPS": groups, "SHARED": int(shared), "APART": int(sms == "all apart")},
        quick=chains == 16 and not shared and (sms, groups, length) in _QUICK,
    )  # fmt: skip


def cases() -> list[Case]:
    """Lengths to 8192 instructions; one to three warpgroups, with copies of their own or one for all; SMs in step or
    apart; and code that waits for its own results (one or two chains), which may hide the fetch."""
    found = [
        _case(length, groups, sms) for sms in ("all", "all apart", "one") for groups in (1, 2, 3) for length in _LENGTHS
    ]
    found += [_case(length, groups, "all", shared=True) for groups in (2, 3) for length in _LENGTHS]
    found += [
        _case(length, groups, "all apart", chains=chains)
        for chains in (1, 2, 4) for groups in (1, 2, 3) for length in _LENGTHS if length >= 512
    ]  # fmt: skip
    return found
