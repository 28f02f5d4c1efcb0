"""What a refusal is: exit code 2, one line that says what is wrong, no traceback, and nothing written."""

from __future__ import annotations

import hashlib
import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

from residua.cli import main


class Said(NamedTuple):
    code: int
    out: str
    err: str


def residua(*arguments: str) -> Said:
    """Run the command line in this process, as its entry point does."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["residua", *arguments]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.argv = before
    return Said(code, out.getvalue(), err.getvalue())


def lying(folder: Path) -> dict[str, str]:
    """Every path below a folder, and a hash of what is there."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


def check_refused(said: Said, words: str, *, code: int = 2) -> None:
    """One line: ours, or the last of those that typer prints about flags."""
    assert said.code == code, f"exit code {said.code}: {said.out}{said.err}"
    assert "Traceback" not in said.err
    lines = [line for line in said.err.splitlines() if line.strip()]
    assert lines, "nothing was said"
    if not lines[0].startswith("Usage:"):
        lines = [line for line in lines if line.startswith("residua: ")]
        assert len(lines) == 1, said.err
    assert words in lines[-1], f"{words!r} is not in {lines[-1]!r}"
