"""out_m = sum_s weights[s, m] H_s: parallel streams recombined (Hyper-Connections, mHC)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from residua.ops._backend import run
from residua.ops.remix import native as _native  # noqa: F401  registers the kernel
from residua.ops.remix import reference


def remix(
    weights: Float[Tensor, "b t s m"], H: Float[Tensor, "b t s d"], *, onto: Float[Tensor, "b t m d"] | None = None
) -> Float[Tensor, "b t m d"]:
    """Each output m is a mixture of the streams s, with weights per token.

    onto: what the mixtures are added to. A single stream written to many, w_m y, is the outer product of a write.
    """
    return run("remix", H, reference.remix, weights, H, onto=onto)


def read_remix(
    read: Float[Tensor, "b t s"], weights: Float[Tensor, "b t s m"], H: Float[Tensor, "b t s d"]
) -> tuple[Float[Tensor, "b t d"], Float[Tensor, "b t m d"]]:
    """x = sum_s read[s] H_s, and `remix` beside it: what a site reads and what it leaves, in one pass over H."""
    return run("remix", H, reference.remix, weights, H, read=read)
