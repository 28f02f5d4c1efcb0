"""However an argument or a gradient lies in memory, every op gives what the definition gives on a plain copy."""

import pytest
import torch

from residua import ops
from residua.model import ModelConfig, Transformer
from residua.ops.attend import together
from residua.testing import assert_close
from tests.ops.table import GROUPED, OPS, draw


def transposed(x):
    """The last axis is not the innermost."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1) if x.ndim > 1 else sliced(x)


def sliced(x):
    """Every stride doubled, with NaN between the numbers and before them."""
    wide = torch.full([2 * size + 1 for size in x.shape], torch.nan, dtype=x.dtype)
    view = wide[tuple(slice(1, None, 2) for _ in x.shape)]
    return view.copy_(x)


def offset(x):
    """In order, but not from the beginning of its memory."""
    return torch.cat([torch.full((3,), torch.nan, dtype=x.dtype), x.flatten()])[3:].view(x.shape)


def repeated(x):
    """One number for the whole last axis."""
    return x[..., :1].expand_as(x)


def repeated_rows(x):
    """One row for the whole first axis."""
    return x[:1].expand_as(x)


def negative(x):
    """In order, with a minus sign that is still to be applied."""
    return torch._neg_view(-x)


def negative_transposed(x):
    return torch._neg_view(transposed(-x))


LAYOUTS = [transposed, sliced, offset, repeated, repeated_rows, negative, negative_transposed]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)


def copy(x):
    return x.detach().resolve_neg().clone(memory_format=torch.contiguous_format)


def results(call, inputs, gradient):
    inputs = [one.detach().requires_grad_() for one in inputs]
    found = call(*inputs)
    gradient = gradient(found) if callable(gradient) else gradient
    return found, *torch.autograd.grad(found, inputs, gradient, allow_unused=True)


def check(call, plain, shapes, layout):
    """One argument after the other in this layout, then all of them, and the gradient alone."""
    first = draw(shapes)
    for place in [*range(len(first)), "all", "gradient"]:
        given = [layout(one) if place in ("all", at) else one for at, one in enumerate(first)]
        copies = [copy(one) for one in given]
        with ops.backend("reference"):
            gradient = draw([tuple(plain(*copies).shape)])[0]
            gradient = layout(gradient) if place in ("all", "gradient") else gradient
            expected = results(plain, copies, copy(gradient))
        for number, (one, other) in enumerate(zip(results(call, given, gradient), expected, strict=True)):
            assert (one is None) == (other is None)
            if one is not None:
                absolute = 1e-11 * max(1, other.abs().max().item())
                torch.testing.assert_close(one, other, rtol=0, atol=absolute, msg=f"{place}: result {number}")


@layouts
@pytest.mark.parametrize("op", OPS)
def test_every_op_reads_every_layout(op, layout):
    shapes, call = OPS[op]
    check(call, call, shapes, layout)


@layouts
@pytest.mark.parametrize("op", GROUPED)
def test_groups_of_reads_take_every_layout(op, layout):
    shapes, call, plain = GROUPED[op]
    check(call, plain, shapes, layout)


@layouts
def test_reads_at_once_take_sources_in_every_layout(layout):
    """Parameters that do not lie in order are declined: the caller then reads one after the other."""
    queries, gains, *sources = draw([(2, 12), (2, 12), *[(2, 5, 12)] * 3])
    given = [layout(one) for one in sources]
    for one, other in zip(
        together(queries.unbind(), gains.unbind(), given, eps=1e-6),
        together(queries.unbind(), gains.unbind(), [copy(one) for one in given], eps=1e-6),
        strict=True,
    ):
        assert torch.equal(one, other)
    if layout is not offset:
        with pytest.raises(ops.Unsupported):
            together([layout(one) for one in queries], gains.unbind(), sources, eps=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("positions", [False, True])
def test_window_attend_reads_no_memory_but_its_own(dtype, positions):
    """Queries, keys, values and positions with the token axis innermost: NaN or garbage, once."""
    q, k, v = (torch.randn(1, 2, 8, 50).transpose(-1, -2).to(dtype) for _ in range(3))
    keys = torch.arange(50).repeat(3, 1).T.contiguous().T[:1] if positions else None
    found = ops.window_attend(q, k, v, window=3, keys=keys)
    with ops.backend("reference"):
        assert_close(found, ops.window_attend(*(copy(one).double() for one in (q, k, v)), window=3))


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_models_with_narrow_heads_give_one_answer(heads):
    """Head widths 8 to 2: alone, in a batch, with the reference."""
    model = Transformer(
        ModelConfig(vocab=11, width=8, depth=2, heads=heads, layout="swa:window=2,mlp"), seed=0
    ).double()
    tokens = torch.randint(11, (3, 40), generator=torch.Generator().manual_seed(0))
    found = model(tokens)
    with ops.backend("reference"):
        assert_close(found, model(tokens))
    assert_close(found[:1], model(tokens[:1]))
