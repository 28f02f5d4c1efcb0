"""The duality of arXiv 2603.16039: reading depth is causal sliding-window attention over the transposed stack.

A stack U [l, b, t, d] holds l + 1 sources of every token. The depth read at l attends from U_l to U_(l-K+1) ... U_l.
Transposed to [b t, l, d] that is attention along a sequence of length l, with the same weights at every position.
It holds for a given stack: in a network the stack depends on earlier reads.
"""

import pytest
import torch
from torch.nn import functional as F

import residua
from residua import Plan, ops

LAYERS, BATCH, TOKENS, WIDTH = 6, 2, 3, 4
WINDOWS = (1, 2, 3, 5, 6, 99)


def identity(*lanes):
    return lanes


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaves():
    """A stack and W_Q, W_K, W_V."""
    stack = draw(LAYERS, BATCH, TOKENS, WIDTH, seed=0)
    return [stack, *draw(3, WIDTH, WIDTH, seed=1).unbind()]


def transposed(U, W_Q, W_K, W_V, *, window, heads, attention):
    """Sequence attention along depth, put back as [l, b, t, d]."""
    X = U.permute(1, 2, 0, 3).flatten(0, 1)  # [b t, l, d]
    q, k, v = ((X @ W).unflatten(-1, (heads, -1)).transpose(1, 2) for W in (W_Q, W_K, W_V))
    y = attention(q, k, v, window).transpose(1, 2).flatten(-2)
    return y.unflatten(0, U.shape[1:3]).permute(2, 0, 1, 3)


def by_window_attend(q, k, v, window):
    at = torch.arange(q.shape[2])
    return ops.window_attend(q, k, v, window=window, queries=at, keys=at)


def by_banded_sdpa(q, k, v, window):
    at = torch.arange(q.shape[2])
    distance = at[:, None] - at[None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(distance >= 0) & (distance < window))


def by_attend_qkv(U, W_Q, W_K, W_V, *, window, heads):
    """The depth read, layer by layer, by the op."""
    reads = []
    for l in range(len(U)):
        seen = U[max(0, l - window + 1) : l + 1]
        keys, values = (tuple((seen @ W).unbind()) for W in (W_K, W_V))
        reads.append(ops.attend_qkv(U[l] @ W_Q, keys, values, heads=heads))
    return torch.stack(reads)


def by_depthswa(U, W_Q, W_K, W_V, *, window, heads, sources, unit):
    """The depth read, layer by layer, by the design, whose sublayers answer so that its sources are U."""
    plan = Plan.regular(WIDTH, LAYERS, ("mlp",))
    spec = f"depthswa:window={window},heads={heads},sources={sources},unit={unit}"
    stream = residua.build(spec, plan).double()
    weights = {"shared.query": W_Q, "shared.key": W_K, "shared.value": W_V}
    known = dict(stream.named_parameters())
    assert set(known) == (set(weights) if window > 1 else {"shared.value"})  # one source leaves no choice
    weights = {name: weights[name] for name in known}

    def reads():
        state, found = stream.open(U[0]), []
        for site, l in zip(plan.sites, range(LAYERS), strict=True):
            read = stream.read(state, site, identity)
            found.append(read.lanes[0])
            after = U[l + 1] if l + 1 < LAYERS else U[l]
            state = stream.write(state, site, read, after - U[l] if sources == "states" else after)
        return torch.stack(found)

    with _swapped(stream, weights):
        return reads()


class _swapped:
    """The given tensors, with their graph, in place of the parameters of a module."""

    def __init__(self, module, weights):
        self.module, self.weights = module, weights

    def __enter__(self):
        self.kept = {name: self.module.get_parameter(name) for name in self.weights}
        for name, weight in self.weights.items():
            owner, last = self.module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            del owner._parameters[last]
            setattr(owner, last, weight)

    def __exit__(self, *_):
        for name, parameter in self.kept.items():
            owner, last = self.module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            delattr(owner, last)
            owner.register_parameter(last, parameter)


def outputs_and_gradients(read):
    """z, and its gradients for the stack and the three matrices under one fixed probe."""
    given = [one.clone().requires_grad_() for one in leaves()]
    z = read(*given)
    (z * draw(LAYERS, BATCH, TOKENS, WIDTH, seed=2)).sum().backward()
    return [z.detach(), *(torch.zeros_like(one) if one.grad is None else one.grad for one in given)]


def agree(ours, theirs):
    for name, a, b in zip(("output", "stack", "W_Q", "W_K", "W_V"), ours, theirs, strict=True):
        assert (a - b).abs().max() < 1e-12, name


