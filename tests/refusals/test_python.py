"""Every row of the table of refusals of the Python API, and of the environment."""

import os
import subprocess
import sys

import pytest

from residua.native import Unavailable
from residua.ops import _backend
from tests.refusals import command_line, files, hugging_face, python
from tests.refusals.harness import lying


@pytest.mark.parametrize(("call", "words"), [row[1:] for row in python.ROWS], ids=[row[0] for row in python.ROWS])
def test_call(place, call, words):
    (place / "broken.json.lines").write_text("{\n")
    before = lying(place)
    with pytest.raises((ValueError, TypeError, OSError)) as caught:
        call(place)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert lying(place) == before, "something was written"


ASK = """
import sys
from residua.cli import main
sys.argv = ["residua", "train", "--corpus", "dir:corpus", "--steps", "1", "--out", "new"]
main()
"""


@pytest.mark.parametrize(("name", "value", "read", "words"), python.ENVIRONMENT)
def test_environment(monkeypatch, name, value, read, words):
    monkeypatch.setenv(name, value)
    if name == "RESIDUA_BACKEND":
        monkeypatch.setattr(_backend, "_choice", value)  # what an import would have found
    with pytest.raises((ValueError, Unavailable)) as caught:
        read()
    assert words in str(caught.value)


def test_environment_is_refused_in_one_line_by_a_command(place):
    words = "RESIDUA_BACKEND='banana': there is no such backend"
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=os.environ | {"RESIDUA_BACKEND": "banana"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    assert not (place / "new").exists()


def test_there_are_more_than_five_hundred_refusals():
    tables = (command_line.ROWS, files.RUNS, files.PLANS, python.ROWS, python.ENVIRONMENT, hugging_face.ROWS)
    assert sum(map(len, tables)) >= 500
