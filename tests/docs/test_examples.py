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
ENGINES = Path(sys.prefix) / "engines"
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
IN_ONE_PROCESS = """
import runpy, sys
from residua.lab.compare import run
from tests.compare.inside import Inside
run.make_pool = lambda on, out: Inside()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A comparison whose runs are no processes of their own."""


def run(name, folder, *arguments, leaves=(), warnings="error", path=(), first=()):
    path = os.pathsep.join([*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", warnings, *first, ROOT / "examples" / name, *arguments],
        cwd=folder, capture_output=True, text=True, timeout=120,
        env=os.environ | {"RESIDUA_STRICT": "1", "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == list(leaves), "an example leaves nothing behind but what it was asked for"
    return done.stdout


def test_swap_the_stream_trains_every_design(tmp_path):
    rows = re.findall(r"^(\w+) +[\d,]+  ([\d.]+) -> ([\d.]+)$", run("01_swap_the_stream.py", tmp_path), re.MULTILINE)
    assert tuple(name for name, _, _ in rows) == residua.names()
    for name, before, after in rows:
        assert float(after) < float(before) - 1, f"{name} went from {before} to {after}"


def test_convert_keeps_the_logits_and_trains(tmp_path):
    said = run("02_convert_a_checkpoint.py", tmp_path)
    before, after = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", said).groups())
    assert after < before - 0.05
    assert "loaded ResiduaLlamaForCausalLM, generated torch.Size([1, 28])" in said


def test_write_your_own_obeys_the_laws(tmp_path):
    assert f"obeys {len(LAWS) - 1} laws" in run("03_write_your_own.py", tmp_path)


def test_duality_holds(tmp_path):
    assert run("04_duality.py", tmp_path).count("the two axes differ by") == 4


def test_record_routing_prints_and_draws(tmp_path):
    said = run("05_record_routing.py", tmp_path)
    assert all(f"\n{site} " in said for site in ("l0_attn", "l2_mlp", "head"))
    read = [float(weight) for weight in re.findall(r"\w+ ([\d.]+)(?=, |$)", said.split("the head reads ")[1])]
    assert sum(read) == pytest.approx(1, abs=0.05)
    (tmp_path / "out").mkdir()
    picture = tmp_path / "out" / "routing.png"
    run("05_record_routing.py", tmp_path / "out", picture, leaves=[picture])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_compare_prints_a_row_for_every_design(tmp_path):
    """The notebook has the same comparison, with a process for every run."""
    said = run("06_compare.py", tmp_path, path=[ROOT], first=["-c", IN_ONE_PROCESS])
    rows = re.findall(r"^(\S+) +[\d,]+ parameters  loss [\d.]+  (.*)$", said, re.MULTILINE)
    assert [name for name, _ in rows] == ["standard", "delta:blocks=2"]
    assert rows[0][1] == "baseline"
    assert re.fullmatch(r"[+-][\d.]+ \[[+-][\d.]+, [+-][\d.]+\]", rows[1][1])


@pytest.mark.engines
def test_fabric_shards_over_two_processes(tmp_path):
    """And has the losses of one; torch and Lightning have warnings of their own to give."""
    one, two = (
        re.findall(
            r"^step \d: loss ([\d.]+)$", run("07_fabric.py", tmp_path, count, warnings="default", path=[ENGINES]), re.M
        )
        for count in "12"
    )
    assert len(two) == 5
    assert [float(loss) for loss in two] == pytest.approx([float(loss) for loss in one], abs=3e-6)


def test_examples_are_numbered_without_gaps():
    assert [int(example.name[:2]) for example in EXAMPLES] == list(range(1, len(EXAMPLES) + 1))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example_is_short_and_tested(example):
    assert len(example.read_text().splitlines()) <= 40
    assert f'run("{example.name}"' in Path(__file__).read_text(), f"{example.name} is run by no test"
