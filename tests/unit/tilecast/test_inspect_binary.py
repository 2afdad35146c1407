"""``tilecast inspect`` of files that are not ours: what it prints, and one sentence where it asks or refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tilecast.cli import main

LISTING = """
\t.section\t.text.pipeline,"ax",@progbits
\t.headerflags\t@"EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/                   UMOV UR6, 0x400 ;
        /*0020*/                   ISETP.GT.U32.AND P1, PT, R0, 0x1f, PT ;
        /*0030*/              @P1 BRA `(.L_x_1) ;
        /*0040*/                   UIADD3 UR9, UR6, 0x8, URZ ;
.L_x_0:
        /*0050*/                   UTMALDG.2D [UR8], [UR4], desc[URZ] ;
        /*0060*/              @P0 BRA `(.L_x_0) ;
        /*0070*/                   EXIT ;
.L_x_1:
        /*0080*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR6+0x8], R3 ;
        /*0090*/             @!P2 BRA `(.L_x_1) ;
        /*00a0*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*00b0*/              @P0 BRA `(.L_x_1) ;
        /*00c0*/                   EXIT ;
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


@pytest.fixture
def listing(tmp_path: Path) -> str:
    file = tmp_path / "pipeline.sass"
    file.write_text(LISTING)
    return str(file)


def test_roles_loops_and_barriers_are_printed(listing: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "inspect", listing, "--warps", "5")
    assert code == 0
    lines = [line.strip() for line in out.splitlines()]
    assert lines[0] == f"pipeline of {listing}, compiled for sm_90a"
    assert "5 warps a CTA, 0 mbarriers set up, 2 of 2 uses of a barrier in loops resolved" in lines
    begin = lines.index("warp 0: copy in")
    assert lines[begin + 1] == "loop 0 at 0x50: 2 instructions"
    assert "copies        1 UTMALDG -> 0x408" in lines[begin:]
    begin = lines.index("warps 1-4: matrix")
    assert {"waits         0x408", "matrix        1 HGMMA 64x64x16, A in shared"} <= set(lines[begin:])


def test_the_same_as_json(listing: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "inspect", listing, "--warps", "5", "--json")
    found = json.loads(out)
    assert code == 0 and found["arch"] == "sm_90a" and found["registers"] is None and found["roles"] == []
    copy, multiply = found["structure"]["roles"]
    assert copy["loops"][0]["copies"][0]["barrier"] == multiply["loops"][0]["waits"][0]["barrier"] == "0x408"
    assert multiply["loops"][0]["matrix"] == [
        {"opcode": "HGMMA", "shape": [64, 64, 16], "source": "shared", "pair": False, "count": 1}
    ]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "say --warps"),
        (("--warps", "40"), "expected 1 to 32 warps of a CTA, got 40"),
        (("--warps", "5", "--arch", "sm_80"), "expected code for sm_80, got sm_90a"),
        (("--warps", "5", "--arch", "sm_90"), "--arch: expected sm_80, sm_90a"),
        (("--warps", "5", "--kernel", "other"), "expected a kernel 'other', got pipeline"),
    ],
)
def test_what_it_asks_for_is_one_sentence(
    listing: str, options: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "inspect", listing, *options)
    assert code == 2 and not out and text in err and err.count("\n") == 1


def test_a_source_for_several_targets_needs_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "inspect", "blackwell_ws_d64_full")
    assert code == 2 and not out and "--arch" in err and err.count("\n") == 1
