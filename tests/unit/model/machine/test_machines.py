"""Machine files: what ships is complete and equals its sources; what is wrong is named in one sentence."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from tilecast.model.machine.drawing import describe_machine, draw_sm
from tilecast.model.machine.machine import MachineError, load_machine, machine_json_schema, machine_names, machine_of
from tilecast.model.machine.schema import KEYS

SHIPPED = ("a100", "b200", "b300", "gb10", "gb200", "gb300", "h100-sxm", "h200-sxm", "rtx-5090", "rtx-pro-6000")

# Values copied by hand from hardware.csv (spec or measured rows).
FROM_SOURCES = [
    ("a100", "chip.sm_count", 108),
    ("a100", "tensor.bf16_flop_per_clk", 2048),
    ("h100-sxm", "hbm.tbps_spec", 3.35),
    ("h200-sxm", "hbm.tbps_spec", 4.8),
    ("h200-sxm", "chip.tdp_w", 700),
    ("b200", "chip.sm_count", 148),
    ("b200", "tensor.fp8_flop_per_clk", 16384),
    ("b200", "mufu.ex2_per_clk", 16),
    ("b200", "l2.bytes", 126.5e6),
    ("gb200", "chip.sm_count", 152),
    ("gb200", "chip.clock_max_mhz", 2062),
    ("b300", "mufu.ex2_per_clk", 32),
    ("b300", "tensor.fp4_flop_per_clk", 49152),
    ("b300", "sync.mbarrier_roundtrip_cycles", 123),
    ("gb300", "chip.clock_max_mhz", 2070),
    ("rtx-pro-6000", "chip.sm_count", 188),
    ("rtx-5090", "tensor.bf16_flop_per_clk", 512),
    ("gb10", "chip.sm_count", 48),
]


def test_the_ten_machines_ship() -> None:
    assert machine_names() == SHIPPED


@pytest.mark.parametrize(("name", "key", "value"), FROM_SOURCES)
def test_facts_equal_their_sources(name: str, key: str, value: float) -> None:
    fact = load_machine(name).fact(key)
    assert fact.value == value
    assert fact.source
    assert fact.unit == KEYS[key].unit


@pytest.mark.parametrize("name", SHIPPED)
def test_every_inexact_fact_says_how_inexact_or_why(name: str) -> None:
    for key, fact in load_machine(name).facts.items():
        if fact.kind == "assumed":
            assert fact.low is not None or "no " in fact.source or "never" in fact.source or "inside" in fact.source, (
                key
            )


def test_inheritance_keeps_the_origin() -> None:
    machine = load_machine("gb300")
    assert machine.fact("mufu.ex2_per_clk").inherited_from == "b300"
    assert machine.fact("smem.bytes_per_clk").inherited_from == "b200"
    assert machine.fact("chip.sm_count").inherited_from == ""


def test_unknown_machine_names_the_nearest() -> None:
    with pytest.raises(MachineError, match=r"unknown machine 'b20'; did you mean b200"):
        load_machine("b20")


def test_machines_travel_between_processes() -> None:
    machine = load_machine("h200-sxm").with_facts({"mufu.ex2_per_clk": 32})
    again = pickle.loads(pickle.dumps(machine))
    assert again == machine and hash(again) == hash(machine)
    assert again.fact("mufu.ex2_per_clk").kind == "what-if"


def test_what_if_marks_and_checks_changes() -> None:
    base = load_machine("b200")
    double = base.with_facts({"mufu.ex2_per_clk": 32})
    assert double["mufu.ex2_per_clk"] == 32
    assert base["mufu.ex2_per_clk"] == 16
    assert double.fact("mufu.ex2_per_clk").kind == "what-if"
    assert hash(double) != hash(base)
    with pytest.raises(MachineError, match=r"unknown field 'mufu.ex2'.*mufu.ex2_per_clk"):
        base.with_facts({"mufu.ex2": 32})
    with pytest.raises(MachineError, match=r"takes 1 to 1024 op/clk/SM, got -1"):
        base.with_facts({"mufu.ex2_per_clk": -1})


GOOD = (
    'inherits = "b200"\nname = "mine"\n[chip]\nsm_count = { value = 10, unit = "SM", kind = "spec", source = "me" }\n'
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("value = 10", "value = -3"), r"mine.toml: field 'chip.sm_count' value takes 1 to 1024 SM, got -3"),
        (('unit = "SM"', 'unit = "MHz"'), r"field 'chip.sm_count' takes unit 'SM', got 'MHz'"),
        (('kind = "spec"', 'kind = "guess"'), r"takes kind spec, measured, inferred, assumed, got 'guess'"),
        ((', source = "me"', ""), r"field 'chip.sm_count' lacks 'source'"),
        (('source = "me"', 'source = " "'), r"empty source"),
        (("sm_count", "sm_cuont"), r"unknown field 'chip.sm_cuont'; did you mean chip.sm_count"),
        (("value = 10", "value = 10, low = 11, high = 12"), r"value 10 lies outside its own range 11 to 12"),
        (("value = 10", 'value = "ten"'), r"value takes a number in SM, got 'ten'"),
        (("{ value", "{{ value"), r"mine.toml: not valid TOML"),
        (('inherits = "b200"\n', ""), r"lacks 'title'"),
        (("[chip]", "[chips]"), r"unknown field 'chips.sm_count'"),
        (('name = "mine"\n', 'name = "mine"\ncolour = 3\n'), r"unknown field 'colour'"),
    ],
)
def test_wrong_files_are_named_in_one_sentence(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace(*change))
    with pytest.raises(MachineError, match=message) as caught:
        load_machine(path)
    assert "\n" not in str(caught.value).strip()


def test_a_machine_without_parent_must_be_complete(tmp_path: Path) -> None:
    path = tmp_path / "bare.toml"
    path.write_text('name="x"\ntitle="x"\narch="sm_100a"\nfamily="blackwell"\ntensor_kind="tcgen05"\n')
    with pytest.raises(MachineError, match=r"a tcgen05 machine lacks chip.sm_count \[SM\]"):
        load_machine(path)


def test_a_good_file_loads(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    assert load_machine(path)["chip.sm_count"] == 10


def test_schema_lists_every_key() -> None:
    schema = machine_json_schema()
    for key, rule in KEYS.items():
        section, field = key.split(".", 1)
        fact = schema["properties"][section]["properties"][field]
        assert fact["properties"]["unit"] == {"const": rule.unit}


@pytest.mark.parametrize("name", SHIPPED)
def test_the_drawing_is_a_closed_box_with_the_numbers(name: str) -> None:
    machine = load_machine(name)
    drawing = draw_sm(machine)
    box = [line for line in drawing if line[0] in "┌│└"]
    assert {len(line) for line in box} == {100}
    text = "\n".join(drawing)
    assert f"bf16 {machine['tensor.bf16_flop_per_clk']:.0f}" in text
    assert f"ex2 {machine['mufu.ex2_per_clk'] / 4:g}/clk" in text
    assert ("tensor memory" in text) == (machine.tensor_kind == "tcgen05")
    assert all(key in describe_machine(machine) for key in machine.facts)


def test_the_sms_of_b200_to_gb300_differ_in_their_silicon_alone() -> None:
    """Exponentials, row maxima with the load and the fp4 rate: everything else that a loop reads is one set of numbers."""
    of_the_sm = (
        "tensor",
        "mufu",
        "fma",
        "alu",
        "cvt",
        "shuffle",
        "issue",
        "smem",
        "reg",
        "sm",
        "tmem",
        "sync",
        "tma",
        "dsmem",
    )
    b200 = load_machine("b200")
    for name in ("gb200", "b300", "gb300"):
        other = load_machine(name)
        moved = {key for key in b200 if key.split(".")[0] in of_the_sm and other[key] != b200[key]}
        silicon = {"mufu.ex2_per_clk", "tmem.load_reduce", "tensor.fp4_flop_per_clk"}
        assert moved == (silicon if name.endswith("300") else set()), name


@pytest.mark.parametrize("given", [None, 3, {"name": "h200"}])
def test_something_else_than_a_machine_is_one_sentence(given: object) -> None:
    with pytest.raises(
        MachineError, match=f"expected a name, a file or a tilecast.Machine, got {type(given).__name__}"
    ):
        machine_of(given)  # type: ignore[arg-type]
