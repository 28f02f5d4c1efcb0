"""Which ops have a Triton kernel, named to the backend without importing triton.

An op's module, `ops/<op>/triton.py`, is imported when a CUDA tensor first reaches the op.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from residua.native.guard import Unsupported
from residua.ops._backend import forget, kernel, registered


def _attend(*arguments: Any, **options: Any) -> Any:
    from residua.ops.attend.triton import attend

    return attend(*arguments, **options)


def _attend_ahead(*arguments: Any, **options: Any) -> Any:
    from residua.ops.attend.triton_groups import ahead

    return ahead(*arguments, **options)


def _attend_merge(*arguments: Any, **options: Any) -> Any:
    from residua.ops.attend.triton_groups import merge

    return merge(*arguments, **options)


def _attend_together(*arguments: Any, **options: Any) -> Any:
    from residua.ops.attend.triton_groups import together

    return together(*arguments, **options)


def _mix(*arguments: Any, **options: Any) -> Any:
    from residua.ops.mix.triton import mix

    return mix(*arguments, **options)


def _remix(*arguments: Any, **options: Any) -> Any:
    from residua.ops.remix.triton import remix

    return remix(*arguments, **options)


def _delta_write(*arguments: Any, **options: Any) -> Any:
    from residua.ops.delta_write.triton import delta_write

    return delta_write(*arguments, **options)


def _window_attend(*arguments: Any, **options: Any) -> Any:
    from residua.ops.window_attend.triton import window_attend

    return window_attend(*arguments, **options)


def _attend_weights(*arguments: Any, **options: Any) -> Any:
    from residua.ops.attend.triton_weights import attend_weights

    return attend_weights(*arguments, **options)


def _attend_norm(*arguments: Any, **options: Any) -> Any:
    from residua.ops.attend.triton_norm import attend_norm

    return attend_norm(*arguments, **options)


def _attend_qkv(*arguments: Any, **options: Any) -> Any:
    from residua.ops.attend_qkv.triton import attend_qkv

    return attend_qkv(*arguments, **options)


def _shortconv(*arguments: Any, **options: Any) -> Any:
    from residua.ops.shortconv.triton import shortconv

    return shortconv(*arguments, **options)


def _sinkhorn(*arguments: Any, **options: Any) -> Any:
    from residua.ops.sinkhorn.triton import sinkhorn

    return sinkhorn(*arguments, **options)


# an import statement each: torch.compile follows one, but not an import by name
SERVED: dict[str, Callable[..., Any]] = {
    "attend": _attend,
    "attend_norm": _attend_norm,
    "attend_weights": _attend_weights,
    "attend_ahead": _attend_ahead,
    "attend_merge": _attend_merge,
    "attend_together": _attend_together,
    "attend_qkv": _attend_qkv,
    "mix": _mix,
    "remix": _remix,
    "delta_write": _delta_write,
    "shortconv": _shortconv,
    "sinkhorn": _sinkhorn,
    "window_attend": _window_attend,
}
"""The ops with a Triton kernel."""


def register(device: str = "cuda") -> None:
    """Let the Triton kernels serve tensors of `device`; another than CUDA only makes sense under the interpreter."""
    there = importlib.util.find_spec("triton") is not None
    for op, serve in SERVED.items():
        kernel(op, "triton", device)(serve if there else _absent)


@contextmanager
def serving(device: str) -> Iterator[None]:
    """`register`, until the end of the `with`."""
    before = {op: registered(op, device) for op in SERVED}
    register(device)
    try:
        yield
    finally:
        for op, found in before.items():
            if found is None:
                forget(op, device)
            else:
                kernel(op, found[0], device)(found[1])


def _absent(*arguments: Any, **options: Any) -> Any:
    raise Unsupported("triton is not installed: pip install 'residua[triton]'")
