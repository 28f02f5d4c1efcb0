"""mhc as released models have it: their hand values from their own tensors, heads, mixers, presets and rounding."""

import math

import pytest
import torch

import residua
from residua import Plan, ops
from residua.streams.mhc import PRESETS, Passed

V4, V41, GLM, HY = (f"mhc:model={name},streams=2" for name in PRESETS)
EPS = 1e-6


def same(*lanes):
    return lanes


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def built(spec, width=2, depth=3):
    return residua.build(spec, Plan.regular(width, depth, ("mlp",))).double()


@torch.no_grad()
def load(part, fn, base, scale):
    """Tensors of a released model: rows of n pre, n post and n x n [from, to], the last of which is [to, from] here."""
    fn, base, scale = map(torch.as_tensor, (fn, base, scale))
    n = part.form.streams
    for place, name in enumerate(("pre", "post", "res")):
        mapping = getattr(part, name, None)
        if mapping is None:
            continue
        rows = slice(place * n, (place + 1) * n if place < 2 else 2 * n + n * n)
        phi, bias = fn[rows].T, base[rows]
        if name == "res":
            phi, bias = phi.unflatten(-1, (n, n)).mT.flatten(-2), bias.view(n, n).T
        mapping.phi.copy_(phi)
        mapping.bias.copy_(bias)
        mapping.alpha.copy_(scale[place])


def hand(entries, rows=8):
    fn = torch.zeros(rows, 4, dtype=torch.float64)
    for entry in entries:
        fn[entry] = 1.0
    return fn


SITE = hand([(0, 0), (3, 1), (4, 3)]), tensor([0, -1, 0.5, 0, 0, 1, 0, 0]), tensor([1, 2, 0.5])
HEAD = hand([(0, 0)], 2), tensor([0.2, -0.3]), tensor([0.7])
H = tensor([[[[1.0, 2.0], [3.0, 4.0]]]])


def near(found, expected, tolerance=1e-6):
    expected = tensor(expected)
    return (found.detach().reshape(expected.shape) - expected).abs().max() < tolerance


def tenfold(stream, state, site):
    read = stream.read(state, site, same)
    return read.lanes[0], stream.write(state, site, read, 10 * read.lanes[0])


def test_deepseek_v4_hand_values():
    stream = built(V4)
    site = stream.plan.sites[1]
    load(stream.part(site), *SITE)
    pre, post, res = stream.part(site)(H)
    assert near(pre, [0.590287, 0.268942])
    assert near(post, [1.244919, 1.623247])
    assert near(res, [[0.466338, 0.533661], [0.533661, 0.466338]])
    x, after = tenfold(stream, H, site)
    assert near(x, [1.397114, 2.256344])
    assert near(after, [[19.460259, 31.156967], [24.611289, 39.558705]], 2e-6)


def test_deepseek_v4_head_hand_values():
    stream = built(V4)
    load(stream.part(stream.plan.head), *HEAD)
    assert near(stream.weights(H, stream.plan.head), [0.611972, 0.425558])
    assert near(stream.read(H, stream.plan.head, same).lanes[0], [1.888647, 2.926177])


def test_deepseek_v41_hand_values():
    stream = built(V41, depth=2)
    for site in stream.plan.sites:
        load(stream.part(site), *SITE)
    state = Passed(H, stream.open(H[..., 0, :]).pre)
    x, state = tenfold(stream, state, stream.plan.sites[0])
    assert near(x, [1.0, 2.0])  # stream 0
    assert near(state.H, [[14.516508, 27.965694], [18.165143, 35.397610]], 2e-6)
    x, state = tenfold(stream, state, stream.plan.sites[1])
    assert near(x, [13.454285, 26.027708], 2e-6)
    assert near(state.H, [[183.973438, 355.985936], [258.546347, 500.221209]], 2e-5)
    assert near(stream.read(state, stream.plan.head, same).lanes[0], [187.136970, 362.090589], 2e-5)
    assert stream.part(stream.plan.head) is None


def test_hy_v4_hand_values():
    stream = built(f"{HY},init=a6")
    site = stream.plan.sites[1]
    load(stream.part(site), *SITE)
    _, after = tenfold(stream, H, site)
    assert near(after, [[18.392952, 30.089669], [25.678629, 40.626054]], 2e-5)  # their rms has an eps of 1e-5, not 1e-6
    assert stream.part(site).res is None


