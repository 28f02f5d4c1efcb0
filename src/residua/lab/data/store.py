"""One file, whole or absent: arrays and a JSON record, checksummed, memory-mapped, written by rename.

The layout is safetensors; it is written here so that the file can be synced before it gets its name. A file is
written under a temporary name, synced and renamed, so that a reader sees all of it or none, a killed writer leaves
the old one, and of two writers (whose bytes are equal, the name being a hash of what they were made from) the later
one wins without the other noticing. Reading checks every byte.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from residua.lab.common.files import Record, Values, replace_file, safetensors_header

_CODES: dict[str, np.dtype[Any]] = {
    "U8": np.dtype("u1"),
    "U16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "U64": np.dtype("<u8"),
}
_NAMES = {dtype: code for code, dtype in _CODES.items()}
_DAY = 86400.0


class Corrupted(ValueError):
    """A file that does not hold what was written; the message says in what way."""


@dataclass(frozen=True, eq=False)
class Entry:
    """What a file holds: the record, and the arrays as read-only memory maps."""

    record: Record
    arrays: Mapping[str, np.memmap]


def fetch(
    path: Path, build: Callable[[], tuple[Record, Mapping[str, np.ndarray]]], warn: Callable[[str], None]
) -> Entry:
    """The entry at `path`, built and saved first if it is absent or corrupted; the latter is said through `warn`."""
    try:
        return load(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except Corrupted as error:
        warn(f"cache file {path} is corrupted ({error}); it is built again")
    save(path, *build())
    return load(path)


def save(path: Path, record: Record, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the file, or raise and leave what was there."""
    text = json.dumps(record, sort_keys=True)
    named = {name: (_NAMES[array.dtype], [array.size], array.nbytes) for name, array in arrays.items()}
    header = safetensors_header(named, {"record": text, "sha256": _checksum(text, arrays)})
    parts = (np.ascontiguousarray(array).view(np.uint8).data for array in arrays.values())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
        scratch = path.with_name(f".{path.name}.{uuid4().hex}.part")
        replace_file(path, chain([header], parts), scratch)
    except OSError as error:
        raise OSError(
            f"cannot write {path}: {error.strerror or error}; make room there or set RESIDUA_CACHE to another folder"
        ) from error


def load(path: Path) -> Entry:
    """Read and check the file; FileNotFoundError if there is none, `Corrupted` if a byte that matters is not right."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = file.read(8)
        if len(length) < 8 or (start := 8 + struct.unpack("<Q", length)[0]) > size:
            raise Corrupted(f"cut off after {size} bytes")
        described = _described(file.read(start - 8))
        text = described.pop("__metadata__")
        arrays = {}
        for name, (code, items, first, last) in described.items():
            if code not in _CODES or items < 1 or items * _CODES[code].itemsize != last - first or first < 0:
                raise Corrupted(f"the description of {name!r} is not valid")
            if start + last > size:
                raise Corrupted(f"cut off after {size} of {start + last} bytes")
            # mapped from the open file, not from its name: another writer may rename a new one over it meanwhile
            arrays[name] = np.memmap(file, _CODES[code], "r", start + first, (items,))
    if text.get("sha256") != _checksum(text.get("record", ""), arrays):
        raise Corrupted("its checksum does not match")
    if size != start + sum(array.nbytes for array in arrays.values()):
        raise Corrupted(f"{size} bytes are not the length that was written")
    return Entry(json.loads(text["record"]), arrays)


def _described(header: bytes) -> Values:
    try:
        described = json.loads(header)
        text = dict(described.pop("__metadata__"))
        spans = {
            str(name): (str(each["dtype"]), int(each["shape"][0]), *(int(end) for end in each["data_offsets"]))
            for name, each in described.items()
        }
        if any(len(span) != 4 for span in spans.values()):
            raise ValueError
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError):
        raise Corrupted("its header cannot be read") from None
    return {"__metadata__": text, **spans}


def _checksum(record: str, arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(
        json.dumps([record, *([name, _NAMES[array.dtype]] for name, array in arrays.items())]).encode()
    )
    for array in arrays.values():
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _sweep(folder: Path) -> None:
    """Remove what killed writers left: only after a day, for a younger one may still be at work."""
    for left in folder.glob(".*.part"):
        try:
            if time.time() - left.stat().st_mtime > _DAY:
                left.unlink()
        except FileNotFoundError:
            pass
