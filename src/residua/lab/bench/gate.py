"""No results from a red op: the tests of what was measured run first, and a failure keeps the file unwritten."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[4]


def check(subjects: Iterable[str], root: Path = CHECKOUT) -> list[str]:
    """Run tests/ops/test_<subject>*.py for every subject; the files that ran. Raises where one fails or none is."""
    folder = root / "tests" / "ops"
    found = {subject: sorted(folder.glob(f"test_{subject}*.py")) for subject in subjects}
    untested = [subject for subject, files in found.items() if not files]
    if untested:
        raise ValueError(
            f"no tests of {', '.join(untested)} here, so no results are written: measure from a checkout, or leave out "
            "--out to see the figures only"
        )
    files = sorted({file for each in found.values() for file in each})
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *map(str, files)]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if ran.returncode:
        last = next((line for line in reversed(ran.stdout.splitlines()) if line.startswith("FAILED")), "")
        raise ValueError(f"the tests of {', '.join(found)} fail, so no results are written. {last}".strip())
    return [str(file.relative_to(root)) for file in files]
