"""A process that has imported everything and forks one child per request, so that a run starts in milliseconds.

It never trains itself: a child inherits no threads and no state. Requests and answers are JSON lines. A request names
the directory of a run and, for its child, one way to come to harm:

    bytes    killed inside a checkpoint write, after so many bytes (RESIDUA_FAULT_BYTES)
    event    kills itself with signal 9 when the run tells its n-th event: between writes
    seconds  killed with signal 9 after so long
    limit    no file may grow beyond so many bytes, once step `after` is saved (RLIMIT_FSIZE)
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Warm:
    """The other end, in the test."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.train.warm"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def run(self, out: Path, **harm: Any) -> dict[str, Any]:
        """Run or resume in `out`: the child's `status` (negative: its signal), `error`, `events` and `seconds`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"out": str(out), **harm}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """End it."""
        self.process.communicate()


def child(request: dict[str, Any], answer: int) -> None:
    """One run in a forked process."""
    from tests.train.harness import run

    os.environ |= {"RESIDUA_FAULT_BYTES": str(request["bytes"])} if "bytes" in request else {}
    told = 0

    def listen(event: Any) -> None:
        nonlocal told
        told += 1
        if told == request.get("event"):
            os.kill(os.getpid(), signal.SIGKILL)
        if "limit" in request and (event["kind"], event["step"]) == ("saved", request["after"]):
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["limit"], request["limit"]))

    error = None
    try:
        run(Path(request["out"]), on_event=listen)
    except OSError as caught:
        error = [type(caught).__name__, str(caught)]
    os.write(answer, json.dumps({"error": error, "events": told}).encode())
    os._exit(0)


def serve() -> None:
    """Fork a child for every line."""
    import torch
    import torch._dynamo  # the optimizers ask for it in their first step, which takes seconds

    from tests.train.harness import toy_config

    torch.set_num_threads(1)
    toy_config()  # checked once, for all children
    for line in sys.stdin:
        request = json.loads(line)
        inlet, outlet = os.pipe()
        began = time.monotonic()
        pid = os.fork()
        if not pid:
            try:
                child(request, outlet)
            finally:
                os._exit(70)
        os.close(outlet)
        if "seconds" in request:
            time.sleep(request["seconds"])
            os.kill(pid, signal.SIGKILL)  # still our child, finished or not: it has not been waited for
        with os.fdopen(inlet) as pipe:
            said = pipe.read()
        _, status = os.waitpid(pid, 0)
        report = {"error": None, "events": 0} | (json.loads(said) if said else {})
        report |= {"status": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - began}
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    serve()
