"""delta_write in Triton equals its definition."""

import pytest
import torch

from residua import ops

from .triton_check import TYPES, agree, draw


def tensors(rows, tokens, channels, width, dtype=torch.float32):
    k, value = draw(rows, tokens, width, dtype=dtype, seed=1), draw(rows, tokens, channels, dtype=dtype, seed=2)
    beta = 2 * draw(rows, tokens, dtype=torch.promote_types(dtype, torch.float32), seed=3).sigmoid()
    return draw(rows, tokens, channels, width, dtype=dtype), k, value, beta


def write(*arguments):
    return ops.delta_write(*arguments, eps=1e-3)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("channels", [1, 3])
def test_triton_delta_write_equals_reference(channels, dtype):
    agree(write, *tensors(3, 9, channels, 96, dtype))


@pytest.mark.parametrize("width", [5, 768, 1280])
def test_triton_delta_write_any_width(width):
    agree(write, *tensors(1, 3, 2, width))


def test_triton_delta_write_zero_direction_writes_nothing():
    X, k, value, beta = tensors(1, 5, 2, 32)
    k[:, 2] = 0
    agree(write, X, k, value, beta)
    with ops.backend("triton", strict=True):
        assert torch.equal(write(X, k, value, beta)[:, 2], X[:, 2])


def test_triton_delta_write_of_no_tokens_is_nothing():
    with ops.backend("triton", strict=True):
        assert write(*tensors(2, 0, 2, 32)).shape == (2, 0, 2, 32)


def test_triton_delta_write_obeys_the_rules_of_a_torch_operator():
    from residua.ops.delta_write.triton import _delta_write

    torch.library.opcheck(_delta_write, (*(one.requires_grad_() for one in tensors(1, 3, 2, 16)), 1e-3))
