"""What a source adds to a logit, against models from which it was really taken away."""

from __future__ import annotations

import pytest
import torch

from residua.lab.diagnose.ablate import Without
from residua.lab.diagnose.paths import attribute
from residua.runner import observed
from residua.testing import Case, ids
from tests.diagnose.hosted import Hosted

IDS = ids(rows=1)
TARGETS = IDS[0].roll(-1)


def logits_without(model, site, place, share=1.0):
    stream = model.stream
    (at,) = [each for each in stream.plan.readers if each.name == site]
    with torch.no_grad(), observed(stream, Without(stream, at, place, share)):
        return model(IDS)[0].gather(1, TARGETS[:, None])[:, 0]


@pytest.mark.parametrize("spec", ["attnres:heads=2", "denseformer", "mudd", "dca", "attnres:blocks=2"])
def test_parts_of_the_head_are_the_logit_and_what_ablation_takes_from_it(spec):
    """The model without a source norms what is left anew: its logit is the rest of the sum, at the other scale."""
    model = Case(spec).model()
    found = attribute(model, IDS, TARGETS)
    assert found.exact
    with torch.no_grad():
        expected = model(IDS)[0].gather(1, TARGETS[:, None])[:, 0]
    assert torch.allclose(found.logits, expected, atol=1e-12)
    head = found.parts["head"]
    assert torch.allclose(head.sum(0) + found.rest, expected, atol=1e-10)
    assert len(head) == len(found.sources["head"]) == len(model.stream.sources(model.plan.head))
    *_, last = model.walk(IDS)
    routing, raw = model.stream.routing(last.state, model.plan.head), last.lanes[0][0]
    eps = model.norm.eps
    for place, part in enumerate(head):
        weights = routing.weights[0, place].repeat_interleave(raw.shape[-1] // routing.weights.shape[-1], -1)
        left = raw - (routing.scale * weights * routing.values[place])[0]
        scales = [(each.square().mean(-1) + eps).sqrt() for each in (raw, left)]
        without = (expected - part) * scales[0] / scales[1]
        assert torch.allclose(without, logits_without(model, "head", place), atol=1e-9), place


@pytest.mark.parametrize(
    "spec",
    ["attnres:heads=2", "denseformer", "mudd", "hyper", "delta:blocks=2,value_lane=true", "delta:gate=vector,block=3"],
)
def test_parts_of_other_reads_are_the_slope_of_the_ablation(spec):
    """Of the logit, as a share of the source is taken away: by differences of two forwards on either side."""
    model = Case(spec).model()
    found = attribute(model, IDS, TARGETS)
    step, compared = 1e-5, 0
    for site, parts in found.parts.items():
        if site == "head":
            continue
        for place, part in enumerate(parts):
            ends = [logits_without(model, site, place, share) for share in (-step, step)]
            assert torch.allclose(part, (ends[0] - ends[1]) / (2 * step), atol=1e-7), (site, place)
            compared += 1
    assert compared >= 5


def test_attribution_of_a_hosted_model_is_that_of_ours_and_leaves_it_as_it_was():
    hosted = Hosted("attnres")
    hosted.inner.blocks[0].eval()
    modes = [module.training for module in hosted.modules()]
    theirs, ours = attribute(hosted, IDS, TARGETS), attribute(hosted.inner, IDS, TARGETS)
    assert [module.training for module in hosted.modules()] == modes
    assert all(parameter.grad is None for parameter in hosted.parameters())
    assert theirs.exact
    for site, parts in ours.parts.items():
        assert torch.allclose(theirs.parts[site], parts, atol=1e-12)


def test_attribution_says_where_its_sum_is_not_the_logit():
    """A final norm that is no gain over a scale."""
    model = Case("attnres").model()
    model.norm.forward = lambda *lanes: tuple(torch.tanh(lane) for lane in lanes)
    assert not attribute(model, IDS, TARGETS).exact


def test_attribution_of_a_design_without_sources_is_the_logit_alone():
    found = attribute(Case("standard").model(), IDS, TARGETS)
    assert found.parts == {}
    assert torch.equal(found.rest, found.logits)
    with pytest.raises(ValueError, match="a target for each"):
        attribute(Case("attnres").model(), IDS, TARGETS[:-1])
