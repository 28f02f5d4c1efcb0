"""hyper: the hand values of Hyper-Connections, the start, and the weights that are not built."""

import math

import pytest
import torch
from torch.nn import functional as F

import residua
from residua import Plan, ops
from tests.oracles import hyper as oracle
from tests.streams.harness import randomise, run_stream, toy_norms, toy_sublayers


def identity(*lanes):
    return lanes


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def built(spec, width=2, depth=3, layout=("mlp",)):
    return residua.build(spec, Plan.regular(width, depth, layout)).double()


def step(stream, site, H, f):
    """One site without a norm, from the state H [n, d] to the next."""
    state = H[None, None]
    read = stream.read(state, site, identity)
    return stream.write(state, site, read, f(read.lanes[0]))[0, 0]


def settle(stream, site, **values):
    with torch.no_grad():
        for name, value in values.items():
            getattr(stream.part(site), name).copy_(tensor(value))


@pytest.mark.parametrize("dynamic", ["true", "false"])
@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({}, [[11, 22], [13, 24]]),
        (
            {"read": [0.25, 0.75], "remix": [[1, 0.5], [0, 1]], "write": [0.5, 2]},
            [[13.5, 19.5], [53.5, 75]],
        ),
    ],
    ids=["init", "trained"],
)
def test_hyper_hand_values(dynamic, weights, expected):
    stream = built(f"hyper:streams=2,dynamic={dynamic}")
    site = stream.plan.sites[2]  # its turn is stream 0, and it is not the first
    settle(stream, site, **weights)
    new = step(stream, site, tensor([[1.0, 2.0], [3.0, 4.0]]), lambda z: 10 * z)
    assert new.tolist() == expected


def test_hyper_first_site_reads_its_stream():
    stream = built("hyper:streams=2")
    new = step(stream, stream.plan.sites[0], tensor([[1.0, 2.0], [3.0, 4.0]]), lambda z: 10 * z)
    assert new.tolist() == [[11, 22], [13, 24]]


def test_hyper_sites_take_turns_at_the_start():
    stream = built("hyper:streams=3", width=1, depth=4, layout=("attn", "mlp"))
    H = tensor([[1.0], [10.0], [100.0]])
    reads = [stream.read(H[None, None], site, identity).lanes[0].item() for site in stream.plan.sites]
    assert reads == [1, 10, 100, 1, 10, 100, 1, 10]


def test_hyper_head_sums_the_streams():
    stream = built("hyper:streams=3", width=1)
    H = tensor([[1.0], [10.0], [100.0]])[None, None]
    assert stream.read(H, stream.plan.head, identity).lanes[0].item() == 111


def test_hyper_dynamic_hand_values():
    # d = 2: layernorm sends (3, 1) to (1, -1) and (0, 4) to (-1, 1), whatever their size (eps aside)
    stream = built("hyper:streams=2", width=2)
    site = stream.plan.sites[2]
    H = tensor([[3000.0, 1000.0], [0.0, 4000.0]])
    settle(
        stream,
        site,
        W_alpha=[[0.5, 0.1, 0.2], [0.0, 0.0, 0.0]],  # columns: read, remix to stream 0, remix to stream 1
        W_beta=[0.0, 0.3],
        s_alpha=[0.5],
        s_beta=[0.25],
    )
    a, b, c, w = (math.tanh(z) for z in (0.5, 0.1, 0.2, 0.3))
    read = [1 + 0.5 * a, 0 - 0.5 * a]
    remix = [[1 + 0.5 * b, 0 + 0.5 * c], [0 - 0.5 * b, 1 - 0.5 * c]]
    write = [1 - 0.25 * w, 1 + 0.25 * w]
    x = sum(read[i] * H[i] for i in range(2))
    expected = torch.stack([sum(remix[i][j] * H[i] for i in range(2)) + write[j] * 10 * x for j in range(2)])
    new = step(stream, site, H, lambda z: 10 * z)
    assert ((new - expected) / expected).abs().max() < 1e-9


def test_hyper_dynamic_gain_and_shift_act_on_the_normalised_streams():
    stream = built("hyper:streams=2", width=2)
    site = stream.plan.sites[2]
    settle(stream, site, W_beta=[0.3, 0.0], s_beta=[1.0], gain=[2.0, 1.0], shift=[0.5, 0.0])
    H = tensor([[3000.0, 1000.0], [0.0, 4000.0]])
    ones = torch.ones(1, 1, 2, dtype=torch.float64)
    new = step(stream, site, H, lambda z: ones) - H
    expected = [1 + math.tanh(0.3 * 2.5), 1 + math.tanh(0.3 * -1.5)]
    assert (new[:, 0] - tensor(expected)).abs().max() < 1e-9


