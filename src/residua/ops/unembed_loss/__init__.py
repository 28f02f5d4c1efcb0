"""sum_i -log softmax(W x_i)[target_i]: the loss of a language model from what its head reads, in nats."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from residua.ops._backend import run
from residua.ops.unembed_loss import native as _native  # noqa: F401  registers the kernel
from residua.ops.unembed_loss import reference


def unembed_loss(
    x: Float[Tensor, "n d"], weight: Float[Tensor, "vocab d"], targets: Int[Tensor, " n"], *, ignored: int = -100
) -> Float[Tensor, ""]:
    """Rows whose target is `ignored` do not count. In float32, or wider where x is."""
    return run("unembed_loss", x, reference.unembed_loss, x, weight, targets, ignored=ignored)
