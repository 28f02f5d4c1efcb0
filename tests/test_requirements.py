"""Marked tests skip with the cure when a tool is absent, and fail when RESIDUA_REQUIRE names it."""

import subprocess
import sys
from pathlib import Path

import pytest

TEST = """
import pytest

@pytest.mark.eval
def test_harness():
    pass
"""

FAKE = "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if n == 'lm_eval' else f(n, *a)\n"


@pytest.mark.parametrize(
    ("required", "outcome"), [("", "1 skipped"), ("browser", "1 skipped"), ("browser,eval", "1 error")]
)
def test_absent_tool_is_named(tmp_path, required, outcome):
    """The real conftest, with the harness hidden: its cure is printed, and requiring it is a failure."""
    conftest = Path(__file__).parent / "conftest.py"
    (tmp_path / "conftest.py").write_text(
        FAKE + conftest.read_text().replace("from __future__ import annotations\n", "")
    )
    (tmp_path / "test_it.py").write_text(TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    eval: harness\n    browser: browser\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rsE", "-p", "no:xdist", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "RESIDUA_REQUIRE": required}, cwd=tmp_path,
    )  # fmt: skip
    assert outcome in done.stdout, done.stdout + done.stderr
    assert "RESIDUA_REQUIRE=eval make setup" in done.stdout
