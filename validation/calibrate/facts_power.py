"""Rules for power: watts of loads over idle, per operation, brought to 1 GHz with the exponent the loads themselves show.

The exponent comes from one load (wgmma) on fewer and fewer SMs: the power limit then allows a higher clock.  It holds
for the clocks at which it was seen; carrying it to 1 GHz is arithmetic, so that value and exponent must be used together.
"""

from __future__ import annotations

import math

from tilecast.validation.calibrate.facts import Found, Rule, Table, spread
from tilecast.validation.calibrate.store import Row

#: Loads of which some run on fewer SMs, one for each kind of matrix instruction.
_SWEEPS = ("wgmma bf16 n256 A in smem", "tcgen05 bf16 n256 A in smem", "mma.sync bf16")
#: The 16-bit matrix loads whose energy is the fact, the usual one first; the range is over all that were run.
_BF16_LOADS = (
    "wgmma bf16 n128 A in smem", "tcgen05 bf16 n256 A in smem", "mma.sync bf16", "wgmma bf16 n256 A in smem",
    "wgmma bf16 n64 A in smem", "wgmma bf16 n128 A in register", "tcgen05 bf16 n128 A in smem", "tcgen05 bf16 n256 A in tmem",
)  # fmt: skip


def _load(table: Table, name: str, quantity: str, active: int = 0) -> Row | None:
    return table.one("power/load", quantity, load=name, active_sms=active)


def _energy(table: Table, name: str, active: int = 0) -> tuple[float, float, tuple[Row, ...]] | None:
    """(joule an operation over idle, executed GHz, rows) of one load; None when a row is missing."""
    idle, watt = _load(table, "idle", "power_w"), _load(table, name, "power_w", active)
    work, clock = _load(table, name, "work_per_second", active), _load(table, name, "effective_clock_mhz", active)
    clock = clock or _load(table, name, "nvml_clock_mhz", active)
    if idle is None or watt is None or work is None or clock is None:
        return None
    return (watt.value - idle.value) / work.value, clock.value / 1e3, (idle, watt, work, clock)


def _sweep(table: Table) -> str:
    """The matrix load that this chip ran on fewer SMs too."""
    return next((name for name in _SWEEPS if _energy(table, name)), _SWEEPS[0])


def _exponent(table: Table) -> Found | None:
    sweep = _sweep(table)
    full = _energy(table, sweep)
    fewer = [
        found
        for row in table.all("power/load", "power_w", load=sweep)
        if (active := int(str(table.params(row)["active_sms"]))) and (found := _energy(table, sweep, active))
    ]
    if full is None:
        return None
    # Clocks too close to the full chip's say nothing about a slope.
    slopes = [
        (ghz, math.log(joule / full[0]) / math.log(ghz / full[1]), rows)
        for joule, ghz, rows in fewer
        if ghz > 1.05 * full[1]
    ]
    if not slopes:
        return None
    values = [slope for _, slope, _ in slopes]
    rows = (*full[2], *(row for _, _, more in slopes for row in more))
    between = f"{full[1]:.2f} to {max(ghz for ghz, _, _ in slopes):.2f} GHz executed"
    return Found(sum(values) / len(values), min(values), max(values), rows, between)


def _at_1ghz(table: Table, *names: str) -> Found | None:
    """pJ an operation of the first load that was run, brought to 1 GHz; the range over all that were."""
    exponent = _exponent(table)
    found = [one for name in names if (one := _energy(table, name))]
    if exponent is None or not found:
        return None
    values = [joule * 1e12 / ghz**exponent.value for joule, ghz, _ in found]
    rows = tuple(row for one in found for row in one[2])
    return Found(values[0], min(values), max(values), rows, f"at 1 GHz by exponent {exponent.value:.2f}")


def _short_run(table: Table) -> Found | None:
    """Power of matrix work at the clock it runs at 10 to 50 ms after a rest: no meter is that fast, so by its energy."""
    sweep = _sweep(table)
    exponent, full = _exponent(table), _energy(table, sweep)
    clock = table.one("power/burst", "10_to_50ms_mhz", load=sweep)
    work, idle = _load(table, sweep, "work_per_second"), _load(table, "idle", "power_w")
    if exponent is None or full is None or clock is None or work is None or idle is None:
        return None

    def watt(mhz: float) -> float:
        ratio = mhz / 1e3 / full[1]
        return float(idle.value + full[0] * work.value * ratio ** (1 + exponent.value))

    return Found(
        watt(clock.value), watt(clock.low), watt(clock.high), (clock, *full[2]), "clock measured, power from its energy"
    )


def _hbm_energy(table: Table) -> Found | None:
    """Memory bytes do not follow the SM clock; what their L2 share takes comes off."""
    read, l2 = _energy(table, "hbm read"), _energy(table, "l2 read")
    if read is None or l2 is None:
        return None
    value = (read[0] - l2[0]) * 1e12
    return Found(
        value, min(value, read[0] * 1e12), max(value, read[0] * 1e12), (*read[2], *l2[2]), "high: with its L2 share"
    )


def _clock_share(table: Table) -> Found | None:
    shares, rows = [], []
    for row in table.all("power/load", "effective_clock_mhz"):
        params = table.params(row)
        name, active = str(params["load"]), int(str(params["active_sms"]))
        reported = _load(table, name, "nvml_clock_mhz", active)
        if name.split()[0] in ("wgmma", "tcgen05", "mma.sync") and reported is not None:
            shares.append(row.value / reported.value)
            rows += [row, reported]
    return Found(sorted(shares)[len(shares) // 2], min(shares), max(shares), tuple(rows)) if shares else None


#: Key of the machine file -> how it follows from the rows.
RULES: dict[str, Rule] = {
    "power.idle_w": lambda t: spread([_load(t, "idle", "power_w"), _load(t, "idle", "sampled_power_w")]),
    "power.short_run_w": _short_run,
    "power.energy_exponent": _exponent,
    "power.tensor_pj_per_flop_bf16": lambda t: _at_1ghz(t, *_BF16_LOADS),
    "power.tensor_pj_per_flop_fp8": lambda t: _at_1ghz(t, "wgmma fp8 n128 A in smem", "wgmma fp8 n256 A in smem"),
    "power.mufu_pj_per_op": lambda t: _at_1ghz(t, "ex2"),
    "power.fma_pj_per_op": lambda t: _at_1ghz(t, "ffma_3src"),
    "power.alu_pj_per_op": lambda t: _at_1ghz(t, "max2", "lop3", "pack_bf16x2"),
    "power.smem_pj_per_byte": lambda t: _at_1ghz(t, "ld_shared"),
    "power.l2_pj_per_byte": lambda t: _at_1ghz(t, "l2 read"),
    "power.hbm_pj_per_byte": _hbm_energy,
    "power.tensor_clock_share": _clock_share,
}
