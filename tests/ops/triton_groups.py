"""Reads in groups in Triton equal single reads by the definition, whatever is carried."""

import pytest
import torch

from residua import ops
from residua.ops.attend import Carry, ahead, merge, reference, together
from residua.testing import assert_close

from .triton_check import TYPES, agree, draw


def inputs(queries, old, new, width, dtype=torch.float32, nulls=False, tokens=3):
    wide = torch.promote_types(dtype, torch.float32)
    found = [draw(queries, width, dtype=wide, scale=3 * width**-0.5)]
    found += [draw(queries, dtype=wide, seed=77)] if nulls else []
    return found + [draw(2, tokens, width, dtype=dtype, seed=1 + i, scale=1 + i % 3) for i in range(old + new)]


def grouped(queries, old, heads=1, nulls=False):
    """Begun over the first sources, and merged with the others; the reference reads one by one."""

    def call(query, *rest):
        null, sources = (rest[0], rest[1:]) if nulls else (None, rest)
        options = {"eps": 1e-6, "heads": heads}
        if ops._backend.choice() == "reference":
            return [
                (1 + k) * ops.attend(query[k], sources, null=null[k : k + 1] if nulls else None, **options)
                for k in range(queries)
            ] + [sources[0]]
        carries, same = ahead(query, sources[:old], null, **options)
        sources = same + sources[old:]
        reads = [merge(carries[k], query[k], sources[old:], scale=1 + k, **options) for k in range(queries)]
        return [one.to(sources[0].dtype) for one in reads] + [sources[0]]

    return call


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("heads", "nulls"), [(1, False), (3, True)])
def test_triton_groups_equal_reference(dtype, heads, nulls):
    agree(grouped(3, 4, heads, nulls), *inputs(3, 4, 2, 24, dtype, nulls))


@pytest.mark.parametrize(("queries", "old", "new", "width"), [(2, 1, 1, 1), (5, 2, 0, 17), (3, 2, 1, 2050)])
def test_triton_groups_any_width_and_number(queries, old, new, width):
    """Also where nothing came since, and where not all queries fit one pass."""
    agree(grouped(queries, old), *inputs(queries, old, new, width, tokens=1))


def test_triton_groups_of_some_gradients_and_strided_sources():
    arguments = inputs(2, 2, 1, 16)
    arguments[1] = arguments[1].transpose(0, 1).contiguous().transpose(0, 1)
    agree(grouped(2, 2), *arguments, wanted=[False, True, False, True])


def test_triton_groups_have_second_derivatives():
    """Of what was read ahead and merged: those of the definition."""
    answers = []
    for backend in ("triton", "reference"):
        leaves = [one.requires_grad_() for one in inputs(2, 2, 1, 4, torch.float64, tokens=1)]
        with ops.backend(backend, strict=True):
            total = torch.stack(grouped(2, 2)(*leaves)).square().sum()
            slopes = torch.autograd.grad(total, leaves, create_graph=True)
            answers.append(torch.autograd.grad(sum(one.square().sum() for one in slopes), leaves))
    for one, other in zip(*answers, strict=True):
        assert_close(one, other, gradient=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_triton_together_equals_single_reads(dtype):
    several = [[draw(*shape, seed=10 * i + k) for k in range(5)] for i, shape in enumerate([(12,), (12,), (1,), (1,)])]
    queries, gains, nulls, gates = several
    sources = [draw(2, 3, 12, dtype=dtype, seed=90 + i) for i in range(3)]
    with ops.backend("triton", strict=True):
        found = together(queries, gains, sources, nulls=nulls, gates=gates, eps=1e-6, heads=2)
        plain = together(queries, gains, sources, eps=1e-6)
    options = {"eps": 1e-6, "total": False, "centered": False}
    exact = tuple(one.double() for one in sources)
    for k, (gated, read) in enumerate(zip(found, plain, strict=True)):
        query = (queries[k] * gains[k]).double()
        assert_close(gated, gates[k] * reference.attend(query, exact, null=nulls[k].double(), heads=2, **options))
        assert_close(read, reference.attend(query, exact, null=None, heads=1, **options))


def test_triton_groups_decline_with_a_reason():
    queries, *sources = inputs(2, 2, 0, 16)
    with ops.backend("triton", strict=True):
        with pytest.raises(ops.Unsupported, match="share a pass"):
            ahead(queries[:1], tuple(sources), eps=1e-6)
        with pytest.raises(ops.Unsupported, match="unlike the first"):
            ahead(queries, (sources[0], sources[1].double()), eps=1e-6)
        with pytest.raises(ops.Unsupported, match="whole number"):
            carry = Carry(sources[0], sources[0][..., :1])
            merge(carry, queries[0], (sources[1],), eps=1e-6, scale=0.5)
        with pytest.raises(ops.Unsupported, match="share a pass"):
            wide = draw(2, 5000), (draw(1, 1, 5000),)
            ahead(*wide, eps=1e-6)
