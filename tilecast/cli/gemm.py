"""The verb about matrix products: gemm."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilecast.cli.workload_options import AsJson, Changes, Clock, check_knobs, takes_workload
from tilecast.model.gemm.variant import FAMILY_NAMES
from tilecast.model.machine.machine import Machine

if TYPE_CHECKING:
    from tilecast.model.gemm.workload import Gemm

app = typer.Typer()
_PROBLEM = "Problem"
_OTHER = "bf16, fp16 or fp32"
#: The first is the default.
_LEVELS = ("fluid", "code")


def _size(name: str, text: str) -> Any:
    return Annotated[int, typer.Option(name, help=text, rich_help_panel=_PROBLEM)]


@app.command(rich_help_panel="Forecast", epilog="Example: tilecast gemm h200 --m 8192 --n 8192 --k 256")
@takes_workload
def gemm(
    machine: Machine,
    changes: Changes,
    clock: Clock,
    m: _size("--m", "Rows of A, C and D."),  # type: ignore[valid-type]
    n: _size("--n", "Columns of B, C and D."),  # type: ignore[valid-type]
    k: _size("--k", "Columns of A, rows of B."),  # type: ignore[valid-type]
    dtype: Annotated[
        str, typer.Option("--dtype", help="Of A and B: bf16, fp16 or fp8.", rich_help_panel=_PROBLEM)
    ] = "bf16",
    c_dtype: Annotated[
        str | None, typer.Option("--c-dtype", help=f"Of C: {_OTHER} (default: as A's).", rich_help_panel=_PROBLEM)
    ] = None,
    d_dtype: Annotated[
        str | None, typer.Option("--d-dtype", help=f"Of D: {_OTHER} (default: as C's).", rich_help_panel=_PROBLEM)
    ] = None,
    alpha: Annotated[float, typer.Option("--alpha", help="Factor of A B.", rich_help_panel=_PROBLEM)] = 1.0,
    beta: Annotated[
        float, typer.Option("--beta", help="Factor of C; 0: C is not read.", rich_help_panel=_PROBLEM)
    ] = 1.0,
    in_place: Annotated[bool, typer.Option("--in-place", help="Write D over C.", rich_help_panel=_PROBLEM)] = False,
    family: Annotated[
        str | None, typer.Option("--family", help=f"{', '.join(FAMILY_NAMES)} (default: the machine's own).")
    ] = None,
    variant: Annotated[
        str | None, typer.Option("--variant", help="Kernel knobs, e.g. accumulators=1,tile_n=256 (default: the best).")
    ] = None,
    by_k: Annotated[
        bool, typer.Option("--by-k", help="What the second accumulator is worth at k from 64 to 8192.")
    ] = False,
    level: Annotated[
        str,
        typer.Option(
            "--level",
            help="fluid: before compilation. code: compile the kernel (no GPU needed) and forecast from its machine code.",
        ),
    ] = "fluid",
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="Also write the kernel, as one self-contained file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Forecast D = alpha A B + beta C: time, TFLOP/s, GB/s, what binds, and what a second accumulator is worth."""
    from tilecast.base.files import check_writable
    from tilecast.model.chip.evaluate import PredictError
    from tilecast.model.gemm.families import find_gemm_family, native_gemm_family
    from tilecast.model.gemm.workload import Gemm
    from tilecast.model.kernel.verdict import VariantError
    from tilecast.model.kernel.workload import WorkloadError

    if output is not None:
        check_writable(output)
    check_knobs(variant)
    if level not in _LEVELS:
        raise PredictError(f"--level: expected {' or '.join(_LEVELS)}, got '{level}'")
    for option, given_dtype in (("--c-dtype", c_dtype), ("--d-dtype", d_dtype)):
        if given_dtype == "":
            raise WorkloadError(f"{option}: expected {_OTHER}, got ''")
    problem = Gemm(m, n, k, dtype, c_dtype or "", d_dtype or "", alpha, beta, in_place)
    chip = changes.of(machine)
    name = (find_gemm_family(family) if family is not None else native_gemm_family(chip)).name
    if by_k:
        if variant is not None:
            raise VariantError("--by-k looks for the best kernels: drop --variant")
        if output is not None or level != _LEVELS[0]:
            raise VariantError(
                f"--by-k compares kernels at many k: drop {'-o' if output is not None else '--level code'}"
            )
        _by_k(problem, chip, name, clock, as_json)
        return
    _forecast(problem, machine, chip, name, clock, variant, level, output, as_json)


