"""ELC-BERT: its mixtures and its four bodies by hand, and what its softmax makes of the 1 on the newest layer."""

import math

import pytest
import torch

import residua
from residua import Plan
from tests.streams.hand import BY, close, constant, set_, state_at, trace, vector
from tests.streams.harness import compare, run_stream, toy_norms, toy_sublayers

VARIANTS = ("base", "zero", "normalized", "weighted")

# H = [(1, 0), (0, 1), (2, 2)] before layer 2: attention answers a constant, the rest nothing
SOURCES = [constant(0, 1), constant(0, 0), constant(2, 2), constant(0, 0), constant(0, 0), constant(0, 0)]


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(
    ("variant", "weights", "x"),
    [
        ("base", (0.211942, 0.211942, 0.576117), (1.364175, 1.364175)),
        ("zero", (1 / 3, 1 / 3, 1 / 3), (1, 1)),
        ("weighted", (1 / 3, 1 / 3, 1 / 3), (1, 1)),
    ],
)
def test_elc_mixture_by_hand(variant, weights, x, by):
    stream = residua.build(f"elc:embed=raw,variant={variant}", Plan.regular(2, 3)).double()
    assert close(trace(stream, vector(1, 0), SOURCES, by=by).inputs[4][0], x, 1e-6)
    site = stream.plan.site("l2_attn")
    assert close(stream.weights(state_at(stream, site.name, vector(1, 0), SOURCES), site), weights, 1e-6)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("variant=base", (4, 0)),
        ("variant=base,mlp_input=sum", (5, 0)),
        ("variant=zero", (5, 0)),
        ("variant=zero,mlp_input=attn", (4, 0)),
        ("variant=normalized,eps=0", (1, -1)),
        ("variant=normalized,mlp_input=attn,eps=0", (1, -1)),
        ("variant=weighted", (3, 0)),  # the mean of (1, 0) and (5, 0)
        ("variant=weighted,mlp_input=attn", (2.5, 0)),
    ],
)
def test_elc_body_by_hand(options, expected, by):
    """Att(z) = 2z, MLP(z) = z, x = (1, 0): only the base file leaves x out of what the MLP reads."""
    stream = residua.build(f"elc:embed=raw,{options}", Plan.regular(2, 1)).double()
    out = trace(stream, vector(1, 0), [lambda z: 2 * z, lambda z: z], by=by).out
    assert close(out, expected)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(("mlp_input", "fed"), [("attn", [2, 4]), ("sum", [3, 6])])
def test_elc_longer_layer_sums_its_outputs(mlp_input, fed, by):
    """With a third sublayer, H = all three outputs, and each reads what the earlier ones made."""
    stream = residua.build(f"elc:embed=raw,mlp_input={mlp_input}", Plan.regular(1, 1, ("attn", "mlp", "conv")))
    double, same = (lambda z: 2 * z), (lambda z: z)
    inputs, out = trace(stream.double(), vector(1), [double, same, same], by=by)
    assert [x.item() for (x,) in inputs] == [1, *fed]
    assert out.item() == 2 + sum(fed)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("variant", ["base", "zero"])
def test_elc_layer_output_leaves_x_out(variant, by):
    """Sublayers that answer zero make H zero: x is never added back."""
    stream = residua.build(f"elc:variant={variant}", Plan.regular(2, 2)).double()
    assert close(trace(stream, vector(3, 4), [torch.zeros_like] * 4, by=by).out, (0, 0))


@pytest.mark.parametrize(("sources", "weight"), [(2, 0.731059), (12, 0.198), (48, 0.055)])
def test_elc_base_newest_weight_is_far_from_one_hot(sources, weight):
    """The 1 stands before the softmax: e / (e + l) at layer l."""
    stream = residua.build("elc", Plan.regular(1, sources))
    alpha = stream.part(stream.plan.site(f"l{sources - 1}_attn")).alpha.double().softmax(0)
    assert len(alpha) == sources
    assert alpha[-1].item() == pytest.approx(math.e / (math.e + sources - 1), abs=1e-12)
    assert alpha[-1].item() == pytest.approx(weight, abs=5e-4)
    assert len(set(alpha[:-1].tolist())) == 1


@pytest.mark.parametrize("variant", ["zero", "normalized", "weighted"])
def test_elc_zero_reads_the_mean(variant):
    generator = torch.Generator().manual_seed(0)
    stream = residua.build(f"elc:variant={variant}", Plan.regular(8, 4)).double()
    sublayers = toy_sublayers(stream.plan, generator)
    x = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64)
    read = trace(stream, x, sublayers).inputs
    for layer in range(1, 4):
        state = state_at(stream, f"l{layer}_attn", x, sublayers)
        assert len(state.sources) == layer + 1
        assert close(read[2 * layer][0], sum(state.sources) / (layer + 1))


