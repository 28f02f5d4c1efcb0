"""No room: one clear error, the last checkpoint whole, nothing half written, and the run goes on once there is room.

The limits are the system's own: RLIMIT_FSIZE in a child process, and a tmpfs of a few hundred kilobytes in a mount
namespace of its own.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from residua.lab.common.files import read_json, write_json
from residua.lab.train import DiskFull
from residua.lab.train import checkpoint as checkpoints
from tests.train.harness import outcome, run
from tests.train.warm import Warm

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def warm():
    server = Warm()
    yield server
    server.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    run(out)
    return out


# fmt: off
LIMITS = {
    "the weights do not fit": ("model.safetensors", 0.7, "checkpoint"),
    "the optimizer's state does not fit": ("optimizer.safetensors", 0.9, "checkpoint"),
    "the metrics do not fit": ("metrics.jsonl", 0.5, "metrics.jsonl"),
}
# fmt: on


@pytest.mark.parametrize(("file", "share", "named"), LIMITS.values(), ids=LIMITS)
def test_file_size_limit_leaves_the_last_checkpoint_whole(warm, tmp_path, whole, file, share, named):
    last = max((whole / "checkpoints").glob("step-*"))
    size = (whole / file if file == "metrics.jsonl" else last / file).stat().st_size
    out = tmp_path / "run"
    kind, message = warm.run(out, limit=int(share * size), after=4)["error"]
    assert kind == "DiskFull"
    assert "file size limit" in message
    assert named in message
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000004"]
    checkpoints.load(out / "checkpoints" / "step-00000004")
    if named == "checkpoint":
        assert "step-00000004 is whole. Free some space and run the same command to continue" in message
    assert warm.run(out)["error"] is None
    assert outcome(out) == outcome(whole)


def test_small_files_are_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    write_json(path, {"lr": 1})

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DiskFull, match=r"no space left on the device while writing .*config\.json"):
            write_json(path, {"lr": 2})
    assert read_json(path) == {"lr": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    write_json(path, {"lr": 2})
    assert read_json(path) == {"lr": 2}


INSIDE = """
import json, pathlib, shutil, subprocess, sys
from residua.lab.train import DiskFull
from tests.train.harness import run
small, kept, *sizes = sys.argv[1:]
for number, size in enumerate(sizes):
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", small], check=True)
    try:
        run(pathlib.Path(small) / "run")
    except DiskFull as full:
        print(json.dumps(str(full)))
    shutil.copytree(f"{small}/run", f"{kept}/{number}")
    subprocess.run(["umount", small], check=True)
"""


def own_mounts() -> list[str] | None:
    """How to get a mount namespace here: as root, as a user who may make one, or through sudo."""
    for command in (["unshare", "-m"], ["unshare", "-rm"], ["sudo", "-n", "unshare", "-m"]):
        if shutil.which(command[0]):
            probe = [*command, "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/mnt"]
            if subprocess.run(probe, capture_output=True).returncode == 0:
                return command
    return None


def test_full_file_system_leaves_the_last_checkpoint_whole(tmp_path, whole):
    namespace = own_mounts()
    if namespace is None:
        pytest.skip("needs a mount namespace: root, unprivileged user namespaces or sudo")
    small, kept, fitting = tmp_path / "small", tmp_path / "kept", range(3)
    small.mkdir()
    # tmpfs counts whole pages: the other files, and half a checkpoint beyond those that fit
    pages = sum(-(-file.stat().st_size // 4096) * 4 for file in max((whole / "checkpoints").glob("step-*")).iterdir())
    sizes = [str(24 + int((count + 0.5) * pages)) for count in fitting]
    done = subprocess.run(
        [*namespace, sys.executable, "-c", INSIDE, str(small), str(kept), *sizes],
        capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    for count, message in zip(fitting, messages, strict=True):
        out, step = kept / str(count), 4 * count
        assert "no space left on the device while writing checkpoint" in message
        assert f"step-{step + 4:08d}; " in message
        assert (f"step-{step:08d} is whole" if step else "there is none before it") in message
        found, damaged = checkpoints.newest(out / "checkpoints")
        assert not damaged
        assert (found.step if found else 0) == step
        assert not list((out / "checkpoints").glob(".*"))
        run(out)
        assert outcome(out) == outcome(whole)
