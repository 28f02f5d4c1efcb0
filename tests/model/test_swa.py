"""ShortSWA as a sublayer and as a branch: what it is, and that decoding is the full forward whatever is done to it."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import residua
from residua.model import Cache, ModelConfig, Transformer, generate, sizes_of, token_loss
from residua.model.places import follow, plain
from residua.testing import assert_close, error

LAYOUTS = (
    "swa:window=3,attn,mlp",
    "swa:window=5:mode=local:position=none,attn,mlp",
    "swa:window=4:position=bias:heads=2:kv_heads=1,conv,canon:kernel=2,mlp",
    "attn:local=swa:window=3,mlp",
    "attn:local=conv,attn:local=canon:window=2,mlp",
)


def small(**changes):
    settings = {"vocab": 19, "width": 16, "depth": 2, "heads": 4, "kv_heads": 2, "mlp_width": 16, "init_std": 0.4}
    return ModelConfig(**(settings | changes))


def moved(layout, **changes):
    """A model in float64 whose gates, taps and biases have left their start."""
    model = Transformer(small(layout=layout, **changes)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


MODELS = {layout: moved(layout) for layout in LAYOUTS}


def text(rows, tokens, seed=0):
    return torch.randint(19, (rows, tokens), generator=torch.Generator().manual_seed(seed))


chunks = st.lists(st.integers(1, 9), min_size=1, max_size=8)
case = {"layout": st.sampled_from(LAYOUTS), "seed": st.integers(0, 99)}


@settings(max_examples=25, deadline=None)
@given(parts=chunks, **case)
def test_prefill_in_chunks_of_any_size_is_the_full_forward(layout, seed, parts):
    model, ids, cache = MODELS[layout], text(2, 60, seed), Cache()
    sizes = (parts * 60)[: next(n for n in range(1, 61) if sum((parts * 60)[:n]) >= 60)]
    sizes[-1] -= sum(sizes) - 60
    with torch.no_grad():
        found = torch.cat([model(part, cache=cache) for part in ids.split(sizes, 1)], 1)
        assert_close(found, model(ids), f"chunks of {sizes}")


@settings(max_examples=25, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=9), **case)
def test_rollback_forgets_as_if_the_tokens_had_never_come(layout, seed, steps):
    """Speculative decoding: guess some tokens, take the last of them back, go on with others."""
    model, cache = MODELS[layout], Cache(rollback=4)
    kept = text(2, 20, seed)
    with torch.no_grad():
        model(kept, cache=cache)
        for turn, (more, back) in enumerate(steps):
            guessed = text(2, more, 100 + turn)
            model(guessed, cache=cache)
            back = min(back, more)
            cache.rollback(back)
            kept = torch.cat([kept, guessed[:, : more - back]], 1)
            assert cache.length == kept.shape[1]
        new = text(2, 3, 500)
        found, whole = model(new, cache=cache), model(torch.cat([kept, new], 1))
    assert_close(found, whole[:, -3:], "logits after rollbacks")


@settings(max_examples=25, deadline=None)
@given(parts=chunks, pads=st.lists(st.integers(0, 20), min_size=3, max_size=3), back=st.integers(0, 3), **case)
def test_left_padding_is_as_if_the_row_were_alone(layout, seed, parts, pads, back):
    """Prompts of unequal length in one batch, taken in in chunks, decoded, rolled back and decoded again."""
    model, ids, cache = MODELS[layout], text(3, 30, seed), Cache(rollback=3)
    mask = torch.arange(24).expand(3, -1) >= torch.tensor(pads)[:, None]
    sizes = [size for size in parts if size][:3]
    sizes = [*sizes, 24 - sum(sizes)] if sum(sizes) < 24 else [24]
    with torch.no_grad():
        found = [
            model(part, mask=masked, cache=cache)
            for part, masked in zip(ids[:, :24].split(sizes, 1), mask.split(sizes, 1), strict=True)
        ]
        found += [model(part, cache=cache) for part in ids[:, 24:].split(1, 1)]
        if back:
            cache.rollback(back)
            found = [torch.cat(found, 1)[:, : 30 - back], model(ids[:, 30 - back :], cache=cache)]
        found = torch.cat(found, 1)
        for row, pad in enumerate(pads):
            alone = model(ids[row : row + 1, pad:])
            assert_close(found[row : row + 1, pad:], alone, f"row {row}, {pad} of padding")


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 14), min_size=1, max_size=6), parts=chunks, **case)
def test_documents_packed_in_a_row_are_as_if_each_were_alone(layout, seed, lengths, parts):
    model, total = MODELS[layout], sum(lengths)
    ids = text(2, total, seed)
    names = torch.tensor([7, 3, 7, 0, 9, 2][: len(lengths)])  # an id may come back, and then means another document
    documents = names.repeat_interleave(torch.tensor(lengths)).expand(2, -1)
    with torch.no_grad():
        alone = torch.cat([model(one) for one in ids.split(lengths, 1)], 1)
        assert_close(model(ids, documents=documents), alone, "packed logits")
        cache, found, at = Cache(), [], 0
        while at < total:
            size = min(parts[len(found) % len(parts)], total - at)
            found.append(model(ids[:, at : at + size], documents=documents[:, at : at + size], cache=cache))
            at += size
        assert_close(torch.cat(found, 1), alone, "packed logits, with a cache")


def test_documents_have_no_gradient_across_their_border():
    model = MODELS[LAYOUTS[2]]
    ids, documents = text(1, 12), torch.tensor([[0] * 7 + [1] * 5])
    seen = {}
    handle = model.embed.register_forward_hook(lambda _, __, out: seen.setdefault("x", out).retain_grad())
    model(ids, documents=documents)[:, 7:].square().sum().backward()
    handle.remove()
    model.zero_grad()
    assert seen["x"].grad[0, :7].abs().max() == 0
    assert seen["x"].grad[0, 7:].abs().min() > 0


def test_open_document_goes_on_without_being_named():
    model, ids = MODELS[LAYOUTS[0]], text(2, 14)
    with torch.no_grad():
        cache = Cache()
        model(ids[:, :6], documents=torch.tensor([[0, 0, 5, 5, 5, 5]]).expand(2, -1), cache=cache)
        found = torch.cat([model(part, cache=cache) for part in ids[:, 6:].split([1, 5, 2], 1)], 1)
    assert_close(found, model(ids[:, 2:])[:, 4:], "logits of the open document")


def test_documents_may_begin_in_a_cache_that_had_one():
    model, ids, cache = MODELS[LAYOUTS[0]], text(2, 20), Cache(rollback=3)
    with torch.no_grad():
        model(ids[:, :9], cache=cache)
        new = torch.tensor([[0, 0, 0, 4, 4, 4]]).expand(2, -1)
        found = model(ids[:, 9:15], documents=new, cache=cache)
        assert_close(found[:, :3], model(ids[:, :12])[:, 9:], "the first document, continued")
        assert_close(found[:, 3:], model(ids[:, 12:15]), "the second")
        cache.rollback(3)
        assert_close(model(ids[:, 12:15], cache=cache), model(ids[:, :15])[:, 12:], "taken back before the border")


def test_places_by_hand():
    ids = torch.tensor([[-1, -1, 4, 4, -1, 4, 2, 2], [3, 3, 3, 5, 3, -1, -1, 3]])
    found = follow(plain(2, 0, torch.device("cpu")), ids)
    assert found.documents.tolist() == [[-1, -1, 0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 2, 2, 2, 2]]
    assert found.positions[0, 2:].tolist() == [0, 1, 2, 3, 0, 1]  # padding takes up a position
    assert found.positions[1].tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    halves = follow(plain(2, 0, torch.device("cpu")), ids[:, :5])
    halves = halves.then(follow(halves.last(1), ids[:, 5:]))
    assert all(map(torch.equal, halves, found))


def test_generate_of_unequal_prompts_is_generate_of_each():
    model, ids = MODELS[LAYOUTS[0]].float(), text(2, 9)
    mask = torch.arange(9).expand(2, -1) >= torch.tensor([[0], [4]])
    for chunk in (None, 2):
        both = generate(model, ids, 6, mask=mask, chunk=chunk)[:, 9:]
        assert torch.equal(both[:1], generate(model, ids[:1], 6)[:, 9:])
        assert torch.equal(both[1:], generate(model, ids[1:, 4:], 6)[:, 5:])
    model.double()
    with pytest.raises(ValueError, match="pad on the left"):
        generate(model, ids, 6, mask=mask.flip(1))
    with pytest.raises(ValueError, match="chunk=0"):
        generate(model, ids, 6, chunk=0)


@pytest.mark.parametrize("design", ["ddl:channels=2,compress=token,expand=conv", "standard"])
def test_rollback_reaches_what_a_design_keeps(design):
    model = moved("swa:window=3,attn,mlp", design=design)
    ids = text(2, 30)
    with torch.no_grad():
        cache = Cache(rollback=5)
        model(ids[:, :20], cache=cache)
        for back in (5, 3, 1):
            model(text(2, back, seed=9), cache=cache)
            cache.rollback(back)
        cache.rollback(0)
        found = torch.cat([model(part, cache=cache) for part in ids[:, 20:].split([4, 1, 5], 1)], 1)
    assert_close(found, model(ids)[:, 20:], "logits after rollbacks")


def test_rollback_of_more_than_is_kept_names_the_cure():
    model, ids = MODELS[LAYOUTS[0]], text(1, 8)
    with torch.no_grad():
        cache = Cache()
        model(ids, cache=cache)
        with pytest.raises(ValueError, match=re.escape("Cache(rollback=n)")):
            cache.rollback(1)
        cache = Cache(rollback=3)
        model(ids, cache=cache)
        cache.rollback(2)
        with pytest.raises(ValueError, match="can go back to 5"):
            cache.rollback(2)  # the ring has gone past it
        with pytest.raises(ValueError, match="must not be negative"):
            Cache(rollback=-1)
        cache = Cache(rollback=8)
        model(ids, cache=cache)
        cache.rollback(8)
        assert_close(model(ids, cache=cache), model(ids), "from the start again")


def test_beams_keep_their_padding_and_documents():
    model, ids = MODELS[LAYOUTS[0]], text(2, 10)
    mask = torch.arange(10).expand(2, -1) >= torch.tensor([[0], [4]])
    with torch.no_grad():
        cache = Cache(rollback=1)
        model(ids, mask=mask, cache=cache)
        cache.select(torch.tensor([1, 1, 0]))
        step = torch.tensor([[1], [2], [3]])
        found = model(step, cache=cache)
        for row, (source, pad) in enumerate(((1, 4), (1, 4), (0, 0))):
            alone = model(torch.cat([ids[source : source + 1, pad:], step[row : row + 1]], 1))
            assert_close(found[row : row + 1], alone[:, -1:], f"beam {row}")


@pytest.mark.parametrize("design", ["ddl:channels=2,compress=token"])
def test_documents_that_would_leak_are_refused(design):
    with pytest.raises(ValueError, match="leak into each other"):
        moved("attn,mlp", design=design)(text(2, 6), documents=torch.zeros(2, 6, dtype=torch.long))


@pytest.mark.parametrize("local", ["swa", "canon"])
def test_branch_starts_as_the_identity_and_learns(local):
    plain_model = Transformer(small(layout="attn,mlp"))
    model = Transformer(small(layout=f"attn:local={local}:window=3,mlp"))
    ids = text(2, 12)
    assert error(model(ids), plain_model(ids)) == 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if ".local." in name}
    assert start
    for _ in range(3):  # the gate first, what stands behind it after
        optimizer.zero_grad()
        token_loss(model(ids), ids.roll(-1, 1)).backward()
        optimizer.step()
    assert all(not torch.equal(model.get_parameter(name), value) for name, value in start.items())


def test_branch_convolution_starts_as_its_activation():
    model, plain_model = (Transformer(small(layout=layout, depth=1)) for layout in ("attn:local=conv,mlp", "attn,mlp"))
    for branch in ("q", "k", "v"):
        projection = getattr(plain_model.blocks[0].sublayers[0], branch)
        projection.register_forward_hook(lambda _, __, y: torch.nn.functional.silu(y))
    assert_close(model(text(2, 12)), plain_model(text(2, 12)), "logits")


def test_branch_of_short_attention_by_hand():
    """One head of width 2, window 2: x + g (softmax(s n(x_t) . n(x_j) / sqrt 2 + b) x_j - x)."""
    from residua.model.local import LocalSWA

    mixer = LocalSWA(small(eps=0.0), 1, 2, 2).double()
    with torch.no_grad():
        mixer.gate.fill_(0.5)
        mixer.scale.fill_(2.0)
        mixer.bias.copy_(torch.tensor([[0.0, 0.3]], dtype=torch.float64))
    model = Transformer(small())
    x = torch.tensor([[[1.0, 1.0], [2.0, -2.0]]], dtype=torch.float64)
    found = mixer(x, model.context(torch.zeros(1, 2, dtype=torch.long)), "x")
    # n(x) are (1, 1) and (1, -1): scores 2 * 2 / sqrt 2 with itself, 0 + 0.3 with the one before
    own, other = torch.tensor([2 * 2 / 2**0.5, 0.3], dtype=torch.float64).exp()
    mixed = (own * x[0, 1] + other * x[0, 0]) / (own + other)
    expected = torch.stack([x[0, 0], x[0, 1] + 0.5 * (mixed - x[0, 1])])[None]
    assert_close(found, expected, "branch")


def test_short_convolution_is_a_limit_of_short_attention():
    """W_Q = 0 and b_s = log c_s: from token w - 1 on, the output is the convolution with c / sum(c)."""
    model = Transformer(small(layout="swa:window=3:position=bias", depth=1)).double()
    sub, c = model.blocks[0].sublayers[0], torch.tensor([0.5, 2.0, 1.5], dtype=torch.float64)
    with torch.no_grad():
        sub.q.weight.zero_()
        sub.bias.weight.copy_(c.log().expand(4, 3))
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    found = sub(x, context=model.context(text(1, 9)))
    v = sub.v(x).unflatten(-1, (2, 4)).repeat_interleave(2, 2).flatten(-2)
    mixed = sum(c[s] / c.sum() * v.roll(s, 1) for s in range(3))
    assert_close(found[:, 2:], sub.o(mixed)[:, 2:], "normalised convolution")
    assert error(found[:, :2], sub.o(mixed)[:, :2]) > 1e-3  # a softmax renormalises where a convolution pads


def test_narrow_short_attention_costs_what_it_says():
    full, narrow = (Transformer(small(layout=layout, depth=1)) for layout in ("swa,mlp", "swa:heads=1,mlp"))
    shapes = {name: tuple(getattr(narrow.blocks[0].sublayers[0], name).weight.shape) for name in "qkvo"}
    assert shapes == {"q": (4, 16), "k": (4, 16), "v": (4, 16), "o": (16, 4)}
    kinds = [sum(p.numel() for p in model.blocks[0].sublayers[0].parameters()) for model in (full, narrow)]
    assert kinds == [16 + 2 * 16 * 16 + 2 * 16 * 8, 16 + 4 * 16 * 4]
    assert sizes_of(narrow.config, 64).cache_floats == 2 * 4 * 16


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cache_holds_what_is_counted(layout):
    model = MODELS[layout]
    with torch.no_grad():
        cache = Cache()
        model(text(1, 40), cache=cache)
    positions = sum(memory.positions.nbytes for memory in cache._slots.values() if hasattr(memory, "positions"))
    assert sizes_of(model.config, 40).cache_floats * 8 == cache.nbytes - positions


def test_same_slot_holds_short_attention_convolution_or_canon():
    """The three local mixers compared in one place, as a sublayer and as a branch: all decode and all are linear."""
    for where in ("{}:window=4,attn,mlp", "attn:local={}:window=4,mlp"):
        for kind in ("swa", "conv", "canon"):
            layout = where.format(kind)
            if kind != "swa" and layout.startswith(kind):
                layout = layout.replace("window", "kernel")
            model = Transformer(small(layout=layout))
            assert generate(model, text(1, 5), 3).shape == (1, 8)
            per_token = [sizes_of(small(layout=layout), tokens).cache_floats for tokens in (64, 128)]
            plain_cache = [sizes_of(small(layout="attn,mlp"), tokens).cache_floats for tokens in (64, 128)]
            assert per_token[1] - per_token[0] == plain_cache[1] - plain_cache[0]  # the mixer's own is flat


@pytest.mark.parametrize(
    ("layout", "causal", "cure"),
    [
        ("swa:heads=3:kv_heads=2,mlp", True, "heads=3 must be a multiple of kv_heads=2"),
        ("swa:window=1:position=bias,mlp", True, "nothing to weigh"),
        ("attn:local=swa:window=1,mlp", True, "window=2 or more"),
        ("attn:local=conv,mlp", False, "an encoder takes local=swa or none"),
        ("attn:local=conv:window=0,mlp", True, "window=0 must be at least 1"),
        ("attn:local=gru,mlp", True, "none|swa|conv|canon"),
    ],
    ids=str,
)
def test_wrong_layout_names_the_cure(layout, causal, cure):
    with pytest.raises(ValueError, match=re.escape(cure)):
        Transformer(small(layout=layout, causal=causal))


@pytest.mark.parametrize("layout", ["swa:window=3:position=bias,mlp", "attn:local=swa:window=3,mlp"])
def test_encoder_looks_both_ways_in_the_window(layout):
    model = moved(layout, causal=False, depth=1)
    ids = text(1, 12)
    changed = ids.clone()
    changed[0, 6] = (changed[0, 6] + 1) % 19
    gap = (model(changed) - model(ids)).abs().amax((0, 2)) > 1e-9
    assert gap[5]
    assert gap[7]
    documents = torch.tensor([[0] * 5 + [1] * 7])
    assert_close(model(ids, documents=documents)[:, :5], model(ids[:, :5]), "first document")


def test_every_design_takes_the_recommended_block():
    """Local to global: ShortSWA, attention, MLP, in every design."""
    for design in residua.names():
        model = Transformer(small(layout="swa:window=4,attn,mlp", design=design))
        assert model(text(1, 6)).isfinite().all()
