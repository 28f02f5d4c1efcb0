"""A results file: what was measured, under which regime, by which command, behind which green tests.

No results from a red op: the tests of what was measured run, and a failure keeps the file unwritten. Several files take
one run of the tests while the sources stay as they were.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from residua.lab.bench.timing import Measured
from residua.lab.checkout import checkout
from residua.lab.common.files import write_text

FORMAT = 1
PACKAGE = Path(__file__).resolve().parents[2]


def write(path: Path, measured: Measured, *, command: str, passed: dict[str, list[str]]) -> None:
    """The file, whole or not at all, behind the tests that `check` gave."""
    tests = sorted({file for files in passed.values() for file in files})
    found = {"format": FORMAT, "command": command, "tests": tests, **measured}
    write_text(path, json.dumps(found, indent=2) + "\n")


def sources(package: Path = PACKAGE) -> str:
    """A hash of all code of the package: what was tested and what was measured must be the same."""
    digest = hashlib.sha256()
    for file in sorted(one for one in package.rglob("*") if one.suffix in (".py", ".c", ".h", ".cpp")):
        digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def read(path: Path) -> Measured:
    """A file that `write` made."""
    found = json.loads(path.read_text())
    if found.get("format") != FORMAT:
        raise ValueError(f"{path} has format {found.get('format')}; this version reads {FORMAT}. Measure again")
    return found


def tested_root() -> Path:
    """The checkout whose tests guard a results file; an installed package has none, and refuses."""
    root = checkout()
    if root is None:
        raise ValueError(
            "--out writes a file only after the tests of what was measured have passed, and an installed residua has "
            "no tests: measure from a checkout (pip install -e .), or leave out --out to see the figures only"
        )
    return root


def check(subjects: Iterable[str], root: Path | None = None) -> dict[str, list[str]]:
    """Run tests/ops/test_<subject>*.py for every subject, each once; the files by subject. Raises where one fails or
    none is."""
    root = tested_root() if root is None else root
    found = {subject: sorted((root / "tests" / "ops").glob(f"test_{subject}*.py")) for subject in subjects}
    untested = [subject for subject, files in found.items() if not files]
    if untested:
        raise ValueError(f"no tests of {', '.join(untested)} in {root / 'tests'}, so no results are written")
    files = sorted({file for each in found.values() for file in each})
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *map(str, files)]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if ran.returncode:
        last = next((line for line in reversed(ran.stdout.splitlines()) if line.startswith("FAILED")), "")
        raise ValueError(f"the tests of {', '.join(found)} fail, so no results are written. {last}".strip())
    return {subject: [str(file.relative_to(root)) for file in each] for subject, each in found.items()}
