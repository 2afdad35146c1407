"""Machine files from the command line."""

from __future__ import annotations

import json

import typer

app = typer.Typer(no_args_is_help=True, help="GPUs as data: list, show, check, schema.")


@app.command("list")
def machine_list() -> None:
    """Machines that ship with tilecast."""
    from tilecast.tables import machines_table

    typer.echo(machines_table())


@app.command("show")
def machine_show(name: str) -> None:
    """Draw one SM with its numbers, then every fact with its source."""
    from tilecast.model.machine.drawing import describe_machine
    from tilecast.model.machine.machine import load_machine

    typer.echo(describe_machine(load_machine(name)))


@app.command("check")
def machine_check(file: str) -> None:
    """Check a machine file; silent problems do not exist, the first one is named."""
    from tilecast.model.machine.machine import MachineError, load_machine

    if not file.endswith(".toml") and "/" not in file:
        raise MachineError(f"machine check takes a file ending in .toml, got '{file}'")
    chip = load_machine(file)
    kinds = {
        kind: sum(f.kind == kind for f in chip.facts.values()) for kind in ("spec", "measured", "inferred", "assumed")
    }
    typer.echo(f"{file}: {chip.name} is complete: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items()))


@app.command("schema")
def machine_schema() -> None:
    """JSON schema of machine files, for editors."""
    from tilecast.model.machine.machine import machine_json_schema

    typer.echo(json.dumps(machine_json_schema(), indent=2))
