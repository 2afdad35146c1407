"""The command line as a whole: every verb has an example that parses, -h works, tables fit, shared options are shared."""

from __future__ import annotations

import shlex

import pytest
import typer

from tilecast.cli import main
from tilecast.cli.entry import verbs
from tilecast.cli.knob_words import MEANINGS
from tilecast.cli.tables import families, table
from tilecast.model.families import parse_variant
from tilecast.model.kernel.presets import preset
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload

ROOT = typer.main.get_command(verbs())


def paths(group=ROOT, path: tuple[str, ...] = ()):  # type: ignore[no-untyped-def]
    for name, command in group.commands.items():
        yield (*path, name), command
        if hasattr(command, "commands"):
            yield from paths(command, (*path, name))


ALL = dict(paths())


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_every_verb_has_an_example_that_parses_and_a_short_help(path: tuple[str, ...], capsys) -> None:  # type: ignore[no-untyped-def]
    command = ALL[path]
    assert command.epilog and command.epilog.startswith("Example: tilecast ")
    words = shlex.split(command.epilog.removeprefix("Example: tilecast "))
    assert tuple(words[: len(path)]) == path
    command.make_context(path[-1], words[len(path) :], resilient_parsing=False)
    with pytest.raises(SystemExit) as end:
        main([*path, "-h"])
    assert end.value.code == 0
    assert "Example: tilecast" in capsys.readouterr().out


def test_a_verb_alone_is_the_same_verb() -> None:
    """A command makes the options of the verb that it names alone; `main` makes all of them for words that name none."""
    for name, command in ROOT.commands.items():
        alone = typer.main.get_command(verbs(name))
        assert list(alone.commands) == [name]
        assert _words(alone.commands[name]) == _words(command)
        assert _words(alone) == _words(ROOT)
    assert list(typer.main.get_command(verbs("nothing")).commands) == list(ROOT.commands)


def _words(command):  # type: ignore[no-untyped-def]
    parameters = [(p.name, p.opts, getattr(p, "help", ""), p.default, p.required) for p in command.params]
    return command.name, command.help, command.epilog, parameters


def test_one_set_of_options_everywhere() -> None:
    """Verbs that forecast one kernel take the same options; verbs that change a machine the same changes."""
    kernel = {"--family", "--variant", "--clock", "--power", "--machine", "--preset", "--json"}
    for name in ("predict", "report", "schedule", "whatif", "sensitivity", "breakeven", "map", "generate", "tune"):
        options = {o for parameter in ALL[name,].params for o in parameter.opts}
        assert kernel <= options, name
        assert ("--set" in options) == (name in ("report", "whatif", "sensitivity", "breakeven", "map")), name
        assert ("--shapes" in options) == (name in ("predict", "whatif", "tune")), name


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_tables_fit_and_lose_nothing(columns: int) -> None:
    rows = [["a long name of something", "12.5", "words and words " * 6], ["b", "7", "short"]]
    text = table(["name", "number", "text"], rows, columns)
    assert max(map(len, text.splitlines())) <= columns
    assert text.count("words") == 12
    assert "12.5" in text and "short" in text


def test_a_preset_keeps_its_grouping() -> None:
    from tilecast.cli.workload_options import _work

    assert preset("llama3-8b").heads_q // preset("llama3-8b").heads_kv == 4
    assert _work(preset="llama3-8b", heads=64).heads_kv == 16
    assert _work(preset="llama3-8b", heads=64, heads_kv=64).heads_kv == 64


def test_python_defaults_are_those_of_the_command_line() -> None:
    from tilecast.cli.workload_options import _work

    assert Workload() == _work()
    assert Workload(seqlen_q=8192) == _work(seqlen=8192) and Workload(seqlen_q=8192).seqlen_k == 8192
    assert Workload(heads_q=8).heads_kv == 8 and Workload(head_dim_qk=64).head_dim_v == 64
    assert Workload(window=(127, 0)) == _work(window="127")


def test_aliases_and_the_positional_machine(capsys: pytest.CaptureFixture[str]) -> None:
    from tilecast.model.machine.machine import MachineError, load_machine

    assert [load_machine(n).name for n in ("h200", "H100", "5090", "b200", "6000")] == [
        "h200-sxm", "h100-sxm", "rtx-5090", "b200", "rtx-pro-6000",
    ]  # fmt: skip
    with pytest.raises(MachineError, match="unknown machine 'rtx'"):
        load_machine("rtx")
    with pytest.raises(SystemExit) as end:
        main(["machine", "show", "h200", "--json"])
    assert end.value.code == 0 and '"name": "h200-sxm"' in capsys.readouterr().out


def test_variants_say_what_each_knob_takes_and_is(capsys) -> None:  # type: ignore[no-untyped-def]
    """What a knob is said to take is what ``--variant`` takes."""
    with pytest.raises(SystemExit):
        main(["variants", "h200"])
    text = capsys.readouterr().out
    assert "fa3, the family of h200-sxm: Gluon, Hopper" in text
    assert "(also called hopper_ws, hopper)" in text
    found = families()
    assert {knob for about in found.values() for knob in about["knobs"]} == set(MEANINGS)  # type: ignore[attr-defined]
    for family, about in found.items():
        for knob, takes in about["takes"].items():  # type: ignore[attr-defined]
            values = takes.split(", by")[0].replace(" to ", ", ").split(", ")
            for value in values:
                parse_variant(f"{family}:{knob}={value}")
            if "to" not in takes.split():
                with pytest.raises(VariantError):
                    parse_variant(f"{family}:{knob}=9999")
