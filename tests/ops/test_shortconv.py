"""shortconv is y[t] = sum_s taps[s] x[t - s]; conv_tail is what the tokens after x need of x."""

import pytest
import torch
from torch.nn import functional as F

from residua import ops


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def column(*numbers):
    """One channel: [1, t, 1]."""
    return torch.tensor(numbers, dtype=torch.float64)[None, :, None]


@pytest.mark.parametrize(
    ("tail", "expected"),
    [((0, 0), (1, 12, 123, 234)), ((8, 9), (891, 912, 123, 234))],
)
def test_shortconv_hand_values(tail, expected):
    # the digits of each result are its tokens, the newest last: taps[0] = 1 is on the token itself
    taps = torch.tensor([[1.0], [10.0], [100.0]], dtype=torch.float64)
    assert ops.shortconv(column(1, 2, 3, 4), column(*tail), taps).flatten().tolist() == list(expected)


@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
def test_shortconv_equals_the_depthwise_convolution(kernel):
    x, taps = draw(2, 7, 5), draw(kernel, 5, seed=1)
    # conv1d slides the newest tap last
    padded = F.pad(x.transpose(1, 2), (kernel - 1, 0))
    expected = F.conv1d(padded, taps.flip(0).T[:, None], groups=5).transpose(1, 2)
    out = ops.shortconv(x, x.new_zeros(2, kernel - 1, 5), taps)
    assert (out - expected).abs().max() < 1e-12


def test_shortconv_identity_taps_give_the_tokens_back():
    x, taps = draw(2, 7, 3, 5), torch.zeros(4, 3, 5, dtype=torch.float64)
    taps[0] = 1
    assert torch.equal(ops.shortconv(x, draw(2, 3, 3, 5), taps), x)


@pytest.mark.parametrize("kernel", [1, 2, 4])
@pytest.mark.parametrize("cuts", [(1, 1, 1, 1, 1, 1, 1), (1, 6), (2, 2, 3), (6, 1), (0, 7), (3, 0, 4)])
def test_shortconv_in_pieces_equals_whole(cuts, kernel):
    x, taps = draw(2, 7, 3, 5), draw(kernel, 3, 5, seed=1)
    start = x.new_zeros(2, kernel - 1, 3, 5)
    tail, pieces = start, []
    for piece in x.split(cuts, 1):
        pieces.append(ops.shortconv(piece, tail, taps))
        tail = ops.conv_tail(piece, tail)
        assert tail.shape == start.shape  # also after pieces shorter than the tail
    assert (torch.cat(pieces, 1) - ops.shortconv(x, start, taps)).abs().max() < 1e-12
    assert torch.equal(tail, torch.cat([start, x], 1)[:, 7:])


def test_shortconv_is_causal_and_short():
    x, taps, tail = draw(1, 8, 2), draw(3, 2, seed=1), torch.zeros(1, 2, 2, dtype=torch.float64)
    before = ops.shortconv(x, tail, taps)
    moved = x.clone()
    moved[:, 3] += 1
    changed = (ops.shortconv(moved, tail, taps) != before).any(-1)[0]
    assert changed.tolist() == [3 <= t < 6 for t in range(8)]


def test_shortconv_gradcheck():
    arguments = [draw(2, 4, 3).requires_grad_(), draw(2, 2, 3, seed=1).requires_grad_(), draw(3, 3).requires_grad_()]
    assert torch.autograd.gradcheck(ops.shortconv, arguments)


def test_shortconv_no_tokens():
    tail = draw(2, 3, 5)
    empty = draw(2, 0, 5)
    assert ops.shortconv(empty, tail, draw(4, 5)).shape == (2, 0, 5)
    assert torch.equal(ops.conv_tail(empty, tail), tail)


def test_attention_with_bias_alone_is_a_normalised_convolution():
    """W_Q = 0 and a bias of log c by distance: attention in a window is conv(c) / sum(c), once the window is full
    (before that, softmax renormalises and the convolution sees zeros)."""
    c, x = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64), torch.randn(2, 7, 4, dtype=torch.float64)
    distance = torch.arange(7)[:, None] - torch.arange(7)[None]
    bias = torch.where((distance >= 0) & (distance < 3), c.log()[distance.clamp(0, 2)], -torch.inf)
    attended = torch.nn.functional.scaled_dot_product_attention(torch.zeros_like(x), x, x, attn_mask=bias)
    convolved = ops.shortconv(x, x.new_zeros(2, 2, 4), c[:, None].expand(3, 4)) / c.sum()
    assert (attended - convolved)[:, 2:].abs().max() < 1e-12
    assert (attended - convolved)[:, :2].abs().max() > 1e-3
