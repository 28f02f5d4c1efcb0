"""attend_qkv is scaled dot-product attention of every token over its own sources."""

import math

import pytest
import torch
from torch.nn import functional as F

from residua import ops


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stack(n, seed, d=8):
    return tuple(draw(n, 2, 3, d, seed=seed).unbind())


@pytest.mark.parametrize(
    ("query", "sources", "expected"),
    [
        # the hand values of short sliding-window attention over (0, 1, 2, 3), one query at a time
        (0.0, (0.0,), 0.0),
        (1.0, (0.0, 1.0), 0.73105858),
        (2.0, (1.0, 2.0), 1.88079708),
        (2.0, (0.0, 1.0, 2.0), 1.85093709),
        (3.0, (0.0, 1.0, 2.0, 3.0), 2.94762888),
        (0.0, (2.0, 3.0), 2.5),
    ],
)
def test_attend_qkv_hand_values(query, sources, expected):
    q, *u = (torch.full((1, 1, 1), one, dtype=torch.float64) for one in (query, *sources))
    assert abs(ops.attend_qkv(q, tuple(u), tuple(u)).item() - expected) < 5e-9


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_attend_qkv_equals_torch_attention_over_the_sources(n, heads):
    query, keys, values = draw(2, 3, 8), stack(n, 1), stack(n, 2)

    def split(x):  # [n, b, t, d] -> [b, t, head, n, e]
        return x.unflatten(-1, (heads, -1)).permute(1, 2, 3, 0, 4)

    expected = F.scaled_dot_product_attention(split(query[None]), split(torch.stack(keys)), split(torch.stack(values)))
    out = ops.attend_qkv(query, keys, values, heads=heads)
    assert (out - expected.squeeze(-2).flatten(-2)).abs().max() < 1e-13


def test_attend_qkv_one_source_is_its_value_and_moves_no_query():
    query, (key,), (value,) = draw(2, 3, 8).requires_grad_(), stack(1, 1), stack(1, 2)
    out = ops.attend_qkv(query, (key,), (value,))
    assert torch.equal(out, value)
    out.square().sum().backward()
    assert query.grad.abs().max() == 0


def test_attend_qkv_zero_query_is_the_mean():
    values = stack(4, 2)
    out = ops.attend_qkv(torch.zeros(2, 3, 8, dtype=torch.float64), stack(4, 1), values)
    assert (out - sum(values) / 4).abs().max() < 1e-14


def test_attend_qkv_order_of_sources_does_not_matter():
    query, keys, values = draw(2, 3, 8), stack(4, 1), stack(4, 2)
    order = (2, 0, 3, 1)
    moved = [keys[i] for i in order], [values[i] for i in order]
    before, after = (ops.attend_qkv_weights(query, k, heads=2) for k in (keys, tuple(moved[0])))
    assert (after - before[list(order)]).abs().max() < 1e-15
    plain, permuted = ops.attend_qkv(query, keys, values), ops.attend_qkv(query, tuple(moved[0]), tuple(moved[1]))
    assert (plain - permuted).abs().max() < 1e-14


def test_attend_qkv_heads_are_separate_slices():
    query, keys, values = draw(2, 3, 8), stack(3, 1), stack(3, 2)
    apart = [
        ops.attend_qkv(*(_cut(one, slice(4 * head, 4 * head + 4)) for one in (query, keys, values))) for head in (0, 1)
    ]
    assert (torch.cat(apart, -1) - ops.attend_qkv(query, keys, values, heads=2)).abs().max() < 1e-14


def _cut(x, part):
    return tuple(one[..., part] for one in x) if isinstance(x, tuple) else x[..., part]


def test_attend_qkv_weights_are_those_of_the_output():
    query, keys, values = draw(2, 3, 8), stack(3, 1), stack(3, 2)
    weights = ops.attend_qkv_weights(query, keys, heads=2)
    assert weights.shape == (3, 2, 3, 2)
    assert (weights.sum(0) - 1).abs().max() < 1e-14
    mixed = sum(w.repeat_interleave(4, -1) * v for w, v in zip(weights, values, strict=True))
    assert (mixed - ops.attend_qkv(query, keys, values, heads=2)).abs().max() < 1e-14


def test_attend_qkv_scale_is_the_width_of_a_head():
    # two sources whose logits differ by e / sqrt(e)
    e = 9
    one = torch.ones(1, 1, e, dtype=torch.float64)
    weights = ops.attend_qkv_weights(one, (0 * one, one))
    assert abs(weights[1].item() - 1 / (1 + math.exp(-3))) < 1e-14


def test_attend_qkv_narrow_types_are_added_up_in_float32():
    query, keys, values = (
        draw(2, 3, 8).bfloat16(),
        tuple(one.bfloat16() for one in stack(3, 1)),
        tuple(one.bfloat16() for one in stack(3, 2)),
    )
    out = ops.attend_qkv(query, keys, values)
    assert out.dtype == torch.bfloat16
    exact = ops.attend_qkv(query.double(), *(tuple(one.double() for one in x) for x in (keys, values)))
    assert ((out.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all()


def test_attend_qkv_gradcheck():
    leaves = [one.clone().requires_grad_() for one in (draw(2, 3, 4), *stack(3, 1, 4), *stack(3, 2, 4))]
    assert torch.autograd.gradcheck(lambda q, *u: ops.attend_qkv(q, u[:3], u[3:], heads=2), leaves)


def test_attend_qkv_no_tokens():
    empty = torch.zeros(2, 0, 8)
    assert ops.attend_qkv(empty, (empty, empty), (empty, empty), heads=2).shape == (2, 0, 8)
