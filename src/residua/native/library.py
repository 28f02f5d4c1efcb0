"""The native library in this process: shipped in the wheel, else built on first use, else `Unavailable`.

`RESIDUA_NATIVE=0` turns it off; a path names a binary to take instead.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from residua.native import build
from residua.native.build import Unavailable

TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
"""Element types and their codes in kernels.h."""

GRAIN = 1 << 18
"""Numbers that a thread must have to touch before it is worth being made."""

_ANSWERS = {1: "out of memory"}


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library and where it came from, or nothing and the reason; tried once a process."""
    try:
        return _open()
    except Unavailable as reason:
        return None, str(reason)


def _open() -> tuple[ctypes.CDLL, str]:
    asked = os.environ.get("RESIDUA_NATIVE", "")
    if asked == "0":
        raise Unavailable("turned off by RESIDUA_NATIVE=0")
    if asked:
        return _linked(Path(asked)), asked
    shipped = build.HERE / build.SHIPPED
    if shipped.exists():
        return _linked(shipped), str(shipped)
    if os.name != "posix":
        raise Unavailable(f"not built for {os.name}")
    built = build.build()
    return _linked(built), str(built)


def _linked(path: Path) -> ctypes.CDLL:
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"{path} does not load: {error}") from None
    found.residua_fingerprint.restype = ctypes.c_char_p
    if found.residua_fingerprint().decode() != build.fingerprint():
        raise Unavailable(f"{path} was built from other sources than the ones beside {build.HERE}; remove it")
    return found


def library() -> ctypes.CDLL:
    """The native library, loaded once; `Unavailable` with the reason where there is none."""
    found, reason = _load()
    if found is None:
        raise Unavailable(reason)
    return found


def available() -> bool:
    """Whether `library` would give one; the first call may compile it."""
    return _load()[0] is not None


def status() -> dict[str, str | None]:
    """What runs, for `residua doctor`: the binary, the instructions it uses, or why there is none."""
    found, place = _load()
    if found is None:
        return {"binary": None, "instructions": None, "reason": place}
    return {"binary": place, "instructions": "AVX2" if found.residua_avx2() else "portable", "reason": None}


def entry(name: str, *types: Any) -> Any:
    """An entry point with its argument types set; `check` its answer."""
    found = getattr(library(), name)
    if found.argtypes is None:
        found.restype, found.argtypes = ctypes.c_int, list(types)
    return found


def check(answer: int) -> None:
    """Raise for an answer that is not RESIDUA_OK."""
    if answer:
        raise MemoryError(f"residua's native library: {_ANSWERS.get(answer, f'answer {answer}')}")


def threads(numbers: int) -> int:
    """How many threads to give work that touches so many numbers."""
    return max(1, min(torch.get_num_threads(), numbers // GRAIN))


def pointers(tensors: tuple[Tensor, ...] | list[Tensor]) -> Any:
    """An array of the tensors' addresses."""
    return (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])


@contextmanager
def portable() -> Iterator[None]:
    """Run the portable variants inside a `with`: for tests."""
    force = library().residua_force_portable
    force(1)
    try:
        yield
    finally:
        force(0)
