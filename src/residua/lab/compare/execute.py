"""Run what a plan asks for, several processes at a time; stop and start again at any point.

A run that has its result, or that diverged, is not run again. Ctrl-C asks every running process to save and waits for
them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from residua.lab.common.files import Listener, Values, read_json, write_json
from residua.lab.compare.plan import PLAN, ComparePlan, Run
from residua.lab.runs import RESULT, divergence, is_done


class RunFailed(ValueError):
    """A run ended in an error; the others are kept."""


@dataclass
class _Job:
    run: Run
    folder: Path
    log: Path
    process: subprocess.Popen[bytes]


def claim(plan: ComparePlan, out: Path) -> None:
    """Make `out` the directory of this plan, or refuse it if it is another's."""
    stored = out / PLAN
    if stored.exists():
        if read_json(stored) != plan.to_json():
            raise ValueError(f"{out} belongs to another plan; give another --out, or run the plan in {stored}")
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there and is not the directory of a comparison; give another --out")
    out.mkdir(parents=True, exist_ok=True)
    write_json(stored, plan.to_json())


def execute(
    runs: Sequence[Run], out: Path, *, jobs: int, threads: int, listen: Listener, needed: Collection[str] = ()
) -> None:
    """Bring every run to its end, at most `jobs` at a time.

    A run that diverges is told and left at that, unless its folder is one of `needed`: without those the rest is of
    no use.
    """
    for run in runs:
        _check(run, out, needed)
    waiting = [run for run in runs if not (is_done(out / run.folder) or divergence(out / run.folder))]
    listen({"kind": "phase", "runs": len(runs), "done": len(runs) - len(waiting)})
    running: list[_Job] = []
    with _stopping(running):
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                running.append(_start(run, out, threads))
                listen({"kind": "started", "run": run.folder, "steps": run.config.steps})
            time.sleep(0.2)
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                _finish(job, listen)
                _check(job.run, out, needed)
            for job in running:
                listen({"kind": "progress", "run": job.run.folder, **_last_line(job.folder / "metrics.jsonl")})


def _check(run: Run, out: Path, needed: Collection[str]) -> None:
    broken = divergence(out / run.folder)
    if broken and run.folder in needed:
        raise RunFailed(
            f"run {run.folder} of the baseline diverged, and nothing can be compared with it: {broken['message']}. "
            "Choose a smaller learning rate and another --out; finished runs are kept"
        )


def _start(run: Run, out: Path, threads: int) -> _Job:
    folder, job = out / run.folder, out / "jobs" / f"{run.folder}.json"  # a run's folder is the run's alone
    log = job.with_suffix(".log")
    job.parent.mkdir(parents=True, exist_ok=True)
    write_json(job, run.config.to_json())
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    with log.open("ab") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", "residua.lab.compare.worker", str(job), str(folder)],
            stdin=subprocess.DEVNULL, stdout=written, stderr=written, env=environment, start_new_session=True,
        )  # fmt: skip
    return _Job(run, folder, log, process)


def _finish(job: _Job, listen: Listener) -> None:
    if broken := divergence(job.folder):
        listen({"kind": "diverged", "run": job.run.folder, **broken})
        return
    if job.process.returncode == 0 and is_done(job.folder):
        listen({"kind": "finished", "run": job.run.folder, **read_json(job.folder / RESULT)})
        return
    lines = job.log.read_text(errors="replace").strip().splitlines()
    reason = lines[-1] if lines else f"exit code {job.process.returncode}"
    raise RunFailed(f"run {job.run.folder} failed: {reason} (see {job.log}); finished runs are kept")


@contextmanager
def _stopping(running: list[_Job]) -> Iterator[None]:
    """Turn SIGTERM into an interrupt, and on any way out let the running processes save first."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        for job in running:
            if job.process.poll() is None:
                job.process.send_signal(signal.SIGTERM)
        for job in running:
            try:
                job.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                job.process.kill()
        signal.signal(signal.SIGTERM, before)


def _last_line(path: Path) -> Values:
    """The newest whole line of a metrics file, cheaply."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().split(b"\n")[:-1]
        return json.loads(lines[-1]) if lines else {}
    except (OSError, ValueError):
        return {}
