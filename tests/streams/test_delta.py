"""Delta Attention Residuals: hand values of the toy stack, the released order and its bug, and the identities."""

import math

import pytest
import torch

import residua
from residua import Plan
from residua.ops import attend
from residua.testing import specs
from tests.oracles import delta as oracle_module
from tests.streams.depth_toy import DIGITS, LAYOUT, QUERY, TOY, Net, gap, run_toy, vector
from tests.streams.harness import run_stream

EXACT = 1e-12

# ------------------------------------------------------------------------------------------------ hand values

DELTA = [(1, 1), (3, 0.5), (10.648793, 1.664879), (11.935148, 16.154609), (21.600028, 27.803402)]
ZERO_QUERY = [(1, 1), (3, 0), (32 / 3, 0), (10, 40 / 3), (18, 24)]
RELEASED_2 = [(1, 1), (3, 1), (9, 3), (14.351239, 12), (25.351239, 23)]
RELEASED_3 = [*RELEASED_2[:4], (28.702479, 24), (58.542410, 3.473424), (78.622444, -3.965767)]
TRUE_3 = [*RELEASED_2[:4], (28.702479, 24), (58.160805, 3.095130), (78.431642, -4.154914)]
STANDARD = [(1, 1), (2, 0), (6, 0), (6, 6), (12, 12)]


@pytest.mark.parametrize(
    ("spec", "layers", "query", "expected"),
    [
        ("delta:eps=0", 2, QUERY, DELTA),
        ("delta:eps=0,block=1", 2, QUERY, DELTA),
        ("delta_released:eps=0", 2, QUERY, DELTA),
        ("delta:eps=0", 2, (0, 0), ZERO_QUERY),
        ("delta_released:eps=0", 2, (0, 0), ZERO_QUERY),
        ("delta_released:eps=0,blocks=2", 2, QUERY, RELEASED_2),
        ("delta_released:eps=0,block=2", 2, QUERY, RELEASED_2),
        ("delta_released:eps=0,blocks=3", 3, QUERY, RELEASED_3),
        ("delta:eps=0,gate=alpha", 2, QUERY, STANDARD),
        ("delta:eps=0,centered=true", 2, (0, 0), STANDARD),
    ],
)
@pytest.mark.parametrize("oracle", [False, True], ids=["stream", "oracle"])
def test_delta_toy_stack_gives_the_hand_values(spec, layers, query, expected, oracle):
    assert run_toy(spec, layers, query, oracle=oracle) == [pytest.approx(row, abs=DIGITS) for row in expected]


@pytest.mark.parametrize("oracle", [False, True], ids=["stream", "oracle"])
def test_delta_toy_with_a_doubled_first_read_gives_the_canonical_hand_value(oracle):
    # the canonical algorithm reads x = e + e at its first site, and ours e: let the first sublayer double it
    doubled = (lambda x: TOY[0](2 * x), *TOY[1:])
    *_, out = run_toy("delta:eps=0", 2, sublayers=doubled, oracle=oracle)
    assert out == pytest.approx((18.374751, 30.278987), abs=DIGITS)


def read(sources):
    return attend(torch.tensor(QUERY, dtype=torch.float64), tuple(sources), eps=0.0)


def canonical():
    """Section 6.3 as written, one sublayer a block: the embedding is a source from the start."""
    h = start = vector(1, 1)
    sources, seen = [h], []
    for s, f in enumerate(TOY[:4]):
        if s:
            sources.append(h - start)
            start = h
        seen.append(h + read(sources))
        h = h + f(seen[-1])
    return [*seen, h]


def true_deltas_in_released_order():
    """One layer a block; a true delta is pushed where the released code pushes h minus the last source."""
    h = last = vector(1, 1)
    sources, seen = [], []
    for s, f in enumerate(TOY):
        seen.append(h + read(sources) if sources else h)
        o = f(seen[-1])
        if s % 2 == 0:
            sources.append(h - last if sources else h)
            last = h
        h = h + o
    return [*seen, h]


