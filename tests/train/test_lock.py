"""One process per run directory: the second is told who the first is, and a killed one holds nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from residua.lab.common.locks import RunLocked, locked
from tests.train.harness import files_below, run, toy_config

HOLD = """
import sys, pathlib, time
from residua.lab.common.locks import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_second_process_is_refused_by_name_and_a_killed_one_holds_nothing(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunLocked) as caught, locked(tmp_path):
            pass
        message = str(caught.value)
        assert f"process {holder.pid} on {socket.gethostname()} since 2" in message
        assert str(tmp_path) in message
        before = files_below(tmp_path)
        with pytest.raises(RunLocked, match=f"process {holder.pid}"):
            run(tmp_path)
        assert files_below(tmp_path) == before
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    with locked(tmp_path):
        pass


def test_run_is_refused_inside_itself(tmp_path):
    def again(event):
        if event["kind"] == "saved":
            run(tmp_path)

    with pytest.raises(RunLocked, match=f"process {os.getpid()}"):
        run(tmp_path, on_event=again)
    run(tmp_path, toy_config())


def test_lock_without_a_signature_still_refuses(tmp_path):
    with locked(tmp_path):
        (tmp_path / "run.lock").write_text("")
        with pytest.raises(RunLocked, match="has just started"), locked(tmp_path):
            pass
