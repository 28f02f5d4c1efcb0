"""Several depth reads over the same sources, in two phases or all at once: what single reads give."""

import pytest
import torch

from residua import ops
from residua.model import ModelConfig, Transformer, token_loss
from residua.ops.attend import cpu, native, reference
from residua.ops.attend.together import together
from residua.testing import assert_close
from tests.ops.reads import DEFAULTS, draw
from tests.ops.table import GROUPED
from tests.ops.table import draw as arguments


@pytest.mark.parametrize("dtype", cpu.CARRIED, ids=str)
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("nulls", [False, True])
@pytest.mark.parametrize(("queries", "old", "width"), [(2, 1, 16), (5, 3, 44), (8, 7, 64), (17, 12, 48)])
def test_attend_ahead_and_merge_equal_single_reads(dtype, heads, nulls, queries, old, width):
    """A group of reads over old sources, merged with fresh ones: the reads and gradients of single reads."""
    wide = torch.promote_types(dtype, torch.float32)
    generator = torch.Generator().manual_seed(queries)
    w = [(0.2 * torch.randn(width, generator=generator)).to(wide).requires_grad_() for _ in range(queries)]
    # one leaf: a null's gradient is a single sum over the tokens, which may cancel to any relative error
    all_nulls = [(0.1 * torch.arange(queries, dtype=wide)).requires_grad_()] if nulls else []
    null = all_nulls[0] if nulls else None
    shape = (2, 7, width)
    sources = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(old + queries)]
    pull = [torch.randn(shape, generator=generator).to(dtype) for _ in range(queries + 1)]

    carries, same = cpu.ahead(torch.stack(w), tuple(sources[:old]), null, eps=1e-6, heads=heads)
    found = [
        cpu.merge(carries[k], w[k], tuple(sources[old : old + k]), eps=1e-6, heads=heads, scale=1 + k)
        for k in range(queries)
    ]
    found.append(ops.attend(w[0], same, heads=heads))  # a read that comes after uses the sources handed back

    w64, s64 = ([one.double() for one in part] for part in (w, sources))
    null64 = null.double().split(1) if nulls else [None] * queries
    options = [DEFAULTS | {"heads": heads, "null": null64[k]} for k in range(queries)]
    exact = [(1 + k) * reference.attend(w64[k], tuple(s64[: old + k]), **options[k]) for k in range(queries)]
    exact.append(reference.attend(w64[0], tuple(s64[:old]), **DEFAULTS | {"heads": heads}))

    for one, other in zip(found, exact, strict=True):
        assert_close(one, other)
    leaves = [*w, *all_nulls, *sources]
    slopes = [one.to(made.dtype) for one, made in zip(pull, found, strict=True)]  # a carry of nothing more is wide
    ours = torch.autograd.grad(found, leaves, slopes, allow_unused=True)
    theirs = torch.autograd.grad(exact, leaves, [one.double() for one in pull], allow_unused=True)
    for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert (one is None) == (other is None), place
        if one is not None and other is not None:
            assert_close(one, other, f"gradient {place}", gradient=True)


def test_attend_ahead_skips_what_is_not_wanted():
    query, _, sources, gradient = draw(4)
    frozen = [sources[0].detach(), *sources[1:]]
    carries, same = cpu.ahead(torch.stack([query, 2 * query]).detach(), tuple(frozen), eps=1e-6)
    (found,) = torch.autograd.grad(carries[1].value, sources[2], gradient)
    expected = torch.autograd.grad(
        reference.attend(2 * query.detach(), tuple(frozen), **DEFAULTS), sources[2], gradient
    )[0]
    assert_close(found, expected, gradient=True)
    assert len(same) == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "count", "width"), [(1, 2, 16), (2, 5, 44), (1, 17, 96)])
