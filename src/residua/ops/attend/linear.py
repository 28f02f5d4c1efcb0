"""`attend` in PyTorch with memory linear in depth: references and weights are saved, never a stack of sources.

Few tokens are stacked for the length of a call, so that decoding does not loop over sources in Python; many tokens go
source by source. It serves where there is no kernel; the definition is in `reference`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from residua.native import guard
from residua.ops.attend import reference
from residua.ops.norm import accumulator

FEW = 1 << 16
"""Numbers in all sources together up to which they are stacked."""


def attend(
    query: Tensor,
    sources: tuple[Tensor, ...],
    *,
    eps: float,
    null: Tensor | None,
    heads: int,
    total: bool,
    centered: bool,
    onto: Tensor | None = None,
) -> Tensor:
    """`reference.attend`."""
    if guard.traced(query, *sources) or len({source.dtype for source in sources}) > 1:
        return reference.attend(
            query, sources, eps=eps, null=null, heads=heads, total=total, centered=centered, onto=onto
        )
    read = _Attend.apply((eps, heads, len(sources) if total else 1, centered), query, null, *sources)
    return reference.added(onto, read)


def _groups(sources: tuple[Tensor, ...]) -> list[Tensor]:
    """The sources as few stacks or as many single ones, [n ...] each, in the accumulation type."""
    wide = accumulator(sources[0].dtype)
    if len(sources) * sources[0].numel() <= FEW:
        return [torch.stack(sources).to(wide)]
    return [source.to(wide)[None] for source in sources]


def _slices(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1))


def _keys(values: Tensor, query: Tensor, eps: float, heads: int) -> tuple[Tensor, Tensor]:
    """The logits [n ... heads], and 1 / rms [n ... 1]."""
    inverse = (torch.linalg.vecdot(values, values) / values.shape[-1] + eps).rsqrt().unsqueeze(-1)
    return torch.linalg.vecdot(_slices(values, heads), _slices(query, heads)) * inverse, inverse


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: Any, query: Tensor, null: Tensor | None, *sources: Tensor) -> Tensor:
        eps, heads, scale, centered = how
        groups = _groups(sources)
        wide = query.to(groups[0].dtype)
        logits = torch.cat([_keys(values, wide, eps, heads)[0] for values in groups])
        if null is not None:
            logits = torch.cat([logits, null.to(logits.dtype).expand_as(logits[:1])])
        shares = logits.softmax(0)
        ctx.how = how
        ctx.save_for_backward(query, null, shares, *sources)
        weights = _weights(shares, len(sources), scale, centered).unsqueeze(-1)
        out, at = torch.zeros_like(groups[0][0]), 0
        for values in groups:
            out += (weights[at : at + len(values)] * _slices(values, heads)).sum(0).flatten(-2)
            at += len(values)
        return out.to(sources[0].dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        query, null, shares, *sources = ctx.saved_tensors
        (eps, heads, scale, centered), wanted = ctx.how, ctx.needs_input_grad
        if torch.is_grad_enabled():  # create_graph: second derivatives are the reference's

            def again(query: Tensor, null: Tensor | None, *sources: Tensor) -> Tensor:
                return reference.attend(
                    query, sources, eps=eps, null=null, heads=heads, total=scale != 1, centered=centered
                )

            return None, *guard.differentiate(again, (query, null, *sources), wanted[1:], gradient)
        groups = _groups(tuple(sources))
        wide, out = query.to(groups[0].dtype), gradient.to(groups[0].dtype)
        dots = torch.cat([torch.linalg.vecdot(_slices(values, heads), _slices(out, heads)) for values in groups])
        n = len(sources)
        mean = (shares[:n] * dots).sum(0)
        slopes = scale * shares[:n] * (dots - mean)
        weights = _weights(shares, n, scale, centered)
        made, of_query, at = [], torch.zeros_like(wide), 0
        for values in groups:
            here = slice(at, at + len(values))
            logits, inverse = _keys(values, wide, eps, heads)
            push = slopes[here] * inverse
            pull = -(push * logits).sum(-1, keepdim=True) * inverse / values.shape[-1]
            spread = weights[here].unsqueeze(-1) * _slices(out, heads) + push.unsqueeze(-1) * _slices(wide, heads)
            made += (spread.flatten(-2) + pull * values).to(gradient.dtype).unbind()
            of_query += (push.unsqueeze(-1) * _slices(values, heads)).flatten(-2).flatten(0, -2).sum(0)
            at += len(values)
        of_null = None
        if null is not None and wanted[2]:
            of_null = (-scale * shares[n] * mean).sum().reshape(null.shape).to(null.dtype)
        return None, of_query.to(query.dtype) if wanted[1] else None, of_null, *made


def _weights(shares: Tensor, n: int, scale: float, centered: bool) -> Tensor:
    return scale * shares[:n] - (1 / n if centered else 0)
