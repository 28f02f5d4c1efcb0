"""Blocks that run several times: layouts with a loop."""

from __future__ import annotations

import pytest
import torch

import residua
from residua import Plan
from residua.model import Cache, ModelConfig, Transformer, measure, token_loss
from residua.plan import Loop, split_loop
from residua.testing import Case, assert_close, ids

DESIGNS = residua.names()


@pytest.mark.parametrize("design", DESIGNS)
def test_a_loop_of_one_pass_is_the_plain_network_to_the_bit(design: str) -> None:
    plain, looped = (Case(design, layout).model() for layout in ("attn,mlp", "attn,mlp,loop:passes=1"))
    assert torch.equal(plain(ids()), looped(ids()))
    assert plain.state_dict().keys() == looped.state_dict().keys()
    assert [site.name for site in plain.plan.readers] == [site.name for site in looped.plan.readers]


@pytest.mark.parametrize("design", ["standard", "delta:blocks=2", "mhc"])
def test_a_loop_is_the_deeper_network_whose_blocks_have_equal_weights(design: str) -> None:
    """Blocks 1 and 2 twice, against five blocks of which two pairs are copies; gradients of copies add up."""
    looped = Case(design, "attn,mlp,loop:passes=2:blocks=1..2").model(depth=4)
    deep = Case(design).model(depth=6)
    order = [0, 1, 2, 1, 2, 3]
    assert [block for block, _ in looped.plan.runs] == order
    names = {site.name: other.name for site, other in zip(looped.plan.readers, deep.plan.readers, strict=True)}
    weights = {}
    for key, value in looped.state_dict().items():
        part = key.split(".")
        if part[0] == "blocks":
            for layer in (layer for layer, block in enumerate(order) if block == int(part[1])):
                weights[".".join(["blocks", str(layer), *part[2:]])] = value
        elif part[:2] == ["stream", "at"]:
            weights[".".join(["stream", "at", names[part[2]], *part[3:]])] = value
        else:
            weights[key] = value
    deep.load_state_dict(weights)
    assert_close(looped(ids()), deep(ids()), "logits")
    for model in (looped, deep):
        token_loss(model(ids()), ids().roll(-1, 1)).backward()
    found = dict(deep.named_parameters())
    for name, parameter in looped.named_parameters():
        part = name.split(".")
        if part[0] == "blocks":
            copies = [
                found[".".join(["blocks", str(i), *part[2:]])].grad for i, b in enumerate(order) if b == int(part[1])
            ]
            assert_close(parameter.grad, sum(copies), name, gradient=True)


@pytest.mark.parametrize("between", ["norm", "add", "linear"])
def test_what_a_later_pass_begins_with(between: str) -> None:
    """On the standard stream: h becomes N(h), h + e or A [h; e] before the blocks run again."""
    model = Case("standard", f"attn,mlp,loop:passes=3:between={between}").model()
    if between == "linear":
        with torch.no_grad():
            model.begin.injection.weight.add_(torch.randn_like(model.begin.injection.weight) * 0.3)
    context, e = model.context(ids()), model.embed(ids())
    h = e
    for lap in range(3):
        if lap and between == "norm":
            (h,) = model.norm(h)
        elif lap:
            h = h + e if between == "add" else torch.cat([h, e], -1) @ model.begin.injection.weight.T
        for sublayer in model.sublayers():
            if sublayer is not model.begin:
                h = h + sublayer(*sublayer.norm(h), context=context)
    assert_close(model(ids()), model.logits(model.norm(h)[0]), "logits")
    with torch.no_grad():
        whole, cache = model(ids()), Cache()
        assert_close(torch.cat([model(part, cache=cache) for part in ids().split([4, 1, 4], 1)], 1), whole, "decoded")
    assert_close(model(ids(), checkpointed=True), whole, "checkpointed")
    sizes = measure(model.config, tokens=9)
    assert sizes.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert sizes.cache_floats * 8 * 2 == cache.nbytes  # float64, two rows


def test_a_linear_injection_starts_as_none() -> None:
    layouts = ("attn,mlp,loop:passes=2", "attn,mlp,loop:passes=2:between=linear")
    plain, injected = (Case("standard", layout).model(moved=False)(ids()) for layout in layouts)
    # one more write makes every writer smaller by sqrt(sublayers)
    assert plain.shape == injected.shape
    model = Case("standard", layouts[1]).model(moved=False)
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    assert model.begin.injection(x, torch.randn_like(x)).equal(x)


