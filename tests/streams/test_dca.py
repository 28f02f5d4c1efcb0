"""DeepCrossAttention: the three GRNs by hand, a gate that can learn, and k-DCA that loses nothing of the sum."""

import pytest
import torch

import residua
from residua import Plan
from tests.streams.hand import BY, close, constant, set_, state_at, trace, vector
from tests.streams.harness import compare, randomise, run_stream, toy_norms, toy_sublayers

# G = [(1, 0), (0, 2), (3, -1)]: the embedding, and two blocks that answer constants
EMBEDDING = vector(1, 0)
DELTAS = [constant(0, 2), constant(3, -1)]

GRNS = {
    "v1 init": ("v1", {}, (4, 1)),
    "v2 init": ("v2", {}, (4, 1)),
    "v3 init": ("v3", {}, (4, 1)),
    "v1 bias": ("v1", {"bias": [0.5, 1, 2]}, (6.5, 0)),
    "v2 bias": ("v2", {"bias": [(1, 2), (3, 4), (5, 6)]}, (16, 2)),
    "v3 open gates": ("v3", {"gate": [1, 1]}, (11, 3)),
    "v3 one open gate": ("v3", {"gate": [-1, 1]}, (4, 5)),
}


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("case", GRNS)
def test_dca_grn_by_hand(case, by):
    grn, values, expected = GRNS[case]
    stream = residua.build(f"dca:grn={grn}", Plan.regular(2, 2, ("mlp",))).double()
    set_(stream, **{f"head__0__{name}": value for name, value in values.items()})
    assert close(trace(stream, EMBEDDING, DELTAS, by=by).out, expected)


@pytest.mark.parametrize(("gate", "opened"), [((1, 1), (1, 2, 2)), ((-1, 1), (0, 2, 0))])
def test_dca_gates_by_hand(gate, opened):
    """What the gate adds to b = 1, the same for both channels."""
    stream = residua.build("dca", Plan.regular(2, 2, ("mlp",))).double()
    set_(stream, head__0__gate=gate)
    weights = stream.weights(state_at(stream, "head", EMBEDDING, DELTAS), stream.plan.head)
    assert close(weights - 1, [[one] * 2 for one in opened])


@pytest.mark.parametrize("by", BY)
def test_dca_lanes_mix_apart_by_hand(by):
    """q, k and v each have a GRN; what follows the attention reads q_in + a, and none of them is added to f."""
    stream = residua.build("dca", Plan.regular(2, 3)).double()
    set_(
        stream,
        l2_attn__0__gate=[1, 1],
        l2_attn__1__gate=[-1, 1],
        l2_attn__2__bias=[(1, 2), (3, 4), (5, 6)],
        head__0__bias=[(0, 0), (0, 0), (0, 0), (1, 1)],
    )
    zero = constant(0, 0)
    sublayers = [DELTAS[0], zero, DELTAS[1], zero, constant(10, 20), constant(7, 8)]
    inputs, out = trace(stream, EMBEDDING, sublayers, by=by)
    for lane, expected in zip(inputs[4], [(11, 3), (4, 5), (16, 2)], strict=True):
        assert close(lane, expected)
    assert close(inputs[5][0], (21, 23))
    assert close(out, (17, 28))


SPECS = ["dca:grn=v1", "dca:grn=v2", "dca", "dca:lanes=one"]
WINDOWS = [1, 2, 4, 8, 20]
LAYOUTS = [("attn", "mlp"), ("mlp", "attn", "conv"), ("attn",)]


