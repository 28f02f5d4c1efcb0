"""Highways: the six forms by hand, and their starts. (tests/hf holds two of them against released code.)"""

import math

import pytest
import torch

import residua
from residua import Plan
from residua.testing import Case, ids
from tests.streams.hand import BY, close, set_, trace, vector


def rms(x):
    return x / x.square().mean(-1, keepdim=True).sqrt()


def first(x):
    """f(x) = (2 x_0, 0)."""
    return x * vector(2, 0)


ONE_STEP = {
    # from (3, 4), with gains of 1 and no eps
    "form=beam,eps=0": (3.121320, 2.828427),
    "form=rezero": (3, 4),
    "form=rezero,start=1.0": (9, 4),
    "form=rezero,norm=pre,start=1.0": (4.697056, 4),
    "start=1.0": (4.697056, 4),
    "start=0.1": (3.169706, 4),
    "form=deepnorm,skip=2.0": (7.697056, 8),
}


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("options", ONE_STEP)
def test_highway_step_by_hand(options, by):
    stream = residua.build(f"highway:{options}", Plan.regular(2, 1, "mlp")).double()
    out = trace(stream, vector(3, 4), [first], [rms, lambda x: x], by=by).out
    assert close(out, ONE_STEP[options], 1e-6)


def test_muse_mixture_by_hand():
    """g = (.3, -.6), x = (3, 4) and a normed output of (2, -1)."""
    stream = residua.build("highway:form=muse", Plan.regular(2, 1, "mlp")).double()
    set_(stream, l0_mlp__gate=[0.3, -0.6])
    assert close(stream.part(stream.plan.site("l0_mlp")).mixed(vector(3, 4), vector(2, -1)), (3.509061, 3.852277), 1e-6)


@pytest.mark.parametrize("by", BY)
def test_muse_gate_keeps_the_variance(by):
    """g = 0: beta = 1/2 and alpha = sqrt(3)/2; (3, 4) and f = (2 x_0, 0), whose norm is (sqrt(2), 0)."""
    stream = residua.build("highway:form=muse,eps=0", Plan.regular(2, 1, "mlp")).double()
    out = trace(stream, vector(3, 4), [first], [rms, lambda x: x], by=by).out
    assert close(out, (3 * math.sqrt(0.75) + math.sqrt(0.5), 4 * math.sqrt(0.75)))


@pytest.mark.parametrize(("start", "skip", "write"), [(-30.0, 1, 0), (30.0, math.sqrt(1e-3), 1)])
def test_muse_gate_at_its_ends(start, skip, write):
    """Shut, the stream is left as it is, ReZero's start; open, a trickle of it remains."""
    stream = residua.build(f"highway:form=muse,start={start}", Plan.regular(2, 1)).double()
    for site in stream.plan.sites:
        alpha, beta = stream.part(site).weights()
        assert close(alpha, (skip, skip))
        assert close(beta, (write, write))


