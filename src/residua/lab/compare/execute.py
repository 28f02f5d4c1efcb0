"""Run what a plan asks for, several at a time, in any pool; stop and start again at any point.

A run that has its result, or that diverged, is not run again. Ctrl-C asks every run to save and waits for them, and so
does the end of the time that the command was given.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from residua.lab.common.expect import read_expected
from residua.lab.common.files import Listener, Values, contents, read_json, write_json
from residua.lab.compare.plan import PLAN
from residua.lab.compare.pool import Pool, Started
from residua.lab.compare.work import STOPPED, Planned, Work
from residua.lab.runs import RESULT, check_belongs, divergence, has_ended, is_done
from residua.lab.train.interrupt import heard

ENDED = {"loss": float, "bits_per_byte": float}
"""What is told of a result."""
PATIENCE = 60.0
"""Seconds that runs have to save when they are asked to end."""


class Plan(Protocol):
    """What decides an experiment, as its directory keeps it."""

    def to_json(self) -> Values:
        """Plain values."""


class RunFailed(ValueError):
    """A run ended in an error; the others are kept."""


class TimeIsUp(Exception):
    """The time that a command was given is over before its runs are; every one of them is saved."""


@dataclass
class _Job:
    run: Planned
    work: Work
    printed: int
    """Bytes of its log that earlier processes wrote: no reason for how this one ends."""
    started: Started
    told: bool = False
    """Whether its start was told: what lies in a queue has not begun."""
    restarts: int = 0


def refuse_strangers(plan: Plan, out: Path) -> None:
    """Refuse a directory that is not this plan's, without touching it."""
    stored = out / PLAN
    if stored.exists():
        if read_json(stored) != plan.to_json():
            raise ValueError(f"{out} belongs to another plan; give another --out, or run the plan in {stored}")
    elif out.exists() and (not out.is_dir() or contents(out) - {f".{PLAN}.writing"}):  # left by a kill
        raise ValueError(f"{out} is there and is not the directory of a comparison; give another --out")


def claim(plan: Plan, out: Path) -> None:
    """Make `out` the directory of this plan, or refuse it if it is another's."""
    refuse_strangers(plan, out)
    stored = out / PLAN
    if stored.exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    write_json(stored, plan.to_json())


def deadline_after(minutes: float | None) -> float | None:
    """The time of `time.monotonic` so many minutes from now; None without a limit."""
    if minutes is None:
        return None
    if not 0 < minutes < math.inf:
        raise ValueError(f"--stop-after {minutes:g}: give minutes, more than 0")
    return time.monotonic() + 60 * minutes


def execute(
    runs: Sequence[Planned],
    out: Path,
    *,
    pool: Pool,
    jobs: int | None,
    threads: int,
    listen: Listener,
    needed: Collection[str] = (),
    deadline: float | None = None,
) -> None:
    """Bring every run to its end, at most `jobs` at a time, or as many as the pool takes.

    A run that diverges is told and left at that, unless its folder is one of `needed`: without those the rest is of
    no use. A run whose process was killed is started again as often as the pool allows. At the deadline, a time of
    `time.monotonic`, those that are running are asked to save, and `TimeIsUp` is raised.
    """
    for run in runs:
        folder = out / run.folder
        if (folder / RESULT).exists() and not (folder / "config.json").exists():
            raise ValueError(f"{folder} has a result and no config.json: whose it is cannot be told; delete it")
        check_belongs(folder, run.config)
        _check(run, out, needed)
    waiting = [run for run in runs if not has_ended(out / run.folder)]
    listen({"kind": "phase", "runs": len(runs), "done": len(runs) - len(waiting)})
    parallel = jobs or pool.parallel or len(runs)
    running: list[_Job] = []
    with _stopping(running):
        while waiting or running:
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeIsUp
            while waiting and len(running) < parallel:
                run = waiting.pop(0)
                work = _prepare(run, out, threads)
                running.append(_Job(run, work, work.begin(), pool.start(work)))
                _tell_start(running[-1], listen, begun=not pool.queues)
            time.sleep(pool.pause)
            for job in [job for job in running if not job.started.running()]:
                _tell_start(job, listen)
                if _ended(job, pool, listen):
                    running.remove(job)
                    _check(job.run, out, needed)
            for job in running:
                line = _last_line(job.work.folder / "metrics.jsonl")
                _tell_start(job, listen, begun=bool(line))
                if job.told:
                    listen({"kind": "progress", "run": job.run.folder, **line})