def _by_k(problem: Gemm, chip: Machine, family: str, clock: Clock, as_json: bool) -> None:
    """gemm --by-k: what the second accumulator is worth at every k."""
    from tilecast.cli.tables import show, table
    from tilecast.model.gemm.forecast import buffer_gains
    from tilecast.model.gemm.render import GAIN_COLUMNS, gain_dicts, gain_rows

    gains = buffer_gains(problem, chip, family, clock.value)
    head = f"{chip.title}: {problem.label()}, but for k; {clock.words()} clock\n\n"
    show(head + table(GAIN_COLUMNS, gain_rows(gains)), gain_dicts(gains), as_json)


def _forecast(
    problem: Gemm, machine: Machine, chip: Machine, name: str, clock: Clock, variant: str | None, level: str, output: str | None, as_json: bool,
) -> None:  # fmt: skip
    """gemm: one problem on ``chip``, which is ``machine`` with its changes; writes the kernel where ``output`` says where."""
    from tilecast import __version__
    from tilecast.base.files import write_text_atomically
    from tilecast.cli.tables import show
    from tilecast.model.gemm.forecast import buffer_gains, forecast_gemm
    from tilecast.model.gemm.render import gain_dicts
    from tilecast.model.gemm.variant import GemmVariant, parse_gemm_variant

    one = name == "gemm_triton"
    base = GemmVariant(name, stages=3, accumulators=1, c_stages=1) if one else GemmVariant(name)
    given = parse_gemm_variant(variant, base) if variant is not None else None
    made = None
    if output is not None:
        from tilecast.codegen.gemm.generate import generate_gemm

        made = generate_gemm(problem, chip, given, __version__, family=name, clock=clock.value)
    chosen = given if made is None else made.variant
    compiler = _compiler() if level != _LEVELS[0] else None
    answer = forecast_gemm(problem, chip, chosen, family=name, clock=clock.value, written=compiler is not None, interval=True, compiler=compiler)  # fmt: skip
    if made is not None and given is None:
        answer = replace(answer, origin=made.forecast.origin)
    text, data = answer.text(), answer.to_dict()
    if chip is not machine:
        before = forecast_gemm(problem, machine, given, family=name, clock=clock.value)
        text += f"\nWithout the changes: {before.time_ms:.4g} ms, {before.time_ms / answer.time_ms:.3f} times as long."
        data["before"] = {"time_ms": before.time_ms, "tflops": before.run.tflops}
    if given is None and not one:
        gain = buffer_gains(problem, chip, name, clock.value, (problem.k,))[0]
        text += f"\nSecond accumulator: {gain.gain:.3f}x (best with one {gain.one_ms:.4g} ms, with two {gain.two_ms:.4g} ms); --by-k shows every k."
        data["second_accumulator"] = gain_dicts([gain])[0]
    if made is not None and output is not None:
        write_text_atomically(output, made.source)
        targets = made.header["targets"]
        assert isinstance(targets, list)
        text += f"\n{output}: the kernel, for {', '.join(targets)}; launch(a, b, c, d, alpha, beta)"
        data["file"] = output
    show(text, data, as_json)


def _compiler() -> Any:
    """What makes machine code of a variant."""
    from tilecast.cli.progress import quiet_at_exit
    from tilecast.codegen.gemm.machine_code import compiled_gemm

    quiet_at_exit()
    return compiled_gemm
