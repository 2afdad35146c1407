"""What a line may have forgotten, and which changes can make a difference."""

from __future__ import annotations

import ast
import types
from typing import Any

import pytest

from tilecast.emulator.battery.edits import Edit, edits
from tilecast.emulator.battery.kinds import kind_of
from tilecast.emulator.battery.observed import Asking, Observed, ask
from tilecast.emulator.battery.operands import Missing, siblings
from tilecast.emulator.errors import UnsupportedError

FILE = """
from triton.experimental.gluon import language as gl

@gluon.jit
def beside(p, n, scores):
    first = gl.maximum(n - p.left, 0)
    row = n * p.stride_a + first * p.stride_b
    return scores * p.scale, gl.minimum(row, p.rows - 1)

@gluon.jit
def f(p, n, scores, left, few=1):
    {line}
"""
INT, SCORES = ("int",), ("tensor", (64,), "fp32")
NAMES = {
    "n": INT, "left": INT, "few": INT, "p.left": INT, "p.stride_a": INT, "p.stride_b": INT, "p.stride_c": INT, "p.rows": INT,
    "p.scale": ("float",), "scores": SCORES,
}  # fmt: skip


def offered(line: str) -> dict[str, Edit]:
    """The lines that one may become by an operand more, and how."""
    text = FILE.format(line=line)
    tree = ast.parse(text)
    function = tree.body[-1]
    assert isinstance(function, ast.FunctionDef)
    number, lines = function.body[0].lineno, text.splitlines()
    found = edits(function, number, lines[number - 1], NAMES, siblings(tree))
    return {one.applied(lines).strip(): one for one in found if one.missing is not None}


@pytest.mark.parametrize(
    ("line", "becomes"),
    {
        "a number that is kept above 0": ("return n - 1", "return gl.maximum(n - 1, 0)"),
        "a factor that lines beside it have": ("return scores - left", "return (scores * (p.scale)) - left"),
        "another one of that kind": ("return n + left", "return (n * (p.stride_c)) + left"),
        "what is stored": ("p.slot.store(scores - left)", "p.slot.store((scores * (p.scale)) - left)"),
        "what the line multiplies by elsewhere": ("return n, left * few", "return (n * (few)), left * few"),
        "a parameter that nothing reads": ("return n + 1", "return gl.minimum(n + 1, left)"),
    }.values(),
)
def test_operands_of_lines_beside_it_come_first(line: str, becomes: str) -> None:
    assert offered(line)[becomes].rank == 0


def test_operands_that_the_function_does_not_have_are_not_offered() -> None:
    """`row` is a name of the other function's."""
    found = offered("return n - 1")
    assert "return gl.minimum(n - 1, p.rows - 1)" in found
    assert not any("row)" in line or "row," in line for line in found)


def test_shapes_get_no_operands() -> None:
    found = offered("return gl.full([n, left], scores, n)")
    assert found and all("[n, left]" in line for line in found)


def test_changes_that_change_no_value_are_left_out() -> None:
    text = "def f(n, few):\n    return n % 4\n"
    whole = (2, 11, 16)
    changes = {
        "never": Edit(*whole, "gl.maximum(n % 4, 0)", 0, True, Missing("maximum", "0", 1)),
        "at times": Edit(*whole, "gl.maximum(n % 4, few)", 0, True, Missing("maximum", "few", 1)),
        "always": Edit(*whole, "gl.minimum(n % 4, -1)", 0, True, Missing("minimum", "-1", 1)),
        "the same name": Edit(2, 11, 12, "few", 3, True),
        "another number": Edit(*whole, "(n % 5)", 2, True),
        "cannot be asked": Edit(2, 11, 12, "g(n)", 1, True),
    }  # fmt: skip
    module = types.ModuleType("m")
    observed = Observed(module, changes.values())
    exec(compile(Asking(observed.places).visit(ast.parse(text)), "m", "exec"), vars(module))

    def attempt() -> None:
        assert [module.f(n, 2) for n in (1, 2, 3)] == [1, 2, 3]

    ask(module, observed, attempt)
    judged = {name: observed.judged(edit) for name, edit in changes.items()}
    assert judged["never"] is None
    # It would choose the other one every time: there would be no need of a minimum.
    assert judged["always"] is not None and judged["always"].rank > changes["always"].rank
    assert judged["at times"] == changes["at times"]
    assert judged["the same name"] == changes["the same name"]
    assert judged["another number"] is None
    assert judged["cannot be asked"] == changes["cannot be asked"]


def test_a_value_that_refuses_to_be_asked_has_a_kind() -> None:
    """Pointers say of what they do not know that the emulator does not."""

    class Refusing:
        def __getattr__(self, name: str) -> None:
            raise UnsupportedError(f"the emulator does not know pointer.{name}")

    assert kind_of(Refusing()) == ("Refusing", "", "")


def test_functions_are_no_values_that_are_asked_for() -> None:
    """``x.to(type)`` is rewritten to a call of a function that stands where x did."""
    text = "def f(n):\n    return n\n"
    function = ast.parse(text)
    (definition,) = function.body
    assert isinstance(definition, ast.FunctionDef)
    (statement,) = definition.body
    assert isinstance(statement, ast.Return) and statement.value is not None
    call = ast.Call(ast.Name("converted", ast.Load()), [statement.value], [])
    statement.value = ast.fix_missing_locations(ast.copy_location(call, statement.value))
    observed = Observed(types.ModuleType("m"), [Edit(2, 11, 12, "1", 2, True)])
    seen: list[object] = []
    names: dict[str, Any] = {
        "converted": lambda value: value + 1,
        "__seen__": lambda _, value, __: seen.append(value) or value,
    }
    exec(compile(Asking(observed.places).visit(function), "m", "exec"), names)
    assert names["f"](3) == 4
    assert seen == [3, 4]


def test_a_function_that_nothing_calls_may_be_what_an_extreme_forgot() -> None:
    file = FILE.replace("def f(p,", "def largest(scores):\n    return gl.max(scores, 0)\n\n@gluon.jit\ndef f(p,")
    tree = ast.parse(file.format(line="return n"))
    assert siblings(tree).uncalled["largest(scores)"] == {"scores"}
    called = ast.parse(file.format(line="return largest(scores)"))
    assert "largest(scores)" not in siblings(called).uncalled
