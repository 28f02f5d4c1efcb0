"""M = exp(x - a - b): columns and rows normalised in turn, in logarithms, in Triton.

The state of the rounds is two vectors a matrix, of which each is found from the other: b_j = log sum_i exp(x_ij - a_i),
then a_i = log sum_j exp(x_ij - b_j). One program takes a block of matrices and holds them in registers for all rounds.
Backward repeats the rounds and keeps their vectors in a buffer that dies with the call. From the last round to the
first, with M the matrix after a normalisation and G the gradient of its logarithm,

    G <- G - M sum_axis G

No GPU has timed this: see `residua.ops._triton`.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from residua.native.guard import Unsupported
from residua.ops import _triton as host
from residua.ops._triton_device import accumulator
from residua.ops.norm import accumulator as type_to_add_up_in
from residua.ops.sinkhorn import reference

LARGEST = 32
"""Rows of a matrix that a program holds."""


@triton.jit
def _log_sum(x, axis: tl.constexpr, exists):
    """log sum exp along an axis, 0 where nothing exists."""
    top = tl.where(exists, tl.max(x, axis), 0.0)
    total = tl.sum(tl.exp(x - tl.expand_dims(top, axis)), axis)
    return tl.where(exists, top + tl.log(tl.where(exists, total, 1.0)), 0.0)


@triton.jit
def _matrices(logits, count, SIZE: tl.constexpr, ACC: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr):
    """A block of matrices [BM, BS, BS], -inf outside; where they are; and which rows or columns there are, [BM, BS]."""
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    i = tl.arange(0, BS)
    at = (m[:, None, None] * SIZE + i[None, :, None]) * SIZE + i[None, None, :]
    exists = (m < count)[:, None] & (i < SIZE)[None, :]
    live = exists[:, :, None] & (i < SIZE)[None, None, :]
    return tl.load(logits + at, mask=live, other=float("-inf")).to(ACC), at, live, exists, m, i


@triton.jit
def _forward_kernel(
    logits, out, count, iterations, SIZE: tl.constexpr, ACC: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr
):
    x, at, live, exists, _, _ = _matrices(logits, count, SIZE, ACC, BM, BS)
    a = tl.zeros([BM, BS], ACC)
    b = tl.zeros([BM, BS], ACC)
    for _ in range(iterations):
        b = _log_sum(x - a[:, :, None], 1, exists)
        a = _log_sum(x - b[:, None, :], 2, exists)
    tl.store(out + at, tl.exp(x - a[:, :, None] - b[:, None, :]), mask=live)


@triton.jit
def _backward_kernel(
    logits, dout, kept, dlogits, count, iterations,
    SIZE: tl.constexpr, ACC: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    x, at, live, exists, m, i = _matrices(logits, count, SIZE, ACC, BM, BS)
    # kept is [rounds, (columns, rows), matrices, SIZE]
    own = m[:, None] * SIZE + i[None, :]
    step = count.to(tl.int64) * SIZE
    a = tl.zeros([BM, BS], ACC)
    b = tl.zeros([BM, BS], ACC)
    for turn in range(iterations):
        b = _log_sum(x - a[:, :, None], 1, exists)
        a = _log_sum(x - b[:, None, :], 2, exists)
        tl.store(kept + 2 * turn * step + own, b, mask=exists)
        tl.store(kept + (2 * turn + 1) * step + own, a, mask=exists)
    # what one thread stored others load
    tl.debug_barrier()
    G = tl.load(dout + at, mask=live, other=0.0).to(ACC) * tl.exp(x - a[:, :, None] - b[:, None, :])
    for turn in range(iterations - 1, -1, -1):
        G -= tl.exp(x - a[:, :, None] - b[:, None, :]) * tl.sum(G, 2)[:, :, None]
        a = tl.load(kept + (2 * turn - 1) * step + own, mask=exists & (turn > 0), other=0.0)
        G -= tl.exp(x - a[:, :, None] - b[:, None, :]) * tl.sum(G, 1)[:, None, :]
        b = tl.load(kept + (2 * turn - 2) * step + own, mask=exists & (turn > 0), other=0.0)
    tl.store(dlogits + at, G, mask=live)


def _settings(logits: Tensor) -> tuple[int, dict[str, Any]]:
    """How many matrices there are, and the constants of a kernel."""
    size = logits.shape[-1]
    block = host.power(size)
    matrices = max(1, 512 // block**2)
    return logits.numel() // size**2, {
        "SIZE": size, "ACC": accumulator(logits.dtype), "BM": matrices, "BS": block,
        "warps": min(8, max(1, matrices * block**2 // 256)),
    }  # fmt: skip


@torch.library.custom_op("residua_triton::sinkhorn", mutates_args=())
def _sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    count, settings = _settings(logits)
    host.launch(
        _forward_kernel, (triton.cdiv(count, settings["BM"]),), logits, logits, out, count, iterations, **settings
    )
    return out


@_sinkhorn.register_fake
def _(logits, iterations):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@torch.library.custom_op("residua_triton::sinkhorn_backward", mutates_args=())
def _sinkhorn_backward(dout: Tensor, logits: Tensor, iterations: int) -> Tensor:
    logits, dout = logits.contiguous(), dout.contiguous()
    dlogits = torch.empty_like(logits)
    count, settings = _settings(logits)
    kept = logits.new_empty(2 * iterations * count * logits.shape[-1])
    host.launch(
        _backward_kernel, (triton.cdiv(count, settings["BM"]),), logits,
        logits, dout, kept, dlogits, count, iterations, **settings,
    )  # fmt: skip
    return dlogits


@_sinkhorn_backward.register_fake
def _(dout, logits, iterations):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    logits, ctx.iterations = inputs
    ctx.save_for_backward(logits)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
    return _sinkhorn_backward(dout, *ctx.saved_tensors, ctx.iterations), None


_sinkhorn.register_autograd(_backward, setup_context=_save)


def sinkhorn(logits: Tensor, *, iterations: int) -> Tensor:
    """`residua.ops.sinkhorn` on a GPU."""
    host.checked(logits)
    if iterations < 1:
        return reference.sinkhorn(logits, iterations=iterations)
    if logits.ndim < 2 or logits.shape[-1] != logits.shape[-2] or logits.shape[-1] > LARGEST:
        raise Unsupported(f"logits of shape {tuple(logits.shape)}: square matrices of at most {LARGEST} rows")
    return _sinkhorn(logits.to(type_to_add_up_in(logits.dtype)), iterations)
