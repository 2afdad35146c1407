"""The entry point.  Every wrong input is one sentence on stderr, exit code 2, and nothing written."""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Annotated, Any, NoReturn

import typer

from tilecast.cli import emulate, explore, forecast, gemm, gpu, kernels, machine, machine_code, step, validate
from tilecast.cli.workload_options import in_options

_ROOMS = (forecast, gemm, step, explore, kernels, machine_code, emulate, gpu)
_GROUPS = {"machine": machine, "validate": validate}
_COMMANDS = {c.name or getattr(c.callback, "__name__", ""): c for room in _ROOMS for c in room.app.registered_commands}
_VERBS = (*_COMMANDS, *_GROUPS)


def _version(wanted: bool) -> None:
    if wanted:
        from tilecast import __version__

        typer.echo(f"tilecast {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def verbs(only: str = "") -> typer.Typer:
    """All verbs; the one called ``only`` and the root's options alone where there is one."""
    found = typer.Typer(
        name="tilecast", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Forecast what a tiled attention kernel will do on a GPU, and why.",
        epilog="Start with: tilecast predict b200 --seqlen 8192 --causal.  Every verb takes -h.",
    )  # fmt: skip
    found.callback()(_root)
    wanted = (only,) if only in _VERBS else _VERBS
    found.registered_commands = [c for name, c in _COMMANDS.items() if name in wanted]
    for name, group in _GROUPS.items():
        if name in wanted:
            found.add_typer(group.app, name=name, rich_help_panel="Check")
    return found


@cache
def _command(verb: str) -> Any:
    """`verbs` as a command, made once and not for every call: of all of them that takes longer than many a forecast."""
    return typer.main.get_command(verbs(verb))


def run(arguments: list[str] | None = None) -> NoReturn:
    """Errors of the user's making become one sentence and exit code 2; Ctrl-C is exit code 130, a reader of the output who leaves
    (`| head`) exit code 0, both without a word."""
    try:
        code = _code(arguments)
    except BrokenPipeError:
        code = _leave()
    except SystemExit as stop:
        # Typer and Rich both make 1 of it.
        if not isinstance(stop.__context__, BrokenPipeError):
            raise
        code = _leave()
    sys.exit(code)


def _leave() -> int:
    """0; the interpreter must not try to flush what nobody reads at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _code(arguments: list[str] | None) -> int:
    """The exit code of a command; SystemExit with it where it fails."""
    first = (sys.argv[1:] if arguments is None else arguments)[:1]
    verb = next((word for word in first if word in _VERBS), "")
    if sys.stdout is None:
        _fail("cannot write the output: standard output is closed")
    try:
        code = _command(verb)(args=arguments, prog_name="tilecast", standalone_mode=False)
        # Now, and not at the interpreter's end, which writes a traceback where nobody reads any more.
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else f"cannot write the output: {error.strerror}")
    except MemoryError as error:
        _fail(f"does not fit into this machine's memory: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    except ValueError as error:
        _fail(in_options(str(error)))
    except Exception as error:
        # Typer ships its own copy of click from 0.27 on: recognise usage errors by what they can do, not by class.
        message = getattr(error, "format_message", None)
        if type(error).__name__ == "Abort":
            sys.exit(130)
        if message is None:
            raise
        wrong = _refused_value(error)
        if wrong:
            _fail(wrong)
        if type(error).__name__ == "NoArgsIsHelpError":
            print(message())
            sys.exit(2)
        _fail(message())
    return code if isinstance(code, int) else 0


#: Kinds of values that typer refuses itself (pydantic's names), in the words of tilecast's own refusals.
_EXPECTED = {"int_parsing": "a whole number", "int_from_float": "a whole number", "float_parsing": "a number"}
_LIMITS = {"greater_than_equal": ("ge", "at least"), "greater_than": ("gt", "above"),
           "less_than_equal": ("le", "at most"), "less_than": ("lt", "below")}  # fmt: skip


def _refused_value(error: Exception) -> str:
    """ "--seqlen: expected a whole number, got 'foo'" for an option's value that typer refused; "" for any other error."""
    options = getattr(getattr(error, "param", None), "opts", [])
    details: list[Any] = getattr(error.__cause__, "errors", list)()
    if not options or not details:
        return ""
    kind, given = details[0]["type"], details[0]["input"]
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        expected = f"{words} {details[0]['ctx'][name]:g}"
    elif kind in _EXPECTED:
        expected = _EXPECTED[kind]
    else:
        return ""
    return f"{options[-1]}: expected {expected}, got {given if kind in _LIMITS else repr(given)}"


def _fail(sentence: str) -> NoReturn:
    print(f"tilecast: {' '.join(sentence.split())}", file=sys.stderr)
    sys.exit(2)
