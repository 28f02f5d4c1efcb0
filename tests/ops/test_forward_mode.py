"""Tangents through every op are the definition's: with dual tensors and by torch.func.jvp, in any one argument."""

import pytest
import torch
from torch.autograd import forward_ad

from residua import ops
from residua.ops.attend import groupable
from residua.testing import assert_close
from tests.ops.table import OPS, draw


def slope(call, inputs, tangents, step=1e-5):
    """The directional derivative by differences, which asks nothing of autograd."""
    ahead, behind = ([x + sign * step * t for x, t in zip(inputs, tangents, strict=True)] for sign in (1, -1))
    return (call(*ahead) - call(*behind)) / (2 * step)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # of PyTorch's own, in forward mode
@pytest.mark.parametrize("way", ["dual", "jvp"])
@pytest.mark.parametrize("op", OPS)
def test_every_op_carries_tangents(op, way):
    shapes, call = OPS[op]
    inputs = draw(shapes)
    for place in range(len(inputs)):
        tangents = [one.roll(1, -1) if at == place else torch.zeros_like(one) for at, one in enumerate(inputs)]
        with ops.backend("reference"):
            expected, expected_slope = call(*inputs), slope(call, inputs, tangents)
        if way == "jvp":
            found, found_slope = torch.func.jvp(call, tuple(inputs), tuple(tangents))
        else:
            with forward_ad.dual_level():
                dual = [
                    forward_ad.make_dual(one, tangents[at]) if at == place else one for at, one in enumerate(inputs)
                ]
                assert not groupable(dual[0])
                found, found_slope = forward_ad.unpack_dual(call(*dual))
        assert found_slope is not None, f"argument {place}: the tangent was dropped"
        assert_close(found, expected, f"argument {place}")
        torch.testing.assert_close(found_slope, expected_slope, rtol=1e-7, atol=1e-8)
