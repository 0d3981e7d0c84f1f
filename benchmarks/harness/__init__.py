"""
What every benchmark stands on: a server of its own, interleaved rounds, a table and a JSON file.

The figures that count are ratios against a baseline measured in the same run on the same server,
round by round (A B A B ...). Absolute ones tell what one machine gave on one day.
"""

from benchmarks.harness.metering import (
    Cost,
    LockWaits,
    Meter,
    Sampler,
    Series,
    TableFigures,
    cpu_seconds,
    multixact_bytes,
    table_figures,
    wait_until_gone,
)
from benchmarks.harness.reporting import (
    RESULTS,
    Points,
    Report,
    Spread,
    Target,
    interleaved,
    number,
    percentile,
    print_result,
    ratio,
    show,
    table,
    write,
)
from benchmarks.harness.serving import PAYLOAD, ROOT, SERVER_OPTIONS, machine, server, set_up_django

__all__ = [
    "PAYLOAD",
    "RESULTS",
    "ROOT",
    "SERVER_OPTIONS",
    "Cost",
    "LockWaits",
    "Meter",
    "Points",
    "Report",
    "Sampler",
    "Series",
    "Spread",
    "TableFigures",
    "Target",
    "cpu_seconds",
    "interleaved",
    "machine",
    "multixact_bytes",
    "number",
    "percentile",
    "print_result",
    "ratio",
    "server",
    "set_up_django",
    "show",
    "table",
    "table_figures",
    "wait_until_gone",
    "write",
]