def delta_replace():
    """The released ablation: outputs without the embedding, and the stream, replace the input."""
    h = vector(1, 1)
    sources, seen = [], []
    for f in TOY[:4]:
        seen.append(read([*sources, h]))
        sources.append(f(seen[-1]))
        h = h + sources[-1]
    return [*seen, h]


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        (canonical, {0: (2, 2), 4: (18.374751, 30.278987)}),
        (true_deltas_in_released_order, dict(enumerate(TRUE_3))),
        (
            delta_replace,
            dict(
                enumerate(
                    [(1, 1), (1.633975, -0.366025), (3.478223, -0.798739), (1.650582, 2.046487), (6.119793, 4.792659)]
                )
            ),
        ),
    ],
)
def test_delta_loops_we_do_not_build_give_the_hand_values(loop, expected):
    found = [tuple(x.flatten().tolist()) for x in loop()]
    assert {i: found[i] for i in expected} == {i: pytest.approx(row, abs=DIGITS) for i, row in expected.items()}


def count_sources(stream):
    return [len(stream.sources(site)) for site in stream.plan.sites]


@pytest.mark.parametrize(
    ("spec", "layers", "counts"),
    [
        ("delta", 4, [0, 2, 3, 4, 5, 6, 7, 8]),
        ("delta_released", 4, [0, 2, 3, 4, 5, 6, 7, 8]),
        ("delta_released:blocks=4", 8, [0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4]),
        ("delta_released:block=4", 8, [0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4]),
        ("delta:block=4", 8, [0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4]),
        ("delta:block=4,include_partial=true", 8, [0, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5]),
        ("delta_released:null=true", 2, [1, 3, 4, 5]),
        ("delta_released:blocks=2,null=true", 2, [1, 2, 2, 3]),
    ],
)
def test_delta_sites_read_as_many_sources_as_published(spec, layers, counts):
    assert count_sources(residua.build(spec, Plan.regular(2, layers))) == counts


def test_delta_released_blocks_are_whole_layers():
    # 28 layers and num_blocks=8 make 4 layers a block, hence 7 boundaries
    stream = residua.build("delta_released:blocks=8", Plan.regular(2, 28))
    assert count_sources(stream)[-1] == 7


def test_delta_released_blocks_beyond_the_layers_are_one_layer_each():
    # num_blocks counts layers, ceil(4 / 8) = 1 a block: as many sources as with blocks=4
    plan = Plan.regular(2, 4)
    counts = [count_sources(residua.build(f"delta_released:blocks={n}", plan)) for n in (4, 5, 8)]
    assert counts == [[0, 1, 1, 2, 2, 3, 3, 4]] * 3


def parameter_count(spec, width, layers):
    return sum(p.numel() for p in residua.build(spec, Plan.regular(width, layers)).parameters())


@pytest.mark.parametrize(
    ("spec", "width", "layers", "count"),
    [
        ("delta", 4096, 36, 589_824 - 2 * 4096),  # the published 4dL, without the first site
        ("delta", 8, 4, 2 * 8 * 7),
        ("delta:null=true", 8, 4, (2 * 8 + 1) * 7),
        ("delta_released:null=true", 8, 4, 3 * 8 * 8 - 2 * 8),  # a null at the first site, and no query
        ("delta:gate=scalar", 8, 4, (2 * 8 + 1) * 7),
        ("delta:gate=alpha", 8, 4, (2 * 8 + 1) * 7),
        ("delta:gate=vector", 8, 4, (2 * 8 + 8 * 8 + 8) * 7),
        ("delta:value_lane=true", 8, 4, 2 * 8 * (7 + 3)),
        ("delta:block=2", 8, 4, 2 * 8 * 6),
        ("delta:block=2,include_partial=true", 8, 4, 2 * 8 * 7),
        ("delta_released:blocks=2", 8, 4, 2 * 8 * 3),
    ],
)
def test_delta_has_the_parameters_that_can_learn(spec, width, layers, count):
    assert parameter_count(spec, width, layers) == count


