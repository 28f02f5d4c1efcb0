"""window_attend is causal attention over the last `window` tokens, or over those of the token's own block."""

import pytest
import torch
from torch.nn import functional as F

from residua import ops


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(tokens=9, heads=2, kv=2, e=4, batch=2):
    return draw(batch, heads, tokens, e), draw(batch, kv, tokens, e, seed=1), draw(batch, kv, tokens, e, seed=2)


def whole(q, k, v, **options):
    """Every token attends to the sequence it is part of."""
    at = torch.arange(q.shape[2])
    return ops.window_attend(q, k, v, queries=at, keys=at, **options)


def loop(q, k, v, sees):
    """softmax over the keys that sees(t, j) allows, token by token."""
    out = torch.zeros_like(q)
    for t in range(q.shape[2]):
        seen = [j for j in range(k.shape[2]) if sees(t, j)]
        scores = torch.stack([(q[:, :, t] * k[:, :, j]).sum(-1) for j in seen]) / q.shape[-1] ** 0.5
        weights = scores.exp() / scores.exp().sum(0)
        out[:, :, t] = sum(weights[i][..., None] * v[:, :, j] for i, j in enumerate(seen))
    return out


def seen_by(tokens, **options):
    """For each token, the set of keys with weight: zero queries over one-hot values."""
    zero = torch.zeros(1, 1, tokens, tokens, dtype=torch.float64)
    out = whole(zero, zero, torch.eye(tokens, dtype=torch.float64)[None, None], **options)[0, 0]
    return [set(row.nonzero().flatten().tolist()) for row in out]


X = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64).view(1, 1, 4, 1)


@pytest.mark.parametrize(
    ("q", "window", "expected"),
    [
        (X, 1, (0, 1, 2, 3)),
        (X, 2, (0, 0.73105858, 1.88079708, 2.95257413)),
        (X, 4, (0, 0.73105858, 1.85093709, 2.94762888)),
        (0 * X, 2, (0, 0.5, 1.5, 2.5)),
    ],
    ids=["w=1", "w=2", "w=4", "w=2 without queries"],
)
def test_window_attend_hand_values(q, window, expected):
    out = whole(q, X, X, window=window).flatten()
    assert (out - torch.tensor(expected, dtype=torch.float64)).abs().max() < 5e-9


@pytest.mark.parametrize("mode", ["sliding", "local"])
def test_window_attend_of_one_is_the_value(mode):
    q, k, v = qkv()
    assert (whole(q, k, v, window=1, mode=mode) - v).abs().max() < 1e-15


@pytest.mark.parametrize("mode", ["sliding", "local"])
@pytest.mark.parametrize("window", [9, 10, 100])
def test_window_attend_as_long_as_the_text_is_causal_attention(window, mode):
    q, k, v = qkv()
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert (whole(q, k, v, window=window, mode=mode) - expected).abs().max() < 1e-14


@pytest.mark.parametrize("window", [1, 2, 3, 4, 8, 9, 20])
@pytest.mark.parametrize("mode", ["sliding", "local"])
@pytest.mark.parametrize("causal", [True, False])
def test_window_attend_equals_its_loop(window, mode, causal):
    q, k, v = qkv()

    def sees(t, j):
        near = abs(t - j) < window if mode == "sliding" else t // window == j // window
        return near and (j <= t or not causal)

    out = whole(q, k, v, window=window, mode=mode, causal=causal)
    assert (out - loop(q, k, v, sees)).abs().max() < 1e-13


def test_window_attend_sliding_and_local_differ_where_they_should():
    sliding, local = seen_by(8, window=4), seen_by(8, window=4, mode="local")
    assert [len(s) for s in sliding] == [1, 2, 3, 4, 4, 4, 4, 4]
    assert [len(s) for s in local] == [1, 2, 3, 4, 1, 2, 3, 4]
    assert [t for t in range(8) if sliding[t] != local[t]] == [4, 5, 6]