def _check(run: Planned, out: Path, needed: Collection[str]) -> None:
    broken = divergence(out / run.folder)
    if broken and run.folder in needed:
        raise RunFailed(
            f"run {run.folder} of the baseline diverged, and nothing can be compared with it: {broken['message']}. "
            "Choose a smaller learning rate and another --out; finished runs are kept"
        )


def _prepare(run: Planned, out: Path, threads: int) -> Work:
    job = out / "jobs" / f"{run.folder}.json"  # a run's folder is the run's alone
    job.parent.mkdir(parents=True, exist_ok=True)
    write_json(job, run.config.to_json())
    return Work(job, out / run.folder, threads, gpus=int(run.config.device == "cuda"))


def _tell_start(job: _Job, listen: Listener, *, begun: bool = True) -> None:
    if begun and not job.told:
        job.told = True
        listen({"kind": "started", "run": job.run.folder, "steps": job.run.config.steps})


def _ended(job: _Job, pool: Pool, listen: Listener) -> bool:
    """Tell how a run ended; False if its process was lost and it was started again. An error if it failed."""
    name, folder = job.run.folder, job.work.folder
    if broken := divergence(folder):
        listen({"kind": "diverged", "run": name, **broken})
        return True
    if is_done(folder):
        listen({"kind": "finished", "run": name, **read_expected(folder / RESULT, ENDED)})
        return True
    told = job.work.ended()
    lost = told is None or told[0] == STOPPED  # nobody here asked it to stop: its machine was wanted for something else
    reason = _reason(job, told)
    if lost and job.restarts < pool.restarts:
        job.restarts += 1
        listen({"kind": "lost", "run": name, "message": reason, "restart": job.restarts, "of": pool.restarts})
        job.printed = job.work.begin()
        job.started = pool.start(job.work)
        return False
    raise RunFailed(f"run {name} failed: {reason} (see {job.work.log}); finished runs are kept")


def _reason(job: _Job, told: tuple[int, str] | None) -> str:
    """The last line of what a run said for itself; of one that was killed, what this process of it printed last."""
    if told is not None:
        return (told[1].strip().splitlines() or ["no reason given"])[-1]
    log = job.work.log.read_bytes()[job.printed :] if job.work.log.exists() else b""
    lines = log.decode(errors="replace").strip().splitlines()
    return "its process was killed" + (f", and its log ends: {lines[-1]}" if lines else "")


@contextmanager
def _stopping(running: list[_Job]) -> Iterator[None]:
    """Turn SIGTERM and a closed terminal into an interrupt, and on any way out let the runs save first."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    here = threading.current_thread() is threading.main_thread()  # elsewhere signals cannot be had
    before = {number: signal.signal(number, interrupt) for number in (heard() if here else ())}
    try:
        yield
    finally:
        for job in running:
            if job.started.running():
                job.started.stop()
        deadline = time.monotonic() + PATIENCE
        while any(job.started.running() for job in running) and time.monotonic() < deadline:
            time.sleep(0.1)
        for job in running:
            if job.started.running():
                job.started.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def _last_line(path: Path) -> Values:
    """The newest whole line of a metrics file, cheaply."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().split(b"\n")[:-1]
        return json.loads(lines[-1]) if lines else {}
    except (OSError, ValueError):
        return {}
