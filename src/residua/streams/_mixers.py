"""Doubly stochastic matrices M [to, from] from free logits: a stream gives all of itself away; a new one is a mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor

from residua.streams._parts import Fill, constant, diagonal, marked


class Mixer(NamedTuple):
    """How logits become a matrix."""

    shape: Callable[[int], tuple[int, ...]]
    """Of the logits for n streams."""
    kept: Fill
    """A start near the identity."""
    matrix: Callable[[Tensor], Tensor] | None = None
    """[..., *shape] to [..., n, n]; None for Sinkhorn, whose rounds a design counts."""


def permuted(logits: Tensor) -> Tensor:
    """M = sum_r softmax(a)_r P_r over all n! permutations in lexical order; permutation r sends stream j to r(j)."""
    count = next(n for n in range(2, 5) if math.factorial(n) == logits.shape[-1])
    one = torch.eye(count, dtype=logits.dtype, device=logits.device)
    sent = torch.stack([torch.stack([one[to] for to in each], 1) for each in permutations(range(count))])
    return torch.einsum("btr,rij->btij", logits.softmax(-1), sent)


def kronecker(logits: Tensor) -> Tensor:
    """M = the Kronecker product of [[p_j, 1 - p_j], [1 - p_j, p_j]], p = sigmoid(a): factor 0 is the slow index."""
    p = logits.sigmoid()
    factors = torch.stack([torch.stack([p, 1 - p], -1), torch.stack([1 - p, p], -1)], -2)
    M, *rest = factors.unbind(-3)
    for factor in rest:
        M = (M[..., :, None, :, None] * factor[..., None, :, None, :]).flatten(-4, -3).flatten(-2)
    return M


def circulant(logits: Tensor) -> Tensor:
    """M[i, j] = softmax(a)_(i - j mod n): stream i gets the share r of the stream r places before it."""
    place = torch.arange(logits.shape[-1], device=logits.device)
    return logits.softmax(-1)[..., (place[:, None] - place) % len(place)]


MIXERS = {
    "sinkhorn": Mixer(lambda n: (n, n), diagonal(3.0, -3.0)),  # a stream keeps 99 % of itself
    "lite": Mixer(lambda n: (math.factorial(n),), marked(0.0, 0, -8.0), permuted),
    "krom": Mixer(lambda n: (n.bit_length() - 1,), constant(8.0), kronecker),
    "circulant": Mixer(lambda n: (n,), marked(0.0, 0, -8.0), circulant),
}


def check_mixer(design: str, res: str, streams: int) -> None:
    """Refuse numbers of streams that a mixer has no matrix for."""
    if res == "lite" and streams > 4:
        raise ValueError(
            f"{design}: res=lite weighs all {streams}! = {math.factorial(streams)} permutations of {streams} streams; "
            "use at most 4 streams, or res=krom"
        )
    if res == "krom" and streams & (streams - 1):
        raise ValueError(
            f"{design}: res=krom is a product of 2 x 2 matrices, and {streams} streams are no power of 2; use 2, 4, 8 "
            "..., or res=circulant"
        )
