"""SHA-256 of what decides a result: equal values and equal files have equal digests, whoever asks."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


def json_digest(value: object) -> str:
    """Of plain values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
