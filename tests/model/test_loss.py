"""`model(ids, targets=...)` is `token_loss` of the logits, without holding all of them."""

from importlib import import_module

import pytest
import torch

from residua import ops
from residua.model import ModelConfig, Transformer, token_loss
from residua.testing import assert_close

native = import_module("residua.ops.unembed_loss.native")  # the op has the name of its folder


def toy(**options):
    model = Transformer(ModelConfig(vocab=301, width=24, depth=2, heads=2, **options), seed=3)
    ids = torch.randint(301, (3, 20), generator=torch.Generator().manual_seed(0))
    targets = ids[:, 1:].clone()
    targets[1, 4:] = -100
    return model, ids[:, :-1], targets


def slopes(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"tied": False, "design": "delta", "qk_norm": True}], ids=["plain", "delta"])
def test_loss_and_gradients_are_those_of_the_logits(options, dtype, monkeypatch):
    monkeypatch.setattr(native, "STRETCH", 1)
    monkeypatch.setattr(native, "LEAST", 7)  # several stretches, and a last one of one row
    model, ids, targets = toy(**options)
    exact, model = model.double(), toy(**options)[0].to(dtype)
    exact.load_state_dict(model.state_dict())
    with ops.backend("reference"):
        expected = token_loss(exact(ids), targets)
        wanted = slopes(exact, expected)
    found = model(ids, targets=targets)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    if dtype is torch.bfloat16:  # the layers below round as they like
        assert abs(found.item() - expected.item()) < 0.05
        slopes(model, found)
        return
    assert_close(found.detach(), expected.detach())
    for name, slope in slopes(model, found).items():
        assert_close(slope, wanted[name], name, gradient=True)


def test_loss_of_nothing_is_zero():
    model, ids, targets = toy()
    loss = model(ids, targets=torch.full_like(targets, -100))
    assert loss.item() == 0
    assert all(not slope.any() for slope in slopes(model, loss).values())


def test_loss_without_gradients_is_the_same():
    model, ids, targets = toy()
    with torch.inference_mode():
        assert_close(model(ids, targets=targets), token_loss(model(ids).double(), targets))


@pytest.mark.parametrize("wrong", [301, -1])
def test_targets_outside_of_the_vocabulary_are_refused(wrong):
    model, ids, targets = toy()
    targets[0, 0] = wrong
    with pytest.raises(IndexError, match="outside of the vocabulary of 301"):
        model(ids, targets=targets)


def test_loss_under_autocast_is_that_of_narrow_logits():
    model, ids, targets = toy()
    with torch.autocast("cpu", torch.bfloat16):
        expected = token_loss(model(ids), targets)
        found = model(ids, targets=targets)
    torch.testing.assert_close(found, expected)


def test_not_a_number_reaches_the_loss():
    """A run that diverges must see it."""
    model, ids, targets = toy()
    with torch.no_grad():
        model.embed.weight[5] = torch.nan
    assert model(ids, targets=targets).isnan()


def test_logits_are_never_all_there():
    """The largest tensor that a loss makes is one stretch of logits, not all rows of them."""
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            made = function(*arguments, **(options or {}))
            seen.extend(one.numel() for one in (made if isinstance(made, list | tuple) else [made]) if one is not None)
            return made

    x, weight = torch.randn(1024, 4, requires_grad=True), torch.randn(4096, 4, requires_grad=True)
    with Watch():
        native._run(x.detach(), weight.detach(), torch.zeros(1024, dtype=torch.long), True, True)
    assert max(seen) == native.STRETCH < 1024 * 4096
