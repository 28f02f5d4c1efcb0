"""Compare a Triton kernel with the reference in float64: the output and every gradient.

Not collected by itself: `test_triton_interpreted.py` runs the `triton_<op>.py` beside it in a process of their own,
under Triton's interpreter, or on the GPU where there is one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from residua import ops
from residua.ops import _triton_registry
from residua.testing import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_triton_registry.register(DEVICE)

TYPES = [torch.float64, torch.float32, torch.bfloat16]


def draw(*shape, dtype=torch.float32, seed=0, scale=1.0):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (scale * values).to(DEVICE, dtype)


def results(backend, function, tensors, wanted, along=None):
    """The outputs and the gradients; `along` are the outputs that the cotangents lean towards."""
    leaves = [one.detach().clone().requires_grad_(want) for one, want in zip(tensors, wanted, strict=True)]
    with ops.backend(backend, strict=True):
        out = function(*leaves)
        outs = [out] if isinstance(out, Tensor) else list(out)
        cotangents = [
            # in what bfloat16 can hold, so that every type is given the same; leaning, so that a gradient which is
            # a sum over tokens (the null's: one number) does not cancel down to its rounding errors
            (draw(*one.shape, seed=99 + i) + lean.detach()).bfloat16().to(one.dtype)
            for i, (one, lean) in enumerate(zip(outs, along or outs, strict=True))
        ]
        asked = [leaf for leaf in leaves if leaf.requires_grad]
        return outs, torch.autograd.grad(outs, asked, cotangents)


def agree(function, *tensors, wanted=None):
    """Fail unless `function` of the tensors is the same through Triton and through the reference in float64."""
    wanted = wanted or [True] * len(tensors)
    true_outs, true_gradients = results("reference", function, [one.double() for one in tensors], wanted)
    outs, gradients = results("triton", function, tensors, wanted, true_outs)
    for i, (out, expected) in enumerate(zip(outs, true_outs, strict=True)):
        assert_close(out, expected, f"output {i}")
    asked = [one for one, want in zip(tensors, wanted, strict=True) if want]
    for i, (got, expected, of) in enumerate(zip(gradients, true_gradients, asked, strict=True)):
        assert got.dtype == of.dtype
        assert_close(got, expected, f"gradient {i}", gradient=True)
