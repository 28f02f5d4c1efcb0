"""depthswa: hand values of the depth read, how it enters a block, and what it is at the start."""

import pytest
import torch
from torch.nn import functional as F

import residua
from residua import Plan
from tests.oracles import depthswa as oracle
from tests.streams.harness import randomise, run_stream, toy_norms, toy_sublayers


def identity(*lanes):
    return lanes


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def drive(stream, x, answers):
    """Every input a sublayer and the head read, without norms, when the sublayers answer `answers`."""
    state, seen = stream.open(x), []
    for site, y in zip(stream.plan.sites, answers, strict=True):
        read = stream.read(state, site, identity)
        seen.append(read.lanes[0])
        state = stream.write(state, site, read, y)
    return [*seen, stream.read(state, stream.plan.head, identity).lanes[0]]


def drive_oracle(stream, layout, x, answers):
    """The same through the oracle, whose norms record what they are given."""
    seen = []

    def norm(z):
        seen.append(z)
        return z

    plan = stream.plan
    oracle.forward(
        x,
        dict(stream.named_parameters()),
        [lambda z, y=y: y for y in answers],
        [norm] * len(plan.readers),
        layers=plan.depth,
        layout=layout,
        **stream.options,
    )
    return seen


def both(stream, layout, x, answers):
    """The reads of the stream, which must be the oracle's."""
    ours, theirs = drive(stream, x, answers), drive_oracle(stream, layout, x, answers)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() < 1e-12
    return ours


def set_all(stream, value):
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter.fill_(value)


@pytest.mark.parametrize(
    ("window", "query", "expected"),
    [
        (1, 1.0, (0, 1, 2, 3)),
        (2, 1.0, (0, 0.73105858, 1.88079708, 2.95257413)),
        (4, 1.0, (0, 0.73105858, 1.85093709, 2.94762888)),
        (2, 0.0, (0, 0.5, 1.5, 2.5)),
    ],
)
@pytest.mark.parametrize("unit", ["layer", "sublayer"])
def test_depthswa_hand_values(window, query, expected, unit):
    # the hand test of the sequence axis, turned: d = 1, W = 1, the states are 0, 1, 2, 3
    stream = residua.build(f"depthswa:window={window},unit={unit}", Plan.regular(1, 4, ("mlp",))).double()
    set_all(stream, 1.0)
    if window > 1:
        with torch.no_grad():
            stream.shared.query.fill_(query)
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    *reads, head = both(stream, ("mlp",), 0 * one, [one] * 4)
    assert max(abs(z.item() - e) for z, e in zip(reads, expected, strict=True)) < 5e-9
    assert head.item() == 4  # the shortcut kept h, and the head reads it


D = tensor([[1.0, 0.0], [0.0, 2.0], [3.0, -1.0]])
H = D.cumsum(0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("window=1,sources=states", H),  # identity attention over states is the stream
        ("window=9,sources=deltas", H / tensor([[1.0], [2.0], [3.0]])),
        ("window=9,sources=states", tensor([[1.0, 0.0], [1.0, 1.0], [2.0, 1.0]])),
        ("window=2,sources=deltas", tensor([[1.0, 0.0], [0.5, 1.0], [1.5, 0.5]])),
    ],
)
def test_depthswa_uniform_reads_hand_values(options, expected):
    stream = residua.build(f"depthswa:{options}", Plan.regular(2, 3, ("mlp",))).double()
    with torch.no_grad():
        if stream.shared.chooses:
            stream.shared.query.zero_()
    answers = [y[None, None] for y in (*D[1:], torch.zeros_like(D[0]))]
    *reads, head = both(stream, ("mlp",), D[:1][None], answers)
    assert (torch.cat(reads, 1)[0] - expected).abs().max() < 1e-14
    assert torch.equal(head[0, 0], H[-1])