@pytest.mark.parametrize(
    ("ending", "start"),
    [
        ("query.query", 0.0),
        ("query.gain", 1.0),
        ("null.logit", 0.0),
        ("null.vector", 0.0),
        ("gate.logit", -2.0),
        ("gate.alpha", 0.0),
        ("gate.weight", 0.0),
        ("gate.bias", -2.0),
    ],
)
def test_delta_parameters_start_where_the_paper_says(ending, start):
    found = 0
    for spec in (*specs("delta"), *specs("delta_released")):
        for name, parameter in residua.build(spec, Plan.regular(8, 4)).named_parameters():
            if name.endswith(ending) and not (ending == "query.query" and "alpha" in spec):
                found += 1
                assert torch.equal(parameter, torch.full_like(parameter, start)), name
    assert found


def test_delta_queries_under_alpha_start_off_zero():
    """Else both are stuck: a zero query reads a multiple of h, which a norm forgets, so alpha has no gradient."""
    stream = residua.build("delta:gate=alpha", Plan.regular(256, 4))
    queries = torch.cat([p for name, p in stream.named_parameters() if name.endswith("query.query")])
    assert queries.std().item() == pytest.approx(0.02, rel=0.1)

    def pull(query):
        net = Net("delta:gate=alpha", routed=False)
        with torch.no_grad():
            for name, parameter in net.stream.named_parameters():
                if name.endswith("query.query"):
                    parameter.mul_(query)
        net.out().square().mul(net.x).sum().backward()
        return min(p.grad.abs().item() for name, p in net.stream.named_parameters() if name.endswith("alpha"))

    assert pull(0) < EXACT
    assert pull(1) > 1e-5


def spec_of(*options):
    """Of `delta`; "released" among the options is the design of the public code."""
    given = [each for option in options for each in option.split(",") if each]
    name, joined = "delta_released" if "released" in given else "delta", ",".join(e for e in given if e != "released")
    return f"{name}:{joined}" if joined else name


# ---------------------------------------------------------------------------------------------------- the stream


@pytest.mark.parametrize("case", residua.design("delta").cases)
def test_delta_stream_is_the_plain_sum_and_the_head_reads_it(case):
    """Section 6.1: only inputs are enriched. The stream never contains a read, and there is no final site."""
    net = Net(spec_of(case))
    answers = []

    def keep(f):
        def call(*lanes):
            answers.append(f(*lanes))
            return answers[-1]

        return call

    out = run_stream(net.stream, net.x, [keep(f) for f in net.sublayers], net.norms)
    assert gap(out, net.norms[-1](net.x + sum(answers))) < EXACT
    assert "head" not in net.stream.at


@pytest.mark.parametrize("options", ["", "block=2", "block=3", "block=3,include_partial=true", "blocks=2"])
def test_delta_sources_telescope_to_the_stream(options):
    """Identity 15: the sources and the open block's change sum to h."""
    for state in Net(spec_of(options)).states():
        assert gap(sum(state.sources + state.partial), state.h) < EXACT


@pytest.mark.parametrize("spec", ["delta", "delta_released"])
def test_delta_ends_with_every_output_as_a_source(spec):
    state = Net(spec).states()[-1]
    assert len(state.sources) == 2 * 4 + 1


@pytest.mark.parametrize("options", ["", "block=3", "block=3,include_partial=true", "null=true", "centered=true"])
def test_delta_read_is_the_stream_plus_weighted_sources(options):
    """Identity 12: x = sum_i (1 + a_i) s_i, with a_i in (0, 1), or a_i - 1/n where centered."""
    net = Net(spec_of(options))
    for state, site in list(zip(net.states(), net.plan.sites, strict=False))[1:]:
        weights = net.stream.weights(state, site)[0]
        values = state.sources + (state.partial if "include" in options else ())
        read = sum((1 + a) * s for a, s in zip(weights, values, strict=True))
        unread = 0 if "include" in options else sum(state.partial)  # of h, but not among the sources
        assert gap(net.read(state, site)[0], read + unread) < EXACT
        shift = 1 / len(values) if "centered" in options else 0
        assert ((weights + shift > 0) & (weights + shift <= 1)).all()
        if "null" in options:
            assert (weights.sum(0) < 1).all()
        else:
            assert gap(weights.sum(0) + shift * len(values), torch.ones(2, 5, 1)) < EXACT