def test_hy_v4_adds_its_eps_to_post_and_deepseek_does_not():
    for spec, added in ((V4, 0.0), (HY, EPS)):
        stream = built(spec)
        part = stream.part(stream.plan.sites[1])
        load(part, *SITE)
        _, post, _ = part(torch.zeros_like(H))
        assert (post - 2 * tensor([0.5, 0.0]).sigmoid() - added).abs().max() < 1e-15


def test_glm_reads_the_mean():
    stream = built(GLM)
    assert near(stream.read(H, stream.plan.head, same).lanes[0], [2.0, 3.0], 1e-15)
    assert stream.part(stream.plan.head) is None


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        (1, [[0.453551, 0.692890], [0.546449, 0.307110]]),
        (2, [[0.381936, 0.626835], [0.618064, 0.373165]]),
        (20, [[0.377541, 0.622459], [0.622459, 0.377541]]),
    ],
)
def test_released_sinkhorn_hand_values(rounds, expected):
    logits = tensor([[1.0, 0.0], [2.0, 0.0]])  # [from, to]
    for eps in (0.0, 1e-12):
        assert near(ops.sinkhorn(logits.T, iterations=rounds, eps=eps).T, expected)


def released_update(H, y, fn, base, scale, rounds=20):
    """One write of DeepSeek-V4, over its own tensors, with the streams on the first axis."""
    n = len(H)
    v = H.reshape(-1)
    z = (fn @ v) / torch.sqrt((v * v).mean() + 1e-6)
    post = 2 * torch.sigmoid(scale[1] * z[n : 2 * n] + base[n : 2 * n])
    C = torch.softmax((scale[2] * z[2 * n :] + base[2 * n :]).view(n, n), 1) + EPS
    C = C / (C.sum(0, keepdim=True) + EPS)
    for _ in range(rounds - 1):
        C = C / (C.sum(1, keepdim=True) + EPS)
        C = C / (C.sum(0, keepdim=True) + EPS)
    return torch.stack([post[k] * y + sum(C[j, k] * H[j] for j in range(n)) for k in range(n)]), C


@pytest.mark.parametrize("model", ["deepseek-v4", "deepseek-v4.1"])
def test_a_transposed_mixer_is_another_network(model):
    # matrices of two streams are symmetric: three tell [from, to] from [to, from]
    n, d = 3, 4
    fn, base, scale = draw(n * (n + 2), n * d), draw(n * (n + 2), seed=1), draw(3, seed=2)
    streams, y = draw(n, d, seed=3), draw(d, seed=4)
    stream = built(f"mhc:model={model},streams=3", width=d)
    site = stream.plan.sites[1]
    load(stream.part(site), fn, base, scale)
    expected, C = released_update(streams, y, fn, base, scale)
    assert (C - C.T).abs().max() > 0.1
    state = streams[None, None]
    state = Passed(state, draw(1, 1, n)) if model == "deepseek-v4.1" else state
    after = stream.write(state, site, stream.read(state, site, same), y[None, None])
    after = after.H if isinstance(after, Passed) else after
    assert (after[0, 0] - expected).abs().max() < 1e-12
    assert (C.T @ streams - C @ streams).abs().max() > 0.1


def test_code_that_is_called_mhc_and_is_another_function():
    values = {}
    for name, options in (("released", "post=2.0"), ("TileKernels", "post=1.0")):
        stream = built(f"mhc:streams=2,head=learned,eps=1e-6,{options}")
        site = stream.plan.sites[1]
        load(stream.part(site), *SITE)
        x, after = tenfold(stream, H, site)
        _, post, _ = stream.part(site)(H)
        values[name] = after[0, 0, 0, 0].item()
        values.setdefault("all ones", (H[..., 0].sum() + post[0, 0, 0] * 10 * x[0, 0, 0]).item())
    assert values == pytest.approx({"released": 19.460259, "TileKernels": 10.763790, "all ones": 21.392938}, abs=2e-6)


def test_eps_of_zero_is_the_limit_of_a_small_one():
    logits = 3 * draw(5, 4, 4)
    exact = ops.sinkhorn(logits)
    gaps = [(ops.sinkhorn(logits, eps=eps) - exact).abs().max().item() for eps in (1e-6, 1e-9, 1e-12)]
    assert gaps[0] > 1e-5 > gaps[1] > gaps[2] < 1e-8


