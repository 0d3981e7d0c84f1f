"""
An environment for each peer, made once: a virtual environment named ``.venv-peers-NAME`` in the checkout.

What is installed, and in which version, is in ``requirements/NAME.txt``.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.harness import ROOT

REQUIREMENTS = Path(__file__).parent / "requirements"


class Unavailable(RuntimeError):
    """A peer that cannot be installed here, and why."""


def python(name: str) -> list[str]:
    """Return the command of a Python that has what ``requirements/NAME.txt`` lists."""
    folder = ROOT / f".venv-peers-{name}"
    wanted = (REQUIREMENTS / f"{name}.txt").read_text()
    # Written last, so that an installation that was broken off is done again.
    done = folder / "installed.txt"
    interpreter = folder / "bin" / "python"
    if not done.exists() or done.read_text() != wanted:
        venv.create(folder, clear=True)
        # This interpreter's pip: one of its own would take as long as the peer.
        pip = [sys.executable, "-m", "pip", "--python", str(interpreter), "install", "--quiet"]
        run([*pip, "--disable-pip-version-check", "-r", str(REQUIREMENTS / f"{name}.txt")])
        done.write_text(wanted)
    return [str(interpreter)]


def run(command: list[str]) -> None:
    """Run an installer; raise ``Unavailable`` with the end of what it said when it fails."""
    try:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise Unavailable(str(said).strip()[-500:]) from error