@pytest.mark.parametrize("spec", ["delta:block=4", "delta_released:blocks=2"])
def test_delta_lone_source_doubles_the_embedding_for_any_query(spec):
    """Section 6.3 and identity 18: until a second source there is nothing to route, so no query is built."""
    net = Net(spec)
    lone = [site for site in net.plan.sites if net.stream.sources(site) == ("embed",)]
    assert len(lone) >= 3
    for site in lone:
        assert gap(net.read(net.states()[site.index], site)[0], net.states()[site.index].h + net.x) == 0
        assert not [name for name, _ in net.stream.at[site.name].named_parameters()]


def test_delta_released_block_sources_alternate_the_boundary_states():
    """s_k = H_k - s_{k-1} = sum_j (-1)^{k-j} H_j: a true difference only up to the second source."""
    net = Net("delta_released:blocks=4")
    states = net.states()
    boundaries = [states[2 * layer].h for layer in range(4)]  # the stream as each block's first layer reads
    for k, source in enumerate(states[-1].sources):
        expected = sum((-1) ** (k - j) * boundaries[j] for j in range(k + 1))
        assert gap(source, expected) < EXACT
    _, first, second, third = states[-1].sources
    H0, H1, H2, H3 = boundaries
    assert gap(first, H1 - H0) < EXACT
    assert gap(second, (H2 - H1) + H0) < EXACT
    assert gap(third, (H3 - H2) + (H1 - H0)) < EXACT
    assert gap(second, H2 - H1) > 0.1


def test_delta_released_boundary_attention_does_not_see_the_block_that_ended():
    net = Net("delta_released:blocks=2")
    names = {site.name: net.stream.sources(site) for site in net.plan.sites}
    assert names["l2_attn"] == ("embed",)
    assert names["l2_mlp"] == ("embed", "block0")
    assert names["l3_mlp"] == ("embed", "block0")  # the last block is never pushed


def test_delta_block_change_survives_bfloat16():
    """A block's change is added up: h - start would lose 1/4 + 1/4 beside 256, where bfloat16 counts in twos."""
    stream = residua.build("delta:block=2", Plan.regular(2, 2))
    state = stream.open(torch.full((1, 1, 2), 256.0, dtype=torch.bfloat16))
    for site in stream.plan.sites[:2]:
        got = stream.read(state, site, lambda *lanes: lanes)
        state = stream.write(state, site, got, torch.full((1, 1, 2), 0.25, dtype=torch.bfloat16))
    assert state.h.flatten().tolist() == [256, 256]
    assert state.sources[-1].flatten().tolist() == [0.5, 0.5]


# ---------------------------------------------------------------------------------------------------- identities


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize(
    "options",
    [
        "",
        "null=true",
        "value_lane=true",
        "released",
        "released,null=true",
        *(f"block={size},include_partial=true" for size in range(2, 9)),
        "blocks=3,include_partial=true,null=true",
    ],
)
def test_delta_zero_queries_are_the_standard_network_under_a_scale_free_norm(options, norm):
    """Identities 9 and 14: the sources sum to h, so the read is a multiple of it."""
    net = Net(spec_of(options), norm=norm, routed=False)
    assert net.stream.starts == "eps"
    assert gap(net.out(), net.standard()) < EXACT


@pytest.mark.parametrize(
    ("options", "norm", "routed"),
    [
        ("", "none", False),
        ("", "rms, large eps", False),
        ("", "rms", True),
        ("block=2", "rms", False),
        ("block=3,null=true", "rms", False),
        ("gate=scalar,blocks=2", "rms", False),
        ("released,blocks=2", "rms", False),
        ("released,blocks=4", "rms", False),
    ],
)
def test_delta_is_not_standard_where_the_identity_breaks(options, norm, routed):
    """Section 0 and identity 14: no pre-norm, an eps that counts, queries off zero, a block without its partial."""
    net = Net(spec_of(options), norm=norm, routed=routed)
    assert gap(net.out(), net.standard()) > 1e-4


