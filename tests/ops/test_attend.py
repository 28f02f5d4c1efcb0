"""attend against hand values, finite differences, the loops of the oracle, and what every softmax read obeys."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from residua.ops import attend, attend_weights, backend
from tests.oracles.attnres import mixture

QUERY = torch.tensor([0.0, math.log(3) / 2], dtype=torch.float64)

quick = settings(max_examples=30, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)


@pytest.fixture(autouse=True, scope="module")
def _reference():
    """The reference is the definition; a kernel is held to it elsewhere, within a tolerance."""
    with backend("reference"):
        yield


def vectors(*rows):
    return tuple(torch.tensor(row, dtype=torch.float64).reshape(1, 1, -1) for row in rows)


def draw(n, width=6, seed=0, dtype=torch.float64, batch=2, tokens=3):
    """A query and n sources."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(width, generator=generator, dtype=torch.float64)
    sources = torch.randn(n, batch, tokens, width, generator=generator, dtype=torch.float64).to(dtype)
    return query, tuple(sources)


def close(one, other, tolerance=1e-12):
    torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


# ------------------------------------------------------------------------------------------------ hand values


@pytest.mark.parametrize(
    ("query", "rows", "options", "weights", "expected"),
    [
        # methods 5.10: w = (0, ln3/2), keys (1, 1) and (1, -1), so the logits are +-ln3/2
        (QUERY, [(1, 1), (1, -1)], {}, (3 / 4, 1 / 4), (1, 0.5)),
        (QUERY, [(1, 1), (1, -1), (2, 2)], {}, (3 / 7, 1 / 7, 3 / 7), (10 / 7, 8 / 7)),
        # the same read with each option
        (QUERY, [(1, 1), (1, -1)], {"total": True}, (3 / 2, 1 / 2), (2, 1)),
        (QUERY, [(1, 1), (1, -1)], {"centered": True}, (1 / 4, -1 / 4), (0, 0.5)),
        # a null with the logit ln3/2 has the weight of (1, 1): (3 + 1 + 3) / 7
        (QUERY, [(1, 1), (1, -1)], {"null": math.log(3) / 2}, (3 / 7, 1 / 7), (4 / 7, 2 / 7)),
        (QUERY, [(1, 1), (1, -1)], {"null": math.log(3) / 2, "total": True}, (6 / 7, 2 / 7), (8 / 7, 4 / 7)),
        # uniform reads of deltas (1, 0), (0, 2), (3, -1) and of their running sums
        (0 * QUERY, [(1, 0), (0, 2), (3, -1)], {}, (1 / 3,) * 3, (4 / 3, 1 / 3)),
        (0 * QUERY, [(1, 0), (0, 2), (3, -1)], {"total": True}, (1, 1, 1), (4, 1)),
        (0 * QUERY, [(1, 0), (0, 2), (3, -1)], {"centered": True}, (0, 0, 0), (0, 0)),
        (0 * QUERY, [(1, 0), (1, 2), (4, 1)], {}, (1 / 3,) * 3, (2, 1)),
    ],
)
def test_attend_gives_the_hand_values(query, rows, options, weights, expected):
    if "null" in options:
        options = options | {"null": torch.tensor([options["null"]], dtype=torch.float64)}
    sources = vectors(*rows)
    found = attend_weights(query, sources, eps=0.0, **options)
    close(found, torch.tensor(weights, dtype=torch.float64).reshape(-1, 1, 1, 1))
    close(attend(query, sources, eps=0.0, **options), vectors(expected)[0])


def test_attend_slices_route_apart_while_keys_share_one_rms():
    # (3, 1, 1, 1) and (3, 1, 1, -1) both have rms sqrt(3); only the second slice has a logit: +-ln3/2
    query = torch.tensor([0, 0, 0, math.sqrt(3) * math.log(3) / 2], dtype=torch.float64)
    sources = vectors((3, 1, 1, 1), (3, 1, 1, -1))
    weights = attend_weights(query, sources, eps=0.0, heads=2)
    close(weights[:, 0, 0], torch.tensor([[1 / 2, 3 / 4], [1 / 2, 1 / 4]], dtype=torch.float64))
    close(attend(query, sources, eps=0.0, heads=2), vectors((3, 1, 1, 0.5))[0])


@pytest.mark.parametrize(("logit", "sources", "taken"), [(10.0, 8, 0.9996), (3.0, 8, 0.715), (0.0, 8, 1 / 9)])
def test_attend_null_takes_its_softmax_share(logit, sources, taken):
    # e^b / (e^b + n) with zero queries
    query, values = draw(sources)
    null = torch.tensor([logit], dtype=torch.float64)
    rest = attend_weights(0 * query, values, null=null).sum(0)
    close(1 - rest, torch.full_like(rest, taken), 5e-5 if logit == 10 else 5e-4 if logit == 3 else 1e-12)


