"""add_norm in Triton equals its definition."""

import pytest
import torch

from residua import ops
from residua.ops.add_norm import add_norm

from .triton_check import TYPES, agree, draw


def tensors(rows, tokens, width, dtype=torch.float32):
    # of the stream's type: the norm sees a rounded sum, and a wider gain's gradient would be held to more digits
    gain = (1 + draw(width, seed=2, scale=0.1)).to(dtype)
    return draw(rows, tokens, width, dtype=dtype), draw(rows, tokens, width, dtype=dtype, seed=1), gain


def with_gain(h, y, gain):
    return add_norm(h, y, gain, eps=1e-5)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_triton_add_norm_equals_reference(dtype):
    agree(with_gain, *tensors(3, 9, 96, dtype))


@pytest.mark.parametrize("width", [5, 768, 1280])
def test_triton_add_norm_any_width(width):
    agree(with_gain, *tensors(1, 3, width))


def test_triton_add_norm_without_a_gain():
    agree(lambda h, y: add_norm(h, y, eps=1e-5), *tensors(2, 5, 32)[:2])


@pytest.mark.parametrize("place", [0, 1], ids=["sum", "norm"])
def test_triton_add_norm_gives_gradients_of_one_result_alone(place):
    agree(lambda h, y, gain: with_gain(h, y, 2 * gain + h.sum() * 0)[place] + 0 * gain, *tensors(2, 5, 32))


def test_triton_add_norm_of_no_tokens_is_nothing():
    with ops.backend("triton", strict=True):
        h, y, gain = (one.requires_grad_() for one in tensors(2, 0, 32))
        total, normed = with_gain(h, y, gain)
        assert total.shape == normed.shape == (2, 0, 32)
        assert torch.equal(torch.autograd.grad(normed.sum(), gain)[0], torch.zeros_like(gain))


def test_triton_add_norm_obeys_the_rules_of_a_torch_operator():
    from residua.ops.add_norm.triton import _add_norm

    torch.library.opcheck(_add_norm, (*(one.requires_grad_() for one in tensors(1, 3, 16)), 1e-5))
