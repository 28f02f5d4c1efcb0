"""mix: weighted sums of sources, for weights that are static, per channel, per token, or per token and lane."""

import itertools

import pytest
import torch

from residua import ops

N, B, T, D, C = 4, 2, 3, 5, 3
SHAPES = {
    "static": (N,),
    "channel": (N, D),
    "token": (N, B, T),
    "lane": (C, N, B, T),
}


def draw(kind, dtype=torch.float64, tokens=T, rows=B, seed=0):
    """Weights of one kind, and sources."""
    generator = torch.Generator().manual_seed(seed)
    shape = {"static": (N,), "channel": (N, D), "token": (N, rows, tokens), "lane": (C, N, rows, tokens)}[kind]
    weights = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    sources = torch.randn(N, rows, tokens, D, generator=generator, dtype=torch.float64).to(dtype)
    return weights, tuple(sources)


def axis(kind):
    """Which axis of the weights counts the sources."""
    return 1 if kind == "lane" else 0


def looped(weights, sources):
    """The sum again, one number at a time."""
    lanes = weights if weights.ndim == 4 else weights[None]
    rows, tokens, width = sources[0].shape
    out = torch.zeros(len(lanes), rows, tokens, width, dtype=sources[0].dtype)
    for c, n, b, t, d in itertools.product(*map(range, (len(lanes), len(sources), rows, tokens, width))):
        place = {1: (n,), 2: (n, d), 3: (n, b, t)}[lanes.ndim - 1]
        out[c, b, t, d] += lanes[c][place] * sources[n][b, t, d]
    return out if weights.ndim == 4 else out[0]


@pytest.mark.parametrize("kind", SHAPES)
def test_mix_equals_the_loops(kind):
    weights, sources = draw(kind)
    assert weights.shape == SHAPES[kind]
    out = ops.mix(weights, sources)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, looped(weights, sources), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([0.5, 1, 2], (6.5, 0)),
        ([[1, 2], [3, 4], [5, 6]], (16, 2)),
        ([[[2]], [[3]], [[3]]], (11, 3)),
        ([[[[2]], [[3]], [[3]]], [[[1]], [[3]], [[1]]]], ((11, 3), (4, 5))),
    ],
    ids=SHAPES,
)
def test_mix_by_hand(weights, expected):
    """Over (1, 0), (0, 2), (3, -1), the sources of the DCA hand test."""
    sources = tuple(torch.tensor(v, dtype=torch.float64)[None, None] for v in [(1, 0), (0, 2), (3, -1)])
    out = ops.mix(torch.tensor(weights, dtype=torch.float64), sources)
    assert out.flatten().tolist() == torch.tensor(expected, dtype=torch.float64).flatten().tolist()


@pytest.mark.parametrize("kind", SHAPES)
def test_mix_gradients_are_exact(kind):
    weights, sources = draw(kind)
    leaves = [one.clone().requires_grad_() for one in (weights, *sources)]
    assert torch.autograd.gradcheck(lambda w, *v: ops.mix(w, v), leaves)


@pytest.mark.parametrize("kind", SHAPES)
def test_mix_ignores_the_order_of_sources(kind):
    weights, sources = draw(kind)
    order = [2, 0, 3, 1]
    shuffled = ops.mix(weights.index_select(axis(kind), torch.tensor(order)), tuple(sources[n] for n in order))
    torch.testing.assert_close(shuffled, ops.mix(weights, sources), rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SHAPES)
def test_mix_one_hot_returns_the_source(kind, dtype):
    """To the last bit, in every type."""
    weights, sources = draw(kind, dtype)
    for n, source in enumerate(sources):
        chosen = torch.zeros_like(weights)
        chosen.select(axis(kind), n).fill_(1)
        out = ops.mix(chosen, sources)
        assert out.dtype == dtype
        assert torch.equal(out, source.expand_as(out))