def test_attend_key_of_a_zero_source_has_slope_one_over_sqrt_eps():
    """Why a null is a logit of its own: as a zero vector among the sources its key is 1/sqrt(eps) steep."""
    query, (other,) = draw(1, batch=1, tokens=1)
    zero = torch.zeros_like(other, requires_grad=True)
    weight = attend_weights(query, (zero, other), eps=1e-6)[0].sum()
    (slope,) = torch.autograd.grad(weight, zero)
    close(slope.flatten(), (weight * (1 - weight) * query * 1000).detach(), 1e-9)


# -------------------------------------------------------------------------------------- against other arithmetic

OPTIONS = [
    {},
    {"eps": 1e-2},
    {"heads": 2},
    {"heads": 6},
    {"total": True},
    {"centered": True},
    {"null": True},
    {"null": True, "heads": 3, "total": True, "eps": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_attend_gradients_equal_finite_differences(options):
    query, sources = draw(3, batch=1, tokens=2)
    null = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
    others = {k: v for k, v in options.items() if k != "null"}

    def f(query, null, *sources):
        return attend(query, sources, null=null if "null" in options else None, **others)

    leaves = [one.requires_grad_() for one in (query, *sources)]
    assert torch.autograd.gradcheck(f, (leaves[0], null, *leaves[1:]))


@pytest.mark.parametrize("options", [{}, {"heads": 2}, {"heads": 6, "eps": 0.5}, {"heads": 3, "eps": 1e-5}], ids=str)
def test_attend_equals_the_loops_of_the_oracle(options):
    query, sources = draw(5)
    gain = 1 + 0.3 * draw(1, seed=9)[0]
    expected = mixture(list(sources), query, gain, options.get("heads", 1), options.get("eps", 1e-6))
    close(attend(query * gain, sources, **options), expected)


# --------------------------------------------------------------------------------------------------- properties


@quick
@given(seeds, st.integers(1, 7), st.sampled_from([1, 2, 3, 6]), st.randoms())
def test_attend_permuting_sources_permutes_weights_and_keeps_the_read(seed, n, heads, random):
    query, sources = draw(n, seed=seed)
    order = list(range(n))
    random.shuffle(order)
    shuffled = tuple(sources[i] for i in order)
    weights = attend_weights(query, sources, heads=heads)
    close(attend_weights(query, shuffled, heads=heads), weights[order])
    close(attend(query, shuffled, heads=heads), attend(query, sources, heads=heads))


@quick
@given(seeds, st.integers(1, 5), st.floats(1e-3, 1e3), st.booleans())
def test_attend_positive_rescaling_of_a_source_keeps_the_weights(seed, n, scale, centered):
    query, sources = draw(n, seed=seed)
    scaled = (*sources[:-1], scale * sources[-1])
    options = {"eps": 0.0, "centered": centered}
    close(attend_weights(query, scaled, **options), attend_weights(query, sources, **options))


@quick
@given(seeds, st.floats(-30, 30))
def test_attend_one_source_returns_itself_and_teaches_the_query_nothing(seed, size):
    query, (source,) = draw(1, seed=seed)
    query = (size * query).requires_grad_()
    read = attend(query, (source,))
    assert torch.equal(read, source)
    assert not attend(query, (source,), centered=True).any()
    (gradient,) = torch.autograd.grad(read.square().sum(), query)
    close(gradient, torch.zeros_like(gradient), 1e-12)


@quick
@given(seeds, st.integers(1, 6), st.sampled_from([1, 2, 3]))
def test_attend_weights_are_a_distribution_per_slice(seed, n, heads):
    query, sources = draw(n, seed=seed)
    weights = attend_weights(query, sources, heads=heads)
    assert weights.shape == (n, 2, 3, heads)
    assert weights.min() > 0
    close(weights.sum(0), torch.ones(2, 3, heads, dtype=torch.float64))
    close(attend_weights(query, sources, heads=heads, total=True), n * weights)
    close(attend_weights(query, sources, heads=heads, centered=True), weights - 1 / n)


@quick
@given(seeds, st.integers(1, 6), st.sampled_from([1, 2]), st.booleans(), st.booleans())
def test_attend_is_its_weights_applied(seed, n, heads, total, centered):
    query, sources = draw(n, seed=seed)
    options = {"heads": heads, "total": total, "centered": centered}
    weights = attend_weights(query, sources, **options).repeat_interleave(6 // heads, -1)
    expected = sum(weight * source for weight, source in zip(weights, sources, strict=True))
    close(attend(query, sources, **options), expected)


@quick
@given(seeds, st.integers(1, 6))
def test_attend_read_pushed_as_a_source_leaves_the_next_read_unchanged(seed, n):
    query, sources = draw(n, seed=seed)
    read = attend(query, sources)
    close(attend(query, (*sources, read)), read)


@quick
@given(seeds, st.integers(1, 6), st.sampled_from([1, 2, 3]))
def test_attend_null_logit_is_a_source_of_value_zero(seed, n, heads):
    query, sources = draw(n, seed=seed)
    logit = 2 * query[:1]
    keys = torch.stack([source / (source.square().mean(-1, keepdim=True) + 1e-6).sqrt() for source in sources])
    powers = (keys * query).unflatten(-1, (heads, -1)).sum(-1).exp()
    close(attend_weights(query, sources, heads=heads, null=logit), powers / (powers.sum(0) + logit.exp()))
    never = torch.tensor([-1e4], dtype=torch.float64)
    close(attend(query, sources, heads=heads, null=never), attend(query, sources, heads=heads))
    close(attend(query, sources, heads=heads, null=-never), torch.zeros_like(sources[0]))


def test_attend_zero_queries_read_mean_sum_or_nothing():
    query, sources = draw(7)
    total = sum(sources)
    close(attend(0 * query, sources), total / 7)
    close(attend(0 * query, sources, total=True), total)
    for n in range(1, 8):  # softmax of n zeros is 1/n to the last bit, or a centered design would start off identity
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            some = tuple(source.to(dtype) for source in sources[:n])
            assert not attend(0 * query, some, centered=True).any()


def test_attend_one_head_is_the_default_and_more_differ():
    query, sources = draw(4)
    assert torch.equal(attend(query, sources, heads=1), attend(query, sources))
    assert (attend(query, sources, heads=2) - attend(query, sources)).abs().max() > 0.1


# ----------------------------------------------------------------------------------------------------- numerics


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"heads": 2}, {"total": True}, {"centered": True}], ids=str)
def test_attend_accumulates_narrow_sources_in_float32(dtype, options):
    query, sources = draw(64, width=128, dtype=dtype)
    query = query.to(torch.float32) / 4
    found = attend(query, sources, **options)
    weights = attend_weights(query, sources, **options)
    assert (found.dtype, weights.dtype) == (dtype, torch.float32)
    wide = tuple(source.float() for source in sources)
    assert torch.equal(found, attend(query, wide, **options).to(dtype))  # rounded once, at the end
    exact = attend(query.double(), tuple(source.double() for source in sources), **options)
    # half an ulp for the last rounding, and the float32 logits of 128 terms are exact to a few float32 ulps
    allowed = torch.finfo(dtype).eps / 2 + 8 * torch.finfo(torch.float32).eps
    assert (found.double() - exact).abs().max() <= allowed * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_attend_weights_come_in_the_accumulation_type(dtype):
    query, sources = draw(3, dtype=dtype)
    assert attend_weights(query.to(dtype), sources).dtype == dtype
    assert attend(query.to(dtype), sources).dtype == dtype


