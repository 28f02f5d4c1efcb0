"""Decoding by the ops for few tokens: when they run, what keeps a call from them, and that nothing else changes."""

import pytest
import torch

from residua.model import Cache, ModelConfig, Transformer
from residua.native import library
from residua.testing import assert_close

STEP, MLP = "residua_attention_step", "residua_gated_mlp"


def made(**options):
    return Transformer(ModelConfig(**{"vocab": 31, "width": 24, "depth": 2, "heads": 4, "init_std": 0.3, **options}))


def decoded(model, ids, *, prompt=3, mask=None):
    """Logits of the tokens after the prompt, one by one; what the kernels were called for them; the cache."""
    cache = Cache(rollback=4)
    with torch.no_grad():
        model(ids[:, :prompt], mask=None if mask is None else mask[:, :prompt], cache=cache)
        with library.counted() as counts:
            found = [model(ids[:, at : at + 1], cache=cache) for at in range(prompt, ids.shape[1])]
    return torch.cat(found, 1), counts, cache


def tokens(rows=1, count=9):
    return torch.randint(31, (rows, count), generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, 12), ({"kv_heads": 2}, 12), ({"tied": False}, 12), ({"design": "mudd"}, 12), ({"design": "delta"}, 12),
        ({"qk_norm": True}, 0), ({"layout": "attn:local=conv,mlp"}, 0), ({"layout": "swa:window=4,mlp"}, 0),
        ({"design": "standard:value=resformer"}, 0),
    ],
    ids=str,
)  # fmt: skip
def test_a_token_takes_one_call_a_sublayer(options, steps):
    """Where attention is nothing but its four matrices; what stands between them takes the longer way."""
    model, ids = made(**options), tokens()
    found, counts, _ = decoded(model, ids)
    assert_close(found, model(ids)[:, 3:].detach(), "decoding", gradient=False)
    assert (counts[STEP], counts[MLP]) == (steps, 12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_types_take_the_same_way(dtype):
    model, ids = made().to(dtype), tokens()
    found, counts, _ = decoded(model, ids)
    assert found.dtype == dtype
    assert counts[STEP] == counts[MLP] == 12
    exact = decoded(made().double(), ids)[0]
    error = (found.double() - exact).norm() / exact.norm()
    assert error < {torch.float64: 1e-12, torch.bfloat16: 0.05}[dtype]


def test_many_rows_are_projected_by_torch_and_read_the_cache_by_the_kernel():
    model, ids = made(), tokens(rows=5)
    found, counts, _ = decoded(model, ids)
    assert_close(found, model(ids)[:, 3:].detach(), "decoding", gradient=False)
    assert counts["residua_cached_attend"] == 12
    assert not counts[STEP]


def test_padded_rows_see_what_they_saw():
    """Rows that differ are masked, as by PyTorch's attention."""
    model, ids = made(), tokens(rows=2)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, :2] = False
    found, counts, _ = decoded(model, ids, mask=mask)
    assert not counts[STEP]
    alone = model(ids[1:, 2:])[:, 1:].detach()
    assert_close(found[1:], alone, "padded", gradient=False)


def test_tokens_taken_back_leave_nothing():
    model, ids = made(), tokens(count=12)
    *_, cache = decoded(model, ids[:, :8])
    with torch.no_grad():
        cache.rollback(3)
        again = torch.cat([model(ids[:, at : at + 1], cache=cache) for at in (8, 9, 10, 11)], 1)
    other = torch.cat([ids[:, :5], ids[:, 8:]], 1)
    assert_close(again, model(other)[:, 5:].detach(), "rolled back", gradient=False)


def test_a_batch_can_be_chosen_from_between_tokens():
    model, ids = made(), tokens(rows=2)
    *_, cache = decoded(model, ids)
    chosen = torch.tensor([1])
    with torch.no_grad():
        cache.select(chosen)
        found = model(ids[:1, :1], cache=cache)
    whole = torch.cat([ids[1:], ids[:1, :1]], 1)
    assert_close(found, model(whole)[:, -1:].detach(), "selected", gradient=False)


@pytest.mark.parametrize("name", ["q", "o"])
def test_hooks_see_every_token(name):
    """Whoever hooks a projection gets it called, and may change what it gives."""
    model, ids, seen = made(), tokens(), []
    handle = getattr(model.blocks[0].sublayers[0], name).register_forward_hook(lambda *call: seen.append(call) or None)
    _, counts, _ = decoded(model, ids)
    assert len(seen) == 7  # the prompt and six tokens
    assert counts[STEP] == 6  # of the other block
    handle.remove()
    assert decoded(model, ids)[1][STEP] == 12


def test_autocast_decides_the_types_of_a_cache():
    model, ids = made(), tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, counts, cache = decoded(model, ids)
    assert not counts[STEP]
    assert {one.dtype for memory in cache._slots.values() for one in memory.tensors()} == {torch.bfloat16}
    exact = decoded(model, ids)[0]
    assert (found.float() - exact).norm() / exact.norm() < 0.05


def test_a_cache_serves_models_of_other_positions():
    """Rotations are looked up in the cache, which keeps those of the model that asks."""
    ids = tokens()
    cache = Cache()
    with torch.no_grad():
        for base in (10_000.0, 50.0):
            cache.length = 0
            positions, turns = cache.turns(4, 8, base, torch.float32, ids.device)
            assert positions.tolist() == [0, 1, 2, 3]
            assert torch.allclose(turns[0][3, 1], torch.cos(torch.tensor(3 * base**-0.25)))
