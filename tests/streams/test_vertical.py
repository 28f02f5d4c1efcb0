"""Vertical Attention as reconstructed: its mixture by hand, and the ELC-BERT with which its reviewers identify it."""

import math

import pytest
import torch

import residua
from residua import Plan
from tests.streams.hand import BY, close, constant, set_, state_at, trace, vector
from tests.streams.harness import run_stream, toy_norms, toy_sublayers


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(
    ("norm", "sources", "x"),
    [
        ("rms", [(0.848528, 1.131371), (1, -1)], (0.886396, 0.598528)),
        ("l2", [(0.6, 0.8), (0.707107, -0.707107)], (0.626777, 0.423223)),
        ("layernorm", [(-1, 1), (1, -1)], (-0.5, 0.5)),
    ],
)
def test_vertical_mixture_by_hand(norm, sources, x, by):
    """H = [(3, 4), (1, -1)] and a = (ln 3, 0): weights 3/4 and 1/4 on the normalised outputs."""
    stream = residua.build(f"vertical:norm={norm},eps=0", Plan.regular(2, 2)).double()
    set_(stream, l1_attn__alpha=[math.log(3), 0])
    sublayers = [constant(1, -1), constant(0, 0), constant(1, 2), constant(0, 0)]
    assert close(trace(stream, vector(3, 4), sublayers, by=by).inputs[2][0], x, 1e-6)
    site = stream.plan.site("l1_attn")
    routing = stream.routing(state_at(stream, site.name, vector(3, 4), sublayers), site)
    assert close(routing.weights, (0.75, 0.25))
    for value, expected in zip(routing.values, sources, strict=True):
        assert close(value, expected, 1e-6)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(
    ("inner_residual", "expected"),
    [("false", (1.341641, -0.447214)), ("true", (1.414214, 0))],  # of (3, -1) and of (1, 1) + (3, -1)
)
def test_vertical_inner_residual_by_hand(inner_residual, expected, by):
    stream = residua.build(f"vertical:inner_residual={inner_residual},eps=0", Plan.regular(2, 1)).double()
    assert close(trace(stream, vector(2, 2), [constant(3, -1), constant(0, 0)], by=by).out, expected, 1e-6)


@pytest.mark.parametrize("by", BY)
def test_vertical_second_sublayer_reads_the_sum(by):
    """As in ELC-BERT normalized, the MLP is fed x + attention."""
    stream = residua.build("vertical:eps=0", Plan.regular(2, 1)).double()
    inputs, _ = trace(stream, vector(2, 2), [constant(3, -1), constant(1, 0)], by=by)
    assert close(inputs[1][0], (4, 0))


@pytest.mark.parametrize("by", BY)
def test_vertical_with_layer_norm_is_elc_normalized(by):
    """With the same weights: both normalise the embedding too."""
    generator = torch.Generator().manual_seed(0)
    plan = Plan.regular(8, 4)
    vertical = residua.build("vertical:norm=layernorm,eps=1e-5", plan).double()
    elc = residua.build("elc:variant=normalized,eps=1e-5", plan).double()
    with torch.no_grad():
        for mine, other in zip(vertical.parameters(), elc.parameters(), strict=True):
            mine.normal_(generator=generator)
            other.copy_(mine)
    sublayers, norms = toy_sublayers(plan, generator), toy_norms(plan, generator)
    x = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64)
    out = trace(vertical, x, sublayers, norms, by=by).out
    assert close(out, trace(elc, x, sublayers, norms).out.detach())


def test_vertical_starts_with_the_mean_of_unit_states():
    generator = torch.Generator().manual_seed(0)
    stream = residua.build("vertical:eps=0", Plan.regular(8, 3)).double()
    sublayers = toy_sublayers(stream.plan, generator)
    x = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64)
    inputs = trace(stream, x, sublayers).inputs
    for layer in range(1, 3):
        sources = state_at(stream, f"l{layer}_attn", x, sublayers).sources
        for H in sources:
            assert close(H.square().mean(-1), torch.ones(2, 3))
        assert close(inputs[2 * layer][0], sum(sources) / (layer + 1))


@pytest.mark.parametrize(("init", "newest"), [("zero", 1 / 12), ("last", math.e / (math.e + 11))])
def test_vertical_start_of_the_weights(init, newest):
    stream = residua.build(f"vertical:init={init}", Plan.regular(1, 12))
    weights = stream.part(stream.plan.site("l11_attn")).alpha.double().softmax(0)
    assert weights[-1].item() == pytest.approx(newest, abs=1e-12)
    assert len(set(weights[:-1].tolist())) == 1


def test_vertical_weights_ignore_the_input():
    """The reviews call them static: two inputs, one set of weights."""
    generator = torch.Generator().manual_seed(0)
    stream = residua.build("vertical:init=last", Plan.regular(4, 3)).double()
    sublayers = toy_sublayers(stream.plan, generator)
    site = stream.plan.site("l2_attn")
    one, two = (
        stream.weights(state_at(stream, site.name, x, sublayers), site)
        for x in torch.randn(2, 1, 3, 4, generator=generator, dtype=torch.float64)
    )
    assert torch.equal(one, two)
    assert close(one.sum(1), torch.ones(1, 1, 3, 1))


def test_vertical_parameter_count():
    """L(L+1)/2, less the first layer's, which a softmax holds at 1."""
    stream = residua.build("vertical", Plan.regular(4, 12))
    assert sum(p.numel() for p in stream.parameters()) == 77


@pytest.mark.parametrize("norm", ["rms", "l2", "layernorm"])
def test_vertical_survives_a_zero_output(norm):
    """A layer that answers zero has no direction: eps keeps the value and the gradient finite."""
    plan = Plan.regular(4, 2)
    stream = residua.build(f"vertical:norm={norm}", plan).double()
    x = torch.zeros(1, 2, 4, dtype=torch.float64, requires_grad=True)
    norms = toy_norms(plan, torch.Generator().manual_seed(0))
    out = run_stream(stream, x, [lambda x: 0 * x] * 4, norms)
    out.sum().backward()
    assert torch.equal(out, torch.zeros_like(out))
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("spec", "error", "cure"),
    [
        ("vertical:norm=max", ValueError, "norm takes rms|l2|layernorm"),
        ("vertical:init=one", ValueError, "init takes zero|last"),
        ("vertical:inner_residual=yes", ValueError, "inner_residual takes true|false"),
        ("vertical:eps=tiny", ValueError, "eps takes number"),
        ("vertical:residual=true", TypeError, "did you mean 'inner_residual'"),
        ("vertical:block=2", TypeError, "options: norm, inner_residual, init, eps"),
    ],
)
def test_vertical_refusal_names_the_cure(spec, error, cure):
    with pytest.raises(error) as caught:
        residua.build(spec, Plan.regular(2, 2))
    assert cure in str(caught.value)