@pytest.mark.parametrize("attention", [by_window_attend, by_banded_sdpa])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("window", WINDOWS)
def test_duality_of_the_op(window, heads, attention):
    sequence = outputs_and_gradients(lambda *a: transposed(*a, window=window, heads=heads, attention=attention))
    depth = outputs_and_gradients(lambda *a: by_attend_qkv(*a, window=window, heads=heads))
    agree(depth, sequence)


@pytest.mark.parametrize("unit", ["layer", "sublayer"])
@pytest.mark.parametrize("sources", ["states", "deltas"])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("window", WINDOWS)
def test_duality_of_the_design(window, heads, sources, unit):
    sequence = outputs_and_gradients(lambda *a: transposed(*a, window=window, heads=heads, attention=by_window_attend))
    depth = outputs_and_gradients(lambda *a: by_depthswa(*a, window=window, heads=heads, sources=sources, unit=unit))
    agree(depth, sequence)


def test_duality_needs_the_window_to_match():
    whole, short = (outputs_and_gradients(lambda *a, w=w: by_attend_qkv(*a, window=w, heads=1))[0] for w in (LAYERS, 3))
    assert (whole[:3] - short[:3]).abs().max() == 0  # nothing has left the window yet
    assert (whole[3:] - short[3:]).abs().flatten(1).amax(1).min() > 1e-3


def test_duality_window_of_one_is_the_value_projection():
    U, W_Q, W_K, W_V = leaves()
    z = transposed(U, W_Q, W_K, W_V, window=1, heads=2, attention=by_window_attend)
    assert (z - U @ W_V).abs().max() < 1e-14


def test_duality_depth_is_causal_and_short():
    U, *W = leaves()
    before = by_attend_qkv(U, *W, window=3, heads=1)
    moved = U.clone()
    moved[2] += 1
    changed = (by_attend_qkv(moved, *W, window=3, heads=1) != before).flatten(1).any(1)
    assert changed.tolist() == [False, False, True, True, True, False]


def test_duality_tokens_do_not_mix():
    U, *W = leaves()
    before = by_attend_qkv(U, *W, window=3, heads=1)
    moved = U.clone()
    moved[:, :, 1] += 1
    changed = (by_attend_qkv(moved, *W, window=3, heads=1) != before).any(-1).any(0).any(0)
    assert changed.tolist() == [False, True, False]


DELTAS = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, -1.0]], dtype=torch.float64)
STATES = torch.tensor([[1.0, 0.0], [1.0, 2.0], [4.0, 1.0]], dtype=torch.float64)
EYE, ZERO = torch.eye(2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)


def along_depth(rows, W_Q, window):
    """The read of every layer of a one-token stack of rows, by both axes."""
    U = rows[:, None, None]
    depth = by_attend_qkv(U, W_Q, EYE, EYE, window=window, heads=1)
    sequence = transposed(U, W_Q, EYE, EYE, window=window, heads=1, attention=by_window_attend)
    assert (depth - sequence).abs().max() < 1e-14
    return depth[:, 0, 0]


@pytest.mark.parametrize(
    ("rows", "W_Q", "window", "expected"),
    [
        (STATES, EYE, 1, STATES),
        (DELTAS, ZERO, 3, STATES / torch.tensor([[1.0], [2.0], [3.0]])),
        (DELTAS, ZERO, 3, torch.tensor([[1.0, 0.0], [0.5, 1.0], [4 / 3, 1 / 3]])),
        (STATES, ZERO, 3, torch.tensor([[1.0, 0.0], [1.0, 1.0], [2.0, 1.0]])),
    ],
    ids=["identity over states", "mean over deltas is h / (l + 1)", "its hand value", "mean over states"],
)
def test_duality_reductions(rows, W_Q, window, expected):
    assert (along_depth(rows, W_Q, window) - expected).abs().max() < 1e-7 * (expected.dtype == torch.float32) + 1e-14


def test_duality_unnormalised_ones_over_deltas_are_the_residual_stream():
    assert torch.equal(STATES, DELTAS.cumsum(0))
    sources = tuple(one[None, None] for one in DELTAS)
    for l in range(3):
        read = ops.mix(torch.ones(l + 1, dtype=torch.float64), sources[: l + 1])
        assert (read[0, 0] - STATES[l]).abs().max() < 1e-14


def test_duality_mean_over_states_is_not_the_residual_stream():
    read = along_depth(STATES, ZERO, 3)[-1]
    assert read.tolist() == pytest.approx([2.0, 1.0])
    # not even up to the factor that a norm removes, as the mean over deltas is
    assert F.cosine_similarity(read, STATES[-1], dim=0) < 0.99
    assert F.cosine_similarity(along_depth(DELTAS, ZERO, 3)[-1], STATES[-1], dim=0) > 1 - 1e-12