def test_depthswa_of_one_is_the_value_projection():
    stream = residua.build("depthswa:window=1,unit=sublayer", Plan.regular(4, 3)).double()
    randomise(stream, torch.Generator().manual_seed(0))
    x, *answers = torch.randn(7, 2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).unbind()
    reads = both(stream, ("attn", "mlp"), x, answers)
    state = x
    for read, y in zip(reads, answers, strict=False):
        assert (read - state @ stream.shared.value).abs().max() < 1e-12
        state = state + y
    assert set(dict(stream.named_parameters())) == {"shared.value"}


# d = 1, W_Q = 0, W_V = 1: every read is a mean. Blocks of two sublayers that add 1, 2, 4, 8 to an embedding of 1:
# the stream is 1, 2, 4, 8, 16; after layers it is 1, 4, 16, and the layers add 3 and 12.
@pytest.mark.parametrize(
    ("options", "reads", "head"),
    [
        ("enter=input", (1, 2, 2.5, 8), 16),
        ("enter=input,unit=sublayer", (1, 1.5, 7 / 3, 3.75), 16),
        ("enter=input,unit=sublayer,window=2", (1, 1.5, 3, 6), 16),
        ("enter=input,sources=deltas", (1, 2, 2, 8), 16),
        ("enter=input,sources=deltas,unit=sublayer,window=3", (1, 1, 4 / 3, 7 / 3), 16),
        ("enter=add", (2, 2, 6.5, 8), 16),
        ("enter=add,unit=sublayer,window=1", (2, 4, 8, 16), 16),
        ("enter=qkv", (1, 2, 2.5, 8), 16),
        ("enter=qkv,unit=sublayer", (1, 2, 7 / 3, 8), 16),
        ("enter=stream", (1, 2, 2.5, 6.5), 14.5),
        ("enter=stream,sources=deltas", (1, 2, 2, 6), 14),
        ("enter=stream,unit=sublayer,window=2", (1, 1.5, 2.75, 5.125), 13.125),
    ],
)
def test_depthswa_enters_as_its_option_says(options, reads, head):
    stream = residua.build(f"depthswa:{options}", Plan.regular(1, 2)).double()
    set_all(stream, 1.0)
    with torch.no_grad():
        if stream.shared.chooses:
            stream.shared.query.zero_()
    answers = [torch.full((1, 1, 1), y, dtype=torch.float64) for y in (1.0, 2.0, 4.0, 8.0)]
    found = both(stream, ("attn", "mlp"), torch.ones(1, 1, 1, dtype=torch.float64), answers)
    assert [one.item() for one in found] == pytest.approx([*reads, head], abs=1e-12)


def test_depthswa_key_norm_hides_the_size_of_a_source_from_the_choice():
    stream = residua.build("depthswa:key_norm=true,sources=deltas", Plan.regular(4, 2, ("mlp",))).double()
    randomise(stream, torch.Generator().manual_seed(0))
    x, y = torch.randn(2, 1, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).unbind()
    site = stream.plan.sites[1]
    weights = []
    for scale in (1.0, 50.0):
        state = stream.open(x)
        read = stream.read(state, stream.plan.sites[0], identity)
        state = stream.write(state, stream.plan.sites[0], read, scale * y)
        weights.append(stream.weights(state, site))
    assert (weights[0] - weights[1]).abs().max() < 1e-4  # the norm's eps alone
    assert weights[0].std() > 1e-3


def test_depthswa_shared_weights_are_one_set_and_others_one_a_site():
    shared = residua.build("depthswa", Plan.regular(8, 3))
    apart = residua.build("depthswa:shared=false", Plan.regular(8, 3))
    assert sum(p.numel() for p in shared.parameters()) == 3 * 8**2
    # the first read has one source, and nothing to choose
    assert sum(p.numel() for p in apart.parameters()) == (3 * 3 - 2) * 8**2


