"""DenseFormer: averages by hand, which blocks each of them sees, and the standard Transformer at the start."""

import pytest
import torch

import residua
from residua import Plan
from tests.streams.hand import BY, close, set_, trace, vector
from tests.streams.harness import compare, run_stream, toy_norms, toy_sublayers

# Block_i(y) = y + c_i for c = 1, 2, 4, 8: one sublayer a block, which answers c_i
BLOCKS = [lambda x, c=c: torch.full_like(x, c) for c in (1, 2, 4, 8)]

GRID = [(1, 1), (2, 1), (3, 1), (4, 1), (9, 1), (1, 2), (1, 3), (2, 3), (3, 2), (4, 5), (2, 9)]


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(
    ("spec", "alphas", "expected"),
    [
        ("denseformer", {}, [2, 4, 8, 16]),
        ("denseformer", {"l2_mlp__alpha": [0.5, -1, 1]}, [2, 2.5, 6.5, 14.5]),
        ("denseformer:dilation=2", {"l3_mlp__alpha": [10, 1], "head__alpha": [100, 10, 1]}, [2, 4, 28, 176]),
    ],
    ids=["one-hot", "negative", "dilated"],
)
def test_denseformer_average_by_hand(spec, alphas, expected, by):
    """Y_1 to Y_4 with e = 1: a block reads the average, and later averages see the block before it was averaged."""
    stream = residua.build(spec, Plan.regular(1, 4, ("mlp",))).double()
    set_(stream, **alphas)
    inputs, out = trace(stream, vector(1), BLOCKS, by=by)
    assert [x.item() for (x,) in inputs[1:]] + [out.item()] == pytest.approx(expected, abs=1e-12)


def after(stream, i):
    """The indices of the block outputs averaged after block i (1-based); 0 is the embedding."""
    site = next(site for site in stream.plan.readers if site.first and site.layer == i)
    return {0 if name == "embed" else int(name[1:]) + 1 for name in stream.sources(site)}


def test_denseformer_slots_of_a_dilation():
    stream = residua.build("denseformer:dilation=4", Plan.regular(2, 12))
    assert [len(after(stream, i)) for i in range(1, 13)] == [1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4]


def test_denseformer_sources_of_dilation_and_period():
    """k=4, p=5, L=10: after 5 {1, 5}; after 10 {2, 6, 10}; nothing elsewhere."""
    stream = residua.build("denseformer:dilation=4,period=5", Plan.regular(2, 10))
    sets = {i: after(stream, i) for i in range(1, 11)}
    assert {i: found for i, found in sets.items() if found} == {5: {1, 5}, 10: {2, 6, 10}}


def test_denseformer_dilation_equal_to_period_misses_blocks():
    """The bad choice the paper warns of: after 8, k = p = 4 sees 0, 4, 8 and never 5."""
    stream = residua.build("denseformer:dilation=4,period=4", Plan.regular(2, 8))
    assert after(stream, 8) == {0, 4, 8}


@pytest.mark.parametrize("dilation", [1, 2, 3, 5])
def test_denseformer_embedding_joins_only_multiples_of_the_dilation(dilation):
    stream = residua.build(f"denseformer:dilation={dilation}", Plan.regular(2, 11))
    for i in range(1, 12):
        assert (0 in after(stream, i)) == (i % dilation == 0)


@pytest.mark.parametrize(("depth", "count"), [(1, 2), (4, 14), (12, 90), (48, 1224)])
def test_denseformer_parameter_count(depth, count):
    stream = residua.build("denseformer", Plan.regular(2, depth))
    assert sum(p.numel() for p in stream.parameters()) == count == depth * (depth + 3) // 2


