"""The gradients of groups of reads as torch operations, so that they can be differentiated once more.

`cpu` takes these where a graph of the gradients is asked for (`create_graph=True`): kernels in C leave none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from residua.native import guard
from residua.ops.attend import reference
from residua.ops.attend.native import ReadOptions


def ahead_gradients(
    how: ReadOptions,
    queries: Tensor,
    nulls: Tensor | None,
    sources: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Of the queries, nulls and sources, from those of the reads, of their log-sums and of the sources handed on."""

    def again(queries: Tensor, nulls: Tensor | None, *sources: Tensor) -> list[Tensor]:
        null = [None] * len(queries) if nulls is None else nulls.split(1)
        logits = [
            reference.logits(query, sources, eps=how.eps, null=one, heads=how.heads)
            for query, one in zip(queries, null, strict=True)
        ]
        values = torch.stack(sources).unflatten(-1, (how.heads, -1))
        reads = [(one.softmax(0)[-len(sources) :].unsqueeze(-1) * values).sum(0).flatten(-2) for one in logits]
        return [*reads, torch.stack([one.logsumexp(0) for one in logits]), *sources]

    def asked(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(one for one, gradient in zip(again(*inputs), gradients, strict=True) if gradient is not None)

    given = [gradient for gradient in gradients if gradient is not None]
    return guard.differentiate(asked, (queries, nulls, *sources), wanted, given)


def merge_gradients(
    how: ReadOptions,
    query: Tensor,
    value: Tensor | None,
    lse: Tensor,
    read: Tensor | None,
    sources: Sequence[Tensor],
    gradient: Tensor,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Of the query, of the carry's value and log-sum, and of the sources, where either the value or the read was kept.

    With p_0 the carry's share and p_n those of the sources, g their products with the gradient dx:
    dl_n = scale p_n (g_n - sum p g), and p_0 g_0 is what the read, sum p v, has more than the sources.
    """
    with torch.enable_grad():
        query, sources = guard.alias(query), [guard.alias(source) for source in sources]
        logits = reference.logits(query, tuple(sources), eps=how.eps, null=None, heads=how.heads)
        total = torch.cat([lse.unsqueeze(0), logits]).logsumexp(0)
        shares, carried = (logits - total).exp(), (lse - total).exp()
        above = gradient.unflatten(-1, (how.heads, -1))

        def dot(rows: Tensor) -> Tensor:
            return (above * rows.unflatten(-1, (how.heads, -1))).sum(-1)

        dots = torch.stack([dot(source) for source in sources])
        explained = (shares * dots).sum(0)
        if value is not None:
            rest = carried * dot(value)
        else:
            assert read is not None
            rest = dot(read) / how.scale - explained
        slopes = how.scale * shares * (dots - explained - rest)
        chosen = [one for one, want in zip((query, *sources), (wanted[0], *wanted[3:]), strict=True) if want]
        turned = iter(torch.autograd.grad(logits, chosen, slopes, create_graph=True) if chosen else ())
        of_query = next(turned) if wanted[0] else None
        weighted = [(how.scale * share.unsqueeze(-1) * above).flatten(-2) for share in (carried, *shares)]
        made = [one + next(turned) if want else None for one, want in zip(weighted[1:], wanted[3:], strict=True)]
        return of_query, weighted[0], how.scale * (rest - carried * (explained + rest)), *made