def test_delta_without_the_embedding_is_not_standard():
    """Identity 9: the outputs alone do not sum to h; a loop, since the design always has the embedding."""
    net = Net("delta", routed=False)
    found = []
    for embedding in (True, False):
        h, sources = net.x, []
        for f, norm in zip(net.sublayers, net.norms, strict=False):
            query = torch.zeros(8, dtype=torch.float64)
            o = f(norm(h + attend(query, tuple(sources)) if sources else h))
            if embedding and not sources:
                sources.append(net.x)
            sources.append(o)
            h = h + o
        found.append(gap(net.norms[-1](h), net.standard()))
    assert found[0] < EXACT
    assert found[1] > 1e-3


EVERY_NORM = ["rms", "layer", "rms, large eps", "none"]


@pytest.mark.parametrize("norm", EVERY_NORM)
@pytest.mark.parametrize(
    "options", ["", "block=3", "null=true", "value_lane=true", "released,blocks=2,null=true", "released"]
)
def test_delta_gate_zero_is_the_standard_network_bit_for_bit(options, norm):
    """Identity 10, whatever the queries and the nulls."""
    net = Net(spec_of(options, "gate=alpha"), norm=norm)
    with torch.no_grad():
        for name, parameter in net.stream.named_parameters():
            if name.endswith("alpha"):
                parameter.zero_()
    assert net.stream.starts == "standard"
    assert torch.equal(net.out(), net.standard())


@pytest.mark.parametrize("norm", EVERY_NORM)
@pytest.mark.parametrize("options", ["", "block=3", "gate=vector", "gate=scalar,blocks=2", "value_lane=true"])
def test_delta_centered_zero_queries_are_the_standard_network_bit_for_bit(options, norm):
    """Identity 11: softmax - 1/n of n zeros is nothing at all, under any norm and with any sources."""
    net = Net(spec_of(options, "centered=true"), norm=norm, routed=False)
    assert net.stream.starts == "standard"
    assert torch.equal(net.out(), net.standard())


@pytest.mark.parametrize("extra", ["", "null=true", "gate=vector", "centered=true", "value_lane=true"])
@pytest.mark.parametrize("size", ["block=1", "blocks=8"])
def test_delta_block_of_one_sublayer_is_delta(size, extra):
    """Identity 13, for any queries."""
    assert gap(Net(spec_of(size, extra)).out(), Net(spec_of(extra)).out()) < EXACT


@pytest.mark.parametrize("options", ["", "gate=vector", "null=true"])
def test_delta_released_order_is_ours_without_blocks(options):
    ours, theirs = Net(spec_of(options)), Net(spec_of(options, "released"))
    if "null" in options:  # a null vector at zero has logit 0 and value 0: the null logit at 0, but for slopes
        with torch.no_grad():
            for net in (ours, theirs):
                for name, parameter in net.stream.named_parameters():
                    parameter.fill_(0.0 if ".null." in name else math.cos(len(name)))
    assert gap(ours.out(), theirs.out()) < EXACT


def test_delta_released_null_is_steep_where_a_logit_is_not():
    """Section 6.4: through the key norm a zero null has the slope 1/sqrt(eps); its value path has slope near 1."""

    def pull(eps):
        net = Net(f"delta_released:null=true,eps={eps}")
        nulls = [p for name, p in net.stream.named_parameters() if name.endswith("vector") and "l0_attn" not in name]
        with torch.no_grad():
            for null in nulls:
                null.zero_()
        net.out().square().mul(net.x).sum().backward()
        return torch.cat([null.grad for null in nulls]).abs().max().item()

    # keys of sources of order one barely notice these eps; only the null's slope does
    assert pull(1e-8) / pull(1e-6) == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize("kind", ["scalar", "vector", "alpha"])
