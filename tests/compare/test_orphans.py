"""Runs end with the command that started them, however that ends, and save first."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from residua.lab.common.locks import locked
from residua.lab.train import checkpoint as checkpoints
from tests.compare.inside import write_text

pytestmark = pytest.mark.slow


def until(what, seconds=120.0):
    """Wait for something to be so; whether it came."""
    deadline = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def children(process):
    """The processes that a process started and that still run."""
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()


def runs(process):
    """Whether a process is there and not a zombie."""
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_runs_save_and_end_with_the_command(tmp_path, number):
    write_text(tmp_path / "text", 30)
    settings = {"corpus": "dir:text", "steps": 100_000, "batch": 2, "context": 16, "eval_windows": 2}
    command = ["compare", "-d", "standard", "--size", "1x8x1", "--seeds", "1", "--out", "out"]
    command += [part for key, value in settings.items() for part in ("-s", f"{key}={value}")]
    with subprocess.Popen(
        [sys.executable, "-m", "residua", *command], cwd=tmp_path, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env=os.environ | {"RESIDUA_CACHE": str(tmp_path / "cache")},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    ) as process:  # fmt: skip
        try:
            run = tmp_path / "out" / "runs" / "standard" / "seed0"
            metrics = run / "metrics.jsonl"
            assert until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 3)
            (worker,) = children(process.pid)
            process.send_signal(number)
            process.wait(120)
            try:
                assert until(lambda: not runs(worker)), "the run goes on without the command"
            finally:
                with suppress(ProcessLookupError):
                    os.kill(int(worker), signal.SIGKILL)  # where the test fails, it would go on for hours
        finally:
            process.kill()
    assert checkpoints.steps(run / "checkpoints"), "nothing was saved"
    with locked(run):  # and nobody holds it
        pass
    assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 130)
