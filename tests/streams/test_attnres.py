"""AttnRes: the hand values of its toy stack and the identities that separate it from its look-alikes."""

import pytest
import torch

import residua
from residua import Plan
from residua.ops import attend
from tests.streams.depth_toy import DIGITS, LAYOUT, QUERY, TOY, Net, gap, run_toy, set_queries, vector
from tests.streams.harness import run_stream

EXACT = 1e-12

# ------------------------------------------------------------------------------------------------ hand values

FULL = [(1, 1), (1, 0.5), (1.379993, 0.689997), (1.138675, 0.931315), (1.138675, 0.931315)]
BLOCK2 = [(1, 1), (1, 0.5), (1.732051, 0.633975), (1.258181, 1.107844), (1.797903, 1.541283)]
STANDARD = [(1, 1), (2, 0), (6, 0), (6, 6), (12, 12)]


@pytest.mark.parametrize(
    ("spec", "query", "expected"),
    [
        ("attnres:eps=0", QUERY, FULL),
        ("attnres:eps=0,block=1", QUERY, FULL),
        ("attnres:eps=0,blocks=4", QUERY, FULL),
        ("attnres:eps=0,block=2", QUERY, BLOCK2),
        ("attnres:eps=0,blocks=2", QUERY, BLOCK2),
        # n * mean of the outputs is their sum, with no norm to hide a factor
        ("attnres:eps=0,total=true", (0, 0), STANDARD),
        ("attnres:eps=0,total=true,block=3", (0, 0), STANDARD),
        ("attnres:eps=0,total=true,window=1", (0, 0), STANDARD),
    ],
)
@pytest.mark.parametrize("oracle", [False, True], ids=["stream", "oracle"])
def test_attnres_toy_stack_gives_the_hand_values(spec, query, expected, oracle):
    assert run_toy(spec, 2, query, oracle=oracle) == [pytest.approx(row, abs=DIGITS) for row in expected]


def test_standard_toy_stack_gives_the_hand_values():
    assert run_toy("standard", 2) == STANDARD


def test_attnres_toy_head_reads_the_hand_sources():
    stream = residua.build("attnres:eps=0,block=2", Plan.regular(2, 2)).double()
    set_queries(stream, QUERY)
    state = stream.open(vector(1, 1))
    for site, f in zip(stream.plan.sites, TOY, strict=False):
        state = stream.forward(state, site, lambda *lanes: lanes, f)
    values = stream.routing(state, stream.plan.head).values
    expected = [(1, 1), (3, 0), (1.892156, 2.839895)]
    assert [v.flatten().tolist() for v in values] == [pytest.approx(row, abs=DIGITS) for row in expected]


@pytest.mark.parametrize(
    ("spec", "layers", "sources"),
    [
        ("attnres:block=6", 27, 10),  # 48B-A3B: 54 sublayers in 9 blocks, and the embedding
        ("attnres:block=24", 93, 9),  # Kimi K3: 93 layers, 12 a block: 8 slots, and the embedding
        ("attnres", 6, 13),
        ("attnres:blocks=5", 6, 5),  # ceil(12 / 5) = 3 sublayers a block leaves 4 blocks
        ("attnres:block=5", 6, 4),  # a short last block
        ("attnres:window=3", 6, 5),  # embedding, evicted, 3 last
        ("attnres:window=3,evicted=drop", 6, 4),
    ],
)
def test_attnres_head_reads_as_many_sources_as_published(spec, layers, sources):
    stream = residua.build(spec, Plan.regular(2, layers))
    assert len(stream.sources(stream.plan.head)) == sources


def test_attnres_sites_inside_a_block_read_the_open_sum():
    stream = residua.build("attnres:block=3", Plan.regular(2, 2))
    assert [stream.sources(site) for site in stream.plan.readers] == [
        (),
        ("embed", "partial"),
        ("embed", "partial"),
        ("embed", "block0"),
        ("embed", "block0", "partial"),
    ]


def test_attnres_full_reads_a_triangle_of_sources():
    stream = residua.build("attnres", Plan.regular(2, 6))
    reads = 1 + sum(len(stream.sources(site)) for site in stream.plan.readers)  # the first site reads e itself
    assert reads == 13 * 14 // 2  # (M + 1)(M + 2) / 2


@pytest.mark.parametrize(("spec", "tensors"), [("attnres", 9), ("attnres:block=2", 5), ("attnres:block=3", 4)])
def test_attnres_state_holds_one_tensor_a_source(spec, tensors):
    state = Net(spec).states()[-1]
    assert len(state.done) + len(state.partial) == tensors


