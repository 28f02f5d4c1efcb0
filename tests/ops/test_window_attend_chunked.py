"""The chunked kernel is the reference: outputs and every gradient, all options, and linear in the sequence."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from residua import ops
from residua.ops.window_attend import chunked
from residua.ops.window_attend.position import apart
from residua.testing import assert_close


def draw(*shape, seed, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def packed(rows, total, window, seed):
    """Positions of rows of documents of drawn lengths, with padding in front."""
    generator = torch.Generator().manual_seed(seed)
    begins = torch.rand(rows, total, generator=generator) < 0.1
    begins[:, 0] = True
    at = torch.arange(total).expand(rows, -1)
    positions = at - torch.where(begins, at, 0).cummax(1).values
    documents = begins.cumsum(1) - 1
    padding = torch.randint(0, 4, (rows, 1), generator=generator)
    return apart(positions, documents.where(at >= padding, -1), window)


def both(q, k, v, probe, bias=None, **options):
    """Output and gradients by the reference and by the kernel."""
    found = []
    for backend in ("reference", "chunked"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, *([] if bias is None else [bias]))]
        with ops.backend(backend, strict=True):
            y = ops.window_attend(*leaves[:3], bias=leaves[3] if bias is not None else None, **options)
        found.append([y.detach(), *torch.autograd.grad(y, leaves, probe)])
    return found


@settings(max_examples=120, deadline=None)
@given(
    rows=st.integers(1, 3),
    kv=st.sampled_from([1, 2, 4]),
    tokens=st.integers(1, 140),
    before=st.sampled_from([0, 0, 5, 40]),
    window=st.sampled_from([1, 2, 5, 16, 33, 64, 200]),
    mode=st.sampled_from(["sliding", "local"]),
    causal=st.booleans(),
    biased=st.booleans(),
    positions=st.sampled_from(["none", "one", "rows"]),
    seed=st.integers(0, 9),
)
def test_chunked_equals_the_reference(rows, kv, tokens, before, window, mode, causal, biased, positions, seed):
    total = tokens + before
    q, probe = (draw(rows, 4, tokens, 6, seed=s) for s in (seed, seed + 1))
    k, v = (draw(rows, kv, total, 6, seed=s) for s in (seed + 2, seed + 3))
    bias = draw(4, window if causal else 2 * window - 1, seed=seed + 4) if biased else None
    keys = None if positions == "none" else packed(rows, total, window, seed)
    keys = keys[0] if positions == "one" else keys
    reference, kernel = both(q, k, v, probe, bias, window=window, mode=mode, causal=causal, keys=keys)
    for name, one, other in zip(("output", "q", "k", "v", "bias"), kernel, reference, strict=False):
        if other.abs().max() > 1e-9:
            assert_close(one, other, name, gradient=name != "output")
        else:  # one key in sight: its weight is 1 whatever the logit
            assert one.abs().max() < 1e-12, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunked_keeps_the_precision_of_its_type(dtype):
    """Against the reference in float64 on the same numbers, both in their own type."""
    q, k, v, probe = (draw(2, 4, 300, 32, seed=s, dtype=dtype) for s in range(4))
    exact, _ = both(*(x.double() for x in (q, k, v, probe)), window=50)
    _, kernel = both(q, k, v, probe, window=50)
    for name, one, other in zip(("output", "q", "k", "v"), kernel, exact, strict=True):
        assert_close(one, other, name, gradient=name != "output")


def test_chunked_gradients_cancel_where_one_key_has_all_the_weight():
    """Saturated rows: the gradients of q and k are nothing, and rounding must not make them something."""
    q, k, v, probe = (draw(1, 2, 100, 16, seed=s, dtype=torch.float32) for s in range(4))
    k = 12 * torch.nn.functional.normalize(k, dim=-1)
    q = 12 * torch.nn.functional.normalize(k + 0.01 * q, dim=-1)  # every token sees itself: logit 36, others below 30
    exact, _ = both(*(x.double() for x in (q, k, v, probe)), window=2)
    _, kernel = both(q, k, v, probe, window=2)
    for name, one, other in zip(("q", "k"), kernel[1:3], exact[1:3], strict=True):
        assert (one - other).abs().max() < 1e-5 * exact[3].abs().max(), name


def test_chunked_gradcheck():
    q, k, v = (draw(1, heads, 70, 2, seed=s).requires_grad_() for s, heads in ((0, 2), (1, 1), (2, 1)))
    bias = draw(2, 3, seed=3).requires_grad_()
    picked = torch.tensor([0, 31, 33, 69])

    def some(*leaves):  # all pairs of 70 tokens would take minutes
        with ops.backend("chunked", strict=True):
            return ops.window_attend(*leaves[:3], window=3, bias=leaves[3])[:, :, picked]

    assert torch.autograd.gradcheck(some, (q, k, v, bias), fast_mode=True)


@pytest.mark.parametrize("mode", ["sliding", "local"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("tokens", "keys", "window"), [(1000, 1000, 128), (1000, 1300, 17), (31, 31, 64), (96, 96, 1)])
def test_tiles_cover_every_query_once_and_every_key_it_sees(tokens, keys, window, mode, causal):
    parts = chunked.tiles(tokens, keys, window=window, causal=causal, blocks=mode == "local")
    covered, before = [], keys - tokens
    for tile in parts:
        for chunk in range(tile.chunks):
            rows = range(tile.start + chunk * tile.rows, tile.start + (chunk + 1) * tile.rows)
            first = tile.first + chunk * tile.rows
            covered += rows
            assert first >= 0
            assert first + tile.reach <= keys
            for row in (rows[0], rows[-1]):
                place = before + row
                if mode == "local" and not before:
                    low, high = place // window * window, min(keys, (place // window + 1) * window) - 1
                else:
                    low, high = max(0, place - window + 1), min(keys - 1, place + window - 1)
                assert first <= low
                assert first + tile.reach > (place if causal else high)
    assert covered == list(range(tokens))


def test_chunked_work_and_memory_are_linear_in_the_sequence():
    """Scores computed and numbers saved for the backward pass, counted: 16 times the tokens, 16 times both."""

    def scores(tokens):
        parts = chunked.tiles(tokens, tokens, window=128, causal=True, blocks=False)
        return sum(tile.chunks * tile.rows * tile.reach for tile in parts)

    assert scores(16 * 8192) < 16.1 * scores(8192)
    assert scores(8192) < 8192 * (128 + 32)

    def saved(tokens):
        held = []
        q = draw(1, 2, tokens, 8, seed=0, dtype=torch.float32).requires_grad_()
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x.numel()) or x, lambda x: x)
        with hooks, ops.backend("chunked", strict=True):
            ops.window_attend(q, q, q, window=16)
        return sum(held)

    few, many = saved(512), saved(8192)
    assert many < 16.1 * few


def test_chunked_copies_no_keys():
    """The chunks' keys are a view."""
    k = draw(2, 1000, 8, seed=0)
    (_, middle, _) = chunked.tiles(1000, 1000, window=100, causal=True, blocks=False)
    assert middle.keys(k).untyped_storage().data_ptr() == k.untyped_storage().data_ptr()


