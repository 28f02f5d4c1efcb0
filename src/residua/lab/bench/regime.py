"""The conditions of a measurement: one pinned core, a fixed number of threads, an allocator that is told what to do.

glibc hands big blocks back to the kernel and faults every page in again, which costs the public forms (many big
temporaries) more than ours. Timing therefore keeps pages, the regime that favours the others; memory is measured
with blocks that go back at once, so that what is resident is what is in use.
"""

from __future__ import annotations

import os
import platform
import sys

from residua.lab.bench import record
from residua.lab.bench.timing import Measured
from residua.lab.common.files import versions
from residua.lab.common.hardware import processor

KEEP_PAGES = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:"
    "glibc.malloc.trim_threshold=17179869184:glibc.malloc.top_pad=268435456"
)
RETURN_PAGES = "glibc.malloc.mmap_threshold=65536:glibc.malloc.trim_threshold=65536:glibc.malloc.top_pad=0"
GLIBC = ""
"""The allocator as it comes, for what keeps its pages by itself."""

_ENTERED = "RESIDUA_BENCH_REGIME"


def environment(tunables: str, threads: int) -> dict[str, str]:
    """The environment of a measuring process: allocator and threads are read once, when a process starts."""
    return {
        **os.environ, "GLIBC_TUNABLES": tunables, "OMP_NUM_THREADS": str(threads), _ENTERED: "1",
        "TORCHINDUCTOR_COMPILE_THREADS": str(threads),  # no pool of compilers beside what is timed
        "KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "99"),  # torch's profiler tells of every start and stop
    }  # fmt: skip


def enter(tunables: str, threads: int) -> None:
    """Start this very command again under the regime; returns only in the process that is already under it."""
    if os.environ.get(_ENTERED) != "1":
        sys.stdout.flush()
        command = [sys.executable, "-c", "from residua.cli import main; main()", *sys.argv[1:]]
        os.execve(sys.executable, command, environment(tunables, threads))


def pin(threads: int) -> list[int]:
    """Keep this process on the last `threads` of its cores; the cores, or none where the system cannot pin."""
    if not hasattr(os, "sched_setaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))[-threads:]
    os.sched_setaffinity(0, cores)
    return cores


def describe(threads: int, cores: list[int]) -> Measured:
    """Machine, versions and regime, for the results file."""
    import torch

    from residua.ops import _backend

    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        **versions(),
        "threads": threads,
        "pinned": len(cores),
        "allocator": os.environ.get("GLIBC_TUNABLES", ""),
        "kernels": _backend.kernels(),
        "sources": record.sources(),
    }
