"""Kernels slot in by device, decline with a reason, and never silently."""

import warnings

import pytest
import torch

from residua import ops
from residua.ops import _backend

QUERY, SOURCES = torch.ones(2), (torch.tensor([[[1.0, 1.0]]]), torch.tensor([[[1.0, -1.0]]]))


@pytest.fixture
def kernel(monkeypatch):
    """A kernel for the CPU that answers with sevens, or declines; the real ones are back afterwards."""
    calls = []
    monkeypatch.setattr(_backend, "_kernels", dict(_backend._kernels))

    @ops.kernel("attend", "sevens", "cpu")
    def attend(query, sources, **options):
        calls.append(options)
        if options["heads"] > 1:
            raise ops.Unsupported("one head only")
        return torch.full_like(sources[0], 7.0)

    return calls


def test_kernel_serves_its_device_without_a_design_knowing(kernel):
    from residua import Plan, build

    plan = Plan.regular(2, 1)
    stream = build("attnres", plan)
    state = stream.open(SOURCES[0])
    state = stream.write(state, plan.sites[0], stream.read(state, plan.sites[0], lambda *x: x), SOURCES[1])
    assert stream.read(state, plan.sites[1], lambda *x: x).lanes[0].eq(7).all()
    assert kernel
    assert ops.kernels()["attend"]["cpu"] == "sevens"


def test_reference_can_be_asked_for(kernel):
    with ops.backend("reference"):
        assert not ops.attend(QUERY, SOURCES).eq(7).any()
    assert ops.attend(QUERY, SOURCES).eq(7).all()


def test_declining_kernel_warns_once_with_its_reason(kernel):
    with ops.backend("auto", strict=False):
        with pytest.warns(UserWarning, match="one head only"):
            first = ops.attend(QUERY, SOURCES, heads=2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(ops.attend(QUERY, SOURCES, heads=2), first)
    with ops.backend("reference"):
        assert torch.equal(ops.attend(QUERY, SOURCES, heads=2), first)


def test_strict_mode_makes_a_fallback_an_error(kernel):
    with ops.backend("auto", strict=True), pytest.raises(RuntimeError, match="one head only"):
        ops.attend(QUERY, SOURCES, heads=2)
    with ops.backend("triton", strict=True), pytest.raises(RuntimeError, match="no backend 'triton'"):
        ops.attend(QUERY, SOURCES)
