"""What the tests of pools share: a small comparison whose runs last long enough to be disturbed, and its command."""

import json
import os
import signal
import subprocess
import sys
import time

from residua.lab.common.locks import RunLocked, locked
from tests.compare.inside import write_text

PLAN = """
designs = ["standard", "attnres"]
seeds = [0]
sizes = [{ depth = 1, width = 16, heads = 2 }]

[train]
corpus = "dir:text"
steps = 600
batch = 2
context = 16
eval_every = 300
eval_windows = 4
save_every = 50
"""


def make_place(folder):
    """A folder with a text and the plan."""
    write_text(folder / "text")
    (folder / "plan.toml").write_text(PLAN)
    return folder


def start(place, out, *flags):
    """The command, begun at `began` in seconds; what it tells its user grows in the file `told`."""
    began, told = time.time(), place / f"{out}-{time.monotonic_ns()}.txt"
    with told.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", "from residua.cli import main; main()", "compare", "--plan", "plan.toml",
             "--out", out, "--no-report", "--json", *flags],
            cwd=place, stdout=subprocess.PIPE, stderr=errors, text=True,
            env=os.environ | {"RESIDUA_CACHE": str(place / "cache"), "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a test run may ignore it
        )  # fmt: skip
    process.began, process.told = began, told
    return process


def finish(process, timeout=300):
    """Exit code, results and errors of the command, once it has ended."""
    said, _ = process.communicate(timeout=timeout)
    error = process.told.read_text()
    return process.returncode, json.loads(said) if process.returncode == 0 else said, error


def at_work(command, place, out, updates=30, timeout=200):
    """The process of the first run that a command started and that is in the middle of its updates; and its folder."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for metrics in (place / out).glob("runs/*/*/metrics.jsonl"):
            folder = metrics.parent
            job = place / out / "jobs" / f"{folder.relative_to(place / out)}.json"
            if min(job.stat().st_mtime, metrics.stat().st_mtime) < command.began:
                continue  # what an earlier command left
            if not (folder / "result.json").exists() and metrics.read_bytes().count(b"\n") > updates:
                try:
                    return json.loads((folder / "run.lock").read_text())["pid"], folder
                except (OSError, ValueError):
                    pass  # it has just ended, or not signed yet
        time.sleep(0.01)
    raise AssertionError(f"no run of {out} was found at work in {timeout} s")


def kill_one(command, place, out):
    """Kill the process of a run in the middle of its updates, and wait until the command has told that it is lost."""
    worker, _ = at_work(command, place, out)
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: "lost (its process was killed" in command.told.read_text())


def press_ctrl_c(command, worker, seconds=3.0):
    """Interrupt a command while one of its runs stands still: else that may end before the news comes to it."""
    os.kill(worker, signal.SIGSTOP)
    command.send_signal(signal.SIGINT)
    time.sleep(seconds)
    os.kill(worker, signal.SIGCONT)


def at_rest(place, out):
    """Whether no process is at work in a folder of a run: those of a killed command may outlive it for a while."""
    try:
        for metrics in (place / out).glob("runs/*/*/metrics.jsonl"):
            with locked(metrics.parent):
                pass
    except RunLocked:
        return False
    return True


def steps_saved(folder):
    """The steps that a run has checkpoints of."""
    return sorted(int(path.name.rpartition("-")[2]) for path in (folder / "checkpoints").iterdir())


def timeless(results):
    """The results without what depends on the clock."""
    results = json.loads(json.dumps(results))
    results.pop("command")
    for row in results["rows"]:
        for key in ("speed", "memory", "loss_at_equal_time"):
            row.pop(key)
    for run in results["runs"]:
        run.pop("time")
    return results


def said(place, out, folder, text):
    """Whether the log of a run has a text."""
    log = place / out / "jobs" / f"{folder.relative_to(place / out)}.log"
    return log.exists() and text in log.read_text()


def wait_for(condition, timeout=200):
    """Until it holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
