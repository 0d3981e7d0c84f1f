"""docs/failure-modes.md is complete: each case is there, and is tested by the tests that it names."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "failure-modes.md"

# fmt: off
CASES = [
    "B01", "B03", "B05", "B06", "B08", "B10", "B12", "B14", "B15", "B16", "B18", "B20", "B21", "B23",
    "B25", "B27", "B29", "B31", "B33", "B34", "B36", "B38", "B39", "B40", "B42", "B44", "B46", "B47",
    "B49", "B51", "B53", "B54", "B56", "B57", "B59", "B60", "B62", "B64", "B65", "B67", "B69", "B71",
    "B72", "B74", "B76", "B78", "B80", "B82", "B83", "B85", "B87", "B88", "B89", "B91", "B93", "B94",
    "B95", "B98", "B99", "B101", "B102", "B104", "B106", "B108", "B110", "B112", "B114",
]
# fmt: on

# | B01 | fault | what happens | tests |
ROW = re.compile(r"^\| (?P<case>B\d+) \| (?P<fault>.+?) \| (?P<outcome>.+?) \| (?P<tests>.+?) \|$", re.MULTILINE)
TEST = re.compile(r"`(?P<file>tests/[\w/]+\.py)(?:::(?P<name>\w+))?`")


def rows(text: str) -> dict[str, list[tuple[str, str | None]]]:
    """Return the tests of each case: file, and function or None for the whole file."""
    return {
        row["case"]: [(test["file"], test["name"]) for test in TEST.finditer(row["tests"])]
        for row in ROW.finditer(text)
    }


@cache
def functions(file: str) -> dict[str, str]:
    """Return the text of each test function of a file, by name."""
    source = (ROOT / file).read_text(encoding="utf-8")
    return {
        node.name: ast.get_source_segment(source, node) or ""
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def is_about(case: str, file: str) -> bool:
    """Tell whether a file says that it tests a case: in its name, or by the word."""
    word = re.compile(rf"\b{case}\b|(?<![a-z0-9]){case.lower()}(?![0-9])")
    return bool(word.search(file) or word.search((ROOT / file).read_text(encoding="utf-8")))


def test_each_case_is_on_the_page_once_and_in_order() -> None:
    """Neither more nor fewer than the cases that were collected."""
    assert len(CASES) == len(set(CASES)) == 67
    found = [row["case"] for row in ROW.finditer(PAGE.read_text(encoding="utf-8"))]
    assert found == CASES


def test_each_case_names_tests_that_exist() -> None:
    """A file that is there, and functions that are in it."""
    for case, tests in rows(PAGE.read_text(encoding="utf-8")).items():
        assert tests, f"{case} names no test"
        for file, name in tests:
            assert (ROOT / file).is_file(), f"{case}: there is no file {file}"
            assert name is None or name in functions(file), f"{case}: there is no {name} in {file}"


def test_the_tests_of_a_case_name_it() -> None:
    """So that whoever reads the test finds the case."""
    for case, tests in rows(PAGE.read_text(encoding="utf-8")).items():
        files = {file for file, _ in tests}
        assert any(is_about(case, file) for file in files), f"none of {sorted(files)} speaks of {case}"


def test_what_is_missing_is_found() -> None:
    """The check itself: a row that names nothing, a file that is not there, a function that is not."""
    text = "| B01 | a | b | `tests/docs/test_failure_modes.py::rows`, `tests/nowhere.py` |\n| B03 | a | b | c |\n"
    assert rows(text) == {"B01": [("tests/docs/test_failure_modes.py", "rows"), ("tests/nowhere.py", None)], "B03": []}
    assert "rows" in functions("tests/docs/test_failure_modes.py")
    assert is_about("B01", "tests/docs/test_failure_modes.py")
    assert not is_about("B01", "tests/docs/test_readme.py")
