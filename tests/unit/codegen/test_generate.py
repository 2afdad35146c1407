"""Generation: variants to files, refusals with their reason, shipped files byte for byte, instruction mix."""

from __future__ import annotations

import ast
import json
import sys
from functools import cache
from pathlib import Path

import pytest
from support.paths import ROOT

from tilecast import __version__
from tilecast.cli import main
from tilecast.codegen.compiler.inspection import inspect
from tilecast.codegen.exp2 import COEFFICIENTS, emulated_of_eight
from tilecast.codegen.generate import generate
from tilecast.codegen.hopper.forward import context, issue_order, pieces
from tilecast.codegen.render import RenderError, format_source, render
from tilecast.codegen.shipping import ship
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.families import FAMILIES, build_pipeline, find_family, legality, parse_variant, writable
from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.header import HeaderError, header_text, header_workload, read_header, without_header
from tilecast.model.kernel.variants.fa3 import Fa3Variant
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.search.best import best, search_space

H200, A100, B200 = load_machine("h200-sxm"), load_machine("a100"), load_machine("b200")
HOPPER = FAMILIES["fa3"]
W = Workload()


# --- variants -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("mask", ["none", "causal", "window"])
def test_every_head_dim_has_hopper_variants_and_all_of_them_are_legal(dims, mask) -> None:
    work = Workload(head_dim_qk=dims[0], head_dim_v=dims[1], mask=mask, window=(64, 0) if mask == "window" else None)
    space = search_space(work, H200, "fa3").variants
    assert len(space) == len(set(space)) >= 10
    for variant in space:
        assert legality(variant, work, H200).legal
        assert writable(variant, work, H200).legal


@pytest.mark.parametrize(
    ("variant", "work", "text"),
    [
        ("tile_n=80", W, r"tile_n 32, 64, 128 or 256 .*, got 80"),
        ("warpgroups=3,tile_n=128,ping_pong=false", W, r"a consumer thread.* needs .* registers .* \(over by \d+\)"),
        ("kv_stages=6,tile_n=128", W, r"shared memory .* needs .* bytes but the limit is .* \(over by \d+\)"),
        ("emulated_share=0.2", W, r"must be a multiple of 0.125, got 0.2: use 0.25"),
        ("scheduler=work-stealing", W, r"grid, persistent, longest-first, paired, got 'work-stealing'"),
        ("tile_n=64", Workload(head_dim_qk=80, head_dim_v=80), r"multiple of 32"),
    ],
)
def test_what_cannot_be_written_names_resource_and_lever(variant, work, text) -> None:
    with pytest.raises(VariantError, match=text):
        generate(work, H200, HOPPER, parse_variant(f"family=fa3,{variant}"))


def test_anchored_variants_have_neither_row_max_nor_rescale() -> None:
    kinds = {op.kind for op in build_pipeline(W, Fa3Variant(rescale="anchored", ping_pong=False), H200).ops}
    assert not kinds & {"row max", "rescale"}
    assert {"row max", "rescale"} <= {op.kind for op in build_pipeline(W, Fa3Variant(), H200).ops}


def test_anchoring_never_slows_the_forecast() -> None:
    for dim in (64, 128):
        work = Workload(head_dim_qk=dim, head_dim_v=dim)
        knobs = {"tile_n": 64, "ping_pong": False, "scheduler": "persistent"}
        always, anchored = (
            predict(work, H200, Fa3Variant(rescale=r, **knobs), interval=False) for r in ("always", "anchored")
        )
        assert anchored.time_ms < always.time_ms


def test_the_issue_order_and_the_rings_come_from_the_pipeline() -> None:
    variant = Fa3Variant(tile_n=64, kv_stages=3, q_stages=2, ping_pong=False)
    pipeline = build_pipeline(W, variant, H200)
    program = next(role.program for role in pipeline.roles if role.name == "consumer0")
    matrix = [step.op.rstrip("0") for step in program if pipeline.op(step.op).engine == "tensor"]
    values = context(variant, W, H200)
    assert list(values.issue_order) == matrix == list(issue_order(pipeline))
    depth = {buffer.name: buffer.depth for buffer in pipeline.buffers}
    assert (values.kv_stages, values.q_stages) == (depth["K"], depth["Q"]) == (3, 2)


