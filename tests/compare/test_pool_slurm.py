"""`--on slurm` through submitit's local executor: killed, preempted, interrupted; the table of a local run."""

import os
import signal
from pathlib import Path

import pytest

from residua.lab.compare import compare, read_plan, run
from tests.compare import pools
from tests.compare.inside import Inside

pytestmark = pytest.mark.slow  # real processes

ON = ("--on", "slurm:cluster=local", "--jobs", "2")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return pools.make_place(tmp_path_factory.mktemp("slurm"))


@pytest.fixture(scope="module")
def expected(place):
    """The answer of this machine, from runs in this process; that of its processes is the same: test_end_to_end.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("RESIDUA_CACHE", str(place / "cache"))
        patch.setattr(run, "make_pool", lambda on, out: Inside())
        return compare(read_plan(Path("plan.toml")), "whole", draw=False)


def test_killed_and_preempted_runs_end_in_the_local_table(place, expected):
    """A worker is killed, one is preempted, the command is killed: the same command takes over what goes on alone."""
    command = pools.start(place, "out", *ON)
    pools.kill_one(command, place, "out")
    preempted, folder = pools.at_work(command, place, "out", updates=60)
    os.kill(preempted, signal.SIGUSR2)
    pools.wait_for(lambda: pools.said(place, "out", folder, "Requeued job"))
    command.kill()
    pools.finish(command)

    code, results, error = pools.finish(pools.start(place, "out", *ON))
    assert code == 0, error
    assert pools.timeless(results) == pools.timeless(expected)
    assert "--on slurm:cluster=local" in results["command"]
    assert results["rows"][0]["hardware"]


def test_interrupted_runs_save_and_end_in_the_local_table(place, expected):
    command = pools.start(place, "stopped", *ON)
    worker, folder = pools.at_work(command, place, "stopped", updates=10)
    pools.press_ctrl_c(command, worker)
    code, _, error = pools.finish(command)
    assert code == 130, error
    assert "every run is saved" in error
    assert pools.said(place, "stopped", folder, "stopped by SIGTERM")

    code, results, error = pools.finish(pools.start(place, "stopped"))  # begun on one pool, ended on another
    assert code == 0, error
    assert pools.timeless(results) == pools.timeless(expected)


def test_failing_run_is_named(place, expected):
    """As locally: which run, why, and exit code 2; and nothing is tried again."""
    strange = place / "bad/runs/standard/seed0"
    strange.mkdir(parents=True)
    (strange / "letter.txt").write_text("mine")
    (place / "bad/plan.json").write_bytes((place / "whole/plan.json").read_bytes())
    code, _, error = pools.finish(pools.start(place, "bad", *ON))
    assert code == 2
    assert "runs/standard/seed0 failed" in error
    assert "letter.txt" in error
    assert "lost" not in error
    assert "Traceback" not in error
