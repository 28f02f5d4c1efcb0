"""mix and remix in Triton equal their definitions, for every shape of weights."""

import pytest
import torch

from residua import ops

from .triton_check import TYPES, agree, draw

KINDS = ("static", "channel", "token", "lane")


def tensors(kind, n, rows, tokens, width, dtype=torch.float32, lanes=3):
    wide = torch.promote_types(dtype, torch.float32)
    shape = {"static": (n,), "channel": (n, width), "token": (n, rows, tokens), "lane": (lanes, n, rows, tokens)}[kind]
    return draw(*shape, dtype=wide), *(draw(rows, tokens, width, dtype=dtype, seed=1 + i) for i in range(n))


def mixed(weights, *sources):
    return ops.mix(weights, sources)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_triton_mix_equals_reference(kind, dtype):
    agree(mixed, *tensors(kind, 4, 3, 3, 96, dtype))


@pytest.mark.parametrize(("n", "tokens", "width"), [(1, 1, 1), (37, 3, 24), (2, 5, 768), (2, 5, 1280)])
@pytest.mark.parametrize("kind", KINDS)
def test_triton_mix_any_width_and_number_of_sources(kind, n, tokens, width):
    agree(mixed, *tensors(kind, n, 1, tokens, width))


@pytest.mark.parametrize("kind", KINDS)
def test_triton_mix_gives_gradients_to_those_that_want_them(kind):
    agree(mixed, *tensors(kind, 3, 1, 5, 32), wanted=[True, False, True, False])
    agree(mixed, *tensors(kind, 2, 1, 5, 32), wanted=[False, True, True])


@pytest.mark.parametrize("kind", KINDS)
def test_triton_mix_of_no_tokens_is_nothing(kind):
    with ops.backend("triton", strict=True):
        weights, *sources = tensors(kind, 2, 1, 0, 32)
        weights.requires_grad_()
        out = mixed(weights, *sources)
        assert out.shape[-3:] == (1, 0, 32)
        out.sum().backward()
    assert torch.equal(weights.grad, torch.zeros_like(weights))


def test_triton_mix_keeps_float32_weights_and_strided_views():
    weights, *sources = tensors("token", 3, 2, 3, 32, torch.bfloat16)
    across = [one.transpose(0, 1).contiguous().transpose(0, 1) for one in sources]
    flipped = weights.transpose(1, 2).contiguous().transpose(1, 2)
    with ops.backend("triton", strict=True):
        assert torch.equal(mixed(flipped, *across), mixed(weights, *sources))
        cancel = torch.tensor([1 + 2**-10, -1.0, 0.0], device=weights.device)
        assert mixed(cancel, *[torch.ones_like(sources[0])] * 3).unique().tolist() == [2**-10]


def test_triton_mix_obeys_the_rules_of_a_torch_operator():
    from residua.ops.mix.triton import _mix

    weights, *sources = (one.requires_grad_() for one in tensors("lane", 2, 1, 5, 32))
    torch.library.opcheck(_mix, (weights, sources))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("streams", "outputs", "width"), [(4, 5, 96), (4, 1, 96), (3, 3, 24)])
def test_triton_remix_equals_reference(streams, outputs, width, dtype):
    wide = torch.promote_types(dtype, torch.float32)
    agree(ops.remix, draw(2, 5, streams, outputs, dtype=wide), draw(2, 5, streams, width, dtype=dtype, seed=1))


@pytest.mark.parametrize("width", [768, 1280])
def test_triton_remix_any_width(width):
    agree(ops.remix, draw(1, 3, 2, 3), draw(1, 3, 2, width, seed=1))


def test_triton_remix_transposed_weights():
    """As mHC passes them: a view."""
    weights, H = draw(1, 5, 4, 4), draw(1, 5, 4, 32, seed=1)
    agree(lambda w, h: ops.remix(w.transpose(-1, -2), h), weights, H)


def test_triton_remix_obeys_the_rules_of_a_torch_operator():
    from residua.ops.remix.triton import _remix

    torch.library.opcheck(_remix, (draw(1, 3, 2, 3).requires_grad_(), draw(1, 3, 2, 16, seed=1).requires_grad_()))