@pytest.mark.parametrize("kind", SHAPES)
def test_mix_is_linear_in_weights_and_sources(kind):
    (w, v), (u, z) = draw(kind), draw(kind, seed=1)
    both = ops.mix(2 * w - u, v)
    torch.testing.assert_close(both, 2 * ops.mix(w, v) - ops.mix(u, v), rtol=0, atol=1e-13)
    both = ops.mix(w, tuple(2 * a - b for a, b in zip(v, z, strict=True)))
    torch.testing.assert_close(both, 2 * ops.mix(w, v) - ops.mix(w, z), rtol=0, atol=1e-13)


def test_mix_lanes_are_independent():
    """A lane of the joint pass is that lane's own pass."""
    weights, sources = draw("lane")
    out = ops.mix(weights, sources)
    for lane, one in zip(weights, out, strict=True):
        torch.testing.assert_close(ops.mix(lane, sources), one, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", SHAPES)
def test_mix_bfloat16_accumulates_in_float32(kind):
    """256 + 1 is 256 in bfloat16, so 256 ones would be lost one after the other."""
    shape = {"static": (257,), "channel": (257, 2), "token": (257, 1, 1), "lane": (2, 257, 1, 1)}[kind]
    sources = (torch.full((1, 1, 2), 256.0), *(torch.ones(1, 1, 2) for _ in range(256)))
    out = ops.mix(torch.ones(shape, dtype=torch.bfloat16), tuple(one.bfloat16() for one in sources))
    assert out.dtype == torch.bfloat16
    assert out.flatten().tolist() == [512.0] * out.numel()


@pytest.mark.parametrize("kind", SHAPES)
def test_mix_keeps_float32_weights_of_bfloat16_sources(kind):
    """1 + 2^-10 has no bfloat16: rounded, the difference of two equal sources would vanish."""
    weights, _ = draw(kind, torch.float32)
    weights = torch.zeros_like(weights)
    weights.select(axis(kind), 0).fill_(1 + 2**-10)
    weights.select(axis(kind), 1).fill_(-1)
    out = ops.mix(weights, (torch.ones(B, T, D, dtype=torch.bfloat16),) * N)
    assert out.dtype == torch.bfloat16
    assert out.flatten().tolist() == [2**-10] * out.numel()


@pytest.mark.parametrize(("rows", "tokens"), [(B, 0), (0, T)])
@pytest.mark.parametrize("kind", SHAPES)
def test_mix_of_nothing_is_nothing(kind, rows, tokens):
    """No tokens, or no rows: an empty answer, through which zero gradients flow."""
    weights, sources = draw(kind, tokens=tokens, rows=rows)
    weights.requires_grad_()
    out = ops.mix(weights, sources)
    assert out.shape == (*((C,) if kind == "lane" else ()), rows, tokens, D)
    out.sum().backward()
    assert torch.equal(weights.grad, torch.zeros_like(weights))


@pytest.mark.parametrize("kind", SHAPES)
def test_mix_reads_strided_sources(kind):
    """Sources as transposed views, which a kernel must not read as if they lay in order."""
    weights, sources = draw(kind)
    strided = tuple(source.transpose(1, 2).contiguous().transpose(1, 2) for source in sources)
    assert not any(source.is_contiguous() for source in strided)
    torch.testing.assert_close(ops.mix(weights, strided), ops.mix(weights, sources), rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", SHAPES)
def test_mix_of_one_source_scales_it(kind):
    weights, sources = draw(kind)
    weights = weights.narrow(axis(kind), 0, 1)
    torch.testing.assert_close(ops.mix(weights, sources[:1]), looped(weights, sources[:1]), rtol=0, atol=1e-13)


def test_mix_leaves_its_arguments_alone():
    for kind in SHAPES:
        weights, sources = draw(kind)
        before = weights.clone(), tuple(source.clone() for source in sources)
        ops.mix(weights, sources).add_(1)
        assert torch.equal(weights, before[0])
        assert all(torch.equal(a, b) for a, b in zip(sources, before[1], strict=True))
