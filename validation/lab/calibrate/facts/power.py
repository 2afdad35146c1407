"""Rules for power: watts of loads over idle, per operation, brought to 1 GHz of the set clock.

The voltage follows the clock that is *set*, which NVML reports.  Under matrix work an SM executes ten of eleven of its
cycles, so energy is compared at the set clock: the executed one over ``power.tensor_clock_share`` for such loads.

What an operation costs grows with the clock as a power.  On a chip with wgmma its exponent and that of a byte from L2
(another clock and supply) come from one least squares over matrix work and copies from L2, each alone and both at once,
on all and on fewer SMs: the power limit then sets clocks from where attention runs to the top.  Elsewhere the exponent
comes from matrix work on fewer SMs alone and holds for L2 too.  It holds for the clocks at which it was seen; carrying
it to 1 GHz is arithmetic, so that values and exponents must be used together.

Energy of arithmetic is what a stream of live data takes more than the same stream without the instruction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tilecast.validation.lab.calibrate.facts.rule import Found, Rule, Table, line, spread
from tilecast.validation.lab.calibrate.store import Row

#: Loads of which some run on fewer SMs, one for each kind of matrix instruction.
_SWEEPS = ("wgmma bf16 n256 A in smem", "tcgen05 bf16 n256 A in smem", "mma.sync bf16")
_FILL = "l2 fill"
_MATRIX = ("wgmma", "tcgen05", "mma.sync")
#: The 16-bit matrix loads whose energy is the fact, the usual one first; the range is over all that were run.
_BF16_LOADS = (
    "wgmma bf16 n128 A in smem", "tcgen05 bf16 n256 A in smem", "mma.sync bf16", "wgmma bf16 n256 A in smem",
    "wgmma bf16 n64 A in smem", "wgmma bf16 n128 A in register", "tcgen05 bf16 n128 A in smem", "tcgen05 bf16 n256 A in tmem",
)  # fmt: skip
#: Clocks closer than this say nothing about a growth.
_APART = 1.05
#: Exponents that are tried, in steps of 0.02.
_EXPONENTS = np.round(np.arange(0.0, 4.001, 0.02), 2)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A load as measured: watts over idle, set GHz, and what it does in a second ("work", "fill")."""

    watt: float
    ghz: float
    per_second: dict[str, float]
    rows: tuple[Row, ...]

    @property
    def joule(self) -> float:
        """Energy of an operation of the one thing it does."""
        (rate,) = self.per_second.values()
        return self.watt / rate


def _load(table: Table, name: str, quantity: str, active: int = 0) -> Row | None:
    return table.one("power/load", quantity, load=name, active_sms=active)


def _seen(table: Table, name: str, active: int = 0) -> _Seen | None:
    """One load; None when a row is missing."""
    idle, watt = _load(table, "idle", "power_w"), _load(table, name, "power_w", active)
    clock = _load(table, name, "effective_clock_mhz", active) or _load(table, name, "nvml_clock_mhz", active)
    rates = {
        side: row for side in ("work", "fill") if (row := _load(table, name, f"{side}_per_second", active)) is not None
    }
    if idle is None or watt is None or clock is None or not rates:
        return None
    share = 1.0
    if name.startswith(_MATRIX) and clock.quantity == "effective_clock_mhz":
        found = _clock_share(table)
        share = found.value if found else 1.0
    return _Seen(
        watt.value - idle.value, clock.value / 1e3 / share, {side: row.value for side, row in rates.items()},
        (idle, watt, *rates.values(), clock),
    )  # fmt: skip


def _sweep(table: Table, name: str) -> list[_Seen]:
    """A load on all SMs, then on fewer and fewer."""
    numbers = {int(str(table.params(row)["active_sms"])) for row in table.all("power/load", "power_w", load=name)}
    found = [_seen(table, name, active) for active in sorted(numbers, key=lambda n: -n if n else -math.inf)]
    return [one for one in found if one]


def _matrix_load(table: Table) -> str:
    """The matrix load that this chip ran on fewer SMs too."""
    return next((name for name in _SWEEPS if _seen(table, name)), _SWEEPS[0])


@dataclass(frozen=True, slots=True)
class _Fit:
    """Exponents of an SM's operations and of a byte from L2, and joule at 1 GHz of a FLOP and of that byte."""

    sm: float
    l2: float
    tensor: float
    byte: float