def test_only_the_direction_of_the_mlp_gain_of_muse_acts():
    stream = residua.build("highway:form=muse,eps=0", Plan.regular(4, 1)).double()
    attention, mlp = (stream.part(site) for site in stream.plan.sites)
    assert [name for name, _ in attention.named_parameters()] == ["gate"]
    h, y = torch.randn(2, 1, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before = mlp(h, y)
    with torch.no_grad():
        mlp.gain.mul_(7)
        assert close(mlp(h, y), before)
        mlp.gain[0] = 1
        assert not close(mlp(h, y), before, 1e-3)


@pytest.mark.parametrize(("depth", "start"), [(18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6)])
def test_layerscale_starts_by_depth(depth, start):
    stream = residua.build("highway", Plan.regular(2, depth))
    assert {value for p in stream.parameters() for value in p.tolist()} == {torch.tensor(start).item()}


def test_beam_weights_keep_the_variance_of_independent_terms():
    """After t - 1 sublayers every term, the embedding included, weighs 1 / sqrt(t)."""
    plan = Plan.regular(2, 4)
    stream = residua.build("highway:form=beam,eps=0", plan).double()
    outputs = [vector(math.sqrt(2), 0)] * 8  # of RMS 1
    out = trace(stream, vector(0, 1), [lambda x, y=y: y for y in outputs]).out
    assert close(out, (8 * math.sqrt(2) / 3, 1 / 3))


@pytest.mark.parametrize("spec", ["highway", "highway:form=rezero", "highway:form=rezero,norm=pre"])
def test_highway_enters_a_trained_network_as_it_is(spec):
    """With the options of a conversion, not one bit differs from the standard network."""
    name, options = residua.spec.parse(spec)
    entered = residua.design(name).entering(options)
    model = Case(residua.spec.render(name, entered)).model(moved=False)
    assert model.stream.starts == "standard"
    assert torch.equal(model(ids()), Case("standard").model(moved=False)(ids()))


def test_rezero_has_no_norms_but_the_last():
    model = Case("highway:form=rezero").model(moved=False)
    assert [name for name, _ in model.named_parameters() if "norm" in name] == ["norm.weight"]
    expected = model.logits(model.norm(model.embed(ids()))[0])
    assert torch.equal(model(ids()), expected)


@pytest.mark.parametrize(("form", "count"), [
    ("layerscale", 24 * 8), ("rezero", 24), ("deepnorm", 0), ("beam", 24 * 8), ("muse", 24 * 8 + 12 * 8),
])  # fmt: skip
def test_highway_parameter_count(form, count):
    stream = residua.build(f"highway:form={form}", Plan.regular(8, 12))
    assert sum(p.numel() for p in stream.parameters()) == count


def test_deepnorm_skip_fades_what_came_before():
    """Behind a norm, alpha h + f is h + f / alpha: the first of two sublayers weighs 1 / alpha of the second."""
    stream = residua.build("highway:form=deepnorm,skip=2.0", Plan.regular(2, 1)).double()
    out = trace(stream, vector(0, 0), [lambda x: vector(1, 0), lambda x: vector(0, 1)]).out
    assert close(out, (2, 1))


@pytest.mark.parametrize(
    ("spec", "error", "cure"),
    [
        ("highway:form=highway", ValueError, "form takes layerscale|rezero|deepnorm|muse|beam"),
        (
            "highway:form=beam,start=1.0",
            ValueError,
            "start belongs to form=layerscale|rezero|muse|gate; form=beam has none",
        ),
        ("highway:norm=pre", ValueError, "norm belongs to form=rezero"),
        ("highway:skip=2.0", ValueError, "skip belongs to form=deepnorm"),
        ("highway:form=beam,temperature=1.0", ValueError, "temperature belongs to form=muse"),
        ("highway:eps=1e-6", ValueError, "eps belongs to form=muse|beam"),
        ("highway:form=muse,temperature=0", ValueError, "temperature must be above 0"),
        ("highway:form=deepnorm,skip=1.0", ValueError, "a skip of 1 is the standard stream"),
        ("highway:forms=muse", TypeError, "did you mean 'form'"),
    ],
)
def test_highway_refusal_names_the_cure(spec, error, cure):
    with pytest.raises(error) as caught:
        residua.build(spec, Plan.regular(2, 2))
    assert cure in str(caught.value)


def test_highway_refuses_a_skip_that_leaves_float32():
    with pytest.raises(ValueError, match="past float32; use postnorm:form=deepnorm") as caught:
        residua.build("highway:form=deepnorm", Plan.regular(2, 24))
    assert "skip=2.37 or less" in str(caught.value)
    residua.build("highway:form=deepnorm,skip=2.37", Plan.regular(2, 24))
    residua.build("highway:form=deepnorm", Plan.regular(2, 20))


@pytest.mark.parametrize("by", BY)
def test_highway_gate_hand_value(by):
    """T = 1/4: (1 - T) (1, 2) + T (10, -4)."""
    stream = residua.build("highway:form=gate", Plan.regular(2, 1, "mlp")).double()
    set_(stream, l0_mlp__weight=[[0.0, 0.0], [1.0, -0.5]], l0_mlp__bias=[-math.log(3), -math.log(3)])
    out = trace(stream, vector(1, 2), [lambda x: vector(10, -4)], [lambda x: 1 / 0, lambda x: x], by=by).out
    assert close(out, (3.25, 0.5), 1e-12)
    assert stream.starts == "no"


def test_highway_gate_carries_at_first():
    stream = residua.build("highway:form=gate", Plan.regular(64, 1, "mlp"))
    (site, _) = stream.plan.readers
    h = torch.zeros(1, 1, 64)
    shown = stream.gates(h, site, stream.read(h, site, lambda *x: x))["transform"]
    assert torch.allclose(shown, torch.tensor(-2.0).sigmoid().expand(1, 1, 64))
    assert float(stream.part(site).weight.detach().std()) == pytest.approx(0.02, rel=0.05)