def test_released_sinkhorn_gradient_is_that_of_its_compiled_form():
    logits = draw(2, 3, 4, 4)

    def gradients(function):
        leaf = logits.clone().requires_grad_()
        out = function(leaf)
        return out, torch.autograd.grad((out * draw(*out.shape, seed=1)).sum(), leaf)[0]

    def plain(leaf):
        return ops.sinkhorn(leaf, iterations=5, eps=1e-3)

    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    for one, other in zip(gradients(plain), gradients(compiled), strict=True):
        assert (one - other).abs().max() < 1e-14


@pytest.mark.parametrize("res", ["lite", "krom", "circulant", "sinkhorn"])
def test_a6_starts_near_the_identity_with_every_mixer(res):
    stream = built(f"mhc:res={res},head=learned", width=8)
    _, _, M = stream.part(stream.plan.sites[1])(draw(1, 1, 4, 8))
    assert M[0, 0].diagonal().min() > 0.99
    assert stream.starts == "eps"


def test_hy_v4_start():
    stream = built("mhc:model=hy-v4", width=64)
    part = stream.part(stream.plan.sites[1])
    assert part.pre.phi.std().item() == pytest.approx(0.006, rel=0.05)
    assert near(part.pre.bias, [-math.log(3)] * 4)
    assert part.post.bias.abs().max() == 0
    assert part.post.alpha.item() == pytest.approx(0.01)
    pre, post, _ = part(draw(1, 1, 4, 64))
    assert pre.sum().item() == pytest.approx(1, abs=2e-3)
    assert (post - 1).abs().max() < 2e-3


def test_kromhc_start():
    stream = built("mhc:init=kromhc,res=krom", width=8)
    pre, post, _ = stream.part(stream.plan.sites[1])(draw(1, 1, 4, 8))
    one = 1 / (1 + math.exp(-1))
    assert near(pre, [1 - one, one, 1 - one, 1 - one])
    assert near(post, [2 * (1 - one), 2 * one, 2 * (1 - one), 2 * (1 - one)])


def parts(spec, depth=2):
    stream = built(spec, width=4, depth=depth)
    learned = {name.removeprefix("at.").rsplit(".", 1)[0] for name, _ in stream.named_parameters()}
    fixed = {name.removeprefix("at.").rsplit(".", 1)[0] for name, _ in stream.named_buffers()}
    return learned, fixed


INNER = {"l1_mlp.pre", "l1_mlp.post", "l1_mlp.res"}


@pytest.mark.parametrize(
    ("options", "learned", "fixed"),
    [
        ("", {"l0_mlp.post", *INNER, "l2_mlp.pre", "l2_mlp.post"}, set()),
        ("head=mean", {"l0_mlp.post", *INNER, "l2_mlp.pre", "l2_mlp.post"}, set()),
        ("head=learned", {"l0_mlp.post", *INNER, "l2_mlp.pre", "l2_mlp.post", "l2_mlp.res", "head.pre"}, set()),
        (
            "model=deepseek-v4",
            {"l0_mlp.post", *INNER, "l2_mlp.pre", "l2_mlp.post", "l2_mlp.res", "head.pre"},
            {"l0_mlp.pre", "l0_mlp.res"},
        ),
        (
            "model=deepseek-v4.1",
            {"l0_mlp.pre", "l0_mlp.post", *INNER, "l2_mlp.pre", "l2_mlp.post", "l2_mlp.res"},
            {"l0_mlp.res"},
        ),
        (
            "model=glm-5.3-flash",
            {"l0_mlp.post", *INNER, "l2_mlp.pre", "l2_mlp.post"},
            {"l0_mlp.pre", "l0_mlp.res", "l2_mlp.res"},
        ),
        (
            "model=hy-v4",
            {"l0_mlp.post", *INNER - {"l1_mlp.res"}, "l2_mlp.pre", "l2_mlp.post", "head.pre"},
            {"l0_mlp.pre"},
        ),
        ("reads=previous", {"l0_mlp.pre", "l0_mlp.post", *INNER, "l2_mlp.post"}, set()),
        ("res=krom,head=mean,eps=1e-6", {"l0_mlp.post", *INNER, "l2_mlp.pre", "l2_mlp.post"}, {"l0_mlp.pre"}),
    ],
)
def test_maps_that_are_built_and_those_that_are_fixed(options, learned, fixed):
    assert parts(f"mhc:{options}" if options else "mhc", depth=3) == (learned, fixed)


