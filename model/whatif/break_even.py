"""Break-even points: the value of a fact at which something else starts to bind, and beyond which more is no use.

Three questions, three methods, each named in the answer:

- *busiest unit* (ResMII): the demands of two units are rational in a rate, ``a + b / x`` on every piece, so the value
  at which they meet is solved in closed form (sympy) and not scanned for;
- *simulated*: the value at which the loop, hand-overs and all, stops being held by the unit: bisection on the simulation;
- *useful*: the value beyond which more of the fact gives less than 1 % of time, and that with the kernel kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tilecast.base.progress import Progress, reported, silent
from tilecast.model.chip.evaluate import check_clock
from tilecast.model.chip.launch import ChipRun
from tilecast.model.forecast.binding import loop_bound
from tilecast.model.forecast.brief import Brief
from tilecast.model.forecast.level import Compiler, at_hand, level_words
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.changes import facts_named, is_latency, is_rate, moved_together
from tilecast.model.machine.followed import not_followed
from tilecast.model.machine.machine import Machine, MachineError, machine_of
from tilecast.model.machine.schema import KEYS
from tilecast.model.passes import FORWARD, Pass
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.sm.simulate import steady_state
from tilecast.model.whatif.answers import BreakEven, Crossing, Solved
from tilecast.model.whatif.rows import BreakEvens

#: Facts asked about when none is named, where the machine has them; the matrix rate of the workload's dtype is first.
MAIN = (
    "mufu.ex2_per_clk", "fma.lanes", "alu.lanes", "issue.warp_inst_per_clk", "smem.bytes_per_clk",
    "tmem.read_bytes_per_clk", "l2.bytes_per_clk_per_sm", "hbm.tbps_achieved",
)  # fmt: skip
#: How far from its value a fact is followed, and how exactly a bisection ends.
_SPAN = 64.0
_PRECISION = 1e-3
#: More of a fact is of use while all the more there could be saves at least this share of the time.
_USEFUL = 0.01
#: Unit of the loop that a rate feeds, and the symbol it has in demand.py.
_UNIT_OF = {
    "mufu.ex2_per_clk": ("mufu", "E", "T_MUFU"),
    "fma.lanes": ("fma", "L", "T_FMA"),
    "alu.lanes": ("alu", "A", "T_ALU"),
    "issue.warp_inst_per_clk": ("issue", "", ""),
    "smem.bytes_per_clk": ("smem", "W", "T_SMEM"),
    "tmem.read_bytes_per_clk": ("tmem_read", "T_R", "T_TMEM_READ"),
    "tmem.write_bytes_per_clk": ("tmem_write", "T_W", "T_TMEM_WRITE"),
    "tma.bytes_per_clk": ("tma", "", ""),
    "cvt.f32x2_to_bf16x2_per_clk": ("cvt", "", ""),
    "cvt.f32x2_to_fp8x2_per_clk": ("cvt", "", ""),
}
_FORMS = {unit: form for unit, _, form in _UNIT_OF.values() if form} | {"tensor": "T_MMA"}


def break_evens(
    workload: Workload,
    machine: Machine | str,
    variant: Any = None,
    *,
    facts: tuple[str, ...] | None = None,
    family: str | None = None,
    clock: str | float = "sustained",
    compiler: Compiler | None = at_hand,
    progress: Progress = silent,
    asked_pass: Pass = FORWARD,
) -> BreakEvens:
    """Break-even points of ``facts`` (default: the main rates of the machine), in that order.

    ``variant`` is the kernel (default: the best of ``family``, or of the machine's own) and stays; ``compiler`` as in
    `predict`: what is solved is the same at every level, what is simulated and what is of use is not.
    Of a pass of several kernels loop and bandwidths are those of the kernel that takes longest, and what is of use is of them all.  Raises MachineError for unknown
    facts and facts that are neither rates nor latencies, PredictError for kernels that cannot run.
    """
    chip = machine_of(machine)
    check_clock(clock, chip)
    workload = workload.reduced()
    if facts is None:
        names = tuple(key for key in (f"tensor.{workload.dtype}_flop_per_clk", *MAIN) if chip.has(key))
    else:
        names = tuple(key for name in facts for key in facts_named(name, chip))
    for key in names:
        if not (is_rate(key) or is_latency(key)):
            raise MachineError(f"break-even: {key} is neither a rate nor a latency, it has unit {KEYS[key].unit}")
    variant = asked_pass.kernel(workload, chip, variant, family, clock, compiler)
    level = asked_pass.settled(compiler, workload, chip, variant, None, clock)
    main = asked_pass.main(workload, chip, variant, clock)
    asked = (_Question(asked_pass, main, workload, chip, variant, key, clock, level) for key in names)
    rows = map(_break_even, reported(asked, "facts", len(names), progress))
    return BreakEvens(rows, chip, workload, variant, clock, level_words(level), asked_pass)


class _Question:
    """One fact of one kernel on one machine as a function of its value."""

    def __init__(
        self, asked_pass: Pass, main: str, workload: Workload, machine: Machine, variant: Any, key: str, clock: str | float,
        level: Compiler | None,
    ) -> None:  # fmt: skip
        self.asked_pass, self.main = asked_pass, main
        self.workload, self.machine, self.variant, self.key, self.clock = workload, machine, variant, key, clock
        self.level = None if not_followed((key,)) else level
        self.value = machine[key]
        rule = KEYS[key]
        # Slopes are taken a millionth to the right of a value, which must be a legal one too.
        self.low, self.high = max(rule.low, self.value / _SPAN), min(rule.high * (1 - 2e-6), self.value * _SPAN)

    def at(self, x: float) -> Machine:
        return self.machine.with_facts(moved_together(self.machine, {self.key: x}))

    def pipeline(self, x: float) -> Pipeline:
        return self.asked_pass.loop(self.workload, self.at(x), self.variant, self.main)[0]

    def chip(self, x: float) -> ChipRun:
        return self.asked_pass.chip(self.workload, self.at(x), self.variant, self.main)

    def demand(self, x: float) -> dict[str, float]:
        return self.pipeline(x).demand()

    def bound(self, x: float) -> str:
        """What holds the kernel at ``x``: a unit, the recurrence, or memory."""
        if self.key.startswith(("hbm.", "l2.")):
            return self.brief(x, self.level).bound_by
        pipeline, flop_per_score = self.asked_pass.loop(self.workload, self.at(x), self.variant, self.main)
        cycles = steady_state(pipeline).ii_cycles if self.level is None else self.brief(x, self.level).ii_cycles
        return loop_bound(pipeline, cycles, self.workload, self.at(x), flop_per_score)

    def seconds(self, x: float) -> float:
        return self.brief(x, self.level).seconds

    def brief(self, x: float, level: Compiler | None) -> Brief:
        return self.asked_pass.brief(self.workload, self.at(x), self.variant, self.clock, level)


def _break_even(asked: _Question) -> BreakEven:
    rate = is_rate(asked.key)
    unit = _UNIT_OF.get(asked.key, ("tensor" if asked.key.startswith("tensor.") else "", "", ""))[0]
    solved = _solve(asked, unit) if rate and unit else _solve_memory(asked) if rate else None
    crossing = _crossing(asked, _own_names(asked.key, unit)) if rate else None
    best = asked.high if rate else asked.low
    base, limit = asked.seconds(asked.value), asked.seconds(best)
    rule = KEYS[asked.key]
    return BreakEven(
        asked.key, rule.meaning, asked.value, rule.unit, asked.bound(asked.value), solved, crossing,
        _useful(asked, base, limit, best), 100.0 * max(0.0, 1.0 - limit / base), level_words(asked.level),
    )  # fmt: skip


def _own_names(key: str, unit: str) -> tuple[str, ...]:
    """What `_Question.bound` says where the fact itself binds."""
    if key.startswith("hbm."):
        return ("HBM bandwidth",)
    return ("L2 bandwidth",) if key.startswith("l2.") else (unit,)


# --- closed form ----------------------------------------------------------------------------------------------


def _pieces(asked: _Question, x: float, units: tuple[str, str]) -> tuple[tuple[float, float], ...]:
    """(a, b) of each unit's demand a + b / x on the piece around ``x``, from its values at x and a little above."""
    near = x * (1 + 1e-6)
    here, there = asked.demand(x), asked.demand(near)
    out = []
    for unit in units:
        slope = (here.get(unit, 0.0) - there.get(unit, 0.0)) / (1 / x - 1 / near)
        # Differences of doubles: what is not there to nine digits is zero.
        slope = 0.0 if abs(slope / x) < 1e-6 * max(1.0, here.get(unit, 0.0)) else slope
        out.append((here.get(unit, 0.0) - slope / x, slope))
    return tuple(out)


@dataclass(frozen=True, slots=True)
class _Root:
    """Two demands that meet at ``x``, each a + b / x there; ``other`` is what binds beyond."""

    x: float
    mine: tuple[float, float]
    theirs: tuple[float, float]
    other: str


def _solve(asked: _Question, unit: str) -> Solved | None:
    """Up to where ``unit``, whose rate the fact is, is the busiest; None when there is no such value in range.

    The port of shared memory binds through the matrix unit as well: instructions that wait for their operands.
    """
    kinks = _operand_fetch(asked) if unit in ("tensor", "smem") else []
    # A little below, where the fetch (or still the array) is the longer one: an instruction held by the port jumps.
    fetch = [root for root in kinks if _busiest(asked, "tensor", root.x * (1 - 1e-6))]
    others = [name for name in asked.demand(asked.value) if name != unit]
    if unit == "smem" and kinks:
        start = 0.9 * max(root.x for root in kinks)
        met = [_meet(asked, "tensor", other, start) for other in others if other != "tensor"]
        roots = [root for root in met if root is not None and _busiest(asked, "tensor", root.x)]
        roots += [replace(root, other="tensor") for root in fetch]
        # What else goes through the port (sums, copies) may take longer than the matrix unit's operands.
        direct = [_meet(asked, unit, other, asked.value) for other in others]
        roots += [root for root in direct if root is not None and _busiest(asked, unit, root.x)]
        best = max(roots, key=lambda r: r.x, default=None)
    else:
        met = [_meet(asked, unit, other, asked.value) for other in others]
        roots = [root for root in met if root is not None and _busiest(asked, unit, root.x)]
        if unit == "tensor":
            roots += [replace(root, other="smem") for root in fetch]
        best = min(roots, key=lambda r: r.x, default=None)
    if best is None:
        return None
    through_matrix = any(best.x == root.x for root in fetch) or (unit == "smem" and bool(kinks))
    return _as_solved(best, unit, asked, textbook=not through_matrix)


def _busiest(asked: _Question, unit: str, x: float) -> bool:
    demand = asked.demand(x)
    return demand.get(unit, 0.0) >= max(demand.values()) * (1 - 1e-6)


def _meet(asked: _Question, unit: str, other: str, start: float) -> _Root | None:
    """Where two demands are equal: from piece to piece, and every piece is solved exactly, so the last one's root is."""
    x = start
    for _ in range(12):
        mine, theirs = _pieces(asked, x, (unit, other))
        if theirs[0] == mine[0]:
            return None
        root = (mine[1] - theirs[1]) / (theirs[0] - mine[0])
        if not asked.low <= root <= asked.high:
            return None
        if abs(root - x) <= 1e-9 * x:
            return _Root(root, mine, theirs, other)
        x = root
    return None


def _operand_fetch(asked: _Question) -> list[_Root]:
    """Where each matrix instruction's operand fetch from shared memory takes as long as its array: one of the two is
    constant in the fact, the other b / x."""
    found: list[_Root] = []
    by_port = asked.key.startswith("smem.")
    for op in asked.pipeline(asked.value).ops:
        if op.engine != "tensor":
            continue
        fast = asked.pipeline(asked.high).op(op.name)
        # Far up, the port is idle for most of an instruction or the array is: each shows its own time there.
        if by_port:
            slope, level = fast.cycles("smem") * asked.high, fast.cycles("tensor")
        else:
            slope, level = asked.pipeline(asked.low).op(op.name).cycles("tensor") * asked.low, fast.cycles("smem")
        root = slope / level if level > 0 else math.inf
        if not asked.low < root < asked.high:
            continue
        if math.isclose(asked.pipeline(root).op(op.name).cycles("tensor"), level, rel_tol=1e-6):
            found.append(_Root(root, (0.0, slope), (level, 0.0), ""))
    return found


def _solve_memory(asked: _Question) -> Solved | None:
    """Where the bytes of the launch take as long as its SMs, for HBM and L2."""
    name = {"hbm.tbps_achieved": "HBM", "l2.bytes_per_clk_per_sm": "L2"}.get(asked.key)
    if name is None:
        return None
    x = asked.value
    for _ in range(20):
        run = asked.chip(x)
        if name == "HBM":
            # The clock of the forecast while the SMs bind: with all the bandwidth there could be.
            rate = asked.brief(asked.high, None).clock_mhz * 1e6
            need, have = run.hbm_bytes / 1e12, run.makespan_cycles / rate
            equation = f"{need * 1e6:.6g} MB / (x TB/s) = {have * 1e6:.6g} us"
        else:
            need, have = run.l2_bytes / asked.machine["chip.sm_count"], run.makespan_cycles
            equation = f"{need:.6g} B/SM / (x B/clk) = {have:.6g} cycles"
        root = need / have
        if not asked.low <= root <= asked.high:
            return None
        if math.isclose(root, x, rel_tol=1e-9):
            return Solved(root, name, "SMs", equation, "")
        x = root
    return None


def _as_solved(root: _Root, unit: str, asked: _Question, textbook: bool) -> Solved:
    import sympy

    x = sympy.Symbol("x", positive=True)
    left, right = (sympy.Rational(f"{a:.4f}") + sympy.Rational(f"{b:.4f}") / x for a, b in (root.mine, root.theirs))
    exact = sympy.solve(sympy.Eq(left, right), x)
    value = float(exact[0]) if exact else root.x
    # Coefficients are rounded to four digits after the point; they must still give the root.
    if not math.isclose(value, root.x, rel_tol=1e-6):
        value = root.x
    formula = _formula(asked, unit, root.other) if textbook else ""
    return Solved(value, unit, root.other, f"{_plain(root.mine)} = {_plain(root.theirs)}", formula)


def _plain(piece: tuple[float, float]) -> str:
    a, b = piece
    parts = ([f"{a:.6g}"] if abs(a) > 1e-6 or not b else []) + ([f"{b:.8g}/x"] if b else [])
    return " + ".join(parts)


def _formula(asked: _Question, unit: str, other: str) -> str:
    """The textbook solution for the fact's symbol, from the closed forms of demand.py; "" where they have none."""
    symbol = _UNIT_OF[asked.key][1] if asked.key in _UNIT_OF else "F"
    if not symbol or unit not in _FORMS or other not in _FORMS:
        return ""
    import sympy

    from tilecast.model.closed_forms import symbols

    s: dict[str, Any] = symbols()
    forms = {form.name: form.expression for form in asked.asked_pass.forms()}
    if not {_FORMS[unit], _FORMS[other]} <= set(forms):
        return ""
    found = sympy.solve(sympy.Eq(forms[_FORMS[unit]], forms[_FORMS[other]]), s[symbol])
    if not found:
        return ""
    solution = sympy.simplify(found[0])
    if solution.as_numer_denom()[1].has(s["f"]):
        # 1 - f reads better than a minus sign before and f - 1 below.
        solution = solution.subs(s["f"] - 1, -sympy.Symbol("(1 - f)"))
    return f"{symbol} = {solution}"


# --- simulation -----------------------------------------------------------------------------------------------


def _crossing(asked: _Question, names: tuple[str, ...]) -> Crossing | None:
    """Where the fact itself stops to bind as it grows."""

    def held(x: float) -> bool:
        return asked.bound(x) in names

    # Walk out from today's value in factors of two to the nearest change, then bisect it.
    now = held(asked.value)
    here, there = asked.value, asked.value
    while held(there) == now:
        here = there
        there = there * 2 if now else there / 2
        if not asked.low <= there <= asked.high:
            return None
    low, high = (here, there) if now else (there, here)
    low, high = _bisect(held, low, high)
    return Crossing(math.sqrt(low * high), asked.bound(low), asked.bound(high))


def _bisect(inside: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    """Narrow a bracket (inside at ``low``, not at ``high``) to `_PRECISION`, geometrically."""
    while abs(high / low - 1.0) > _PRECISION:
        middle = math.sqrt(low * high)
        if inside(middle):
            low = middle
        else:
            high = middle
    return low, high


def _useful(asked: _Question, base: float, limit: float, best: float) -> float | None:
    """Where what is left to gain falls under 1 %; None when even the whole range leaves more than that open."""
    if base <= limit * (1 + _USEFUL):
        return asked.value
    inside, outside = _bisect(lambda x: asked.seconds(x) > limit * (1 + _USEFUL), asked.value, best)
    return None if outside == best else math.sqrt(inside * outside)
