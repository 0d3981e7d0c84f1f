"""A benchmark runs, and what all stand on works. No figure is judged; ``.ci/full`` runs the other benchmarks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness


def run_quick(name: str, folder: Path) -> dict[str, Any]:
    """Run the quick form of a benchmark as one does, and return what it wrote."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", name, "--quick", "--output", str(folder)],
        cwd=harness.ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    assert harness.table(result["rows"]) in done.stdout
    return result


@pytest.mark.parametrize("name", ["publish_one", pytest.param("capacity", marks=pytest.mark.full)])
def test_the_quick_form_runs(name: str, tmp_path: Path) -> None:
    """It ends well, prints its table, and its JSON tells what it was measured on; the host is nobody's business."""
    result = run_quick(name, tmp_path)
    assert result["rows"]
    assert all(target["what"].startswith("T") for target in result["targets"])
    assert result["machine"]["fsync"] == result["machine"]["synchronous_commit"] == "on"
    assert {"cpu", "cores", "memory_gib", "python", "django", "psycopg", "postgresql"} <= result["machine"].keys()


def test_ratios_are_taken_round_by_round() -> None:
    """What slows a whole round down, the baseline too, does not change the ratio."""
    spread = harness.ratio([100, 10, 90], [200, 20, 180])
    assert spread == harness.Spread(0.5, 0.5, 0.5)


def test_rounds_are_interleaved() -> None:
    """A B A B, not A A B B."""
    order: list[str] = []
    harness.interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    assert order == ["a", "b", "a", "b"]


def test_processor_time_counts_children_that_have_ended() -> None:
    """What a benchmark's processes used is not forgotten with them."""
    before = harness.cpu_seconds(os.getpid())
    subprocess.run([sys.executable, "-c", "sum(range(10_000_000))"], check=True)
    assert harness.cpu_seconds(os.getpid()) - before > 0.05


def test_a_table_has_the_columns_of_all_rows() -> None:
    """A row that lacks one leaves it empty."""
    assert harness.table([{"way": "a"}, {"way": "b", "rate": 1}]).splitlines() == [
        "| way | rate |",
        "| --- | ---- |",
        "| a   |      |",
        "| b   | 1    |",
    ]


def test_a_percentile_is_one_of_the_values() -> None:
    """The 99th of a hundred is the last but none beyond it."""
    assert harness.percentile(range(100), 50) == 50
    assert harness.percentile(range(100), 99) == 99
    assert harness.percentile([7.0], 99) == 7.0
