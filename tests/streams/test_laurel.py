"""laurel: hand values of both forms, the start, and equality with the block that transformers ships."""

import math

import pytest
import torch

import residua
from residua import Plan
from residua.testing import Case, error, ids
from tests.streams.hand import BY, close, constant, set_, trace, vector


def built(spec, width=2, depth=1, layout=("attn", "mlp")):
    return residua.build(spec, Plan.regular(width, depth, layout)).double()


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(
    ("options", "weights", "expected"),
    [
        ("rank=1", None, [3 + 7 + 10, 4 + 20]),  # B A x = (7, 0)
        ("rank=1,weights=free", [0.5, 2.0], [0.5 * 10 + 2 * (3 + 7), 0.5 * 20 + 2 * 4]),
        ("rank=1,weights=softmax", [math.log(3), 0.0], [0.75 * 10 + 0.25 * 10, 0.75 * 20 + 0.25 * 4]),
        ("rank=0,weights=free", [0.5, 2.0], [0.5 * 10 + 2 * 3, 0.5 * 20 + 2 * 4]),
    ],
)
def test_laurel_hand_values(by, options, weights, expected):
    stream = built(f"laurel:{options}", layout=("mlp",))
    if "rank=1" in options:
        set_(stream, l0_mlp__down=[[1.0, 1.0]], l0_mlp__up=[[1.0], [0.0]])
    if weights:
        set_(stream, l0_mlp__weights=weights)
    assert close(trace(stream, vector(3.0, 4.0), [constant(10.0, 20.0)], by=by).out, expected)


@pytest.mark.parametrize("by", BY)
def test_laurel_hand_values_of_gemma3n(by):
    # laurel(u) = u + N(W_r W_l u) = (3, 4) + (sqrt 2, 0); the MLP writes plainly
    stream = built("laurel:form=gemma3n,rank=1,eps=1e-30")
    set_(stream, l0_attn__left=[[1.0, 1.0]], l0_attn__right=[[1.0], [0.0]])
    part = stream.part(stream.plan.sites[0])
    assert close(part(vector(3.0, 4.0)), [4.414214, 4.0], 1e-6)
    found = trace(stream, vector(3.0, 4.0), [constant(10.0, 20.0), constant(1.0, 2.0)], by=by)
    after = [(3 + 10 + 3 + 2**0.5) / 2**0.5, (4 + 20 + 4) / 2**0.5]
    assert close(found.inputs[1][0], after)
    assert close(found.out, [after[0] + 1, after[1] + 2])


def test_laurel_down_starts_orthogonal():
    down = built("laurel:rank=2", width=6, layout=("mlp",)).part(Plan.regular(6, 1, "mlp").sites[0]).down
    one = 12**-0.5
    assert close(down, [[one, 0, one, 0, one, 0], [0, one, 0, one, 0, one]], 1e-7)


@pytest.mark.parametrize("spec", ["laurel", "laurel:weights=free", "laurel:rank=0,weights=free"])
def test_laurel_start_is_the_standard_network_to_the_bit(spec):
    assert torch.equal(Case(spec).model(moved=False)(ids()), Case("standard").model(moved=False)(ids()))


def test_laurel_equals_the_block_of_transformers():
    gemma = pytest.importorskip("transformers.models.gemma3n.modeling_gemma3n")
    config = gemma.Gemma3nTextConfig(hidden_size=8, laurel_rank=3, rms_norm_eps=1e-6)
    theirs = gemma.Gemma3nTextLaurelBlock(config).double()
    stream = built("laurel:form=gemma3n,rank=3", width=8)
    part = stream.part(stream.plan.sites[0])
    generator = torch.Generator().manual_seed(0)
    names = {"left": "linear_left", "right": "linear_right", "gain": "post_laurel_norm"}
    with torch.no_grad():
        for ours, name in names.items():
            weight = getattr(theirs, name).weight
            weight.normal_(generator=generator)
            getattr(part, ours).copy_(weight)
    u = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    # their norm computes in float32 whatever the model; ours in the type it is given
    assert error(part(u), theirs(u)) < 1e-7


def test_laurel_share_is_what_the_product_adds():
    stream = built("laurel:rank=1", layout=("mlp",))
    set_(stream, l0_mlp__down=[[1.0, 1.0]], l0_mlp__up=[[1.0], [0.0]])
    site = stream.plan.sites[0]
    read = stream.read(vector(3.0, 4.0), site, lambda *lanes: lanes)
    assert stream.gates(vector(3.0, 4.0), site, read)["low_rank"].item() == pytest.approx(7 / 5)


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        ("rank=-1", "0..2"),
        ("rank=3", "the width"),
        ("rank=0", "use standard"),
        ("form=gemma3n,weights=free,rank=1", "drop weights"),
        ("form=gemma3n,rank=0", "drop weights and rank=0"),
        ("rank=1,eps=1e-5", "form=gemma3n alone"),
    ],
)
def test_laurel_refuses(options, cure):
    with pytest.raises(ValueError, match=cure):
        built(f"laurel:{options}")
