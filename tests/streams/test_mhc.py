"""mhc: the hand values of the manifold-constrained streams, their start, and the maps that are not built."""

import math

import pytest
import torch
from torch.nn import functional as F

import residua
from residua import Plan, ops
from tests.oracles import mhc as oracle
from tests.streams.harness import randomise, run_stream, toy_norms, toy_sublayers


def identity(*lanes):
    return lanes


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def built(spec, width=2, depth=3, layout=("mlp",)):
    return residua.build(spec, Plan.regular(width, depth, layout)).double()


def step(stream, site, H, f):
    """One site without a norm, from the state H [n, d] to the next."""
    state = H[None, None]
    read = stream.read(state, site, identity)
    return stream.write(state, site, read, f(read.lanes[0]))[0, 0]


def settle(stream, site, **biases):
    """Maps that are their bias alone."""
    with torch.no_grad():
        for name, value in biases.items():
            mapping = getattr(stream.part(site), name)
            mapping.phi.zero_()
            mapping.bias.copy_(tensor(value))


FULL = 40.0  # 2 sigmoid is exactly 2 here in float64


def test_mhc_update_hand_value():
    stream = built("mhc:streams=2")
    site = stream.plan.sites[1]
    third = math.log(3)
    settle(stream, site, pre=[0.0, 0.0], post=[0.0, FULL], res=[[third, 0.0], [0.0, third]])
    new = step(stream, site, torch.eye(2, dtype=torch.float64), lambda z: 2 * z)
    assert (new - tensor([[1.75, 1.25], [2.25, 2.75]])).abs().max() < 1e-14


def test_mhc_oracle_sinkhorn_hand_values():
    third = math.log(3)
    for logits, iterations, expected in (
        (((third, 0.0), (0.0, third)), 20, ((0.75, 0.25), (0.25, 0.75))),
        (((1.0, 0.0), (0.0, 0.0)), 20, ((0.62245933, 0.37754067), (0.37754067, 0.62245933))),
        (((1.0, 0.0), (0.0, 0.0)), 1, ((0.59384548, 0.40615452), (0.34975541, 0.65024459))),
    ):
        M = oracle._sinkhorn([[math.exp(value) for value in row] for row in logits], iterations)
        assert (tensor(M) - tensor(expected)).abs().max() < 5e-9


def test_mhc_res_orientation():
    # row i of H_res says where the new stream i comes from: stream 0 from 1, 1 from 2, 2 from 0
    stream = built("mhc:streams=3")
    site = stream.plan.sites[1]
    settle(stream, site, res=[[-FULL, FULL, -FULL], [-FULL, -FULL, FULL], [FULL, -FULL, -FULL]])
    H = tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    new = step(stream, site, H, torch.zeros_like)
    assert (new - H[[1, 2, 0]]).abs().max() < 1e-12


def test_mhc_res_phi_is_laid_out_row_by_row():
    stream = built("mhc:streams=2,iterations=1", width=1)
    site = stream.plan.sites[1]
    settle(stream, site, res=[[0.0, 0.0], [0.0, 0.0]])
    with torch.no_grad():
        stream.part(site).res.phi[0, 1] = 1.0  # entry (0, 1), from feature 0 of stream 0
        stream.part(site).res.alpha.fill_(1.0)
    H = tensor([[1000.0], [1000.0]])  # rmsnorm: (1, 1)
    H[1] = -1000.0
    e = math.e
    # columns, then rows, of [[1, e], [1, 1]]
    columns = [[1 / 2, e / (1 + e)], [1 / 2, 1 / (1 + e)]]
    rows = [[v / sum(row) for v in row] for row in columns]
    new = step(stream, site, H, torch.zeros_like)
    expected = [1000 * (row[0] - row[1]) for row in rows]
    assert (new[:, 0] - tensor(expected)).abs().max() < 1e-8


def test_mhc_a6_biases():
    stream = built("mhc", width=8, depth=4, layout=("attn", "mlp"))
    H = draw(1, 1, 4, 8)
    for site in stream.plan.sites[1:-1]:
        pre, post, res = (one[0, 0] for one in stream.part(site)(H))
        home = site.index % 4
        own = torch.arange(4) == home
        assert (pre[own] - 0.9525741268).abs().max() < 1e-9
        assert (pre[~own] - 0.0474258732).abs().max() < 1e-9
        assert post.tolist() == [1.0] * 4
        assert (res.diagonal() - 1 / (1 + 3 * math.exp(-6))).abs().max() < 1e-12
        assert res.diagonal().mean().item() == pytest.approx(0.9926, abs=5e-5)


