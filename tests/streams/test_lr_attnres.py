"""lr_attnres: hand values of keys and of the prior, and what zero queries read."""

import math

import pytest
import torch

import residua
from residua import Plan
from residua.model import Transformer
from residua.runner import unchanged
from residua.streams.lr_attnres import Keyed
from residua.testing import Case, assert_close
from tests.streams.hand import BY, close, constant, set_, trace, vector
from tests.streams.harness import run_stream, toy_norms, toy_sublayers


def built(spec, width=2, depth=2, layout=("mlp",)):
    return residua.build(spec, Plan.regular(width, depth, layout)).double()


@pytest.mark.parametrize("by", BY)
def test_lr_attnres_hand_values(by):
    # the key of the embedding is (1, 1), that of the first output (1, -1); query (0, ln 3 / 2)
    stream = built("lr_attnres:rank=2")
    set_(stream, l1_mlp__query=[0.0, math.log(3) / 2])
    with torch.no_grad():
        stream.keys["embed"].key.copy_(torch.eye(2))
    sublayers = [constant_wide(3.0, 0.0, 1.0, -1.0), constant_wide(0.0, 0.0, 1.0, 1.0)]
    found = trace(stream, vector(1.0, 1.0), sublayers, by=by)
    assert close(found.inputs[1][0], [1.630004, 0.684998], 1e-6)


def constant_wide(*values):
    return lambda *lanes: vector(*values)


def test_lr_attnres_weights_hand_values():
    stream = built("lr_attnres:rank=2")
    set_(stream, l1_mlp__query=[0.0, math.log(3) / 2])
    state = Keyed((vector(1.0, 1.0, 1.0, 1.0), vector(3.0, 0.0, 1.0, -1.0)))
    routing = stream.routing(state, stream.plan.sites[1])
    assert close(routing.weights, [0.684998, 0.315002], 1e-6)
    assert close(stream.read(state, stream.plan.sites[1], unchanged).lanes[0], [1.630004, 0.684998], 1e-6)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("key", ["projected", "sliced"])
def test_lr_attnres_zero_query_weighs_a_block_by_its_outputs(by, key):
    # outputs (2, 0) and (4, 0) are one source, their mean (3, 0) of two
    stream = built(f"lr_attnres:rank=2,block=2,key={key}")
    more = (0.5, 0.5) if key == "projected" else ()
    found = trace(stream, vector(1.0, 1.0), [constant_wide(2.0, 0.0, *more), constant_wide(4.0, 0.0, *more)], by=by)
    assert close(found.inputs[1][0], [1.5, 0.5])
    assert close(found.out, [7 / 3, 1 / 3])


@pytest.mark.parametrize("by", BY)
def test_lr_attnres_sliced_key_is_the_end_of_the_value(by):
    # with one channel a key is its sign: the query ln 3 / 2 weighs (1, 1) three times as much as (3, -2)
    stream = built("lr_attnres:rank=1,key=sliced,eps=1e-30")
    set_(stream, l1_mlp__query=[math.log(3) / 2])
    found = trace(stream, vector(1.0, 1.0), [constant(3.0, -2.0), constant(0.0, 1.0)], by=by)
    assert close(found.inputs[1][0], [0.75 + 0.25 * 3, 0.75 - 0.25 * 2])


@pytest.mark.parametrize(
    "spec", ["lr_attnres:rank=8,key=sliced", "lr_attnres:block=2", "lr_attnres:block=3,key=sliced"]
)
def test_lr_attnres_zero_queries_are_the_standard_stream(spec):
    generator, plan = torch.Generator().manual_seed(0), Plan.regular(8, 3)
    stream, standard = (residua.build(one, plan).double() for one in (spec, "standard"))
    sublayers, norms = toy_sublayers(plan, generator, stream), toy_norms(plan, generator, eps=0.0)
    x = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    cut = [lambda *lanes, f=f: f(*lanes)[..., :8] for f in sublayers]
    expected = run_stream(standard, x, cut, norms)
    assert (run_stream(stream, x, sublayers, norms) - expected).abs().max() < 1e-12


def test_lr_attnres_sliced_over_the_whole_width_is_attnres_with_a_scale():
    generator, plan = torch.Generator().manual_seed(0), Plan.regular(8, 3)
    ours, other = (residua.build(one, plan).double() for one in ("lr_attnres:rank=8,key=sliced", "attnres"))
    with torch.no_grad():
        for site in plan.readers[1:]:
            query = torch.randn(8, generator=generator, dtype=torch.float64)
            ours.part(site).query.copy_(query)
            other.part(site).query.copy_(query / 8**0.5)
    sublayers, norms = toy_sublayers(plan, generator), toy_norms(plan, generator)
    x = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    assert_close(run_stream(ours, x, sublayers, norms), run_stream(other, x, sublayers, norms))


def test_lr_attnres_widens_the_projections_that_there_are():
    config = Case("lr_attnres:rank=3", "conv,attn,mlp").config()
    model = Transformer(config)
    conv, attention, mlp = (
        next(s for s in model.sublayers() if s.site.kind == kind) for kind in ("conv", "attn", "mlp")
    )
    assert attention.o.out_features == mlp.down.out_features == 16 + 3
    assert {"embed", "l0_conv", "l1_conv", "l2_conv"} == set(model.stream.keys)
    assert model.stream.keys[conv.site.name].key.shape == (3, 16)


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        ("rank=0", "at least 1"),
        ("rank=3,key=sliced", "at most the width"),
        ("block=1,blocks=1", "not both"),
        ("key=full", "sliced"),
    ],
)
def test_lr_attnres_refuses(options, cure):
    with pytest.raises(ValueError, match=cure):
        built(f"lr_attnres:{options}")
