"""The ops that decoding calls for few tokens, in C: against their definitions, and what keeps a call from them."""

import pytest
import torch
from torch.nn import functional as F

from residua import ops
from residua.native import library
from residua.ops.project import native as project_native
from residua.testing import TOLERANCE, assert_close
from tests.native.table import variants
from tests.ops.test_native_ops import misaligned, strided

KERNEL = {"name": "cpu", "strict": True}
STEPS = [
    # rows, heads, shared, head width, tokens before, room
    (1, 1, 1, 2, 0, 1),
    (2, 4, 2, 6, 7, 8),
    (1, 4, 4, 16, 33, 40),
    (1, 6, 2, 38, 130, 200),
    (2, 2, 1, 64, 15, 17),
    (1, 1, 1, 100, 600, 601),
]
steps = pytest.mark.parametrize("step", STEPS, ids=str)
types = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture(autouse=True)
def every_matrix(monkeypatch):
    """Kernels take matrices of any size here, and as many rows of every type."""
    monkeypatch.setattr(project_native, "LEAST", 0)
    monkeypatch.setattr(project_native, "ROWS", dict.fromkeys(project_native.ROWS, 4))


def drawn(dtype, *shapes):
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [(0.3 + torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype) for shape in shapes]


def turns(width, dtype):
    angles = torch.arange(width // 2, dtype=torch.promote_types(dtype, torch.float32))[None]
    return angles.cos(), angles.sin()


def wide(given):
    return [one.double() for one in given]


@variants
@types
@pytest.mark.parametrize("size", [(1, 1, 1), (1, 5, 3), (2, 19, 17), (1, 64, 24), (2, 4100, 9)], ids=str)
@torch.no_grad()
def test_projections_of_few_tokens(size, dtype, instructions):
    rows, width, outputs = size
    x, weight, *mlp = drawn(dtype, (rows, 1, width), (outputs, width), (11, width), (11, width), (outputs, 11))
    with library.instructions(instructions), ops.backend(**KERNEL), library.counted() as counts:
        found = ops.project(x, weight), ops.gated_mlp(x, *mlp)
    assert counts == {"residua_project": 1, "residua_gated_mlp": 1}
    with ops.backend("reference"):
        expected = ops.project(*wide((x, weight))), ops.gated_mlp(*wide((x, *mlp)))
    for one, other, name in zip(found, expected, ("project", "gated_mlp"), strict=True):
        assert one.dtype == dtype
        assert_close(one, other, name, gradient=False)


def drawn_step(step, dtype, lanes=1, channels=5, outputs=7):
    rows, heads, shared, width, _, room = step
    shapes = [(heads * width, channels), *[(shared * width, channels)] * 2, (outputs, heads * width)]
    cache = [(rows, shared, room, width)] * 2
    given = drawn(dtype, *[(rows, 1, channels)] * lanes, *shapes, *cache)
    return tuple(given[:lanes]), tuple(given[lanes:-2]), given[-2:]


@variants
@types
@pytest.mark.parametrize("lanes", [1, 3])
@steps
@torch.no_grad()
def test_a_step_of_attention(step, lanes, dtype, instructions):
    """What it reads, what it writes to the cache, and that it writes nothing else there."""
    before = step[-2]
    given, weights, cache = drawn_step(step, dtype, lanes)
    rotation, held = turns(step[3], dtype), [one.clone() for one in cache]
    with library.instructions(instructions), ops.backend(**KERNEL), library.counted() as counts:
        found = ops.attention_step(given, weights, rotation, *held, before)
    assert counts == {"residua_attention_step": 1}
    exact, turned = wide(cache), turns(step[3], torch.float64)
    with ops.backend("reference"):
        expected = ops.attention_step(tuple(wide(given)), tuple(wide(weights)), turned, *exact, before)
    assert_close(found, expected, "step", gradient=False)
    for one, other, was in zip(held, exact, cache, strict=True):
        assert_close(one[:, :, before], other[:, :, before], "cache", gradient=False)
        one[:, :, before] = was[:, :, before]
        assert torch.equal(one, was)


@variants
@types
@pytest.mark.parametrize("turned", [True, False])
@steps
@torch.no_grad()
def test_attention_over_a_cache(step, turned, dtype, instructions):
    rows, heads, shared, width, before, room = step
    *qkv, keys, values = drawn(
        dtype, (rows, 1, heads * width), *[(rows, 1, shared * width)] * 2, *[(rows, shared, room, width)] * 2
    )
    exact = wide((keys, values))
    with library.instructions(instructions), ops.backend(**KERNEL), library.counted() as counts:
        found = ops.cached_attend(*qkv, turns(width, dtype) if turned else None, keys, values, before)
    assert counts == {"residua_cached_attend": 1}
    with ops.backend("reference"):
        expected = ops.cached_attend(*wide(qkv), turns(width, torch.float64) if turned else None, *exact, before)
    assert_close(found, expected, "read", gradient=False)
    for one, other in zip((keys, values), exact, strict=True):
        assert_close(one[:, :, : before + 1], other[:, :, : before + 1], "cache", gradient=False)


@pytest.mark.parametrize("change", [strided, misaligned])
@torch.no_grad()
def test_any_layout_gives_the_same_numbers(change):
    x, weight, *mlp = drawn(torch.float32, (1, 1, 19), (7, 19), (11, 19), (11, 19), (7, 11))
    given, weights, cache = drawn_step(STEPS[1], torch.float32)
    rotation = turns(STEPS[1][3], torch.float32)
    with ops.backend(**KERNEL):
        expected = [
            ops.project(x, weight), ops.gated_mlp(x, *mlp),
            ops.attention_step(given, weights, rotation, *[one.clone() for one in cache], 7),
        ]  # fmt: skip
        changed = [change(one) for one in cache]
        found = [
            ops.project(change(x), change(weight)), ops.gated_mlp(change(x), *map(change, mlp)),
            ops.attention_step(tuple(map(change, given)), tuple(map(change, weights)), rotation, *changed, 7),
        ]  # fmt: skip
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, "layout", gradient=False)


