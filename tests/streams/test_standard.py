"""The standard stream: the shared toy stack by hand, and post-norm as the original Transformer writes it."""

import pytest
import torch

import residua
from residua import Plan
from tests.streams.hand import BY, close, trace, vector
from tests.streams.harness import run_stream, toy_norms, toy_sublayers

TOY = [
    lambda x: x * vector(1, -1),
    lambda x: 2 * x,
    lambda x: x.flip(-1),
    lambda x: x,
]


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_standard_toy_stack_by_hand(norm, by):
    """Without norms pre and post are the same sum."""
    stream = residua.build(f"standard:norm={norm}", Plan.regular(2, 2))
    inputs, out = trace(stream, vector(1, 1), TOY, by=by)
    for (x,), expected in zip(inputs, [(1, 1), (2, 0), (6, 0), (6, 6)], strict=True):
        assert close(x, expected)
    assert close(out, (12, 12))


HALVED = {
    # h <- h + f(h / 2): the stream itself is never halved
    "pre": ([(0.5, 0.5), (0.75, 0.25), (1.5, 0.5), (1.75, 1.25)], (2.625, 1.875)),
    # h <- (h + f(h)) / 2, and the embedding halved before the first
    "post": ([(0.5, 0.5), (0.5, 0), (0.75, 0), (0.375, 0.375)], (0.375, 0.375)),
}


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("norm", HALVED)
def test_standard_norm_place_by_hand(norm, by):
    """A norm that halves shows where it stands."""
    stream = residua.build(f"standard:norm={norm}", Plan.regular(2, 2))
    inputs, out = trace(stream, vector(1, 1), TOY, [lambda x: x / 2] * 5, by=by)
    expected_inputs, expected = HALVED[norm]
    for (x,), one in zip(inputs, expected_inputs, strict=True):
        assert close(x, one)
    assert close(out, expected)


@pytest.mark.parametrize("layout", [("attn", "mlp"), ("mlp", "attn", "conv")], ids=",".join)
def test_standard_post_norm_is_the_original_transformer(layout):
    """norm(h + f(h)) after every sublayer, in the order of the paper, with the embedding normalised first."""
    generator = torch.Generator().manual_seed(0)
    plan = Plan.regular(8, 3, layout)
    sublayers, norms = toy_sublayers(plan, generator), toy_norms(plan, generator)
    x = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    h = norms[0](x)
    for f, norm in zip(sublayers, norms[1:], strict=True):
        h = norm(h + f(h))
    out = run_stream(residua.build("standard:norm=post", plan), x, sublayers, norms)
    assert torch.equal(out, h)


def test_standard_jacobian_contains_the_identity():
    """Sublayers that answer zero leave the stream as it was; post-norm has no such path."""
    plan = Plan.regular(4, 3)
    x = torch.randn(4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def stack(spec):
        zero, norms = [torch.zeros_like] * 6, [lambda one: one / 2] * 6 + [lambda one: one]
        return lambda e: run_stream(residua.build(spec, plan), e[None, None], zero, norms)[0, 0]

    identity = torch.eye(4, dtype=torch.float64)
    assert torch.equal(torch.func.jacrev(stack("standard"))(x), identity)
    assert torch.equal(torch.func.jacrev(stack("standard:norm=post"))(x), identity / 2**6)


@pytest.mark.parametrize(
    ("spec", "error", "cure"),
    [
        ("standard:norm=sandwich", ValueError, "norm takes pre|post"),
        ("standard:norm=true", ValueError, "norm takes pre|post"),
        ("standard:norms=post", TypeError, "did you mean 'norm'"),
        ("standard:eps=1e-6", TypeError, "options: norm"),
    ],
)
def test_standard_refusal_names_the_cure(spec, error, cure):
    with pytest.raises(error) as caught:
        residua.build(spec, Plan.regular(2, 2))
    assert cure in str(caught.value)
