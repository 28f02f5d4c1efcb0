"""Which implementation of an op runs: the reference, or a fast kernel registered for the tensors' device.

`kernel("attend", "cpu", "cpu")` registers one; a design never sees it. `RESIDUA_BACKEND` (or the context
manager `backend`) picks: `auto`, the default, takes a kernel where there is one; `reference` takes none; a
backend's name takes that one. A kernel that cannot serve a call raises `Unsupported`, and the reference serves
it after one warning that names the reason; under `RESIDUA_STRICT=1` that is an error.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from residua.native.guard import Unsupported, forward_mode
from residua.native.library import asked_while_tracing, available, reason

F = TypeVar("F", bound=Callable[..., Any])


_kernels: dict[tuple[str, str], tuple[str, Callable[..., Any]]] = {}
_choice = os.environ.get("RESIDUA_BACKEND", "auto")
_strict = os.environ.get("RESIDUA_STRICT", "") == "1"
_said: set[str] = set()


def kernel(op: str, name: str, device: str) -> Callable[[F], F]:
    """Register a fast implementation of `op`, called with the reference's arguments on tensors of `device`."""

    def add(fast: F) -> F:
        _kernels[op, device] = (name, fast)
        return fast

    return add


def forget(op: str, device: str) -> None:
    """Take a kernel out again."""
    _kernels.pop((op, device), None)


def registered(op: str, device: str) -> tuple[str, Callable[..., Any]] | None:
    """The kernel of `op` for tensors of `device`, and its backend's name."""
    return _kernels.get((op, device))


def kernels() -> dict[str, dict[str, str]]:
    """The kernels there are: op -> device -> backend name."""
    found: dict[str, dict[str, str]] = {}
    for (op, device), (name, _) in sorted(_kernels.items()):
        found.setdefault(op, {})[device] = name
    return found


def check_choice(name: str, where: str) -> None:
    """Refuse the name of a backend that there is not: every call would fall back to the reference."""
    known = ("auto", "reference", *dict.fromkeys(each for each, _ in _kernels.values()))
    if name not in known:
        raise ValueError(f"{where}={name!r}: there is no such backend; choose from {', '.join(known)}")


def check_environment() -> None:
    """The same for what the environment asks for; called when every kernel of the package is registered."""
    check_choice(_choice, "RESIDUA_BACKEND")
    asked = os.environ.get("RESIDUA_STRICT", "")
    if asked not in ("", "0", "1"):
        raise ValueError(f"RESIDUA_STRICT={asked!r}: it is 0 or 1")


def choice() -> str:
    """The backend asked for: `auto`, `reference` or a name."""
    return _choice


def strict() -> bool:
    """Whether a fallback is an error."""
    return _strict


@contextmanager
def backend(name: str, *, strict: bool | None = None) -> Iterator[None]:
    """Use one backend inside a `with`: for tests and benchmarks."""
    global _choice, _strict
    check_choice(name, "backend")
    before = _choice, _strict
    _choice, _strict = name, before[1] if strict is None else strict
    try:
        yield
    finally:
        _choice, _strict = before


def run(op: str, like: Tensor, reference: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call `op` on the device of `like`: its kernel where one is chosen, else the reference."""
    if _choice == "reference" or forward_mode():  # no kernel knows of tangents
        return reference(*args, **options)
    found = _kernels.get((op, "cpu" if like.is_cpu else like.device.type))  # a name of a device takes longer
    if found is None or _choice not in ("auto", found[0]):
        if _choice != "auto":
            fall_back(op, f"no backend {_choice!r} for {like.device.type} tensors")
        return reference(*args, **options)
    try:
        return found[1](*args, **options)
    except Unsupported as declined:
        if torch.compiler.is_compiling():
            _fall_back_in_a_graph(op, found[0])
        else:
            fall_back(op, f"{found[0]}: {declined}")
        return reference(*args, **options)


def fall_back(op: str, why: str) -> None:
    """Say once that an op runs its reference, and why; where fallbacks are errors, raise."""
    message = f"residua.ops.{op} runs its reference implementation: {why}"
    if _strict:
        raise RuntimeError(f"{message} (an error because RESIDUA_STRICT=1)")
    kind = re.sub(r"[0-9]+", "n", message)  # a reason may name sizes: one warning for all of them
    if kind not in _said:
        _said.add(kind)
        warnings.warn(message, stacklevel=3)


def _fall_back_in_a_graph(op: str, backend: str) -> None:
    """The same while a compiler traces, which has no text of the reason, and for which a warning would be a break."""
    fall_back(op, f"{backend}: {'compiled code calls it in a way it does not serve' if available() else reason()}")


asked_while_tracing(_fall_back_in_a_graph)
