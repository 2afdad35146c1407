"""exp2 on the FMA pipe: coefficients, and which exponentials of a group are emulated.

p(f) approximates 2^f on [0, 1); coefficients of f, f^2, ... are FlashAttention-4's minimax fits (FA4C: utils.py,
POLY_EX2, fpminimax with 24-bit coefficients, relative error), the constant term is 1.
"""

from __future__ import annotations

COEFFICIENTS: dict[int, tuple[float, ...]] = {
    1: (0.922497093677520751953125,),
    2: (0.6657850742340087890625, 0.330107033252716064453125),
    3: (0.695146143436431884765625, 0.227564394474029541015625, 0.077119089663028717041015625),
    4: (0.693042695522308349609375, 0.2412912547588348388671875, 0.052225358784198760986328125, 0.013434938155114650726318359375),
    5: (0.693151414394378662109375, 0.24016360938549041748046875, 0.055802188813686370849609375, 0.00901452265679836273193359375, 0.00186810153536498546600341796875),
}  # fmt: skip


def emulated_of_eight(share: float) -> int | None:
    """How many of eight neighbouring exponentials are emulated; None when ``share`` is no multiple of an eighth."""
    count = round(share * 8)
    return count if abs(share * 8 - count) < 1e-9 and 0 <= count <= 8 else None
