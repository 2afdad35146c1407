"""A kernel that problems are put to: loaded once, its result judged, its statements counted."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence

from tilecast.emulator.battery.coverage import Coverage
from tilecast.emulator.battery.exponential import check_exponentials
from tilecast.emulator.battery.host import NO_STEP, about, handed_on, tensor_maps, unstored
from tilecast.emulator.battery.problems import Problem, Shape, inputs, problems
from tilecast.emulator.battery.refusals import check_refusals
from tilecast.emulator.departure import explained
from tilecast.emulator.errors import WrongResultError
from tilecast.emulator.run import Emulation, Kernel
from tilecast.emulator.session import Watcher
from tilecast.emulator.source import Source
from tilecast.emulator.steps import Steps
from tilecast.emulator.verify import judge
from tilecast.model.kernel.header import header_window
from tilecast.model.machine.machine import Machine

#: Numbers of the host's planning from here on are taken for sizes of a cache.
_CACHE_BYTES = 1 << 20


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


class Bench:
    """A forward pass in 16 bits under the battery."""

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
        if any(problem.fewer):
            return "eighths" in inspect.signature(self.kernel.module.attention.fn).parameters
        return problem.again != "plan" or all(hasattr(self.kernel.module, name) for name in ("plan", "attention"))

    def todo(self) -> Sequence[Problem]:
        """The problems that the kernel has, those that find most first."""
        return [one for one in problems(self.shape()) if self.applies(one)]

    def refused(self) -> int:
        """How many wrong calls the kernel's launch refuses."""
        return check_refusals(self.kernel)

    def exponentials(self) -> int:
        """How many pieces of PTX compute 2^x."""
        return check_exponentials(self.kernel.session.ptx, self.kernel.header, self.kernel.source)

    def synchronises(self, problem: Problem) -> bool:
        """Whether a problem is about more than lengths, windows and scales."""
        return problem.stage not in ("lengths", "window") and problem.scale is None

    def solve(self, problem: Problem) -> None:
        """Run one problem; EmulationError when the kernel is wrong."""
        work, self.kernel.session.follows_far = self.workload, problem.followed
        width = 1 if problem.dtype.startswith(("e4m3", "e5m2")) else 2
        bytes_of_head = width * problem.keys * (work.head_dim_qk + work.head_dim_v)
        self._cache_bytes = (problem.heads_in_l2 or 0) * bytes_of_head
        scale = work.head_dim_qk**-0.5 if problem.scale is None else problem.scale
        self._launch(problem, scale, 0)
        if problem.again:
            self._launch(problem, 0.7 * scale, 1, planned=problem.again == "plan")

    def _launch(self, problem: Problem, scale: float, seed: int, planned: bool = False) -> None:
        dims = self.workload.head_dim_qk - problem.fewer[0], self.workload.head_dim_v - problem.fewer[1]
        q, k, v = inputs(problem, *dims, seed)

        def launched(watcher: Watcher | None = None) -> Emulation:
            return self.kernel.run(
                q, k, v, scale=scale, window=problem.window, mode=problem.mode, seed=problem.seed, sms=problem.sms,
                with_lse=problem.with_lse, planned=planned, watcher=watcher,
            )  # fmt: skip

        done = launched()
        self.programs += len(done.traces)
        self.operations += sum(len(role.events) for one in done.traces for role in one.roles)
        verdict = judge(done, q, k, v, scale, problem.window, with_lse=problem.with_lse)
        if verdict.wrong:
            steps = Steps(q, k, v, scale, problem.window, self.kernel.source)
            # What steps come from is followed while the launch runs.
            self.kernel.source.dataflow.left_out = self.coverage.left_out(launched)
            launched(steps)
            found = steps.finish(verdict, done.mask_lines, self.kernel.session.mask_calls)
            said = explained(verdict.wrong, found, self.kernel.source)
            masked, only_sums = "does not see key" in said or "but the row sees it" in said, verdict.out_right
            reason = about(problem, bool(seed), planned, masked, only_sums)
            reason = reason or (None if found else NO_STEP)
            host = handed_on(self.kernel.source, *reason) if reason else unstored(self.kernel.source, said)
            raise WrongResultError(said + host + ("" if found else tensor_maps(self.kernel.source)))
        self.out_error = max(self.out_error, verdict.out_error / verdict.out_tolerance)
        self.lse_error = max(self.lse_error, verdict.lse_error / verdict.lse_tolerance)
