"""``tilecast forecast FILE``: the steady loop of a kernel as text and JSON, and one sentence where there is none to forecast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.paths import ROOT

from tilecast.cli.main import main

KERNEL = str(ROOT / "kernels" / "generated" / "blackwell_ws_d64_full_pair.py")
HOPPER = """
\t.section\t.text.loop,"ax",@progbits
\t.headerflags\t@"EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"
        /*0000*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0010*/              @P0 BRA 0x0 ;
        /*0020*/                   EXIT ;
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


def test_a_generated_kernel_beside_its_forecast_before_compilation(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    code, out, _ = run(capsys, "forecast", KERNEL, "--machine", "b200", "--json")
    found = json.loads(out)
    assert code == 0 and found["machine"] == "b200" and found["arch"] == "sm_100a"
    cycles = found["cycles_per_iteration"]
    assert found["cycles_before_compilation"] > 0.5 * cycles
    assert found["tensor_share"] == pytest.approx((8 * 64 + 16 * 32) / cycles) == found["busy"]["tensor"]
    # FLOP a cycle of an SM, 148 SMs, the clock of the machine file.
    assert found["tflops_in_the_loop"] == pytest.approx(
        found["flop_per_iteration_and_sm"] / cycles * 148 * 1845e6 / 1e12
    )
    assert [role["role"] for role in found["roles"]][3] == "warp 14 (matrix)"
    assert all(0 <= stood <= cycles for role in found["roles"] for stood in role["waits"].values())
    code, out, _ = run(capsys, "forecast", KERNEL, "--machine", "b200", "--scale", "mufu.ex2_per_clk=0.5")
    assert code == 0 and "busy   mufu" in out and "Before compilation the same loop is forecast at" in out


def test_a_launch_of_a_hopper_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    kernel = str(ROOT / "kernels" / "generated" / "hopper_ws_d64_full.py")
    work = ("forecast", kernel, "--machine", "h200-sxm", "--ctas", "264", "--iterations", "64")
    code, out, _ = run(capsys, *work, "--json")
    found = json.loads(out)
    whole = found["launch"]
    # Two CTAs on each of 132 SMs, one after the other; one block's products stand outside of the loop.
    assert whole["cycles"] == pytest.approx(2 * (whole["ends_cycles"] + 63 * found["cycles_per_iteration"]))
    assert whole["milliseconds"] == pytest.approx(whole["cycles"] / found["clock_mhz"] * 1e-3)
    assert whole["busy"]["tensor"] < found["tensor_share"]
    # Rows that outgrow their reference are seen to in the loop itself.
    assert all(role["other_loops"] == [] for role in found["roles"])
    code, out, _ = run(capsys, *work)
    assert code == 0 and "264 CTAs of 64 iterations take" in out and "more loop" not in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((KERNEL,), "which machine? h200-sxm, b200, b300, or a file of your own"),
        (("LISTING", "--warps", "4", "--ctas", "8"), "--ctas and --iterations"),
        (
            ("LISTING", "--warps", "4", "--ctas", "8", "--iterations", "1:2:3"),
            "expected a number such as 128, or a range",
        ),
        (("LISTING", "--machine", "b200", "--warps", "4"), "expected code for sm_100a (b200), got sm_90a"),
        (("ADDS", "--machine", "h200", "--warps", "4"), "expected a loop with matrix products, found none"),
        (("LISTING", "--machine", "h200"), "say --warps"),
        (("LISTING", "--machine", "b2000"), "b2000"),
        (("LISTING", "--machine", "h200", "--set", "mufu.ex2=none"), "mufu.ex2"),
        (("none.cubin",), "found none"),
    ],
)
def test_what_cannot_be_forecast_is_one_sentence(
    arguments: tuple[str, ...], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listing = tmp_path / "loop.sass"
    listing.write_text(HOPPER)
    adds = tmp_path / "adds.sass"
    adds.write_text(HOPPER.replace("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0", "FADD R1, R1, R2"))
    files = {"LISTING": str(listing), "ADDS": str(adds)}
    code, out, err = run(capsys, "forecast", *(files.get(one, one) for one in arguments))
    assert code == 2 and not out and text in err and err.count("\n") == 1
