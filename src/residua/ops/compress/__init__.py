"""x = sum_v w_v X_v, one weight for each channel and place: a state of several channels as one stream."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from residua.ops._backend import run
from residua.ops.compress import native as _native  # noqa: F401  registers the kernel
from residua.ops.compress import reference


def compress(weights: Float[Tensor, "v d"], X: Float[Tensor, "b t v d"]) -> Float[Tensor, "b t d"]:
    """The same weights for every token, of the type of X."""
    return run("compress", X, reference.compress, weights, X)
