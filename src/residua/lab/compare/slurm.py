"""Runs as Slurm jobs, through submitit: one job a run, signals arrive, no daemon of ours.

The scripts and logs of submitit lie in `jobs/submitit` below the output directory, which all machines must see.
`slurm:cluster=local` is submitit without Slurm, a process a run on this machine: to try it, and what the tests run.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from residua.extras import need
from residua.lab.compare.pool_base import Pool, Started, environment
from residua.lab.compare.remote import Preemptible, remote
from residua.lab.compare.work import Work

MINUTES = 24 * 60
"""How long a job may take where nobody says; submitit puts one that takes longer back into the queue."""
ASK_EVERY = 60.0
"""Seconds between questions to Slurm's accounting: that a job ended well is seen by its files."""


class Slurm(Pool):
    """One Slurm job a run. A job that was lost is submitted again; one that is preempted saves and is requeued."""

    OPTIONS: ClassVar[Mapping[str, type]] = {
        "partition": str, "account": str, "qos": str, "constraint": str, "minutes": int, "memory_gb": int,
        "cpus": int, "gpus": int, "cluster": str,
    }  # fmt: skip

    def __init__(self, options: Mapping[str, int | str], out: Path) -> None:
        need("cluster", "submitit")
        cluster = options.get("cluster", "slurm")
        if cluster not in ("slurm", "local"):
            raise ValueError(f"--on slurm:cluster={cluster}: cluster is slurm or local")
        if cluster == "slurm" and shutil.which("sbatch") is None:
            raise ValueError(
                "--on slurm: no sbatch here; type it on a node that submits jobs, or try it with slurm:cluster=local"
            )
        self.options, self.cluster = options, str(cluster)
        self.folder = out.absolute() / "jobs" / "submitit"
        self.pause = 0.2 if cluster == "local" else 2.0
        self.asked = time.monotonic()

    def start(self, work: Work) -> Started:
        """Submit it with the processors and devices that it needs."""
        import submitit

        own = {key: self.options.get(key) for key in ("partition", "account", "qos", "constraint")}
        threads = environment(work.threads)
        executor = submitit.AutoExecutor(folder=self.folder, cluster=self.cluster)
        executor.update_parameters(
            name="residua",
            cpus_per_task=self.options.get("cpus", work.threads),
            gpus_per_node=self.options.get("gpus", work.gpus) or None,
            timeout_min=self.options.get("minutes", MINUTES),
            mem_gb=self.options.get("memory_gb"),
            slurm_setup=[f"export {name}={value}" for name, value in threads.items()],
            **{f"slurm_{key}": value for key, value in own.items()},
        )
        before = {name: os.environ.get(name) for name in threads}
        os.environ.update(threads)  # the job's environment is that of the moment when it is submitted
        try:
            return _Job(self, executor.submit(Preemptible(remote(work))))
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value

    def ask(self) -> bool:
        """Whether it is time to ask Slurm's accounting again: one question is about all jobs."""
        due = time.monotonic() - self.asked > ASK_EVERY
        if due:
            self.asked = time.monotonic()
        return due


class _Job:
    def __init__(self, pool: Slurm, job: Any) -> None:
        self.pool, self.job, self.stopping = pool, job, False

    def running(self) -> bool:
        return not self.job.done(force_check=self.stopping or self.pool.ask())

    def stop(self) -> None:
        self.stopping = True
        if self.pool.cluster == "local":
            # submitit's own cancel gives a local process one second; what it starts hands SIGTERM on, and waits
            with suppress(ProcessLookupError):
                os.kill(int(self.job.job_id), signal.SIGTERM)
        else:
            self.job.cancel(check=False)

    def kill(self) -> None:
        self.job.cancel(check=False)
