"""MUDDFormer: mixtures by hand, the standard Transformer at the start, and DenseFormer inside it."""

import pytest
import torch

import residua
from residua import Plan
from tests.streams.hand import BY, close, constant, set_, state_at, trace, vector
from tests.streams.harness import compare, randomise, run_stream, toy_norms, toy_sublayers

Q, K, V, R = range(4)


def toy(plan, seed=0):
    """Random sublayers, norms and input."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, plan.width, generator=generator, dtype=torch.float64)
    return x, toy_sublayers(plan, generator), toy_norms(plan, generator)


def second_block(spec, x0, x1, by, a=None, W1=None, W2=()):
    """q, k, v and r of block 1 over X_0 and X_1, with W2 given as (hidden, lane, source, value) entries."""
    stream = residua.build(spec, Plan.regular(2, 2)).double()
    part = stream.part(stream.plan.site("l1_attn"))
    with torch.no_grad():
        if a is not None:
            part.a.copy_(torch.tensor(a))
        if W1 is not None:
            part.W1.zero_()
            part.W1[:, 0] = torch.tensor(W1)
        for hidden, lane, source, value in W2:
            part.W2.unflatten(1, (4, 2))[hidden, lane, source] = value
    step = constant(*(b - a for a, b in zip(x0, x1, strict=True)))
    zero = constant(0, 0)
    inputs, _ = trace(stream, vector(*x0), [step, zero, zero, zero], by=by)
    return (*inputs[2], inputs[3][0])  # an attention that answers nothing leaves r for the MLP to read


@pytest.mark.parametrize("by", BY)
def test_mudd_mixture_by_hand(by):
    """The values are for eps = 0; the norm's 1e-6 moves them by some 1e-8."""
    q, k, v, r = second_block("mudd", (1, 0), (3, 4), by, W1=(1.0, 0.0), W2=[(0, Q, 0, 1.0), (0, R, 1, -0.5)])
    assert close(q, (3.68045851, 4), 1e-7)
    assert close(k, (3, 4))
    assert close(v, (3, 4))
    assert close(r, (1.97931223, 2.63908298), 1e-7)


@pytest.mark.parametrize("by", BY)
def test_mudd_static_weights_by_hand(by):
    """W2 = 0: each lane has its own row of a, of any sign and size."""
    lanes = second_block("mudd", (1, 0), (3, 4), by, a=[(0.0, 1.0), (1.0, 0.0), (-2.0, 1.0), (1.0, 0.5)])
    for lane, expected in zip(lanes, [(3, 4), (1, 0), (1, 4), (2.5, 2)], strict=True):
        assert close(lane, expected)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(
    ("prepost", "expected"),
    [
        # X_0 / rms = (1.41421356, 0) and X_1 / rms = (0.84852814, 1.13137085): q takes both, r the second
        ("all", [(3.00126491, 4.00063246), (3, 4), (3, 4), (3.00084853, 4.00113137)]),
        ("r", [(5.26274170, 5.13137085), (3, 4), (3, 4), (3.00084853, 4.00113137)]),
    ],
)
def test_mudd_prepost_by_hand(prepost, expected, by):
    """x^c = X_1 + post(sum_j a_j rms(X_j)): sources are normalised first, and a gain of 1e-3 follows the sum."""
    rows = [(1.0, 1.0), (0.0, 0.0), (0.0, 0.0), (0.0, 1.0)]
    lanes = second_block(f"mudd:prepost={prepost}", (2, 0), (3, 4), by, a=rows)
    for lane, one in zip(lanes, expected, strict=True):
        assert close(lane, one, 1e-6)  # eps = 1e-6 in each of the norms


