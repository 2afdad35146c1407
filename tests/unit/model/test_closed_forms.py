"""Closed forms against the tables of the FlashAttention-4 paper and against traffic counted by brute force."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import sympy

from tilecast.model.closed_forms import (
    DemandError,
    backward_forms,
    break_evens,
    demand_dict,
    demand_report,
    fa1_elements,
    forward_forms,
    fused_traffic,
    refetch_bytes,
    unfused_traffic,
    values_for,
)
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine


def cycles(
    machine: str, workload: Workload, tile_m: int = 128, tile_n: int = 128, share: float = 0.0
) -> dict[str, float]:
    """Forward cycles by name."""
    values = values_for(load_machine(machine), workload, tile_m, tile_n, share)
    # Machines without tensor memory have no rate for it.
    return {form.name: form.evaluate(values) for form in forward_forms() if "TMEM" not in form.name}


def dims(qk: int, v: int, dtype: str = "bf16") -> Workload:
    return Workload(head_dim_qk=qk, head_dim_v=v, dtype=dtype)


@pytest.mark.parametrize(
    ("tile_m", "mma", "exp", "smem"),
    [(128, 1024.0, 1024.0, 768.0), (256, 2048.0, 2048.0, 1536.0)],
)
def test_forward_table_of_the_paper(tile_m: int, mma: float, exp: float, smem: float) -> None:
    found = cycles("b200", dims(128, 128), tile_m)
    assert (found["T_MMA"], found["T_EXP"], found["T_SMEM"]) == (mma, exp, smem)


def test_hopper_takes_twice_the_matrix_time() -> None:
    found = cycles("h100-sxm", dims(128, 128))
    assert (found["T_MMA"], found["T_EXP"]) == (2048.0, 1024.0)


@pytest.mark.parametrize(
    ("machine", "qk", "v", "dtype", "mma", "exp"),
    [
        ("b200", 64, 64, "bf16", 512.0, 1024.0),
        ("b200", 192, 128, "bf16", 1280.0, 1024.0),
        ("b200", 256, 256, "bf16", 2048.0, 1024.0),
        ("b200", 128, 128, "fp8", 512.0, 1024.0),
        ("b300", 128, 128, "bf16", 1024.0, 512.0),
        ("b300", 128, 128, "fp8", 512.0, 512.0),
        ("b300", 64, 64, "bf16", 512.0, 512.0),
    ],
)
def test_derived_shapes(machine: str, qk: int, v: int, dtype: str, mma: float, exp: float) -> None:
    found = cycles(machine, dims(qk, v, dtype))
    assert (found["T_MMA"], found["T_EXP"]) == (mma, exp)


BACKWARD_1CTA = {
    "T_MMA": 2560.0, "T_EXP": 1024.0, "T_SMEM": 3328.0, "smem S": 512.0, "smem dP": 512.0, "smem dV": 256.0,
    "smem dK": 256.0, "smem dQ": 512.0, "smem dS write": 256.0, "smem dQ fp32": 1024.0,
}  # fmt: skip
BACKWARD_2CTA = {
    "T_MMA": 2560.0, "T_EXP": 1024.0, "T_SMEM": 2688.0, "smem S": 384.0, "smem dP": 384.0, "smem dV": 128.0,
    "smem dK": 128.0, "smem dQ": 512.0, "smem dS write": 256.0, "smem dS exchange": 384.0, "smem dQ fp32": 512.0,
}  # fmt: skip


@pytest.mark.parametrize(("pair", "table"), [(False, BACKWARD_1CTA), (True, BACKWARD_2CTA)])
def test_backward_tables_of_the_paper_with_every_item(pair: bool, table: dict[str, float]) -> None:
    values = values_for(load_machine("b200"), dims(128, 128), 128, 128)
    assert {form.name: form.evaluate(values) for form in backward_forms(pair)} == table
    assert sum(c for name, c in table.items() if name.startswith("smem")) == table["T_SMEM"]


def test_emulation_moves_exponentials_from_mufu_to_fma() -> None:
    none, some = cycles("b200", dims(128, 128)), cycles("b200", dims(128, 128), share=0.1875)
    assert (none["T_MUFU"], none["T_FMA"]) == (1024.0, 256.0)
    assert some["T_MUFU"] == 832.0
    # 7.45 FMA slots for each emulated exponential (cudnn-frontend PR #1178) over 128 lanes.
    assert some["T_FMA"] == pytest.approx(256.0 + 7.45 * 0.1875 * 128 * 128 / 128, rel=1e-12)
    assert some["T_EXP"] == none["T_EXP"]


@pytest.mark.parametrize(("machine", "dim"), [("b200", 128.0), ("b300", 64.0), ("h100-sxm", 64.0)])
def test_head_dim_at_which_exponentials_equal_matrix_work(machine: str, dim: float) -> None:
    found = break_evens(load_machine(machine), dims(128, 128))
    assert found["head_dim at which exponentials equal matrix work"] == dim


def test_emulated_share_that_frees_the_matrix_unit() -> None:
    chip = load_machine("b200")
    name = "emulated share at which MUFU equals matrix work"
    assert break_evens(chip, dims(128, 128, "fp8"))[name] == 0.5
    assert break_evens(chip, dims(128, 128))[name] == 0.0  # T_MUFU and T_MMA are both 1024 cycles
    assert break_evens(chip, dims(256, 256))[name] is None


def test_mufu_and_fma_are_equally_busy_at_the_share_that_says_so() -> None:
    share = break_evens(load_machine("b200"), dims(128, 128))["emulated share at which MUFU equals the FMA pipe"]
    assert share is not None
    found = cycles("b200", dims(128, 128), share=share)
    assert found["T_MUFU"] == pytest.approx(found["T_FMA"], rel=1e-12)


def counted_unfused_bytes(w: Workload, intermediate: int) -> int:
    """Three kernels that touch every element one by one."""
    total = 0
    for _batch in range(w.batch):
        for head in range(w.heads_q):
            for _row in range(w.seqlen_q):
                total += w.head_dim_qk * w.dtype_bytes  # Q
                total += w.head_dim_v * 2  # O, 16 bit
                for _key in range(w.seqlen_k):
                    total += 4 * intermediate  # S out, S in, P out, P in
            if head % (w.heads_q // w.heads_kv) == 0:
                for _key in range(w.seqlen_k):
                    total += (w.head_dim_qk + w.head_dim_v) * w.dtype_bytes
    return total


@pytest.mark.parametrize("intermediate", [2, 4])
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_unfused_traffic_is_what_a_loop_counts(intermediate: int, mask: str, dtype: str) -> None:
    w = Workload(2, 4, 2, 24, 40, 48, 32, mask, None, dtype)
    # The full score matrix is computed and then masked: causal moves as much.
    assert unfused_traffic(w, intermediate).total == counted_unfused_bytes(w, intermediate)


def test_fused_traffic_is_each_tensor_once() -> None:
    w = Workload(2, 4, 2, 24, 40, 48, 32)
    q, k, v, o = 2 * 4 * 24 * 48 * 2, 2 * 2 * 40 * 48 * 2, 2 * 2 * 40 * 32 * 2, 2 * 4 * 24 * 32 * 2
    assert fused_traffic(w).total == q + k + v + o
    # What is left of the unfused traffic is the score matrix, four times.
    assert unfused_traffic(w).total - fused_traffic(w).total == 4 * 2 * 4 * 24 * 40 * 2


def test_unfused_traffic_grows_with_the_square_of_the_length() -> None:
    short, long = (Workload(seqlen_q=n, seqlen_k=n) for n in (65536, 131072))
    assert unfused_traffic(long).total / unfused_traffic(short).total == pytest.approx(4.0, rel=0.01)
    assert fused_traffic(long).total / fused_traffic(short).total == 2.0


def test_flash_attention_1_bound_equals_the_score_matrix_at_d_squared_on_chip() -> None:
    assert fa1_elements(4096, 128, 128 * 128) == 4096.0**2
    assert fa1_elements(4096, 128, 2 * 128 * 128) == 4096.0**2 / 2


@pytest.mark.parametrize("machine", ["b200", "gb300", "h100-sxm", "a100"])
def test_expressions_of_the_json_give_its_numbers(machine: str) -> None:
    chip, w = load_machine(machine), dims(192, 128)
    data = json.loads(json.dumps(demand_dict(chip, w)))
    values = values_for(chip, w, 128, 128)
    for section in ("forward", "backward_1cta", "backward_2cta"):
        assert data[section] or machine in ("h100-sxm", "a100")
        for row in data[section]:
            parsed = sympy.sympify(row["expression"], locals={name: sympy.Symbol(name) for name in values})
            assert float(parsed.subs(values)) == pytest.approx(row["cycles"], rel=1e-12)


def test_report_shows_expressions_and_numbers() -> None:
    text = demand_report(load_machine("b200"), dims(128, 128))
    for piece in ("2*M*N*(d + v)/F", "1024", "3328", "2688", "FlashAttention-1"):
        assert piece in text


@pytest.mark.parametrize("width", [120, 80])
def test_descriptions_stand_below_each_other(width: int) -> None:
    table = demand_report(load_machine("b200"), dims(128, 128), width=width).split("\n\n")[2].split("\n")
    assert max(map(len, table)) <= width
    (shared,) = (i for i, line in enumerate(table) if line.strip().startswith("T_SMEM"))
    form = table[shared : next(i for i, line in enumerate(table) if "shared memory, sum" in line)]
    assert form[-1].endswith("N*b*v/W")
    place = table[1].index("matrix unit: S") if width == 120 else table[1].index("2*M") + 6
    assert [line.index("shared memory, sum") for line in table if "shared memory, sum" in line] == [place]


def test_machines_without_tensor_memory_show_none() -> None:
    names = [row["name"] for row in demand_dict(load_machine("h100-sxm"), dims(128, 128))["forward"]]
    assert not any("TMEM" in name for name in names)


def test_backward_of_unequal_head_dims_counts_each_product_at_its_own() -> None:
    values = values_for(load_machine("b200"), dims(192, 128), 128, 128)
    found = {form.name: form.evaluate(values) for form in backward_forms()}
    # S, dK, dQ over 192, dP and dV over 128.
    assert found["T_MMA"] == 2 * 128 * 128 * (3 * 192 + 2 * 128) / 8192 == 3328.0
    assert (found["smem S"], found["smem dP"], found["smem dV"], found["smem dK"]) == (768.0, 512.0, 256.0, 384.0)


def test_hopper_reads_its_second_operand_every_64_rows() -> None:
    # Q 256 clk once, K and V 256 clk for each of two m64 instructions.
    assert cycles("h100-sxm", dims(128, 128))["T_SMEM"] == 1280.0


@pytest.mark.parametrize(("m", "n", "name"), [(0, 128, "--tile-m"), (128, -1, "--tile-n")])
def test_an_empty_tile_is_refused(m: int, n: int, name: str) -> None:
    with pytest.raises(DemandError, match=name):
        demand_report(load_machine("b200"), dims(128, 128), m, n)


def test_a_dtype_the_machine_lacks_is_refused() -> None:
    with pytest.raises(DemandError, match="a100 has no fp8 matrix rate"):
        demand_report(load_machine("a100"), dims(128, 128, "fp8"))


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize(("m", "n"), [(16, 8), (8, 16), (24, 8)])
def test_refetch_is_what_a_loop_over_tiles_counts(mask: str, m: int, n: int) -> None:
    w = Workload(2, 4, 2, 40, 56, 48, 32, mask)
    blocks = 0
    for tile in range(0, w.seqlen_q, m):
        rows = range(tile, min(tile + m, w.seqlen_q))
        seen = {key // n for row in rows for key in range(w.seqlen_k) if mask == "none" or key <= row + 16}
        blocks += len(seen)
    assert refetch_bytes(w, m, n) == 2 * 4 * blocks * n * (48 + 32) * 2


def test_importing_the_module_does_not_load_sympy() -> None:
    code = "import sys, tilecast.model.closed_forms; sys.exit('sympy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