@pytest.mark.parametrize("width", range(32, 257, 32))
def test_pieces_are_powers_of_two_that_cover_the_head(width) -> None:
    parts = pieces(width)
    assert sum(p.width for p in parts) == width
    assert all(p.width & (p.width - 1) == 0 for p in parts)
    assert [p.offset for p in parts] == [sum(q.width for q in parts[:i]) for i in range(len(parts))]


def test_best_by_forecast_is_the_fastest_of_its_space() -> None:
    work = Workload(head_dim_qk=256, head_dim_v=256)
    found = best(work, H200, "fa3")
    times = [
        predict(work, H200, v, interval=False, compiler=None).time_ms for v in search_space(work, H200, "fa3").variants
    ]
    assert found.seconds * 1e3 == pytest.approx(min(times), abs=1e-6)


def test_a_family_for_another_machine_is_refused_with_the_reason() -> None:
    with pytest.raises(PredictError, match=r"wgmma.*use family fa4"):
        best(W, B200, "fa3")


# --- polynomial exp2 ----------------------------------------------------------------------------------------

#: Largest relative error on [0, 1) with these coefficients in exact arithmetic; degree 3 and 5 as the paper gives them.
WORST = {1: 8e-2, 2: 2.2e-3, 3: 8.9e-5, 4: 3.2e-6, 5: 1.5e-7}


@pytest.mark.parametrize("degree", sorted(COEFFICIENTS))
def test_polynomials_reach_their_error(degree) -> None:
    worst = 0.0
    for i in range(4096):
        f = i / 4096
        value = 1.0 + sum(c * f ** (n + 1) for n, c in enumerate(COEFFICIENTS[degree]))
        worst = max(worst, abs(value / 2.0**f - 1.0))
    assert WORST[degree] / 20 < worst < WORST[degree]


def test_shares_are_eighths() -> None:
    assert [emulated_of_eight(n / 8) for n in range(9)] == list(range(9))
    assert emulated_of_eight(0.2) is None


# --- files --------------------------------------------------------------------------------------------------


def test_shipped_files_are_what_the_generator_writes() -> None:
    wanted = dict(ship.files(__version__))
    for path, text in wanted.items():
        assert (ship.KERNELS / path).read_text(encoding="utf-8") == text, f"{path}: run make kernels"
    there = {p.relative_to(ship.KERNELS) for p in (ship.KERNELS / "generated").glob("*.py")}
    assert there == {path for path in wanted if path.suffix == ".py" and path.parts[0] == "generated"}


@cache
def _tree(path: Path) -> ast.Module:
    """A generated file, read once: there are two hundred."""
    return ast.parse(path.read_text(encoding="utf-8"))


def test_headers_read_back_without_importing() -> None:
    others = (
        *ship.read_e4m3_list(),
        *ship.read_backward_list(),
        *ship.read_serving_list(),
        *ship.read_short_list(),
        *ship.read_append_list(),
    )
    for kernel in (*ship.read_list(), *others):
        path = ship.KERNELS / "generated" / f"{kernel.module}.py"
        text = path.read_text(encoding="utf-8")
        header = read_header(text, path)
        assert header["tilecast"] == __version__
        assert header_workload(header) == kernel.workload
        # The header is all that a file says about one workload among those it serves.
        assert "TILECAST = {" not in without_header(text)
        assert isinstance(_tree(path).body[0].value.value, str)  # the docstring


def test_the_index_has_the_forecasts() -> None:
    rows = json.loads((ship.KERNELS / "generated" / "index.json").read_text(encoding="utf-8"))
    forward = [row for row in rows if "pass" not in row]
    others = (*ship.read_backward_list(), *ship.read_serving_list(), *ship.read_short_list())
    assert [row["module"] for row in rows[len(forward) :]] == [kernel.module for kernel in others]
    for row, kernel in zip(forward, (*ship.read_list(), *ship.read_e4m3_list()), strict=True):
        assert row["forecast"]["workload"] == kernel.workload.label()
        assert row["forecast"]["tflops"] > 0
        assert set(row["forecast"]["unit_share"]) >= {"tensor", "mufu", "fma", "alu", "issue"}


