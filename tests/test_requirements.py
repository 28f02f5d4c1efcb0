"""Marked tests skip with the cure when a tool is absent, and fail when RESIDUA_REQUIRE names it."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each starts pytest
TEST = """
import pytest

@pytest.mark.eval
def test_harness():
    pass

@pytest.mark.oldest
def test_old_release():
    pass
"""

FAKE = "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if n == 'lm_eval' else f(n, *a)\n"


@pytest.mark.parametrize(
    ("required", "outcome"),
    [("", "2 skipped"), ("browser", "2 skipped"), ("browser,eval", "1 skipped, 1 error"), ("eval, oldest", "2 errors")],
)
def test_absent_tool_is_named(tmp_path, required, outcome):
    """The real conftest, with harness and release hidden: the cures are printed, and requiring one is a failure."""
    conftest = Path(__file__).parent / "conftest.py"
    (tmp_path / "conftest.py").write_text(
        FAKE + conftest.read_text().replace("from __future__ import annotations\n", "") + "OLDEST = Path('absent')\n"
    )
    (tmp_path / "test_it.py").write_text(TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rsE", "-p", "no:xdist", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "RESIDUA_REQUIRE": required}, cwd=tmp_path,
    )  # fmt: skip
    assert outcome in done.stdout, done.stdout + done.stderr
    assert "RESIDUA_REQUIRE=eval make setup" in done.stdout
    assert "RESIDUA_REQUIRE=oldest make setup" in done.stdout
