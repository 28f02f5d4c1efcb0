"""Traffic is a law: a forward read loads every element of every source once and stores the read once; a backward pass
loads each at most twice and stores a gradient once. Counted in Triton's interpreter, address by address."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from residua import ops
from residua.lab.gpu.cases import CASES
from residua.ops import _triton, _triton_registry
from residua.ops.attend import ahead, triton_groups

from .triton_check import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="addresses are counted in the interpreter alone")

READS = [case for case in CASES if case.op.startswith(("attend", "mix", "remix", "delta_write"))]
TOKENS, WIDTH, N = 5, 12, 3


class Traffic:
    """The addresses that kernels load from and store to."""

    def __init__(self):
        self.loaded, self.stored = [], []

    @contextmanager
    def counted(self, monkeypatch):
        from triton.runtime.interpreter import InterpreterBuilder as Builder

        load, store = Builder.create_masked_load, Builder.create_masked_store

        def counting_load(builder, ptrs, mask, *rest):
            self.loaded.append(ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape).astype(bool)].ravel())
            return load(builder, ptrs, mask, *rest)

        def counting_store(builder, ptrs, value, mask, *rest):
            self.stored.append(ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape).astype(bool)].ravel())
            return store(builder, ptrs, value, mask, *rest)

        with monkeypatch.context() as patched:
            patched.setattr(Builder, "create_masked_load", counting_load)
            patched.setattr(Builder, "create_masked_store", counting_store)
            yield self

    def loads(self, tensor):
        return self._times(self.loaded, tensor)

    def stores(self, tensor):
        return self._times(self.stored, tensor)

    @staticmethod
    def _times(addresses, tensor):
        """How often each element of a dense tensor was touched: the least and the most."""
        assert tensor.is_contiguous()
        offsets = np.concatenate(addresses).astype(np.int64) - tensor.data_ptr()
        inside = offsets[(offsets >= 0) & (offsets < tensor.numel() * tensor.element_size())]
        assert not (inside % tensor.element_size()).any()
        times = np.bincount(inside // tensor.element_size(), minlength=tensor.numel())
        return int(times.min()), int(times.max())


def rows(case, given):
    """The inputs of the size of a source."""
    return [one for one in given[case.wide :] if one.shape[-1] == WIDTH]


def test_triton_traffic_is_counted(monkeypatch):
    """An element that is read twice, and one that never is, are found."""
    traffic = Traffic()
    source, weights = torch.ones(1, 4, 8), torch.ones(2)
    with traffic.counted(monkeypatch), ops.backend("triton", strict=True):
        ops.mix(weights, (source, source))
    assert traffic.loads(source) == (2, 2)
    assert traffic.loads(torch.ones(3)) == (0, 0)


@pytest.mark.parametrize("case", READS, ids=lambda case: case.name)
def test_triton_reads_load_once_forward_and_twice_backward(case, monkeypatch):
    given = case.draw(TOKENS, WIDTH, N, torch.float32)
    forward, backward = Traffic(), Traffic()
    with ops.backend("triton", strict=True):
        with forward.counted(monkeypatch), torch.no_grad():
            made = case.run(*given)
        outs = made if isinstance(made, tuple) else (made,)
        sources = rows(case, given)
        assert sources
        # merged reads take what was carried, and the source that came since, for every query
        grouped = case.name == "attend in groups"
        for i, source in enumerate(sources):
            each = len(outs) - 1 if grouped and i == len(sources) - 1 else 1
            assert forward.loads(source) == (each, each), f"source {i}"
            assert forward.stores(source) == (0, 0)
        for i, out in enumerate(outs[: len(outs) - grouped]):
            if case.op not in ("attend_weights", "attend_together"):  # torch softmaxes the one and gates the other
                assert forward.stores(out.contiguous()) == (1, 1), f"read {i}"
                assert forward.loads(out.contiguous()) == (0, 0)
        if not case.graded:
            return
        leaves = [one.requires_grad_() for one in given]
        made = case.run(*leaves)
        outs = made if isinstance(made, tuple) else (made,)
        slopes = [torch.ones_like(one) for one in outs]
        with backward.counted(monkeypatch):
            found = torch.autograd.grad(outs, leaves, slopes)
    if not grouped:  # of several reads the slopes are stacked first
        # a weight a channel is summed over tokens, one source after the other
        assert backward.loads(slopes[0]) == ((N, N) if case.name == "mix, channel" else (1, 1))
    gradients = rows(case, found)
    for i, (source, gradient) in enumerate(zip(sources, gradients, strict=True)):
        each = len(outs) - 1 if grouped and i == len(sources) - 1 else 1
        least, most = backward.loads(source)
        assert 1 <= least <= most <= 2 * each, f"source {i} is loaded {most} times"
        assert backward.stores(source) == (0, 0)
        if each == 1:  # else autograd adds up those of several reads
            assert backward.stores(gradient) == (1, 1), f"gradient {i}"


def test_triton_groups_share_their_passes(monkeypatch):
    """However many queries: a source is loaded once for as many as fit a pass."""
    most = triton_groups.most_queries(2048, 1, torch.float32)
    assert most == 2
    queries, source = torch.randn(most + 1, 2048), torch.randn(1, 1, 2048)
    traffic = Traffic()
    with traffic.counted(monkeypatch), ops.backend("triton", strict=True), torch.no_grad():
        ahead(queries, (source, source + 1), eps=1e-6)
    assert traffic.loads(source) == (2, 2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_triton_launches_take_nothing_through_the_host(case, monkeypatch):
    """What traces of fake tensors cannot see: inside an operator no tensor is made of numbers, and none is asked."""
    given = case.draw(TOKENS, WIDTH, N, torch.float32)
    names = []

    def refused(*arguments, **options):
        raise AssertionError("the host would wait, or a graph would replay what it held")

    for name in ("tensor", "as_tensor", "from_numpy"):
        monkeypatch.setattr(torch, name, refused)
    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "pin_memory", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, refused)
    launched = _triton.launching(lambda kernel, *arguments, **settings: names.append(kernel.__name__))
    with launched, ops.backend("triton", strict=True), torch.set_grad_enabled(case.graded):
        made = case.run(*(one.requires_grad_(case.graded) for one in given))
        outs = made if isinstance(made, tuple) else (made,)
        if case.graded:
            torch.autograd.grad(outs, given, outs)
    assert any("forward" in name or "logits" in name for name in names)
    assert any("backward" in name for name in names) == case.graded


def test_triton_serves_for_a_while():
    before = ops.kernels()["mix"].get("meta")
    with _triton_registry.serving("meta"):
        assert ops.kernels()["mix"]["meta"] == "triton"
    assert ops.kernels()["mix"].get("meta") == before
