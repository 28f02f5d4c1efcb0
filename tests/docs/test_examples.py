"""The examples: each runs as a user would run it, is short, and says something."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import residua
from residua.testing import LAWS

pytestmark = pytest.mark.slow  # each example trains

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))


def run(name, folder):
    done = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "examples" / name],
        cwd=folder, capture_output=True, text=True, timeout=120, env=os.environ | {"RESIDUA_STRICT": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir()), "an example leaves nothing behind"
    return done.stdout


def test_swap_the_stream_trains_every_design(tmp_path):
    rows = re.findall(r"^(\w+) +[\d,]+  ([\d.]+) -> ([\d.]+)$", run("01_swap_the_stream.py", tmp_path), re.MULTILINE)
    assert tuple(name for name, _, _ in rows) == residua.names()
    for name, before, after in rows:
        assert float(after) < float(before) - 1, f"{name} went from {before} to {after}"


def test_write_your_own_obeys_the_laws(tmp_path):
    assert f"obeys {len(LAWS) - 1} laws" in run("03_write_your_own.py", tmp_path)


def test_duality_holds(tmp_path):
    assert run("04_duality.py", tmp_path).count("the two axes differ by") == 4


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example_is_short_and_tested(example):
    assert len(example.read_text().splitlines()) <= 40
    assert f'run("{example.name}"' in Path(__file__).read_text(), f"{example.name} is run by no test"
