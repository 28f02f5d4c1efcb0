"""What a Slurm job and a Ray task do: become, in their own process, what a local run's process is.

The process takes the directory, the log and the variables of the command that started it, refuses another version of
the code, and runs the worker. A signal that asks it to end lets it save.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from residua.lab.common.files import Record
from residua.lab.compare.work import FAILED, STOPPED, Work


@dataclass(frozen=True, slots=True)
class Remote:
    """A run with what its process needs to know; called in that process, the exit code that a local one would have."""

    work: Work
    directory: str
    variables: Mapping[str, str]
    versions: Mapping[str, str]

    def __call__(self) -> int:
        """Run it to its end."""
        self._become()
        here = _versions()
        if here != self.versions:
            self.work.end(FAILED, f"ValueError: {socket.gethostname()} has {_differing(here, self.versions)}")
            return FAILED
        from residua.lab.compare.worker import attempt

        code, message = attempt(self.work, patience=math.inf)
        if message:
            print(message, file=sys.stderr, flush=True)
        return code

    def _become(self) -> None:
        os.chdir(self.directory)
        os.environ.update(self.variables)
        with self.work.log.open("ab") as log:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)


def remote(work: Work) -> Remote:
    """A run as another machine gets it; both see the same folders."""
    ours = {name: value for name, value in os.environ.items() if name.startswith("RESIDUA_")}
    absolute = Work(work.job.absolute(), work.folder.absolute(), work.threads, work.gpus)
    return Remote(absolute, os.getcwd(), ours, _versions())


class Preemptible:
    """A `Remote` under submitit, which sends SIGUSR2 before a machine is taken away or its time is over.

    The run saves; then submitit's own handler puts the job back into the queue.
    """

    def __init__(self, run: Remote) -> None:
        self.run = run

    def __call__(self) -> int:
        """Run it to its end, or to the signal."""
        requeue, asked = signal.getsignal(signal.SIGUSR2), False

        def preempt(*_: object) -> None:
            nonlocal asked
            asked = True
            os.kill(os.getpid(), signal.SIGTERM)

        signal.signal(signal.SIGUSR2, preempt)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # while it trains, it has a handler of its own
        code = self.run()
        if code == STOPPED and asked and callable(requeue):
            requeue(signal.SIGUSR2, None)
        return code

    def checkpoint(self) -> object:
        """What submitit puts into the queue: the same again, as the run's folder knows where it stopped."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def _versions() -> dict[str, str]:
    from residua.lab.common.files import versions

    return versions()


def _differing(here: Record, there: Record) -> str:
    told = [f"{name} {here[name]} (not {there[name]})" for name in there if here[name] != there[name]]
    return f"{', '.join(told)}; results of different versions do not compare"
