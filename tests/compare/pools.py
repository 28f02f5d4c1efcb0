"""What the tests of pools share: a small comparison whose runs last long enough to be disturbed, and its command."""

import json
import os
import signal
import subprocess
import sys
import time

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
    (folder / "text").mkdir()
    for number in range(60):
        words = " ".join(f"word{(number * 37 + place * place) % 101}" for place in range(60))
        (folder / "text" / f"{number}.txt").write_text(f"Text {number}. {words}\n")
    (folder / "plan.toml").write_text(PLAN)
    return folder


def start(place, out, *flags):
    """The command, begun at `began` in seconds."""
    began = time.time()
    process = subprocess.Popen(
        [sys.executable, "-c", "from residua.cli import main; main()", "compare", "--plan", "plan.toml", "--out", out,
         "--no-report", "--json", *flags],
        cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"RESIDUA_CACHE": str(place / "cache"), "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a test run may ignore it
    )  # fmt: skip
    process.began = began
    return process


def finish(process, timeout=300):
    """Exit code, results and errors of the command, once it has ended."""
    said, error = process.communicate(timeout=timeout)
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
