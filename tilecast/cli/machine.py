"""Machine files from the command line."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from tilecast.cli.workload_options import AsJson, takes_workload
from tilecast.model.machine.machine import Machine, MachineError, load_machine

app = typer.Typer(
    no_args_is_help=True, help="GPUs as data: list, show, check, schema.", epilog="Example: tilecast machine show h200"
)


@app.command("list", epilog="Example: tilecast machine list")
def machine_list(as_json: AsJson = False) -> None:
    """Machines that ship with tilecast."""
    from tilecast.cli.tables import machine_row, machines_table, show
    from tilecast.model.machine.machine import machine_names

    machines = [load_machine(name) for name in machine_names()]
    show(machines_table(machines), [machine_row(chip) for chip in machines], as_json)


@app.command("show", epilog="Example: tilecast machine show h200")
@takes_workload
def machine_show(machine: Machine, as_json: AsJson = False) -> None:
    """Draw one SM with its numbers, then every fact with its source."""
    from tilecast.cli.tables import show, width
    from tilecast.model.machine.drawing import describe_machine

    texts = ("name", "title", "arch", "family", "tensor_kind")
    data: dict[str, Any] = {key: getattr(machine, key) for key in texts}
    data["facts"] = {key: {name: getattr(fact, name) for name in fact.__slots__} for key, fact in machine.facts.items()}
    show(describe_machine(machine, width()), data, as_json)


@app.command("check", epilog="Example: tilecast machine check mygpu.toml")
def machine_check(
    file: Annotated[str, typer.Argument(help="A machine file (.toml).")], as_json: AsJson = False
) -> None:
    """Check a machine file: the first thing that is wrong with it, or how many facts of each kind it has."""
    from tilecast.cli.tables import show

    if not file.endswith(".toml") and "/" not in file:
        raise MachineError(f"machine check takes a file ending in .toml, got '{file}'")
    chip = load_machine(file)
    kinds = {
        kind: sum(f.kind == kind for f in chip.facts.values()) for kind in ("spec", "measured", "inferred", "assumed")
    }
    text = f"{file}: {chip.name} is complete: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    show(text, {"file": file, "name": chip.name, "facts": kinds}, as_json)


@app.command("schema", epilog="Example: tilecast machine schema")
def machine_schema() -> None:
    """JSON schema of machine files, for editors."""
    from tilecast.model.machine.machine import machine_json_schema

    typer.echo(json.dumps(machine_json_schema(), indent=2))