def test_chunked_right_twice_and_on_part_of_the_inputs():
    """retain_graph, autograd.grad on a subset, a detached input, checkpointing."""
    q, k, v, probe = (draw(1, 2, 80, 4, seed=s) for s in range(4))
    reference, _ = both(q, k, v, probe, window=20)
    k.requires_grad_()
    with ops.backend("chunked", strict=True):
        y = ops.window_attend(q, k, v, window=20)
        for _ in range(2):
            (only,) = torch.autograd.grad(y, k, probe, retain_graph=True)
            assert_close(only, reference[2], "k", gradient=True)
        again = torch.utils.checkpoint.checkpoint(
            lambda *a: ops.window_attend(*a, window=20), q, k, v, use_reentrant=False
        )
        (again,) = torch.autograd.grad(again, k, probe)
    assert_close(again, reference[2], "k", gradient=True)


@pytest.mark.slow
def test_chunked_is_one_graph():
    """Long enough that all three kinds of tile are in the graph; backward too."""
    q, probe = (draw(1, 2, 90, 4, seed=s, dtype=torch.float32) for s in (0, 1))
    k, v = (draw(1, 1, 90, 4, seed=s, dtype=torch.float32).requires_grad_() for s in (2, 3))
    bias = draw(2, 5, seed=4, dtype=torch.float32).requires_grad_()

    def attend(k, v, bias):
        return ops.window_attend(q, k, v, window=5, bias=bias)

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for one, other in zip(
        (compiled(k, v, bias), *torch.autograd.grad(compiled(k, v, bias), (k, v, bias), probe)),
        (attend(k, v, bias), *torch.autograd.grad(attend(k, v, bias), (k, v, bias), probe)),
        strict=True,
    ):
        assert_close(one, other, "compiled", gradient=True)
    torch._dynamo.reset()
