"""x W': what a projection or a head makes of tokens, whose matrix a kernel reads once where tokens are few."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from residua.ops._backend import run
from residua.ops.project import native as _native  # noqa: F401  registers the kernel
from residua.ops.project import reference


def project(x: Float[Tensor, "*n d"], weight: Float[Tensor, "c d"]) -> Float[Tensor, "*n c"]:
    """PyTorch's `linear` without a bias."""
    return run("project", x, reference.project, x, weight)
