"""Decoding with a cache is decoding without one; the caches hold what they should and no more."""

import pytest
import torch

import residua
from residua.model import Cache, ModelConfig, Transformer, generate
from residua.testing import assert_close

IDS = torch.randint(19, (3, 5), generator=torch.Generator().manual_seed(0))
LAYOUT = "swa:window=4,conv,attn,canon,mlp"


def model(**changes):
    settings = {"vocab": 19, "width": 16, "depth": 2, "heads": 4, "init_std": 0.4, "layout": LAYOUT}
    return Transformer(ModelConfig(**(settings | changes)))


def greedy_without_cache(net, ids, tokens):
    for _ in range(tokens):
        ids = torch.cat([ids, net(ids)[:, -1:].argmax(-1)], 1)
    return ids


@pytest.mark.parametrize("design", [*residua.names(), "ddl:channels=2,compress=token,expand=conv"])
def test_greedy_decoding_equals_decoding_without_a_cache(design):
    net = model(design=design)
    assert torch.equal(generate(net, IDS, 12), greedy_without_cache(net, IDS, 12))


def test_sampling_repeats_with_its_generator():
    net = model()
    draw = [
        generate(net, IDS, 20, temperature=1.5, top_k=8, top_p=0.9, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    assert torch.equal(draw[0], draw[1])
    assert not torch.equal(draw[0], draw[2])


def test_sampling_follows_the_probabilities():
    """Frequencies of 4000 draws against the softmax, its top 3 and its nucleus."""
    net = model()
    probabilities = (net(IDS[:1])[0, -1] / 2.0).softmax(-1).detach()
    order = probabilities.argsort(descending=True)
    rows = IDS[:1].expand(4000, -1)

    def frequencies(**options):
        drawn = generate(net, rows, 1, temperature=2.0, generator=torch.Generator().manual_seed(0), **options)[:, -1]
        return torch.bincount(drawn, minlength=19) / 4000

    assert (frequencies() - probabilities).abs().max() < 0.03
    three = torch.zeros(19)
    three[order[:3]] = probabilities[order[:3]] / probabilities[order[:3]].sum()
    assert (frequencies(top_k=3) - three).abs().max() < 0.03
    kept = int((probabilities[order].cumsum(0) < 0.5).sum()) + 1
    found = frequencies(top_p=0.5)
    assert set(found.nonzero().flatten().tolist()) == set(order[:kept].tolist())


def test_stop_token_ends_a_row_and_then_the_batch():
    net = model()
    free = generate(net, IDS, 12)[:, 5:]
    stop = int(free[0, 2])
    out = generate(net, IDS, 12, stop=stop)[:, 5:]
    for row, expected in zip(out, free, strict=True):
        ends = (expected == stop).nonzero().flatten()
        end = int(ends[0]) + 1 if len(ends) else 12
        assert torch.equal(row[:end], expected[: min(end, out.shape[1])])
        assert (row[end:] == stop).all()
    assert generate(net, IDS[:1], 12, stop=stop).shape[1] == 5 + int((free[0] == stop).nonzero()[0]) + 1


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        ({"tokens": -1}, "must not be negative"),
        ({"temperature": -1.0}, "0 is greedy"),
        ({"top_k": 0}, "at least 1"),
        ({"top_p": 0.0}, "above 0"),
        ({"ids": IDS[:, :0]}, "at least one token"),
    ],
    ids=str,
)
def test_wrong_request_names_the_cure(arguments, cure):
    with pytest.raises(ValueError, match=cure):
        generate(model(), **({"ids": IDS, "tokens": 3} | arguments))


def test_ring_holds_the_window_however_long_the_text():
    """The short window's memory is flat in the text and exact beyond it; full attention's grows."""
    net = model(layout="swa:window=4,mlp").double()
    text = torch.randint(19, (2, 50), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = net(text)
        cache, sizes, parts = Cache(), [], []
        for part in text.split([1, 3, 7, 1, 20, 1, 1, 16], 1):
            parts.append(net(part, cache=cache))
            sizes.append(cache.nbytes)
    assert_close(torch.cat(parts, 1), whole, "logits")
    assert len(set(sizes)) == 1
    pairs = 2 * 2 * 2 * 4 * 16 * 8  # k and v, two layers, two rows, four tokens, width 16, float64
    assert sizes[0] == pairs + 2 * 4 * 8  # and the positions


def test_cache_selects_rows_for_beams():
    net = model(design="ddl:channels=2,compress=token")
    with torch.no_grad():
        cache = Cache()
        net(IDS, cache=cache)
        cache.select(torch.tensor([2, 2, 0]))
        step = torch.tensor([[1], [2], [3]])
        found = net(step, cache=cache)
        expected = net(torch.cat([IDS[[2, 2, 0]], step], 1))[:, -1:]
    assert_close(found, expected, "logits")


def test_cache_is_refused_where_it_would_be_wrong():
    with pytest.raises(ValueError, match="inference_mode"):
        model()(IDS, cache=Cache())
    with torch.no_grad(), pytest.raises(ValueError, match="pad on the left"):
        model()(IDS, cache=Cache(), mask=torch.arange(5).expand_as(IDS) < 4)
    with torch.no_grad(), pytest.raises(ValueError, match="encoder"):
        model(layout="attn,mlp", causal=False)(IDS, cache=Cache())
