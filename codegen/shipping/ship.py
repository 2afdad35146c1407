"""The kernels that ship: from `shipped.toml` to the files of `kernels/generated`, their index and their page.

Everything under `kernels/generated` and `kernels/README.md` comes from here, byte for byte; a test compares.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import getsource
from pathlib import Path

from tilecast.codegen.backward import generate_backward
from tilecast.codegen.compiler import assembling
from tilecast.codegen.gemm.ship import gemm_files, gemm_rows
from tilecast.codegen.generate import forecast_of, generate
from tilecast.codegen.hopper import narrowing
from tilecast.codegen.portable.append import generate_append
from tilecast.codegen.portable.copy import generate_copy_rows
from tilecast.codegen.portable.quantize import generate_quantize
from tilecast.codegen.portable.short import Parts, generate_short
from tilecast.codegen.render import format_source
from tilecast.codegen.serving import generate_serving
from tilecast.codegen.shipping.page import forward_row, measured, page, purpose_of_rows, row
from tilecast.model.append import parse_append
from tilecast.model.backward import find_backward, parse_backward
from tilecast.model.families import find_family, parse_variant
from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.variants.append import AppendVariant
from tilecast.model.kernel.variants.fa2 import Fa2Variant
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.serving import find_serving, parse_serving

LIST = Path(__file__).parents[1] / "shipped.toml"
_ROOT = Path(__file__).resolve().parents[2]
KERNELS = _ROOT / "kernels"
#: Shapes of the benchmarks of the FlashAttention papers: 16k tokens in all, hidden size 2048 (16 heads where 2048 does
#: not divide).
_TOKENS, _HIDDEN = 16384, 2048
_WINDOW = (1024, 0)
_REGISTRY = (
    "head_dim_qk",
    "head_dim_v",
    "head_dim_min",
    "mask",
    "capability",
    "preference",
    "seqlen_q_min",
    "seqlen_q_max",
    "seqlen_k_max",
    "rows_max",
    "taller",
    "triton_min",
    "cache",
    "dtypes",
)


@dataclass(frozen=True, slots=True)
class Shipped:
    """One row of `shipped.toml`."""

    module: str
    family: str
    machine: str
    variant: str
    workload: Workload
    #: What the registry has to know, as the index holds it.
    facts: dict[str, object]
    #: Of kernels of short sequences, how keys are parted; (): all are one part.
    parts: Parts = ()


def read_list(path: Path = LIST) -> tuple[Shipped, ...]:
    """The forward kernels of the list, in its order."""
    return _listed(path, "kernel")


def read_short_list(path: Path = LIST) -> tuple[Shipped, ...]:
    """The forward kernels of the list for short sequences, in its order."""
    return _listed(path, "short")


def read_backward_list(path: Path = LIST) -> tuple[Shipped, ...]:
    """The backward passes of the list, in its order."""
    return _listed(path, "backward")


def read_serving_list(path: Path = LIST) -> tuple[Shipped, ...]:
    """The serving kernels of the list, in its order."""
    return _listed(path, "serving")


def read_append_list(path: Path = LIST) -> tuple[Shipped, ...]:
    """The kernels of the list that append to caches, in its order."""
    return _listed(path, "append")


def read_quantize_list(path: Path = LIST) -> tuple[Shipped, ...]:
    """The kernels of the list that bring tensors to e4m3, in its order."""
    return _listed(path, "quantize")


def read_copy_list(path: Path = LIST) -> tuple[Shipped, ...]:
    """The kernels of the list that copy rows for others, in its order."""
    return _listed(path, "copy")


def read_e4m3_list(path: Path = LIST) -> tuple[Shipped, ...]:
    """The forward kernels of the list that take e4m3, in its order."""
    return _listed(path, "e4m3")


def _listed(path: Path, kind: str) -> tuple[Shipped, ...]:
    """The kernels of a kind of the list in ``path``, in its order."""
    return tuple(_shipped(entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))[kind])


def _window(length: int) -> tuple[int, int]:
    """The window of a kernel's workload: of fewer keys one that still hides some."""
    return min(_WINDOW[0], length // 2), _WINDOW[1]


def _shipped(row: dict[str, object]) -> Shipped:
    dim, dim_v = int(str(row["head_dim_qk"])), int(str(row["head_dim_v"]))
    length, mask = int(str(row["seqlen"])), str(row["mask"])
    heads = _HIDDEN // dim if _HIDDEN % dim == 0 else 16
    # Serving kernels are for groups of 4 query heads, `queries` of them a sequence.
    queries, group = (int(str(row["queries"])), 4) if "queries" in row else (length, 1)
    if row["family"] == "hopper_mla" or "latent=1" in str(row["variant"]).split(","):
        heads, group = 1, 64
    work = Workload(max(1, _TOKENS // length), heads * group, heads, queries, length, dim, dim_v, mask,
                    _window(length) if mask == "window" else None, str(row.get("dtype", "bf16")))  # fmt: skip
    facts = {key: row[key] for key in _REGISTRY if key in row}
    listed = row.get("parts", [])
    assert isinstance(listed, list)
    parts = tuple((least, fewest, keys, most) for least, fewest, keys, most in listed)
    return Shipped(str(row["module"]), str(row["family"]), str(row["machine"]), str(row["variant"]), work, facts, parts)


def files(version: str) -> Iterator[tuple[Path, str]]:
    """(path below `KERNELS`, text) of everything that ships; kernels first, then index and page."""
    index: list[dict[str, object]] = []
    lines: list[str] = []
    timed = measured()
    for kernel in (*read_list(), *read_e4m3_list()):
        family = find_family(kernel.family)
        machine = load_machine(kernel.machine)
        variant = parse_variant(f"family={family.name},{kernel.variant}")
        narrower = "head_dim_min" in kernel.facts
        made = generate(kernel.workload, machine, family, variant, version, compiler=None, narrower=narrower)
        yield Path("generated") / f"{kernel.module}.py", made.source
        dtypes = ["fp8"] if kernel.workload.dtype == "fp8" else ["bf16", "fp16"]
        index.append(
            {"module": kernel.module, "family": kernel.family, "dtypes": dtypes, **kernel.facts,
             "forecast": {"workload": kernel.workload.label(), **forecast_of(made.prediction)}}
        )  # fmt: skip
        short = predict(kernel.workload, machine, variant, clock="short", interval=False, compiler=None)
        lines.append(forward_row(kernel, short, timed))
    backward = []
    for kernel in read_backward_list():
        given = parse_backward(kernel.variant, find_backward(kernel.family).variant())
        yield (
            Path("generated") / f"{kernel.module}.py",
            generate_backward(kernel.workload, load_machine(kernel.machine), given, version).source,
        )
        index.append(
            {"module": kernel.module, "family": kernel.family, "pass": "bwd", "dtypes": ["bf16", "fp16"], **kernel.facts}
        )  # fmt: skip
        backward.append(row(kernel))
    serving = []
    for kernel in read_serving_list():
        given_serving = parse_serving(kernel.variant, find_serving(kernel.family).variant())
        made_serving = generate_serving(kernel.workload, load_machine(kernel.machine), given_serving, version)
        yield Path("generated") / f"{kernel.module}.py", made_serving.source
        facts = {**kernel.facts, "mask": "window"}
        index.append(
            {"module": kernel.module, "family": kernel.family, "pass": "serve", "dtypes": ["bf16", "fp16"], **facts}
        )
        serving.append(row(kernel, purpose_of_rows(kernel)))
    short_ones = []
    for kernel in read_short_list():
        chosen = parse_variant(f"family=fa2,{kernel.variant}")
        assert isinstance(chosen, Fa2Variant)
        yield (
            Path("generated") / f"{kernel.module}.py",
            generate_short(
                kernel.workload,
                load_machine(kernel.machine),
                chosen,
                version,
                narrower="head_dim_min" in kernel.facts,
                parts=kernel.parts,
            ),
        )
        index.append(
            {"module": kernel.module, "family": kernel.family, "pass": "short", "dtypes": ["bf16", "fp16"], **kernel.facts, "mask": "window"}
        )  # fmt: skip
        short_ones.append(row(kernel, f"{purpose_of_rows(kernel)} on up to {kernel.facts['seqlen_k_max']} keys"))
    for kernel in read_append_list():
        given_append = parse_append(kernel.variant, AppendVariant())
        # No index has them: there is one for each kind of cache, on every device.
        made_append = generate_append(kernel.workload, load_machine(kernel.machine), given_append, version)
        yield Path("generated") / f"{kernel.module}.py", made_append.source
        cache = "e4m3" if given_append.cache_bits == 8 else "16-bit"
        serving.append(row(kernel, f"any head_dim, appends to a {cache} cache"))
    for kernel in read_quantize_list():  # nor this, which is one for all
        yield (
            Path("generated") / f"{kernel.module}.py",
            generate_quantize(kernel.workload, load_machine(kernel.machine), version),
        )
    for kernel in read_copy_list():  # and this
        yield (
            Path("generated") / f"{kernel.module}.py",
            generate_copy_rows(kernel.workload, load_machine(kernel.machine), version),
        )
    yield from gemm_files(version)
    yield Path("generated") / "index.json", json.dumps(index, indent=1) + "\n"
    yield Path("generated") / "__init__.py", format_source('"""Generated kernels: `make kernels` writes them; nothing here is edited by hand."""\n')  # fmt: skip
    yield from (
        (Path(f"{source.__name__.rpartition('.')[2]}.py"), getsource(source)) for source in (narrowing, assembling)
    )
    yield Path("README.md"), page(lines, short_ones, backward, serving, gemm_rows())


def write(version: str, root: Path = KERNELS) -> tuple[Path, ...]:
    """Write everything that ships below ``root`` and remove generated files that no longer do; returns what changed.

    Raises VariantError outside a source tree, where the measurements that the page shows are not.
    """
    if not (_ROOT / "pyproject.toml").is_file():
        raise VariantError(
            f"ship: expected a source tree of tilecast, got the installed package in {_ROOT}: clone it first"
        )
    changed = []
    wanted = dict(files(version))
    (root / "generated").mkdir(parents=True, exist_ok=True)
    for path, text in wanted.items():
        target = root / path
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")
            changed.append(path)
    for stale in sorted((root / "generated").glob("*.py")):
        if stale.relative_to(root) not in wanted:
            stale.unlink()
            changed.append(stale.relative_to(root))
    return tuple(changed)
