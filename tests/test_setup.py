"""tools/setup says what is missing before it starts, and installs nothing twice."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def setup(folder, *groups, **environment):
    return subprocess.run(
        [sys.executable, "tools/setup", *groups], cwd=folder, capture_output=True, text=True,
        env=os.environ | {"RESIDUA_REQUIRE": ""} | environment,
    )  # fmt: skip


@pytest.fixture
def clone(tmp_path):
    """What the script needs of a fresh clone."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "setup", tmp_path / "tools" / "setup")
    for name in ("constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    ("groups", "environment", "said"),
    [
        (["core"], {"RESIDUA_FREE_GIB": "0.5"}, "0.5 GiB of disk are free"),
        (["docs"], {}, "no group named 'docs'"),
        (["core"], {"RESIDUA_REQUIRE": "gpu"}, "RESIDUA_REQUIRE names 'gpu'"),
    ],
)
def test_trouble_is_one_line_and_nothing_is_made(clone, groups, environment, said):
    done = setup(clone, *groups, **environment)
    assert done.returncode != 0
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (clone / ".venv").exists()


def test_old_python_gets_a_sentence_and_not_a_syntax_error(clone):
    script = (clone / "tools" / "setup").read_text()
    (clone / "tools" / "setup").write_text(script.replace("OLDEST_PYTHON = (3, 11)", "OLDEST_PYTHON = (9, 9)"))
    done = setup(clone, "core")
    assert "Python 9.9 or newer is needed" in done.stderr
    assert not (clone / ".venv").exists()


def test_second_run_installs_nothing():
    """In this checkout, which ran it to get here."""
    if Path(sys.prefix) != ROOT / ".venv":
        pytest.fail("run the tests through make: they belong to .venv")
    done = setup(ROOT, "dev")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_constraints_pin_torch_and_everything_exactly():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert "torch==2.13.0" in lines
    assert all("==" in line and "://" not in line for line in lines)
    build = (ROOT / "pyproject.toml").read_text().split("[project]")[0]
    assert "torch" not in build
