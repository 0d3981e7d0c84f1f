#!/usr/bin/env python3
"""
Everything from a bare Python 3.11 or newer: make the environment if need be, then run.

    python3 dev.py demo [...]     the main job, start to end: manage.py demo
    python3 dev.py test [...]     the tests: pytest; --full: the long ones too
    python3 dev.py check          what has to hold beside the tests: ruff, mypy, imports, migrations
    python3 dev.py docs           the documentation, as web pages in docs/_build
    python3 dev.py manage [...]   any other command of manage.py
    python3 dev.py python [...]   the environment's Python

Each Python minor version has an environment of its own, `.venv-3.X`, and it is brought up to date
when pyproject.toml has changed.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
CHECKS = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("mypy",),
    ("lint-imports",),
    # On the tests' throw-away database, which leaves nothing behind.
    ("python", "-m", "django", "makemigrations", "--check", "--dry-run", "--settings=tests.settings"),
)


def main() -> None:
    """Run the command that the arguments name, in place of this process."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this is where an older Python learns of it
        sys.exit(f"dev.py: Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("demo", "test", "check", "docs", "manage", "python"))
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()

    minor = f"{sys.version_info[0]}.{sys.version_info[1]}"
    venv = ROOT / f".venv-{minor}"
    bindir = venv / "bin"
    with (ROOT / f"{venv.name}.lock").open("w") as lock:
        # Two at once would install into each other's way.
        fcntl.flock(lock, fcntl.LOCK_EX)
        prepare(venv, ["-e", str(ROOT), *group("dev")])

    sys.stdout.flush()
    manage = [str(ROOT / "manage.py")]
    if options.command == "check":
        check(bindir)
    elif options.command == "docs":
        os.chdir(ROOT)
        run(bindir, ["-m", "sphinx", "--builder", "html", "--fail-on-warning", "--quiet", "docs", "docs/_build"])
    elif options.command == "test":
        os.chdir(ROOT)
        run(bindir, ["-m", "pytest", *spread(options.arguments), *options.arguments])
    elif options.command == "demo":
        run(bindir, [*manage, "demo", *options.arguments])
    elif options.command == "manage":
        run(bindir, [*manage, *options.arguments])
    else:
        run(bindir, options.arguments)


def group(name: str) -> list[str]:
    """Return the requirements of a dependency group: not every pip knows such groups."""
    import tomllib  # not before an older Python has been told off

    found = []
    for entry in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"][name]:
        found += [entry] if isinstance(entry, str) else group(entry["include-group"])
    return found


def prepare(venv: Path, requirements: list[str]) -> None:
    """Make the environment, or bring it up to date, and do nothing when it is."""
    python = venv / "bin" / "python"
    stamp = venv / "installed"
    wanted = hashlib.sha256(
        repr((sys.version_info[:2], requirements)).encode() + (ROOT / "pyproject.toml").read_bytes()
    ).hexdigest()
    if not works(python):
        say(f"making {venv.name}")
        make(venv)
    elif stamp.exists() and stamp.read_text() == wanted:
        return
    command = [*installer(python), *requirements]
    say("installing what pyproject.toml names (a minute the first time)")
    # Nothing but the command's own output goes to the standard output.
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        sys.exit("dev.py: the installation failed, see above")
    stamp.write_text(wanted)


def works(python: Path) -> bool:
    """Tell whether it is a Python of this version that runs."""
    try:
        done = subprocess.run(
            [python, "-c", "import sys; print(sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return False
    return done.stdout.strip() == str(sys.version_info[:2])


def make(venv: Path) -> None:
    """Make an empty environment, with pip in it where Python brings one along."""
    command = [sys.executable, "-m", "venv", "--clear", str(venv)]
    if subprocess.run(command, capture_output=True, check=False).returncode == 0:
        return
    done = subprocess.run([*command, "--without-pip"], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"dev.py: no virtual environment can be made: {done.stdout}{done.stderr}")


def installer(python: Path) -> list[str]:
    """Return the start of a command that installs into the environment of this Python."""
    pip = ["-m", "pip", "--disable-pip-version-check"]
    if has_pip(str(python)):
        return [str(python), *pip, "install", "-qq"]
    if has_pip(sys.executable):
        return [sys.executable, *pip, "--python", str(python), "install", "-qq"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--quiet", "--python", str(python)]
    sys.exit(
        f"dev.py: {sys.executable} has neither ensurepip nor pip. Install one of them (Debian and "
        "Ubuntu: the package python3-venv) or uv, and run this again."
    )


def has_pip(python: str) -> bool:
    """Tell whether this Python has pip."""
    command = [python, "-m", "pip", "--version"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def check(bindir: Path) -> None:
    """Run all checks, also after one has failed, and exit with 1 if any has."""
    os.chdir(ROOT)
    failed = []
    for command in CHECKS:
        say(" ".join(command))
        if subprocess.run([bindir / command[0], *command[1:]], check=False).returncode:
            failed.append(command[0])
    if failed:
        sys.exit(f"dev.py: failed: {', '.join(failed)}")


def spread(arguments: list[str]) -> list[str]:
    """Return the options that let several processes share the tests, unless it is one file or a debugger wants one."""
    chosen = ("-n", "--numprocesses", "--dist", "-s", "--capture=no")
    alone = {"--pdb", "--trace", "--co", "--collect-only", "--fixtures", "--markers", "--help", "-h", "--version"}
    if any(argument.startswith(chosen) or argument in alone for argument in arguments):
        return []
    named = {path for argument in arguments if (path := ROOT / argument.partition("::")[0]).exists()}
    if len(named) == 1 and named.pop().is_file():
        return []
    # Tests mostly wait, so each core has two. Each has a server of its own; the tests of a file stay together.
    return ["-n", str(2 * min(os.cpu_count() or 1, 4)), "--dist", "loadfile"]


def run(bindir: Path, arguments: list[str]) -> None:
    """Become the environment's Python, so that signals reach it and its exit status counts."""
    python = str(bindir / "python")  # in full: Python finds its environment by this name
    os.execv(python, [python, *arguments])


def say(text: str) -> None:
    """Tell the user what happens."""
    print(f"dev.py: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
