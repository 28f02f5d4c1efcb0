"""The definition of `sinkhorn`, in logarithms so that large logits do not overflow."""

from __future__ import annotations

from torch import Tensor

from residua.ops.norm import accumulator


def sinkhorn(logits: Tensor, *, iterations: int) -> Tensor:
    """Subtract the log-sum of columns, then of rows."""
    log = logits.to(accumulator(logits.dtype))
    for _ in range(iterations):
        log = log - log.logsumexp(-2, keepdim=True)
        log = log - log.logsumexp(-1, keepdim=True)
    return log.exp()
