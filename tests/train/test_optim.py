"""Every parameter in one group, and each group updated as the table in `optim` says."""

from __future__ import annotations

import pytest
import torch

import residua
from residua.lab.train.optim import Optimizers, group_of
from residua.model import Transformer
from residua.model.sublayers import Attention
from residua.testing import specs
from tests.train.harness import toy_config

LAYOUT = "conv,attn,canon,swa:window=4,mlp"


def build(**changes):
    config = toy_config(**({"layout": LAYOUT, "qk_norm": True, "tied": False} | changes))
    return config, Transformer(config.model(30), seed=1)


def give_gradients(model, scale=1.0):
    draw = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=draw)


@pytest.mark.parametrize("spec", [spec for name in residua.names() for spec in specs(name)])
def test_groups_hold_every_parameter_once(spec):
    config, model = build(design=spec)
    groups = group_of(model)
    assert set(groups) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        part = name.rsplit(".", 2)[-2]
        if name.startswith("stream."):
            assert groups[name] == "stream"
        elif part.endswith("norm") or part == "embed" or name.endswith(".taps"):
            assert groups[name] == "plain"
        else:
            assert groups[name] == ("head" if name == "head.weight" else "matrices")
            assert parameter.ndim == 2
    sizes = Optimizers(config, model).sizes
    assert sum(sizes.values()) == sum(p.numel() for p in model.parameters())
    assert sizes["stream"] == sum(p.numel() for p in model.stream.parameters())


def test_groups_refuse_a_kind_of_parameter_without_a_rule():
    _, model = build()
    attention = next(module for module in model.modules() if isinstance(module, Attention))
    attention.temperature = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(TypeError, match=r"no optimizer group for blocks\.0\.sublayers\.1\.temperature of a Attention"):
        group_of(model)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_groups_have_their_own_rate_and_decay(optimizer):
    config, model = build(optimizer=optimizer, lr=1e-2, residual_lr=3e-2, weight_decay=0.5)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizers, groups = Optimizers(config, model), group_of(model)
    give_gradients(model, 0.0)
    optimizers.step(0.5)
    for name, parameter in model.named_parameters():
        shrunk = 1 - 0.5e-2 * 0.5 if groups[name] in ("matrices", "head") else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * shrunk, rtol=1e-6, atol=0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    give_gradients(model)
    Optimizers(toy_config(**config.to_json() | {"weight_decay": 0.0}), model).step(1.0)
    for name, parameter in model.named_parameters():
        moved = (parameter.detach() - before[name]).abs()
        if optimizer == "adamw" or groups[name] != "matrices":  # the first step of Adam is the rate in every entry
            rate = 3e-2 if groups[name] == "stream" else 1e-2
            torch.testing.assert_close(moved, torch.full_like(moved, rate), rtol=1e-3, atol=0)


def test_muon_moves_matrices_along_orthogonal_updates_and_nothing_else():
    config, model = build(optimizer="muon", weight_decay=0.0)
    optimizers = Optimizers(config, model)
    (muon,) = (one for one in optimizers.all if isinstance(one, torch.optim.Muon))
    held = {optimizers.names[p] for group in muon.param_groups for p in group["params"]}
    assert held == {name for name, group in group_of(model).items() if group == "matrices"}
    assert not any(name.startswith(("stream.", "embed", "head", "norm")) for name in held)
    name = next(name for name in sorted(held) if name.endswith(".q.weight"))
    weight = dict(model.named_parameters())[name]
    before = weight.detach().clone()
    give_gradients(model)
    optimizers.step(1.0)
    values = torch.linalg.svdvals(weight.detach() - before)
    assert values.max() < 2.5 * values.min()  # of the random gradient itself: more than a hundred


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_optimizer_state_survives_tensors(optimizer):
    config, model = build(optimizer=optimizer)
    _, twin = build(optimizer=optimizer)
    one, two = Optimizers(config, model), Optimizers(config, twin)
    for _ in range(3):
        give_gradients(model)
        one.step(1.0)
    assert any(key.endswith("/step") for key in one.tensors())
    twin.load_state_dict(model.state_dict())
    two.load(one.tensors())
    for each, optimizers in ((model, one), (twin, two)):
        give_gradients(each, 0.3)
        optimizers.step(0.5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert all(torch.equal(value, two.tensors()[key]) for key, value in one.tensors().items())


def test_optimizer_state_of_another_model_is_refused():
    config, model = build()
    with pytest.raises(ValueError, match=r"parameters this model has not: gone\.weight"):
        Optimizers(config, model).load({"gone.weight/exp_avg": torch.zeros(1)})