@pytest.mark.parametrize(("k", "p"), [(2, 1), (4, 1), (4, 5), (3, 2), (1, 4)])
def test_denseformer_parameter_count_with_dilation_and_period(k, p):
    stream = residua.build(f"denseformer:dilation={k},period={p}", Plan.regular(2, 20))
    assert sum(q.numel() for q in stream.parameters()) == sum(i // k + 1 for i in range(p, 21, p))


@pytest.mark.parametrize(("k", "p"), GRID)
def test_denseformer_starts_as_the_standard_stream(k, p):
    """One-hot averages are the stream itself, to the last bit."""
    generator = torch.Generator().manual_seed(0)
    plan = Plan.regular(8, 6)
    sublayers, norms = toy_sublayers(plan, generator), toy_norms(plan, generator)
    x = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64)
    stream = residua.build(f"denseformer:dilation={k},period={p}", plan).double()
    standard = residua.build("standard", plan)
    assert torch.equal(run_stream(stream, x, sublayers, norms), run_stream(standard, x, sublayers, norms))


@pytest.mark.parametrize(("k", "p"), GRID)
def test_denseformer_equals_the_naive_loops(k, p):
    """For any dilation and period, with weights of either sign, at a depth neither of them divides."""
    errors = compare(f"denseformer:dilation={k},period={p}", ("attn", "mlp"), depth=7)
    assert max(errors.values()) < 1e-10, errors


def test_denseformer_head_without_choice_has_no_weight():
    """One source at the head is scaled by its weight alone, which the final norm forgets; inside it is not."""
    generator = torch.Generator().manual_seed(0)
    plan = Plan.regular(4, 3)
    stream = residua.build("denseformer:dilation=4", plan).double()
    assert [len(p) for p in stream.parameters()] == [1, 1]
    assert stream.sources(plan.head) == ()
    norms = toy_norms(plan, generator, eps=0.0)
    x = torch.randn(1, 2, 4, generator=generator, dtype=torch.float64)
    run_stream(stream, x, toy_sublayers(plan, generator), norms).sum().backward()
    assert all(p.grad.abs().item() > 1e-3 for p in stream.parameters())


def test_denseformer_reset_restores_the_one_hot():
    """A framework's blanket init would make the start another network; `reset` undoes it."""
    stream = residua.build("denseformer:dilation=2", Plan.regular(2, 4))
    start = {name: p.clone() for name, p in stream.named_parameters()}
    assert start["at.head.alpha"].tolist() == [0, 0, 1]
    for p in stream.parameters():
        torch.nn.init.normal_(p)
    stream.reset()
    assert all(torch.equal(p, start[name]) for name, p in stream.named_parameters())
    # `nn.Linear`s are what such an init looks for
    assert not any(isinstance(module, torch.nn.Linear) for module in stream.modules())


@pytest.mark.parametrize("by", BY)
def test_denseformer_mixes_states_not_sublayer_outputs(by):
    """Sources are cumulative block outputs: weights of 1 on 1, 2, 4 give 7, where outputs would give 1 + 1 + 2."""
    stream = residua.build("denseformer", Plan.regular(1, 2, ("mlp",))).double()
    set_(stream, head__alpha=[1, 1, 1])
    assert close(trace(stream, vector(1), BLOCKS[:2], by=by).out, [7])


@pytest.mark.parametrize(
    ("spec", "error", "cure"),
    [
        ("denseformer:dilation=0", ValueError, "dilation must be at least 1"),
        ("denseformer:dilation=-2", ValueError, "dilation must be at least 1"),
        ("denseformer:period=0", ValueError, "period must be at least 1"),
        ("denseformer:dilation=1.5", ValueError, "dilation takes whole number"),
        ("denseformer:period=true", ValueError, "period takes whole number"),
        ("denseformer:dilate=2", TypeError, "did you mean 'dilation'"),
        ("denseformer:window=2", TypeError, "options: dilation, period"),
    ],
)
def test_denseformer_refusal_names_the_cure(spec, error, cure):
    with pytest.raises(error) as caught:
        residua.build(spec, Plan.regular(2, 2))
    assert cure in str(caught.value)