@torch.no_grad()
def test_any_number_of_threads_gives_the_same_bits(monkeypatch):
    given, weights, cache = drawn_step((2, 6, 3, 16, 40, 64), torch.float32, channels=33, outputs=30)
    mlp = drawn(torch.float32, (2, 1, 19), (21, 19), (21, 19), (7, 21))
    found = []
    for threads in (1, 3):
        monkeypatch.setattr(library, "threads", lambda numbers, threads=threads: threads)
        held = [one.clone() for one in cache]
        found.append([ops.attention_step(given, weights, None, *held, 40), *held, ops.gated_mlp(*mlp)])
    assert all(map(torch.equal, *found))


def test_gradients_are_those_of_the_definition():
    """Where a gradient is wanted no kernel runs, whatever the size."""
    x, weight, *mlp = [
        one.requires_grad_() for one in drawn(torch.float64, (1, 1, 9), (7, 9), (11, 9), (11, 9), (7, 11))
    ]
    with library.counted() as counts:
        found = torch.autograd.grad(ops.project(x, weight).sum() + ops.gated_mlp(x, *mlp).sum(), (x, weight, *mlp))
    gate, up, down = mlp
    by_hand = F.linear(x, weight).sum() + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down).sum()
    for one, other in zip(found, torch.autograd.grad(by_hand, (x, weight, *mlp)), strict=True):
        assert_close(one, other, "gradient", gradient=True)
    assert not {"residua_project", "residua_gated_mlp"} & counts.keys()


@torch.no_grad()
def test_what_else_is_asked_goes_to_torch():
    """Many rows, autocast, half precision, transforms: no kernel, the same answer."""
    x, weight, *mlp = drawn(torch.float32, (1, 1, 9), (7, 9), (11, 9), (11, 9), (7, 11))
    with library.counted() as counts:
        many = x.expand(1, 5, 9)
        assert torch.equal(ops.project(many, weight), F.linear(many, weight))
        assert ops.gated_mlp(many, *mlp).shape == (1, 5, 7)
        assert ops.project(x[:0], weight).shape == (0, 1, 7)
        assert torch.equal(ops.project(x.half(), weight.half()), F.linear(x.half(), weight.half()))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert ops.project(x, weight).dtype == torch.bfloat16
        seen = torch.func.vmap(lambda one: ops.project(one, weight))(x)
        assert_close(seen, F.linear(x, weight), "vmap", gradient=False)
    assert not {"residua_project", "residua_gated_mlp"} & counts.keys()


def test_wrong_shapes_are_refused():
    keys = torch.zeros(1, 2, 4, 6)
    x = torch.zeros(1, 1, 12)
    with pytest.raises(ValueError, match="none at 4"):
        ops.cached_attend(x, x, x, None, keys, keys.clone(), 4)
    with pytest.raises(ValueError, match="cached_attend takes"):
        ops.cached_attend(x, x[..., :6], x[..., :6], None, keys, keys.clone(), 0)
    with pytest.raises(ValueError, match="multiple of the 2"):
        ops.cached_attend(torch.zeros(1, 1, 18), x, x, None, keys, keys.clone(), 0)
    with torch.no_grad(), pytest.raises(RuntimeError):
        ops.project(x, torch.zeros(3, 11))
    with torch.no_grad(), pytest.raises(ValueError, match="none at 4"):
        ops.attention_step((x,), (torch.zeros(12, 12),) * 4, None, keys, keys.clone(), 4)
