"""Every op with a kernel is an operator of torch.library: its fake, its formula of gradients, and what transforms and
compilers make of it."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from residua import ops
from residua.model import ModelConfig, Transformer, token_loss
from residua.native import library
from residua.runner import Execution
from residua.testing import assert_close
from tests.native.table import OPS

KERNEL = {"name": "auto", "strict": True}
FUSED = {"rms_norm", "swiglu", "unembed_loss", "compress"}
"""Sums and products of single numbers that a compiler fuses by itself, with a product: it gets PyTorch's own form."""
ONE_OF_EACH = {op.name.split("-")[0]: op for op in reversed(OPS)}


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def sources(count, width=4, seed=0):
    return [draw(2, 3, width, seed=seed + place) for place in range(count)]


CALLS = {
    "attend": (draw(4), sources(3), draw(1), 1e-6, 2, 3.0, False),
    "attend_ahead": (draw(3, 4), sources(2), draw(3), 1e-6, 2),
    "attend_merge": (draw(4), draw(2, 3, 4), draw(2, 3, 2), sources(2, seed=5), 1e-6, 2, 4.0),
    "mix": (draw(2, 3, 2, 3), sources(3)),
    "delta_write": (draw(2, 3, 2, 4), draw(2, 3, 4), draw(2, 3, 2), draw(2, 3), 0.5),
    "remix": (draw(2, 3, 4, 2), draw(2, 3, 4, 5)),
    "read_remix": (draw(2, 3, 4), draw(2, 3, 4, 2), draw(2, 3, 4, 5)),
    "normed_project": (draw(2, 3, 4), draw(4, 5), draw(5), 1e-6, True),
    "shortconv": (draw(2, 3, 4), draw(2, 2, 4), draw(3, 4)),
    "sinkhorn": (draw(2, 3, 3), 4),
    "damped_sinkhorn": (draw(2, 3, 3), 4, 1e-3),
    "token_attend": (*sources(3), draw(3, 1).detach(), draw(3, 1, seed=1).detach(), 2, True),
    "tiled_attention": (draw(2, 1, 5, 4), draw(2, 5, 4), draw(2, 5, 4), [draw(1, 1, 5, 5)], [0, 5, 0, 5, 1], True),
}


@pytest.mark.parametrize("name", CALLS)
def test_operator_obeys_the_rules_of_torch(name):
    """Schema, fake, autograd registration, and gradients traced with open shapes."""
    torch.library.opcheck(getattr(torch.ops.residua, name).default, CALLS[name])


def test_every_kernel_of_the_cpu_has_an_operator():
    kernels = {op for op, devices in ops.kernels().items() if "cpu" in devices}
    # windows as tiles; complete reads are begun ahead in compiled code; weights are for looking at
    others = {"attend_together", "attend_weights", "window_attend"}
    # of few tokens: to a compiler they are products, a write to the cache and PyTorch's attention
    decoding = {"attention_step", "cached_attend", "gated_mlp", "project"}
    assert kernels - others - decoding - FUSED <= set(CALLS)
    native = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("residua::")}
    assert {name for name in native if not name.endswith(("_backward", "_gradient"))} == set(CALLS)


@pytest.mark.parametrize("op", ONE_OF_EACH.values(), ids=str)
def test_transforms_work_or_take_the_reference(op):
    """make_fx sees forward and backward as one node each; torch.func, in eager and in compiled code, sees torch's own
    operations."""
    inputs = op.draw(1, 2, 3, grad=True)
    first, *rest = (one.detach() for one in inputs)

    def slopes(*given):
        return torch.autograd.grad(op.run(*given)[0].square().sum(), given)

    with ops.backend(**KERNEL):
        graph = make_fx(slopes)(*inputs)
        name = op.name.split("-")[0]
        nodes = [
            str(node.target).split(".")[1] for node in graph.graph.nodes if str(node.target).startswith("residua.")
        ]
        assert nodes == ([] if name in FUSED else [name, f"{name}_backward"])
        for one, other in zip(graph(*inputs), slopes(*inputs), strict=True):
            assert_close(one, other, gradient=True)

        def both(first, *rest):
            slope = torch.func.grad(lambda one: op.run(one, *rest)[0].square().sum())
            return slope(first), torch.func.vmap(lambda one: op.run(one, *rest)[0])(first[None])[0]

        torch._dynamo.reset()
        compiled = torch.compile(both, fullgraph=True, backend="eager")(first, *rest)
        for found in (both(first, *rest), compiled):
            assert_close(found[0], slopes(*inputs)[0], gradient=True)
            assert_close(found[1], op.run(*inputs)[0])


@pytest.mark.parametrize("name", ["attend", "attend_ahead", "attend_merge", "mix", "delta_write"])
def test_gradients_of_an_operator_can_be_differentiated(name):
    leaves, call = torch.utils._pytree.tree_flatten(CALLS[name])
    tensors = [one for one in leaves if isinstance(one, torch.Tensor)]

    def run(*given):
        left = iter(given)
        again = call.unflatten([next(left) if isinstance(one, torch.Tensor) else one for one in leaves])
        found = torch.utils._pytree.tree_leaves(getattr(torch.ops.residua, name)(*again))
        # a log-sum is kept for the backward pass of a read, and is differentiated only where reads are carried
        return found if name == "attend_ahead" else found[0]

    assert torch.autograd.gradgradcheck(run, tensors, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["attnres", "delta:blocks=2"])
def test_compiled_model_shares_passes_over_sources(spec):
    """Groups of reads are operators too: as many kernels run as in eager code, and give the same."""
    model = Transformer(ModelConfig(vocab=11, width=8, depth=2, heads=1, design=spec), seed=0).double()
    model.execution = Execution(least=1)
    tokens = torch.arange(12).reshape(2, 6) % 11
    seen = set()

    def compiler(graph, example):
        seen.update(str(node.target) for node in graph.graph.nodes)
        return torch._dynamo.backends.debugging.aot_eager(graph, example)

    torch._dynamo.reset()
    found = []
    for form in (model, torch.compile(model, fullgraph=True, backend=compiler)):
        model.zero_grad()
        with library.counted() as calls:
            loss = token_loss(form(tokens), tokens)
            loss.backward()
        calls.pop("residua_attend_is_large", None)  # a question, no kernel
        calls = {name: count for name, count in calls.items() if not any(one in name for one in FUSED)}
        found.append((calls, loss, *(parameter.grad for parameter in model.parameters())))
        model.zero_grad(set_to_none=True)
    torch._dynamo.reset()
    (eager, *numbers), (compiled, *others) = found
    assert "residua.attend_ahead.default" in seen
    assert "residua.attend_merge.default" in seen or spec != "attnres"
    assert compiled == eager
    assert compiled["residua_attend"]
    for one, other in zip(numbers, others, strict=True):
        assert_close(other, one, gradient=True)


def test_compiled_code_without_a_library_takes_the_reference(monkeypatch):
    monkeypatch.setattr(library, "_load", lambda: (None, "no C compiler"))
    X, k, value, beta = (one.detach() for one in CALLS["delta_write"][:4])
    torch._dynamo.reset()
    compiled = torch.compile(lambda X: ops.delta_write(X, k, value, beta, eps=0.5), fullgraph=True, backend="eager")
    with ops.backend("reference"):
        expected = ops.delta_write(X, k, value, beta, eps=0.5)
    with ops.backend("auto", strict=False), pytest.warns(UserWarning, match="no C compiler"):
        found = compiled(X)
    torch._dynamo.reset()
    assert_close(found, expected)
