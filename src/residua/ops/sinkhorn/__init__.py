"""M = (rows o columns)^n exp(logits): the doubly stochastic matrix of mHC."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from residua.ops._backend import run
from residua.ops.sinkhorn import damped, reference
from residua.ops.sinkhorn import native as _native  # noqa: F401  registers the kernel


def sinkhorn(logits: Float[Tensor, "*b s s"], *, iterations: int = 20, eps: float = 0.0) -> Float[Tensor, "*b s s"]:
    """Normalise columns, then rows, `iterations` times: rows sum to 1 exactly, columns nearly.

    How nearly depends on the logits: 20 rounds leave a column error of 4e-5 for logits N(0, 1) and 4e-2 for N(0, 9);
    near mHC's start, 6 I - 3 plus noise of 0.1, 0.3 or 1, up to 3e-3, 9e-3 or 2e-2.

    eps: added to the softmax over columns that the rounds begin with, and to every sum after it that divides, as
         DeepSeek-V4 does; rows then sum to 1 up to eps.
    """
    if eps:
        return damped.sinkhorn(logits, iterations=iterations, eps=eps)
    return run("sinkhorn", logits, reference.sinkhorn, logits, iterations=iterations)
