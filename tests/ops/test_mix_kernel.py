"""mix without a stack: the kernel's fallback in PyTorch, which is linear in memory too."""

import warnings

import pytest
import torch

from residua import ops
from residua.native import library
from residua.ops import _backend
from residua.ops.mix import linear
from residua.testing import assert_close
from tests.native.table import OPS, gradients

KINDS = [op for op in OPS if op.name.startswith("mix")]


@pytest.fixture(autouse=True)
def _large(monkeypatch):
    """Every call counts as large: small ones stack."""
    monkeypatch.setattr(linear, "SMALL", 0)


@pytest.fixture
def without_kernel(monkeypatch):
    monkeypatch.delitem(_backend._kernels, ("mix", "cpu"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", KINDS, ids=str)
def test_linear_mix_equals_the_reference(op, dtype, without_kernel):
    inputs = op.draw(2, 3, 5, dtype, grad=True)
    found, slopes = gradients(op, inputs)
    with ops.backend("reference"):
        expected, expected_slopes = gradients(op, [one.detach().double().requires_grad_() for one in inputs])
    assert_close(found[0], expected[0])
    for one, other in zip(slopes, expected_slopes, strict=True):
        assert one.dtype == dtype
        assert_close(one, other, gradient=True)


@pytest.mark.parametrize("op", KINDS, ids=str)
def test_linear_mix_gradients_are_exact(op, without_kernel):
    assert torch.autograd.gradcheck(op.call, op.draw(2, 3, 4, grad=True))
    assert torch.autograd.gradgradcheck(op.call, op.draw(1, 2, 3, grad=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_mix_keeps_references_to_its_sources(dtype, without_kernel):
    """Reads of 1, 2, ..., n sources keep n sources, not n^2; the reference keeps a stack a read."""

    def kept(call):
        sources = [torch.randn(2, 16, 32, dtype=dtype, requires_grad=True) for _ in range(8)]
        storages = {}

        def keep(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address comes twice
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            held = [call(torch.randn(n, requires_grad=True), tuple(sources[:n])) for n in range(1, 9)]
        assert len(held) == 8
        return sum(one.untyped_storage().nbytes() for one in storages.values()) / sources[0].nbytes

    assert kept(ops.mix) < 8.5
    with ops.backend("reference"):
        assert kept(ops.mix) > 20


def test_small_mix_takes_the_stack(monkeypatch, without_kernel):
    """Decoding: one token, many sources; a loop in Python would cost more than the copy."""
    monkeypatch.undo()
    monkeypatch.setattr(linear.LinearMix, "apply", None)
    monkeypatch.delitem(_backend._kernels, ("mix", "cpu"))
    sources = tuple(torch.randn(1, 1, 64) for _ in range(24))
    assert_close(ops.mix(torch.ones(24), sources), torch.stack(sources).sum(0))


@pytest.mark.parametrize("shape", [(1, 2, 4), (1, 200, 400)])
@pytest.mark.parametrize("kind", [(3,), (3, 4), (3, 1, 2), (2, 3, 1, 2)], ids=str)
def test_mix_in_a_compiled_graph_needs_no_library(kind, shape, monkeypatch):
    """The operator that a compiler sees gives the same, and its gradients, where nothing could be built."""
    kind = tuple({4: shape[2], 2: shape[1]}.get(size, size) if place else size for place, size in enumerate(kind))
    monkeypatch.setattr(linear, "SMALL", 1 << 16)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(one, generator=generator).double().requires_grad_() for one in (kind, *[shape] * 3)]
    answers = []
    for there in (True, False):
        if not there:
            monkeypatch.setattr(library, "_load", lambda: (None, "no C compiler"))
        with ops.backend("auto", strict=there), warnings.catch_warnings(action="ignore"):
            found = torch.ops.residua.mix(inputs[0], inputs[1:])
            answers.append((found, *torch.autograd.grad(found.square().sum(), inputs)))
    for one, other in zip(*answers, strict=True):
        assert_close(one, other, gradient=True)
