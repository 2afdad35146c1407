"""Plans of what to measure, the machine file of a GPU, and `tilecast measure` where it cannot run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tilecast.base.data import MEASURED
from tilecast.cli import main
from tilecast.model.families import parse_variant
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.validation.lab.measure.detect import match_machine
from tilecast.validation.lab.measure.plan import Plan, PlanError, load_plan

H200 = load_machine("h200-sxm")
SHAPE = "{seqlen = 512, head_dim = 128}"


def plan(folder: Path, text: str) -> Plan:
    path = folder / "plan.toml"
    path.write_text(text, encoding="utf-8")
    return load_plan(path, H200)


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(PlanError) as caught:
        plan(folder, text)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert sentence.startswith(str(folder / "plan.toml"))
    return sentence


def group(kernels: str = '["cudnn"]', shapes: str = SHAPE, rest: str = "") -> str:
    return f"[[group]]\nkernels = {kernels}\nshapes = [{shapes}]\n{rest}\n"


def test_every_group_pairs_its_shapes_with_its_kernels_and_variants(tmp_path: Path) -> None:
    found = plan(
        tmp_path,
        group(
            '["cudnn", "flex"]',
            SHAPE + ", {seqlen = 1024, head_dim = 64}",
            'variants = ["triton:tile_m=64"]\nrole = "build"',
        )
        + group('["flash-attn-4"]', "{seqlen = 2048, head_dim = 128}", 'role = "held-out"'),
    )
    assert not found.left_out
    assert [(i.kernel, i.workload.seqlen_q, i.role) for i in found.items] == [
        *((kernel, length, "build") for length in (512, 1024) for kernel in ("cudnn", "flex", "triton")),
        ("flash-attn-4", 2048, "held-out"),
    ]
    assert {i.machine for i in found.items} == {"h200-sxm"}
    assert {i.variant for i in found.items} == {"", variant_text(parse_variant("family=fa2,tile_m=64"))}


def test_shape_fields_reach_the_workload_and_have_defaults(tmp_path: Path) -> None:
    shapes = """{seqlen = 512, head_dim = 128},
      {seqlen = 512, seqlen_k = 1024, head_dim = 192, head_dim_v = 128, batch=3, heads=8, heads_kv=2, causal=true},
      {seqlen = 512, head_dim = 64, window = "255,0", dtype = "fp16"}"""
    assert [i.workload for i in plan(tmp_path, group(shapes=shapes)).items] == [
        Workload(1, 16, 16, 512, 512, 128, 128),
        Workload(3, 8, 2, 512, 1024, 192, 128, "causal"),
        Workload(1, 16, 16, 512, 512, 64, 64, "window", (255, 0), "fp16"),
    ]


def test_items_of_a_shape_are_adjacent_and_come_once(tmp_path: Path) -> None:
    other = "{seqlen = 1024, head_dim = 128}"
    found = plan(tmp_path, group(shapes=f"{SHAPE}, {other}, {SHAPE}") + group('["flex", "cudnn"]', f"{other}, {SHAPE}"))
    assert [(i.workload.seqlen_q, i.kernel) for i in found.items] == [
        (512, "cudnn"), (512, "flex"), (1024, "cudnn"), (1024, "flex"),
    ]  # fmt: skip


def test_two_spellings_of_a_variant_are_one_item(tmp_path: Path) -> None:
    same = '["triton", "triton:tile_m=128", "triton:tile_n=64,tile_m=128"]'
    assert len(plan(tmp_path, group("[]", rest=f"variants = {same}")).items) == 1


def test_variants_that_cannot_be_written_are_left_out_with_the_reason(tmp_path: Path) -> None:
    # 3 x 64 rows of O with 256 columns do not fit the registers of three warpgroups.
    variants = 'variants = ["hopper_ws:warpgroups=3,tile_n=128,kv_stages=2", "triton:tile_m=64"]'
    found = plan(tmp_path, group("[]", "{seqlen = 512, head_dim = 256}", variants))
    assert [i.kernel for i in found.items] == ["triton"]
    (line,) = found.left_out
    assert line.startswith("hopper_ws warpgroups=3,tile_n=128,kv_stages=2: ")
    assert "limit" in line


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ("at least one [[group]]",)),
        ("group = 3", ("at least one [[group]]",)),
        ("group = [3]", ("group 1", "table")),
        ("[[group]", ("not valid TOML",)),
        (group(rest="kernel = 3"), ("group 1", "unknown field 'kernel'", "kernels")),
        (group() + group(rest='role = "train"'), ("group 2", "role", "'train'", "held-out")),
        (group('["cudn"]'), ("unknown kernel 'cudn'", "flash-attn-4")),
        (group('"cudnn"'), ("kernels", "list")),
        (group(shapes=""), ("shapes", "seqlen and head_dim")),
        (group(shapes="512"), ("shape", "table", "512")),
        (group(shapes="{seqlen = 512}"), ("head_dim is missing",)),
        (group(shapes="{seqlen = 512, headdim = 64}"), ("unknown shape field 'headdim'", "head_dim")),
        (group(shapes="{seqlen = -1, head_dim = 64}"), ("seqlen_q", "at least 1", "-1")),
        (group(shapes='{seqlen = "long", head_dim = 64}'), ("seqlen_q", "whole number", "'long'")),
        (group(shapes='{seqlen = 512, head_dim = 64, window = "wide"}'), ("window", "'wide'")),
        (group(rest='variants = ["tritn:tile_m=64"]'), ("tritn", "triton")),
        (group(rest='variants = ["triton:tile_q=64"]'), ("variant 'triton:tile_q=64'", "tile_q", "tile_m")),
        (group(rest="variants = [3]"), ("variants", "3")),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_in_a_sentence(tmp_path: Path, text: str, parts: tuple[str, ...]) -> None:
    sentence = refusal(tmp_path, text)
    for part in parts:
        assert part in sentence


def test_a_missing_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read the plan"):
        load_plan(tmp_path / "none.toml", H200)


@pytest.mark.parametrize("name", ["h200_plan.toml", "h200_sustained.toml"])
def test_committed_plans_load_and_keep_some_shapes_out_of_sight(name: str) -> None:
    found = load_plan(MEASURED / name, H200)
    assert len(set(found.items)) == len(found.items) > 10
    by_role: dict[str, set[Workload]] = {}
    for item in found.items:
        by_role.setdefault(item.role, set()).add(item.workload)
    assert not by_role.get("build", set()) & by_role.get("held-out", set())


@pytest.mark.parametrize(
    ("gpu", "capability", "name"),
    [
        ("NVIDIA H200", (9, 0), "h200-sxm"),
        ("NVIDIA H100 80GB HBM3", (9, 0), "h100-sxm"),
        ("NVIDIA GB200", (10, 0), "gb200"),
        ("NVIDIA B200", (10, 0), "b200"),
        ("nvidia gb300", (10, 3), "gb300"),
        ("NVIDIA B300 SXM6 AC", (10, 3), "b300"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "a100"),
        ("NVIDIA GeForce RTX 5090", (12, 0), "rtx-5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), "rtx-pro-6000"),
    ],
)
def test_a_gpu_finds_its_machine_file(gpu: str, capability: tuple[int, int], name: str) -> None:
    assert match_machine(gpu, capability).name == name


def test_an_unnamed_gpu_gets_a_machine_of_its_capability() -> None:
    assert match_machine("NVIDIA GH200 480GB variant X", (9, 0))["chip.compute_capability"] == 90


def test_a_gpu_of_unknown_capability_is_refused_with_what_to_do() -> None:
    with pytest.raises(PlanError, match=r"no machine file for Tesla V100 \(sm_70; known: .*90.*--machine FILE.toml"):
        match_machine("Tesla V100", (7, 0))


# --- the verb --------------------------------------------------------------------------------------------------


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without a GPU, whatever this one has; returns the folder where nothing may appear."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


HERE = ["--machine", "h200-sxm", "--seqlen", "512"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ("GPU", "tilecast predict")),
        ([*HERE, "--kernel", "cudnn"], ("GPU", "tilecast predict")),
        ([*HERE, "--variant", "triton:tile_m=64"], ("GPU", "tilecast predict")),
        ([*HERE, "--mode", "slow"], ("--mode", "short or sustained", "'slow'")),
        ([*HERE, "--kernel", "cudn"], ("--kernel", "cudnn", "'cudn'")),
        ([*HERE, "--variant", "tritn"], ("tritn", "triton")),
        ([*HERE, "none.toml"], ("none.toml", "cannot read")),
        ([*HERE, "--kernel", "cudnn", "-o", "none/t.csv"], ("none/t.csv", "does not exist")),
        (["--machine", "h2000"], ("unknown machine 'h2000'",)),
    ],
)
def test_measure_refuses_in_one_sentence_and_writes_nothing(
    no_gpu: Path, arguments: list[str], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["measure", *arguments])
    out, err = capsys.readouterr()
    assert end.value.code == 2
    assert out == ""
    assert err.startswith("tilecast: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err
    assert list(no_gpu.iterdir()) == []


def test_measure_does_not_touch_another_csv(no_gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = no_gpu / "shapes.csv"
    other.write_text("seqlen,head_dim\n512,128\n")
    with pytest.raises(SystemExit) as end:
        main(["measure", *HERE, "--kernel", "cudnn", "-o", str(other)])
    assert end.value.code == 2
    assert "not a table of measurements" in capsys.readouterr().err
    assert other.read_text() == "seqlen,head_dim\n512,128\n"


PLAN = """
[[group]]
variants = ["triton:tile_m=64,tile_n=32,warps=4,kv_stages=2,scheduler=grid"]
shapes = [ { seqlen = 512, head_dim = 64 } ]
"""


@pytest.mark.parametrize(
    ("missing", "arguments"),
    [
        ("torch", ["measure", "--kernel", "cudnn"]),
        ("torch", ["measure", *HERE, "p.toml"]),
        ("triton", ["measure", *HERE, "p.toml"]),
        ("torch", ["counters", "p.toml"]),
        ("torch", ["counters", "p.toml", "--machine", "h200-sxm"]),
        ("triton", ["profile", "p.toml", "-o", "c.txt"]),
    ],
)
def test_without_its_packages_a_verb_names_what_to_install(
    missing: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)  # what `import` then finds: nothing
    (tmp_path / "p.toml").write_text(PLAN)
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1)
    assert missing in err and "pip install 'tilecast[gpu]'" in err
    assert [path.name for path in tmp_path.iterdir()] == ["p.toml"]


def test_a_profile_of_nothing_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tilecast.codegen.compiler import profile

    pytest.importorskip("triton")

    def none(jobs: object, workers: int, progress: Callable[..., None]) -> tuple[list[object], list[str]]:
        for done in range(46):
            progress("compile", done, 45)
        return [], ["triton tile_m=64: does not compile"]

    monkeypatch.setattr(profile, "profile_all", none)
    (tmp_path / "p.toml").write_text(PLAN)
    with pytest.raises(SystemExit) as end:
        main(["profile", str(tmp_path / "p.toml"), "-o", str(tmp_path / "c.txt")])
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == 2
    assert "nothing was profiled: triton tile_m=64: does not compile" in lines[-1]
    assert not (tmp_path / "c.txt").exists()
