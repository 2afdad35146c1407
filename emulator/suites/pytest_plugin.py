"""The pytest plugin: the fixture ``gluon_emulator``, and ``--gluon-emulate`` for suites that were written for a GPU.

Nothing but pytest is imported until a test asks for the emulator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tilecast.emulator.suites.launches import SuiteLaunches

_MODES = "late,random:0,random:1"
_NAME = "gluon-emulate"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options and their ini settings."""
    group = parser.getgroup("gluon", "Gluon kernels on a CPU (tilecast)")
    group.addoption(
        "--gluon-emulate", action="store_true", help="Launches of Gluon kernels run on the CPU; no GPU is needed."
    )
    group.addoption("--gluon-machine", metavar="NAME", help="Machine of the launches (ini gluon_machine; b200).")
    group.addoption(
        "--gluon-modes",
        metavar="MODES",
        help=f"late, random or random:SEED, separated by commas (ini gluon_modes; {_MODES}).",
    )
    group.addoption("--gluon-sms", type=int, metavar="N", help="As if the GPU had so few SMs.")
    group.addoption(
        "--gluon-largest",
        metavar="NUMBERS",
        help="Numbers that kernels must take, as in M=65536,N=8192: no 32-bit integer may overflow below; "
        "by default what overflows in problems that memory holds is only listed.",
    )
    group.addoption(
        "--gluon-triton",
        choices=("3.6", "3.9"),
        default="3.9",
        help="Whose compiler's fences count: 3.9 (default) adds those within a partition, 3.6 only some of them.",
    )
    group.addoption(
        "--gluon-unsupported",
        choices=("skip", "fail"),
        default="skip",
        help="A test that uses Gluon which is not emulated is skipped with the line as reason (default), or fails.",
    )
    parser.addini("gluon_machine", "Machine of emulated launches.", default="")
    parser.addini("gluon_modes", "When asynchronous operations of emulated launches take effect.", default=_MODES)


def _asked(config: pytest.Config, name: str) -> str:
    return str(config.getoption(f"--gluon-{name}") or config.getini(f"gluon_{name}") or "")


def _modes(config: pytest.Config, marker: pytest.Mark | None = None) -> list[str]:
    """Modes as text, checked: the marker's, the option's or the ini setting's."""
    from tilecast.emulator.errors import RequestError
    from tilecast.emulator.suites.launches import read_mode

    given = marker.kwargs.get("modes") if marker else None
    texts = list(given) if given else [text for text in _asked(config, "modes").replace(" ", ",").split(",") if text]
    try:
        for text in texts:
            read_mode(text)
    except RequestError as error:
        raise pytest.UsageError(f"gluon {error}") from None
    return texts


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before a conftest imports Triton."""
    if early_config.known_args_namespace.gluon_emulate:
        _start(early_config)


def pytest_configure(config: pytest.Config) -> None:
    """The marker; and the start where a conftest brought this plugin in."""
    config.addinivalue_line(
        "markers",
        "gluon(machine=None, modes=None): of the fixture gluon_emulator, and modes of a test under --gluon-emulate.",
    )
    if config.getoption("--gluon-emulate"):
        _start(config)


def _start(config: pytest.Config) -> None:
    if config.pluginmanager.has_plugin(_NAME):
        return
    from tilecast.emulator.call import need_packages, read_largest
    from tilecast.emulator.errors import RequestError
    from tilecast.emulator.suites.launches import SuiteLaunches
    from tilecast.model.machine.machine import MachineError

    known = config.known_args_namespace
    try:
        need_packages()
        suite = SuiteLaunches(
            known.gluon_machine or config.getini("gluon_machine") or "b200", known.gluon_sms, known.gluon_triton,
            read_largest(known.gluon_largest),
        )  # fmt: skip
    except (RequestError, MachineError) as error:
        raise pytest.UsageError(str(error)) from None
    config.pluginmanager.register(_Rerouted(suite), _NAME)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each mode: of the fixture, and of every test under --gluon-emulate."""
    marker = metafunc.definition.get_closest_marker("gluon")
    if "gluon_emulator" in metafunc.fixturenames:
        metafunc.parametrize("gluon_emulator", _modes(metafunc.config, marker), indirect=True)
    elif "_gluon_launches" in metafunc.fixturenames:
        metafunc.parametrize("_gluon_launches", _modes(metafunc.config, marker), indirect=True)


@pytest.fixture
def gluon_emulator(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """``gluon_emulator(target, machine=None, sms=None)``: tilecast.emulated in each of the modes asked for.

    ``target``: a kernel, a host function, a module or a path; the machine by default that of the marker ``gluon``,
    --gluon-machine, the ini setting, or what the file imports.
    """
    from tilecast.emulator.any_kernel import emulated
    from tilecast.emulator.suites.launches import read_mode

    marker = request.node.get_closest_marker("gluon")
    mode, seed = read_mode(request.param)
    default = (marker.kwargs.get("machine") if marker else None) or _asked(request.config, "machine") or None

    def of(target: Any, *, machine: Any = None, sms: int | None = None) -> Any:
        sms = sms or request.config.getoption("--gluon-sms")
        return emulated(target, machine=machine or default, mode=mode, seed=seed, sms=sms)

    return of


class _Rerouted:
    """What --gluon-emulate adds to a run: launches on the CPU from here to the end."""

    def __init__(self, suite: SuiteLaunches) -> None:
        self.suite = suite
        self.gaps = 0
        self.rerouted = suite.rerouted()
        self.rerouted.__enter__()

    def pytest_unconfigure(self) -> None:
        """Give Triton and torch back."""
        self.rerouted.__exit__(None, None, None)

    @pytest.fixture(autouse=True)
    def _gluon_launches(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """Each test starts with memories that nothing touched."""
        from tilecast.emulator.suites.launches import read_mode

        self.suite.begin(*read_mode(getattr(request, "param", "late")))
        yield
        self.suite.end()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Gluon that is not emulated says nothing against a kernel."""
        report = yield
        from tilecast.emulator.errors import UnsupportedError

        error = call.excinfo.value if call.excinfo is not None else None
        if isinstance(error, UnsupportedError) and item.config.getoption("--gluon-unsupported") == "skip":
            path, line, _name = item.location
            report.outcome, report.longrepr = "skipped", (path, (line or 0) + 1, f"not emulated: {error}")
            self.gaps += 1
        return report

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """What was emulated, and what was not."""
        skipped = f"; {self.gaps} tests skipped for Gluon that is not emulated (-rs shows the lines)"
        terminalreporter.write_line(
            f"gluon: {self.suite.launches} launches, {self.suite.programs} programs emulated on {self.suite.title}"
            + (skipped if self.gaps else "")
        )
        from tilecast.emulator.language.hostside import overflows

        for said in overflows(self.suite.session):
            terminalreporter.write_line(f"gluon: {said}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a kernel does wrong is shown as the emulator says it, with its lines, in place of the emulator's own frames."""
    report = yield
    errors = sys.modules.get("tilecast.emulator.errors")
    if errors is None or call.excinfo is None or not isinstance(call.excinfo.value, errors.EmulationError):
        return report
    if report.failed:
        error = call.excinfo.value
        kind = type(error).__name__.removesuffix("Error").lower()
        said = str(error) if str(error).startswith(kind) else f"{kind}: {error}"
        test = next((entry for entry in call.excinfo.traceback if str(entry.path) == str(item.path)), None)
        at = f"{item.location[0]}:{test.lineno + 1}: launched here\n" if test is not None else ""
        report.longrepr = f"{at}E   {said}"
    return report