def toy(plan, seed=0):
    """Random sublayers, norms and input."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, plan.width, generator=generator, dtype=torch.float64)
    return x, toy_sublayers(plan, generator), toy_norms(plan, generator)


@pytest.mark.parametrize("layout", LAYOUTS, ids=",".join)
@pytest.mark.parametrize("spec", [*SPECS, *(f"dca:window={k}" for k in WINDOWS), "dca:window=1,grn=v1"])
def test_dca_starts_as_the_standard_stream(spec, layout):
    """b = 1 and w = 0 give the sum of the deltas, for every GRN and every window."""
    plan = Plan.regular(8, 6, layout)
    x, sublayers, norms = toy(plan)
    out = run_stream(residua.build(spec, plan).double(), x, sublayers, norms)
    assert close(out, run_stream(residua.build("standard", plan), x, sublayers, norms))


@pytest.mark.parametrize("window", WINDOWS)
def test_dca_window_keeps_the_sum_of_the_stack(window):
    """Trained or not, the explicit sources add up to the embedding and every output: nothing is dropped."""
    plan = Plan.regular(8, 10)
    x, sublayers, _ = toy(plan)
    stream = residua.build(f"dca:window={window}", plan).double()
    randomise(stream, torch.Generator().manual_seed(1))
    answers = []

    def kept(f):
        def g(*lanes):
            answers.append(f(*lanes).detach())
            return answers[-1]

        return g

    sublayers = [kept(f) for f in sublayers]
    for layer in range(11):
        answers.clear()
        name = "head" if layer == 10 else f"l{layer}_attn"
        sources = state_at(stream, name, x, sublayers).sources
        assert len(answers) == 2 * layer
        assert len(sources) == min(layer + 1, window + 2) == len(stream.sources(plan.site(name)))
        assert close(sum(sources), sum(answers, x))


@pytest.mark.parametrize(
    ("window", "layer", "names"),
    [
        (2, 1, ("embed", "l0")),
        (2, 2, ("embed", "l0", "l1")),
        (2, 3, ("embed", "middle", "l1", "l2")),
        (2, 9, ("embed", "middle", "l7", "l8")),
        (1, 2, ("embed", "middle", "l1")),
        (20, 9, ("embed", *(f"l{i}" for i in range(9)))),
    ],
)
def test_dca_window_sources(window, layer, names):
    stream = residua.build(f"dca:window={window}", Plan.regular(2, 10))
    assert stream.sources(stream.plan.site(f"l{layer}_attn")) == names


@pytest.mark.parametrize("window", [4, 5, 9])
def test_dca_wide_window_is_full_dca(window):
    """At random parameters: with room for every delta, or all but one, the middle is no sum."""
    plan = Plan.regular(8, 5)
    x, sublayers, norms = toy(plan)
    outs = []
    for spec in ("dca", f"dca:window={window}"):
        stream = residua.build(spec, plan).double()
        randomise(stream, torch.Generator().manual_seed(1))
        outs.append(run_stream(stream, x, sublayers, norms))
    assert torch.equal(*outs)


@pytest.mark.parametrize("grn", ["v1", "v2"])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_dca_window_is_full_dca_with_one_weight_for_the_middle(window, grn):
    """Where weights do not depend on the source, a weighted sum is a sum of equally weighted deltas."""
    plan = Plan.regular(8, 6)
    x, sublayers, norms = toy(plan)
    cut = residua.build(f"dca:grn={grn},window={window}", plan).double()
    full = residua.build(f"dca:grn={grn}", plan).double()
    randomise(cut, torch.Generator().manual_seed(1))
    short = dict(cut.named_parameters())
    for name, parameter in full.named_parameters():
        embed, *rows = short[name].detach()
        deltas = len(parameter) - 1
        if deltas > window:
            rows = [rows[0]] * (deltas - window) + rows[1:]
        parameter.data.copy_(torch.stack([embed, *rows]))
    expected = run_stream(full, x, sublayers, norms).detach()
    assert close(run_stream(cut, x, sublayers, norms), expected, 1e-11)


@pytest.mark.parametrize("spec", ["dca", "dca:lanes=one", "dca:window=1"])
def test_dca_gate_learns_from_zero(spec):
    """With w = 0 every product is exactly 0, where a plain relu has no slope and no gate would ever move."""
    plan = Plan.regular(8, 4)
    x, sublayers, norms = toy(plan)
    stream = residua.build(spec, plan).double()
    (run_stream(stream, x, sublayers, norms) * x).sum().backward()
    gates = {name: p for name, p in stream.named_parameters() if name.endswith("gate")}
    assert all(torch.equal(gate, torch.zeros_like(gate)) for gate in gates.values())
    # k and v of the first block have one source, whose scale their norm forgets
    learning = set(gates) - {"at.l0_attn.1.gate", "at.l0_attn.2.gate"}
    assert len(learning) == (5 if spec == "dca:lanes=one" else 11)
    assert [name for name in learning if gates[name].grad.norm() < 1e-3] == []


def test_dca_gate_moves_under_training():
    """Two hundred AdamW steps left a dead gate at 0.0; ten must move a live one."""
    plan = Plan.regular(4, 2)
    x, sublayers, norms = toy(plan)
    stream = residua.build("dca", plan).double()
    target = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    optimizer = torch.optim.AdamW(stream.parameters(), lr=0.01)
    for _ in range(10):
        optimizer.zero_grad()
        (run_stream(stream, x, sublayers, norms) - target).square().mean().backward()
        optimizer.step()
    for lane in stream.part(plan.site("l1_attn")):
        assert lane.gate.abs().max() > 0.01


def test_dca_gate_of_zero_is_v2_and_equal_channels_are_v1():
    """The GRNs nest. (In v1 the lanes of the first block share one scalar.)"""
    plan = Plan.regular(8, 4)
    x, sublayers, norms = toy(plan)
    v1, v2, v3 = (residua.build(f"dca:grn={grn}", plan).double() for grn in ("v1", "v2", "v3"))
    randomise(v1, torch.Generator().manual_seed(1))
    scalars = dict(v1.named_parameters())
    scalars |= {f"at.l0_attn.{lane}.bias": scalars["at.l0_attn.0.bias"] for lane in (1, 2)}
    for stream in (v2, v3):
        for name, parameter in stream.named_parameters():
            if name in scalars:
                parameter.data.copy_(scalars[name].detach()[:, None].expand_as(parameter))
    expected = run_stream(v1, x, sublayers, norms).detach()
    assert close(run_stream(v2, x, sublayers, norms), expected)
    assert close(run_stream(v3, x, sublayers, norms), expected)


def test_dca_tied_lanes_are_one_lane():
    plan = Plan.regular(8, 4)
    x, sublayers, norms = toy(plan)
    three, one = residua.build("dca", plan).double(), residua.build("dca:lanes=one", plan).double()
    randomise(one, torch.Generator().manual_seed(1))
    shared = dict(one.named_parameters())
    for name, parameter in three.named_parameters():
        prefix, _, kind = name.rsplit(".", 2)
        parameter.data.copy_(shared[f"{prefix}.0.{kind}"])
    assert [one.feeds(site) for site in plan.sites] == [1] * 8
    assert [three.feeds(site) for site in plan.sites] == [3, 1] * 4
    expected = run_stream(one, x, sublayers, norms).detach()
    assert close(run_stream(three, x, sublayers, norms), expected)


@pytest.mark.parametrize("window", [None, 2])
def test_dca_parameter_count(window):
    """3(dt + d) a block over t sources, and one more GRN for the output."""
    d, depth = 16, 9
    stream = residua.build("dca" if window is None else f"dca:window={window}", Plan.regular(d, depth))
    cap = depth + 1 if window is None else window + 2
    blocks = sum(3 * (d * min(t, cap) + d) for t in range(1, depth + 1))
    assert sum(p.numel() for p in stream.parameters()) == blocks + d * min(depth + 1, cap) + d


def test_dca_decodes_token_by_token():
    plan = Plan.regular(8, 4)
    x, sublayers, norms = toy(plan)
    stream = residua.build("dca:window=1", plan).double()
    randomise(stream, torch.Generator().manual_seed(1))
    steps = [run_stream(stream, x[:, t : t + 1], sublayers, norms) for t in range(x.shape[1])]
    assert close(torch.cat(steps, 1), run_stream(stream, x, sublayers, norms).detach())


def test_dca_equals_its_oracle_at_another_depth():
    assert max(compare("dca:window=3", ("attn", "mlp"), depth=7).values()) < 1e-10


@pytest.mark.parametrize(
    ("spec", "error", "cure"),
    [
        ("dca:window=0", ValueError, "window must be at least 1"),
        ("dca:window=-1", ValueError, "window must be at least 1"),
        ("dca:window=all", ValueError, "window takes whole number"),
        ("dca:grn=v4", ValueError, "grn takes v1|v2|v3"),
        ("dca:lanes=3", ValueError, "lanes takes three|one"),
        ("dca:windows=2", TypeError, "did you mean 'window'"),
        ("dca:dilation=2", TypeError, "options: grn, lanes, window"),
    ],
)
def test_dca_refusal_names_the_cure(spec, error, cure):
    with pytest.raises(error) as caught:
        residua.build(spec, Plan.regular(2, 2))
    assert cure in str(caught.value)
