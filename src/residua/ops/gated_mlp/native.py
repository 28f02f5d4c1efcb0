"""`gated_mlp` in C for few rows of x: three matrices, each read once, and nothing between them but a cache's worth."""

from __future__ import annotations

from torch import Tensor

from residua.native.guard import bare
from residua.native.library import call
from residua.ops._backend import kernel
from residua.ops.project import project
from residua.ops.project.native import few
from residua.ops.swiglu import swiglu


@kernel("gated_mlp", "cpu", "cpu")
def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The kernel, where numbers alone are wanted; else its parts, which have kernels and gradients of their own."""
    hidden, width = gate.shape
    outputs = down.shape[0]
    if (
        not few(x) or not bare(x, gate, up, down) or x.shape[-1] != width or up.shape != gate.shape
        or down.shape[1:] != (hidden,) or not hidden or not outputs
    ):  # fmt: skip
        return project(swiglu(project(x, gate), project(x, up)), down)
    y = x.new_empty((*x.shape[:-1], outputs))
    sizes = x.numel() // width, width, hidden, outputs
    call("residua_gated_mlp", x.dtype, hidden * (2 * width + outputs), (x, gate, up, down, y), sizes)
    return y
