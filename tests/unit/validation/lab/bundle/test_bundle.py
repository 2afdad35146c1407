"""Bundles: made by the stages themselves from recorded H200 rows, killed, resumed, compared, damaged and refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import json_keys

from tilecast.base.data import MEASURED
from tilecast.cli import main
from tilecast.codegen.generate import generate
from tilecast.model.compiled.code import dump_codes, load_codes
from tilecast.model.families import find_family, parse_variant
from tilecast.model.machine.machine import load_machine
from tilecast.validation.bundle.compare import compare
from tilecast.validation.lab.bundle.archive import read_bundle, write_bundle
from tilecast.validation.lab.bundle.create import Asked, create
from tilecast.validation.lab.bundle.manifest import MANIFEST, BundleError, failure_lines
from tilecast.validation.lab.bundle.plans import PLANS, load_work, plan_path
from tilecast.validation.lab.measure.gpu_lock import GpuLockError, timing_on
from tilecast.validation.lab.measure.plan import PlanError, item_from, item_to, load_plan
from tilecast.validation.lab.measure.records import append, read
from tilecast.validation.lab.worker.process import WorkerError, WorkerLostError

RECORDED = MEASURED
PLAN = """
[[group]]
kernels = ["cudnn"]
variants = [
  "hopper_ws:warpgroups=2,tile_n=64,kv_stages=4,q_stages=2,overlap=true,ping_pong=false,rescale=anchored,emulated_share=0,scheduler=persistent",
  "hopper_ws:warpgroups=2,tile_n=128,kv_stages=2,q_stages=1,overlap=true,ping_pong=true,rescale=always,emulated_share=0,scheduler=grid",
  "triton:tile_m=128,tile_n=64,warps=8,kv_stages=3,scheduler=grid",
]
shapes = [
  { seqlen = 4096, head_dim = 64, batch = 4, heads = 32 },
  { seqlen = 4096, head_dim = 128, batch = 4, heads = 16 },
]

