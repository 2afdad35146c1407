"""Planted bugs against the default battery: how many it finds, what its messages quote, and false alarms.

python tools/emulator_bugs.py [--only TEXT] [--set planted|later|none|families|harmless | --drawn COUNT --seed NUMBER [--rule values|harmless]] [--half 0|1]

Puts every change of tests/support/planted.py and planted_families.py to `tilecast emulate FILE`'s battery, those that only the
compiler can refuse to the compiler too, and prints a table.  A message points at the bug when it quotes a changed line, or
names a barrier or buffer concerned.  Takes 15 minutes on one core.  ``--drawn``: changes that a rule draws (tests/support/drawn.py)
instead, of which some change nothing that counts; ``--rule values``: of values only, from every shipped file of Gluon, ``harmless``: those
that change nothing.  ``--half 0``: every other one of these, to develop with; ``1``: the others, kept aside to be judged by.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

# Before numpy loads: products are of single tiles.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.drawn import drawn, drawn_harmless, drawn_values
from support.planted import BENIGN, LATER, PLANTED, Planted
from support.planted_families import FAMILIES, HARMLESS

from tilecast.codegen.compiler.complaints import REFUSED, WARNING, checked_by_compiler
from tilecast.emulator.battery.runner import Battery, run_battery
from tilecast.emulator.errors import EmulationError
from tilecast.emulator.source import Source

#: One kernel of each family, so that a draw of some dozens takes minutes.
_DRAWN_FROM = (
    "hopper_ws_d64_causal", "hopper_serve_d64", "gemm_hopper_short", "hopper_bwd_d64_full", "hopper_fp8_d64_full",
    "blackwell_ws_d64_causal", "gemm_blackwell", "blackwell_fp8_d64_full",
)  # fmt: skip


#: Quoted lines of a message that are read first.
_EARLY = 8


def put(planted: Planted) -> tuple[Battery | str, set[int]]:
    """The battery on a changed kernel (a text: what refused it before), and the changed lines."""
    text, lines = planted.text()
    try:
        return run_battery(Source(f"{planted.kernel}.py", text), tries=True), lines
    except EmulationError as error:
        return f"{type(error).__name__}: {error}", lines


@functools.lru_cache
def complaints(text: str, warnings: bool) -> tuple[str, ...]:
    """What the compiler says of a file: why it refuses it, and ``warnings`` such as spills."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.py"
        path.write_text(text, encoding="utf-8")
        kinds = (REFUSED, WARNING) if warnings else (REFUSED,)
        found = [one.text for one in checked_by_compiler(path) if one.severity in kinds]
        return tuple(text.replace(str(path), "kernel") for text in found)


def compiled(planted: Planted) -> str:
    """What the compiler says of a changed kernel and not of the one that ships; of those drawn by a rule, refusals only."""
    warnings = planted.kind == "compiled"
    shipped = complaints(planted.shipped(), warnings) if warnings else ()
    return "; ".join(text for text in complaints(planted.text()[0], warnings) if text not in shipped)


def points(message: str, planted: Planted, lines: set[int]) -> str:
    """How a message points at a bug: "line", "name", "fence" (that one is missing, between which lines) or ""."""
    if {int(found) for found in re.findall(r"line (\d+):", message)} & lines:
        return "line"
    if planted.old.strip().startswith("fence_async_shared(") and "fence_async_shared() is missing" in message:
        return "fence"
    names = [re.escape(name) for name in planted.names]
    named = any(re.search(rf"\b{name}\d?[.\[]|\.{name}\b|(memory|of) {name}\b", message) for name in names)
    return "name" if named else ""


def early(message: str, how: str, lines: set[int]) -> bool:
    """Whether a message that points at a bug does so by a name, or in the first lines that it quotes."""
    quoted = list(dict.fromkeys(int(found) for found in re.findall(r"line (\d+):", message)))[:_EARLY]
    return how in ("name", "fence") or (how == "line" and bool(lines & set(quoted)))


def main() -> None:
    """Run them all, print a line each, then the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="changes whose name or kernel contains this")
    sets = {"planted": PLANTED, "later": LATER, "none": BENIGN, "families": FAMILIES, "harmless": HARMLESS}
    parser.add_argument(
        "--set",
        choices=sets,
        help="only these: bugs, bugs written later, changes that are no bugs; the same of other families",
    )
    parser.add_argument("--drawn", type=int, help="so many changes drawn by a rule instead")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn (1)")
    parser.add_argument(
        "--rule", choices=("values", "harmless"), help="draw wrong values only, or what changes nothing"
    )
    parser.add_argument("--half", type=int, choices=(0, 1), help="every other one: the first half, or the second")
    chosen = parser.parse_args()
    listed = sets[chosen.set] if chosen.set else (*PLANTED, *LATER, *FAMILIES, *BENIGN, *HARMLESS)
    if chosen.drawn:
        rules = {"values": drawn_values, "harmless": drawn_harmless}
        draw = rules[chosen.rule] if chosen.rule else functools.partial(drawn, _DRAWN_FROM)
        listed = draw(chosen.drawn, chosen.seed)
    if chosen.half is not None:
        listed = listed[chosen.half :: 2]
    caught: Counter[str] = Counter()
    every: Counter[str] = Counter()
    pointed: Counter[str] = Counter()
    soon: Counter[str] = Counter()
    for planted in listed:
        if chosen.only not in f"{planted.name} {planted.kernel}":
            continue
        began = time.perf_counter()
        found, lines = put(planted)
        message = found if isinstance(found, str) else found.failures[0].message if found.failures else ""
        where = "" if isinstance(found, str) or not found.failures else found.failures[0].problem.split(":")[0]
        # The default command asks the compiler where nothing else is wrong; of changes that are listed as quiet none needs it.
        if not message and (planted.kind == "compiled" or chosen.drawn):
            message, where = compiled(planted), "compiler"
        every[planted.kind] += 1
        caught[planted.kind] += bool(message)
        how = points(message, planted, lines) if message else ""
        pointed[planted.kind] += bool(how)
        soon[planted.kind] += early(message, how, lines)
        word = "caught" if message else "quiet"
        print(
            f"{word:7s}{how or '-':5s}{time.perf_counter() - began:6.1f} s  {planted.kernel}: {planted.name} [{where}] {message!r}",
            flush=True,
        )
        if chosen.drawn and not how:
            print(f"        {planted.old.strip()}\n        {planted.new.strip()}", flush=True)
    print(f"\n{'kind':16s} {'there are':>10s} {'caught':>7s} {'pointed at':>11s} {'in 8 lines':>11s}")
    for kind in every:
        print(f"{kind:16s} {every[kind]:10d} {caught[kind]:7d} {pointed[kind]:11d} {soon[kind]:11d}")


if __name__ == "__main__":
    main()