def test_generated_files_import_triton_and_torch_alone() -> None:
    known = {"torch", "triton", *sys.stdlib_module_names}
    for path in (ship.KERNELS / "generated").glob("*.py"):
        for node in ast.walk(_tree(path)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= known, path


def test_the_same_input_gives_the_same_file() -> None:
    variant = Fa3Variant(tile_n=64, ping_pong=False, rescale="anchored")
    assert generate(W, H200, HOPPER, variant).source == generate(W, H200, HOPPER, variant).source


@pytest.mark.parametrize(
    "knobs", ["rescale=conditional", "rescale=always", "overlap=false", "emulated_share=0.25,poly_degree=5"]
)
@pytest.mark.parametrize("mask", ["none", "window"])
def test_every_knob_renders_valid_python(knobs, mask) -> None:
    work = Workload(mask=mask, window=(5, 5) if mask == "window" else None)
    made = generate(work, H200, HOPPER, parse_variant(f"family=fa3,tile_n=64,{knobs}"))
    ast.parse(made.source)
    assert format_source(made.source) == made.source


def test_undefined_names_in_a_template_are_errors() -> None:
    with pytest.raises(RenderError, match=r"hopper_ws.py.j2: 'k' is undefined"):
        render("hopper_ws.py.j2", {})


def test_header_text_is_a_literal() -> None:
    header = {"family": "f", "machine": "m", "a": {"b": [None, 'quoted "x"', 0.5]}, "variant": "v"}
    text = f'"""Doc."""\n\n{header_text(header)}\n\nrest = 1\n'
    assert read_header(text, "k.py") == header
    assert without_header(text) == '"""Doc."""\n\n\nrest = 1\n'
    with pytest.raises(HeaderError, match=r"k\.py: expected a file written by 'tilecast generate'"):
        read_header("rest = 1\n", "k.py")


def test_the_portable_family_runs_on_ampere_without_descriptors() -> None:
    made = generate(W, A100, find_family("triton"), parse_variant("family=fa2,tile_m=64,tile_n=64"))
    assert "TensorDescriptor" not in made.source
    assert made.header["targets"] == ["sm_80", "sm_90a", "sm_100a", "sm_103a"]


# --- command line -------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_generate_writes_a_file_and_says_what_it_is(tmp_path: Path, capsys) -> None:
    file = tmp_path / "kernel.py"
    code, out, _ = run(capsys, "generate", "--machine", "h200-sxm", "--head-dim", "128", "--causal", "-o", str(file))
    assert code == 0
    assert "rescale=anchored" in out and "TFLOP/s" in out and "sm_90a" in out
    assert "def launch(q, k, v, out, lse, scale" in file.read_text(encoding="utf-8")


def test_generate_lists_the_space_by_forecast(capsys) -> None:
    code, out, _ = run(capsys, "generate", "--machine", "h200-sxm", "--head-dim", "256", "--list")
    speeds = [float(line.split()[0]) for line in out.splitlines() if "family=fa3" in line]
    assert code == 0 and len(speeds) > 10 and speeds == sorted(speeds, reverse=True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--family", "hoper"], "did you mean hopper or hopper_ws"),
        (["--variant", "tile_n=80"], "power-of-two"),
        (["--variant", "warpgruops=3"], "did you mean warpgroups"),
        (["--family", "triton", "--variant", "family=fa3,tile_n=64"], "contradict each other"),
        (["--head-dim", "512"], "a consumer thread needs 340 registers but the limit is 240"),
        (["--dtype", "fp8", "--variant", "rescale=anchored"], "use rescale=always or conditional"),
        (["--dtype", "fp8", "--head-dim", "96"], "head_dim_qk must be 32, 64, 128, 256 in e4m3, got 96"),
    ],
)
def test_bad_requests_are_one_sentence_and_leave_nothing(arguments, text, tmp_path: Path, capsys) -> None:
    file = tmp_path / "kernel.py"
    code, out, err = run(capsys, "generate", "--machine", "h200-sxm", "-o", str(file), *arguments)
    assert code == 2 and not out and text in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_inspect_reports_the_mix_beside_the_forecast(capsys) -> None:
    pytest.importorskip("triton")
    file = ship.KERNELS / "generated" / "hopper_ws_d128_causal.py"
    code, out, _ = run(capsys, "inspect", str(file), "--arch", "sm_90a", "--json")
    report = json.loads(out)
    assert code == 0 and report["spill_bytes"] == 0 and report["matrix_instructions"] > 0
    assert [role["role"] for role in report["roles"]] == ["consumer0", "consumer1", "load"]
    for role in report["roles"][:2]:
        assert not role["pipes"]["mufu"]["flagged"]
        # One exponential, one multiply-add and one add an element: 64 x 64 over 128 threads.
        assert role["pipes"]["mufu"]["compiled"] == 32
        assert role["opcodes"]["FFMA"] + role["opcodes"]["FADD"] == 64
        # The pipe also takes the integer multiply-adds by which the compiler moves and scales.
        assert 64 <= role["pipes"]["fma"]["compiled"] <= 68
    assert report["roles"][2]["pipes"]["tensor"]["compiled"] == report["roles"][2]["pipes"]["mufu"]["compiled"] == 0


