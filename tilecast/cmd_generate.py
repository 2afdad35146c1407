"""``tilecast generate``, ``inspect`` and ``ship``: variants become files, files become reports."""

from __future__ import annotations

import atexit
import json
import os
import sys
from typing import TYPE_CHECKING

from tilecast import __version__
from tilecast.base.files import check_writable, write_text_atomically

if TYPE_CHECKING:
    from tilecast.model.kernel.workload import Workload


def run_generate(work: Workload, machine: str, family: str | None, variant: str | None, output: str | None) -> str:
    """Write the kernel to ``output`` (None: return its source); returns what to print."""
    from tilecast.codegen.families import template_of
    from tilecast.codegen.generate import generate
    from tilecast.model.families import find_family, native_family, parse_variant
    from tilecast.model.machine.machine import load_machine
    from tilecast.model.search.best import best

    if output is not None:
        check_writable(output)
    chip = load_machine(machine)
    chosen = find_family(family) if family else native_family(chip)
    knobs = None
    if variant:
        # Knobs that are not named come from the variant that would be chosen, not from the class's defaults.
        knobs = parse_variant(variant, best(work, chip, chosen.name).variant)
    made = generate(work, chip, chosen, knobs, __version__)
    if output is None:
        return made.source.rstrip("\n")
    write_text_atomically(output, made.source)
    forecast = made.prediction
    targets = template_of(chosen).targets(made.variant, chip)
    return (
        f"{output}: {chosen.name} for {work.label()} on {chip.name}\n"
        f"  variant   {made.header['variant']}\n"
        f"  forecast  {forecast.tflops:.0f} TFLOP/s, {forecast.time_ms:.4g} ms at {forecast.clock_mhz:.0f} MHz (sustained), "
        f"bound by {forecast.binding.as_dict()['name']}\n"
        f"  targets   {', '.join(targets)}: tilecast inspect {output} --arch {targets[0]}"
    )


def run_variants(work: Workload, machine: str, family: str | None) -> str:
    """Every expressible variant of a family, one a line, with its forecast, fastest first."""
    from tilecast.model.chip.evaluate import PredictError
    from tilecast.model.families import find_family, native_family
    from tilecast.model.forecast.predict import predict
    from tilecast.model.kernel.variant import variant_text
    from tilecast.model.machine.machine import load_machine
    from tilecast.model.search.best import search_space

    chip = load_machine(machine)
    chosen = find_family(family) if family else native_family(chip)
    found = search_space(work, chip, chosen.name)
    if not found.written:
        raise PredictError(f"{chosen.name} cannot be written for {work.label()} on {chip.name}: {found.refusal}")
    space = found.variants
    ranked = sorted(
        ((predict(work, chip, variant, interval=False).tflops, variant_text(variant)) for variant in space), reverse=True
    )  # fmt: skip
    lines = [f"{tflops:8.0f} TFLOP/s  {text}" for tflops, text in ranked]
    return "\n".join(
        [f"{len(space)} variants of {chosen.name} for {work.label()} on {chip.name}, by forecast:", *lines]
    )


def run_inspect(file: str, arch: str, dtype: str, as_json: bool) -> str:
    """Compile, disassemble, compare with the forecast."""
    from tilecast.codegen.compiler.inspection import as_dict, as_text, inspect

    atexit.register(_silence)
    report = inspect(file, arch, dtype)
    return json.dumps(as_dict(report), indent=2) if as_json else as_text(report)


def _silence() -> None:
    """Triton's bindings report their own lost references when the interpreter ends; nobody who reads it can mend them."""
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def run_ship() -> str:
    """Regenerate the shipped kernels in the source tree."""
    from tilecast.codegen.ship import KERNELS, write

    changed = write(__version__)
    if not changed:
        return f"{KERNELS}: up to date"
    return "\n".join([f"{KERNELS}: wrote {len(changed)} files", *(f"  {path}" for path in changed)])
