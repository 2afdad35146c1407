"""What a builder reads of a machine."""

from tilecast.model.families import build_pipeline, find_family
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.machine.reading import ReadMachine

H200 = load_machine("h200-sxm")


def test_reads_are_noted_found_or_not() -> None:
    machine = ReadMachine.of(H200)
    assert machine.read == set()
    assert machine["mufu.ex2_per_clk"] == H200["mufu.ex2_per_clk"]
    assert machine.get("no.such_fact", 2.0) == 2.0
    assert machine.has("tma.bytes_per_clk")
    assert machine.read == {"mufu.ex2_per_clk", "no.such_fact", "tma.bytes_per_clk"}


def test_who_goes_through_all_facts_reads_all() -> None:
    for all_facts in (lambda m: list(m.facts), lambda m: list(m.facts.values()), lambda m: m.with_facts({}), list):
        machine = ReadMachine.of(H200)
        all_facts(machine)
        assert machine.read == set(H200.facts)


def test_a_cache_filled_before_leaves_no_read_unseen() -> None:
    work, variant = Workload(mask="causal"), find_family("fa3").variant()
    pipeline = build_pipeline(work, variant, H200)
    machine = ReadMachine.of(H200)
    assert machine != H200
    assert build_pipeline(work, variant, machine) == pipeline
    assert "mufu.ex2_per_clk" in machine.read
    assert "power.idle_w" not in machine.read
