"""``tilecast generate``, ``inspect`` and ``ship``: variants become files, files become reports."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tilecast import __version__
from tilecast.base.files import check_writable, write_text_atomically

if TYPE_CHECKING:
    from tilecast.model.kernel.workload import Workload


def run_generate(work: Workload, machine: str, family: str | None, variant: str | None, output: str | None) -> str:
    """Write the kernel to ``output`` (None: return its source); returns what to print."""
    from tilecast.codegen.families import find_family, native_kernel_family
    from tilecast.codegen.generate import generate
    from tilecast.codegen.search import best_expressible
    from tilecast.model.kernel.variant import parse_variant
    from tilecast.model.machine.machine import load_machine

    if output is not None:
        check_writable(output)
    chip = load_machine(machine)
    chosen = find_family(family or native_kernel_family(chip))
    knobs = None
    if variant:
        text = variant if "family=" in variant else f"family={chosen.model_family},{variant}"
        # Knobs that are not named come from the variant that would be chosen, not from the class's defaults.
        base = best_expressible(chosen, work, chip)
        knobs = parse_variant(text, base if f"family={chosen.model_family}" in text else None)
    made = generate(work, chip, chosen, knobs, __version__)
    if output is None:
        return made.source.rstrip("\n")
    write_text_atomically(output, made.source)
    forecast = made.prediction
    targets = chosen.targets(made.variant, chip)
    return (
        f"{output}: {chosen.name} for {work.label()} on {chip.name}\n"
        f"  variant   {made.header['variant']}\n"
        f"  forecast  {forecast.tflops:.0f} TFLOP/s, {forecast.time_ms:.4g} ms at {forecast.clock_mhz:.0f} MHz (sustained), "
        f"bound by {forecast.binding['name']}\n"
        f"  targets   {', '.join(targets)}: tilecast inspect {output} --arch {targets[0]}"
    )


def run_variants(work: Workload, machine: str, family: str | None) -> str:
    """Every expressible variant of a family, one a line, with its forecast, fastest first."""
    from tilecast.codegen.families import find_family, native_kernel_family
    from tilecast.codegen.search import first_obstacle, search_space
    from tilecast.model.forecast.predict import PredictError, predict
    from tilecast.model.kernel.variant import variant_text
    from tilecast.model.machine.machine import load_machine

    chip = load_machine(machine)
    chosen = find_family(family or native_kernel_family(chip))
    space = search_space(chosen, work, chip)
    if not space:
        reason = first_obstacle(chosen, work, chip).sentence()
        raise PredictError(f"{chosen.name} cannot be written for {work.label()} on {chip.name}: {reason}")
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

    report = inspect(file, arch, dtype)
    return json.dumps(as_dict(report), indent=2) if as_json else as_text(report)


def run_ship() -> str:
    """Regenerate the shipped kernels in the source tree."""
    from tilecast.codegen.ship import KERNELS, write

    changed = write(__version__)
    if not changed:
        return f"{KERNELS}: up to date"
    return "\n".join([f"{KERNELS}: wrote {len(changed)} files", *(f"  {path}" for path in changed)])
