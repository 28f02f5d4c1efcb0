"""What surrounds a call changes nothing: the default device, a tracer, batched gradients, autocast, odd companions."""

import subprocess
import sys
import warnings

import pytest
import torch

from residua import ops
from residua.model import ModelConfig, Transformer
from residua.ops import _backend
from residua.runner import Execution, Runner, observed
from residua.testing import Case

DESIGNS = ("standard", "delta", "mhc", "ddl", "attnres:blocks=2", "denseformer")


def model(design="standard", layout="attn,mlp"):
    return Transformer(ModelConfig(vocab=50, width=32, depth=2, heads=4, design=design, layout=layout), seed=0)


IDS = torch.arange(16)[None]


@pytest.mark.slow
def test_default_device_is_not_that_of_results():
    """In a process of its own: a wrong address would end it."""
    code = """
import torch
from residua.model import ModelConfig, Transformer, token_loss
for design in ("standard", "delta", "mhc", "ddl", "attnres"):
    layout = "swa:window=4,attn,mlp"
    model = Transformer(ModelConfig(vocab=50, width=32, depth=2, heads=4, design=design, layout=layout))
    ids = torch.arange(16)[None]
    torch.set_default_device("meta")
    loss = token_loss(model(ids), ids)
    loss.backward()
    assert loss.device.type == "cpu", loss.device
    torch.set_default_device("cpu")
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


@pytest.mark.parametrize("design", DESIGNS)
def test_traced_model_computes(design):
    traced_from, asked = IDS, (IDS * 3) % 50
    one = model(design)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(one, (traced_from,), check_trace=False)
        assert torch.allclose(traced(asked), one(asked), atol=1e-5)


def test_window_attend_with_a_smaller_v_is_that_of_the_reference():
    q, k = torch.randn(2, 4, 100, 8), torch.randn(2, 4, 100, 8)
    for other in (torch.randn(2, 2, 100, 8), torch.randn(1, 4, 100, 8), k.double()):
        answers = []
        for name in ("auto", "reference"):
            with ops.backend(name):
                try:
                    answers.append(ops.window_attend(q, k, other, window=7))
                except (RuntimeError, ValueError) as error:
                    answers.append(type(error))
        assert answers[0] is answers[1] or torch.equal(*answers)


@pytest.mark.parametrize("op", ["cached_attend", "attention_step"])
def test_rotation_of_every_row_is_that_of_the_reference(op):
    draw = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=draw)

    keys, values, angles = random(2, 2, 10, 8), random(2, 2, 10, 8), random(2, 1, 4)
    inputs = (random(2, 1, 32), random(2, 1, 16), random(2, 1, 16))
    weights = random(32, 24), random(16, 24), random(16, 24), random(24, 32)
    x = random(2, 1, 24)

    def run(name, angles):
        rotation, cache = (angles.cos(), angles.sin()), (keys.clone(), values.clone())
        with torch.no_grad(), ops.backend(name):
            if op == "cached_attend":
                return ops.cached_attend(*inputs, rotation, *cache, 4)
            return ops.attention_step((x,), weights, rotation, *cache, 4)

    assert torch.allclose(run("auto", angles), run("reference", angles), atol=1e-4)
    with pytest.raises(RuntimeError):
        run("auto", angles[:1, :, :2])


def test_reads_made_ahead_are_not_used_for_another_state():
    one = Transformer(ModelConfig(vocab=50, width=32, depth=4, heads=4, design="delta:blocks=2"), seed=0)
    for parameter in one.stream.parameters():
        parameter.data.normal_(generator=torch.Generator().manual_seed(1))

    def head(execution, at):
        seen = 0

        def halved(flow):
            nonlocal seen
            seen += 1
            if seen != at:
                return flow
            return flow._replace(state=flow.state._replace(sources=tuple(0.5 * s for s in flow.state.sources)))

        *_, last = one.walk(IDS, Runner(one.stream, execution), between=halved)
        return last.read.lanes[0]

    for graded in (True, False):
        with torch.set_grad_enabled(graded):
            for at in range(1, 10):
                assert torch.allclose(head(Execution(), at), head(Execution(group=0), at), atol=1e-5), (graded, at)


def test_weights_keep_the_gradient_of_a_null():
    query, sources = torch.randn(8), tuple(torch.randn(1, 3, 8) for _ in range(3))
    null = torch.zeros(1, requires_grad=True)
    assert ops.attend_weights(query, sources, null=null).requires_grad


@pytest.mark.parametrize("design", DESIGNS)
def test_batched_gradients_are_those_one_by_one(design):
    one = model(design)
    out = one(IDS)
    parameters = [p for p in one.parameters() if p.requires_grad]
    draws = torch.randn(3, *out.shape)
    together = torch.autograd.grad(out, parameters, draws, is_grads_batched=True, retain_graph=True, allow_unused=True)
    for place, draw in enumerate(draws):
        alone = torch.autograd.grad(out, parameters, draw, retain_graph=True, allow_unused=True)
        for many, single in zip(together, alone, strict=True):
            if single is not None:
                assert torch.allclose(many[place], single, atol=1e-4, rtol=1e-3)


def test_backward_of_a_window_inside_autocast_is_exact():
    inputs = [torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(3)]
    out = ops.window_attend(*inputs, window=5)
    gradient = torch.randn_like(out)
    right = torch.autograd.grad(out, inputs, gradient, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.autograd.grad(out, inputs, gradient)
    assert all(torch.equal(one, two) for one, two in zip(right, inside, strict=True))


def test_one_warning_serves_all_sizes(monkeypatch):
    monkeypatch.setattr(_backend, "_said", set())
    monkeypatch.setattr(_backend, "_strict", False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for size in (3, 40, 500):
            _backend.fall_back("mix", f"cpu: {size} numbers")
        _backend.fall_back("mix", "cpu: another reason")
    assert len(said) == 2


def test_observers_of_an_outer_with_stay():
    one = Case("delta").model()
    seen = []

    class Counts:
        def __getattr__(self, name):
            return lambda *a, **k: seen.append(name)

    observer = Counts()
    with observed(one.stream, observer):
        with observed(one.stream, observer):
            pass
        from residua.runner import _observers

        assert list(_observers[one.stream]) == [observer]
    assert list(_observers[one.stream]) == []
