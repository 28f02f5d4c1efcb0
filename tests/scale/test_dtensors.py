"""Kernels and DTensors: a kernel reads local shards as the plain tensors they are; a DTensor itself is served by the
op's form in PyTorch, which torch distributes, or refused in one line."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from residua import ops
from residua.ops import _backend
from residua.ops.mix import reference

SOURCES, ROWS, TOKENS, WIDTH = 3, 2, 8, 16


@pytest.fixture(scope="module")
def mesh():
    """One process is a group, too: where pieces lie is the business of torch."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


@pytest.fixture
def numbers():
    torch.manual_seed(0)
    return torch.randn(SOURCES), tuple(torch.randn(ROWS, TOKENS, WIDTH) for _ in range(SOURCES))


def spread(mesh, weights, sources):
    """Over tokens, as a stream is in sequence parallelism; what every rank holds whole, whole."""
    shards = tuple(distribute_tensor(each, mesh, [Shard(1)]) for each in sources)
    return distribute_tensor(weights, mesh, [Replicate()]), shards


@pytest.fixture
def native(monkeypatch):
    """How often a native kernel was asked, of `mix`."""
    name, fast = _backend._kernels["mix", "cpu"]
    calls = []

    def counted(*arguments, **options):
        calls.append(arguments)
        return fast(*arguments, **options)

    monkeypatch.setitem(_backend._kernels, ("mix", "cpu"), (name, counted))
    return calls


def test_a_native_kernel_takes_local_shards(mesh, numbers, native):
    weights, sources = spread(mesh, *numbers)
    local = [each.to_local() for each in (weights, *sources)]
    with ops.backend("auto", strict=True):
        mixed = ops.mix(local[0], tuple(local[1:]))
    assert len(native) == 1
    torch.testing.assert_close(mixed, reference.mix(*numbers))


def test_dtensors_take_the_form_that_torch_distributes(mesh, numbers):
    """Outputs and gradients, spread as the sources are; no pointer is read behind torch's back."""
    weights, sources = spread(mesh, *numbers)
    leaves = [each.detach().requires_grad_() for each in (weights, *sources)]
    with ops.backend("auto", strict=True):
        mixed = ops.mix(leaves[0], tuple(leaves[1:]))
    assert tuple(mixed.placements) == (Shard(1),)
    mixed.square().sum().backward()
    plain = [each.detach().requires_grad_() for each in (numbers[0], *numbers[1])]
    right = reference.mix(plain[0], tuple(plain[1:]))
    right.square().sum().backward()
    torch.testing.assert_close(mixed.full_tensor(), right)
    for one, other in zip(leaves, plain, strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)


def test_dtensors_beside_plain_tensors_are_refused(mesh, numbers):
    weights, (first, *_) = spread(mesh, *numbers)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        ops.mix(weights, (first, *numbers[1][1:]))


def test_triton_kernels_refuse_dtensors_in_one_line(mesh, numbers, monkeypatch):
    """Before anything is launched; the reference then serves the call, or under strict nothing does."""
    pytest.importorskip("triton")
    from residua.ops import _triton_registry

    for op in _triton_registry.SERVED:
        monkeypatch.setitem(_backend._kernels, (op, "cpu"), ("triton", _triton_registry.SERVED[op]))
    weights, sources = spread(mesh, *numbers)
    with ops.backend("auto", strict=True), pytest.raises(RuntimeError) as refused:
        ops.mix(weights, sources)
    assert "triton: a DTensor, whose pieces lie on several ranks; a kernel takes its local one" in str(refused.value)
    assert "\n" not in str(refused.value)
    query = distribute_tensor(torch.randn(WIDTH), mesh, [Replicate()])
    with ops.backend("auto", strict=True), pytest.raises(RuntimeError, match="triton: a DTensor"):
        ops.attend(query, sources, eps=1e-6)
    with ops.backend("auto", strict=False), pytest.warns(UserWarning, match="runs its reference implementation"):
        torch.testing.assert_close(ops.mix(weights, sources).full_tensor(), reference.mix(*numbers))
