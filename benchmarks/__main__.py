"""
Run benchmarks: each starts its own server, prints a table and writes ``benchmarks/results/NAME.json``.

    python -m benchmarks publish        one of them (see --help); exit status 1 when a target is missed
    python -m benchmarks all            all of them
    python -m benchmarks all --quick    a short run that shows that they work: not judged, not kept
    python -m benchmarks docs           make docs/benchmarks.md, tables of other pages and the charts from results/
"""

import argparse
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from benchmarks import docs, harness

NAMES = (
    "publish",
    "publishers",
    "stale",
    "publish_one",
    "publish_many",
    "notify",
    "wakeup",
    "drain",
    "growth",
    "capacity",
    "peers",
    "memory",
    "multixacts",
    "backlog",
    "reaping",
    "admin_pages",
)


def main() -> int:
    """Do what the arguments say and return the exit status."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=[*NAMES, "all", "docs"])
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; the figures mean nothing")
    parser.add_argument("--output", type=Path, help="folder for the JSON file")
    parser.add_argument("--only", metavar="WORD", help="of peers: those with it in their names, beside ours; not kept")
    options = parser.parse_args()
    if options.only and options.name != "peers":
        parser.error("--only is for peers")
    if options.name == "docs":
        docs.update(NAMES)
        return 0
    if options.name == "all":
        return run_all(quick=options.quick, output=options.output)
    return run(options.name, quick=options.quick, output=options.output, only=options.only)


def run_all(*, quick: bool, output: Path | None) -> int:
    """Run each benchmark, also when others failed, and say at the end which did."""
    arguments = ["--quick"] * quick + (["--output", str(output)] if output else [])
    # A process each: Django is set up on one database only.
    command = [sys.executable, "-m", "benchmarks"]
    failed = [name for name in NAMES if subprocess.run([*command, name, *arguments], check=False).returncode]
    if failed:
        print(f"\nfailed, or missed a target: {', '.join(failed)}")
    return int(bool(failed))


def run(name: str, *, quick: bool, output: Path | None, only: str | None) -> int:
    """Run one benchmark."""
    benchmark = import_module(f"benchmarks.{name}")
    # What the question needs of its server beyond what all have.
    with harness.server(getattr(benchmark, "SERVER_OPTIONS", None)) as cluster:
        report = benchmark.run(cluster, quick=quick, **({"only": only} if only else {}))
        result = report.as_dict(harness.machine(cluster), quick=quick)
    harness.print_result(result)
    folder = output or (None if quick or only else harness.RESULTS)
    if folder is not None:
        print(f"written to {harness.write(result, folder)}")
    return int(not quick and not all(target.met for target in report.targets))


if __name__ == "__main__":
    sys.exit(main())
