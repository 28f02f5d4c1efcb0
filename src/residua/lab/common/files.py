"""Bytes that are on the disk when a call returns, and files that are either whole or not there.

A write is fsynced; a file appears under its name only after that, by a rename, and its folder is fsynced too. A full
disk, an exceeded quota and a file size limit are one error, `DiskFull`, that says what was being written.

Fault point, for tests of all this: with RESIDUA_FAULT_BYTES=n in the environment, the process kills itself with
signal 9 after the n-th byte that `write_file` writes with `fault=True` (which checkpoints do), in the middle of
whatever that byte belongs to.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
"""A JSON object as it is read: plain values by name."""
Values = dict[str, Any]
"""A JSON object that is being made."""
Listener = Callable[[Record], None]
"""Takes what happens: objects with a `kind`."""

CHUNK = 1 << 20
LITTER = frozenset({".DS_Store", ".localized", ".directory", "Thumbs.db", "desktop.ini", ".nfs", "lost+found"})
"""What lies in a folder that somebody only looked at."""

_FULL = {
    errno.ENOSPC: "no space left on the device",
    errno.EDQUOT: "disk quota exceeded",
    errno.EFBIG: "file size limit",
}
_counted = 0  # bytes that count for the fault point


class DiskFull(OSError):
    """There is no room for what was being written."""


@contextmanager
def room_for(what: str) -> Iterator[None]:
    """Turn the system's errors for a full disk into a `DiskFull` that names what was being written."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL or isinstance(error, DiskFull):
            raise
        raise DiskFull(error.errno, f"{_FULL[error.errno]} while writing {what}") from error


def write_file(path: Path, chunks: Iterable[bytes | memoryview], *, fault: bool = False) -> str:
    """Write a new file and sync it; the SHA-256 of its bytes."""
    digest = hashlib.sha256()
    with path.open("xb", buffering=0) as file:
        for chunk in chunks:
            whole = memoryview(chunk).cast("B")
            for start in range(0, len(whole), CHUNK):
                piece = whole[start : start + CHUNK]
                digest.update(piece)
                _write(file.fileno(), piece, fault)
        os.fsync(file.fileno())
    return digest.hexdigest()


def replace_file(path: Path, chunks: Iterable[bytes | memoryview], scratch: Path | None = None) -> None:
    """Put a file in place of what was there, whole or not at all.

    Several writers of one path need a `scratch` each: the name of the file, in the same folder, until it is whole.
    """
    scratch = scratch or path.with_name(f".{path.name}.writing")
    scratch.unlink(missing_ok=True)
    with room_for(str(path)):
        try:
            write_file(scratch, chunks)
            scratch.replace(path)
        except OSError:
            scratch.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """`replace_file` with a text, in UTF-8; its folder is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, [text.encode()])


def write_json(path: Path, value: object) -> None:
    """`replace_file` with JSON."""
    replace_file(path, [json.dumps(value, indent=2).encode() + b"\n"])


def read_json(path: Path) -> Values:
    """The object in a JSON file; an error that names the file if it is not one."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return value


def differing(there: Record, here: Record) -> str:
    """Where two objects differ, `seed is 1 there and 0 here; ...`; empty where they do not."""
    keys = [key for key in sorted(there.keys() | here.keys()) if there.get(key) != here.get(key)]
    return "; ".join(f"{key} is {there.get(key)!r} there and {here.get(key)!r} here" for key in keys)


def contents(folder: Path) -> set[str]:
    """The names in a folder, without those that file managers leave behind; none where there is no folder."""
    return {path.name for path in folder.iterdir()} - LITTER if folder.is_dir() else set()


def json_digest(value: object) -> str:
    """SHA-256 of plain values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def tree_digest(root: Path, *patterns: str) -> str:
    """SHA-256 of the names and bytes of the files below `root` that match a pattern."""
    digest = hashlib.sha256()
    for file in sorted(file for pattern in patterns for file in root.glob(pattern)):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def safetensors_header(arrays: Mapping[str, tuple[str, Sequence[int], int]], metadata: Record | None = None) -> bytes:
    """How a safetensors file begins, for arrays by name that follow in this order: type, shape and bytes of each."""
    described: Values = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape, size) in arrays.items():
        start, end = end, end + size
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def versions() -> dict[str, str]:
    """Of what a result depends on beside its settings and data."""
    import torch

    from residua._version import __version__

    return {"residua": __version__, "python": platform.python_version(), "torch": torch.__version__}


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder last."""
    if os.name == "nt":  # a folder cannot be opened there, and renames are journaled
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(handle: int, piece: memoryview, fault: bool) -> None:
    global _counted
    limit = int(os.environ.get("RESIDUA_FAULT_BYTES", "-1")) if fault else -1
    if 0 <= limit - _counted <= len(piece):
        piece = piece[: limit - _counted]
    while len(piece):
        written = os.write(handle, piece)
        _counted += written if fault else 0
        piece = piece[written:]
    if limit >= 0 and _counted >= limit:
        os.kill(os.getpid(), signal.SIGKILL)
