"""Measuring on a GPU that a kernel faults: the kernel loses its own item, and the others take turns all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tilecast.cli import main
from tilecast.model.kernel.workload import Workload
from tilecast.validation.lab.measure.detect import machine_here
from tilecast.validation.lab.measure.plan import Item, Options
from tilecast.validation.lab.measure.records import read
from tilecast.validation.lab.measure.run import measure

#: Right attention, and beside it a store far out of range from the given launch of the process on.
FAULTY = """
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

LAUNCHES = []

@triton.jit
def count_and_fault(launches, out, AFTER: tl.constexpr):
    before = tl.atomic_add(launches, 1)
    if before >= AFTER:
        tl.store(out + (before.to(tl.int64) + 1) * 1099511627776, 1.0)

def launch(q, k, v, out, lse, scale):
    if not LAUNCHES:
        LAUNCHES.append(torch.zeros(1, dtype=torch.int32, device=q.device))
    out.copy_(F.scaled_dot_product_attention(q, k, v, scale=scale))
    count_and_fault[(1,)](LAUNCHES[0], out, AFTER={after})
"""
#: At the first launch, and among the samples: a kernel is launched at most 260 times before its turn comes, and thousands
#: of times by its last one.
AT_ONCE, IN_TURN = 0, 300
ROUNDS = 25


def faulty(folder: Path, after: int) -> str:
    path = folder / f"faulty_{after}.py"
    path.write_text(FAULTY.format(after=after))
    return str(path)


@pytest.mark.parametrize("after", [AT_ONCE, IN_TURN])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_fault_costs_its_item(tmp_path: Path, after: int, workers: int) -> None:
    machine, table = machine_here("the test").name, tmp_path / "t.csv"
    short, longer = Workload(1, 4, 4, 512, 512, 64, 64), Workload(1, 4, 4, 1024, 1024, 64, 64)
    variant = "family=fa2,tile_m=64,tile_n=64,warps=4,kv_stages=2,scheduler=grid"
    bad = Item("file", faulty(tmp_path, after), short, machine)
    plan = [
        Item("triton", variant, short, machine), bad, Item("cudnn", "", short, machine),
        Item("triton", variant, longer, machine), Item("cudnn", "", longer, machine),
    ]  # fmt: skip
    (failure,) = measure(plan, table, Options(rounds=ROUNDS, workers=workers, version="test"))
    assert failure.item == bad and failure.fatal
    assert "illegal memory access" in failure.reason
    rows = read(table)
    assert sorted((row.kernel, row.seqlen_q) for row in rows) == sorted(
        (item.kernel, item.workload.seqlen_q) for item in plan if item is not bad
    )
    assert all(row.ms > 0 and row.error < 0.03 and row.rounds == ROUNDS for row in rows)
    # A second run finds all but the bad one done.
    told: list[tuple[int, str]] = []
    measure([item for item in plan if item is not bad], table, Options(rounds=ROUNDS), lambda *at: told.append(at))
    assert told[0] == (4, "4 of 4 are in t.csv already") and len(read(table)) == 4


def test_the_verb_names_the_kernel_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, bad = tmp_path / "t.csv", faulty(tmp_path, AT_ONCE)
    with pytest.raises(SystemExit) as end:
        main(
            ["measure", bad, "--kernel", "cudnn", "--seqlen", "512", "--heads", "4", "--rounds", "3", "-o", str(table)]
        )
    _, err = capsys.readouterr()
    assert end.value.code == 1
    assert [line for line in err.splitlines() if line.startswith(f"failed: file {bad} at ")]
    assert [row.kernel for row in read(table)] == ["cudnn"]


def test_an_interrupt_frees_the_gpu(tmp_path: Path) -> None:
    import signal
    import time

    slow = tmp_path / "slow.py"
    slow.write_text("import time\n\ndef launch(*_):\n    print('asleep', flush=True)\n    time.sleep(600)\n")
    arguments = [
        sys.executable,
        "-m",
        "tilecast.cli",
        "measure",
        str(slow),
        "--seqlen",
        "512",
        "-o",
        str(tmp_path / "t.csv"),
    ]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    time.sleep(15)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    # The lock is free, and so is the GPU.
    here = machine_here("the test").name
    assert (
        measure([Item("cudnn", "", Workload(1, 4, 4, 512, 512, 64, 64), here)], tmp_path / "t.csv", Options(rounds=3))
        == []
    )
