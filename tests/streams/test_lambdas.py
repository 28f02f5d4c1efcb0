"""lambdas: the values of nanochat's schedule, U-Net skips, smear, and the start that is the standard network."""

import pytest
import torch

import residua
from residua import Plan
from residua.testing import Case, ids
from tests.streams.hand import BY, close, constant, set_, trace, vector

RELEASED = "lambdas:init=released"


def built(spec, width=1, depth=4, layout=("mlp",)):
    return residua.build(spec, Plan.regular(width, depth, layout)).double()


def test_lambdas_schedule_of_twelve_blocks():
    stream = built(RELEASED, depth=12, layout=("attn", "mlp"))
    found = {
        layer: tuple(getattr(stream.part(stream.plan.block(layer)[0]), name).item() for name in ("resid", "x0"))
        for layer in (0, 5, 11)
    }
    assert found[0] == pytest.approx((1.15, 0.2))
    assert found[5] == pytest.approx((1.104545, 0.131818), abs=1e-6)
    assert found[11] == pytest.approx((1.05, 0.05))
    assert stream.part(stream.plan.head).backout.item() == pytest.approx(0.2)
    assert sum(p.numel() for p in stream.parameters()) == 2 * 12 + 1


@pytest.mark.parametrize("by", BY)
def test_lambdas_hand_values(by):
    stream, states = built(RELEASED), []

    def doubling(x):
        states.append(2 * x)
        return x

    head = trace(stream, vector(1.0), [doubling] * 4, by=by).out
    assert [state.item() for state in states] == pytest.approx([2.7, 6.33, 13.915, 29.3215])
    assert head.item() == pytest.approx(26.5385)


@pytest.mark.parametrize("by", BY)
def test_lambdas_unet_hand_values(by):
    # outputs 1, 2, 3 and 4 from e = 1: after blocks 0 and 1 the state is 2 and 4; block 2 adds 4 + 4, block 3 adds 2
    stream = built("lambdas:skips=unet,backout=false")
    found = trace(stream, vector(1.0), [constant(v) for v in (1.0, 2.0, 3.0, 4.0)], by=by)
    assert [lanes[0].item() for lanes in found.inputs] == [1, 2, 8, 13]
    assert found.out.item() == 17
    set_(stream, l3_mlp__skip=[0.5], l3_mlp__resid=[2.0])  # the skip comes before the lambdas: 2 (11 + 1)
    assert trace(stream, vector(1.0), [constant(v) for v in (1.0, 2.0, 3.0, 4.0)], by=by).inputs[3][0].item() == 24


@pytest.mark.parametrize("by", BY)
def test_lambdas_unet_of_an_odd_depth_leaves_the_middle_block_alone(by):
    stream = built("lambdas:skips=unet,backout=false", depth=3)
    assert "at.l1_mlp.skip" not in dict(stream.named_parameters())
    found = trace(stream, vector(1.0), [constant(v) for v in (1.0, 2.0, 3.0)], by=by)
    assert [lanes[0].item() for lanes in found.inputs] == [1, 2, 6]


@pytest.mark.parametrize("by", BY)
def test_lambdas_of_sublayers_scale_what_is_kept_and_what_is_written(by):
    stream = built("lambdas:each=sublayer,backout=false", depth=1, layout=("attn", "mlp"))
    set_(stream, l0_attn__resid=[2.0], l0_attn__post=[3.0], l0_attn__x0=[0.5], l0_mlp__resid=[1.5], l0_mlp__post=[0.1])
    found = trace(stream, vector(4.0), [constant(10.0), constant(20.0)], by=by)
    assert [lanes[0].item() for lanes in found.inputs] == [4, 2 * 4 + 3 * 10 + 0.5 * 4]
    assert found.out.item() == pytest.approx(1.5 * 40 + 0.1 * 20)


def test_lambdas_of_sublayers_start_where_modded_nanogpt_does():
    stream = built("lambdas:each=sublayer,init=released", layout=("attn", "mlp"))
    parts = [stream.part(site) for site in stream.plan.sites]
    assert all(part.resid.item() == pytest.approx(1.1**0.5) and part.post.item() == 1 for part in parts)
    assert all(part.x0.item() == 0 for part in parts[::2])
    assert stream.part(stream.plan.head).backout.item() == 0.5


def test_lambdas_smear_hand_values():
    stream = built("lambdas:smear=true", width=2, depth=1)
    with torch.no_grad():
        stream.smear.weight.copy_(torch.tensor([0.0, 0.0]))
        stream.smear.scale.copy_(torch.tensor([0.5]))
    x = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]], dtype=torch.float64)
    state = stream.open(x)
    assert close(state.x, [1, 2, 3.25, 4.5, 5.75, 7])  # a quarter of the token before, as it was before it was smeared
    assert state.embed is state.x
    again = stream.open(x[:, 2:], stream.past(stream.open(x[:, :2])))
    assert close(again.x, [5.75, 7])


def test_lambdas_embedding_is_normed_without_a_gain():
    stream = built("lambdas:normed=true", width=2, depth=1)
    assert close(stream.open(vector(3.0, 4.0)).x, [0.848528, 1.131371], 1e-6)


@pytest.mark.parametrize("spec", ["lambdas", "lambdas:smear=true", "lambdas:each=sublayer"])
def test_lambdas_start_is_the_standard_network_to_the_bit(spec):
    ours, plain = Case(spec).model(moved=False), Case("standard").model(moved=False)
    assert torch.equal(ours(ids()), plain(ids()))


@pytest.mark.parametrize(("depth", "options", "built_"), [(1, "", 0), (2, "", 0), (3, "", 1), (3, ":middle=2", 0)])
def test_lambdas_backout_of_the_newest_state_is_not_built(depth, options, built_):
    names = dict(built(f"lambdas{options}", depth=depth).named_parameters())
    assert ("at.head.backout" in names) == bool(built_)


@pytest.mark.parametrize("case", ["", "skips=unet", "skips=unet,each=sublayer"])
@pytest.mark.parametrize("depth", [3, 4])
def test_lambdas_sources_are_states_after_blocks(case, depth):
    stream = built(f"lambdas:{case}" if case else "lambdas", depth=depth, layout=("attn", "mlp"))
    found = stream.sources(stream.plan.block(depth - 1)[0])
    embed = () if "sublayer" in case else ("embed",)
    skip = ("l0",) if "unet" in case else ()
    assert found == (*embed, *skip, f"l{depth - 2}")
    assert stream.sources(stream.plan.head) == (f"l{depth // 2}", f"l{depth - 1}")


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        ("middle=4", "0..3"),
        ("middle=-1", "0..3"),
        ("middle=1,backout=false", "backout=true"),
        ("skips=dense", "unet"),
        ("init=nanochat", "released"),
    ],
)
def test_lambdas_refuses(options, cure):
    with pytest.raises(ValueError, match=cure):
        built(f"lambdas:{options}")
