"""Every op in four forms: ours, the public code's, the best that plain PyTorch can do, and the compiled one.

The public and plain forms are our own restatements. Each is written as its users would write it: the public depth
read stacks its sources and normalises a key tensor; the plain one keeps the sources in one buffer, whose filling is
not counted against it, and reads by `bmm`; the compiled one is the list form that Inductor fuses best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-6


def public_read(query: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """Stack, a normalised copy for the keys, einsum, softmax, einsum."""
    values = torch.stack(list(sources))
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    keys = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(values.dtype)
    weights = torch.einsum("d,nbtd->nbt", query, keys).softmax(0)
    return torch.einsum("nbt,nbtd->btd", weights, values)


def buffered_read(query: Tensor, buffer: Tensor) -> Tensor:
    """Sources as [n, tokens, d]: a key is its value times a number per token, and the sum over n is one `bmm`."""
    scale = (torch.linalg.vecdot(buffer, buffer) / buffer.shape[-1] + EPS).rsqrt()
    weights = ((buffer @ query) * scale).softmax(0)
    return torch.bmm(weights.t().unsqueeze(1), buffer.transpose(0, 1)).squeeze(1)


def listed_read(query: Tensor, *sources: Tensor) -> Tensor:
    """The same algebra over separate tensors, for the compiler."""
    logits = torch.stack(
        [(v @ query) * ((v * v).mean(-1) + EPS).rsqrt() for v in sources],
    )
    weights = logits.softmax(0)
    total = weights[0].unsqueeze(-1) * sources[0]
    for weight, value in zip(weights[1:], sources[1:], strict=True):
        total = total + weight.unsqueeze(-1) * value
    return total


def public_mix(weights: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """Stack and einsum, as in DenseFormer's description; lanes one after the other, as in MUDDFormer's code."""
    values = torch.stack(list(sources))
    if weights.ndim == 1:
        return torch.einsum("n,nbtd->btd", weights, values)
    return torch.stack([torch.einsum("nbt,nbtd->btd", lane, values) for lane in weights])


def buffered_mix(weights: Tensor, buffer: Tensor) -> Tensor:
    """Sources as [n, tokens, d]: one product with the flat buffer, or one `bmm` for all lanes."""
    if weights.ndim == 1:
        return (weights @ buffer.flatten(1)).view(buffer.shape[1:])
    lanes = weights.flatten(2).permute(2, 0, 1)
    return torch.bmm(lanes, buffer.transpose(0, 1)).transpose(0, 1)


def listed_mix(weights: Tensor, *sources: Tensor) -> Tensor:
    """The sum written out, for the compiler."""
    if weights.ndim == 1:
        return sum((w * v for w, v in zip(weights, sources, strict=True)), torch.zeros_like(sources[0]))
    lanes = [sum(w.unsqueeze(-1) * v for w, v in zip(lane, sources, strict=True)) for lane in weights]
    return torch.stack(lanes)


def public_delta_write(X: Tensor, k: Tensor, value: Tensor, beta: Tensor) -> Tensor:
    """The state as [d, v], the direction normalised by `F.normalize`, three einsums."""
    unit = F.normalize(k, dim=-1)
    held = torch.einsum("btd,btdv->btv", unit, X)
    return X + beta[..., None, None] * torch.einsum("btd,btv->btdv", unit, value - held)


def rowwise_delta_write(X: Tensor, k: Tensor, value: Tensor, beta: Tensor) -> Tensor:
    """The state as [v, d]: rows of the width are contiguous."""
    unit = (k * torch.rsqrt(k.square().sum(-1, keepdim=True) + EPS * EPS)).unsqueeze(-2)
    step = beta.unsqueeze(-1) * (value - (X * unit).sum(-1))
    return X + step.unsqueeze(-1) * unit


def public_remix(weights: Tensor, H: Tensor) -> Tensor:
    """One einsum over the streams."""
    return torch.einsum("btsm,btsd->btmd", weights, H)


def matmul_remix(weights: Tensor, H: Tensor) -> Tensor:
    """The same as one batched product."""
    return weights.transpose(-1, -2) @ H


def masked_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """PyTorch's attention over all tokens under a band mask."""
    t = torch.arange(q.shape[2], device=q.device)
    distance = t[:, None] - t
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(distance >= 0) & (distance < window))


def chunked_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Chunks of a window, each with the chunk before it: linear in the number of tokens."""
    b, h, t, e = q.shape
    chunks = t // window
    asked = q.reshape(b * h, chunks, window, e).flatten(0, 1)

    def pairs(x: Tensor) -> Tensor:
        parts = x.reshape(b * h, chunks, window, e)
        before = F.pad(parts, (0, 0, 0, 0, 1, 0))[:, :-1]
        return torch.cat([before, parts], 2).flatten(0, 1)

    i = torch.arange(window, device=q.device)[:, None]
    j = torch.arange(2 * window, device=q.device) - window
    band = (i - j >= 0) & (i - j < window)
    real = torch.arange(chunks, device=q.device)[:, None, None] * window + j >= 0
    mask = (band & real).repeat(b * h, 1, 1)
    return F.scaled_dot_product_attention(asked, pairs(k), pairs(v), attn_mask=mask).reshape(b, h, t, e)


def compiled(form: Callable[..., Tensor]) -> Callable[..., Any]:
    """Inductor's version, for these very shapes; made at the first call."""
    torch._dynamo.reset()  # one function is compiled for few shapes before dynamo gives up; cases come one at a time
    return torch.compile(form, fullgraph=True, dynamic=False)
