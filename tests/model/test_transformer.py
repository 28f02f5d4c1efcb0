"""The backbone: shared weights across designs, masks, positions, and refusals that name the cure."""

import re

import pytest
import torch
from torch.nn import functional as F

import residua
from residua.model import Cache, ModelConfig, Transformer, mask_tokens, sizes_of, token_loss
from residua.model.objective import IGNORED
from residua.testing import assert_close, error


def small(**changes):
    settings = {"vocab": 19, "width": 16, "depth": 2, "heads": 4, "kv_heads": 2, "init_std": 0.3}
    return ModelConfig(**(settings | changes))


IDS = torch.randint(19, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("design", residua.names())
def test_designs_of_one_seed_share_their_sublayers_to_the_last_bit(design):
    plain = Transformer(small(), seed=5).state_dict()
    model = Transformer(small(design=design), seed=5)
    shared = {key: value for key, value in model.state_dict().items() if not key.startswith("stream.")}
    unread = {
        "norm.weight" if site.kind == "head" else f"blocks.{site.layer}.sublayers.{site.index % 2}.norm.weight"
        for site in model.plan.readers
        if not model.stream.takes_norm(site)
    }
    assert shared.keys() == plain.keys() - unread
    # where a design takes more channels than the width, the first are those of the stream
    assert all(torch.equal(value[: len(plain[key])], plain[key]) for key, value in shared.items())
    other = Transformer(small(design=design), seed=6).state_dict()
    assert not torch.equal(other["embed.weight"], plain["embed.weight"])


def test_attention_is_scaled_dot_product_attention_with_rotary_positions():
    """A one-sublayer model by hand: norm, projections, rotation by position, causal softmax, tied head."""
    config = small(depth=1, layout="attn", kv_heads=None)
    model = Transformer(config).double()
    x = model.embed(IDS)
    c = F.rms_norm(x, (16,), eps=config.eps)
    sub = model.blocks[0].sublayers[0]

    def heads(y):
        return y.view(2, 12, 4, 4)

    q, k, v = (heads(c @ w.weight.T) for w in (sub.q, sub.k, sub.v))
    out = torch.zeros(2, 12, 4, 4, dtype=torch.float64)
    turn = 10_000.0 ** -(torch.arange(0, 4, 2, dtype=torch.float64) / 4)
    for b in range(2):
        for h in range(4):
            for t in range(12):
                scores = []
                for j in range(t + 1):
                    score = 0.0
                    for i in range(2):  # the pair (i, i + 2) turns with the distance
                        angle = (t - j) * turn[i]
                        q0, q1 = q[b, t, h, i], q[b, t, h, i + 2]
                        k0, k1 = k[b, j, h, i], k[b, j, h, i + 2]
                        score += (q0 * k0 + q1 * k1) * angle.cos() + (q0 * k1 - q1 * k0) * angle.sin()
                    scores.append(score / 2.0)
                weights = torch.stack(scores).softmax(0)
                out[b, t, h] = (weights[:, None] * v[b, : t + 1, h]).sum(0)
    y = x + out.reshape(2, 12, 16) @ sub.o.weight.T
    logits = F.rms_norm(y, (16,), eps=config.eps) @ model.embed.weight.T
    assert_close(model(IDS), logits, "logits")


def test_grouped_heads_equal_repeated_heads():
    grouped = Transformer(small(kv_heads=2)).double()
    full = Transformer(small(kv_heads=4)).double()
    state = grouped.state_dict()
    for name in list(state):
        if name.endswith((".k.weight", ".v.weight")):
            state[name] = state[name].view(2, 1, 4, 16).expand(2, 2, 4, 16).reshape(16, 16)
    full.load_state_dict(state)
    assert_close(full(IDS), grouped(IDS), "logits")


def test_window_of_all_tokens_is_full_attention():
    wide = Transformer(small(layout="swa:window=12,mlp")).double()
    full = Transformer(small(layout="attn,mlp")).double()
    full.load_state_dict(wide.state_dict())
    assert_close(wide(IDS), full(IDS), "logits")


@pytest.mark.parametrize("mode", ["sliding", "local"])
def test_window_limits_what_a_token_sees(mode):
    """One block with window 3: sliding sees t-2..t, local sees the tokens so far of its group of three."""
    model = Transformer(small(depth=1, layout=f"swa:window=3:mode={mode}")).double()
    base = model(IDS).detach()
    for place in range(12):
        changed = IDS.clone()
        changed[:, place] = (changed[:, place] + 1) % 19
        moved = ((model(changed) - base).abs().amax((0, 2)) > 1e-9).nonzero().flatten().tolist()
        last = place + 2 if mode == "sliding" else place // 3 * 3 + 2
        assert moved == list(range(place, min(last, 11) + 1))


@pytest.mark.parametrize("kind", ["swa", "conv", "canon"])
def test_zero_start_adds_nothing(kind):
    """start=zero: the inserted sublayer is nothing at first, and learns."""
    plain = Transformer(small(layout="attn,mlp"))
    extra = Transformer(small(layout=f"{kind}:start=zero,attn,mlp"))
    state = extra.state_dict()
    for layer in range(2):
        for place in range(2):
            for name, value in plain.state_dict().items():
                prefix = f"blocks.{layer}.sublayers.{place}."
                if name.startswith(prefix):
                    state[name.replace(prefix, f"blocks.{layer}.sublayers.{place + 1}.")] = value
    extra.load_state_dict(state)
    assert error(extra(IDS), plain(IDS)) == 0
    token_loss(extra(IDS), IDS.roll(-1, 1)).backward()
    sublayer = extra.blocks[0].sublayers[0]
    assert all(parameter.grad.abs().max() > 0 for parameter in sublayer.writers())


@pytest.mark.parametrize("layout", ["attn,mlp", "swa:window=4,attn,mlp", "conv,attn,mlp"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_token(layout, side):
    """Logits of real tokens are those of the unpadded row, whichever side the padding is on."""
    model = Transformer(small(layout=layout)).double()
    alone = model(IDS[:, :7])
    pad = torch.zeros(2, 3, dtype=torch.long)
    mask = torch.ones(2, 7, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.bool)
    if side == "right":
        padded = model(torch.cat([IDS[:, :7], pad], 1), mask=torch.cat(mask, 1))[:, :7]
    else:
        padded = model(torch.cat([pad, IDS[:, :7]], 1), mask=torch.cat(mask[::-1], 1))[:, 3:]
    assert_close(padded, alone, "logits of real tokens")


def test_padding_that_would_leak_is_refused():
    """A design that mixes tokens takes padding on the right alone."""
    model = Transformer(small(design="ddl:channels=2,compress=token")).double()
    right = torch.arange(12).expand(2, -1) < 7
    assert_close(model(IDS, mask=right)[:, :7], model(IDS[:, :7]), "logits of real tokens")
    with pytest.raises(ValueError, match="pad on the right"):
        model(IDS, mask=right.flip(1))


@pytest.mark.parametrize("layout", ["attn,mlp", "swa:window=4,mlp"])
def test_rows_of_padding_leave_finite_gradients(layout):
    model = Transformer(small(layout=layout))
    mask = torch.arange(12).expand(2, -1) >= 5
    targets = torch.where(mask, IDS, IGNORED)
    token_loss(model(IDS, mask=mask), targets).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_encoder_masks_padding():
    model = Transformer(small(causal=False)).double()
    mask = torch.arange(12).expand(2, -1) < 9
    changed = IDS.clone()
    changed[:, 10] += 1
    assert torch.equal(model(IDS, mask=mask)[:, :9], model(changed % 19, mask=mask)[:, :9])
    assert_close(model(IDS, mask=mask)[:, :9], model(IDS[:, :9]), "logits")


@pytest.mark.slow
def test_encoder_learns_the_masked_token_objective():
    """ELC-BERT as an encoder learns to restore hidden tokens of a repeating text."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Transformer(small(vocab=12, width=32, causal=False, design="elc", init_std=0.05))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.arange(200) % 10
    losses = []
    for _ in range(200):
        starts = torch.randint(0, 180, (16,), generator=generator)
        ids = torch.stack([text[s : s + 16] for s in starts.tolist()])
        inputs, targets = mask_tokens(ids, mask_id=11, vocab=10, generator=generator)
        loss = token_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) / 10 < 0.5 * losses[0]


def test_mask_tokens_keeps_its_shares():
    ids = torch.randint(100, (200, 500), generator=torch.Generator().manual_seed(0))
    inputs, targets = mask_tokens(ids, mask_id=100, vocab=100, generator=torch.Generator().manual_seed(1))
    hidden = targets != IGNORED
    assert torch.equal(targets[hidden], ids[hidden])
    assert torch.equal(inputs[~hidden], ids[~hidden])
    assert hidden.float().mean().item() == pytest.approx(0.15, abs=0.005)
    assert (inputs[hidden] == 100).float().mean().item() == pytest.approx(0.8, abs=0.01)
    assert (inputs[hidden] == ids[hidden]).float().mean().item() == pytest.approx(0.1 + 0.001, abs=0.01)
    with pytest.raises(ValueError, match="at most 1"):
        mask_tokens(ids, mask_id=100, vocab=100, share=1.5)


def test_token_loss_ignores_what_does_not_count():
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    targets = torch.tensor([[1, IGNORED, 2], [IGNORED, 0, IGNORED]])
    chosen = [logits[0, 0, 1].exp() / logits[0, 0].exp().sum(), logits[0, 2, 2].exp() / logits[0, 2].exp().sum()]
    chosen.append(logits[1, 1, 0].exp() / logits[1, 1].exp().sum())
    expected = -sum(p.log() for p in chosen) / 3
    assert_close(token_loss(logits, targets), expected, "loss")
    assert token_loss(logits, torch.full((2, 3), IGNORED)) == 0


@pytest.mark.parametrize(
    "changes", [{"qk_norm": True}, {"tied": False}, {"rope_base": 500.0}, {"mlp_width": 20}], ids=str
)
def test_choice_of_backbone_changes_the_network_decodes_and_learns(changes):
    model, plain = Transformer(small(**changes)).double(), Transformer(small()).double()
    assert error(model(IDS), plain(IDS)) > 1e-6
    with torch.no_grad():
        cache = Cache()
        parts = [model(part, cache=cache) for part in IDS.split([5, 1, 6], 1)]
        assert_close(torch.cat(parts, 1), model(IDS), "decoded logits")
    token_loss(model(IDS), IDS.roll(-1, 1)).backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())


def test_qk_norm_bounds_the_scores():
    """With normed queries and keys, scaling their projections changes nothing."""
    model = Transformer(small(qk_norm=True)).double()
    before = model(IDS)
    with torch.no_grad():
        for sublayer in model.sublayers():
            if sublayer.site.kind == "attn":
                sublayer.q.weight *= 7
                sublayer.k.weight *= 3
    assert error(model(IDS), before) < 1e-8  # up to eps


def test_separate_lane_norms_exist_where_lanes_are_fed_apart():
    model = Transformer(small(design="mudd", lane_norms="separate"))
    gains = [len(sub.norm.weight) for block in model.blocks for sub in block.sublayers]
    assert gains == [1, 1, 3, 1]  # the first block reads one source for all lanes
    shared = Transformer(small(design="mudd"))
    assert error(model(IDS), shared(IDS)) == 0
    with torch.no_grad():
        model.blocks[1].sublayers[0].norm.weight[1] *= 2
    assert error(model(IDS), shared(IDS)) > 1e-4


@pytest.mark.parametrize(
    ("changes", "cure"),
    [
        ({"vocab": 0}, "vocab must be at least 1"),
        ({"width": 18}, "does not split into 4 heads"),
        ({"width": 12}, "even head width"),
        ({"kv_heads": 3}, "must be a multiple of kv_heads"),
        ({"depth": 0}, "depth must be at least 1"),
        ({"lane_norms": "both"}, "shared or separate"),
        ({"eps": -1.0}, "must not be negative"),
        ({"layout": "attn,ffn"}, "choose from attn"),
        ({"layout": "swa:window=0,mlp"}, "l0_swa: window=0 must be at least 1"),
        ({"layout": "swa:windw=4,mlp"}, "did you mean 'window'"),
        ({"layout": "swa:mode=ring,mlp"}, "sliding|local"),
        ({"layout": "conv:kernel=0,mlp"}, "kernel=0 must be at least 1"),
        ({"layout": "mlp:window=3"}, "it has no options"),
        ({"layout": "conv,mlp", "causal": False}, "no place in an encoder"),
        ({"design": "attnres", "eps": 1e-3}, "averages up to 5 sources, so eps=0.001 must be at most 0.0002"),
        ({"design": "ddl", "layout": "swa:start=zero,mlp"}, "l0_swa starts at zero"),
        ({"design": "delta:value_lane=true", "layout": "mlp"}, "needs an attention sublayer"),
    ],
    ids=str,
)
def test_wrong_configuration_names_the_cure(changes, cure):
    with pytest.raises((ValueError, TypeError), match=re.escape(cure)):
        Transformer(small(**changes))


def test_configuration_from_another_version_is_refused_by_name():
    with pytest.raises(ValueError, match="unknown model fields: hats"):
        ModelConfig.from_json({**small().to_json(), "hats": 3})


def test_safetensors_round_trip(tmp_path):
    from safetensors.torch import load_file, save_file

    model = Transformer(small(design="mhc"))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    again = Transformer(small(design="mhc"), seed=9)
    again.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert error(again(IDS), model(IDS)) == 0


def test_sizes_of_a_large_model_are_counted_without_allocating_it():
    """The 7.57B shape of the Delta paper: 589,824 routing parameters less the four vectors of the two dead sites."""
    config = ModelConfig(
        vocab=151_936, width=4096, depth=36, heads=32, kv_heads=8, mlp_width=12_288, tied=False, design="delta:blocks=4"
    )
    sizes = sizes_of(config, tokens=2048)
    assert sizes.parameters == pytest.approx(8.19e9, rel=0.01)
    assert sizes.stream_parameters < 589_824
    assert sizes.state_floats["l35_mlp"] == 4096 * 6  # the stream, the embedding and four block deltas
    assert sizes.flops_per_token > 2 * 7e9


def test_flops_follow_the_matrices():
    """Two operations per weight and token, plus attention's own, plus the norms, of a standard model."""
    config = small(kv_heads=4, mlp_width=32)
    sizes = sizes_of(config, tokens=12)
    matrices = 2 * (4 * 16 * 16 + 3 * 16 * 32) + 19 * 16
    attention = 2 * 4 * 16 * (12 + 1) / 2
    norms, adds = 5 * 4 * 16, 4 * 16
    assert sizes.flops_per_token == 2 * matrices + attention + norms + adds
    assert sizes.stream_flops_per_token == adds