@pytest.mark.parametrize("model", PRESETS)
def test_presets_have_every_tensor_of_their_model(model):
    n, d, depth = 4, 8, 3
    stream = built(f"mhc:model={model}", width=d, depth=depth)
    rows = 2 * n if model == "hy-v4" else n * (n + 2)
    scales = 2 if model == "hy-v4" else 3
    head = 0 if model in ("deepseek-v4.1", "glm-5.3-flash") else n * n * d + n + 1
    count = sum(value.numel() for value in stream.state_dict().values())
    assert count == depth * (rows * (n * d + 1) + scales) + head


@pytest.mark.parametrize("model", PRESETS)
def test_presets_are_plain_options(model):
    stream = built(f"mhc:model={model}")
    assert PRESETS[model].items() <= stream.options.items()
    assert "model" not in stream.options
    again = built(stream.spec)
    assert again.config == stream.config
    assert (
        built({"name": "mhc", "model": model, **PRESETS[model]}).config == stream.config
    )  # given beside it, and agreeing
    assert built(f"mhc:model={model},init=random").options["init"] == "random"


def test_pass_is_another_name_of_reads():
    assert built("mhc:pass=previous").spec == "mhc:reads=previous"
    assert built("mhc:pass=own").spec == "mhc"


@pytest.mark.parametrize(
    ("options", "error", "cure"),
    [
        ("model=deepseek-v4,head=mean", ValueError, "model=deepseek-v4 has head=learned, not mean"),
        ("model=deepseek-v4,eps=1e-5", ValueError, "has eps=1e-06"),
        ("model=deepseek-v4,res=krom", ValueError, "has res=sinkhorn, not krom"),
        ("model=deepseek-v4,reads=previous", ValueError, "has reads=own, not previous"),
        ("model=deepseek-v4,post=1.0", ValueError, "has post=2.0, not 1.0"),
        ("model=glm-5.3-flash,iterations=10", ValueError, "has iterations=20, not 10"),
        ("model=hy-v4,reads=previous", ValueError, "has reads=own"),
        ("model=deepseek-v5", ValueError, "deepseek-v4|deepseek-v4.1|glm-5.3-flash|hy-v4"),
        ("pass=previous,reads=own", ValueError, "one option"),
        ("pass=next", ValueError, "own|previous"),
        ("res=lite,streams=5", ValueError, "120 permutations"),
        ("res=krom,streams=6", ValueError, "no power of 2"),
        ("res=krom,iterations=8", ValueError, "rounds of Sinkhorn"),
        ("res=identity,iterations=8", ValueError, "rounds of Sinkhorn"),
        ("post=0", ValueError, "above 0"),
        ("post=-2", ValueError, "above 0"),
        ("eps=-1", ValueError, "from 0"),
        ("norm_eps=1", ValueError, "below 1"),
        ("head=max", ValueError, "sum|mean|learned"),
    ],
)
def test_mhc_refuses_what_it_cannot_be(options, error, cure):
    with pytest.raises(error) as caught:
        built(f"mhc:{options}")
    assert cure in str(caught.value)


def test_a_preset_is_no_argument_of_the_class():
    with pytest.raises(ValueError, match="build it with"):
        residua.design("mhc")(Plan.regular(4, 2), model="hy-v4")


@pytest.mark.parametrize(
    ("options", "starts"),
    [
        ("head=learned,reads=previous", "eps"),
        ("res=krom,eps=1e-2", "eps"),  # pre alone has it, and the norms forget its scale
        ("eps=1e-6", "no"),
        ("res=identity", "eps"),
        ("res=identity,eps=1e-6", "no"),
        ("post=1.0", "no"),
        ("init=kromhc", "no"),
        ("init=hy-v4", "no"),
    ],
)
def test_starts(options, starts):
    assert built(f"mhc:{options}").starts == starts


@pytest.mark.parametrize(("options", "once"), [("", False), ("res=identity", True), ("reads=previous", True)])
def test_rounding_in_half_precision(options, once):
    stream = residua.build(f"mhc:{options}" if options else "mhc", Plan.regular(16, 3, ("mlp",)))
    site, generator = stream.plan.sites[1], torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    streams, y = (torch.randn(1, 9, n, 16, generator=generator).bfloat16() for n in (4, 1))
    state = Passed(streams, torch.rand(1, 9, 4, generator=generator).bfloat16()) if "previous" in options else streams
    after = stream.write(state, site, stream.read(state, site, same), y.squeeze(-2))
    after = after.H if isinstance(after, Passed) else after
    _, post, res = stream.part(site)(streams)
    wide = torch.einsum("btij,btjd->btid", res, streams.float()) + post[..., None] * y.float()
    assert after.dtype == torch.bfloat16
    assert torch.equal(after, wide.bfloat16()) == once
