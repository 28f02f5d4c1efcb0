"""norm(x) W + b, with the norm and the product in one: what designs make their weights from."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from residua.ops._backend import run
from residua.ops.normed_project import native as _native  # noqa: F401  registers the kernel
from residua.ops.normed_project import reference


def normed_project(
    x: Float[Tensor, "*n d"],
    weight: Float[Tensor, "d c"],
    bias: Float[Tensor, " c"],
    *,
    eps: float,
    centered: bool = False,
) -> Float[Tensor, "*n c"]:
    """The RMS norm of x, or `centered` its layer norm, times a matrix of a few columns; in the type to add up in."""
    return run("normed_project", x, reference.normed_project, x, weight, bias, eps=eps, centered=centered)
