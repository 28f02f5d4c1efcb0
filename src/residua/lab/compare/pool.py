"""A pool is somewhere to run: processes of this machine, a Slurm queue, a Ray cluster.

A pool starts runs, says whether they live, and asks them to save and end. It knows nothing of results: the truth about
a run lies in its folder, so that every pool goes on from what any other left, and all give the same answer.

    local                                      processes of this machine; the default
    slurm:partition=gpu,minutes=720,gpus=1     one Slurm job a run, through submitit
    ray:address=head:6379                      one Ray task a run, on a cluster that is there
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from residua.lab.compare.pool_base import Pool as Pool
from residua.lab.compare.pool_base import Started as Started
from residua.lab.compare.pool_base import environment
from residua.lab.compare.work import Work


class _Process:
    """A worker with a pipe to this process. However this one ends, the pipe closes, and the worker saves and ends."""

    def __init__(self, work: Work) -> None:
        with work.log.open("ab") as written:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "residua.lab.compare.worker", str(work.job), str(work.folder)],
                stdin=subprocess.PIPE, stdout=written, stderr=written,
                env=os.environ | environment(work.threads), start_new_session=True,
            )  # fmt: skip

    def running(self) -> bool:
        if self.process.poll() is None:
            return True
        self._let_go()
        return False

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._let_go()

    def _let_go(self) -> None:
        """Close our end of the pipe: a long comparison would run out of descriptors."""
        if self.process.stdin is not None:
            self.process.stdin.close()


class Local(Pool):
    """Processes of this machine. One that was killed is not started again: here its user is there to ask."""

    parallel = 1
    queues = False
    restarts = 0

    def start(self, work: Work) -> Started:
        """A process that a signal to this one does not reach."""
        return _Process(work)


def make_pool(spec: str, out: Path) -> Pool:
    """The pool that `--on` names, with its options; everything wrong with it is one error."""
    name, colon, rest = spec.partition(":")
    options = {}
    for pair in rest.split(",") if colon else ():
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not (key and equals and value):
            raise ValueError(f"--on {spec}: {pair!r} is not key=value; write {name} or {name}:key=value,key=value")
        if key in options:
            raise ValueError(f"--on {spec} gives {key!r} twice")
        options[key] = value
    makers: Mapping[str, Callable[[Mapping[str, str], Path], Pool]] = {"local": _local, "slurm": _slurm, "ray": _ray}
    if name not in makers:
        raise ValueError(f"--on is {', '.join(makers)}, not {name!r}")
    return makers[name](options, out)


def settings(pool: str, options: Mapping[str, str], known: Mapping[str, type]) -> dict[str, int | str]:
    """Options with the kinds they have; an unknown one and a wrong number say so."""
    found: dict[str, int | str] = {}
    for key, text in options.items():
        if key not in known:
            raise ValueError(f"--on {pool} has no {key!r}; it takes {', '.join(known) or 'no options'}")
        if known[key] is int and not (text.isdigit() and int(text) >= (0 if key == "gpus" else 1)):
            raise ValueError(f"--on {pool}:{key}={text}: {key} is a whole number")
        found[key] = known[key](text)
    return found


def _local(options: Mapping[str, str], out: Path) -> Pool:
    settings("local", options, {})
    return Local()


def _slurm(options: Mapping[str, str], out: Path) -> Pool:
    from residua.lab.compare.slurm import Slurm

    return Slurm(settings("slurm", options, Slurm.OPTIONS), out)


def _ray(options: Mapping[str, str], out: Path) -> Pool:
    from residua.lab.compare.ray import Ray

    return Ray(settings("ray", options, Ray.OPTIONS))
