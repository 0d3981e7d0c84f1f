"""The comments that Sphinx shows of settings and signals, and the pages that it makes."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from sphinx.pycode import ModuleAnalyzer

from tests.docs.reference import DOCS


@dataclass(frozen=True)
class Documented:
    """A comment: its text, and its fields in their order."""

    text: str
    fields: dict[str, str]


def documented(module: str, namespace: str = "") -> dict[str, Documented]:
    """Return what the comments (`#:`) of a module, or of a class in it, say of each name."""
    analyzer = ModuleAnalyzer.for_module(module)
    analyzer.analyze()
    found = {}
    for (where, name), lines in analyzer.attr_docs.items():
        if where == namespace:
            text, *fields = re.split(r"^:([\w ]+): ", "\n".join(lines), flags=re.MULTILINE)
            values = [" ".join(each.split()) for each in fields[1::2]]
            found[name] = Documented(" ".join(text.split()), dict(zip(fields[::2], values, strict=True)))
    return found


def build(folder: Path, *names: str) -> dict[str, str]:
    """Return pages as HTML, as Sphinx makes them. Their links to other pages lead nowhere."""
    options = {
        "include_patterns": ",".join(f"{name}.md" for name in names),
        "root_doc": names[0],
        "suppress_warnings": "myst.xref_missing,toc.not_included",
    }
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", str(DOCS), str(folder)]
    command += [part for key, value in options.items() for part in ("-D", f"{key}={value}")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name: (folder / f"{name}.html").read_text() for name in names}