def test_delta_gates_mix_the_stream_with_the_ungated_read(kind):
    """Section 6.5: (1 - g) h + g y with y = h + r."""
    gated, free = Net(f"delta:gate={kind}"), Net("delta")
    with torch.no_grad():
        for name, parameter in free.stream.named_parameters():
            parameter.copy_(gated.stream.get_parameter(name))
    for state, site in list(zip(gated.states(), gated.plan.sites, strict=False))[1:]:
        (route,) = gated.stream.at[site.name]
        h = state.h
        if kind == "scalar":
            g = 1 / (1 + (-route.gate.logit).exp())
        elif kind == "vector":
            g = 1 / (1 + (-(h @ route.gate.weight.T + route.gate.bias)).exp())
        else:
            g = route.gate.alpha
        (y,) = free.read(state, site)
        assert gap(gated.read(state, site)[0], (1 - g) * h + g * y) < EXACT


def test_delta_alpha_moves_before_its_query():
    """Section 6.5: at alpha = 0 a query has no gradient, and alpha has one where the queries are not all zero."""
    net = Net("delta:gate=alpha")
    with torch.no_grad():
        for name, parameter in net.stream.named_parameters():
            if name.endswith("alpha"):
                parameter.zero_()
    net.out().square().mul(net.x).sum().backward()
    for name, parameter in net.stream.named_parameters():
        assert parameter.grad.any() == name.endswith("alpha"), name


@pytest.mark.parametrize("case", residua.design("delta").cases)
def test_delta_routing_taken_apart_is_the_read(case):
    net = Net(spec_of(case))
    for state, site in zip(net.states(), net.plan.readers, strict=True):
        names, routing = net.stream.sources(site), net.stream.routing(state, site)
        if routing is None:
            assert names == ()
            continue
        assert len(names) == len(routing.values) == routing.weights.shape[1]
        assert gap(routing.mixed(), torch.stack(net.read(state, site))) < EXACT


def test_delta_value_lane_routes_only_the_values_of_attention():
    net = Net("delta:value_lane=true")
    for state, site in list(zip(net.states(), net.plan.sites, strict=False))[1:]:
        lanes = net.read(state, site)
        assert len(lanes) == net.stream.feeds(site) == (3 if site.kind == "attn" else 1)
        for lane, route in zip((0, -1), net.stream.at[site.name], strict=False):
            expected = state.h + attend(route.query.folded(), state.sources)
            assert gap(lanes[lane], expected) < EXACT
        if site.kind == "attn":
            assert gap(lanes[0], lanes[1]) == 0
            assert gap(lanes[0], lanes[2]) > 1e-2


@pytest.mark.parametrize("extra", ["", "null=true,gate=scalar", "block=3,include_partial=true", "centered=true"])
def test_delta_value_lane_with_one_query_is_no_value_lane(extra):
    apart, together = Net(spec_of("value_lane=true", extra)), Net(spec_of(extra))
    with torch.no_grad():
        for name, parameter in together.stream.named_parameters():
            for lane in (".0.", ".1."):
                twin = name.replace(".0.", lane)
                if twin in dict(apart.stream.named_parameters()):
                    apart.stream.get_parameter(twin).copy_(parameter)
    assert gap(apart.out(), together.out()) < EXACT


@pytest.mark.parametrize("options", ["", "block=3", "null=true", "released,blocks=2,null=true"])
def test_delta_only_the_product_of_query_and_gain_matters(options):
    """Identity 7: route(w, g) = route(w g, 1)."""
    net = Net(spec_of(options))
    before = net.out()
    with torch.no_grad():
        for routes in net.stream.at.values():
            for route in routes:
                if route.query is not None:
                    route.query.query.mul_(route.query.gain)
                    route.query.gain.fill_(1)
    assert gap(net.out(), before) < EXACT


@pytest.mark.parametrize("options", ["", "block=3,include_partial=true", "null=true", "centered=true"])
def test_delta_weights_ignore_the_scale_of_a_source(options):
    """Identity 6, at every site of the stream."""
    net = Net(spec_of(options, "eps=0"))
    for state, site in list(zip(net.states(), net.plan.sites, strict=False))[1:]:
        louder = state._replace(sources=(3 * state.sources[0], *(0.2 * v for v in state.sources[1:])))
        assert gap(net.stream.weights(louder, site), net.stream.weights(state, site)) < EXACT


