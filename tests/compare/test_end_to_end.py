"""The command itself: a real corpus, real processes, stopped; and what this process then makes of their folders."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from residua.lab import plots
from residua.lab.compare import run
from tests.compare.inside import Inside, write_text
from tests.compare.pools import timeless
from tests.refusals.harness import Said, check_refused, residua

pytestmark = pytest.mark.slow

PLAN = """
designs = ["standard", "delta:blocks=2"]
seeds = [0, 1]
sizes = [{ depth = 2, width = 16, heads = 2 }]

[train]
corpus = "dir:text"
steps = 12
batch = 2
context = 16
eval_every = 6
eval_windows = 4
save_every = 3

[tune]
lr = [4e-3, 1e30]
seeds = [7]
"""
"""One rate of the grid blows up."""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with a small text and the plan."""
    folder = tmp_path_factory.mktemp("compare")
    write_text(folder / "text")
    (folder / "plan.toml").write_text(PLAN)
    return folder


def start(workplace, out, *flags, plan="plan.toml"):
    """The command in a process of its own, whose runs are processes too."""
    return subprocess.Popen(
        [sys.executable, "-c", "from residua.cli import main; main()", "compare", "--plan", plan,
         "--out", out, "-j", "2", *flags],
        cwd=workplace, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"RESIDUA_CACHE": str(workplace / "cache"), "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a test run may ignore it
    )  # fmt: skip


def here(workplace, out, *flags, plan="plan.toml"):
    """The command and its runs in this process: what it said, and the folders of the runs that were made. Pictures
    would take longer than the runs; tests/compare/test_records.py has them."""
    with pytest.MonkeyPatch.context() as patch:
        pool = Inside()
        patch.chdir(workplace)
        patch.setenv("RESIDUA_CACHE", str(workplace / "cache"))
        patch.setattr(run, "make_pool", lambda on, out: pool)
        patch.setattr(plots, "draw", lambda *_: None)
        said = residua("compare", "--plan", plan, "--out", out, *flags)
    return said, [folder.relative_to(out).as_posix() for folder in pool.made]


@pytest.fixture(scope="module")
def whole(workplace):
    """A comparison that was never disturbed, made in one process: its answer, and what it said on the way."""
    said, made = here(workplace, "whole", "--json", "--no-report")
    assert said.code == 0, said.err
    assert len(made) == 4 + 4
    return json.loads(said.out), said.err


def test_interrupted_comparison_goes_on_to_the_same_answer(workplace, whole):
    """Ctrl-C in the middle, then again: the answer of a comparison that was never disturbed; a third time, at once."""
    expected, _ = whole
    broken = start(workplace, "broken", "--json")
    deadline = time.monotonic() + 300
    while not list((workplace / "broken").glob("tune/*/*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.05)
    broken.send_signal(signal.SIGINT)
    _, error = broken.communicate(timeout=120)
    assert broken.returncode == 130, error
    assert "interrupted" in error

    said, made = here(workplace, "broken", "--json")
    assert said.code == 0, said.err
    assert len(made) >= 4  # of the final runs none had begun
    assert timeless(json.loads(said.out)) == timeless(expected)

    said, made = here(workplace, "broken", "--no-report")
    assert said.code == 0, said.err
    assert made == []
    assert "vs baseline" in said.out
    files = {path.name for path in (workplace / "broken").iterdir()}
    assert {"plan.json", "results.json", "results.csv", "results.md", "report.html", "figures.json"} <= files
    for row in expected["rows"]:
        assert row["trials"] == 2
        assert row["rates"]["lr"] == 4e-3
    assert len({run["fingerprint"] for run in expected["runs"]}) == 1


def test_failing_run_is_named_and_the_rest_is_kept(workplace, whole):
    """The directory of a run is somebody else's: the command says which run failed and why, and exits 2."""
    shutil.copytree(workplace / "whole", workplace / "bad")
    strange = workplace / "bad/runs/delta-blocks-2/seed0"
    shutil.rmtree(strange)
    strange.mkdir()
    (strange / "letter.txt").write_text("mine")
    said, _ = here(workplace, "bad")
    check_refused(said, "runs/delta-blocks-2/seed0 failed")
    assert "letter.txt" in said.err
    assert (workplace / "bad/runs/standard/seed0/result.json").exists()


def test_rate_that_diverges_is_not_chosen_and_is_said(whole):
    """One rate of the grid blows up in real runs: the table is made with the other, and the answer names the break."""
    results, error = whole
    assert "lr1e+30-seed7: diverged, step" in error
    assert [row["rates"]["lr"] for row in results["rows"]] == [4e-3, 4e-3]
    assert {one["folder"] for one in results["diverged"]} == {
        "tune/standard/lr1e+30-seed7", "tune/delta-blocks-2/lr1e+30-seed7",
    }  # fmt: skip
    assert sum("diverged while tuning at lr 1e+30" in note for note in results["notes"]) == 2


def test_baseline_that_diverges_stops_the_comparison_at_once(workplace):
    """Twice: what is known to diverge is not run again."""
    plan = PLAN.split("[tune]")[0].replace("steps = 12", "steps = 12\nlr = 1e30")
    (workplace / "cold.toml").write_text(plan)
    process = start(workplace, "cold", plan="cold.toml")
    out, error = process.communicate(timeout=120)
    check_refused(Said(process.returncode, out, error), "of the baseline diverged")
    said, made = here(workplace, "cold", plan="cold.toml")
    check_refused(said, "of the baseline diverged")
    assert "smaller learning rate" in error
    assert "smaller learning rate" in said.err
    assert made == []
