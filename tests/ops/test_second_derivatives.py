"""Gradients of gradients are the definition's, also where one input of an op was made from another."""

import pytest
import torch

from residua import ops
from tests.ops.table import GROUPED, OPS, draw

ATTENTION = ("window_attend", "token_attend")
"""Defined by PyTorch's own attention, which has no second derivatives on CPU, and says so."""
CASES = {name: (shapes, call, call) for name, (shapes, call) in OPS.items() if not name.startswith(ATTENTION)} | GROUPED


def second(call, leaves, frozen):
    """The gradient of the square of the gradient; each argument depends on the one before it, as in a network."""
    inputs = [leaf.detach().requires_grad_(place not in frozen) for place, leaf in enumerate(leaves)]
    chain = inputs[:1]
    for one in inputs[1:]:
        chain.append(one + 0.3 * chain[-1].square().mean().tanh() if one.requires_grad else one)
    asked = [one for one in inputs if one.requires_grad]
    slopes = torch.autograd.grad(call(*chain).square().mean(), asked, create_graph=True, allow_unused=True)
    return torch.autograd.grad(sum(one.square().sum() for one in slopes if one is not None), asked, allow_unused=True)


@pytest.mark.parametrize("op", CASES)
def test_every_op_has_second_derivatives(op):
    shapes, call, plain = CASES[op]
    leaves = draw(shapes)
    every = range(len(leaves))
    for frozen in [
        (),
        *((place,) for place in every if len(leaves) > 1),
        *([tuple(every)[1:-1]] if len(leaves) > 2 else []),
    ]:
        with ops.backend("reference"):
            expected = second(plain, leaves, frozen)
        for one, other in zip(second(call, leaves, frozen), expected, strict=True):
            other = torch.zeros_like(one) if other is None else other
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
