"""`delta_write` in C: two sweeps over each token's state, forward and backward; only references are kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from residua.native.guard import Kernel, dense, empties, only_torch, require
from residua.native.library import call
from residua.ops._backend import kernel
from residua.ops._operator import Operator
from residua.ops.delta_write import reference
from residua.ops.norm import accumulator


@kernel("delta_write", "cpu", "cpu")
def delta_write(X: Tensor, k: Tensor, value: Tensor, beta: Tensor, *, eps: float) -> Tensor:
    """The kernel, with a direction of the state's type and gates of the type to add up in."""
    if only_torch(X, k, value, beta):
        return reference.delta_write(X, k, value, beta, eps=eps)
    if X.dtype == torch.float16:
        return delta_write(X.float(), k, value, beta, eps=eps).half()
    require(X)
    wide = accumulator(X.dtype)
    if torch.promote_types(k.dtype, X.dtype) != X.dtype:
        # a direction finer than the state is not rounded to it
        return delta_write(X.to(k.dtype), k, value, beta, eps=eps).to(X.dtype)
    rows, tokens, channels, width = X.shape
    for name, one, shape in (("k", k, (rows, tokens, width)), ("value", value, (rows, tokens, channels)),
                             ("beta", beta, (rows, tokens))):  # fmt: skip
        if one.shape != shape:
            raise ValueError(f"delta_write: {name} is {tuple(one.shape)}, but X {tuple(X.shape)} needs {shape}")
    inputs = X, k.to(X.dtype), value.to(wide), beta.to(wide)
    return DELTA_WRITE(inputs, eps)


def _state(X: Tensor) -> tuple[Tensor, int, int]:
    """The state with its strides by token and by channel; channels that repeat one row stay as they are."""
    channels, width = X.shape[2:]
    if X.stride(2) == 0 and channels > 1:
        return dense(X[:, :, 0]), width, 0
    return dense(X), channels * width, width


def _forward(X: Tensor, k: Tensor, value: Tensor, beta: Tensor, eps: float) -> Tensor:
    out = torch.empty(X.shape, dtype=X.dtype, device="cpu")
    if out.numel():
        rows, tokens, channels, width = X.shape
        state, *strides = _state(X)
        tensors = state, dense(k), dense(value), dense(beta), out
        call("residua_delta_write", X.dtype, out.numel(), tensors, (rows * tokens, channels, width, *strides), eps)
    return out


def _backward(inputs: Sequence[Tensor], wanted: Sequence[bool], gradient: Tensor, eps: float) -> list[Tensor | None]:
    X, *rest = inputs
    found = empties(inputs, wanted)
    if not X.numel():
        return [None if one is None else one.zero_() for one in found]
    rows, tokens, channels, width = X.shape
    state, *strides = _state(X)
    call(
        "residua_delta_write_backward", X.dtype, 2 * gradient.numel(),
        (state, *map(dense, rest), dense(gradient, X.dtype), *found), (rows * tokens, channels, width, *strides), eps,
    )  # fmt: skip
    return found


def _reference(X: Tensor, k: Tensor, value: Tensor, beta: Tensor, eps: float) -> Tensor:
    return reference.delta_write(X, k, value, beta, eps=eps)


DELTA_WRITE = Operator(
    "delta_write",
    "Tensor X, Tensor k, Tensor value, Tensor beta, float eps",
    Kernel(_forward, _backward, _reference),
    fake=lambda X, *rest: X.new_empty(X.shape),
)