@pytest.mark.parametrize("name", ["pre", "post", "res"])
def test_mhc_starts_with_phi_zero_and_alpha_a_hundredth(name):
    mapping = getattr(built("mhc", width=8).part(Plan.regular(8, 3, ("mlp",)).sites[1]), name)
    assert mapping.phi.abs().max() == 0
    assert mapping.alpha.item() == pytest.approx(0.01)


@pytest.mark.parametrize("streams", [2, 4])
def test_mhc_a6_start_is_the_standard_stream(streams):
    generator = torch.Generator().manual_seed(0)
    plan = Plan.regular(8, 3)
    stream, standard = (residua.build(one, plan).double() for one in (f"mhc:streams={streams}", "standard"))
    sublayers, norms = toy_sublayers(plan, generator), toy_norms(plan, generator, eps=0.0)
    x = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    expected = run_stream(standard, x, sublayers, norms)
    assert (run_stream(stream, x, sublayers, norms) - expected).abs().max() < 1e-12


def network(init, generator, plan):
    stream = residua.build(f"mhc:init={init}", plan).double()
    sublayers, norms = toy_sublayers(plan, generator), toy_norms(plan, generator)
    x, aim = torch.randn(2, 2, 5, 8, generator=generator, dtype=torch.float64).unbind()

    def spread():
        H = stream.open(x)
        for site in plan.sites:
            read = stream.read(H, site, lambda z, norm=norms[site.index]: (norm(z),))
            H = stream.write(H, site, read, sublayers[site.index](*read.lanes))
        return (H - H[..., :1, :]).abs().max().item()

    def train(steps):
        optimizer = torch.optim.AdamW(stream.parameters(), lr=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            (run_stream(stream, x, sublayers, norms) - aim).square().mean().backward()
            optimizer.step()

    return stream, spread, train


@pytest.mark.parametrize("init", ["a6", "random"])
def test_mhc_streams_differ_after_one_step(init):
    torch.manual_seed(0)
    _, spread, train = network(init, torch.Generator().manual_seed(0), Plan.regular(8, 3))
    train(1)
    assert spread() > 1e-4


def test_mhc_streams_without_a_start_that_tells_them_apart_stay_equal_for_ever():
    # why phi = 0 with b = 0 is not offered
    stream, spread, train = network("a6", torch.Generator().manual_seed(0), Plan.regular(8, 3))
    with torch.no_grad():
        for name, parameter in stream.named_parameters():
            if not name.endswith("alpha"):
                parameter.zero_()
    train(5)
    assert any(p.abs().max() > 1e-3 for name, p in stream.named_parameters() if name.endswith("post.bias"))
    assert spread() < 1e-14


def test_mhc_res_is_doubly_stochastic_for_any_parameters():
    stream = built("mhc:iterations=400,init=random", width=8)  # near 6 I - 3 columns take far more rounds
    randomise(stream, torch.Generator().manual_seed(0))
    _, _, res = stream.part(stream.plan.sites[1])(draw(1, 60, 4, 8))
    assert (res.sum(-1) - 1).abs().max() < 1e-14
    assert (res.sum(-2) - 1).abs().max() < 1e-12
    assert torch.linalg.matrix_norm(res, 2).max() < 1 + 1e-12
    product = torch.eye(4, dtype=torch.float64)
    for one in res[0]:
        product = one @ product
    assert (product.sum(-1) - 1).abs().max() < 1e-13
    assert (product.sum(-2) - 1).abs().max() < 1e-12
    assert (product - 0.25).abs().max() < 1e-3  # the streams become alike


def test_mhc_gates_stay_in_their_ranges():
    stream = built("mhc", width=8)
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter.add_(draw(*parameter.shape))
    pre, post, res = stream.part(stream.plan.sites[1])(draw(4, 9, 4, 8))
    assert pre.min() > 0
    assert pre.max() < 1
    assert post.min() > 0
    assert 1 < post.max() < 2  # twice a sigmoid
    assert (res.sum(-1) - 1).abs().max() < 1e-14


def test_mhc_maps_see_the_direction_of_all_streams_together():
    stream = built("mhc", width=8)
    randomise(stream, torch.Generator().manual_seed(0))
    H = draw(1, 3, 4, 8)
    maps = [stream.part(stream.plan.sites[1])(scale * H) for scale in (1.0, 1000.0)]
    for small, large in zip(*maps, strict=True):
        assert (small - large).abs().max() < 1e-5
    # one norm over n d: growing one stream shrinks what is seen of the others
    grown = H.clone()
    grown[..., 0, :] *= 1000
    moved = stream.part(stream.plan.sites[1])(grown)
    assert (moved[0] - maps[0][0]).abs().max() > 1e-3


def test_mhc_builds_no_map_that_could_not_learn():
    stream = built("mhc", width=8, depth=2, layout=("attn", "mlp"))
    names = {name.rsplit(".", 1)[0] for name, _ in stream.named_parameters()}
    expected = {
        "at.l0_attn.post",
        *(f"at.{site}.{name}" for site in ("l0_mlp", "l1_attn") for name in ("pre", "post", "res")),
        "at.l1_mlp.pre",
        "at.l1_mlp.post",
    }
    assert names == expected


def test_mhc_first_site_needs_no_pre_and_no_res():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    H = built("mhc", width=8).open(x)
    pre = (0.1 + torch.rand(2, 5, 4, 1, generator=generator, dtype=torch.float64)).requires_grad_()
    normed = F.rms_norm(ops.remix(pre, H).squeeze(-2), (8,), eps=0.0)
    assert (normed - F.rms_norm(x, (8,), eps=0.0)).abs().max() < 1e-12
    (gradient,) = torch.autograd.grad(normed.sin().sum(), pre)
    assert gradient.abs().max() < 1e-12

    logits = draw(2, 5, 4, 4).requires_grad_()
    kept = ops.remix(ops.sinkhorn(logits).transpose(-1, -2), H)
    assert (kept - H).abs().max() < 1e-14  # rows are exact, in any number of iterations
    (gradient,) = torch.autograd.grad(kept.sin().sum(), logits)
    assert gradient.abs().max() < 1e-12


def test_mhc_last_site_needs_no_res():
    # the head sums the streams, and columns that sum to 1 keep the sum
    H, logits = draw(2, 5, 4, 8), draw(2, 5, 4, 4, seed=1).requires_grad_()
    summed = ops.remix(ops.sinkhorn(logits, iterations=400).transpose(-1, -2), H).sum(-2)
    assert (summed - H.sum(-2)).abs().max() < 1e-12
    (gradient,) = torch.autograd.grad(summed.sin().sum(), logits)
    assert gradient.abs().max() < 1e-12
    # other matrices would matter there: the claim rests on the columns, not on the sum
    rows_only = ops.remix(logits.softmax(-1).transpose(-1, -2), H).sum(-2)
    assert (rows_only - H.sum(-2)).abs().max() > 0.1


def test_mhc_last_site_res_of_the_default_start_changes_nothing_in_twenty_rounds():
    H = draw(2, 5, 4, 8)
    res = ops.sinkhorn((6 * torch.eye(4) - 3).double())
    summed = ops.remix(res.T.expand(2, 5, 4, 4), H).sum(-2)
    assert (summed - H.sum(-2)).abs().max() < 1e-13


@pytest.mark.parametrize("streams", [2, 4])
def test_mhc_parameter_count(streams):
    d, n = 8, streams
    stream = built(f"mhc:streams={n}", width=d, depth=2, layout=("attn", "mlp"))
    counts = [sum(p.numel() for p in stream.part(site).parameters()) for site in stream.plan.sites]
    one, matrix = n * d * n + n + 1, n * d * n**2 + n**2 + 1
    assert 2 * one + matrix == n * d * (n**2 + 2 * n) + n**2 + 2 * n + 3  # the paper's
    assert counts == [one, 2 * one + matrix, 2 * one + matrix, 2 * one]


@pytest.mark.parametrize(
    ("options", "error", "cure"),
    [
        ("streams=1", ValueError, "use standard"),
        ("streams=0", ValueError, "use standard"),
        ("iterations=0", ValueError, "at least 1"),
        ("init=zero", ValueError, "a6|random"),
        ("rate=4", TypeError, "streams"),
    ],
)
def test_mhc_refuses(options, error, cure):
    with pytest.raises(error) as caught:
        built(f"mhc:{options}")
    assert cure in str(caught.value)
