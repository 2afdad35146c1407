"""Put the battery to a kernel: one problem after another, until one finds something."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilecast.base.progress import Progress, silent
from tilecast.emulator.battery.coverage import Coverage, Unreached
from tilecast.emulator.battery.exponential import check_exponentials
from tilecast.emulator.battery.problems import Problem, Shape, inputs, problems
from tilecast.emulator.battery.refusals import check_refusals
from tilecast.emulator.errors import EmulationError, RequestError, UnsupportedError
from tilecast.emulator.run import Kernel
from tilecast.emulator.source import Source
from tilecast.emulator.verify import judge
from tilecast.model.kernel.header import header_window
from tilecast.model.machine.machine import Machine

#: Numbers of the host's planning from here on are taken for sizes of a cache.
_CACHE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Failure:
    """What one problem found."""

    problem: str
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Battery:
    """What a battery found, and what it reached."""

    failures: tuple[Failure, ...]
    problems: int
    #: How many there are: fewer ran where one failed.
    problems_in_all: int
    refusals: int
    exponentials: int
    programs: int
    operations: int
    statements: int
    statements_in_all: int
    unreached: tuple[Unreached, ...]
    #: Largest errors, as a share of what rounding allows.
    out_error: float
    lse_error: float
    machine: str


class _Caches(ast.NodeTransformer):
    """Sizes of caches in ``plan`` become calls, so that few heads can be made to fill one."""

    def __init__(self) -> None:
        self.found = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self.generic_visit(node) if node.name == "plan" else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        value = _number(node)
        if value is None or value < _CACHE_BYTES:
            return self.generic_visit(node)
        self.found += 1
        made = ast.Call(ast.Name("__cache__", ast.Load()), [ast.Constant(value)], [])
        return ast.copy_location(made, node)


def _number(node: ast.expr) -> int | None:
    """The value of an expression of integers; None for others."""
    if any(not isinstance(part, (ast.BinOp, ast.Constant, ast.operator)) for part in ast.walk(node)):
        return None
    value = eval(compile(ast.Expression(node), "plan", "eval"))
    return value if isinstance(value, int) else None


class _Run:
    """A kernel under the battery."""

    def __init__(self, source: Source, machine: str | Machine | None) -> None:
        self.coverage, self.caches, self._cache_bytes = Coverage(source.text), _Caches(), 0
        names = {**self.coverage.names, "__cache__": lambda size: self._cache_bytes or size}
        self.kernel = Kernel(source, machine, change=self._change, names=names)
        self.workload = source.workload()
        self.programs = self.operations = 0
        self.out_error = self.lse_error = 0.0

    def _change(self, tree: ast.Module) -> ast.Module:
        return self.coverage.change(self.caches.visit(tree))

    def shape(self) -> Shape:
        """What the problems depend on."""
        kernel, work = self.kernel, self.workload
        tile, block = kernel.constant("TILE_M", 128), kernel.constant("TILE_N", 128)
        ctas = 2 if "cta_group=2" in str(kernel.header.get("variant", "")) else 1
        limits = header_window(kernel.header)
        return Shape(work.mask, tile, kernel.constant("ROWS", tile), block, limits, ctas)

    def applies(self, problem: Problem) -> bool:
        """Whether the kernel has what the problem is about."""
        if problem.heads_in_l2 is not None:
            return self.caches.found > 0
        return problem.again != "plan" or all(hasattr(self.kernel.module, name) for name in ("plan", "attention"))

    def solve(self, problem: Problem) -> None:
        """Run one problem; EmulationError when the kernel is wrong."""
        work = self.workload
        bytes_of_head = 2 * problem.keys * (work.head_dim_qk + work.head_dim_v)
        self._cache_bytes = (problem.heads_in_l2 or 0) * bytes_of_head
        scale = work.head_dim_qk**-0.5 if problem.scale is None else problem.scale
        self._launch(problem, scale, 0)
        if problem.again:
            self._launch(problem, 0.7 * scale, 1, planned=problem.again == "plan")

    def _launch(self, problem: Problem, scale: float, seed: int, planned: bool = False) -> None:
        q, k, v = inputs(problem, self.workload.head_dim_qk, self.workload.head_dim_v, seed)
        done = self.kernel.run(
            q, k, v, scale=scale, window=problem.window, mode=problem.mode, seed=problem.seed, sms=problem.sms,
            with_lse=problem.with_lse, planned=planned,
        )  # fmt: skip
        self.programs += len(done.traces)
        self.operations += sum(len(role.events) for one in done.traces for role in one.roles)
        verdict = judge(done, q, k, v, scale, problem.window, with_lse=problem.with_lse).require()
        self.out_error = max(self.out_error, verdict.out_error / verdict.out_tolerance)
        self.lse_error = max(self.lse_error, verdict.lse_error / verdict.lse_tolerance)


def run_battery(
    source: Source, machine: str | Machine | None = None, keep_going: bool = False, progress: Progress = silent,
    chosen: Callable[[Problem], bool] = lambda problem: True,
) -> Battery:  # fmt: skip
    """Everything the battery has, in the order of `problems`, until something is found (``keep_going``: to the end).

    ``chosen``: which problems.  Raises RequestError and UnsupportedError for what cannot be run.
    """
    try:
        run = _Run(source, machine)
    except SyntaxError as error:
        raise RequestError(f"{source.path}: line {error.lineno}: {error.msg}") from None
    todo = [one for one in problems(run.shape()) if run.applies(one) and chosen(one)]
    failures: list[Failure] = []
    solved = refusals = exponentials = 0

    def held(name: str, attempt: Callable[[], Any]) -> Any:
        try:
            return attempt()
        except RequestError:
            raise
        except UnsupportedError as error:
            if error.__cause__ is None:
                raise
            failures.append(Failure(name, "crash", str(error)))
        except EmulationError as error:
            failures.append(Failure(name, type(error).__name__.removesuffix("Error").lower(), str(error)))
        except Exception as error:
            # The file's own code: a refusal of what it must take, or a mistake of the host's.
            where = source.quote_of(error)
            failures.append(Failure(name, "crash", f"{where}: {type(error).__name__}: {error}"))
        return 0

    for number, problem in enumerate(todo):
        progress("battery", number, len(todo), problem.label())
        held(problem.label(), lambda problem=problem: run.solve(problem))  # type: ignore[misc]
        solved += 1
        if number == 0 and not failures:
            refusals = held("wrong arguments", lambda: check_refusals(run.kernel))
            exponentials = held("exponentials alone", lambda: _exponentials(run))
        if failures and not keep_going:
            break
    progress("battery", len(todo), len(todo))
    executed, there = run.coverage.share()
    return Battery(
        tuple(failures), solved, len(todo), refusals, exponentials, run.programs, run.operations, executed, there,
        run.coverage.unreached(), run.out_error, run.lse_error, run.kernel.machine.title,
    )  # fmt: skip


def _exponentials(run: _Run) -> int:
    return check_exponentials(run.kernel.session.ptx, run.kernel.header, run.kernel.source)
