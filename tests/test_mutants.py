"""tools/mutants tells caught faults from those that survive, and its list fits the code."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FAULTS = tomllib.loads((ROOT / "tools" / "mutants.toml").read_text())["fault"]

CODE = "def double(x):\n    return 2 * x\n\n\ndef triple(x):\n    return 3 * x\n"
TEST = """
import time
from residua import double, triple

def test_double():
    assert double(2) == 4

def test_triple():
    assert triple(0) == 0

def test_slow():
    time.sleep(60 if double(1) != 2 else 0)
"""


def fault(name, old, new, *tests, **more):
    return {"id": name, "file": "__init__.py", "old": old, "new": new, "tests": list(tests), **more}


KILLED = fault("double", "2 * x", "3 * x + 1", "tests/test_toy.py::test_triple", "tests/test_toy.py::test_double")
MISSED = fault("triple", "3 * x", "4 * x", "tests/test_toy.py", pick="triple")
GONE = fault("gone", "5 * x", "6 * x", "tests/test_toy.py")
TWICE = fault("twice", "* x", "+ x", "tests/test_toy.py")
UNTESTED = fault("untested", "2 * x", "7 * x", "tests/test_none.py")
UNREADABLE = fault("unreadable", "2 * x", "2 * (x", "tests/test_toy.py")


@pytest.fixture
def clone(tmp_path):
    """A package of two functions, of which one is tested, and the command."""
    for name in ("tools", "src/residua", "tests"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "mutants", tmp_path / "tools" / "mutants")
    (tmp_path / "src" / "residua" / "__init__.py").write_text(CODE)
    (tmp_path / "tests" / "test_toy.py").write_text(TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def write(clone, *faults):
    lines = [f"{key} = {json.dumps(value)}" for one in faults for key, value in (("", None), *one.items())]
    text = "\n".join("[[fault]]" if line.startswith(" = ") else line for line in lines)
    (clone / "tools" / "mutants.toml").write_text(text + "\n")


def mutants(clone, *arguments):
    (clone / "tmp").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "tools/mutants", *arguments], cwd=clone, capture_output=True, text=True,
        env=os.environ | {"TMPDIR": str(clone / "tmp")},
    )  # fmt: skip


@pytest.mark.slow
def test_every_verdict_is_told_and_the_rest_goes_on(clone):
    write(clone, MISSED, GONE, TWICE, UNTESTED, UNREADABLE, KILLED)
    done = mutants(clone, "--jobs", "2", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["counts"] == {"caught": 1, "survived": 1, "error": 4}
    by_id = {one["id"]: one for one in found["faults"]}
    assert by_id["double"]["by"] == "tests/test_toy.py::test_double"
    assert by_id["triple"]["status"] == "survived"
    assert "no longer there" in by_id["gone"]["by"]
    assert "occurs 2 times" in by_id["twice"]["by"]
    assert "test_none.py" in by_id["untested"]["by"]
    assert by_id["unreadable"]["status"] == "error"
    assert len(done.stderr.splitlines()) == 7  # a line a fault, and the sum
    assert (clone / "src" / "residua" / "__init__.py").read_text() == CODE
    assert not list((clone / "tmp").iterdir())


@pytest.mark.slow
def test_caught_faults_are_success(clone):
    write(clone, KILLED, MISSED)
    done = mutants(clone, "--only", "doub")
    assert done.returncode == 0, done.stdout
    assert "1 caught, 0 survived, 0 error of 1" in done.stdout
    assert mutants(clone, "--only", "quadruple").returncode == 1


@pytest.mark.slow
def test_recorded_verdicts_stand_until_the_fault_or_its_file_changes(clone):
    write(clone, KILLED, MISSED)
    assert mutants(clone, "--record", "verdicts.json").returncode == 1
    kept = json.loads((clone / "verdicts.json").read_text())["faults"]
    assert {name: one["status"] for name, one in kept.items()} == {"double": "caught", "triple": "survived"}
    again = mutants(clone, "--record", "verdicts.json")
    assert "double" not in again.stdout
    assert "survived triple" in again.stdout  # what survived is tried again
    assert "1 caught, 1 survived, 0 error of 2" in again.stdout
    (clone / "src" / "residua" / "__init__.py").write_text(CODE + "\n\nlater = 1\n")
    assert "caught   double" in mutants(clone, "--record", "verdicts.json").stdout


@pytest.mark.slow
def test_test_that_fails_by_itself_catches_nothing(clone):
    (clone / "tests" / "test_toy.py").write_text(TEST.replace("== 4", "== 5"))
    write(clone, KILLED)
    done = mutants(clone)
    assert done.returncode == 1
    assert "do not pass without a fault" in done.stdout


def test_interrupt_ends_the_tests_and_leaves_nothing(clone):
    write(clone, KILLED | {"tests": ["tests/test_toy.py::test_slow"]})
    (clone / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "tools/mutants"], cwd=clone, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"TMPDIR": str(clone / "tmp")},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a test run may ignore it
    )  # fmt: skip
    while not list((clone / "tmp").glob("mutants-*/src0/residua/__init__.py")):
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "stopped" in output
    assert not list((clone / "tmp").iterdir())


@pytest.mark.parametrize("one", FAULTS, ids=lambda one: one["id"])
def test_fault_applies_to_the_code(one):
    """Its text is in its file once, and its tests are there."""
    path = ROOT / "src" / "residua" / one["file"]
    assert path.is_file(), f"{one['file']} is gone: adapt the fault"
    assert path.read_text().count(one["old"]) == 1, f"{one['old']!r} has moved: adapt the fault"
    for test in one["tests"]:
        assert (ROOT / test.split("::")[0]).exists(), test


def test_faults_are_many_and_everywhere():
    assert len(FAULTS) >= 140
    assert len({one["id"] for one in FAULTS}) == len(FAULTS)
    rooms = {one["file"].rsplit("/", 1)[0] for one in FAULTS}
    assert {
        "read_groups.py",
        "runner.py",
        "streams",
        "ops/attend",
        "native",
        "model",
        "hf",
        "lab/train",
        "lab/compare",
        "lab/cost",
        "lab/diagnose",
        "lab/tasks",
    } <= rooms
