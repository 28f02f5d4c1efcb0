"""Processes that fail or are killed: the others end with that message within seconds, and a restart ends in the same
bits."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time

import pytest

from residua.lab.common.locks import locked
from residua.lab.train import checkpoint as checkpoints
from tests.scale.common import ROOT, environment, once, ranks, torchrun
from tests.train.harness import metrics

pytestmark = pytest.mark.slow
CHANGES = {"steps": 24, "save_every": 3, "eval_every": 8, "width": 32, "design": "delta:blocks=2,gate=alpha"}


def start(out, parallel, fault="", *more, changes=CHANGES):
    """By torchrun, whose affair it is what becomes of a rank that fails; with no fault, by the quicker way."""
    how = [*torchrun(2, "--monitor-interval", "0.1", *more), "-m"] if fault else ranks(2)
    return subprocess.Popen(
        [*how, "tests.scale.toy", str(out), parallel, json.dumps(changes), fault],
        cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def told(errors):
    return [line for line in errors.splitlines() if line.startswith("residua: ")]


def test_a_failure_on_one_rank_ends_all_with_its_message(tmp_path):
    begun = time.monotonic()
    running = start(tmp_path / "run", "fsdp=2", "fail")
    _, errors = running.communicate(timeout=120)
    assert running.returncode != 0
    assert told(errors) == ["residua: rank 1: the disk of this rank is gone"]
    assert time.monotonic() - begun < 90  # of which most is starting; a collective waits for ten minutes


def test_a_folder_in_use_is_refused_once(tmp_path):
    (tmp_path / "run").mkdir()
    with locked(tmp_path / "run"):
        running = start(tmp_path / "run", "dp=2")
        _, errors = running.communicate(timeout=120)
    (line,) = told(errors)
    assert "residua: rank 0: " in line
    assert "is in use by process" in line


def test_sigterm_to_torchrun_saves_on_all_ranks(tmp_path):
    running = start(tmp_path / "run", "fsdp=2", "nap", changes={**CHANGES, "steps": 400, "save_every": 400})
    wait_for(lambda: len(list_metrics(tmp_path / "run")) > 3, running)
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=60)
    (line,) = told(errors)
    assert "stopped by SIGTERM after step" in line
    (saved,) = (tmp_path / "run/checkpoints").iterdir()
    assert (saved / "state.json").exists()
    assert saved.name in line


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    def make(folder):
        running = start(folder / "run", "fsdp=2 pp=2")
        _, errors = running.communicate(timeout=120)
        assert running.returncode == 0, errors[-3000:]

    out = once(tmp_path_factory, "undisturbed", make) / "run"
    return {each: (state(out / each), metrics(out / each)) for each in ("fsdp=2", "pp=2")}


def state(out):
    """Every tensor of the last checkpoint, to the last bit; in which order a file has them is the writer's affair."""
    last = checkpoints.load(max((out / "checkpoints").glob("step-*")))
    return {
        f"{part}/{name}": (str(tensor.dtype), tensor.flatten().tolist())
        for part, tensors in last.tensors.items()
        for name, tensor in tensors.items()
    }


KILLS = int(os.environ.get("RESIDUA_KILLS", "2"))
"""Of RESIDUA_KILLS=20, five are in a save; the suite has one in an update, of stages, and one in a save, of pieces."""
MOMENTS = [
    ("save" if seed % 4 == 1 else "update", "pp=2" if seed % 3 == 0 else "fsdp=2", seed) for seed in range(KILLS)
]


@pytest.mark.parametrize(("moment", "parallel", "seed"), MOMENTS)
def test_killed_and_restarted_it_ends_in_the_same_bits(tmp_path, undisturbed, moment, parallel, seed):
    """SIGKILL of one rank at a moment that the seed draws: in an update, or while a checkpoint is being written."""
    draw, out = random.Random(seed), tmp_path / "run"
    running = start(out, parallel, "nap", "--max-restarts", "2")
    after = draw.randrange(2, 20)
    wait_for(lambda: len(list_metrics(out)) > after, running)
    if moment == "save":
        wait_for(lambda: any((out / "checkpoints").glob(".writing-*")), running)
    else:
        time.sleep(draw.uniform(0, 0.1))
    victim = int((tmp_path / "run.pids" / str(draw.randrange(2))).read_text())
    os.kill(victim, signal.SIGKILL)
    _, errors = running.communicate(timeout=200)
    assert running.returncode == 0, errors[-3000:]
    assert (state(out), metrics(out)) == undisturbed[parallel]


def list_metrics(out):
    path = out / "metrics.jsonl"
    return path.read_bytes().splitlines() if path.exists() else []


def wait_for(happened, running, seconds=100.0):
    until = time.monotonic() + seconds
    while not happened():
        assert running.poll() is None, running.communicate()[1][-3000:]
        assert time.monotonic() < until
        time.sleep(0.002)
