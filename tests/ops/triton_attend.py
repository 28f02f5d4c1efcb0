"""attend in Triton equals its definition, whatever the width, the number of sources and the options."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from residua import ops
from residua.testing import assert_close

from .triton_check import TYPES, agree, draw


def read(n, null=False, **options):
    """attend as a function of its tensors: query, sources, and the null if there is one."""
    return lambda query, *rest: ops.attend(query, rest[:n], null=rest[n] if null else None, **options)


def tensors(n, rows, tokens, width, dtype=torch.float32, null=False):
    wide = torch.promote_types(dtype, torch.float32)
    query = draw(width, dtype=wide, scale=3 * width**-0.5)
    sources = [draw(rows, tokens, width, dtype=dtype, seed=1 + i, scale=1 + i % 3) for i in range(n)]
    return [query, *sources] + ([draw(1, dtype=wide, seed=77)] if null else [])


OPTIONS = {
    "plain": {},
    "null": {"null": True},
    "total": {"total": True},
    "centered": {"centered": True},
    "heads": {"heads": 3},
    "all": {"null": True, "heads": 3, "total": True, "centered": True, "eps": 1e-3},
}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_triton_attend_equals_reference(name, dtype):
    """An odd width, an odd number of tokens and of sources: 9 tokens of 96 are 1 block of 16."""
    options = OPTIONS[name]
    agree(read(5, **options), *tensors(5, 3, 3, 96, dtype, options.get("null", False)))


@pytest.mark.parametrize(
    ("n", "tokens", "width", "heads"),
    [(1, 1, 1, 1), (40, 3, 24, 1), (3, 9, 768, 12), (2, 7, 1280, 1), (2, 2, 1280, 20), (2, 5, 2050, 1)],
)
def test_triton_attend_any_width_and_number_of_sources(n, tokens, width, heads):
    """Several blocks of tokens for the widest; more programs than partial sums for 768 and 1280."""
    agree(read(n, heads=heads), *tensors(n, 1, tokens, width))


def test_triton_attend_mixed_types_are_those_of_a_stack():
    query, *sources = tensors(3, 1, 3, 32)
    sources[1] = sources[1].bfloat16()
    agree(read(3), query, *sources)


def test_triton_attend_strided_and_misaligned_sources():
    query, *sources = tensors(3, 2, 3, 32)
    across = sources[0].transpose(0, 1).contiguous().transpose(0, 1)
    shifted = torch.cat([draw(1), sources[1].flatten()])[1:].view_as(sources[1])
    assert shifted.data_ptr() % 16
    with ops.backend("triton", strict=True):
        strided = ops.attend(query, (across, shifted, sources[2]))
        plain = ops.attend(query, tuple(sources))
    assert torch.equal(strided, plain)


def test_triton_attend_gives_gradients_to_those_that_want_them():
    agree(read(4, null=True), *tensors(4, 1, 5, 32, null=True), wanted=[False, True, False, True, False, False])
    agree(read(2), *tensors(2, 1, 5, 32), wanted=[True, False, False])


def test_triton_attend_of_no_tokens_is_nothing():
    for backend in ("reference", "triton"):
        with ops.backend(backend, strict=True):
            query, *sources = (one.requires_grad_() for one in tensors(2, 1, 0, 32))
            out = ops.attend(query, tuple(sources))
            assert out.shape == (1, 0, 32)
            out.sum().backward()
            assert torch.equal(query.grad, torch.zeros_like(query))


def test_triton_attend_saves_references_and_two_numbers_a_token():
    """Bytes that autograd keeps beyond the inputs: the softmax's greatest logit and mass."""
    query, *sources = (one.requires_grad_() for one in tensors(4, 1, 5, 32))
    inputs = {one.data_ptr() for one in (query, *sources)}
    kept = []
    with (
        ops.backend("triton", strict=True),
        torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x),
    ):
        ops.attend(query, tuple(sources)).sum().backward()
    assert [tuple(one.shape) for one in kept if one.data_ptr() not in inputs] == [(1, 5, 1, 2)]


def test_triton_attend_same_bits_every_time():
    arguments = tensors(5, 1, 67, 96)
    first, second = (results_of(arguments) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def results_of(arguments):
    leaves = [one.clone().requires_grad_() for one in arguments]
    with ops.backend("triton", strict=True):
        out = ops.attend(leaves[0], tuple(leaves[1:]))
        return out, *torch.autograd.grad(out.square().sum(), leaves)


def test_triton_attend_survives_checkpointing_retained_graphs_and_a_shared_source():
    query, source = (one.requires_grad_() for one in tensors(1, 1, 5, 32))
    with ops.backend("triton", strict=True):
        plain = ops.attend(query, (source, 2 * source, source)).square().sum()
        once = torch.autograd.grad(plain, (query, source), retain_graph=True)
        twice = torch.autograd.grad(plain, (query, source))
        again = checkpoint(lambda q, s: ops.attend(q, (s, 2 * s, s)).square().sum(), query, source, use_reentrant=False)
        third = torch.autograd.grad(again, (query, source))
    for a, b, c in zip(once, twice, third, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_triton_attend_obeys_the_rules_of_a_torch_operator():
    from residua.ops.attend.triton import _attend

    query, *sources = (one.requires_grad_() for one in tensors(3, 1, 5, 32))
    arguments = (query, sources, None, torch.float32, 1e-6, 1, False, False)
    torch.library.opcheck(_attend, arguments)


def test_triton_attend_is_one_node_of_a_compiled_graph():
    arguments = tensors(3, 1, 5, 32)

    def loss(*leaves):
        return read(3, heads=2)(*leaves).square().sum()

    found = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [one.clone().requires_grad_() for one in arguments]
        with ops.backend("triton", strict=True):
            found.append(torch.autograd.grad(function(*leaves), leaves))
    for got, expected in zip(*found, strict=True):
        assert_close(got, expected, gradient=True)


def test_triton_attend_declines_with_a_reason():
    query, *sources = tensors(2, 1, 3, 32)
    with ops.backend("triton", strict=True):
        with pytest.raises(RuntimeError, match="int64"):
            ops.attend(query, tuple(one.long() for one in sources))
        with pytest.raises(RuntimeError, match="5 heads"):
            ops.attend(query, tuple(sources), heads=5)
        with pytest.raises(ValueError, match="one shape"):
            ops.attend(query, (sources[0], sources[1][:, :2]))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", ["plain", "all"])
def test_triton_attend_norm_and_weights_equal_reference(name, dtype):
    """The norm in the kernel where no gradient is wanted, and after it, with every gradient, where one is."""
    options = OPTIONS[name]
    null = options.get("null", False)
    query, *rest = tensors(3, 1, 3, 24, dtype, null)
    gain, known = draw(24, dtype=query.dtype, seed=5), {key: one for key, one in options.items() if key != "null"}

    def normed(query, gain, *rest):
        return ops.attend_norm(query, rest[:3], gain, norm_eps=1e-5, null=rest[3] if null else None, **known)

    def weights(query, *rest):
        return ops.attend_weights(query, rest[:3], null=rest[3] if null else None, **known)

    if dtype != torch.bfloat16:  # in which the read is rounded on its way to the norm
        agree(normed, query, gain, *rest)
    for function, given in ((normed, (query, gain, *rest)), (weights, (query, *rest))):
        with ops.backend("reference"):
            exact = function(*(one.double() for one in given))
        with ops.backend("triton", strict=True), torch.no_grad():
            assert_close(function(*given), exact)
