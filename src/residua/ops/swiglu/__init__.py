"""silu(a) b: the middle of a SwiGLU MLP."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from residua.ops._backend import run
from residua.ops.swiglu import native as _native  # noqa: F401  registers the kernel
from residua.ops.swiglu import reference


def swiglu(a: Float[Tensor, "*n"], b: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """a / (1 + exp(-a)) * b, number by number."""
    return run("swiglu", a, reference.swiglu, a, b)