@pytest.mark.parametrize(
    ("spec", "same"),
    [
        ("depthswa:enter=add,gate=alpha", True),
        ("depthswa:window=1", True),
        ("depthswa:window=1,enter=stream,unit=sublayer", True),
        ("depthswa:window=1,enter=add", True),
        ("depthswa:window=1,enter=qkv", True),
        ("depthswa:window=1,sources=deltas", False),
        ("depthswa:window=2", False),
        ("depthswa:window=2,enter=add", False),
    ],
)
def test_depthswa_start(spec, same):
    generator = torch.Generator().manual_seed(0)
    plan = Plan.regular(8, 3)
    stream, standard = (residua.build(one, plan).double() for one in (spec, "standard"))
    sublayers, norms = toy_sublayers(plan, generator), toy_norms(plan, generator, eps=0.0)
    x = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    difference = run_stream(stream, x, sublayers, norms) - run_stream(standard, x, sublayers, norms)
    assert (difference.abs().max() < 1e-12) == same
    assert (stream.starts != "no") == same


@pytest.mark.parametrize("unit", ["layer", "sublayer"])
@pytest.mark.parametrize(("sources", "same"), [("deltas", True), ("states", False)])
def test_depthswa_zero_logits_over_deltas_are_the_standard_network(unit, sources, same):
    # the mean of the deltas is the stream up to a factor, which a norm without eps removes
    generator = torch.Generator().manual_seed(0)
    plan = Plan.regular(8, 6)
    stream = residua.build(f"depthswa:window=99,sources={sources},unit={unit}", plan).double()
    with torch.no_grad():
        stream.shared.query.zero_()
    standard = residua.build("standard", plan).double()
    sublayers, norms = toy_sublayers(plan, generator), toy_norms(plan, generator, eps=0.0)
    x = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    difference = (run_stream(stream, x, sublayers, norms) - run_stream(standard, x, sublayers, norms)).abs().max()
    assert difference < 1e-12 if same else difference > 0.1


def test_depthswa_gate_keeps_the_type_of_the_stream():
    stream = residua.build("depthswa:enter=add,gate=alpha", Plan.regular(8, 2))  # float32 parameters
    x = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    reads = drive(stream, x, [x] * 4)
    assert {read.dtype for read in reads} == {torch.bfloat16}


def test_depthswa_routing_is_what_is_read():
    for options in ("", "enter=add,gate=alpha,heads=2", "sources=deltas,unit=sublayer,enter=add"):
        stream = residua.build(f"depthswa:{options}" if options else "depthswa", Plan.regular(4, 3)).double()
        randomise(stream, torch.Generator().manual_seed(0))
        state = stream.open(torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
        for site in stream.plan.sites:
            read, routing = stream.read(state, site, identity), stream.routing(state, site)
            if routing is not None:
                assert (routing.mixed()[0] - read.lanes[0]).abs().max() < 1e-12
                assert (routing.weights.sum(1) - 1).abs().max() < 1e-14
                assert len(routing.values) == len(stream.sources(site))
            state = stream.write(state, site, read, F.silu(read.lanes[0]))


@pytest.mark.parametrize(
    ("options", "layout", "error", "cure"),
    [
        ("window=0", "mlp", ValueError, "at least 1"),
        ("heads=0", "mlp", ValueError, "at least 1"),
        ("heads=3", "mlp", ValueError, "does not divide the width 8"),
        ("gate=alpha", "mlp", ValueError, "needs enter=add"),
        ("gate=alpha,enter=stream", "mlp", ValueError, "needs enter=add"),
        ("enter=qkv", "mlp,conv", ValueError, "needs an attention sublayer"),
        ("key_norm=true,window=1", "mlp", ValueError, "two sources"),
        ("enter=output", "mlp", ValueError, "input|add|qkv|stream"),
        ("sources=values", "mlp", ValueError, "states|deltas"),
        ("unit=block", "mlp", ValueError, "layer|sublayer"),
        ("k=4", "mlp", TypeError, "window"),
    ],
)
def test_depthswa_refuses(options, layout, error, cure):
    with pytest.raises(error) as caught:
        residua.build(f"depthswa:{options}", Plan.regular(8, 3, layout))
    assert cure in str(caught.value)
