"""multigate: the hand values of one step, the bias, and AttnRes where nothing is gated."""

import pytest
import torch

import residua
from residua import Plan
from residua.runner import unchanged
from residua.testing import assert_close
from tests.streams.hand import BY, close, constant, set_, trace, vector
from tests.streams.harness import run_stream, toy_norms, toy_sublayers


def built(spec, width=2, depth=2, layout=("mlp",)):
    return residua.build(spec, Plan.regular(width, depth, layout)).double()


@pytest.mark.parametrize("by", BY)
def test_multigate_hand_values(by):
    # the first output is the second stream; the second moves both
    stream = built("multigate:streams=2,eps=1e-30,bias=-1.0")
    set_(stream, l1_mlp__mixer__weight=[0.0, 1.0], head__pool__query=[1.0, 0.0])
    found = trace(stream, vector(3.0, 4.0), [constant(1.0, -1.0), constant(2.0, 0.0)], by=by)
    assert close(found.out, [1.834587, 0.639138], 1e-6)


def test_multigate_streams_hand_values():
    stream = built("multigate:streams=2,eps=1e-30,bias=-1.0")
    site = stream.plan.sites[1]
    set_(stream, l1_mlp__mixer__weight=[0.0, 1.0])
    state = (vector(3.0, 4.0), vector(1.0, -1.0))
    read = stream.read(state, site, unchanged)
    first, second = stream.write(state, site, read, vector(2.0, 0.0))
    assert close(first, [2.549834, 2.199336], 1e-6)
    assert close(second, [1.153539, -0.846461], 1e-6)
    gates = stream.gates(state, site, read)["gate"]
    assert close(gates, [(3 - 2.549834) / 1, 1.153539 - 1], 1e-6)


def test_multigate_bias_hand_value():
    stream = built("multigate", depth=24)  # three are appended, and 21 gate
    assert close(stream.part(stream.plan.sites[-1])["mixer"].bias, [-2.838232] * 4, 1e-6)
    assert "mixer" not in stream.part(stream.plan.sites[2])
    assert "mixer" in stream.part(stream.plan.sites[3])


@pytest.mark.parametrize("streams", [7, 20])
def test_multigate_with_a_stream_for_every_output_is_attnres_with_a_scale(streams):
    generator, plan = torch.Generator().manual_seed(0), Plan.regular(8, 3)
    ours, other = (residua.build(one, plan).double() for one in (f"multigate:streams={streams}", "attnres"))
    with torch.no_grad():
        for site in plan.readers[1:]:
            query = torch.randn(8, generator=generator, dtype=torch.float64)
            ours.part(site)["pool"].query.copy_(query)
            other.part(site).query.copy_(query / 8**0.5)
    assert ours.starts == "eps"
    sublayers, norms = toy_sublayers(plan, generator), toy_norms(plan, generator)
    x = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    assert_close(run_stream(ours, x, sublayers, norms), run_stream(other, x, sublayers, norms))


def test_multigate_streams_keep_the_names_of_their_outputs_until_they_are_gated():
    stream = built("multigate:streams=3", depth=3)
    assert stream.sources(stream.plan.sites[2]) == ("embed", "l0_mlp", "l1_mlp")
    assert stream.sources(stream.plan.head) == ("stream0", "stream1", "stream2")


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        ("streams=0", "at least 1"),
        ("streams=1", "2 or more"),
        ("streams=3,bias=-1.0", "bias has no effect"),
    ],
)
def test_multigate_refuses(options, cure):
    with pytest.raises(ValueError, match=cure):
        built(f"multigate:{options}")


def test_multigate_without_room_for_its_bias_asks_for_one():
    with pytest.raises(ValueError, match="give one"):
        built("multigate:streams=5", depth=5)
    built("multigate:streams=5,bias=0.0", depth=5)
