"""What a forecast of a steady loop says beside its cycles."""

from __future__ import annotations

import pytest

from tilecast.codegen.compiler.steady_answer import as_dict, as_text
from tilecast.codegen.compiler.steady_forecast import SteadyForecast
from tilecast.model.compiled.roles.code import KernelRoles, RoleCode, RoleInstruction
from tilecast.model.compiled.roles.costs import role_costs
from tilecast.model.compiled.roles.run import run_roles
from tilecast.model.machine.machine import load_machine

PRODUCT = RoleInstruction(
    "tensor", 1, 0, 7, 7, "fixed", "wgmma", shape=(64, 128, 16), dtype="bf16", source="smem", amount=1
)
WAIT = RoleInstruction("other", 2, 0, 7, 7, "fixed", "wgmma_wait")


@pytest.mark.parametrize(
    ("loop", "serial"),
    [
        ((PRODUCT, WAIT) * 4, 4),
        ((PRODUCT, PRODUCT, WAIT, WAIT) * 4, 0),
        ((PRODUCT,) * 4 + (WAIT,), 0),
        # Scores and P V of one block: what each step waits for.
        ((PRODUCT, WAIT) * 2, 0),
    ],
)
def test_products_that_are_each_waited_for_are_told(loop: tuple[RoleInstruction, ...], serial: int) -> None:
    machine = load_machine("h200-sxm")
    kernel = KernelRoles("products", "sm_90a", (RoleCode("warp 0 (matrix)", 0, (), loop),), ())
    found = SteadyForecast("products.cubin", machine, kernel, run_roles(kernel, role_costs(machine)), None)
    assert found.one_by_one == as_dict(found)["products_one_by_one"] == serial
    assert ("products is waited for before the next" in as_text(found)) == bool(serial)