def test_inspect_finds_every_role_of_a_blackwell_kernel() -> None:
    pytest.importorskip("triton")
    # The kernel that other tests compile as well: once for all.
    report = inspect(ship.KERNELS / "generated" / "blackwell_ws_d64_full_pair.py", "sm_100a")
    roles = {role.role: dict(role.opcodes) for role in report.roles}
    assert list(roles) == ["softmax0", "softmax1", "load", "mma", "correction"]
    assert roles["mma"]["UTCHMMA"] > 0 and roles["load"]["UTMALDG"] == 2 and roles["correction"]["FMUL2"] == 64
    for role in report.roles[:2]:
        # The polynomial's share and the factor's exponential.
        assert next(mix.compiled for mix in role.mix if mix.pipe == "mufu") == 128 - 24 + 1
        mix, opcodes = {mix.pipe: mix for mix in role.mix}, dict(role.opcodes)
        assert not mix["mufu"].flagged and not mix["alu"].flagged
        # The forecast counts the floating-point work of the FMA pipe; the compiler also moves registers there.
        assert mix["fma"].compiled - opcodes["IMAD"] == pytest.approx(mix["fma"].forecast, rel=0.05)


def test_inspect_counts_a_portable_warp_once() -> None:
    pytest.importorskip("triton")
    report = inspect(ship.KERNELS / "generated" / "triton_tma_d128_causal.py", "sm_90a")
    # 64 x 64 scores over 128 threads, and the factors of two rows.
    assert {mix.pipe: mix.forecast for mix in report.roles[0].mix}["mufu"] == pytest.approx(32.5)
    assert {mix.pipe: mix.compiled for mix in report.roles[0].mix}["mufu"] == 34


@pytest.mark.parametrize(
    ("file", "arch", "text"),
    [
        ("nowhere.py", "sm_90a", "found none"),
        ("README.md", "sm_90a", "written by 'tilecast generate'"),
        ("kernels/generated/hopper_ws_d64_full.py", "sm_100a", "written for sm_90a"),
        ("kernels/generated/hopper_ws_d64_full.py", "sm_42", "expected sm_80"),
    ],
)
def test_inspect_refuses_in_one_sentence(file, arch, text, capsys) -> None:
    pytest.importorskip("triton")
    root = ROOT
    code, out, err = run(capsys, "inspect", str(root / file), "--arch", arch)
    assert code == 2 and not out and text in err and err.count("\n") == 1