@pytest.mark.parametrize(
    ("mode", "reach"),
    [
        ("sliding", lambda s: [s <= t < s + 3 for t in range(9)]),
        ("local", lambda s: [s <= t and t // 3 == s // 3 for t in range(9)]),
    ],
)
@pytest.mark.parametrize("source", [0, 2, 4, 8])
def test_window_attend_token_moves_only_those_that_see_it(mode, reach, source):
    q, k, v = qkv()
    before = whole(q, k, v, window=3, mode=mode)
    k, v = k.clone(), v.clone()
    k[:, :, source] += 1
    v[:, :, source] -= 1
    # `!=`, not a tolerance: tokens after t, and tokens at t - window and before, must not touch t at all
    changed = (whole(q, k, v, window=3, mode=mode) != before).flatten(0, 1).any(-1).any(0)
    assert changed.tolist() == reach(source)


def test_window_attend_key_heads_are_shared_between_groups():
    q, k, v = qkv(heads=6, kv=2)
    every = [one.repeat_interleave(3, 1) for one in (k, v)]
    assert (whole(q, k, v, window=3) - whole(q, *every, window=3)).abs().max() < 1e-14


@pytest.mark.parametrize("mode", ["sliding", "local"])
def test_window_attend_empty_slots_are_ignored(mode):
    q, k, v = qkv()
    at = torch.arange(9)
    expected = whole(q, k, v, window=4, mode=mode)
    junk = torch.full((2, 2, 3, 4), 1e6, dtype=torch.float64)
    keys = torch.cat([torch.full((3,), -1), at])
    out = ops.window_attend(
        q, torch.cat([junk, k], 2), torch.cat([junk, v], 2), window=4, mode=mode, queries=at, keys=keys
    )
    assert (out - expected).abs().max() < 1e-14


def test_window_attend_order_of_keys_does_not_matter():
    q, k, v = qkv()
    at, order = torch.arange(9), torch.tensor([4, 8, 0, 2, 7, 5, 1, 3, 6])
    out = ops.window_attend(q, k[:, :, order], v[:, :, order], window=4, queries=at, keys=order)
    assert (out - whole(q, k, v, window=4)).abs().max() < 1e-14


def test_window_attend_rows_keep_their_own_positions():
    q, k, v = qkv(batch=2)
    at = torch.arange(9)
    # row 1 is padded with two empty slots on the left
    keys = torch.stack([at, torch.cat([torch.tensor([-1, -1]), at[:7]])])
    queries = torch.stack([at, keys[1].clamp(min=0)])
    out = ops.window_attend(q, k, v, window=4, queries=queries, keys=keys)
    plain = whole(q, k, v, window=4)
    alone = whole(q[1:, :, 2:], k[1:, :, 2:], v[1:, :, 2:], window=4)
    assert (out[0] - plain[0]).abs().max() < 1e-14
    assert (out[1, :, 2:] - alone[0]).abs().max() < 1e-14


@pytest.mark.parametrize(("mode", "shift"), [("sliding", 5), ("sliding", 1000), ("local", 8), ("local", 4000)])
def test_window_attend_positions_are_relative(mode, shift):
    q, k, v = qkv()
    at = torch.arange(9)
    out = ops.window_attend(q, k, v, window=4, mode=mode, queries=at + shift, keys=at + shift)
    assert torch.equal(out, whole(q, k, v, window=4, mode=mode))


def ring(q, k, v, *, window, capacity, chunk, write_first, mode="sliding"):
    """Decode in chunks over a ring of `capacity` slots, slot p mod capacity, -1 where empty."""
    slots_k, slots_v = (torch.zeros(2, 2, capacity, 4, dtype=torch.float64) for _ in "kv")
    held = torch.full((capacity,), -1)
    out = []
    for at in torch.arange(q.shape[2]).split(chunk):
        new_k, new_v, slot = k[:, :, at], v[:, :, at], at % capacity

        def store(new_k=new_k, new_v=new_v, slot=slot, at=at):
            for i in range(len(at)):  # one by one: a chunk longer than the ring overwrites itself
                slots_k[:, :, slot[i]], slots_v[:, :, slot[i]], held[slot[i]] = new_k[:, :, i], new_v[:, :, i], at[i]

        if write_first:
            store()
            keys = slots_k, slots_v, held
        else:
            keys = torch.cat([slots_k, new_k], 2), torch.cat([slots_v, new_v], 2), torch.cat([held, at])
        seen_k, seen_v, where = (one.clone() for one in keys)
        out.append(ops.window_attend(q[:, :, at], seen_k, seen_v, window=window, mode=mode, queries=at, keys=where))
        if not write_first:
            store()
    return torch.cat(out, 2)


@pytest.mark.parametrize("mode", ["sliding", "local"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 8, 16])
def test_window_attend_over_a_ring_and_the_new_tokens_is_exact(chunk, mode):
    q, k, v = qkv(tokens=23)
    out = ring(q, k, v, window=4, capacity=4, chunk=chunk, write_first=False, mode=mode)
    assert (out - whole(q, k, v, window=4, mode=mode)).abs().max() < 1e-13


@pytest.mark.parametrize(("capacity", "exact"), [(4, False), (5, False), (6, True), (9, True)])
def test_window_attend_over_a_ring_written_first_needs_room_for_the_chunk(capacity, exact):
    q, k, v = qkv(tokens=23)
    out = ring(q, k, v, window=4, capacity=capacity, chunk=3, write_first=True)
    error = (out - whole(q, k, v, window=4)).abs().max().item()
    assert error < 1e-13 if exact else error > 1e-2


def test_window_attend_unknown_mode_is_refused():
    q, k, v = qkv()
    with pytest.raises(ValueError, match="sliding or local"):
        whole(q, k, v, window=4, mode="block")


@pytest.mark.parametrize("mode", ["sliding", "local"])
@pytest.mark.parametrize("causal", [True, False])
def test_window_attend_gradcheck(mode, causal):
    arguments = [one.requires_grad_() for one in qkv(tokens=5, heads=2, kv=1, e=2, batch=1)]
    assert torch.autograd.gradcheck(lambda *a: whole(*a, window=2, mode=mode, causal=causal), arguments)


def test_window_attend_no_tokens():
    q, k, v = qkv()
    none = torch.arange(0)
    assert ops.window_attend(q[:, :, :0], k, v, window=4, queries=none, keys=torch.arange(9)).shape == (2, 2, 0, 4)
    assert whole(q[:, :, :0], k[:, :, :0], v[:, :, :0], window=4).shape == (2, 2, 0, 4)


@pytest.mark.parametrize(("axis", "shape"), [(0, (9, 2, 3, 8)), (1, (2, 9, 8)), (2, (2, 3, 9, 8)), (-2, (9, 8))])
@pytest.mark.parametrize("heads", [1, 2])
def test_window_attend_attends_along_any_axis(axis, shape, heads):
    """Every other axis is a batch: moved to the front, split into heads and attended to one by one."""
    q, k, v = (draw(*shape, seed=s) for s in range(3))
    out = ops.window_attend(q, k, v, window=3, axis=axis, heads=heads)
    assert out.shape == q.shape
    rows = [x.movedim(axis, -2).reshape(-1, 9, 8).unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v)]
    expected = loop(*rows, lambda t, j: 0 <= t - j < 3).transpose(1, 2).flatten(-2)
    assert (out.movedim(axis, -2).reshape(-1, 9, 8) - expected).abs().max() < 1e-13


def test_window_attend_along_depth_is_attend_qkv_row_by_row():
    U = [draw(6, 2, 3, 8, seed=s) for s in range(3)]
    whole_stack = ops.window_attend(*U, window=3, axis=0, heads=2)
    for l in range(6):
        keys, values = (tuple(x[max(0, l - 2) : l + 1]) for x in U[1:])
        assert (whole_stack[l] - ops.attend_qkv(U[0][l], keys, values, heads=2)).abs().max() < 1e-13


def test_window_attend_fewer_key_heads_side_by_side():
    q, k, v = draw(2, 9, 12), draw(2, 9, 4, seed=1), draw(2, 9, 4, seed=2)
    out = ops.window_attend(q, k, v, window=3, axis=1, heads=6)
    split = [x.unflatten(-1, (-1, 2)).transpose(1, 2) for x in (q, k, v)]
    assert (out - whole(*split, window=3).transpose(1, 2).flatten(-2)).abs().max() < 1e-14


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mode", ["sliding", "local"])
def test_window_attend_bias_is_added_by_distance(causal, mode):
    q, k, v = qkv()
    bias = draw(2, 3 if causal else 5, seed=5)
    out = whole(q, k, v, window=3, mode=mode, causal=causal, bias=bias)
    expected = torch.zeros_like(q)
    for t in range(9):
        near = [j for j in range(9) if (abs(t - j) < 3 if mode == "sliding" else t // 3 == j // 3)]
        seen = [j for j in near if j <= t or not causal]
        scores = torch.stack(
            [(q[:, :, t] * k[:, :, j]).sum(-1) / 2 + bias[:, t - j + (0 if causal else 2)] for j in seen]
        )
        weights = scores.softmax(0)
        expected[:, :, t] = sum(weights[i][..., None] * v[:, :, j] for i, j in enumerate(seen))
    assert (out - expected).abs().max() < 1e-13


def test_window_attend_rotary_positions_are_relative():
    q, k, v = qkv()
    at = torch.arange(9)
    out = ops.window_attend(q, k, v, window=4, rotary=100.0)
    later = ops.window_attend(q, k, v, window=4, rotary=100.0, queries=at + 50, keys=at + 50)
    assert (out - later).abs().max() < 1e-13
    assert (out - whole(q, k, v, window=4)).abs().max() > 1e-2
    # the pair (i, i + e/2) turns by p * base^(-2i/e)
    turn = 100.0 ** -(torch.arange(0, 4, 2, dtype=torch.float64) / 4)
    angle = at[:, None] * turn

    def rotated(x):
        left, right = x[..., :2], x[..., 2:]
        return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], -1)

    assert (out - whole(rotated(q), rotated(k), v, window=4)).abs().max() < 1e-13


@pytest.mark.parametrize("mode", ["sliding", "local"])
def test_window_attend_documents_are_as_if_each_were_alone(mode):
    from residua.ops.window_attend.position import apart

    q, k, v = qkv()
    positions, documents = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4]), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
    out = ops.window_attend(q, k, v, window=3, mode=mode, keys=apart(positions, documents, 3))
    alone = [whole(*(x[:, :, part] for x in (q, k, v)), window=3, mode=mode) for part in (slice(0, 4), slice(4, 9))]
    assert (out - torch.cat(alone, 2)).abs().max() < 1e-13


def test_window_attend_of_nothing_in_sight_is_zero_with_zero_gradients():
    q, k, v = (x.requires_grad_() for x in qkv())
    out = ops.window_attend(q, k, v, window=4, keys=torch.tensor([-1, -1, 0, 1, 2, 3, 4, 5, 6]))
    assert out[:, :, :2].abs().max() == 0
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert k.grad[:, :, :2].abs().max() == v.grad[:, :, :2].abs().max() == 0


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        ({"window": 0}, "must be at least 1"),
        ({"window": 3, "bias": torch.zeros(2, 4)}, "need (2, 3)"),
        ({"window": 3, "heads": 3}, "do not divide"),
    ],
    ids=str,
)
def test_window_attend_wrong_arguments_name_the_cure(options, cure):
    import re

    with pytest.raises(ValueError, match=re.escape(cure)):
        ops.window_attend(*qkv(), **options)
