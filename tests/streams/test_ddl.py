"""ddl: the hand values of the paper's write, its compressors and expansions, and what it is at the start."""

import math

import pytest
import torch
from torch.nn import functional as F

import residua
from residua import Plan
from tests.oracles import ddl as oracle
from tests.streams.harness import randomise, run_stream, toy_norms, toy_sublayers

OFF, FULL = -800.0, 40.0  # logits at which 2 sigmoid is exactly 0 and exactly 2 in float64


def identity(*lanes):
    return lanes


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def logit(beta):
    return {0.0: OFF, 2.0: FULL}.get(beta) if beta in (0.0, 2.0) else math.log(beta / (2 - beta))


def built(spec, width=2, depth=1, layout=("mlp",)):
    return residua.build(spec, Plan.regular(width, depth, layout)).double()


def fix(stream, **values):
    """Set parameters of the first site's rewrite; its gate no longer looks at the token."""
    rewrite = stream.part(stream.plan.sites[0])["rewrite"]
    with torch.no_grad():
        rewrite.beta.zero_()
        for name, value in values.items():
            getattr(rewrite, name).copy_(tensor(value))


def step(stream, X, y):
    """One write of the toy sublayer's answer `y` into the state X [v, d]."""
    site = stream.plan.sites[0]
    state = stream.open(torch.zeros(1, 1, X.shape[-1], dtype=torch.float64))._replace(X=X[None, None])
    read = stream.read(state, site, identity)
    return stream.write(state, site, read, y[None, None]).X[0, 0]


def oracle_step(stream, x, y):
    """The same write at channels=1, by the oracle: the head reads the state as it is."""
    parameters = dict(stream.named_parameters())
    norms = [lambda z: z, lambda z: z]
    out = oracle.forward(
        x[None, None], parameters, [lambda c: y.expand_as(c)], norms, layers=1, layout=("mlp",), **stream.options
    )
    return out[0, 0]


@pytest.mark.parametrize(
    ("beta", "expected"),
    [(0.0, (1, 2)), (0.5, (1.84, 3.12)), (1.0, (2.68, 4.24)), (1.5, (3.52, 5.36)), (2.0, (4.36, 6.48))],
)
def test_ddl_hand_values_of_one_channel(beta, expected):
    stream = built("ddl:eps=1e-12")
    fix(stream, beta_bias=[logit(beta)], value=[[1.0], [2.0]])  # v = W c = (1, 2) . (1, 2) = 5
    x, y = tensor([[1.0, 2.0]]), tensor([3.0, 4.0])
    assert (step(stream, x, y)[0] - tensor(expected)).abs().max() < 1e-12
    assert (oracle_step(stream, x[0], y) - tensor(expected)).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("beta", "expected"),
    [(0.5, [[1.84, 3.12], [0.54, -0.28]]), (1.0, [[2.68, 4.24], [1.08, 0.44]])],
)
def test_ddl_hand_values_of_two_channels(beta, expected):
    stream = built("ddl:channels=2,eps=1e-12")
    # x = the mean of the channels = (0.5, 0.5), so that v = W c = (5, 1)
    fix(stream, beta_bias=[logit(beta)], value=[[10.0, 2.0], [0.0, 0.0]])
    new = step(stream, tensor([[1.0, 2.0], [0.0, -1.0]]), tensor([3.0, 4.0]))
    assert (new - tensor(expected)).abs().max() < 1e-12
    if beta == 1.0:
        assert (new @ tensor([0.6, 0.8]) - tensor([5.0, 1.0])).abs().max() < 1e-12


