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

Serve = Callable[..., Any]
"""A kernel: the arguments and the result of its op's reference."""

SERVED: dict[str, Serve] = {}
"""The ops with a Triton kernel."""


def _served(load: Callable[[], Serve]) -> None:
    """Let what `load` imports serve the op of its name. It has an import statement, which torch.compile follows; an
    import by name it does not."""

    def serve(*arguments: object, **options: object) -> object:
        return load()(*arguments, **options)

    SERVED[load.__name__] = serve


@_served
def attend() -> Serve:
    from residua.ops.attend.triton import attend

    return attend


@_served
def attend_norm() -> Serve:
    from residua.ops.attend.triton_norm import attend_norm

    return attend_norm


@_served
def attend_weights() -> Serve:
    from residua.ops.attend.triton_weights import attend_weights

    return attend_weights


@_served
def attend_ahead() -> Serve:
    from residua.ops.attend.triton_groups import ahead

    return ahead


@_served
def attend_merge() -> Serve:
    from residua.ops.attend.triton_groups import merge

    return merge


@_served
def attend_together() -> Serve:
    from residua.ops.attend.triton_groups import together

    return together


@_served
def attend_qkv() -> Serve:
    from residua.ops.attend_qkv.triton import attend_qkv

    return attend_qkv


@_served
def mix() -> Serve:
    from residua.ops.mix.triton import mix

    return mix


@_served
def remix() -> Serve:
    from residua.ops.remix.triton import remix

    return remix


@_served
def delta_write() -> Serve:
    from residua.ops.delta_write.triton import delta_write

    return delta_write


@_served
def shortconv() -> Serve:
    from residua.ops.shortconv.triton import shortconv

    return shortconv


@_served
def sinkhorn() -> Serve:
    from residua.ops.sinkhorn.triton import sinkhorn

    return sinkhorn


@_served
def window_attend() -> Serve:
    from residua.ops.window_attend.triton import window_attend

    return window_attend


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


def _absent(*arguments: object, **options: object) -> object:
    raise Unsupported("triton is not installed: pip install 'residua[triton]'")
