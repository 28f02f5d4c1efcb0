"""The loss without one source, against a network in which that source was really taken away."""

from __future__ import annotations

import pytest
import torch

from residua.lab.diagnose import ablate_sources
from residua.model import token_loss
from residua.testing import Case, ids
from tests.diagnose.hosted import Hosted

TARGETS = ids().roll(-1, 1)


def loss_of(model):
    with torch.no_grad():
        return token_loss(model(ids()), TARGETS).item()


def without(model, change):
    """The loss with parameters changed for the moment."""
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        change()
    try:
        return loss_of(model)
    finally:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(kept[name])


def test_ablation_of_denseformer_is_its_weight_at_zero():
    """The read is the stream there, so that the shortcut must lose the source too."""
    model = Case("denseformer").model()
    found = ablate_sources(model, ids(), TARGETS)
    assert found.loss == pytest.approx(loss_of(model), abs=0)
    assert list(found.change) == ["l1_attn", "l2_attn", "head"]
    for name, sources in found.change.items():
        alpha = model.stream.at[name].alpha
        for place, (source, gap) in enumerate(sources.items()):
            expected = without(model, lambda alpha=alpha, place=place: alpha[place].zero_()) - found.loss
            assert gap == pytest.approx(expected, abs=1e-12), (name, source)
            assert abs(gap) > 1e-6


def test_ablation_of_dca_is_its_bias_at_zero_in_every_lane():
    model = Case("dca:grn=v1").model()
    found = ablate_sources(model, ids(), TARGETS)
    for name, sources in found.change.items():
        part = model.stream.at[name]
        for place, (source, gap) in enumerate(sources.items()):

            def change(part=part, place=place):
                for grn in part:
                    grn.bias[place] = 0.0

            assert gap == pytest.approx(without(model, change) - found.loss, abs=1e-12), (name, source)


@pytest.mark.parametrize(
    "spec", ["attnres:heads=2", "delta:gate=vector,value_lane=true", "depthswa:enter=add", "hyper"]
)
def test_ablation_reads_the_rest_with_the_weights_unchanged(spec):
    """Where the shortcut is not the read: the same forward by hand, with the mixture added up without one source."""
    model = Case(spec).model()
    stream, context = model.stream, model.context(ids())
    found = ablate_sources(model, ids(), TARGETS, sites=["l1_attn"])
    assert list(found.change) == ["l1_attn"]
    for lost, gap in enumerate(found.change["l1_attn"].values()):
        with torch.no_grad():
            state = stream.open(model.embed(ids()))
            for sublayer in model.sublayers():
                read = stream.read(state, sublayer.site, sublayer.norm)
                if sublayer.site.name == "l1_attn":
                    routing = stream.routing(state, sublayer.site)
                    weights = routing.weights.clone()
                    weights[:, lost] = 0.0
                    read = read._replace(lanes=sublayer.norm(*routing._replace(weights=weights).mixed()))
                state = stream.write(state, sublayer.site, read, sublayer(*read.lanes, context=context))
            (x,) = stream.read(state, model.plan.head, model.norm).lanes
            expected = token_loss(x @ model.embed.weight.T, TARGETS).item() - found.loss
        assert gap == pytest.approx(expected, abs=1e-12)
        assert abs(gap) > 1e-6


def test_ablation_of_a_source_without_weight_changes_nothing():
    model = Case("denseformer").model(moved=False)  # one-hot on the newest
    found = ablate_sources(model, ids(), TARGETS)
    for sources in found.change.values():
        *old, newest = sources.values()
        assert old == [0.0] * len(old)
        assert newest != 0.0


def test_ablation_of_a_hosted_model_is_that_of_ours():
    hosted = Hosted("attnres")
    assert ablate_sources(hosted, ids(), TARGETS) == ablate_sources(hosted.inner, ids(), TARGETS)


def test_ablation_leaves_the_model_as_it_was():
    model = Case("attnres").model()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    ablate_sources(model, ids(), TARGETS, mask=torch.ones_like(ids(), dtype=torch.bool), sites=["head"])
    assert [module.training for module in model.modules()] == modes
    assert "read" not in vars(model.stream)
    with pytest.raises(IndexError):
        ablate_sources(model, torch.tensor([[99]]), torch.tensor([[0]]))
    assert [module.training for module in model.modules()] == modes


def test_ablation_refuses_a_site_that_mixes_nothing():
    with pytest.raises(ValueError, match="mixes no sources at 'l0_attn'"):
        ablate_sources(Case("attnres").model(), ids(), TARGETS, sites=["l0_attn"])
    assert ablate_sources(Case("standard").model(), ids(), TARGETS).change == {}


def test_ablation_table_lists_the_dearest_first():
    found = ablate_sources(Case("attnres").model(), ids(), TARGETS)
    changes = [float(line.split()[-1]) for line in found.table().splitlines()[2:]]
    assert changes == sorted(changes, reverse=True)
    assert len(changes) == 2 + 3 + 4 + 5 + 6 + 7
    assert found.summary()["change"] == found.change