@pytest.mark.parametrize("spec", ["attnres", "attnres:block=3", "attnres:window=2", "attnres:heads=4"])
def test_attnres_has_a_query_and_a_gain_per_site_but_the_first(spec):
    stream = residua.build(spec, Plan.regular(8, 4))
    # the paper's 2d(M + 1), without the first site, whose single source no query can weigh
    assert sum(p.numel() for p in stream.parameters()) == 2 * 8 * 8
    for name, parameter in stream.named_parameters():
        assert torch.equal(parameter, torch.full_like(parameter, float(name.endswith("gain")))), name


# -------------------------------------------------------------------------------------------------- identities

SIZES = ["", *(f"block={size}" for size in range(1, 9)), "blocks=3"]


def spec_of(*options):
    joined = ",".join(option for option in options if option)
    return f"attnres:{joined}" if joined else "attnres"


@pytest.mark.parametrize("size", [*SIZES, "window=1", "window=3,block=2", "heads=2"])
def test_attnres_uniform_read_is_the_stream_over_the_number_of_sources(size):
    """Identity 1: n times the uniform read = the sum of the sources = the standard stream."""
    net = Net(spec_of(size), routed=False)
    for state, site in zip(net.states(), net.plan.readers, strict=True):
        values = state.done + state.partial
        (read,) = net.read(state, site)
        assert gap(len(values) * read, sum(values)) < EXACT
    h = net.x
    for state, f, norm in zip(net.states(), net.sublayers, net.norms, strict=False):
        assert gap(sum(state.done + state.partial), h) < EXACT
        h = h + f(norm(h))


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("size", [*SIZES, "window=1", "window=2,block=3", "heads=4"])
def test_attnres_zero_queries_are_the_standard_network_under_a_scale_free_norm(size, norm):
    """Identities 2 and 3: full, and block for every S, also where S does not divide M."""
    net = Net(spec_of(size), norm=norm, routed=False)
    assert net.stream.starts == "eps"
    assert gap(net.out(), net.standard()) < EXACT


@pytest.mark.parametrize("norm", ["rms", "layer", "rms, large eps", "none"])
@pytest.mark.parametrize("size", ["", "block=3", "window=1"])
def test_attnres_total_zero_queries_are_the_standard_network_under_any_norm(size, norm):
    net = Net(spec_of("total=true", size), norm=norm, routed=False)
    assert net.stream.starts == "standard"
    assert gap(net.out(), net.standard()) < EXACT


@pytest.mark.parametrize(
    ("spec", "norm", "routed"),
    [
        ("attnres", "none", False),
        ("attnres", "rms, large eps", False),
        ("attnres", "rms", True),
        ("attnres:sources=states", "rms", False),
        ("attnres:sources=states,block=2", "rms", False),
        ("attnres:window=1,evicted=drop", "rms", False),
    ],
)
def test_attnres_is_not_standard_where_the_identity_breaks(spec, norm, routed):
    """Section 0: no pre-norm, an eps that counts, queries off zero, cumulative sources, forgotten sources."""
    net = Net(spec, norm=norm, routed=routed)
    assert gap(net.out(), net.standard()) > 1e-3


@pytest.mark.parametrize("other", ["attnres:block=1", "attnres:blocks=8", "attnres:heads=1", "attnres:window=8"])
def test_attnres_full_is_block_one_and_one_head_and_a_wide_window(other):
    """Identities 4, 8 and 24, for any queries."""
    assert gap(Net("attnres").out(), Net(other).out()) < EXACT


@pytest.mark.parametrize("evicted", ["sum", "drop"])
@pytest.mark.parametrize("window", range(1, 10))
def test_attnres_window_is_full_exactly_when_nothing_is_evicted(window, evicted):
    """Identity 8: M = 8 outputs, of which the head sees all if the window holds them."""
    difference = gap(Net("attnres").out(), Net(f"attnres:window={window},evicted={evicted}").out())
    # an evicted sum of a single source is that source
    same = window >= (7 if evicted == "sum" else 8)
    assert difference < EXACT if same else difference > 1e-3