[[group]]
runs = ["sustained"]
kernels = ["cudnn"]
variants = [
  "hopper_ws:warpgroups=2,tile_n=64,kv_stages=4,q_stages=2,overlap=true,ping_pong=false,rescale=anchored,emulated_share=0,scheduler=persistent",
]
shapes = [ { seqlen = 4096, head_dim = 128, batch = 4, heads = 16 } ]
"""
ABOUT = {"gpu": "NVIDIA H200", "capability": 90, "driver": "580.159.04", "torch": "2.11.0+cu130", "triton": "3.6.0"}


class Killed(BaseException):
    """What SIGKILL does to the run, as far as a test can see it."""


class Silent:
    """A screen that is not looked at."""

    def __init__(self) -> None:
        self.todo: dict[str, int] = {}

    def begin(self, _gpu: str, _work: object, todo: tuple[Any, ...], _resumed: bool) -> None:
        self.todo = {stage.name: stage.units for stage in todo}
        assert all(stage.seconds > 0 for stage in todo if stage.units)

    def tell(self, *_: object) -> None:
        pass


class Recorded:
    """A GPU that answers with what an H200 measured; ``fault(request)`` may raise first."""

    def __init__(self, fault: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
        self.fault, self.asked = fault, []
        self.rows = {
            (r.kernel, r.variant if r.source_sha else "", r.mode, r.workload()): r
            for name in ("h200_points.csv", "h200_sustained.csv") for r in read(RECORDED / name)
        }  # fmt: skip
        self.codes = {code.key(): code for code in load_codes((RECORDED / "h200_code.txt").read_text())}

    def __call__(self, _log: Path) -> Recorded:
        return self

    def close(self) -> None:
        pass

    def ask(
        self, request: dict[str, Any], _silence: float, tell: Callable[[str, float], None] = lambda *_: None
    ) -> Any:
        request = json.loads(json.dumps(request))
        self.asked.append(request["do"])
        if request["do"] == "calibrate":
            tell("tensor/wgmma_rate", 0.0)
        for index, item in enumerate(request.get("items", [{}])):
            if "items" in request:
                tell(str(index), 0.0)
            self.fault({**request, "at": item})
        return getattr(self, request["do"])(request)

    def identify(self, _request: dict[str, Any]) -> dict[str, Any]:
        return {**ABOUT, "uuid": f"GPU-{os.getpid()}"}

    def calibrate(self, request: dict[str, Any]) -> dict[str, Any]:
        shutil.copy(RECORDED / "h200_calibrate.toml", request["machine"])
        lines = (RECORDED / "h200_calibrate.csv").read_text().splitlines(keepends=True)[:20]
        Path(request["store"]).write_text("".join(lines))
        return {"failed": [], "measured": 19, "skipped": 0}

    def check(self, _request: dict[str, Any]) -> dict[str, Any]:
        return {"reason": "", "error": 0.002}

    def measure(self, request: dict[str, Any]) -> dict[str, Any]:
        for item in map(item_from, request["items"]):
            append(
                Path(request["table"]),
                [self.rows[item.kernel, item.variant, request["options"]["mode"], item.workload]],
            )
        return {"failed": []}

    def profile(self, request: dict[str, Any]) -> dict[str, Any]:
        item = item_from(request["item"])
        work = item.workload
        key = (item.kernel, item.variant, work.head_dim_qk, work.head_dim_v, work.mask, work.dtype)
        return {"code": dump_codes([self.codes[key]]).strip()}


def asked(folder: Path) -> Asked:
    plan = folder / "plan.toml"
    plan.write_text(PLAN)
    return Asked(folder / "b.zip", folder / "b.zip.work", False, str(plan), "tilecast bundle", "0.1.0")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    want = asked(tmp_path_factory.mktemp("bundle"))
    create(want, Silent(), Recorded())
    assert not want.folder.exists()
    return want.output


# --- making ---------------------------------------------------------------------------------------------------


def test_a_bundle_holds_what_was_measured(good: Path) -> None:
    bundle = read_bundle(good)
    assert set(bundle.members) == {
        "machine.toml",
        "calibrate.csv",
        "points.csv",
        "sustained.csv",
        "codes.txt",
        "log.txt",
    }
    m = bundle.manifest
    assert (m.gpu, m.capability, m.machine, m.failed, m.left_out) == ("NVIDIA H200", 90, "h200-sxm", (), ())
    assert set(m.seconds) == {"calibrate", "check", "short", "sustained", "profile"}
    assert bundle.text("points.csv").count("\n") == 1 + 8
    assert len(load_codes(bundle.text("codes.txt"))) == 6


def test_a_gpu_that_is_timed_on_is_left_alone(tmp_path: Path) -> None:
    want = asked(tmp_path)
    with (
        timing_on(f"GPU-{os.getpid()}"),
        pytest.raises(GpuLockError, match=rf"another tilecast is timing on GPU-{os.getpid()}"),
    ):
        create(want, Silent(), Recorded())
    assert not want.folder.exists() and not want.output.exists()
    create(want, Silent(), Recorded())
    assert want.output.exists()


@pytest.mark.parametrize("at", ["calibrate", "measure"])
def test_a_killed_run_goes_on_and_measures_nothing_twice(tmp_path: Path, at: str) -> None:
    seen = []

    def fault(request: dict[str, Any]) -> None:
        seen.append(request["do"])
        if request["do"] == at and (at == "calibrate" or seen.count(at) == 2):
            raise Killed

    want = asked(tmp_path)
    first = Recorded(fault)
    with pytest.raises(Killed):
        create(want, Silent(), first)
    assert not want.output.exists()
    before = first.asked
    with (want.folder / "failed.jsonl").open("a") as torn:
        torn.write('{"stage": "sh')
    second = Recorded()
    create(want, Silent(), second)
    assert read_bundle(want.output).manifest.failed == ()
    both = before + second.asked
    assert both.count("check") == both.count("profile") == 6
    assert both.count("measure") == 3 + (at == "measure")
    assert both.count("calibrate") == 1 + (at == "calibrate")
    assert len(read_rows(want.output, "points.csv")) == 8


def read_rows(path: Path, name: str) -> list[str]:
    return read_bundle(path).text(name).splitlines()[1:]


def test_a_kernel_that_hangs_or_is_wrong_is_recorded_and_the_rest_goes_on(tmp_path: Path) -> None:
    def fault(request: dict[str, Any]) -> None:
        item = request["at"]
        if request["do"] == "check" and "tile_n=128" in request["item"]["variant"]:
            raise WorkerLostError("no answer in 300 s: it hangs")
        if item and item["kernel"] == "triton" and item["workload"]["head_dim_qk"] == 64:
            raise WorkerLostError("its process ended (signal 11)")

    want = asked(tmp_path)
    create(want, Silent(), Recorded(fault))
    bundle = read_bundle(want.output)
    assert [(f.stage, f.what.split()[0], f.reason) for f in bundle.manifest.failed] == [
        ("check", "hopper_ws", "no answer in 300 s: it hangs"), ("check", "hopper_ws", "no answer in 300 s: it hangs"),
        ("short", "triton", "its process ended (signal 11)"),
    ]  # fmt: skip
    assert [line.count("and 1 more of hopper_ws") for line in failure_lines(bundle.manifest.failed)] == [1, 0]
    # cuDNN and the sound kernels of the shape that crashed were measured all the same.
    assert len(read_rows(want.output, "points.csv")) == 8 - 2 - 1


def test_a_benchmark_that_takes_the_gpu_down_is_left_out_of_calibration(tmp_path: Path) -> None:
    def fault(request: dict[str, Any]) -> None:
        if request["do"] == "calibrate" and not request["skip"]:
            raise WorkerError("the GPU was lost")

    want = asked(tmp_path)
    create(want, Silent(), Recorded(fault))
    bundle = read_bundle(want.output)
    assert [(f.stage, f.what) for f in bundle.manifest.failed] == [("calibrate", "tensor/wgmma_rate")]
    assert "machine.toml" in bundle.members


def test_work_of_another_gpu_is_not_continued(tmp_path: Path) -> None:
    want = asked(tmp_path)
    want.folder.mkdir()
    (want.folder / "state.json").write_text(json.dumps({**ABOUT, "gpu": "NVIDIA B200"}))
    with pytest.raises(BundleError, match="unfinished bundle with gpu 'NVIDIA B200'"):
        create(want, Silent(), Recorded())
    (want.folder / "state.json").rename(want.folder / "notes.txt")
    with pytest.raises(BundleError, match="not the folder of an unfinished bundle"):
        create(want, Silent(), Recorded())
    assert not want.output.exists()


def test_a_run_killed_among_the_checks_checks_only_the_rest(tmp_path: Path) -> None:
    class Watched(Silent):
        def tell(self, stage: str, done: float, total: float, _detail: str = "", /) -> None:
            if stage == "check" and done > 0.4 * total:
                raise Killed

    want = asked(tmp_path)
    with pytest.raises(Killed):
        create(want, Watched(), Recorded())
    screen = Silent()
    create(want, screen, Recorded())
    assert screen.todo == {"calibrate": 0, "check": 3, "short": 8, "sustained": 2, "profile": 6}
    assert not want.folder.exists()


# --- plans ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a100", "h200-sxm", "b200", "b300", "rtx-5090"])
@pytest.mark.parametrize("quick", [False, True])
def test_every_plan_gives_every_machine_something_to_do(name: str, quick: bool) -> None:
    chip = load_machine(name)
    capability = int(chip["chip.compute_capability"])
    work = load_work(plan_path(capability, None), chip, quick)
    kernels = {item.kernel for item in work.short}
    native = {90: {"hopper_ws"}, 100: {"blackwell_ws"}, 103: {"blackwell_ws"}}.get(capability, set())
    assert kernels >= {"triton", "cudnn"} | native
    if quick:
        assert len(work.short) <= 14
        assert len(work.sustained) <= 3
    if native == {"blackwell_ws"}:
        assert {f"cta_group={n}" in item.variant for item in work.short for n in (1, 2)} == {True, False}
        assert any("load_max=true" in item.variant for item in work.short) == (capability == 103 and not quick)
    assert work.sustained
    assert all(item_from(json.loads(json.dumps(item_to(item)))) == item for item in work.short)


# b300 runs all of b200's plan and more.
@pytest.mark.parametrize("name", ["a100", "h200-sxm", "b300", "rtx-5090"])
def test_every_kernel_of_a_plan_can_be_written(name: str) -> None:
    chip = load_machine(name)
    path = plan_path(int(chip["chip.compute_capability"]), None)
    kernels = dict.fromkeys((*load_work(path, chip, False).kernels(), *load_work(path, chip, True).kernels()))
    for item in kernels:
        source = generate(item.workload, chip, find_family(item.kernel), parse_variant(item.variant), "0.1.0").source
        compile(source, item.kernel, "exec")


def test_plan_errors(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no plan for sm_75"):
        plan_path(75, None)
    plan = tmp_path / "p.toml"
    plan.write_text(PLAN.replace('["sustained"]', '["long"]'))
    with pytest.raises(PlanError, match="group 2: runs takes a list of short, sustained, quick"):
        load_plan(plan, load_machine("h200-sxm"), "short")
    assert all(path.is_file() for path in (plan_path(number, None) for number in PLANS))


# --- reading --------------------------------------------------------------------------------------------------


def test_compare_reports_facts_errors_clocks_and_peers(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["validate", "compare", str(good), "--rows"])
    text, err = capsys.readouterr()
    assert (end.value.code, err) == (0, "")
    for part in ("tensor.mma_latency_cycles", "from machine code, calibrated facts", "Settled SM clocks", "cudnn", "Nothing failed",
                 "hopper_ws head_dim 128 full", "Every short run"):  # fmt: skip
        assert part in text
    with pytest.raises(SystemExit):
        main(["validate", "compare", str(good), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert {entry["n"] for entry in report["summary"].values()} == {6}
    assert set(report["summary"]) == {f"{how}, {facts} facts" for how in ("before compilation", "from machine code")
                                      for facts in ("cited", "calibrated")}  # fmt: skip
    assert report["summary"]["from machine code, cited facts"]["mean"] < 0.08
    assert len(report["peers"]) == 2
    assert [set(row["mhz"]) for row in report["clocks"]] == [set(), {"cited facts", "calibrated facts"}]
    assert json_keys.differences(json_keys.sections()["validate compare"].keys, json_keys.paths(report)) == []


def test_compare_loads_no_torch_and_needs_no_profiles(good: Path, tmp_path: Path) -> None:
    bundle, path = read_bundle(good), tmp_path / "b.zip"
    write_bundle(
        path, bundle.manifest, {name: content for name, content in bundle.members.items() if name != "codes.txt"}
    )
    script = (
        "import contextlib, io, sys\nfrom tilecast.cli import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        f"    main(['validate', 'compare', {str(path)!r}, '--json'])\nprint('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False\n"
    )


def rewritten(good: Path, to: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    with zipfile.ZipFile(good) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(to, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return to


def edit_manifest(**changes: Any) -> Callable[[dict[str, bytes]], None]:
    def change(members: dict[str, bytes]) -> None:
        members[MANIFEST] = json.dumps({**json.loads(members[MANIFEST]), **changes}).encode()

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda m: m.update({"points.csv": m["points.csv"] + b"x"}),
            "'points.csv' is not what the manifest's hash says",
        ),
        (lambda m: m.pop("codes.txt"), "'codes.txt' is missing"),
        (lambda m: m.pop(MANIFEST), "holds no manifest.json"),
        (lambda m: m.update({"../../evil.py": b"boom"}), "holds '../../evil.py', which its manifest does not list"),
        (lambda m: m.update({MANIFEST: b"{"}), "manifest.json is not JSON"),
        (lambda m: m.update({MANIFEST: b"\xff"}), "manifest.json is not UTF-8"),
        (edit_manifest(version=99), "bundle format 99, this tilecast reads 1"),
        (edit_manifest(format="other"), "not a bundle"),
        (edit_manifest(capability="90"), "field 'capability' takes int, got '90'"),
        (edit_manifest(files={"../x": {"size": 1, "sha256": ""}}), "lists '../x', which no bundle holds"),
        (edit_manifest(failed=[{"stage": 1}]), "an entry of 'failed' takes stage, what and reason"),
        (edit_manifest(machine="z9000"), "unknown machine 'z9000'"),
    ],
)
def test_damaged_and_foreign_bundles_are_refused(
    good: Path,
    tmp_path: Path,
    change: Callable[[dict[str, bytes]], None],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = rewritten(good, tmp_path / "bad.zip", change)
    refused(["validate", "compare", str(path)], sentence, capsys)
    assert [p.name for p in tmp_path.iterdir()] == ["bad.zip"]


def refused(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1)
    assert sentence in err


def test_what_is_no_zip_or_holds_a_member_twice_is_refused(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(["validate", "compare", str(tmp_path / "none.zip")], "cannot read the bundle", capsys)
    cut = tmp_path / "cut.zip"
    cut.write_bytes(good.read_bytes()[:-30])
    refused(["validate", "compare", str(cut)], "not a bundle, or a damaged one", capsys)
    flipped = bytearray(good.read_bytes())
    flipped[len(flipped) // 2] ^= 0xFF
    cut.write_bytes(flipped)
    refused(["validate", "compare", str(cut)], "ask for", capsys)
    twice = tmp_path / "twice.zip"
    shutil.copy(good, twice)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(twice, "a") as archive:
            archive.writestr("points.csv", "other")
    refused(["validate", "compare", str(twice)], "holds 'points.csv' twice", capsys)


def test_a_member_that_is_something_else_is_one_sentence(good: Path, tmp_path: Path) -> None:
    bundle = read_bundle(good)
    for name, content in (
        ("points.csv", b"a,b\n1,2\n"),
        ("codes.txt", b"hello"),
        ("machine.toml", b"x = 1\n"),
        ("points.csv", b"\xff"),
    ):
        path = tmp_path / "b.zip"
        write_bundle(path, bundle.manifest, {**bundle.members, name: content})
        with pytest.raises(BundleError, match=r"b\.zip: "):
            compare(read_bundle(path))


# --- without a GPU --------------------------------------------------------------------------------------------


def test_without_a_gpu_one_sentence_and_nothing_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    refused(["bundle", "-o", str(tmp_path / "b.zip")], "tilecast bundle needs", capsys)
    refused(["bundle", "-o", str(tmp_path / "b.zip"), "--plan", str(tmp_path / "p.toml")], "is not a file", capsys)
    refused(["bundle", "-o", str(tmp_path / "no" / "b.zip")], "does not exist", capsys)
    assert list(tmp_path.iterdir()) == []
