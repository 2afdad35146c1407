"""Every GEMM kernel that the search may pick, timed on the GPU at hand: what the forecast is held against.

    python tools/h200_gemm_variants.py OUT.csv [--rounds 9] [--ks 64,256,1024] [--sizes 8192x8192,4096x4096] [--c bf16] [--more]

All variants of `gemm_hopper`'s space that can be written, at every size and k, in place; --more adds kernels with one stage less
and with other orders of tiles.  A kernel whose result is wrong is named and not timed.  Kernels are compiled by all cores first.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from h200_gemm import FIELDS, measure, tensors
from measuring import csv_table, evicting

from tilecast.base.module_file import module_of
from tilecast.codegen.gemm.generate import generate_gemm
from tilecast.model.gemm.families import GEMM_FAMILIES, writable
from tilecast.model.gemm.variant import GemmVariant, gemm_variant_text
from tilecast.model.gemm.workload import Gemm
from tilecast.model.machine.machine import load_machine

KS = (64, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)


def variants(wide: str, more: bool) -> list[GemmVariant]:
    """What is timed, for C and D of ``wide``."""
    chip, problem = load_machine("h200-sxm"), Gemm(8192, 8192, 1024, c_dtype=wide, d_dtype=wide)
    deepest = GEMM_FAMILIES["gemm_hopper"].space(problem, chip)
    space = list(deepest)
    if more:
        space += [replace(v, stages=v.stages - 1) for v in deepest if v.stages > 2]
        space += [replace(v, group_m=rows) for v in deepest for rows in (4, 16, 32)]
    return [v for v in dict.fromkeys(space) if writable(v, problem, chip).legal]


def kernel_of(variant: GemmVariant, wide: str, folder: Path) -> Any:
    """The module of a variant's kernel; written once."""
    file = folder / ("k" + "".join(c if c.isalnum() else "_" for c in gemm_variant_text(variant) + wide) + ".py")
    if not file.is_file():
        made = generate_gemm(Gemm(8192, 8192, 512, c_dtype=wide, d_dtype=wide), load_machine("h200-sxm"), variant)
        file.write_text(made.source, encoding="utf-8")
    return module_of(file)


def compile_one(task: tuple[GemmVariant, str, str]) -> str:
    """Writes and compiles a kernel in a process of its own; what went wrong, if something did."""
    import torch

    variant, wide, folder = task
    try:
        module = kernel_of(variant, wide, Path(folder))
        a, b, c, d = tensors((512, 512, 256, wide, True))
        module.launch(a, b, c, d)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{gemm_variant_text(variant)}: {type(error).__name__}: {str(error)[:300]}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ks", default=",".join(map(str, KS)))
    parser.add_argument("--sizes", default="8192x8192")
    parser.add_argument("--c", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--more", action="store_true")
    given = parser.parse_args()
    import torch

    chosen = variants(given.c, given.more)
    with tempfile.TemporaryDirectory() as folder, csv_table(given.out, FIELDS) as add:
        tasks = [(v, given.c, folder) for v in chosen]
        with multiprocessing.get_context("spawn").Pool(min(16, os.cpu_count() or 1)) as pool:
            wrong = [text for text in pool.imap_unordered(compile_one, tasks, chunksize=1) if text]
        print(*wrong, sep="\n", flush=True)
        evict = evicting()
        names = {gemm_variant_text(v): v for v in chosen}
        names = {text: v for text, v in names.items() if not any(line.startswith(text + ":") for line in wrong)}
        modules = {text: kernel_of(v, given.c, Path(folder)) for text, v in names.items()}
        for size in given.sizes.split(","):
            m, n = (int(part) for part in size.split("x"))
            for k in map(int, given.ks.split(",")):
                torch.manual_seed(k)
                shape = (m, n, k, given.c, True)
                a, b, c, d = tensors(shape)
                calls: dict[str, tuple[str, Any]] = {
                    text: (text, lambda run=module.launch, a=a, b=b, c=c, d=d: run(a, b, c, d)) for text, module in modules.items()
                }  # fmt: skip
                if given.c == "bf16":
                    calls["torch.addmm"] = ("", lambda a=a, b=b, c=c, d=d: torch.addmm(c, a, b, out=d))
                rows = measure(shape, calls, (a, b, c, d), given.rounds, evict)
                for row in rows:
                    add({**row, "subject": row["subject"] if not row["variant"] else "variant"})
                best = min(rows, key=lambda row: row["us"] if row["variant"] else 1e30)
                print(m, n, k, best["us"], best["against_torch"], best["variant"], flush=True)


if __name__ == "__main__":
    main()