@pytest.mark.parametrize("size", range(1, 9))
def test_attnres_two_phase_evaluation_equals_the_direct_read(size):
    """Identity 5: a block's queries meet the finished sources in one batch; the open sum is merged in later."""
    net = Net(f"attnres:block={size}")
    names = [site.name for site in net.plan.readers]
    folded = {name: net.stream.at[name].folded() for name in names[1:]}

    def scores(query, values):
        keys = values * (values.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return (keys * query).sum(-1, keepdim=True)

    def phase_one(queries, sources):
        """For every query: the unnormalised read, its running maximum and its denominator."""
        values, found = torch.stack(sources), []
        for query in queries:
            logits = scores(query, values)
            peak = logits.amax(0)
            powers = (logits - peak).exp()
            found.append(((powers * values).sum(0), peak, powers.sum(0)))
        return found

    def merge(first, query, partial):
        read, peak, denominator = first
        logit = scores(query, partial)
        top = torch.maximum(peak, logit)
        old, new = (peak - top).exp(), (logit - top).exp()
        return (old * read + new * partial) / (old * denominator + new)

    with torch.no_grad():
        sources = [net.x]
        for start in range(0, 8, size):
            block = range(start, min(start + size, 8))
            zero = torch.zeros(8, dtype=torch.float64)  # the first site has no query and needs none
            first = phase_one([folded.get(names[s], zero) for s in block], sources)
            partial = None
            for s, (read, peak, denominator) in zip(block, first, strict=True):
                if partial is None:
                    z = read / denominator
                else:
                    z = merge((read, peak, denominator), folded[names[s]], partial)
                o = net.sublayers[s](net.norms[s](z))
                partial = o if partial is None else partial + o
            sources.append(partial)
        ((read, _, denominator),) = phase_one([folded["head"]], sources)
        assert gap(net.norms[-1](read / denominator), net.out()) < EXACT


@pytest.mark.parametrize("options", ["", "block=3", "heads=2", "total=true"])
def test_attnres_only_the_product_of_query_and_gain_matters(options):
    """Identity 7: route(w, g) = route(w g, 1)."""
    net = Net(spec_of(options))
    before = net.out()
    with torch.no_grad():
        for part in net.stream.at.values():
            part.query.mul_(part.gain)
            part.gain.fill_(1)
    assert gap(net.out(), before) < EXACT


def test_attnres_first_site_returns_the_embedding():
    """Identity 18: one source is its own mixture; the paper's query there could never learn and is not built."""
    net = Net("attnres")
    first = net.plan.sites[0]
    assert net.read(net.stream.open(net.x), first)[0] is net.x
    assert first.name not in net.stream.at


def test_attnres_read_pushed_as_an_output_leaves_the_next_read_unchanged():
    """Identity 19 in the stream: a sublayer that answers with its own input, and the same query at both sites."""
    net = Net("attnres", norm="none")
    site, after = net.plan.sites[5], net.plan.sites[6]
    net.stream.at[after.name].load_state_dict(net.stream.at[site.name].state_dict())
    state = net.states()[5]
    read = net.stream.read(state, site, lambda *lanes: lanes)
    state = net.stream.write(state, site, read, read.lanes[0])
    assert gap(net.read(state, after)[0], read.lanes[0]) < EXACT


@pytest.mark.parametrize("spec", ["attnres", "attnres:block=2"])
def test_attnres_without_its_final_read_is_another_network(spec):
    """Identity 20: neither the last output, the open sum nor the plain sum of everything is what the head reads."""
    net = Net(spec)
    state = net.states()[-1]
    values = state.done + state.partial
    for instead in (values[-1], sum(values)):
        assert gap(net.norms[-1](instead), net.out()) > 1e-3


@pytest.mark.parametrize("options", ["", "block=3", "total=true", "window=2", "heads=2"])
def test_attnres_weights_ignore_the_scale_of_a_source(options):
    """Identity 6, at every site of the stream."""
    net = Net(spec_of(options, "eps=0"))
    for state, site in list(zip(net.states(), net.plan.readers, strict=True))[1:]:
        louder = state._replace(done=(3 * state.done[0], *(0.2 * v for v in state.done[1:])))
        assert gap(net.stream.weights(louder, site), net.stream.weights(state, site)) < EXACT


def test_attnres_slices_read_as_separate_softmaxes_over_shared_keys():
    net = Net("attnres:heads=2")
    state, site = net.states()[5], net.plan.sites[5]
    query = net.stream.at[site.name].folded()
    for part in (slice(0, 4), slice(4, 8)):
        masked = torch.zeros_like(query)
        masked[part] = query[part]
        alone = attend(masked, state.done)[..., part]  # a query that looks at this slice of the key alone
        assert gap(net.read(state, site)[0][..., part], alone) < EXACT


@pytest.mark.parametrize("case", residua.design("attnres").cases)
def test_attnres_routing_taken_apart_is_the_read(case):
    net = Net(spec_of(case))
    for state, site in zip(net.states(), net.plan.readers, strict=True):
        names, routing = net.stream.sources(site), net.stream.routing(state, site)
        if routing is None:
            assert names == ()
            continue
        assert len(names) == len(routing.values) == routing.weights.shape[1]
        assert gap(routing.mixed(), torch.stack(net.read(state, site))) < EXACT


def test_attnres_states_are_the_running_sums_of_outputs():
    outputs, states = Net("attnres", routed=False), Net("attnres:sources=states", routed=False)
    x = [torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(9)]
    finals = []
    for net in (outputs, states):
        state = net.stream.open(x[0])
        for site, y in zip(net.plan.sites, x[1:], strict=True):
            read = net.stream.read(state, site, lambda *lanes: lanes)
            state = net.stream.write(state, site, read, y)
        finals.append(state.done)
    for n, (output, running) in enumerate(zip(*finals, strict=True)):
        assert gap(output, x[n]) == 0
        assert gap(running, sum(x[: n + 1])) < EXACT


@pytest.mark.parametrize("case", [case for case in residua.design("attnres").cases if "init_std" not in case])
@pytest.mark.parametrize("layout", [LAYOUT, ("mlp", "attn", "conv")], ids=",".join)
def test_attnres_every_query_learns_after_one_step_from_zero(case, layout):
    """Identity 26, and section 0: with w = 0 the gain has no gradient yet."""
    net = Net(spec_of(case), layout=layout, routed=False)

    def gradients():
        net.stream.zero_grad()
        run_stream(net.stream, net.x, net.sublayers, net.norms).square().mul(net.x).sum().backward()
        return {name: parameter.grad for name, parameter in net.stream.named_parameters()}

    before = gradients()
    assert all(not grad.any() for name, grad in before.items() if name.endswith("gain"))
    with torch.no_grad():
        for parameter in net.stream.parameters():
            parameter -= 0.1 * parameter.grad
    for name, grad in gradients().items():
        assert grad.abs().max() > 1e-8, name


# -------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "error", "cure"),
    [
        ({"block": 2, "blocks": 2}, ValueError, "give block=2 .* or blocks=2 .*, not both"),
        ({"block": 0}, ValueError, r"block must be 1\.\.8, .* not 0"),
        ({"block": 9}, ValueError, r"block must be 1\.\.8, .* not 9"),
        ({"blocks": 0}, ValueError, r"blocks must be 1\.\.8, .* not 0"),
        ({"blocks": 9}, ValueError, r"blocks must be 1\.\.8, .* not 9"),
        ({"heads": 0}, ValueError, "heads must be at least 1"),
        ({"heads": 3}, ValueError, "heads=3 does not divide the width 8"),
        ({"window": 0}, ValueError, "window must be at least 1"),
        ({"evicted": "drop"}, ValueError, "evicted=drop needs a window"),
        ({"window": 2, "sources": "states"}, ValueError, "write sources=states,evicted=drop"),
        ({"sources": "deltas"}, ValueError, r"sources takes outputs\|states"),
        ({"evicted": "mean"}, ValueError, r"evicted takes sum\|drop"),
        ({"total": 1}, ValueError, r"total takes true\|false"),
        ({"block": 2.0}, ValueError, "block takes whole number"),
        ({"gate": "alpha"}, TypeError, "use delta:gate="),
        ({"include_partial": True}, TypeError, "the open block is always a source here"),
        ({"head": 2}, TypeError, "did you mean 'heads'"),
    ],
)
def test_attnres_refuses_options_and_names_the_cure(options, error, cure):
    with pytest.raises(error, match=cure):
        residua.design("attnres")(Plan.regular(8, 4), **options)


def test_attnres_queries_may_be_drawn():
    plan = Plan.regular(64, 2)
    stream = residua.build("attnres:heads=4,init_std=0.02", plan)
    queries = torch.cat([stream.part(site).query for site in plan.readers[1:]])
    assert queries.std().item() == pytest.approx(0.02, rel=0.2)
    assert stream.starts == "no"
    with pytest.raises(ValueError, match="standard deviation"):
        residua.build("attnres:init_std=-0.1", plan)