def _least_squares(loads: Sequence[_Seen]) -> _Fit:
    """The fit with the least relative error of the watts; "work" is matrix work, "fill" bytes."""
    watt = np.array([one.watt for one in loads])
    ghz = np.array([one.ghz for one in loads])
    work, fill = (np.array([one.per_second.get(side, 0.0) for one in loads]) / watt for side in ("work", "fill"))
    grown = ghz[:, None] ** _EXPONENTS
    # Normal equations of two unknowns for every pair of exponents at once: [i, j] has exponents i and j.
    a, b = work[:, None] * grown, fill[:, None] * grown
    aa, bb, ab = (a * a).sum(0)[:, None], (b * b).sum(0)[None, :], a.T @ b
    ra, rb = a.sum(0)[:, None], b.sum(0)[None, :]
    det = aa * bb - ab * ab
    tensor, byte = (ra * bb - rb * ab) / det, (rb * aa - ra * ab) / det
    left = len(loads) - tensor * ra - byte * rb
    i, j = np.unravel_index(int(np.argmin(left)), left.shape)
    return _Fit(float(_EXPONENTS[i]), float(_EXPONENTS[j]), float(tensor[i, j]), float(byte[i, j]))


@lru_cache(maxsize=1)  # most rules ask for it
def _fits(table: Table) -> tuple[list[_Fit], tuple[Row, ...], str] | None:
    """The fit over all loads, then the fits that leave one of them out; None where copies beside wgmma did not run, and
    on a chip whose power limit leaves all loads one clock."""
    matrix = _matrix_load(table)
    both = _sweep(table, f"{matrix} + {_FILL}")
    loads = [*_sweep(table, matrix), *both, *_sweep(table, _FILL)]
    at = [one.ghz for one in loads if "work" in one.per_second]
    if not both or len(loads) < 6 or max(at) < _APART * min(at):
        return None
    fits = [_least_squares(loads), *(_least_squares(loads[:i] + loads[i + 1 :]) for i in range(len(loads)))]
    rows = tuple(row for one in loads for row in one.rows)
    return fits, rows, f"set clocks of {min(at):.2f} to {max(at):.2f} GHz; range: without any one load"


def _fitted(read: Callable[[_Fit], float]) -> Rule:
    def rule(table: Table) -> Found | None:
        found = _fits(table)
        if found is None:
            return None
        fits, rows, note = found
        values = [read(fit) for fit in fits]
        return Found(values[0], min(values), max(values), rows, note)

    return rule


def _exponent(table: Table) -> Found | None:
    fitted = _fitted(lambda fit: fit.sm)(table)
    if fitted is not None:
        return fitted
    loads = _sweep(table, _matrix_load(table))
    told = [one for one in loads if one.ghz > _APART * loads[0].ghz]
    if not told:
        return None
    full = loads[0]
    slopes = [math.log(one.joule / full.joule) / math.log(one.ghz / full.ghz) for one in told]
    rows = (*full.rows, *(row for one in told for row in one.rows))
    between = f"set clocks of {full.ghz:.2f} to {max(one.ghz for one in told):.2f} GHz"
    return Found(sum(slopes) / len(slopes), min(slopes), max(slopes), rows, between)


def _at_1ghz(table: Table, *names: str) -> Found | None:
    """pJ an operation of the first load that was run, brought to 1 GHz; the range over all that were."""
    exponent = _exponent(table)
    found = [one for name in names if (one := _seen(table, name))]
    if exponent is None or not found:
        return None
    values = [one.joule * 1e12 / one.ghz**exponent.value for one in found]
    rows = tuple(row for one in found for row in one.rows)
    return Found(values[0], min(values), max(values), rows, f"at 1 GHz by exponent {exponent.value:.2f}")


def _added(table: Table, *names: str) -> Found | None:
    """pJ of the instruction that each named stream has more than "chaos+fold", at 1 GHz: their mean, and their range."""
    exponent, base = _exponent(table), _seen(table, "chaos+fold")
    found = [one for name in names if (one := _seen(table, f"chaos+{name}"))]
    if exponent is None or base is None or len(found) < len(names):
        return None
    values = []
    for name, one in zip(names, found, strict=True):
        more = one.joule / one.ghz**exponent.value - base.joule / base.ghz**exponent.value
        # The assembler makes one three-input LOP3 of two folds: a second fold is half an instruction.
        values.append(more * 1e12 * (2.0 if name == "2 folds" else 1.0))
    rows = (*base.rows, *(row for one in found for row in one.rows))
    told = ", ".join(name.removesuffix("+fold") for name in names)
    note = f"what {told} add{'s' if len(names) == 1 else ', their mean and range'}; at 1 GHz by exponent {exponent.value:.2f}"
    return Found(sum(values) / len(values), min(values), max(values), rows, note)


