"""s = h + y, z = gain s / rms(s): both in one pass, in Triton.

One program a block of tokens. Backward saves s, which flows on anyway, and reads it once: with n = s / rms(s), the
gradients S and Z of s and z, and G = gain Z,

    ds = S + (G - n mean(G n)) / rms(s)    dh = dy = ds    dgain = sum Z n

No GPU has timed this: see `residua.ops._triton`.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from residua.ops import _triton as host
from residua.ops._triton_device import row_blocks


@triton.jit
def _forward_kernel(
    h, y, gain, total, normed, tokens,
    WIDTH: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    d = tl.arange(0, BD)
    live = (t < tokens)[:, None] & (d < WIDTH)[None, :]
    at = t[:, None] * WIDTH + d[None, :]
    # [BT, BD]; the norm sees the sum as it was rounded
    s = tl.load(h + at, mask=live, other=0.0).to(ACC) + tl.load(y + at, mask=live, other=0.0).to(ACC)
    s = s.to(total.dtype.element_ty)
    tl.store(total + at, s, mask=live)
    s = s.to(ACC)
    # [BT]
    rstd = tl.rsqrt(tl.sum(s * s, 1) / WIDTH + EPS)
    scale = tl.load(gain + d, mask=d < WIDTH, other=0.0).to(ACC)
    tl.store(normed + at, (s * rstd[:, None] * scale[None, :]).to(normed.dtype.element_ty), mask=live)


@triton.jit
def _backward_kernel(
    total, gain, through, above, gradient, gains, tokens,
    WIDTH: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BD)
    scale = tl.load(gain + d, mask=d < WIDTH, other=0.0).to(ACC)
    of_gain = tl.zeros([BD], ACC)
    # every program takes each n-th block, and writes one partial sum of the gain's gradient
    for block in range(tl.program_id(0), tl.cdiv(tokens, BT), tl.num_programs(0)):
        t = block * BT + tl.arange(0, BT).to(tl.int64)
        live = (t < tokens)[:, None] & (d < WIDTH)[None, :]
        at = t[:, None] * WIDTH + d[None, :]
        s = tl.load(total + at, mask=live, other=0.0).to(ACC)
        Z = tl.load(above + at, mask=live, other=0.0).to(ACC)
        rstd = tl.rsqrt(tl.sum(s * s, 1) / WIDTH + EPS)[:, None]
        n = s * rstd
        G = scale[None, :] * Z
        ds = tl.load(through + at, mask=live, other=0.0).to(ACC)
        ds += rstd * (G - n * (tl.sum(G * n, 1) / WIDTH)[:, None])
        tl.store(gradient + at, ds.to(gradient.dtype.element_ty), mask=live)
        of_gain += tl.sum(Z * n, 0)
    tl.store(gains + tl.program_id(0) * WIDTH + d, of_gain, mask=d < WIDTH)


@torch.library.custom_op("residua_triton::add_norm", mutates_args=())
def _add_norm(h: Tensor, y: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    h, y = h.contiguous(), y.contiguous()
    total, normed, settings = torch.empty_like(h), torch.empty_like(h), row_blocks(h, eps)
    tokens = h.numel() // h.shape[-1]
    grid = (triton.cdiv(tokens, settings["BT"]),)
    host.launch(_forward_kernel, grid, h, h, y, gain.contiguous(), total, normed, tokens, **settings)
    return total, normed


@_add_norm.register_fake
def _(h, y, gain, eps):
    return tuple(torch.empty_like(h, memory_format=torch.contiguous_format) for _ in range(2))


@torch.library.custom_op("residua_triton::add_norm_backward", mutates_args=())
def _add_norm_backward(
    through: Tensor, above: Tensor, total: Tensor, gain: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    settings, tokens = row_blocks(total, eps), total.numel() // total.shape[-1]
    gradient = torch.empty_like(total)
    wide = torch.float64 if total.dtype == torch.float64 else torch.float32
    grid = (min(host.programs(total), triton.cdiv(tokens, settings["BT"])),)
    gains = total.new_empty((grid[0], total.shape[-1]), dtype=wide)
    host.launch(
        _backward_kernel, grid, total,
        total, gain.contiguous(), through.contiguous(), above.contiguous(), gradient, gains, tokens, **settings,
    )  # fmt: skip
    return gradient, gains.sum(0).to(gain.dtype)


@_add_norm_backward.register_fake
def _(through, above, total, gain, eps):
    return torch.empty_like(total), torch.empty_like(gain, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, gain, ctx.eps = inputs
    ctx.save_for_backward(output[0], gain)


def _backward(ctx: Any, through: Tensor, above: Tensor) -> tuple[Tensor | None, ...]:
    total, gain = ctx.saved_tensors
    gradient, of_gain = _add_norm_backward(through, above, total, gain, ctx.eps)
    return gradient, gradient, of_gain, None


_add_norm.register_autograd(_backward, setup_context=_save)


def add_norm(h: Tensor, y: Tensor, gain: Tensor | None, *, eps: float) -> tuple[Tensor, Tensor]:
    """`residua.ops.add_norm` on a GPU."""
    dtype = torch.promote_types(h.dtype, y.dtype)
    gain = torch.ones(h.shape[-1], dtype=dtype, device=h.device) if gain is None else gain
    host.checked(h, y, gain)
    return _add_norm(h.to(dtype), y.to(dtype), gain, eps)
