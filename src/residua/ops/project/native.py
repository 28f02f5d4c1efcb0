"""`project` in C for few rows of x, as decoding has them: the matrix is read once, at the speed of memory."""

from __future__ import annotations

import torch
from torch import Tensor

from residua.native.guard import bare
from residua.native.library import call
from residua.ops._backend import kernel
from residua.ops.project import reference

ROWS = {torch.float32: 4, torch.float64: 4, torch.bfloat16: 1}
"""The most rows. So far the kernel took 0.44 to 0.84 of the time of PyTorch's product, for matrices of 256 x 768 to
768 x 2048 that come from memory, and 0.89 to 0.95 in bfloat16, for which processors have instructions of their own."""
LEAST = 1 << 17
"""Numbers in a matrix from which the way from Python to C costs less than it saves."""


@kernel("project", "cpu", "cpu")
def project(x: Tensor, weight: Tensor) -> Tensor:
    """The kernel, where numbers alone are wanted; PyTorch's product for many rows, and for whatever else is asked."""
    if weight.numel() < LEAST or not few(x) or not bare(x, weight) or weight.shape[1:] != x.shape[-1:]:
        return reference.project(x, weight)
    outputs, width = weight.shape
    y = x.new_empty((*x.shape[:-1], outputs))
    call("residua_project", x.dtype, outputs * width, (x, weight, y), (x.numel() // width, width, outputs))
    return y


def few(x: Tensor) -> bool:
    """Whether there are rows, and so few that a kernel may read matrices for them; autocast has types of its own."""
    return 0 < x.numel() <= ROWS.get(x.dtype, 0) * x.shape[-1] and not torch.is_autocast_enabled("cpu")