def test_ddl_forgets_the_size_of_the_answer():
    stream = built("ddl:eps=1e-12")
    fix(stream, value=[[1.0], [2.0]])
    small, large = (step(stream, tensor([[1.0, 2.0]]), scale * tensor([3.0, 4.0])) for scale in (1.0, 1000.0))
    assert (small - large).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("ddl:value=paper", -5.0),  # W c, of either sign
        ("ddl:value=released", 4 / (1 + math.exp(5.0 - 0.25))),  # 4 sigmoid(W x + b), never negative
    ],
)
def test_ddl_target_of_each_value(spec, expected):
    stream = built(spec + ",eps=1e-12")
    settings = {"beta_bias": [0.0], "value": [[-1.0], [-2.0]]}
    if "released" in spec:
        settings["value_bias"] = [0.25]
    fix(stream, **settings)
    new = step(stream, tensor([[1.0, 2.0]]), tensor([3.0, 4.0]))
    held = (new[0] @ tensor([0.6, 0.8])).item()  # beta = 1 writes v itself
    assert abs(held - expected) < 1e-12


def test_ddl_released_value_sees_the_raw_input_and_the_paper_value_the_normalised_one():
    results = {}
    for value in ("paper", "released"):
        stream = built(f"ddl:value={value},eps=1e-12")
        fix(stream, beta_bias=[0.0], value=[[1.0], [1.0]])
        site = stream.plan.sites[0]
        state = stream.open(tensor([[[1.0, 2.0]]]))
        read = stream.read(state, site, lambda x: (10 * x,))
        X = stream.write(state, site, read, tensor([[[3.0, 4.0]]])).X[0, 0, 0]
        results[value] = (X @ tensor([0.6, 0.8])).item()
    assert abs(results["paper"] - 30) < 1e-10
    assert abs(results["released"] - 4 / (1 + math.exp(-3.0))) < 1e-10


def test_ddl_mlp_gate_hand_value():
    stream = built("ddl:gate=mlp,eps=1e-12")
    rewrite = stream.part(stream.plan.sites[0])["rewrite"]
    with torch.no_grad():
        for parameter in rewrite.parameters():
            parameter.zero_()
        # unit 0 alone: beta = 2 sigmoid(3 tanh(0.5 * 1 + 0.25 * 2 - 0.2) + 0.1)
        rewrite.beta_in[:, 0] = tensor([0.5, 0.25])
        rewrite.beta_in_bias[0] = -0.2
        rewrite.beta[0] = 3.0
        rewrite.beta_bias.fill_(0.1)
    beta = 2 / (1 + math.exp(-(3 * math.tanh(0.8) + 0.1)))
    # v = 0: x - beta (k . x) k with k . x = 2.2
    new = step(stream, tensor([[1.0, 2.0]]), tensor([3.0, 4.0]))[0]
    assert (new - (tensor([1.0, 2.0]) - beta * 2.2 * tensor([0.6, 0.8]))).abs().max() < 1e-12


@pytest.mark.parametrize(("beta_init", "beta"), [(0.0, 2e-6), (0.5, 0.5), (1.0, 1.0), (1.7, 1.7), (2.0, 1.999998)])
def test_ddl_gate_starts_at_beta_init(beta_init, beta):
    bias = built(f"ddl:beta_init={beta_init}").part(Plan.regular(2, 1, ("mlp",)).sites[0])["rewrite"].beta_bias
    assert abs(2 * bias.sigmoid().item() - beta) < 1e-7  # the parameter was made in float32


@pytest.mark.parametrize(
    ("padding", "pool", "weights"),
    [
        ("same", (0.25, 0.25, 0.25, 0.25), (2.75, 27.75, 277.75, 277.5)),
        ("same", (1.0, 0.0, 0.0, 0.0), (10.0, 100.0, 1000.0, 0.0)),
        ("same", (0.0, 0.0, 0.0, 1.0), (0.0, 0.0, 1.0, 10.0)),
        ("causal", (0.25, 0.25, 0.25, 0.25), (277.75, 277.5, 275.0, 250.0)),
    ],
)
def test_ddl_channel_convolution_effective_weights(padding, pool, weights):
    taps = (1.0, 10.0, 100.0, 1000.0)
    stream = built(f"ddl:channels=4,compress=channel_{padding}")
    compress = stream.part(stream.plan.sites[0])["compress"]
    with torch.no_grad():
        compress.taps.copy_(tensor(taps)[:, None].expand(4, 2))
        compress.pool.copy_(tensor(pool))
    parameters = {name: p.detach() for name, p in compress.named_parameters()}
    for j, weight in enumerate(weights):
        X = torch.zeros(1, 1, 4, 2, dtype=torch.float64)
        X[:, :, j] = 1.0
        state = stream.open(torch.zeros(1, 1, 2, dtype=torch.float64))._replace(X=X)
        (x,) = stream.read(state, stream.plan.sites[0], identity).lanes
        assert (x - weight).abs().max() < 1e-12
        other = oracle._compress([X[:, :, i] for i in range(4)], parameters, f"channel_{padding}", 4, 4)
        assert (other - weight).abs().max() < 1e-12


