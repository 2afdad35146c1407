"""What messages say beside the lines that they quote: one bug of each kind that they once did not point at."""

from __future__ import annotations

import pytest

from tilecast.emulator.battery.runner import run_battery
from tilecast.emulator.run import kernel_path
from tilecast.emulator.source import Source

#: Kernel, its text, what stands there instead, and what the message says (a line of the file by its text).
BUGS = {
    "no init": (
        "gemm_hopper_short", "mbarrier.init(made.index(i), count=ARRIVALS)", "pass",
        "no mbarrier.init is about the barriers of made, line {made = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())}",
    ),
    "a wait for another slot": (
        "hopper_ws_d64_causal", "wait(tile.k, n + 1)", "wait(tile.k, n - 1)",
        "who waits for k.full: line {wait(tile.k, n - 1)}",
    ),
    "a counter that starts too late": (
        "hopper_ws_d64_causal", "dtype.element_ty\n    n = 0  # key", "dtype.element_ty\n    n = 1  # key", "what counts: ",
    ),
    "tensors the other way round": (
        "hopper_bwd_d64_full", "launches = plan(q, k, v,", "launches = plan(q, v, k,", "what the host makes tensor maps of",
    ),
    "an argument too many": (
        "hopper_bwd_d64_full", "for x in (out, dout) for n in x.stride()[:3]))", "for x in (out, dout) for n in x.stride()[:4]))", "too many positional arguments; it comes from",
    ),
    "weights that are too small": (
        "hopper_fp8_d64_full", "p = mufu_exp2(s * problem.scale_log2 - reference[:, None])\n    return",
        "p = mufu_exp2(s * problem.scale_log2 + reference[:, None])\n    return", "among which its largest score is",
    ),
}  # fmt: skip


def message_of(kernel: str, old: str, new: str) -> tuple[str, str]:
    """(message, changed text) of a kernel with one substitution; the first of several."""
    text = kernel_path(kernel).read_text(encoding="utf-8")
    assert old in text
    changed = text.replace(old, new, 1)
    return run_battery(Source(f"{kernel}.py", changed)).failures[0].message, changed


@pytest.mark.parametrize("name", BUGS)
def test_a_message_points_at(name: str) -> None:
    kernel, old, new, says = BUGS[name]
    found, text = message_of(kernel, old, new)
    if "{" in says:
        wanted = says.partition("{")[2].rstrip("}")
        number = next(i for i, line in enumerate(text.splitlines(), 1) if line.strip() == wanted)
        says = says.replace(f"{{{wanted}}}", f"{number}: {wanted[:60]}")
    assert says in found
    if name != "no init":
        # And the changed line itself.
        number = text[: text.index(new.partition("\n")[2] if new.startswith("dtype") else new)].count("\n") + 1
        assert f"line {number}: " in found
