"""``tilecast forecast FILE``: the steady loop of a kernel as text and JSON, and one sentence where there is none to forecast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.paths import ROOT

from tilecast.cli import main
from tilecast.codegen.compiler.compile import load_source
from tilecast.model.machine.machine import load_machine

KERNEL = str(ROOT / "kernels" / "generated" / "blackwell_ws_d64_full_pair.py")
BACKWARD = str(ROOT / "kernels" / "generated" / "hopper_bwd_d64_full.py")
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
    from support.shipped_compile import NEWEST, missing

    # Two CTAs' barriers.
    if why := missing(NEWEST):
        pytest.skip(why)
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
    between = load_machine("h200-sxm")["launch.cta_turnaround_cycles"]
    assert whole["cycles"] == pytest.approx(2 * (between + whole["ends_cycles"] + 63 * found["cycles_per_iteration"]))
    assert whole["tiles"] == 264 and whole["later_ends_cycles"] is None
    assert whole["milliseconds"] == pytest.approx(whole["cycles"] / found["clock_mhz"] * 1e-3)
    assert whole["busy"]["tensor"] < found["tensor_share"]
    # Rows that outgrow their reference are seen to in the loop itself.
    assert all(role["other_loops"] == [] for role in found["roles"])
    code, out, _ = run(capsys, *work)
    assert code == 0 and "264 CTAs of 64 iterations take" in out and "more loop" not in out
    # The same tiles by CTAs that stay: the second finds its first loads there, and nobody sets up anew.
    stay = ("forecast", kernel, "--machine", "h200-sxm", "--ctas", "132", "--tiles", "264", "--iterations", "64")
    again = json.loads(run(capsys, *stay, "--json")[1])["launch"]
    assert again["cycles"] == pytest.approx(
        whole["cycles"] - between + again["later_ends_cycles"] - whole["ends_cycles"]
    )
    assert 0 < again["later_ends_cycles"] < again["ends_cycles"] == whole["ends_cycles"]
    assert "132 CTAs share 264 tiles of 64 iterations, which take" in run(capsys, *stay)[1]


def test_a_backward_kernel_beside_its_loop_before_compilation(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    code, out, _ = run(capsys, "forecast", BACKWARD, "--machine", "h200", "--kernel", "gradients", "--json")
    found = json.loads(out)
    # The shape of the header: 128 keys a program, all its queries 128 at a time.
    work = load_source(BACKWARD).TILECAST["workload"]
    programs = work["batch"] * work["heads_kv"] * (work["seqlen_k"] // 128)
    assert (
        code == 0
        and found["launch"]["ctas"] == programs
        and found["launch"]["iterations"] == str(work["seqlen_q"] // 128)
    )
    # Five products of 128 x 128 a step, and 16 columns more for LSE and for D.
    assert found["flop_per_iteration_and_sm"] == 2 * 128 * 128 * (5 * 64 + 2 * 16)
    # Triton 3.9 spills some 40 registers, which is not known before compilation.
    assert 0.75 < found["cycles_per_iteration"] / found["cycles_before_compilation"] < 1.2
    # With K and V in registers the port of shared memory has less to do than the tensor core.
    assert found["busy"]["tensor"] > found["busy"]["port"] > 0.5
    adders = [role for role in found["roles"] if "copy out" in role["role"]]
    assert len(adders) == 2 and all(role["waits"] for role in adders)
    code, out, _ = run(capsys, "forecast", BACKWARD, "--machine", "h200", "--kernel", "gradients")
    assert code == 0 and "CTAs that add to the same dQ in a fixed order wait for each other" in out


#: A product of any author, tuned by Triton, whose caller looks at what was not computed.
PRODUCT = """
import torch, triton, triton.language as tl
import sizes

@triton.autotune([triton.Config({"M": 64}, num_warps=4), triton.Config({"M": 128}, num_warps=8)], key=["k"])
@triton.jit
def multiply(a, b, c, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns, inner = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, k, K):
        left = tl.load(a + rows[:, None] * k + (start + inner)[None, :])
        total = tl.dot(left, tl.load(b + (start + inner)[:, None] * n + columns[None, :]), total)
    tl.store(c + rows[:, None] * n + columns[None, :], total.to(tl.bfloat16))

