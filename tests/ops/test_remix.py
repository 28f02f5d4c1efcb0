"""remix is out_m = sum_s weights[s, m] H_s: parallel streams recombined."""

import pytest
import torch

from residua import ops


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_remix_hand_values(backend):
    # A_r' H of Hyper-Connections: H = [[1, 2], [3, 4]], A_r = [[1, .5], [0, 1]] sends half of stream 0 to stream 1
    H = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]], dtype=torch.float64)
    weights = torch.tensor([[[[1.0, 0.5], [0.0, 1.0]]]], dtype=torch.float64)
    with ops.backend(backend):
        assert ops.remix(weights, H)[0, 0].tolist() == [[1.0, 2.0], [3.5, 5.0]]


def test_remix_equals_its_loop():
    weights, H = draw(2, 3, 4, 5), draw(2, 3, 4, 6, seed=1)
    out = ops.remix(weights, H)
    for m in range(5):
        expected = sum(weights[:, :, s, m, None] * H[:, :, s] for s in range(4))
        assert (out[:, :, m] - expected).abs().max() < 1e-13


def test_remix_with_the_identity_gives_the_streams_back():
    H = draw(2, 3, 4, 6)
    assert torch.equal(ops.remix(torch.eye(4, dtype=torch.float64).expand(2, 3, 4, 4), H), H)


def test_remix_composes_like_matrices():
    first, second, H = draw(2, 3, 4, 4), draw(2, 3, 4, 4, seed=1), draw(2, 3, 4, 6, seed=2)
    assert (ops.remix(second, ops.remix(first, H)) - ops.remix(first @ second, H)).abs().max() < 1e-12


def test_remix_narrow_types_are_added_up_in_float32():
    weights, H = draw(2, 3, 4, 4).float(), draw(2, 3, 4, 6).bfloat16()
    out = ops.remix(weights, H)
    assert out.dtype == torch.bfloat16
    exact = ops.remix(weights.double(), H.double())
    assert ((out.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all()


def test_remix_gradcheck():
    arguments = [draw(2, 3, 4, 2).requires_grad_(), draw(2, 3, 4, 3, seed=1).requires_grad_()]
    assert torch.autograd.gradcheck(ops.remix, arguments)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_remix_onto_adds_to_streams_that_lie_beside_others(backend):
    wide = draw(2, 3, 5, 7).requires_grad_()
    weights, y = draw(2, 3, 1, 4, seed=1).requires_grad_(), draw(2, 3, 1, 7, seed=2).requires_grad_()
    with ops.backend(backend):
        written = ops.remix(weights, y, onto=wide[..., 1:, :])
    expected = wide[..., 1:, :] + weights.mT * y
    assert (written - expected).abs().max() < 1e-12
    inputs, slope = (wide, weights, y), draw(2, 3, 4, 7, seed=3)
    made = torch.autograd.grad(written, inputs, slope)
    for found, want in zip(made, torch.autograd.grad(expected, inputs, slope), strict=True):
        assert (found - want).abs().max() < 1e-12


def test_remix_no_tokens():
    assert ops.remix(draw(2, 0, 4, 5), draw(2, 0, 4, 6)).shape == (2, 0, 5, 6)
