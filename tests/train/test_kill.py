"""Signal 9 at any moment: the resumed run ends with the bits of an undisturbed one. The ids hold the seeds."""

from __future__ import annotations

import random

import pytest

from tests.train.harness import outcome
from tests.train.warm import Warm

pytestmark = pytest.mark.slow  # thirty processes are killed and resumed

SEEDS = range(10)


@pytest.fixture(scope="module")
def warm():
    server = Warm()
    yield server
    server.close()


@pytest.fixture(scope="module")
def undisturbed(warm, tmp_path_factory):
    """How a run ends, how many bytes of checkpoints it writes, how many events it tells, how long it takes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    warm.run(folder / "first")  # loads the kernels, which none after it has to: its time says nothing of theirs
    out = folder / "run"
    report = warm.run(out)
    assert report["status"] == 0
    last = max((out / "checkpoints").glob("step-*"))
    report["bytes"] = 3 * sum(file.stat().st_size for file in last.iterdir()) - 300  # state.json varies by digits
    return outcome(out), report


def assert_resumes(warm, undisturbed, out, harm):
    report = warm.run(out)
    assert report["status"] == 0, f"resuming after {harm} failed"
    assert outcome(out) == undisturbed[0], f"another end after {harm}"


@pytest.mark.parametrize("seed", SEEDS)
def test_kill_inside_a_checkpoint_write_loses_nothing(warm, undisturbed, tmp_path, seed):
    harm = {"bytes": random.Random(f"bytes{seed}").randrange(undisturbed[1]["bytes"])}
    report = warm.run(tmp_path / "run", **harm)
    print(seed, harm, report)
    assert report["status"] == -9
    folder = tmp_path / "run" / "checkpoints"
    assert list(folder.glob(".writing-*"))  # it was in the middle of one
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) == harm["bytes"]
    assert_resumes(warm, undisturbed, tmp_path / "run", harm)


@pytest.mark.parametrize("seed", SEEDS)
def test_kill_between_checkpoint_writes_loses_nothing(warm, undisturbed, tmp_path, seed):
    harm = {"event": random.Random(f"event{seed}").randint(1, undisturbed[1]["events"])}
    report = warm.run(tmp_path / "run", **harm)
    print(seed, harm, report)
    assert report["status"] == -9
    assert not list((tmp_path / "run" / "checkpoints").glob(".writing-*"))
    assert_resumes(warm, undisturbed, tmp_path / "run", harm)


@pytest.mark.parametrize("seed", SEEDS)
def test_kill_at_any_time_loses_nothing(warm, undisturbed, tmp_path, seed):
    draw = random.Random(f"seconds{seed}")
    for attempt in range(20):  # a run that was faster than the undisturbed one may be over: that is no kill
        out, harm = tmp_path / str(attempt), {"seconds": draw.uniform(0, undisturbed[1]["seconds"])}
        report = warm.run(out, **harm)
        print(seed, harm, report)
        if report["status"] == -9:
            break
    assert report["status"] == -9
    assert_resumes(warm, undisturbed, out, harm)


def test_killed_again_and_again_loses_nothing(warm, undisturbed, tmp_path):
    """A machine that dies at every start, each time a little further into its checkpoint."""
    draw, out, died = random.Random(77), tmp_path / "run", 0
    for _ in range(8):
        died += warm.run(out, bytes=draw.randrange(undisturbed[1]["bytes"] // 3))["status"] == -9
    assert died >= 4
    assert_resumes(warm, undisturbed, out, "eight kills")