def product(n):
    a, b, c = (torch.ones((n, n), dtype=torch.bfloat16, device="cuda") for _ in range(3))
    multiply[lambda meta: (n // meta["M"], n // sizes.WIDE)](a, b, c, n, n, N=sizes.WIDE, K=64)
    assert torch.equal(c, a @ b)

def nothing():
    raise IndexError("no such row")

def none():
    return 1
"""


@pytest.fixture
def product(tmp_path: Path) -> str:
    pytest.importorskip("triton")
    pytest.importorskip("torch")
    (tmp_path / "sizes.py").write_text("WIDE = 128\n")
    (tmp_path / "product.py").write_text(PRODUCT)
    return str(tmp_path / "product.py")


def test_anybodys_launch(product: str, capsys: pytest.CaptureFixture[str]) -> None:
    work = ("forecast", product, "--call", "product(512)", "--machine", "h200", "--iterations", "8")
    code, out, _ = run(capsys, *work, "--json")
    found = json.loads(out)
    assert code == 0 and found["kernel"] == "multiply" and found["cycles_before_compilation"] is None
    # The first configuration's tiles: 64 by 128 of 512 by 512.
    assert found["ctas"] == found["launch"]["ctas"] == 32 and found["configurations"] == 2
    assert found["flop_per_iteration_and_sm"] == 2 * 64 * 128 * 64 * found["ctas_per_sm"]
    assert found["ctas_per_sm"] > 1
    code, out, _ = run(capsys, *work, "--ctas-per-sm", "1")
    assert code == 0 and "launches 32 CTAs of multiply, the first of its 2 configurations; 1 on an SM" in out


@pytest.mark.parametrize(
    ("call", "more", "text"),
    [
        ("product(", (), "expected an expression like"),
        ("produkt(512)", (), "has no produkt; functions there: none, nothing, product"),
        ("nothing()", (), "its code ends before it launches a kernel: IndexError: no such row"),
        ("none()", (), "expected the call to launch a kernel, it launched none"),
        ("product(512)", ("--ctas", "8"), "drop --ctas"),
        ("product(512)", ("--tiles", "8"), "drop --ctas and --tiles"),
        ("product(512)", ("--kernel", "add"), "expected a kernel 'add', its launch starts multiply"),
    ],
)
def test_a_call_that_launches_nothing_to_forecast_is_one_sentence(
    call: str, more: tuple[str, ...], text: str, product: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "forecast", product, "--call", call, "--machine", "h200", *more)
    assert code == 2 and not out and text in err and err.count("\n") == 1


def test_an_e4m3_kernel_whose_warpgroups_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    kernel = str(ROOT / "kernels" / "generated" / "hopper_fp8_d128_causal.py")
    code, out, _ = run(capsys, "forecast", kernel, "--machine", "h200", "--json")
    found = json.loads(out)
    # Two warpgroups multiply 64 x 128 scores by head_dim 128 twice, 8192 operations a cycle and SM for 8 bits.
    assert code == 0 and found["tensor_share"] == pytest.approx(
        2 * 2 * 2 * 64 * 128 * 128 / 8192 / found["cycles_per_iteration"]
    )
    assert 0.7 < found["cycles_before_compilation"] / found["cycles_per_iteration"] < 1.4


@pytest.mark.parametrize("name", ["hopper_serve_d64", "gemm_hopper_turns"])
def test_a_generated_kernel_of_another_pass(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    code, out, _ = run(
        capsys, "forecast", str(ROOT / "kernels" / "generated" / f"{name}.py"), "--machine", "h200", "--json"
    )
    found = json.loads(out)
    assert code == 0 and found["cycles_before_compilation"] is None and 0.1 < found["tensor_share"] <= 1.0


#: The product in the loop of the listing.
WGMMA = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"


def test_a_kernel_without_products_is_told_by_what_it_moves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its launch also as memory sees it; of an A100's code the A100 is the machine."""
    listing = tmp_path / "loads.sass"
    listing.write_text(HOPPER.replace(WGMMA, "LDG.E.128 R4, desc[UR4][R2.64]").replace("SM90", "SM80"))
    asked = ("forecast", str(listing), "--warps", "4", "--ctas", "1080", "--iterations", "64")
    code, out, _ = run(capsys, *asked)
    assert code == 0 and "on NVIDIA A100" in out and "It multiplies no matrices there." in out and "keys" not in out
    found = json.loads(run(capsys, *asked, "--json")[1])
    # 16 CTAs of 4 warps fit; a lane loads 16 bytes.
    assert found["ctas_per_sm"] == 16 and found["bytes_by_lanes_per_iteration_and_sm"] == 16 * 4 * 32 * 16
    assert found["cycles_per_iteration"] >= found["bytes_by_lanes_per_iteration_and_sm"] / 21  # of L2, all SMs at once
    assert found["launch"]["memory_milliseconds"] == pytest.approx(1080 * 64 * 4 * 32 * 16 / 1.7e12 * 1e3)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((BACKWARD, "--machine", "h200"), "its launch starts row_terms, gradients, round_dq: which one? Say --kernel"),
        ((KERNEL,), "--machine: which machine? b200, b300, or a file of your own"),
        (("LISTING", "--warps", "4", "--ctas", "8"), "--ctas and --iterations"),
        (
            ("LISTING", "--warps", "4", "--ctas", "8", "--iterations", "1:2:3"),
            "expected a number such as 128, or a range",
        ),
        (("LISTING", "--machine", "b200", "--warps", "4"), "expected code for sm_100a (b200), got sm_90a"),
        (("COUNTS", "--machine", "h200", "--warps", "4"), "expected a loop that multiplies, computes or moves data"),
        (("LISTING", "--machine", "h200"), "say --warps"),
        (("LISTING", "--machine", "b2000"), "b2000"),
        (("LISTING", "--machine", "h200", "--set", "mufu.ex2=none"), "mufu.ex2"),
        (("none.cubin",), "found none"),
        ((KERNEL, "--arch", "sm_90a"), "--arch: expected sm_100a, sm_103a, got 'sm_90a'"),
        ((KERNEL, "--machine", "b200", "--arch", "sm_90a"), "--arch: b200 is sm_100a, got 'sm_90a'"),
        (("none.py",), "none.py: cannot read the kernel: No such file or directory"),
        (("PLAIN",), "found no TILECAST header; forecast and emulate take any other with --call"),
        (("PLAIN", "--call", "main()"), "--machine: which machine? a100, h200-sxm, b200, b300, or a file of your own"),
    ],
)
def test_what_cannot_be_forecast_is_one_sentence(
    arguments: tuple[str, ...], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listing = tmp_path / "loop.sass"
    listing.write_text(HOPPER)
    counts = tmp_path / "counts.sass"
    counts.write_text(HOPPER.replace(WGMMA, "IADD3 R1, R1, 0x1, RZ"))
    plain = tmp_path / "plain.py"
    plain.write_text("def f(): ...")
    files = {"LISTING": str(listing), "COUNTS": str(counts), "PLAIN": str(plain)}
    code, out, err = run(capsys, "forecast", *(files.get(one, one) for one in arguments))
    assert code == 2 and not out and text in err and err.count("\n") == 1