@pytest.mark.parametrize(("depth", "same"), [(23, "none"), (24, "all")])
def test_mudd_has_its_norms_by_default_where_it_is_deep(depth, same):
    """auto is the design that trains: from 24 blocks on that is the one with norms."""
    auto, named = (residua.build(spec, Plan.regular(2, depth)) for spec in ("mudd", f"mudd:prepost={same}"))
    assert auto.prepost == named.prepost == (same == "all")
    shapes = [{name: each.shape for name, each in one.named_parameters()} for one in (auto, named)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("prepost", ["all", "r"])
def test_mudd_prepost_forgets_the_scale_of_a_source(prepost, by):
    """The pre-norm, alone: the embedding ten times as large adds the same."""
    rows = [(1.0, 0.5), (0.3, 0.0), (0.2, -1.0), (1.0, 1.0)]
    lanes = second_block(f"mudd:prepost={prepost}", (2, 1), (3, 4), by, a=rows)
    scaled = second_block(f"mudd:prepost={prepost}", (20, 10), (3, 4), by, a=rows)
    for lane, one in zip(lanes, scaled, strict=True):
        assert close(lane, one.detach(), 1e-6)


@pytest.mark.parametrize("prepost", ["all", "r"])
def test_mudd_post_norm_has_slope_one_at_the_start(prepost):
    """1e-3 / sqrt(1e-6): a small weight adds its source whole, though the gain is a thousandth."""
    stream = residua.build(f"mudd:prepost={prepost}", Plan.regular(2, 2)).double()
    part = stream.part(stream.plan.site("l1_attn"))
    # sources of unit rms, which the pre-norm leaves alone but for its eps
    state = state_at(stream, "l1_attn", vector(1, -1), [constant(0, 2), constant(0, 0)])
    sources = [vector(1, -1), vector(1, 1)]

    def r(a):
        replaced = {"at.l1_attn.a": torch.cat([part.a.detach()[:3], a[None]])}
        read = torch.func.functional_call(_Reader(stream), {f"stream.{k}": v for k, v in replaced.items()}, (state,))
        return read[0, 0]

    slope = torch.func.jacrev(r)(torch.zeros(2, dtype=torch.float64))
    for j, source in enumerate(sources):
        assert close(slope[:, j], source, 1e-6)


class _Reader(torch.nn.Module):
    """What block 1 carries past its attention, as a module, so that parameters can be replaced in a derivative."""

    def __init__(self, stream):
        super().__init__()
        self.stream = stream

    def forward(self, state):
        return self.stream.read(state, self.stream.plan.site("l1_attn"), lambda *lanes: lanes).carry


@pytest.mark.parametrize("by", BY)
def test_mudd_post_gain_of_zero_leaves_the_state(by):
    """prepost=r has one gain, and it is r's: q goes on adding its sum."""
    stream = residua.build("mudd:prepost=r", Plan.regular(2, 2)).double()
    set_(stream, l1_attn__post=[[0, 0]], l1_attn__a=[(0, 2), (0, 0), (0, 0), (5, 5)])
    zero = constant(0, 0)
    inputs, _ = trace(stream, vector(1, 0), [constant(0, 1), zero, zero, zero], by=by)
    assert close(inputs[2][0], (3, 3), 1e-5)  # X_1 = (1, 1) and twice its unit self
    assert close(inputs[3][0], (1, 1))


SPECS = [
    "mudd",
    "mudd:prepost=all",
    "mudd:prepost=r",
    "mudd:window=2",
    "mudd:dilation=2",
    "mudd:dilation=3,period=2",
    "mudd:hidden=released",
]


@pytest.mark.parametrize("layout", [("attn", "mlp"), ("mlp", "attn", "conv"), ("attn",)], ids=",".join)
@pytest.mark.parametrize("spec", SPECS)
def test_mudd_starts_as_the_standard_stream(spec, layout):
    """To the last bit, with four lanes, with two, and with the head's one."""
    plan = Plan.regular(8, 5, layout)
    x, sublayers, norms = toy(plan)
    stream = residua.build(spec, plan).double()
    out = run_stream(stream, x, sublayers, norms)
    assert torch.equal(out, run_stream(residua.build("standard", plan), x, sublayers, norms))
    lanes = {"attn": 4, "mlp": 2}[layout[0]]
    for site in plan.readers:
        if stream.part(site) is not None:
            assert len(stream.part(site).a) == (1 if site.kind == "head" else lanes)


@pytest.mark.parametrize(("k", "p"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (4, 5)])
def test_mudd_tied_lanes_are_denseformer(k, p):
    """W2 = 0 and the same a for every lane: DenseFormer with alpha = a, for any dilation and period."""
    plan = Plan.regular(8, 6)
    x, sublayers, norms = toy(plan)
    options = f"dilation={k},period={p}"
    mudd, dense = (residua.build(f"{name}:{options}", plan).double() for name in ("mudd", "denseformer"))
    randomise(dense, torch.Generator().manual_seed(1))
    for site in plan.readers:
        part = mudd.part(site)
        if part is not None:
            part.a.data.copy_(dense.part(site).alpha.detach().expand_as(part.a))
    expected = run_stream(dense, x, sublayers, norms).detach()
    assert close(run_stream(mudd, x, sublayers, norms), expected)


@pytest.mark.parametrize("by", BY)
def test_mudd_newest_source_alone_is_a_gain_per_token(by):
    """Only j = i kept: every lane is X_i times a number that differs from token to token."""
    plan = Plan.regular(8, 2)
    x, sublayers, _ = toy(plan)
    stream = residua.build("mudd", plan).double()
    part = stream.part(plan.site("l1_attn"))
    with torch.no_grad():
        part.W2.normal_(generator=torch.Generator().manual_seed(1))
        part.W2.unflatten(1, (4, 2))[:, :, 0] = 0
    newest = state_at(stream, "l1_attn", x, sublayers).h
    for lane in trace(stream, x, sublayers, by=by).inputs[2]:
        gain = lane / newest
        assert close(gain, gain.mean(-1, keepdim=True).expand_as(gain).detach())
        assert gain.mean(-1).std() > 0.1


def test_mudd_weights_are_the_newest_state_s_choice():
    """The query side alone decides: other values in the older sources leave every weight as it was."""
    plan = Plan.regular(8, 3)
    x, sublayers, _ = toy(plan)
    stream = residua.build("mudd", plan).double()
    randomise(stream, torch.Generator().manual_seed(1))
    site = plan.site("l2_attn")
    state = state_at(stream, site.name, x, sublayers)
    older = tuple(torch.randn_like(source) for source in state.sources[:-1])
    weights = stream.weights(state, site)
    assert torch.equal(weights, stream.weights(state._replace(sources=(*older, state.sources[-1])), site))
    assert not close(weights, stream.weights(state._replace(h=-state.h), site).detach(), 1e-3)


def after(stream, i):
    """The indices of the states mixed after block i (1-based); 0 is the embedding."""
    site = next(site for site in stream.plan.readers if site.first and site.layer == i)
    return {0 if name == "embed" else int(name[1:]) + 1 for name in stream.sources(site)}


@pytest.mark.parametrize("window", [1, 3, 8, 20])
def test_mudd_window_keeps_the_embedding_and_the_last_blocks(window):
    stream = residua.build(f"mudd:window={window}", Plan.regular(2, 12))
    for i in range(1, 13):
        assert after(stream, i) == {0} | set(range(max(1, i - window + 1), i + 1))


def test_mudd_sources_of_dilation_and_period():
    """As DenseFormer: k=4, p=5, L=10."""
    stream = residua.build("mudd:dilation=4,period=5", Plan.regular(2, 10))
    sets = {i: after(stream, i) for i in range(1, 11)}
    assert {i: found for i, found in sets.items() if found} == {5: {1, 5}, 10: {2, 6, 10}}


def test_mudd_window_size_does_not_decide_the_embedding():
    """With a dilation too: how many blocks a window holds says nothing about whether it holds the embedding."""
    streams = [residua.build(f"mudd:dilation=2,window={window}", Plan.regular(2, 9)) for window in (1, 2, 3)]
    for i in range(2, 10):
        assert len({0 in after(stream, i) for stream in streams}) == 1, i


@pytest.mark.parametrize("spec", ["mudd:window=3", "mudd:dilation=2", "mudd:dilation=3,period=2", "mudd:window=9"])
def test_mudd_equals_its_oracle_at_another_depth(spec):
    errors = compare(spec, ("attn", "mlp"), depth=7)
    assert max(errors.values()) < 1e-10, errors


def test_mudd_wide_window_is_full_mudd():
    """At random parameters, drawn twice alike."""
    plan = Plan.regular(8, 4)
    x, sublayers, norms = toy(plan)
    outs = []
    for spec in ("mudd", "mudd:window=4"):
        stream = residua.build(spec, plan).double()
        stream.reset(torch.Generator().manual_seed(1))
        randomise(stream, torch.Generator().manual_seed(2))
        outs.append(run_stream(stream, x, sublayers, norms))
    assert torch.equal(*outs)


@pytest.mark.parametrize(("window", "dropped"), [(1, (1, 2)), (2, (1,))])
def test_mudd_window_is_full_mudd_without_the_dropped_states(window, dropped):
    """W2 = 0: a window is a row of zeros in a, at the head over X_0 to X_3."""
    plan = Plan.regular(8, 3)
    x, sublayers, norms = toy(plan)
    full, cut = residua.build("mudd", plan).double(), residua.build(f"mudd:window={window}", plan).double()
    a = torch.randn(1, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    a[:, dropped] = 0
    set_(full, head__a=a)
    set_(cut, head__a=a[a != 0][None])
    expected = run_stream(full, x, sublayers, norms).detach()
    assert close(run_stream(cut, x, sublayers, norms), expected)


@pytest.mark.parametrize(
    ("hidden", "site", "width"),
    [
        ("paper", "l1_attn", 8),  # 4 lanes, 2 sources
        ("paper", "l15_attn", 64),
        ("paper", "head", 68),  # one lane, four times as wide: 4 x 17
        ("released", "l1_attn", 64),
        ("released", "l15_attn", 128),  # past an exact multiple of 64 too
        ("released", "head", 128),
    ],
)
def test_mudd_hidden_width(hidden, site, width):
    stream = residua.build(f"mudd:hidden={hidden}", Plan.regular(2, 16))
    assert stream.part(stream.plan.site(site)).W1.shape == (2, width)


@pytest.mark.parametrize(
    ("d", "depth", "hidden", "percent"),
    [(2560, 32, "released", "0.35"), (2048, 24, "released", "0.38"), (2560, 32, "paper", "0.24")],
)
def test_mudd_parameter_share_of_the_model(d, depth, hidden, percent):
    """Of 12 d^2 a block. The paper's 0.23 is the estimate (L+3)/6d; unrounded, the count itself is 0.235."""
    with torch.device("meta"):
        stream = residua.build(f"mudd:prepost=none,hidden={hidden}", Plan.regular(d, depth))
    count = sum(p.numel() for p in stream.parameters())
    assert f"{100 * count / (12 * d * d * depth):.2f}" == percent
    if hidden == "paper":
        sites = [(4, i + 1, 4 * (i + 1)) for i in range(1, depth)] + [(1, depth + 1, 4 * (depth + 1))]
        assert count == sum(d * wide + wide * lanes * n + lanes * n for lanes, n, wide in sites)
        assert count / (12 * d * d * depth) == pytest.approx((depth + 3) / d / 6, rel=0.05)


def test_mudd_first_step_reaches_every_lane():
    """From W2 = 0, W2 and a learn at once, and W1 once W2 has moved."""
    plan = Plan.regular(8, 4)
    x, sublayers, norms = toy(plan)
    stream = residua.build("mudd", plan).double()
    (run_stream(stream, x, sublayers, norms) * x).sum().backward()
    for site in plan.readers:
        part = stream.part(site)
        if part is not None:
            assert part.W2.grad.abs().max() > 1e-3
            # older sources: on the newest alone, a gain is what the norms of q, k and v forget
            assert (part.a.grad[:, :-1].abs().amax(1) > 1e-4).all()
            assert torch.equal(part.W1.grad, torch.zeros_like(part.W1))
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter -= 0.01 * parameter.grad
    stream.zero_grad()
    (run_stream(stream, x, sublayers, norms) * x).sum().backward()
    assert all(stream.part(site).W1.grad.abs().max() > 0 for site in plan.readers if stream.part(site) is not None)


def test_mudd_start_of_the_hidden_weights():
    """W1 ~ N(0, 1/d), drawn by `reset` from the generator it is given."""
    stream = residua.build("mudd", Plan.regular(64, 8))
    stream.reset(torch.Generator().manual_seed(0))
    W1 = torch.cat([p.flatten() for name, p in stream.named_parameters() if name.endswith("W1")])
    assert W1.std().item() == pytest.approx(64**-0.5, rel=0.03)
    assert W1.mean().item() == pytest.approx(0, abs=0.003)


def test_mudd_decodes_token_by_token():
    plan = Plan.regular(8, 4)
    x, sublayers, norms = toy(plan)
    stream = residua.build("mudd", plan).double()
    randomise(stream, torch.Generator().manual_seed(1))
    steps = [run_stream(stream, x[:, t : t + 1], sublayers, norms) for t in range(x.shape[1])]
    assert close(torch.cat(steps, 1), run_stream(stream, x, sublayers, norms).detach())


@pytest.mark.parametrize(
    ("spec", "error", "cure"),
    [
        ("mudd:window=0", ValueError, "window must be at least 1"),
        ("mudd:dilation=0", ValueError, "dilation must be at least 1"),
        ("mudd:period=-1", ValueError, "period must be at least 1"),
        ("mudd:window=1.5", ValueError, "window takes whole number"),
        ("mudd:prepost=true", ValueError, "prepost takes auto|none|all|r"),
        ("mudd:hidden=64", ValueError, "hidden takes paper|released"),
        ("mudd:pre_post=r", TypeError, "did you mean 'prepost'"),
        ("mudd:lanes=one", TypeError, "options: prepost, window, dilation, period, hidden"),
    ],
)
def test_mudd_refusal_names_the_cure(spec, error, cure):
    with pytest.raises(error) as caught:
        residua.build(spec, Plan.regular(2, 2))
    assert cure in str(caught.value)
