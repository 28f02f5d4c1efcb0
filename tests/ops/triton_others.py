"""attend_qkv, shortconv and sinkhorn in Triton equal their definitions."""

import pytest
import torch

from residua import ops

from .triton_check import TYPES, agree, draw


def attention(n, heads):
    return lambda query, *rest: ops.attend_qkv(query, rest[:n], rest[n:], heads=heads)


def rows(n, tokens, width, dtype=torch.float32):
    return [draw(1, tokens, width, dtype=dtype, seed=i) for i in range(n)]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("n", "tokens", "width", "heads"), [(3, 5, 24, 3), (1, 1, 1, 1), (2, 2, 1026, 2)])
def test_triton_attend_qkv_equals_reference(n, tokens, width, heads, dtype):
    agree(attention(n, heads), *rows(1 + 2 * n, tokens, width, dtype))


def test_triton_attend_qkv_of_shared_strided_and_some():
    query, *sources = rows(4, 4, 16)
    sources[0] = sources[0].mT.contiguous().mT
    agree(lambda q, a, b, c: ops.attend_qkv(q, (a, b), (b, c), heads=2), query, *sources)
    agree(attention(1, 2), *rows(3, 4, 16), wanted=[False, True, False])
    agree(attention(1, 2), *rows(3, 4, 16), wanted=[False, False, True])


def test_triton_attend_qkv_declines_and_takes_nothing():
    with ops.backend("triton", strict=True):
        assert attention(2, 2)(*rows(5, 0, 8)).shape == (1, 0, 8)
        with pytest.raises(RuntimeError, match="3 heads"):
            attention(1, 3)(*rows(3, 2, 8))
        with pytest.raises(RuntimeError, match="query's shape"):
            ops.attend_qkv(draw(1, 2, 8), (draw(1, 3, 8),), (draw(1, 3, 8),))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("tokens", "taps", "shape"), [(5, 3, (6,)), (1, 4, (2, 3)), (3, 1, (5,)), (9, 2, (515,))])
def test_triton_shortconv_equals_reference(tokens, taps, shape, dtype):
    """Fewer tokens than taps, a single tap, and more channels than a block."""
    x, tail = draw(2, tokens, *shape, dtype=dtype), draw(2, taps - 1, *shape, dtype=dtype, seed=1)
    # an empty tail has no error to take relative to anything
    agree(ops.shortconv, x, tail, draw(taps, *shape, dtype=dtype, seed=2), wanted=[True, taps > 1, True])


def test_triton_shortconv_of_views_and_of_no_tokens():
    x = draw(3, 2, 4).transpose(0, 1)
    agree(ops.shortconv, x, draw(2, 2, 8)[..., ::2], draw(4, 3).t())
    with ops.backend("triton", strict=True):
        taps = draw(3, 4).requires_grad_()
        ops.shortconv(draw(2, 0, 4), draw(2, 2, 4), taps).sum().backward()
        assert torch.equal(taps.grad, torch.zeros_like(taps))
        with pytest.raises(RuntimeError, match="x, tail and taps"):
            ops.shortconv(draw(2, 1, 4), draw(2, 1, 4), taps)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("shape", "iterations"), [((2, 3, 4, 4), 20), ((5, 3, 3), 6), ((1, 1), 2), ((2, 17, 17), 3)])
def test_triton_sinkhorn_equals_reference(shape, iterations, dtype):
    agree(lambda logits: ops.sinkhorn(logits, iterations=iterations), draw(*shape, dtype=dtype, scale=2.0))


def test_triton_sinkhorn_of_large_logits_views_and_few_rounds():
    logits = 200 * draw(3, 4, 4)
    with ops.backend("triton", strict=True):
        found = ops.sinkhorn(logits)
        assert found.isfinite().all()
        assert (found.sum(-1) - 1).abs().max() < 1e-5
        assert ops.sinkhorn(logits.bfloat16()).dtype == torch.float32
        assert torch.equal(ops.sinkhorn(logits.mT), ops.sinkhorn(logits.mT.contiguous()))
        assert ops.sinkhorn(draw(0, 4, 4)).shape == (0, 4, 4)
        assert torch.equal(ops.sinkhorn(draw(3, 3), iterations=0), draw(3, 3).exp())
        with pytest.raises(RuntimeError, match="at most 32"):
            ops.sinkhorn(draw(40, 40))


@pytest.mark.parametrize("op", ["attend_qkv", "shortconv", "sinkhorn"])
def test_triton_ops_obey_the_rules_of_a_torch_operator(op):
    from residua.ops.attend_qkv.triton import _attend_qkv
    from residua.ops.shortconv.triton import _shortconv
    from residua.ops.sinkhorn.triton import _sinkhorn

    given = [one.requires_grad_() for one in rows(5, 2, 8)]
    arguments = {
        "attend_qkv": (_attend_qkv, (given[0], given[1:3], given[3:], 2)),
        "shortconv": (_shortconv, (given[0], draw(1, 1, 8).requires_grad_(), draw(2, 8).requires_grad_())),
        "sinkhorn": (_sinkhorn, (draw(2, 3, 3).requires_grad_(), 2)),
    }
    torch.library.opcheck(*arguments[op])
