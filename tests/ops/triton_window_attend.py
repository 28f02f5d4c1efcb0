"""window_attend in Triton equals its definition, for positions in any order."""

import pytest
import torch

from residua import ops

from .triton_check import DEVICE, TYPES, agree, draw


def tensors(tokens, total=None, *, batch=1, heads=2, kv=1, width=16, dtype=torch.float32):
    total = tokens if total is None else total
    q = draw(batch, tokens, heads, width, dtype=dtype).transpose(1, 2)
    k, v = (draw(batch, total, kv, width, dtype=dtype, seed=s).transpose(1, 2) for s in (1, 2))
    return q, k, v


def attention(**options):
    options = {"window": 5, "queries": None, "keys": None} | options

    def function(q, k, v, bias=None):
        return ops.window_attend(q, k, v, **options, **({} if bias is None else {"bias": bias}))

    return function


def at(*positions):
    return torch.tensor(positions, device=DEVICE)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mode", ["sliding", "local"])
def test_triton_window_attend_equals_reference(mode, causal):
    """75 tokens are 3 blocks in float32: the middle one reaches into one or both neighbours."""
    agree(attention(mode=mode, causal=causal), *tensors(75))


@pytest.mark.parametrize("dtype", [one for one in TYPES if one != torch.float32], ids=str)
@pytest.mark.parametrize(("mode", "causal"), [("sliding", True), ("local", False)])
def test_triton_window_attend_of_every_type_equals_reference(mode, causal, dtype):
    """One head, because the interpreter takes its time for each, and a type changes nothing between heads."""
    agree(attention(mode=mode, causal=causal), *tensors(75, heads=1, dtype=dtype))


@pytest.mark.parametrize("window", [2, 40, 200])
@pytest.mark.parametrize("mode", ["sliding", "local"])
def test_triton_window_attend_any_window(mode, window):
    agree(attention(mode=mode, window=window), *tensors(70, heads=1))


@pytest.mark.parametrize("mode", ["sliding", "local"])
def test_triton_window_attend_of_one_is_the_value(mode):
    """Queries and keys then move nothing: their gradients are 0 but for the rounding of terms of size 1."""
    q, k, v = (one.detach().requires_grad_() for one in tensors(40, kv=2))
    with ops.backend("triton", strict=True):
        out = attention(mode=mode, window=1)(q, k, v)
        dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert torch.equal(out, v)
    assert torch.equal(dv, torch.ones_like(v))
    assert max(dq.abs().max(), dk.abs().max()) < 1e-5


@pytest.mark.parametrize(("heads", "kv", "width"), [(1, 1, 24), (6, 2, 8), (3, 3, 80)])
def test_triton_window_attend_shared_heads_and_odd_widths(heads, kv, width):
    agree(attention(), *tensors(7, batch=2, heads=heads, kv=kv, width=width))


@pytest.mark.parametrize("causal", [True, False])
def test_triton_window_attend_bias_by_distance(causal):
    bias = draw(2, 5 if causal else 9, seed=5)
    agree(attention(causal=causal), *tensors(37, batch=2), bias)


@pytest.mark.parametrize("mode", ["sliding", "local"])
def test_triton_window_attend_keys_in_any_order(mode):
    """A ring of 40 slots, shuffled, with empty ones; the first query sees nothing."""
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    keys = torch.where(order < 30, order + 20, -1).to(DEVICE)
    agree(attention(mode=mode, queries=at(3, 47, 48, 49), keys=keys), *tensors(4, 40))


def test_triton_window_attend_rows_keep_their_own_positions():
    keys = torch.stack([torch.arange(9), torch.arange(9) - 4]).to(DEVICE)
    agree(attention(queries=keys, keys=keys), *tensors(9, batch=2))
    agree(attention(queries=keys[:, 5:], keys=keys), *tensors(4, 9, batch=2))


def test_triton_window_attend_decodes_one_token():
    agree(attention(queries=at(12), keys=torch.arange(13, device=DEVICE)), *tensors(1, 13))


def test_triton_window_attend_of_no_tokens_is_nothing():
    q, k, v = tensors(5)
    none = torch.arange(0, device=DEVICE)
    with ops.backend("triton", strict=True):
        assert attention(queries=none, keys=torch.arange(5, device=DEVICE))(q[:, :, :0], k, v).shape == (1, 2, 0, 16)
        assert attention(queries=none, keys=none)(q[:, :, :0], k[:, :, :0], v[:, :, :0]).shape == (1, 2, 0, 16)


@pytest.mark.parametrize("mode", ["sliding", "local"])
def test_triton_window_attend_visits_only_blocks_in_the_window(mode, monkeypatch):
    """Linear in the sequence: junk in keys too far away is never read, not even to be masked."""
    q, k, v = tensors(160)
    with ops.backend("triton", strict=True):
        clean = attention(mode=mode)(q, k, v)
        k, v = k.clone(), v.clone()
        k[:, :, 32:64], v[:, :, 32:64] = float("nan"), float("nan")
        dirty = attention(mode=mode)(q, k, v)
    # a NaN that is loaded survives 0 * NaN in the products, so the blocks that stayed finite did not load it
    assert torch.equal(dirty[:, :, :32], clean[:, :, :32])
    assert torch.equal(dirty[:, :, 96:], clean[:, :, 96:])
    assert dirty[:, :, 32:64].isnan().all()


def test_triton_window_attend_obeys_the_rules_of_a_torch_operator():
    from residua.ops.window_attend.triton import _window_attend

    q, k, v = (one.detach().requires_grad_() for one in tensors(7))
    places = torch.arange(7, device=DEVICE)
    torch.library.opcheck(_window_attend, (q, k, v, draw(2, 3).requires_grad_(), places, places, 3, False, True))


def test_triton_window_attend_declines_with_a_reason():
    q, k, v = tensors(5)
    with ops.backend("triton", strict=True):
        with pytest.raises(RuntimeError, match="q, k and v of"):
            attention()(q, k.double(), v)
        with pytest.raises(RuntimeError, match="at most 256"):
            attention()(*tensors(3, width=257))
        with pytest.raises(ValueError, match="sliding or local"):
            attention(mode="block")(q, k, v)
