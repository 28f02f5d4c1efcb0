"""The native library in this process: shipped in the wheel, else built on first use, else `Unavailable`.

`RESIDUA_NATIVE=0` turns it off; a path names a binary to take instead. `RESIDUA_INSTRUCTIONS` names the instructions to
use, portable, avx2 or avx512, instead of those that `dispatch.c` chooses.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_double, c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from residua.native import build
from residua.native.sealed import Unavailable, opened

TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
"""Element types and their codes in kernels.h."""

INSTRUCTIONS = ("portable", "avx2", "avx512")
"""Variants of every kernel, in the order of kernels.h."""

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
        return _linked(Path(asked).expanduser()), asked
    shipped = build.HERE / build.SHIPPED
    if shipped.exists():
        return _linked(shipped), str(shipped)
    if os.name != "posix":
        raise Unavailable(f"not built for {os.name}")
    built = build.build()
    return _linked(built, private=True), str(built)


def _linked(path: Path, *, private: bool = False) -> ctypes.CDLL:
    """Load a library whose every byte is as it was written; `private`: from the cache, whose whole path is checked."""
    with opened(path, private=private) as name:
        try:
            found = ctypes.CDLL(name)
        except OSError as error:
            raise Unavailable(f"{path} does not load: {error}") from None
    found.residua_fingerprint.restype = ctypes.c_char_p
    if found.residua_fingerprint().decode() != build.fingerprint():
        raise Unavailable(f"{path} was built from other sources than the ones beside {build.HERE}; remove it")
    if asked := os.environ.get("RESIDUA_INSTRUCTIONS", ""):
        _use(found, asked)
    return found


def _use(found: ctypes.CDLL, asked: str) -> None:
    """Run one variant from now on; ValueError if there is none of that name, or the processor cannot run it."""
    if asked not in INSTRUCTIONS:
        raise ValueError(f"instructions {asked!r}: choose {', '.join(INSTRUCTIONS)}")
    if not found.residua_use_instructions(INSTRUCTIONS.index(asked)):
        raise ValueError(f"instructions {asked!r}: this processor runs {', '.join(runnable(found))}")


def runnable(found: ctypes.CDLL | None = None) -> tuple[str, ...]:
    """The variants that this processor can run."""
    return INSTRUCTIONS[: (found or library()).residua_instructions_most() + 1]


def library() -> ctypes.CDLL:
    """The native library, loaded once; `Unavailable` with the reason where there is none."""
    found, reason = _load()
    if found is None:
        raise Unavailable(reason)
    return found


def available() -> bool:
    """Whether `library` would give one; the first call may compile it."""
    return _load()[0] is not None


def reason() -> str:
    """Why there is no library."""
    return _load()[1]


def asked_while_tracing(function: Callable[..., object]) -> None:
    """Let torch.compile call a function when it meets a call of it, and take the answer for good."""
    # what torch.compiler.assume_constant_result does, without importing the compiler
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


asked_while_tracing(available)
asked_while_tracing(reason)


def status() -> dict[str, str | None]:
    """What runs, for `residua doctor`: the binary, the instructions it uses, or why there is none."""
    found, place = _load()
    if found is None:
        return {"binary": None, "instructions": None, "reason": place}
    used = {found.residua_instructions()}
    if found.residua_instructions_asked() < 0:  # by the rule of dispatch.c some loops run the most there is
        used.add(found.residua_instructions_most())
    return {"binary": place, "instructions": "+".join(INSTRUCTIONS[one] for one in sorted(used)), "reason": None}


def identity() -> str | None:
    """Which kernels run, in a word: the hash of their sources and the instructions they use; None where none do."""
    found = _load()[0]
    return None if found is None else f"{build.fingerprint()[:8]} {status()['instructions']}"


_calls: list[Counter[str]] = []


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often each entry point is called inside a `with`, from eager and from compiled code."""
    _calls.append(Counter())
    try:
        yield _calls[-1]
    finally:
        _calls.pop()


def entry(name: str, *types: type) -> Callable[..., int]:
    """An entry point with its argument types set; `check` its answer."""
    for calls in _calls:
        calls[name] += 1
    found = getattr(_load()[0] or library(), name)
    if found.argtypes is None:
        found.restype, found.argtypes = c_int, types
    return found


def check(answer: int) -> None:
    """Raise for an answer that is not RESIDUA_OK."""
    if answer:
        raise MemoryError(f"residua's native library: {_ANSWERS.get(answer, f'answer {answer}')}")


def threads(numbers: int) -> int:
    """How many threads to give work that touches so many numbers."""
    return 1 if numbers < 2 * GRAIN else min(torch.get_num_threads(), numbers // GRAIN)


def address(tensor: Tensor | None) -> int | None:
    """Where its numbers are; NULL for none."""
    return None if tensor is None else tensor.data_ptr()


def call(
    name: str, dtype: torch.dtype, numbers: int, tensors: Sequence[Tensor | None], sizes: Sequence[int], *reals: float
) -> None:
    """Run an entry point that takes a type, threads for so many numbers, addresses, sizes and real numbers."""
    types = _signature(len(tensors), len(sizes), len(reals))
    places = [None if one is None else one.data_ptr() for one in tensors]
    answer = entry(name, *types)(TYPES[dtype], threads(numbers), *places, *sizes, *reals)
    if answer:
        check(answer)


@functools.cache
def _signature(tensors: int, sizes: int, reals: int) -> tuple[type, ...]:
    """The argument types of such an entry point; kept, because a token of decoding makes a hundred calls."""
    return (c_int, c_int, *[c_void_p] * tensors, *[c_int64] * sizes, *[c_double] * reals)


def pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array[c_void_p]:
    """An array of the tensors' addresses."""
    return (c_void_p * len(tensors))(*[None if one is None else one.data_ptr() for one in tensors])


@contextmanager
def instructions(name: str) -> Iterator[None]:
    """Run one variant inside a `with`, whatever is chosen outside."""
    before = library().residua_instructions_asked()
    _use(library(), name)
    try:
        yield
    finally:
        library().residua_use_instructions(before)