def test_elc_normalized_output_has_zero_mean_and_unit_variance():
    generator = torch.Generator().manual_seed(0)
    stream = residua.build("elc:variant=normalized,eps=0", Plan.regular(8, 3)).double()  # the embedding is too
    x = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64)
    outputs = state_at(stream, "head", x, toy_sublayers(stream.plan, generator)).sources
    assert len(outputs) == 4
    for H in outputs:
        assert close(H.mean(-1), torch.zeros(2, 3))
        assert close(H.var(-1, correction=0), torch.ones(2, 3))


@pytest.mark.parametrize("by", BY)
def test_elc_embedding_is_normalised_by_hand(by):
    """x = (3, 1) is (1, -1) behind a layer norm without gain; Att(z) = 2z, MLP(z) = z: 2 + 2 of it."""
    stream = residua.build("elc:eps=0", Plan.regular(2, 1)).double()
    assert close(trace(stream, vector(3, 1), [lambda z: 2 * z, lambda z: z], by=by).out, (4, -4))


@pytest.mark.parametrize(("variant", "count"), [(v, 90 if v == "weighted" else 77) for v in VARIANTS])
def test_elc_parameter_count(variant, count):
    """L(L+1)/2, and L+1 more for a weighted output; less the first layer's, which a softmax holds at 1."""
    stream = residua.build(f"elc:variant={variant}", Plan.regular(4, 12))
    assert sum(p.numel() for p in stream.parameters()) == count


@pytest.mark.parametrize("variant", VARIANTS)
def test_elc_does_not_start_as_the_standard_stream(variant):
    """x, about 1/(l+1) of the sum, is added to a whole attention output: no norm undoes that."""
    generator = torch.Generator().manual_seed(0)
    plan = Plan.regular(8, 3)
    sublayers, norms = toy_sublayers(plan, generator), toy_norms(plan, generator)
    x = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64)
    stream = residua.build(f"elc:variant={variant}", plan).double()
    standard = run_stream(residua.build("standard", plan), x, sublayers, norms)
    assert stream.starts == "no"
    assert (run_stream(stream, x, sublayers, norms) - standard).abs().max() > 0.1


@pytest.mark.parametrize("by", BY)
def test_elc_weighted_output_by_hand(by):
    """c = (ln 2, 0, ln 5) over (1, 0), (0, 1), (2, 2): weights 2/8, 1/8, 5/8."""
    stream = residua.build("elc:embed=raw,variant=weighted", Plan.regular(2, 2)).double()
    set_(stream, head__alpha=[math.log(2), 0, math.log(5)])
    assert close(trace(stream, vector(1, 0), SOURCES[:4], by=by).out, (12 / 8, 11 / 8))


def test_elc_body_default_follows_the_released_files():
    """Naming the default changes nothing; naming the other does."""
    for variant in VARIANTS:
        default, other = ("attn", "sum") if variant == "base" else ("sum", "attn")

        def out(spec):
            generator = torch.Generator().manual_seed(0)
            stream = residua.build(spec, Plan.regular(4, 2)).double()
            x = torch.randn(1, 2, 4, generator=generator, dtype=torch.float64)
            return trace(stream, x, toy_sublayers(stream.plan, generator)).out

        plain = out(f"elc:variant={variant}")
        assert torch.equal(plain, out(f"elc:variant={variant},mlp_input={default}"))
        assert not close(plain, out(f"elc:variant={variant},mlp_input={other}"), 1e-3)


def test_elc_equals_its_oracle_at_another_depth():
    assert max(compare("elc:variant=weighted", ("attn", "mlp"), depth=7).values()) < 1e-10


@pytest.mark.parametrize(
    ("spec", "error", "cure"),
    [
        ("elc:variant=last", ValueError, "variant takes base|zero|normalized|weighted"),
        ("elc:mlp_input=x", ValueError, "mlp_input takes attn|sum"),
        ("elc:eps=small", ValueError, "eps takes number"),
        ("elc:embed=raw,eps=0.1", ValueError, "variant=base with embed=raw has none of its own"),
        ("elc:variants=zero", TypeError, "did you mean 'variant'"),
        ("elc:block=2", TypeError, "options: variant, mlp_input, embed, eps"),
    ],
)
def test_elc_refusal_names_the_cure(spec, error, cure):
    with pytest.raises(error) as caught:
        residua.build(spec, Plan.regular(2, 2))
    assert cure in str(caught.value)
