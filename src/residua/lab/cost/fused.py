"""What a kernel of each op has to do: read its inputs once, write its result once, keep no step in between.

These are bounds from below, for planning; no kernel here is run. An op without an entry costs what its reference does.
Inside `fused`, full attention too counts the pairs of tokens that see each other, and not the ones a mask hides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from residua.counting.rules import RULES, Call, Kept, Rule, Unseen, attention, tensors
from residua.counting.walk import Walk
from residua.ops import _backend
from residua.ops.norm import accumulator


class Bill(NamedTuple):
    """One call of an op."""

    like: Tensor
    """The result has its type."""
    shape: tuple[int, ...]
    flops: float
    keeps: tuple[Tensor, ...]
    """The inputs that the backward pass reads again."""
    scalars: int = 0
    """Numbers a kernel keeps beside them: weights, norms, log-sums."""
    first: tuple[int, ...] | None = None
    """The shape of a result before that one, where there are two."""


def _attend(query: Tensor, sources: tuple[Tensor, ...], *, heads: int = 1, **_: object) -> Bill:
    """Norm, logit and mixture of every source: 6 d."""
    first, count = sources[0], len(sources)
    rows, width = first.numel() // first.shape[-1], first.shape[-1]
    flops = rows * count * (6 * width + 5 * heads + 3)
    return Bill(first, tuple(first.shape), flops, (query, *sources), rows * count * (heads + 1))


def _attend_qkv(
    query: Tensor, keys: tuple[Tensor, ...], values: tuple[Tensor, ...], *, heads: int = 1, **_: object
) -> Bill:
    """Logit and value of every source: 4 d."""
    rows, width = query.numel() // query.shape[-1], query.shape[-1]
    flops = rows * len(keys) * (4 * width + 6 * heads)
    return Bill(query, tuple(query.shape), flops, (query, *keys, *values), rows * len(keys) * heads)


def _mix(weights: Tensor, sources: tuple[Tensor, ...], **_: object) -> Bill:
    lanes = tuple(weights.shape[:1]) if weights.ndim == 4 else ()
    flops = 2.0 * len(sources) * sources[0].numel() * (lanes[0] if lanes else 1)
    return Bill(sources[0], (*lanes, *sources[0].shape), flops, (weights, *sources))


def _remix(weights: Tensor, H: Tensor, *, read: Tensor | None = None, **_: object) -> Bill:
    """2 a number of a stream and mixture, of which a read is one more."""
    made, (rows, tokens, _streams, width) = weights.shape[-1], H.shape
    shape, flops = (rows, tokens, made, width), 2.0 * H.numel() * made
    if read is None:
        return Bill(H, shape, flops, (weights, H))
    return Bill(H, shape, flops + 2 * H.numel(), (read, weights, H), first=(rows, tokens, width))


def _normed_project(x: Tensor, weight: Tensor, bias: Tensor, **_: object) -> Bill:
    """The norm: 4 a number; the product."""
    columns = len(bias)
    flops = x.numel() * (4.0 + 2 * columns)
    wide = x.new_empty(0, dtype=accumulator(x.dtype))
    return Bill(wide, (*x.shape[:-1], columns), flops, (x, weight), 2 * x.numel() // x.shape[-1])


def _compress(weights: Tensor, X: Tensor, **_: object) -> Bill:
    return Bill(X, (*X.shape[:-2], X.shape[-1]), 2.0 * X.numel(), (weights, X))


def _delta_write(X: Tensor, k: Tensor, value: Tensor, beta: Tensor, **_: object) -> Bill:
    """What X holds along k and the change: 4 a number of the state; the length of k: 3."""
    flops = 4.0 * X.numel() + 3 * k.numel() + 3 * value.numel()
    return Bill(X, tuple(X.shape), flops, (X, k, value, beta), value.numel() + beta.numel())


def _shortconv(x: Tensor, tail: Tensor, taps: Tensor, **_: object) -> Bill:
    return Bill(x, tuple(x.shape), 2.0 * x.numel() * taps.shape[0], (x, taps), tail.numel())


def _sinkhorn(logits: Tensor, *, iterations: int = 20, **_: object) -> Bill:
    """Rows and columns, each a log-sum and a difference; the backward pass starts again from the logits."""
    return Bill(logits, tuple(logits.shape), logits.numel() * (10.0 * iterations + 1), (logits,))


def _window_attend(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, mode: str = "sliding", causal: bool = True, **_: object
) -> Bill:
    """The pairs that see each other: 4 e each, and 7 for scale, mask and softmax."""
    pairs = window_pairs(q.shape[2], k.shape[2], window, mode, causal)
    heads = q.shape[0] * q.shape[1]
    flops = heads * pairs * (4 * q.shape[3] + 7)
    return Bill(q, (*q.shape[:3], v.shape[3]), flops, (q, k, v), heads * q.shape[2])


def window_pairs(queries: int, keys: int, window: int, mode: str, causal: bool) -> int:
    """Query-key pairs that see each other; the last query stands at the last key."""
    first = keys - queries
    total = 0
    for place in range(first, keys):
        if mode == "sliding":
            low, high = place - window + 1, place if causal else place + window - 1
        else:
            low = place // window * window
            high = place if causal else low + window - 1
        total += min(high, keys - 1) - max(low, 0) + 1
    return total


OPS: dict[str, Callable[..., Bill]] = {
    "attend": _attend,
    "attend_qkv": _attend_qkv,
    "mix": _mix,
    "remix": _remix,
    "normed_project": _normed_project,
    "compress": _compress,
    "delta_write": _delta_write,
    "shortconv": _shortconv,
    "sinkhorn": _sinkhorn,
    "window_attend": _window_attend,
}


@contextmanager
def fused(walk: Walk) -> Iterator[None]:
    """Price the ops as kernels inside the `with`: they stand in for kernels of the meta device."""
    whole = RULES["scaled_dot_product_attention"]
    RULES["scaled_dot_product_attention"] = Rule(_visible, whole.keeps)
    for op, price in OPS.items():
        _backend.kernel(op, "cost", "meta")(_kernel(walk, op, price))
    try:
        with _backend.backend("auto"):
            yield
    finally:
        RULES["scaled_dot_product_attention"] = whole
        for op in OPS:
            _backend.forget(op, "meta")


def _visible(call: Call) -> float:
    """Causal attention computes the scores up to the diagonal."""
    q, k = call.inputs[:2]
    queries, keys = q.shape[-2], k.shape[-2]
    seen = queries * keys - queries * (queries - 1) / 2 if call.kwargs.get("is_causal") else queries * keys
    return attention(call, q.numel() / q.shape[-1] / queries * seen)


def _kernel(walk: Walk, op: str, price: Callable[..., Bill]) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    def run(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
        with walk.paused():
            bill, inputs = price(*args, **kwargs), tensors((args, tuple(kwargs.values())))
            learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
            last = bill.like.new_empty(bill.shape).requires_grad_(learns)
            out = last if bill.first is None else (bill.like.new_empty(bill.first).requires_grad_(learns), last)
            own = (last,) if op == "window_attend" else ()  # attention starts its backward pass from its result
            kept: Kept = [*bill.keeps, *own, Unseen(4 * bill.scalars)]
            walk.price(Call(op, args, kwargs, out), Rule(lambda call: bill.flops, lambda call: kept))
        return out

    return run
