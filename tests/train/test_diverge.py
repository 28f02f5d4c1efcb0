"""A run whose numbers break stops, names where it began, applies nothing and keeps its last checkpoint."""

from __future__ import annotations

import math

import pytest
import torch

import residua
from residua.lab.train import Diverged, Trainer
from residua.lab.train import checkpoint as checkpoints
from residua.lab.train.diverge import Seen, explain_gradient, explain_loss, owner, watch
from residua.lab.train.subject import stream_rms
from residua.model import Transformer
from tests.train.harness import run, toy_config, toy_tokens

HUGE = 3e38

# where a finite parameter is made so large that what follows overflows -> the site and the tensor that must be named
OVERFLOWS = {
    "embed.weight": ("l0_mlp", "read"),  # finite itself, normalised, and doubled by delta's first read
    "blocks.0.sublayers.0.v.weight": ("l0_attn", "output"),
    "blocks.1.sublayers.0.v.weight": ("l1_attn", "output"),
    "blocks.1.sublayers.1.up.weight": ("l1_mlp", "output"),
    "blocks.1.sublayers.1.norm.weight": ("l1_mlp", "normalised read"),
    "norm.weight": ("head", "normalised read"),
}


@pytest.mark.parametrize(("parameter", "place"), OVERFLOWS.items(), ids=OVERFLOWS)
def test_overflow_is_traced_to_the_site_it_began_at(parameter, place):
    trainer = Trainer(toy_config(), toy_tokens())
    with torch.no_grad():
        dict(trainer.model.named_parameters())[parameter].fill_(HUGE)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with pytest.raises(Diverged) as caught:
        trainer.update()
    assert caught.value.site == place[0]
    assert f"step 1: the loss is nan: first not finite is the {place[1]} of site {place[0]}" in str(caught.value)
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


@pytest.mark.parametrize(
    ("parameter", "site"),
    [
        ("embed.weight", "embed"),
        ("blocks.1.sublayers.0.q.weight", "l1_attn"),
        ("stream.at.l1_mlp.0.query.query", "l1_mlp"),
        ("norm.weight", "head"),
    ],
)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_parameter_is_named(parameter, site, bad):
    trainer = Trainer(toy_config(), toy_tokens())
    with torch.no_grad():
        dict(trainer.model.named_parameters())[parameter].view(-1)[0] = bad
    error = explain_loss(trainer.model, 5, math.nan, trainer.sampler.batches(0))
    assert error.site == site
    assert f"step 5: the loss is nan: parameter {parameter} (site {site}) is not finite" in str(error)


def test_broken_gradient_is_traced_to_the_one_nearest_the_loss():
    model = Transformer(toy_config().model(24))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for name in ("embed.weight", "blocks.0.sublayers.0.q.weight", "blocks.1.sublayers.0.k.weight"):
        dict(model.named_parameters())[name].grad[0] = math.nan
    error = explain_gradient(model, 3, math.nan, 1e5)
    assert error.site == "l1_attn"
    assert "gradient of blocks.1.sublayers.0.k.weight (site l1_attn) is not finite" in str(error)


def test_exploding_gradient_stops_and_names_the_largest(tmp_path):
    with pytest.raises(
        Diverged, match=r"step 1: the gradient exploded: its norm .* above explode=0.001, most .* \(site"
    ):
        run(tmp_path, toy_config(explode=1e-3))
    model = Transformer(toy_config().model(24))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    model.blocks[1].sublayers[1].down.weight.grad.fill_(1e9)
    error = explain_gradient(model, 3, 1e11, 1e5)
    assert error.site == "l1_mlp"
    assert "blocks.1.sublayers.1.down.weight" in str(error)


def test_diverged_run_keeps_its_last_checkpoint(tmp_path):
    config = toy_config(lr=1e30, warmup_share=0.0, save_every=1, clip=0.0)
    with pytest.raises(Diverged) as caught:
        run(tmp_path, config)
    assert caught.value.step > 1
    found, damaged = checkpoints.newest(tmp_path / "checkpoints")
    assert not damaged
    assert found.step == caught.value.step - 1
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize("design", residua.names())
def test_every_parameter_has_an_owner_among_the_sites(design):
    model = Transformer(toy_config(design=design, layout="swa:window=4,attn,mlp").model(24))
    places = {site.name for site in model.plan.readers} | {"embed"}
    for name, _ in model.named_parameters():
        assert owner(model, name) in places | ({"stream"} if name.startswith("stream.") else set()), name
    assert owner(model, "blocks.1.sublayers.2.up.weight") == "l1_mlp"


@pytest.mark.parametrize("design", residua.names())
def test_what_is_watched_is_the_forward_pass(design):
    config = toy_config(design=design, layout="swa:window=4,attn,mlp", tied=False)
    model = Transformer(config.model(24), seed=2)
    ids = torch.arange(20).reshape(2, 10)
    seen: list[Seen] = []
    watch(model, ids, seen.append)
    assert torch.equal(seen[-1].tensor, model(ids))
    assert [one.site for one in seen if one.what == "output"] == ["embed", *(site.name for site in model.plan.sites)]
    assert list(stream_rms(model, ids)) == [site.name for site in model.plan.readers]
