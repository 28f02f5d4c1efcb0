"""Processes that know each other, forked from one: `python -m tests.scale.ranks COUNT MODULE ARGUMENT ...`.

torchrun starts a Python of its own and one for every rank, and each imports torch anew, which takes longer than much of
what is tried on them. Here one process imports what the module imports, and its ranks are copies of it, with the
variables that torchrun gives. Tests that kill, signal or restart ranks go through torchrun itself.
"""

from __future__ import annotations

import ast
import ctypes
import importlib
import os
import runpy
import signal
import sys
import threading
import traceback
from importlib.util import find_spec
from pathlib import Path

PR_SET_PDEATHSIG = 1  # of Linux's <sys/prctl.h>


def prepare(module: str) -> None:
    """Import what a module opens with importing, and what ranks need in any case, without running it."""
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel  # noqa: F401

    found = find_spec(module)
    assert found is not None
    assert found.origin is not None
    for node in ast.parse(Path(found.origin).read_text()).body:
        if isinstance(node, ast.Import):
            for name in node.names:
                importlib.import_module(name.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            importlib.import_module(node.module)
        elif not isinstance(node, ast.Expr):  # its docstring
            return


def fork(rank: int, count: int, module: str) -> tuple[int, int]:
    """A rank that waits for the port of the store: its process, and where to write the port to."""
    read, write = os.pipe()
    if process := os.fork():
        os.close(read)
        return process, write
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the end of the first is the end of all
    with os.fdopen(read) as told:
        port = told.readline().strip()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    more = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "forked"}
    os.environ.update({name: str(value) for name, value in (names | more).items()})
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> int:
    """0 if every rank ended well; the first that does not ends the others."""
    count, module = int(sys.argv[1]), sys.argv[2]
    del sys.argv[1:3]
    prepare(module)
    assert threading.active_count() == 1, "a copy of a process has one of its threads"
    ranks = [fork(rank, count, module) for rank in range(count)]
    from torch.distributed import TCPStore

    # a thread serves it, which none of the copies would have
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _, write in ranks:
        with os.fdopen(write, "w") as told:
            told.write(f"{store.port}\n")
    left = {process for process, _ in ranks}
    failed = 0
    while left:
        process, status = os.wait()
        left.discard(process)
        if status and not failed:
            failed = 1
            for other in left:
                os.kill(other, signal.SIGKILL)
    return failed


if __name__ == "__main__":
    sys.exit(main())
