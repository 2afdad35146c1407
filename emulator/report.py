"""Run a generated kernel on the CPU on random inputs and judge it: correctness, races, cycles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilecast.base.files import check_writable, write_text_atomically
from tilecast.emulator.call import need_packages

if TYPE_CHECKING:
    from tilecast.emulator.run import Emulation
    from tilecast.model.kernel.workload import Workload


#: Bytes of inputs and output beyond which an emulation is refused: it would take days before it ended.
_LARGEST_BYTES = 1 << 31


@dataclass(frozen=True, slots=True)
class Emulated:
    """What an emulation found; errors are absolute, cycles those of the longest program (None: none were timed)."""

    text: str
    right: bool
    #: What is wrong; "" where nothing is.
    wrong: str
    out_error: float | None = None
    lse_error: float | None = None
    programs: int = 0
    operations: int = 0
    cycles: float | None = None
    ii_cycles: float | None = None
    model_ii_cycles: float | None = None


def _inputs(work: Workload, seed: int) -> tuple[Any, ...]:
    """Normal q, k, v in the workload's type; half of the rows sharp, so that their maxima move."""
    import ml_dtypes
    import numpy as np

    from tilecast.emulator.errors import RequestError

    kinds = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}
    if work.dtype not in kinds:
        raise RequestError(f"--dtype: the kernels are written for bf16 and fp16, got {work.dtype}")
    rng, b = np.random.default_rng(seed), work.batch
    q = rng.standard_normal((b, work.heads_q, work.seqlen_q, work.head_dim_qk), np.float32)
    q[:, :, : work.seqlen_q // 2] *= 4
    k = rng.standard_normal((b, work.heads_kv, work.seqlen_k, work.head_dim_qk), np.float32)
    v = rng.standard_normal((b, work.heads_kv, work.seqlen_k, work.head_dim_v), np.float32)
    return tuple(x.astype(kinds[work.dtype]) for x in (q, k, v))


def _cycles(done: Emulation) -> tuple[list[str], Any]:
    """What to print about time, and the comparison of the longest program."""
    from tilecast.emulator.replay.compare import AGREES, compare
    from tilecast.emulator.replay.spent import longest

    program = longest(done.traces)
    found = compare(done.header, program, done.machine)
    lines = [
        f"  cycles     {found.timeline.cycles:.0f} for the longest of {len(done.traces)} programs (number {program.program})"
    ]
    if not found.ii_cycles:
        lines.append(
            "             too few key blocks for a steady state: 8 or more show it beside the pipeline simulation"
        )
        return lines, found
    lines.append(
        f"  iteration  {found.ii_cycles:.0f} cycles from the executed source, {found.model_ii_cycles:.0f} from the pipeline "
        f"simulation: {found.difference:+.1%}"
    )
    if abs(found.difference) > AGREES:
        lines += [f"             {difference:+.1%} without {name}" for name, difference in found.without]
        lines.append("             docs/emulator.md says what the two routes count differently")
    return lines, found


def run_emulate(
    file: str,
    work: Workload,
    machine: str | None,
    window: tuple[int, int] | None,
    mode: str,
    seed: int,
    sms: int | None,
    trace: str | None,
) -> Emulated:
    """Run ``file`` on random inputs of ``work``; the timeline goes to ``trace`` when it is given.

    Raises RequestError and UnsupportedError for what cannot be run; a kernel that is wrong is an answer.
    """
    from tilecast.emulator.departure import explained
    from tilecast.emulator.errors import EmulationError, RequestError, UnsupportedError
    from tilecast.emulator.replay.timeline import chrome_trace
    from tilecast.emulator.run import Kernel, emulate, kernel_path
    from tilecast.emulator.source import Source
    from tilecast.emulator.steps import Steps
    from tilecast.emulator.verify import judge

    if trace is not None:
        check_writable(trace)
    if sms is not None and sms < 2:
        raise RequestError(f"--sms: a pair of CTAs takes two, got {sms}")
    rows = work.heads_q * work.seqlen_q + work.heads_kv * work.seqlen_k
    size = 4 * work.batch * rows * (work.head_dim_qk + work.head_dim_v)
    if size > _LARGEST_BYTES:
        raise RequestError(
            f"{work.label()}: {size / 1e9:.1f} GB of numbers to emulate, expected at most {_LARGEST_BYTES / 1e9:.1f} GB: take "
            "fewer heads or shorter sequences"
        )
    q, k, v = _inputs(work, seed)
    scale, limits = work.head_dim_qk**-0.5, window or work.limits
    title = f"{file}: {work.label()}, {mode}" + (f" (seed {seed})" if mode == "random" else "")
    try:
        done = emulate(file, q, k, v, scale=scale, window=limits, mode=mode, seed=seed, machine=machine, sms=sms)
    except (RequestError, UnsupportedError):
        raise
    except EmulationError as error:
        kind = type(error).__name__.removesuffix("Error").lower()
        return Emulated(f"{title}\n  {kind:10s} {error}", False, f"{kind}: {error}")
    verdict = judge(done, q, k, v, scale, limits)
    wrong = verdict.wrong
    if wrong:
        source = Source(kernel_path(file))
        steps = Steps(q, k, v, scale, limits, source)
        kernel = Kernel(source, machine, sms=sms)
        kernel.run(q, k, v, scale=scale, window=limits, mode=mode, seed=seed, watcher=steps)
        wrong = explained(wrong, steps.finish(verdict, done.mask_lines, kernel.session.mask_calls), source)
    operations = sum(len(role.events) for one in done.traces for role in one.roles)
    lines = [
        f"{title} on {done.machine.title}",
        f"  {'wrong' if wrong else 'correct':10s} "
        + (wrong or f"output within {verdict.out_error:.2g} of float64 (allowed {verdict.out_tolerance:.2g}), ")
        + ("" if wrong else f"log-sum-exp within {verdict.lse_error:.2g} (allowed {verdict.lse_tolerance:.2g})"),
        f"  races      none: {operations} operations of {len(done.traces)} programs, every access ordered",
    ]
    more, found = _cycles(done)
    if trace is not None:
        write_text_atomically(trace, chrome_trace(done.timelines(found.timeline)))
        more.append(f"  timeline   {trace}: open in ui.perfetto.dev")
    return Emulated(
        "\n".join(lines + more), not wrong, wrong, verdict.out_error, verdict.lse_error, len(done.traces),
        operations, found.timeline.cycles, found.ii_cycles or None, found.model_ii_cycles or None,
    )  # fmt: skip


def is_forward(file: str) -> bool:
    """Whether a file is a forward pass in 16 bits, which takes a problem of the caller's."""
    need_packages()
    from tilecast.emulator.run import is_forward_header, kernel_path
    from tilecast.emulator.source import Source

    return is_forward_header(Source(kernel_path(file)).header())


def kernel_workload(
    file: str, batch: int | None, heads: int | None, heads_kv: int | None, seqlen: int | None, seqlen_k: int | None,
    window: str | None, dtype: str | None,
) -> tuple[Workload, tuple[int, int] | None]:  # fmt: skip
    """The shapes to run a kernel at: head dimensions and mask are the file's, the rest is small unless asked for."""
    need_packages()
    from tilecast.emulator.errors import RequestError
    from tilecast.emulator.run import kernel_path
    from tilecast.emulator.source import Source
    from tilecast.model.kernel.shapes_csv import parse_window
    from tilecast.model.kernel.workload import Workload

    written = Source(kernel_path(file)).workload()
    mask = written.mask
    if window is not None and mask != "window":
        raise RequestError(f"--window: {file} is written for {'causal attention' if mask == 'causal' else 'no mask'}")
    limits = parse_window(window, False) if window is not None else written.window
    q = 1 if heads is None else heads
    rows = 512 if seqlen is None else seqlen
    work = Workload(
        1 if batch is None else batch, q, q if heads_kv is None else heads_kv, rows, rows if seqlen_k is None else seqlen_k,
        written.head_dim_qk, written.head_dim_v, mask, limits, written.dtype if dtype is None else dtype,
    )  # fmt: skip
    return work, limits