@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 5])
def test_ddl_channel_same_is_a_padded_convolution_and_a_read_vector(kernel):
    stream = built(f"ddl:channels=4,compress=channel_same,kernel={kernel}", width=3)
    randomise(stream, torch.Generator().manual_seed(0))
    compress = stream.part(stream.plan.sites[0])["compress"]
    X = torch.randn(1, 1, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    state = stream.open(torch.zeros(1, 1, 3, dtype=torch.float64))._replace(X=X)
    (x,) = stream.read(state, stream.plan.sites[0], identity).lanes
    left = (kernel - 1) // 2
    rows = F.pad(X[0, 0].T[None], (left, kernel - 1 - left))  # [1, d, v]
    convolved = F.conv1d(rows, compress.taps.T[:, None], groups=3)[0]  # [d, v]
    assert convolved.shape == (3, 4)
    assert (x[0, 0] - convolved @ compress.pool).abs().max() < 1e-12


def test_ddl_channel_weighs_every_feature_of_every_channel():
    stream = built("ddl:channels=2")
    with torch.no_grad():
        stream.part(stream.plan.sites[0])["compress"].weight.copy_(tensor([[1.0, 2.0], [3.0, 4.0]]))
    X = tensor([[10.0, 20.0], [100.0, 200.0]])[None, None]
    state = stream.open(torch.zeros(1, 1, 2, dtype=torch.float64))._replace(X=X)
    (x,) = stream.read(state, stream.plan.sites[0], identity).lanes
    assert x[0, 0].tolist() == [310.0, 840.0]


def test_ddl_one_compressor_serves_a_block_and_another_the_head():
    stream = built("ddl:channels=2,compress=token", depth=3, layout=("attn", "mlp"))
    owners = {name.split(".")[1] for name, _ in stream.named_parameters() if ".compress." in name}
    assert owners == {"l0_attn", "l1_attn", "l2_attn", "head"}
    with torch.no_grad():
        stream.part(stream.plan.site("l1_attn"))["compress"].pool.zero_()
    state = stream.open(torch.ones(1, 2, 2, dtype=torch.float64))
    silent = []
    for site in stream.plan.sites:
        read = stream.read(state, site, identity)
        silent.append(read.lanes[0].abs().max().item() == 0)
        state = stream.write(state, site, read, torch.ones(1, 2, 2, dtype=torch.float64))
    assert silent == [False, False, True, True, False, False]


@pytest.mark.parametrize("channels", [2, 4])
def test_ddl_expansion_starts_as_repetition(channels):
    x = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    conv, repeat = (built(f"ddl:channels={channels},expand={kind}", width=3).open(x).X for kind in ("conv", "repeat"))
    assert torch.equal(conv, repeat)
    assert torch.equal(repeat, torch.stack([x] * channels, 2))


def test_ddl_expansion_convolves_every_channel_over_tokens():
    stream = built("ddl:channels=2,expand=conv,kernel=2", width=1)
    with torch.no_grad():
        stream.expand.taps.copy_(tensor([[[1.0], [2.0]], [[10.0], [20.0]]]))
    X = stream.open(tensor([[[1.0], [2.0], [3.0]]])).X[0, :, :, 0]
    assert X.tolist() == [[1.0, 2.0], [12.0, 24.0], [23.0, 46.0]]


@pytest.mark.parametrize(
    "spec",
    [
        "ddl",
        "ddl:channels=2,compress=token",
        "ddl:channels=2,compress=token,kernel=1",
        "ddl:channels=2,compress=token,expand=conv",
        "ddl:channels=2,expand=conv,kernel=3",
    ],
)
@pytest.mark.parametrize("cuts", [(1, 1, 1, 1, 1, 1, 1), (2, 5), (1, 2, 4), (0, 3, 4)])
def test_ddl_decoding_equals_one_pass(spec, cuts):
    # also for prompts shorter than the convolution's memory of kernel - 1 tokens
    generator = torch.Generator().manual_seed(0)
    plan = Plan.regular(4, 2)
    stream = residua.build(spec, plan).double()
    randomise(stream, generator)
    sublayers, norms = toy_sublayers(plan, generator), toy_norms(plan, generator)
    x = torch.randn(2, 7, 4, generator=generator, dtype=torch.float64)
    past, pieces = None, []
    for piece in x.split(cuts, 1):
        state = stream.open(piece, past)
        for site in plan.sites:
            read = stream.read(state, site, lambda z, norm=norms[site.index]: (norm(z),))
            state = stream.write(state, site, read, sublayers[site.index](*read.lanes))
        pieces.append(stream.read(state, plan.head, lambda z: (norms[-1](z),)).lanes[0])
        past = stream.past(state)
    assert (torch.cat(pieces, 1) - run_stream(stream, x, sublayers, norms)).abs().max() < 1e-12


@pytest.mark.parametrize("spec", ["ddl", "ddl:channels=2", "ddl:start=standard", "ddl:channels=2,compress=token"])
def test_ddl_gradient_is_finite_where_a_sublayer_is_silent(spec):
    stream = built(spec, width=4, depth=2)
    x = torch.randn(1, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    W = torch.zeros(4, 4, dtype=torch.float64, requires_grad=True)  # a zero-initialised output projection
    norms = [lambda z: F.rms_norm(z, z.shape[-1:], eps=1e-6)] * 3
    out = run_stream(stream, x, [lambda c: c @ W] * 2, norms)
    out.sin().sum().backward()
    assert x.grad.isfinite().all()
    assert W.grad.isfinite().all()
    assert W.grad.abs().max() > 0


@pytest.mark.parametrize(
    "spec",
    [
        "ddl:start=standard",
        "ddl:start=standard,value=released,gate=mlp",
        "ddl:start=standard,channels=2",
        "ddl:start=standard,channels=3,expand=conv",
        "ddl:start=standard,channels=4,compress=token,expand=conv",
        "ddl:start=standard,channels=4,compress=channel_same",
    ],
)
def test_ddl_standard_start_is_the_standard_stream(spec):
    generator = torch.Generator().manual_seed(0)
    plan = Plan.regular(8, 3)
    stream, standard = (residua.build(one, plan).double() for one in (spec, "standard"))
    sublayers, norms = toy_sublayers(plan, generator), toy_norms(plan, generator)
    x = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    assert stream.starts == "standard"
    difference = run_stream(stream, x, sublayers, norms) - run_stream(standard, x, sublayers, norms)
    assert difference.abs().max() < 1e-12


@pytest.mark.parametrize("options", ["", "value=released,", "channels=2,", "channels=2,compress=token,"])
def test_ddl_standard_start_holds_the_whole_design_in_its_range(options):
    generator = torch.Generator().manual_seed(0)
    plan = Plan.regular(4, 2)
    blended, paper = (residua.build(f"ddl:{options}start={start}", plan).double() for start in ("standard", "paper"))
    randomise(blended, generator)
    paper.load_state_dict({k: v for k, v in blended.state_dict().items() if "blend" not in k})
    with torch.no_grad():
        for name, parameter in blended.named_parameters():
            if name.endswith("blend"):
                parameter.fill_(1.0)
    sublayers, norms = toy_sublayers(plan, generator), toy_norms(plan, generator)
    x = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)
    outputs = [run_stream(one, x, sublayers, norms) for one in (blended, paper)]
    assert (outputs[0] - outputs[1]).abs().max() < 1e-12


def test_ddl_start_is_not_the_standard_stream():
    generator = torch.Generator().manual_seed(0)
    plan = Plan.regular(8, 3)
    stream, standard = (residua.build(one, plan).double() for one in ("ddl", "standard"))
    sublayers, norms = toy_sublayers(plan, generator), toy_norms(plan, generator)
    x = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    assert stream.starts == "no"
    assert (run_stream(stream, x, sublayers, norms) - run_stream(standard, x, sublayers, norms)).abs().max() > 0.1


def test_ddl_start_moves_a_small_embedding_by_two():
    # measured on the released code at d = 768: beta 1.005 +- 0.23, v 1.99 +- 0.01, |x| 0.55, each step 2.0
    torch.manual_seed(0)
    stream = residua.build("ddl:value=released", Plan.regular(768, 1, ("mlp",))).double()
    site = stream.plan.sites[0]
    generator = torch.Generator().manual_seed(1)
    x = 0.02 * torch.randn(1, 512, 768, generator=generator, dtype=torch.float64)
    state = stream.open(x)
    read = stream.read(state, site, lambda z: (F.rms_norm(z, z.shape[-1:]),))
    rewrite = stream.part(site)["rewrite"]
    beta, value = rewrite.share(read.lanes[0]), rewrite.target(x, read.lanes[0])
    assert abs(beta.mean().item() - 1) < 0.05
    assert abs(beta.std().item() - 0.23) < 0.03
    assert (value - 2).abs().max() < 0.1
    y = torch.randn(1, 512, 768, generator=generator, dtype=torch.float64)
    moved = (stream.write(state, site, read, y).X - state.X).norm(dim=-1)
    assert abs(x.norm(dim=-1).mean().item() - 0.55) < 0.01
    assert abs(moved.mean().item() - 2.0) < 0.1


@pytest.mark.parametrize(
    ("spec", "sublayer", "block", "once"),
    [
        ("ddl:value=released", 2 * (8 + 1), 0, 0),
        ("ddl", 2 * 8 + 1, 0, 0),  # the paper's v has no bias
        ("ddl:value=released,channels=4,compress=channel_same", 5 * (8 + 1), 8 * 4 + 4, 0),
        ("ddl:value=released,channels=4,compress=channel", 5 * (8 + 1), 8 * 4, 0),
        ("ddl:value=released,channels=4,compress=token", 5 * (8 + 1), 4 * 8 * 4 + 4, 0),
        ("ddl:value=released,channels=4,compress=token,expand=conv", 5 * (8 + 1), 4 * 8 * 4 + 4, 4 * 8 * 4),
    ],
)
def test_ddl_parameter_count(spec, sublayer, block, once):
    depth = 3
    stream = built(spec, width=8, depth=depth, layout=("attn", "mlp"))
    expected = 2 * depth * sublayer + (depth + 1) * block + once  # the head has a compressor too
    assert sum(p.numel() for p in stream.parameters()) == expected


@pytest.mark.parametrize(
    ("options", "error", "cure"),
    [
        ("channels=0", ValueError, "at least 1"),
        ("channels=2,expand=conv,kernel=0", ValueError, "at least 1"),
        ("beta_init=-0.1", ValueError, "0 to 2"),
        ("beta_init=2.5", ValueError, "0 to 2"),
        ("compress=token", ValueError, "give channels=2 or more"),
        ("expand=conv", ValueError, "give channels=2 or more"),
        ("kernel=3", ValueError, "compress=token, compress=channel_same or expand=conv"),
        ("channels=2,compress=channel,kernel=3", ValueError, "compress=token"),
        ("channels=2,compress=channel_same,kernel=4", ValueError, "at most 3"),
        ("channels=2,compress=channel_causal,kernel=4", ValueError, "at most 2"),
        ("compress=conv,channels=2", ValueError, "channel|channel_same|token"),
        ("value=linear", ValueError, "paper|released"),
        ("gate=tanh", ValueError, "linear|mlp"),
        ("start=residual", ValueError, "paper|standard"),
        ("d_v=4", TypeError, "channels"),
    ],
)
def test_ddl_refuses(options, error, cure):
    with pytest.raises(error) as caught:
        built(f"ddl:{options}")
    assert cure in str(caught.value)