def test_attend_float16_squares_do_not_overflow():
    query, sources = draw(3)
    large = tuple((300 + source).half() for source in sources)  # 300^2 is beyond float16
    found = attend(query.float(), large)
    assert found.isfinite().all()
    assert (found.float() - 300).abs().max() < 4


def test_attend_huge_logits_stay_finite_with_their_gradients():
    query, sources = draw(3)
    query = (1e6 * query).requires_grad_()
    leaves = tuple(source.clone().requires_grad_() for source in sources)
    read = attend(query, leaves, null=torch.tensor([1e6], dtype=torch.float64))
    gradients = torch.autograd.grad(read.sum(), (query, *leaves))
    assert read.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_attend_zero_source_is_finite_with_its_gradient():
    query, sources = draw(2)
    zero = torch.zeros_like(sources[0]).requires_grad_()
    (gradient,) = torch.autograd.grad(attend(query, (zero, *sources)).sum(), zero)
    assert gradient.isfinite().all()


@pytest.mark.parametrize(("batch", "tokens"), [(2, 0), (0, 3), (0, 0)])
@pytest.mark.parametrize("options", [{}, {"heads": 2}, {"total": True, "centered": True}], ids=str)
def test_attend_zero_tokens_read_nothing(batch, tokens, options):
    query, sources = draw(3, batch=batch, tokens=tokens)
    query.requires_grad_()
    read = attend(query, sources, **options)
    assert read.shape == (batch, tokens, 6)
    assert attend_weights(query, sources, **options).shape == (3, batch, tokens, options.get("heads", 1))
    (gradient,) = torch.autograd.grad(read.sum(), query)
    assert not gradient.any()


def test_attend_tokens_do_not_meet():
    query, sources = draw(4)
    alone = attend(query, tuple(source[1:, 2:] for source in sources))
    close(attend(query, sources)[1:, 2:], alone, 1e-15)