@pytest.mark.parametrize("case", residua.design("delta").cases)
@pytest.mark.parametrize("layout", [LAYOUT, ("mlp", "attn", "conv")], ids=",".join)
def test_delta_every_query_learns_after_one_step_from_the_start(case, layout):
    """Identity 26: no dead site; and section 0: with w = 0 (or a gate at 0) the gain has no gradient yet."""
    net = Net(spec_of(case), layout=layout, routed=False)

    def gradients():
        net.stream.zero_grad()
        run_stream(net.stream, net.x, net.sublayers, net.norms).square().mul(net.x).sum().backward()
        return {name: parameter.grad for name, parameter in net.stream.named_parameters()}

    before = gradients()
    assert all(not grad.any() for name, grad in before.items() if name.endswith("gain"))
    with torch.no_grad():
        for parameter in net.stream.parameters():
            parameter -= 0.01 * parameter.grad
    for name, grad in gradients().items():
        assert grad.abs().max() > 1e-8, name


# -------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "layout", "error", "cure"),
    [
        ({"block": 2, "blocks": 2}, LAYOUT, ValueError, "give block=2 .* or blocks=2 .*, not both"),
        ({"block": 0}, LAYOUT, ValueError, r"block must be 1\.\.8, .* not 0"),
        ({"blocks": 9}, LAYOUT, ValueError, r"blocks must be 1\.\.8, .* not 9"),
        ({"include_partial": True}, LAYOUT, ValueError, "include_partial needs block or blocks"),
        ({"include_partial": True, "block": 1}, LAYOUT, ValueError, "include_partial needs block or blocks"),
        ({"centered": True, "null": True}, LAYOUT, ValueError, "exclude each other; drop one"),
        ({"value_lane": True}, ("mlp", "conv"), ValueError, "value_lane needs an attention sublayer"),
        ({"gate": "sigmoid"}, LAYOUT, ValueError, r"gate takes none\|scalar\|vector\|alpha"),
        ({"null": "yes"}, LAYOUT, ValueError, r"null takes true\|false"),
        ({"total": True}, LAYOUT, TypeError, "use gate or centered"),
        ({"heads": 2}, LAYOUT, TypeError, "attnres:heads="),
        ({"centred": True}, LAYOUT, TypeError, "did you mean 'centered'"),
    ],
)
def test_delta_refuses_options_and_names_the_cure(options, layout, error, cure):
    with pytest.raises(error, match=cure):
        residua.design("delta")(Plan.regular(8, 4, layout), **options)


@pytest.mark.parametrize(
    ("options", "error", "cure"),
    [
        ({"centered": True}, TypeError, "no working centered; use delta"),
        ({"value_lane": True}, TypeError, "no working value_lane; use delta"),
        ({"include_partial": True, "block": 2}, TypeError, "no working include_partial; use delta"),
        ({"block": 3}, ValueError, "blocks are whole layers; block=3 is not a multiple of 2"),
        ({"blocks": 9}, ValueError, r"blocks must be 1\.\.8"),
    ],
)
def test_delta_released_refuses_options_and_names_the_cure(options, error, cure):
    with pytest.raises(error, match=cure):
        residua.design("delta_released")(Plan.regular(8, 4, LAYOUT), **options)


def test_delta_specs_of_earlier_versions_build_the_same_designs():
    """Checkpoints wrote every option out: `compat` among them."""
    plan = Plan.regular(8, 4, LAYOUT)
    assert residua.build({"name": "delta", "compat": "none", "blocks": 2}, plan).spec == "delta:blocks=2"
    assert residua.build("delta:compat=released,blocks=2", plan).spec == "delta_released:blocks=2"


@pytest.mark.parametrize(
    "options",
    [{"gate": "sigmoid"}, {"compat": "draft"}, {"block": 2, "blocks": 2}, {"centered": True, "null": True}],
    ids=str,
)
def test_delta_oracle_refuses_what_it_does_not_know(options):
    with pytest.raises(ValueError):
        oracle_module.forward(vector(1, 1), {}, [], [], layers=1, layout=LAYOUT, **options)
