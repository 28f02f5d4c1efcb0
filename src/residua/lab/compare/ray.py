"""Runs as tasks of a Ray cluster: one process a run, placed by the processors and devices that it needs.

The cluster is one that is there, found as Ray finds it (`RAY_ADDRESS`, or the one on this machine) or named by
`ray:address=host:port`; all its machines must see the output directory. `ray:address=local` starts one on this machine.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from typing import Any, ClassVar

from residua.extras import need
from residua.lab.compare.pool_base import Pool, Started, environment
from residua.lab.compare.remote import Remote, remote
from residua.lab.compare.work import Work


class Ray(Pool):
    """One Ray task a run, in a process of its own. A task whose process or machine dies is submitted again."""

    OPTIONS: ClassVar[Mapping[str, type]] = {"address": str, "cpus": int, "gpus": int}

    def __init__(self, options: Mapping[str, int | str]) -> None:
        need("cluster", "ray")
        self.options, self.ours = options, False

    def start(self, work: Work) -> Started:
        """Submit it; Ray waits until a machine has the processors and devices free."""
        ray = self._connect()
        task = ray.remote(
            num_cpus=self.options.get("cpus", work.threads),
            num_gpus=self.options.get("gpus", work.gpus),
            max_calls=1,  # the process ends with the run
            max_retries=0,  # a lost run is submitted again where all pools do it
            runtime_env={"env_vars": environment(work.threads) | _path()},
        )(_call)
        return _Task(ray, task.remote(remote(work)))

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        if self.ours:
            import ray

            ray.shutdown()

    def _connect(self) -> Any:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
        import ray

        if not ray.is_initialized():
            address = str(self.options.get("address", "auto"))
            try:
                _reach(address)
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except (OSError, ValueError, RuntimeError) as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise ValueError(
                    f"--on ray: no Ray cluster at {address} ({reason}); start one with "
                    "`ray start --head`, or name it: ray:address=host:port"
                ) from None
            self.ours = True
        return ray


def _call(run: Remote) -> int:
    return run()


def _reach(address: str) -> None:
    """An error at once where nothing listens: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=10).close()


def _path() -> dict[str, str]:
    """Where Python finds the code, if that is said by a variable."""
    return {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}


class _Task:
    def __init__(self, ray: Any, reference: Any) -> None:
        self.ray, self.reference = ray, reference

    def running(self) -> bool:
        ended, _ = self.ray.wait([self.reference], timeout=0)
        return not ended

    def stop(self) -> None:
        self.ray.cancel(self.reference, force=False)  # an interrupt in its process: it saves

    def kill(self) -> None:
        self.ray.cancel(self.reference, force=True)