@pytest.mark.parametrize("extras", [False, True])
def test_attend_together_equals_single_reads(dtype, heads, count, width, extras):
    wide = torch.promote_types(dtype, torch.float32)
    generator = torch.Generator().manual_seed(count)

    def several(*shape):
        return [torch.randn(shape, generator=generator).to(wide) for _ in range(count)]

    queries, gains, nulls, gates = several(width), several(width), several(1), several(1)
    sources = [torch.randn(2, 3, width, generator=generator).to(dtype) for _ in range(4)]
    sources[1] = sources[1].mT.contiguous().mT  # one that does not lie in rows
    given = {"nulls": nulls, "gates": gates} if extras else {}
    found = together(queries, gains, sources, eps=1e-6, heads=heads, **given)
    for k, read in enumerate(found):
        options = DEFAULTS | {"heads": heads, "null": nulls[k].double() if extras else None}
        exact = reference.attend((queries[k] * gains[k]).double(), tuple(s.double() for s in sources), **options)
        assert_close(read, exact * gates[k].double() if extras else exact, f"read {k}")


def test_attend_together_of_no_tokens_is_nothing():
    found = together([torch.zeros(16)] * 2, [torch.ones(16)] * 2, [torch.zeros(1, 0, 16)] * 3, eps=1e-6)
    assert [one.shape for one in found] == [(1, 0, 16)] * 2


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("one query", lambda a: a | {"queries": a["queries"][:1], "gains": a["gains"][:1]}),
        ("a gain too few", lambda a: a | {"gains": a["gains"][:2]}),
        ("a narrow type", lambda a: a | {"gains": [g.bfloat16() for g in a["gains"]]}),
        ("a stride", lambda a: a | {"queries": [torch.zeros(32)[::2] for _ in a["queries"]]}),
        (
            "a crooked address",
            lambda a: a | {"gains": [torch.frombuffer(bytearray(65), dtype=torch.float32, offset=1)] * 3},
        ),
        ("another width", lambda a: a | {"queries": [torch.zeros(8) for _ in a["queries"]]}),
        ("a gate a channel", lambda a: a | {"gates": [torch.zeros(16) for _ in a["queries"]]}),
        ("sources unlike", lambda a: a | {"sources": [a["sources"][0], a["sources"][1].double()]}),
    ],
)
def test_attend_together_declines(name, change):
    given = {"queries": [torch.zeros(16)] * 3, "gains": [torch.ones(16)] * 3, "sources": [torch.zeros(1, 2, 16)] * 2}
    assert len(together(**given, eps=1e-6)) == 3
    with pytest.raises(ops.Unsupported):
        together(**change(given), eps=1e-6)


@pytest.mark.parametrize("large", [False, True], ids=["read kept", "value kept"])
@pytest.mark.parametrize("op", GROUPED)
def test_attend_groups_have_second_derivatives(op, large, monkeypatch):
    """Of everything they are given, whichever the merge keeps for its backward pass."""
    monkeypatch.setattr(native, "large", lambda query, was: large)
    shapes, call, _ = GROUPED[op]
    inputs = [one[..., :4] if one.shape[-1] == 12 else one for one in arguments(shapes)]
    inputs = [(one[:1, :2] if one.ndim == 3 else one).clone().requires_grad_() for one in inputs]
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


def test_attend_groups_have_second_derivatives_of_some_inputs():
    queries, nulls, *sources = arguments([(2, 12), (2,), *[(2, 3, 12)] * 3])
    queries.requires_grad_()
    sources[2].requires_grad_()
    call, plain = GROUPED["groups-1"][1:]
    answers = []
    for read in (call, plain):
        slopes = torch.autograd.grad(
            read(queries, nulls, *sources).square().sum(), (queries, sources[2]), create_graph=True
        )
        answers.append(torch.autograd.grad(sum(one.square().sum() for one in slopes), (queries, sources[2])))
    for one, other in zip(*answers, strict=True):
        assert_close(one, other, gradient=True)


@pytest.mark.parametrize("design", ["attnres", "delta"])
def test_large_models_have_second_derivatives(design):
    """At a shape where reads are made in groups: the product of the Hessian with the gradient."""
    config = ModelConfig(vocab=13, width=64, depth=6, heads=4, design=design, layout="mlp")
    model = Transformer(config, seed=0).double()
    tokens = torch.randint(13, (8, 129), generator=torch.Generator().manual_seed(0))
    products = []
    for name in ("cpu", "reference"):
        with ops.backend(name, strict=False):
            loss = token_loss(model(tokens[:, :-1]), tokens[:, 1:])
            slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            half = sum(one.square().sum() for one in slopes) / 2
            products.append(torch.autograd.grad(half, list(model.parameters())))
    for one, other in zip(*products, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-12)
