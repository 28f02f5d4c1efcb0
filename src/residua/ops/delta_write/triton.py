"""X <- X + beta (v - X u) u', u = k / sqrt(|k|^2 + eps^2): the rank-one write in one pass, in Triton.

One program a block of tokens holds u and passes over the value channels, rows of the width. Backward saves the inputs
and nothing else, and reads each once: with G = dX_out and, for each channel, held = X u, step = beta (v - held) and
s = <G, u>,

    dX = G - beta s u    dv = beta s    dbeta = sum_v s (v - held)
    du = sum_v step G - beta s X        dk = (du - <du, u> u) / sqrt(|k|^2 + eps^2)

No GPU has timed this: see `residua.ops._triton`.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from residua.ops import _triton as host
from residua.ops._context import Context, Inputs
from residua.ops._triton_device import row_blocks


@triton.jit
def _forward_kernel(
    X, k, value, beta, out, channels, tokens,
    WIDTH: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    d = tl.arange(0, BD)
    exists = t < tokens
    live = exists[:, None] & (d < WIDTH)[None, :]
    # [BT, BD]
    u = tl.load(k + t[:, None] * WIDTH + d[None, :], mask=live, other=0.0).to(ACC)
    u = u * tl.rsqrt(tl.sum(u * u, 1) + EPS * EPS)[:, None]
    # [BT]
    share = tl.load(beta + t, mask=exists, other=0.0).to(ACC)
    for channel in range(channels):
        row = t * channels + channel
        at = row[:, None] * WIDTH + d[None, :]
        x = tl.load(X + at, mask=live, other=0.0).to(ACC)
        step = share * (tl.load(value + row, mask=exists, other=0.0).to(ACC) - tl.sum(x * u, 1))
        tl.store(out + at, (x + step[:, None] * u).to(out.dtype.element_ty), mask=live)


@triton.jit
def _backward_kernel(
    X, k, value, beta, dout, dX, dk, dvalue, dbeta, channels, tokens,
    WIDTH: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    d = tl.arange(0, BD)
    exists = t < tokens
    live = exists[:, None] & (d < WIDTH)[None, :]
    at_k = t[:, None] * WIDTH + d[None, :]
    # [BT, BD]
    u = tl.load(k + at_k, mask=live, other=0.0).to(ACC)
    # [BT]
    rstd = tl.rsqrt(tl.sum(u * u, 1) + EPS * EPS)
    u = u * rstd[:, None]
    share = tl.load(beta + t, mask=exists, other=0.0).to(ACC)
    du = tl.zeros([BT, BD], ACC)
    dshare = tl.zeros([BT], ACC)
    for channel in range(channels):
        row = t * channels + channel
        at = row[:, None] * WIDTH + d[None, :]
        x = tl.load(X + at, mask=live, other=0.0).to(ACC)
        G = tl.load(dout + at, mask=live, other=0.0).to(ACC)
        gap = tl.load(value + row, mask=exists, other=0.0).to(ACC) - tl.sum(x * u, 1)
        along = tl.sum(G * u, 1)
        dshare += along * gap
        du += (share * gap)[:, None] * G - (share * along)[:, None] * x
        tl.store(dX + at, (G - (share * along)[:, None] * u).to(dX.dtype.element_ty), mask=live)
        tl.store(dvalue + row, (share * along).to(dvalue.dtype.element_ty), mask=exists)
    turned = rstd[:, None] * (du - tl.sum(du * u, 1)[:, None] * u)
    tl.store(dk + at_k, turned.to(dk.dtype.element_ty), mask=live)
    tl.store(dbeta + t, dshare.to(dbeta.dtype.element_ty), mask=exists)


@torch.library.custom_op("residua_triton::delta_write", mutates_args=())
def _delta_write(X: Tensor, k: Tensor, value: Tensor, beta: Tensor, eps: float) -> Tensor:
    X, k, value, beta = (one.contiguous() for one in (X, k, value, beta))
    out, settings = torch.empty_like(X), row_blocks(X, eps)
    grid = (triton.cdiv(beta.numel(), settings["BT"]),)
    host.launch(_forward_kernel, grid, X, X, k, value, beta, out, X.shape[-2], beta.numel(), **settings)
    return out


@_delta_write.register_fake
def _(X, k, value, beta, eps):
    return torch.empty_like(X, memory_format=torch.contiguous_format)


@torch.library.custom_op("residua_triton::delta_write_backward", mutates_args=())
def _delta_write_backward(
    dout: Tensor, X: Tensor, k: Tensor, value: Tensor, beta: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = tuple(one.contiguous() for one in (X, k, value, beta))
    dX, dk, dvalue, dbeta = gradients = tuple(torch.empty_like(one) for one in inputs)
    settings = row_blocks(X, eps)
    grid = (triton.cdiv(beta.numel(), settings["BT"]),)
    host.launch(
        _backward_kernel, grid, X,
        *inputs, dout.contiguous(), *gradients, X.shape[-2], beta.numel(), **settings,
    )  # fmt: skip
    return dX, dk, dvalue, dbeta


@_delta_write_backward.register_fake
def _(dout, X, k, value, beta, eps):
    return tuple(torch.empty_like(one, memory_format=torch.contiguous_format) for one in (X, k, value, beta))


def _save(ctx: Context, inputs: Inputs, output: Tensor) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Context, dout: Tensor) -> tuple[Tensor | None, ...]:
    return *_delta_write_backward(dout, *ctx.saved_tensors, ctx.eps), None


_delta_write.register_autograd(_backward, setup_context=_save)


def delta_write(X: Tensor, k: Tensor, value: Tensor, beta: Tensor, *, eps: float) -> Tensor:
    """`residua.ops.delta_write` on a GPU."""
    host.checked(X, k, value, beta)
    return _delta_write(X, k, value, beta, eps)
