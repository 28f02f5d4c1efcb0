"""gated: the hand values of Qwen's gated residual, its start, its norms and its gates."""

import pytest
import torch
from torch.nn import functional as F

import residua
from residua import Plan
from residua.hf.defaults import entry
from residua.model import ModelConfig, Transformer
from residua.model.norms import NoNorm
from tests.streams.harness import toy_sublayers


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def built(spec="gated:streams=2,rank=1,eps=0", width=2, depth=2, layout=("mlp",)):
    return residua.build(spec, Plan.regular(width, depth, layout)).double()


def refused(*lanes):
    raise AssertionError("a design that owns its norm has called the backbone's")


def near(found, expected, tolerance=1e-6):
    expected = tensor(expected)
    return (found.detach().reshape(expected.shape) - expected).abs().max() < tolerance


@torch.no_grad()
def settle(part, down=(0, 0, 0, 0), up=(0, 0, 0, 0), inject=((0, 0, 0, 0), (0, 0, 0, 0))):
    part.down.copy_(tensor([down]))
    part.up.copy_(tensor([up]).T)
    if part.writes:
        part.inject.copy_(tensor(inject))


R = tensor([[[[3.0, 4.0], [1.0, -1.0]]]])
HAND = {"down": (1, 0, 0, 1), "up": (1, 0, -1, 2), "inject": ((0.5, 0, 0, 0), (0, 1, 0, 0))}


def test_gated_without_maps_halves_the_normed_streams():
    stream = built()
    for site in stream.plan.readers:
        settle(stream.part(site))
        assert near(stream.read(R, site, refused).lanes[0], [0.462132, 0.032843])
    _, inject = stream.read(R, stream.plan.sites[0], refused).carry
    assert near(inject, [1.0, 1.0], 1e-15)


def test_gated_hand_values():
    stream = built()
    site = stream.plan.sites[1]
    settle(stream.part(site), **HAND)
    mixed = stream.part(site)(R)
    # sigmoid(-0.036437) is 0.490892 and sigmoid(-2 * 0.036437) 0.481791: row 3 of W_up is 2
    assert near(mixed.gates, [[0.490892, 0.5], [0.509108, 0.481791]])
    assert near(mixed.inject, [1.105670, 1.275534])
    read = stream.read(R, site, refused)
    assert near(read.lanes[0], [0.462822, 0.041947])
    after = stream.write(R, site, read, 10 * read.lanes[0])
    assert near(after, [[8.117282, 4.463799], [6.903450, -0.464947]], 2e-6)


def test_gated_head_reads_as_a_site_does_and_writes_nothing():
    stream = built()
    settle(stream.part(stream.plan.head), HAND["down"], HAND["up"])
    read = stream.read(R, stream.plan.head, refused)
    assert near(read.lanes[0], [0.462822, 0.041947])
    assert read.carry == ()
    assert "at.head.inject" not in stream.state_dict()


def test_gated_gain_is_one_and_a_weight():
    stream = built()
    site = stream.plan.sites[0]
    settle(stream.part(site))
    with torch.no_grad():
        stream.part(site).gain.copy_(tensor([[1.0, 0.0], [0.0, -1.0]]))
    normed = R / R.square().mean(-1, keepdim=True).sqrt()
    gains = tensor([[2.0, 1.0], [1.0, 0.0]])
    assert near(stream.read(R, site, refused).lanes[0], (normed * gains).mean(-2).div(2).flatten().tolist(), 1e-12)


def test_gated_with_maps_of_zero_is_the_standard_network_with_half_its_gains():
    plan, generator = Plan.regular(8, 3), torch.Generator().manual_seed(0)
    stream = residua.build("gated", plan).double()
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter.zero_()
    sublayers = toy_sublayers(plan, generator)
    h = x = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    state = stream.open(x)
    for site in plan.sites:
        h = h + sublayers[site.index](F.rms_norm(h, (8,), eps=1e-6) / 2)
        state = stream(state, site, refused, sublayers[site.index])
    assert (state - h[..., None, :]).abs().max() < 1e-13
    assert (stream.read(state, plan.head, refused).lanes[0] - F.rms_norm(h, (8,), eps=1e-6) / 2).abs().max() < 1e-13


def test_gated_weighs_every_channel():
    stream = built("gated", width=16, depth=1, layout=("attn", "mlp"))
    state = stream.open(torch.randn(2, 5, 16, dtype=torch.float64))
    for site in stream.plan.readers:
        assert stream.sources(site) == ("stream0", "stream1", "stream2", "stream3")
        weights = stream.weights(state, site)
        assert weights.shape == (1, 4, 2, 5, 16)
        assert weights.min() > 0
        assert weights.max() < 1 / 4


def test_gated_model_has_no_norms():
    model = Transformer(ModelConfig(vocab=7, width=16, depth=2, heads=2, design="gated"))
    assert isinstance(model.norm, NoNorm)
    assert not any("norm" in name for name, _ in model.named_parameters() if not name.startswith("stream."))


@pytest.mark.parametrize(("spec", "width", "rank"), [("gated", 64, 8), ("gated", 4, 1), ("gated:rank=5", 4, 5)])
def test_gated_rank_and_parameters(spec, width, rank):
    n, stream = 4, built(spec, width=width)
    counts = [sum(p.numel() for p in stream.part(site).parameters()) for site in stream.plan.readers]
    site = 2 * n * width * rank + n * n * width + n * width
    assert counts == [site, site, site - n * n * width]


def test_gated_starts_with_maps_that_tell_the_streams_apart():
    part = built("gated", width=64).part(Plan.regular(64, 2, ("mlp",)).sites[0])
    assert part.gain.abs().max() == 0
    for name in ("down", "up", "inject"):
        assert getattr(part, name).std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(
    ("options", "cure"),
    [("streams=0", "at least 1"), ("rank=0", "at least 1"), ("eps=1", "below 1"), ("streams=two", "whole number")],
)
def test_gated_refuses(options, cure):
    with pytest.raises(ValueError, match=cure):
        built(f"gated:{options}")


def test_gated_cannot_enter_a_trained_network():
    with pytest.raises(ValueError, match="trained gains would be lost"):
        entry("gated", Plan.regular(16, 2))
