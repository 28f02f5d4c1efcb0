"""out_tm = sum_s w_tsm H_ts: the streams of a token are the sources of `mix`, a fixed step apart, in Triton.

The kernels are those of `residua.ops.mix.triton`: a lane is an output stream m. No GPU has timed this: see
`residua.ops._triton`.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from residua.ops import _triton as host
from residua.ops._context import Context
from residua.ops._triton_device import accumulator
from residua.ops.mix.triton import _backward_kernel, _forward_kernel, blocks
from residua.ops.remix.reference import added


def _settings(weights: Tensor, H: Tensor, *, whole: bool) -> host.Settings:
    outputs, width = weights.shape[-1], H.shape[-1]
    return {
        "WIDTH": width, "LANES": outputs, "TABLE": False, "ALIGNED": False, "ACC": accumulator(H.dtype),
        **blocks(outputs, width, whole=whole),
    }  # fmt: skip


@torch.library.custom_op("residua_triton::remix", mutates_args=())
def _remix(weights: Tensor, H: Tensor) -> Tensor:
    weights, H = weights.contiguous(), H.contiguous()
    (streams, outputs), width = weights.shape[-2:], H.shape[-1]
    tokens = H.shape[:-2].numel()
    out = H.new_empty((*H.shape[:-2], outputs, width))
    settings = _settings(weights, H, whole=False)
    host.launch(
        _forward_kernel, (triton.cdiv(tokens, settings["BT"]), triton.cdiv(width, settings["BD"])), H,
        H, H, weights, out, streams, tokens, width, streams * width,
        1, outputs, streams * outputs, width, outputs * width, CHANNEL=False, **settings,
    )  # fmt: skip
    return out


@_remix.register_fake
def _(weights, H):
    return H.new_empty((*H.shape[:-2], weights.shape[-1], H.shape[-1]))


@torch.library.custom_op("residua_triton::remix_backward", mutates_args=())
def _remix_backward(dout: Tensor, weights: Tensor, H: Tensor) -> tuple[Tensor, Tensor]:
    weights, H, dout = weights.contiguous(), H.contiguous(), dout.contiguous()
    (streams, outputs), width = weights.shape[-2:], H.shape[-1]
    tokens = H.shape[:-2].numel()
    dH = torch.empty_like(H)
    dweights = torch.empty_like(weights, dtype=torch.promote_types(H.dtype, torch.float32))
    weight_strides = 1, outputs, streams * outputs
    settings = _settings(weights, H, whole=True)
    host.launch(
        _backward_kernel, (triton.cdiv(tokens, settings["BT"]),), H,
        H, H, H, dH, weights, dweights, dout, streams, tokens, width, streams * width,
        *weight_strides, width, outputs * width, *weight_strides, **settings,
    )  # fmt: skip
    return dweights.to(weights.dtype), dH


@_remix_backward.register_fake
def _(dout, weights, H):
    return tuple(torch.empty_like(one, memory_format=torch.contiguous_format) for one in (weights, H))


def _save(ctx: Context, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Context, dout: Tensor) -> tuple[Tensor, Tensor]:
    weights, H = ctx.saved_tensors
    return _remix_backward(dout, weights, H)


_remix.register_autograd(_backward, setup_context=_save)


def remix(weights: Tensor, H: Tensor, *, onto: Tensor | None = None, read: Tensor | None = None) -> Any:
    """`residua.ops.remix` on a GPU, and `read_remix`."""
    if read is not None:
        return remix(read[..., None], H).squeeze(-2), remix(weights, H)
    host.checked(weights, H)
    return added(onto, _remix(weights, H))
