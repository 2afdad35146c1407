"""What a line could say instead."""

from __future__ import annotations

import ast

from tilecast.emulator.battery.edits import Names, edits

INT = ("int",)


def changed(
    text: str, names: Names, parameters: str = "a, b, c", executed: frozenset[int] = frozenset()
) -> dict[int, set[str]]:
    """The lines that one becomes, by the rank of the change."""
    lines = [f"def f({parameters}):", *text.splitlines()]
    (function,) = ast.parse("\n".join(lines)).body
    assert isinstance(function, ast.FunctionDef)
    found: dict[int, set[str]] = {}
    for edit in edits(function, 2, lines[1], names, executed=executed):
        found.setdefault(edit.rank, set()).add(edit.applied(lines).strip())
    return found


def test_comparisons_masks_and_maxima_come_first() -> None:
    found = changed("    return gl.where(a < b, gl.maximum(b, c), 0)", {})
    assert found[0] == {
        "return gl.where(a <= b, gl.maximum(b, c), 0)",
        "return gl.where(a >= b, gl.maximum(b, c), 0)",
        "return gl.where(a < b, gl.minimum(b, c), 0)",
        "return gl.where(a < b, b, 0)",
        "return gl.where(a < b, c, 0)",
        "return gl.maximum(b, c)",
        "return 0",
        "return gl.where(gl.maximum(b, c), a < b, 0)",
        "return gl.where(a < b, 0, gl.maximum(b, c))",
    }
    assert found[1] == {"return gl.where(a < b, gl.maximum(c, b), 0)"}
    assert found[2] == {f"return gl.where(a < b, gl.maximum(b, c), {one})" for one in ("1", "(-1)")}


def test_operators_keep_what_they_hold_together() -> None:
    found = changed("    return (a + b) * c // 2", {})[1]
    assert {"return ((a + b) // c) // 2", "return (-(-((a + b) * c) // 2))", "return (a - b) * c // 2"} <= {
        one.replace("((a - b))", "(a - b)") for one in found
    }


def test_names_take_those_of_their_kind_and_fields_those_of_their_tuple() -> None:
    names = {"a": INT, "b": INT, "c": ("float",), "p": ("tuple", "P"), "p.x": INT, "p.y": INT}
    found = changed("    d = a + p.x", names, "a, b, c, p")
    assert {"d = b + p.x", "d = a + p.y", "d = p.x + p.x"} <= found[3]
    assert not any("c" in one for one in found[3])


def test_a_parameter_that_is_not_read_may_be_a_missing_factor() -> None:
    names = {"a": INT, "b": INT, "c": ("float",)}
    assert "return (a * b) + 1" in changed("    return a + 1", names)[0]


def test_a_name_that_nothing_reads_comes_first_in_place_of_one_of_its_kind() -> None:
    names = {"a": INT, "b": INT, "c": ("float",), "d": INT}
    found = changed("    d, _ = a, b\n    return a + 1", names)
    assert {"d, _ = d, b", "d, _ = a, d"} <= found[0]
    assert not any("c" in one or "_," in one for one in found[0] if "_ = " not in one)


def test_a_condition_may_lack_its_other_limit_where_no_line_that_ran_reads_it() -> None:
    names = {"a": INT, "b": INT, "c": INT}
    line = "    d = (a >= b)\n    if d:\n        return c\n    return d"
    assert "d = (((a >= b) & (a <= c)))" in changed(line, names, executed=frozenset({1, 2, 3, 5}))[0]
    assert not any("<= c" in one for one in changed(line, names)[0])


def test_sums_in_place_lose_their_operator_or_all() -> None:
    assert {"a -= b", "pass"} <= changed("    a += b\n    return a", {})[1]
