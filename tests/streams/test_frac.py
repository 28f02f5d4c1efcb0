"""frac: the hand values of Frac-Connections, the exact start, and what another package calls by that name."""

import math

import pytest
import torch

import residua
from residua import Plan
from residua.testing import Case, ids
from tests.streams.hand import BY, close, set_, trace, vector
from tests.streams.harness import randomise, run_stream, toy_norms, toy_sublayers


def built(spec, width=4, depth=1, layout=("mlp",)):
    return residua.build(spec, Plan.regular(width, depth, layout)).double()


def tenfold(x):
    return 10 * x


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("dynamic", ["true", "false"])
def test_frac_hand_values(by, dynamic):
    stream = built(f"frac:fractions=2,dynamic={dynamic}")
    set_(stream, l0_mlp__read=[[1, 0.5], [0, 1]], l0_mlp__remix=[[1, 0], [0.5, 1]], l0_mlp__write=[0.5, 2])
    found = trace(stream, vector(1.0, 2.0, 3.0, 4.0), [tenfold], by=by)
    assert close(found.inputs[0][0], [1, 2, 3.5, 5])
    assert close(found.out, [7.5, 14, 73, 104])


@pytest.mark.parametrize("by", BY)
def test_frac_start_is_not_what_a_package_calls_num_fracs(by):
    # there every fraction of the input reads fraction 0 and gets the sum of the output's: (21, 42, 23, 44)
    found = trace(built("frac:fractions=2"), vector(1.0, 2.0, 3.0, 4.0), [tenfold], by=by)
    assert close(found.inputs[0][0], [1, 2, 3, 4])
    assert close(found.out, [11, 22, 33, 44])


@pytest.mark.parametrize("by", BY)
def test_frac_dynamic_hand_values(by):
    # layernorm sends (3, 1) to (1, -1) and (0, 4) to (-1, 1), eps aside
    stream = built("frac:fractions=2")
    set_(
        stream,
        l0_mlp__W_alpha=[[0.5, 0.1, 0.2, 0.3], [0.0, 0.0, 0.0, 0.0]],  # columns: read to 0 and 1, remix to 0 and 1
        l0_mlp__W_beta=[0.0, 0.4],
        l0_mlp__s_alpha=[0.5],
        l0_mlp__s_beta=[0.25],
    )
    a, b, c, e, w = (math.tanh(z) for z in (0.5, 0.1, 0.2, 0.3, 0.4))
    H = torch.tensor([[3000.0, 1000.0], [0.0, 4000.0]], dtype=torch.float64)
    Y = [[1 + 0.5 * a, 0.5 * b], [-0.5 * a, 1 - 0.5 * b]]
    A = [[1 + 0.5 * c, 0.5 * e], [-0.5 * c, 1 - 0.5 * e]]
    B = [1 - 0.25 * w, 1 + 0.25 * w]
    x = [sum(Y[i][k] * H[i] for i in range(2)) for k in range(2)]
    expected = torch.cat([sum(A[i][k] * H[i] for i in range(2)) + B[k] * 10 * x[k] for k in range(2)])
    found = trace(stream, H.reshape(1, 1, 4), [tenfold], by=by).out
    assert ((found - expected) / expected).abs().max() < 1e-9


@pytest.mark.parametrize("dynamic", ["true", "false"])
@pytest.mark.parametrize("fractions", [1, 2, 4])
def test_frac_start_is_the_standard_network_to_the_bit(fractions, dynamic):
    ours = Case(f"frac:fractions={fractions},dynamic={dynamic}").model(moved=False)
    assert torch.equal(ours(ids()), Case("standard").model(moved=False)(ids()))


@pytest.mark.parametrize("dynamic", ["true", "false"])
def test_frac_of_one_fraction_is_hyper_of_one_stream(dynamic):
    generator, plan = torch.Generator().manual_seed(0), Plan.regular(8, 3)
    frac, hyper = (
        residua.build(f"{one},dynamic={dynamic}", plan).double() for one in ("frac:fractions=1", "hyper:streams=1")
    )
    randomise(frac, generator)
    hyper.load_state_dict(frac.state_dict())
    sublayers, norms = toy_sublayers(plan, generator), toy_norms(plan, generator)
    x = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    assert (run_stream(frac, x, sublayers, norms) - run_stream(hyper, x, sublayers, norms)).abs().max() < 1e-13


@pytest.mark.parametrize("fractions", [2, 4])
def test_frac_parameter_count(fractions):
    m, d = fractions, 8
    counts = [
        sum(p.numel() for p in built(f"frac:fractions={m},dynamic={dynamic}", width=d).parameters())
        for dynamic in ("false", "true")
    ]
    assert counts == [m * (2 * m + 1), m * (2 * m + 1) + d // m * (2 * m + 1) + 2 + 2 * d // m]


@pytest.mark.parametrize(
    ("options", "error", "cure"),
    [
        ("fractions=0", ValueError, "at least 1"),
        ("fractions=3", ValueError, "does not divide the width 4"),
        ("streams=2", TypeError, "fractions"),
    ],
)
def test_frac_refuses(options, error, cure):
    with pytest.raises(error, match=cure):
        built(f"frac:{options}")