@pytest.mark.parametrize("dynamic", ["true", "false"])
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_hyper_start_is_the_standard_stream(streams, dynamic):
    generator = torch.Generator().manual_seed(0)
    plan = Plan.regular(8, 3)
    stream, standard = (
        residua.build(one, plan).double() for one in (f"hyper:streams={streams},dynamic={dynamic}", "standard")
    )
    sublayers, norms = toy_sublayers(plan, generator), toy_norms(plan, generator, eps=0.0)
    x = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    expected = run_stream(standard, x, sublayers, norms)
    assert (run_stream(stream, x, sublayers, norms) - expected).abs().max() < 1e-12
    parameters = dict(stream.named_parameters())
    other = oracle.forward(x, parameters, sublayers, norms, layers=3, layout=("attn", "mlp"), **stream.options)
    assert (other - expected).abs().max() < 1e-12


@pytest.mark.parametrize("dynamic", ["true", "false"])
def test_hyper_streams_are_equal_copies_at_the_start_and_differ_after_one_step(dynamic):
    generator = torch.Generator().manual_seed(0)
    plan = Plan.regular(8, 3)
    stream = residua.build(f"hyper:dynamic={dynamic}", plan).double()
    sublayers, norms = toy_sublayers(plan, generator), toy_norms(plan, generator)
    x, aim = torch.randn(2, 2, 5, 8, generator=generator, dtype=torch.float64).unbind()

    def spread():
        H = stream.open(x)
        for site in plan.sites:
            read = stream.read(H, site, lambda z, norm=norms[site.index]: (norm(z),))
            H = stream.write(H, site, read, sublayers[site.index](*read.lanes))
        return (H - H.mean(-2, keepdim=True)).abs().max().item()

    assert spread() < 1e-14
    optimizer = torch.optim.AdamW(stream.parameters(), lr=0.01)
    (run_stream(stream, x, sublayers, norms) - aim).square().mean().backward()
    optimizer.step()
    assert spread() > 1e-3


@pytest.mark.parametrize("dynamic", ["true", "false"])
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_hyper_parameter_count(streams, dynamic):
    d, n = 8, streams
    stream = built(f"hyper:streams={n},dynamic={dynamic}", width=d, depth=3, layout=("attn", "mlp"))
    reads = [site.index > 0 and n > 1 for site in stream.plan.sites]
    counts = [sum(p.numel() for p in stream.part(site).parameters()) for site in stream.plan.sites]
    # the paper's n (n + 2) and, dynamic, d (n + 2) + 2 d + 2; less n static and d dynamic where A_m is not built
    full = n * (n + 2) + (d * (n + 2) + 2 * d + 2 if dynamic == "true" else 0)
    missing = n + (d if dynamic == "true" else 0)
    assert counts == [full - (0 if read else missing) for read in reads]


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_hyper_read_of_equal_copies_only_scales_what_the_norm_rescales(streams):
    # why the first site, and every site of one stream, has no A_m: it moves nothing and no gradient reaches it
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    H = built(f"hyper:streams={streams}", width=8).open(x)
    A_m = (0.1 + torch.rand(2, 5, streams, 1, generator=generator, dtype=torch.float64)).requires_grad_()
    normed = F.rms_norm(ops.remix(A_m, H).squeeze(-2), (8,), eps=0.0)
    assert (normed - F.rms_norm(x, (8,), eps=0.0)).abs().max() < 1e-12
    (gradient,) = torch.autograd.grad(normed.sin().sum(), A_m)
    assert gradient.abs().max() < 1e-12


def test_hyper_first_read_is_the_embedding_whatever_the_parameters():
    stream = built("hyper", width=8)
    randomise(stream, torch.Generator().manual_seed(0))
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (read,) = stream.read(stream.open(x), stream.plan.sites[0], identity).lanes
    assert (read - x).abs().max() < 1e-14


@pytest.mark.parametrize(
    ("options", "error", "cure"),
    [
        ("streams=0", ValueError, "at least 1"),
        ("streams=1.5", ValueError, "whole number"),
        ("dynamic=maybe", ValueError, "true"),
        ("n=4", TypeError, "streams"),
    ],
)
def test_hyper_refuses(options, error, cure):
    with pytest.raises(error) as caught:
        built(f"hyper:{options}")
    assert cure in str(caught.value)