def _active(table: Table) -> Found | None:
    """What SMs draw for being active: watts left at no work, by one stream at two rates."""
    exponent, slow, fast = _exponent(table), _seen(table, "chaos, one chain"), _seen(table, "chaos")
    if exponent is None or slow is None or fast is None:
        return None
    left, _ = line([(one.per_second["work"], one.watt) for one in (slow, fast)])
    value = max(0.0, left / slow.ghz ** (1 + exponent.value))
    return Found(value, 0.0, max(value, 0.1), (*slow.rows, *fast.rows), f"{left:.1f} W left at no work")


def _short_run(table: Table) -> Found | None:
    """Power of matrix work at the clock it runs at 10 to 50 ms after a rest: no meter is that fast, so by its energy."""
    sweep = _matrix_load(table)
    exponent, full = _exponent(table), _seen(table, sweep)
    clock, settled = table.one("power/burst", "10_to_50ms_mhz", load=sweep), _load(table, sweep, "effective_clock_mhz")
    idle = _load(table, "idle", "power_w")
    if exponent is None or full is None or clock is None or settled is None or idle is None:
        return None

    def watt(mhz: float) -> float:
        return float(idle.value + full.watt * (mhz / settled.value) ** (1 + exponent.value))

    return Found(
        watt(clock.value),
        watt(clock.low),
        watt(clock.high),
        (clock, *full.rows),
        "clock measured, power from its energy",
    )


def _l2_energy(table: Table) -> Found | None:
    """A byte from L2 by the copies that attention makes; by loads where nothing else ran."""
    fitted = _fitted(lambda fit: fit.byte * 1e12)(table)
    return fitted or _at_1ghz(table, _FILL) or _at_1ghz(table, "l2 read")


def _hbm_energy(table: Table) -> Found | None:
    """Memory bytes do not follow the SM clock; what their L2 share takes comes off."""
    read, l2 = _seen(table, "hbm read"), _seen(table, "l2 read")
    if read is None or l2 is None:
        return None
    value = (read.joule - l2.joule) * 1e12
    return Found(
        value, min(value, read.joule * 1e12), max(value, read.joule * 1e12), (*read.rows, *l2.rows),
        "high: with its L2 share",
    )  # fmt: skip


def _clock_share(table: Table) -> Found | None:
    shares, rows = [], []
    for row in table.all("power/load", "effective_clock_mhz"):
        params = table.params(row)
        name, active = str(params["load"]), int(str(params["active_sms"]))
        reported = _load(table, name, "nvml_clock_mhz", active)
        if name.startswith(_MATRIX) and reported is not None:
            shares.append(row.value / reported.value)
            rows += [row, reported]
    return Found(sorted(shares)[len(shares) // 2], min(shares), max(shares), tuple(rows)) if shares else None


#: Key of the machine file -> how it follows from the rows.
RULES: dict[str, Rule] = {
    "power.idle_w": lambda t: spread([_load(t, "idle", "power_w"), _load(t, "idle", "sampled_power_w")]),
    "power.short_run_w": _short_run,
    "power.active_w_at_1ghz": _active,
    "power.energy_exponent": _exponent,
    "power.l2_energy_exponent": _fitted(lambda fit: fit.l2),
    "power.tensor_pj_per_flop_bf16": lambda t: _at_1ghz(t, *_BF16_LOADS),
    "power.tensor_pj_per_flop_fp8": lambda t: _at_1ghz(t, "wgmma fp8 n128 A in smem", "wgmma fp8 n256 A in smem"),
    "power.mufu_pj_per_op": lambda t: _added(t, "ex2+fold"),
    "power.fma_pj_per_op": lambda t: _added(t, "ffma+fold", "fmul+fold", "fadd+fold", "ffma_3src+fold"),
    "power.alu_pj_per_op": lambda t: _added(t, "max2+fold", "pack_bf16x2+fold", "2 folds"),
    "power.smem_pj_per_byte": lambda t: _at_1ghz(t, "ld_shared", "st_shared"),
    "power.l2_pj_per_byte": _l2_energy,
    "power.hbm_pj_per_byte": _hbm_energy,
    "power.tensor_clock_share": _clock_share,
}
