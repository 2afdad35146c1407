"""The GEMM kernels that ship: from `shipped.toml` to their files, their index and their rows of the page."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tilecast.codegen.gemm.copies import COPY, generate_copy
from tilecast.codegen.gemm.generate import generate_gemm
from tilecast.model.gemm.families import GEMM_FAMILIES
from tilecast.model.gemm.forecast import forecast_gemm
from tilecast.model.gemm.variant import GemmVariant, parse_gemm_variant
from tilecast.model.gemm.workload import OUT_DTYPES, Gemm
from tilecast.model.machine.machine import load_machine

LIST = Path(__file__).parents[1] / "shipped.toml"
#: What forecasts of shipped kernels are for.
_SIZE = 8192
#: What kernels are kept for (kernels/gemm/registry.py), in words.
_USES = {
    "one": "one row or column",
    "one, by columns": "one row times a matrix by columns",
    "few": "few rows or columns",
    "small": "few tiles",
    "parts": "tiles that leave SMs idle",
}
_REGISTRY = ("capability", "k_min", "k_max", "gpu", "use", "preference")


@dataclass(frozen=True, slots=True)
class ShippedGemm:
    """One row of the list."""

    module: str
    machine: str
    variant: GemmVariant
    workload: Gemm
    #: What the registry has to know, as the index holds it.
    facts: dict[str, object]

    @property
    def parted(self) -> bool:
        """Whether it leaves sums of parts of k, as the portable kernels can too."""
        return self.facts.get("use") == "parts"

    @property
    def family(self) -> str:
        """Of its variant."""
        return self.variant.family


def read_gemm_list(path: Path = LIST) -> tuple[ShippedGemm, ...]:
    """The GEMM kernels of the list, in its order."""
    out = []
    for row in tomllib.loads(path.read_text(encoding="utf-8"))["gemm"]:
        text = str(row["variant"])
        family = next(name for name in GEMM_FAMILIES if f"family={name}," in text)
        variant = parse_gemm_variant(text, GemmVariant(family))
        work = Gemm(_SIZE, _SIZE, int(row["k"]), c_dtype=str(row["c_dtype"]))
        facts = {key: row[key] for key in _REGISTRY if key in row}
        if "use" in row or family != "gemm_triton":
            facts["tile"] = [variant.tile_m, variant.tile_n]
        if family != "gemm_triton":
            facts["accumulators"] = variant.accumulators
        out.append(ShippedGemm(str(row["module"]), str(row["machine"]), variant, work, facts))
    return tuple(out)


def gemm_files(version: str) -> Iterator[tuple[Path, str]]:
    """(path below `kernels`, text) of every GEMM kernel, then of their index."""
    index = []
    for kernel in read_gemm_list():
        made = generate_gemm(
            kernel.workload, load_machine(kernel.machine), kernel.variant, version, parted=kernel.parted
        )
        yield Path("generated") / f"{kernel.module}.py", made.source
        portable = kernel.family == "gemm_triton"
        widest = 4 if portable or kernel.parted else OUT_DTYPES[kernel.workload.d_dtype]
        index.append({"module": kernel.module, "family": kernel.family, "c_bytes": widest, "any_strides": portable, **kernel.facts})  # fmt: skip
    yield Path("generated") / f"{COPY}.py", generate_copy(version)
    yield Path("generated") / "gemm.json", json.dumps(index, indent=1) + "\n"


def gemm_rows() -> list[str]:
    """Rows of the page: file, for, compute capability, forecast of a short run."""
    rows = []
    for kernel in read_gemm_list():
        low, high = kernel.facts.get("k_min"), kernel.facts.get("k_max")
        ks = f"k from {low}" if low else "any k" if not high else ""
        ks += f"{' ' if ks else 'k '}up to {high}" if high else ""
        ks = _USES.get(str(kernel.facts.get("use")), ks)
        c = (
            "any C"
            if kernel.family == "gemm_triton" or kernel.parted
            else f"C of {8 * OUT_DTYPES[kernel.workload.d_dtype]} bits"
        )
        capability = kernel.facts["capability"]
        if isinstance(capability, dict):
            devices = ".".join(map(str, capability["min"])) + " and newer"
        else:
            assert isinstance(capability, list)
            devices = ", ".join(".".join(map(str, pair)) for pair in capability)
        if gpu := kernel.facts.get("gpu"):
            devices += f", {gpu}"
        found = forecast_gemm(kernel.workload, load_machine(kernel.machine), kernel.variant, clock="short")
        rows.append(
            f"| `{kernel.module}.py` | {ks}, {c} | {devices} | {kernel.workload.k} | {found.run.tflops:.0f} on {kernel.machine} |"
        )
    return rows
