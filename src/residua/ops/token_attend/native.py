"""`token_attend` in C: heads are read where the projections left them, and rotated on the way; q, k and v are kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from residua.native.guard import Kernel, dense, empties, only_torch, require, watched
from residua.native.library import call
from residua.ops._backend import kernel
from residua.ops._operator import Operator
from residua.ops.norm import accumulator
from residua.ops.token_attend import reference


@kernel("token_attend", "cpu", "cpu")
def token_attend(
    q: Tensor, k: Tensor, v: Tensor, rotation: tuple[Tensor, Tensor] | None = None, *, width: int, causal: bool = True
) -> Tensor:
    """The kernel, for tensors of one type; others are promoted as PyTorch promotes them."""
    turns = rotation or ()
    fit = q.dtype == k.dtype == v.dtype and all(
        one.shape == (q.shape[1], width / 2) and not one.requires_grad for one in turns
    )
    if not fit or only_torch(q, k, v, *turns):
        return reference.token_attend(q, k, v, rotation, width=width, causal=causal)
    if q.dtype == torch.float16:
        return token_attend(q.float(), k.float(), v.float(), rotation, width=width, causal=causal).half()
    require(q, k, v)
    if watched():
        none = q.new_empty(0)
        wide = (one.to(accumulator(q.dtype)) for one in turns or (none, none))
        return OPERATOR((q, k, v, *wide), width, causal)
    return TOKEN_ATTEND((q, k, v), width, int(causal), *(dense(one, accumulator(q.dtype)) for one in turns))


def _sizes(q: Tensor, k: Tensor, width: int, causal: int) -> tuple[int, ...]:
    """Sequences, tokens, heads of q and of k, their width, and whether later tokens are hidden."""
    return q.shape[0], q.shape[1], q.shape[2] // width, k.shape[2] // width, width, causal


def _forward(q: Tensor, k: Tensor, v: Tensor, width: int, causal: int, *turns: Tensor) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device="cpu")
    if out.numel():
        tensors = dense(q), dense(k), dense(v), *(turns or (None, None)), out
        call("residua_token_attend", q.dtype, q.numel() * q.shape[1], tensors, _sizes(q, k, width, causal))
    return out


def _backward(
    inputs: Sequence[Tensor], wanted: Sequence[bool], gradient: Tensor, width: int, causal: int, *turns: Tensor
) -> list[Tensor | None]:
    q, k, _ = inputs
    found = empties(inputs, wanted)
    if gradient.numel():
        tensors = *map(dense, inputs), *(turns or (None, None)), dense(gradient, q.dtype), *found
        call("residua_token_attend_backward", q.dtype, q.numel() * q.shape[1], tensors, _sizes(q, k, width, causal))
    return found


def _reference(q: Tensor, k: Tensor, v: Tensor, width: int, causal: int, *turns: Tensor) -> Tensor:
    cosine, sine = turns or (None, None)
    rotation = None if cosine is None or sine is None else (cosine, sine)
    return reference.products(q, k, v, rotation, width=width, causal=bool(causal))


TOKEN_ATTEND = Kernel(_forward, _backward, _reference)


def _turned(cosine: Tensor, sine: Tensor) -> tuple[Tensor, ...]:
    """Rotations of an operator, which has no optional tensors: empty ones are none."""
    return (dense(cosine), dense(sine)) if cosine.numel() else ()


def _operator_backward(
    inputs: Sequence[Tensor], wanted: Sequence[bool], gradient: Tensor, width: int, causal: bool
) -> list[Tensor | None]:
    return [*_backward(inputs[:3], wanted[:3], gradient, width, int(causal), *_turned(*inputs[3:])), None, None]


OPERATOR = Operator(
    "token_attend",
    "Tensor q, Tensor k, Tensor v, Tensor cosine, Tensor sine, int width, bool causal",
    Kernel(
        lambda q, k, v, cosine, sine, width, causal: _forward(q, k, v, width, int(causal), *_turned(cosine, sine)),
        _operator_backward,
        lambda q, k, v, cosine, sine, width, causal: reference.products(
            q, k, v, (cosine, sine) if cosine.numel() else None, width=width, causal=causal
        ),
    ),
    fake=lambda q, *rest: q.new_empty(q.shape),
)
