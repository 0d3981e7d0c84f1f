"""The command: see the package's docstring."""

import json
import signal
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from tests import chaos
from tests.chaos import report
from tests.chaos.run import run


def main() -> int:
    parser = ArgumentParser(
        "python -m tests.chaos", description=chaos.__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long faults are injected (default: 60)")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule of faults (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep notes and the processes' output there")
    options = parser.parse_args()
    # So that the processes and the server are taken down then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    result = run(options.seconds, options.seed, keep=options.keep)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report.as_json(result), indent=1) + "\n")
    sys.stdout.write(f"{report.as_text(result)}\n")
    return 1 if result.all_problems() else 0


if __name__ == "__main__":
    sys.exit(main())