@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_end_before_the_last_passes(passes: int) -> None:
    """gradient=1 of 3: the network is the same, and its gradients are those of a last pass from a constant state."""
    whole = Case("standard", "attn,mlp,loop:passes=3").model()
    cut = Case("standard", f"attn,mlp,loop:passes=3:gradient={passes}").model()
    begun = 3 * (3 - passes)  # blocks before the first pass that has gradients
    assert torch.equal(whole(ids()), cut(ids()))
    assert cut.plan.cut == begun
    token_loss(cut(ids()), ids().roll(-1, 1)).backward()
    states = [step.state for step in whole.walk(ids())]
    h = states[2 * begun].detach()
    context = whole.context(ids())
    for sublayer in (*whole.sublayers(),) * passes:
        h = h + sublayer(*sublayer.norm(h), context=context)
    token_loss(whole.logits(whole.norm(h)[0]), ids().roll(-1, 1)).backward()
    other = dict(whole.named_parameters())
    for name, parameter in cut.named_parameters():
        assert_close(parameter.grad, other[name].grad, name, gradient=True)
    walked = list(cut.walk(ids()))[2 * begun].state
    assert not walked.requires_grad


def test_passes_share_the_parameters_of_a_design_where_they_can() -> None:
    own, shared = (
        Case("attnres", f"attn,mlp,loop:passes=3:stream={stream}").model(moved=False) for stream in ("own", "shared")
    )
    count = {model: sum(p.numel() for p in model.stream.parameters()) for model in (own, shared)}
    assert count[own] == 18 * 32
    assert count[shared] == 7 * 32  # six sublayers and the head
    stream = shared.stream
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter.normal_()
    assert torch.equal(stream.at["l1_mlp"].query, stream.at["l1p2_mlp"].query)
    assert measure(shared.config).stream_parameters == count[shared]
    logits = shared(ids())
    token_loss(logits, ids().roll(-1, 1)).backward()
    again = Case("attnres", "attn,mlp,loop:passes=3:stream=shared").model()
    again.load_state_dict(shared.state_dict())
    assert torch.equal(again(ids()), logits)
    with pytest.raises(ValueError, match="denseformer has a weight for every source"):
        Case("denseformer", "attn,mlp,loop:passes=2:stream=shared").model()


def test_values_of_the_first_layer_reach_every_pass() -> None:
    model = Case("standard:value=svformer", "attn,mlp,loop:passes=2").model()
    seen: list[torch.Tensor] = []
    context, h, first = model.context(ids()), model.embed(ids()), None
    for index, sublayer in enumerate([*model.sublayers()] * 2):
        (x,) = sublayer.norm(h)
        if sublayer.site.kind == "mlp":
            h = h + sublayer(x, context=context)
            continue
        if first is None:
            first = sublayer.v(x)
        zero = x.new_zeros(1)
        given = sublayer(x, context=context, values=(zero, first))
        seen.append(given.y if isinstance(given, tuple) else given)
        h = h + seen[-1]
        assert index < 12
    assert_close(model(ids()), model.logits(model.norm(h)[0]), "logits")


def test_plans_say_where_a_site_stands() -> None:
    plan = Plan.regular(8, 4, passes=3, loop=range(1, 3))
    assert [site.prefix for site in plan.sites if site.first] == [
        "l0",
        "l1",
        "l2",
        "l1p1",
        "l2p1",
        "l1p2",
        "l2p2",
        "l3",
    ]
    assert [site.layer for site in plan.sites if site.first] == list(range(8))
    assert plan.site("l2p1_mlp").lap == 1
    assert plan.depth == 8
    assert plan == Plan.regular(8, 4, "attn,mlp,loop:passes=3:blocks=1..2")
    items, loop = split_loop("attn,mlp,loop:passes=2:blocks=1:gradient=1")
    assert items == ["attn", "mlp"]
    assert loop == Loop(2, 1, 1, gradient=1)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("attn,mlp,loop", "write loop:passes=n"),
        ("attn,mlp,loop:passes=0", "passes must be at least 1"),
        ("attn,mlp,loop:passes=two", "invalid literal"),
        ("attn,mlp,loop:passes=2:blocks=2..1", "no range of blocks"),
        ("attn,mlp,loop:passes=2:blocks=1..9", "not within the blocks 0..2"),
        ("attn,mlp,loop:passes=2:between=magic", "between takes none"),
        ("attn,mlp,loop:passes=2:gradient=3", "gradient must be 1..2"),
        ("attn,mlp,loop:passes=2:stream=lent", "stream takes own"),
        ("attn,mlp,loop:passes=2:speed=3", "write loop:passes=n"),
        ("attn,mlp,loop:passes=2:passes=3", "once each"),
        ("attn,loop:passes=2,mlp", "at the end"),
        ("loop:passes=2", "at least one sublayer"),
    ],
)
def test_wrong_loops_are_one_error(layout: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(vocab=5, width=8, depth=3, heads=2, layout=layout)


def test_a_looped_model_writes_and_reads_its_configuration() -> None:
    config = Case("delta", "attn,mlp,loop:passes=2:blocks=1..2:between=norm").config()
    assert ModelConfig.from_json(config.to_json()) == config
    assert Transformer(config).plan.loop == Loop(2, 1, 2, "norm")
