"""Value residuals: every form against the network written out, by hand values, and on any design."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import residua
from residua import Plan
from residua.model import Cache, ModelConfig, Transformer, token_loss
from residua.streams.value import FORMS, Sided
from residua.testing import Case, assert_close, error, ids

HEADS, WIDTH = 1, 8  # of keys and values, in the models of `Case`


def written_out(model: Transformer, form: str) -> Tensor:
    """The standard network with q, k and v in the open: nothing but its parameters is taken from the model."""
    weights = dict(model.named_parameters())
    tokens = ids()
    depth, h, first = model.config.depth, weights["embed.weight"][tokens], None
    places = torch.arange(tokens.shape[1], dtype=torch.float64)
    angle = places[:, None] * 10_000.0 ** (-torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)

    def normed(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + model.config.eps).sqrt() * weights[name][0]

    def turned(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin

    for layer in range(depth):
        at = f"blocks.{layer}.sublayers.0"
        x = normed(h, f"{at}.norm.weight")
        q, k = (x @ weights[f"{at}.{name}.weight"].T for name in ("q", "k"))
        v = x @ weights[f"{at}.v.weight"].T if f"{at}.v.weight" in weights else None
        first = v if first is None else first
        side = f"stream.side.l{layer}_attn"
        if form == "table" and layer % 2 == (depth - 1) % 2:
            gate = 3 * torch.sigmoid(x[..., :12] @ weights[f"{side}.gate.weight"].T)
            v = v + gate * weights[f"{side}.table.vectors"][tokens]
        elif form == "zero_table" and layer in (0, depth - 1):
            v = v + weights[f"{side}.table.vectors"][tokens]
        elif layer:
            if form == "resformer":
                v = 0.5 * v + 0.5 * first
            elif form == "learned":
                share = weights["stream.side.lambdas.logits"].exp()
                share = depth * share[layer - 1] / share.sum()
                v = weights["stream.side.lambdas.own"][layer - 1] * v + share * first
            elif form == "svformer":
                assert v is None
                v = first
            elif form == "mixed":
                m = torch.sigmoid(x @ weights[f"{side}.weight"].T + weights[f"{side}.bias"])
                v = first + m * (v - first)
            elif form == "satformer":
                v = v + torch.relu(x @ weights[f"{side}.weight"].T) * first
        q, k = (turned(each.unflatten(-1, (-1, WIDTH)).transpose(1, 2)) for each in (q, k))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(WIDTH)).masked_fill(
            torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool(), -math.inf
        )
        mixed = scores.softmax(-1) @ v[:, None]
        h = h + mixed.transpose(1, 2).flatten(-2) @ weights[f"{at}.o.weight"].T
        mlp = f"blocks.{layer}.sublayers.1"
        x = normed(h, f"{mlp}.norm.weight")
        gate, up = (x @ weights[f"{mlp}.{name}.weight"].T for name in ("gate", "up"))
        h = h + (F.silu(gate) * up) @ weights[f"{mlp}.down.weight"].T
    return normed(h, "norm.weight") @ weights["embed.weight"].T


@pytest.mark.parametrize("form", FORMS)
def test_form_is_the_network_written_out(form: str) -> None:
    model = Case(f"standard:value={form}").model()
    both, gradients = (model(ids()), written_out(model, form)), []
    assert error(*both) < 1e-12
    for logits in both:
        model.zero_grad()
        token_loss(logits, ids().roll(-1, 1)).backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    for name, gradient in gradients[1].items():
        assert error(gradients[0][name], gradient) < 1e-10, name


@pytest.mark.parametrize(
    ("form", "settings", "expected"),
    [
        ("resformer", {}, (0.5, 1.0)),
        ("mixed", {"bias": [math.log(0.25 / 0.75)]}, (0.75, 0.5)),  # m weighs the layer's own
        ("satformer", {"weight": [[0.5, 0.0]]}, (0.5, 2.0)),
        ("svformer", {}, (1.0, 0.0)),
        ("learned", {}, (2.0, 1.0)),  # two layers: lambda_1 = 2 softmax(0) = 2, lambda_2 = 1/2
    ],
)
def test_hand_values(form: str, settings: dict[str, list[float]], expected: tuple[float, float]) -> None:
    """V_1 = (1, 0) and v = (0, 2)."""
    stream = residua.build(f"standard:value={form}", Plan.regular(2, 2)).double()
    site = stream.plan.site("l1_attn")
    with torch.no_grad():
        for name, values in settings.items():
            getattr(stream.side[site.name], name).copy_(torch.tensor(values, dtype=torch.float64))
    x = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    first, v = torch.tensor([[[1.0, 0.0]]]).double(), torch.tensor([[[0.0, 2.0]]]).double()
    scale, shift = stream.given(Sided(x, (first,)), site, (x,))
    mixed = scale * v + shift
    assert mixed.flatten().tolist() == pytest.approx(expected, abs=1e-12)


def test_tables_stand_where_their_models_have_them() -> None:
    def sites(form: str, depth: int) -> list[str]:
        stream = residua.build(f"standard:value={form}", Plan.regular(16, depth, vocab=7))
        return list(stream.side)

    assert sites("table", 4) == ["l1_attn", "l3_attn"]
    assert sites("table", 3) == ["l0_attn", "l2_attn"]
    assert sites("zero_table", 4) == ["l0_attn", "l3_attn"]


def test_tables_start_as_published() -> None:
    stream = Transformer(ModelConfig(vocab=500, width=48, heads=4, depth=2, design="standard:value=table")).stream
    bound = math.sqrt(3 / 48)
    table, gate = stream.side["l1_attn"]["table"].vectors, stream.side["l1_attn"]["gate"].weight
    assert table.shape == (500, 48)
    assert 0.99 * bound < table.abs().max().item() <= bound
    assert table.std().item() == pytest.approx(1 / math.sqrt(48), rel=0.02)
    assert gate.shape == (4, 12)
    assert 0 <= gate.min().item() <= gate.max().item() <= 0.02


def test_values_wrap_any_design_and_leave_its_keys() -> None:
    for design in residua.names():
        plain, valued = (Case(spec).model() for spec in (design, f"{design}:value=mixed"))
        own = valued.stream
        assert own.name == design
        assert own.spec == f"{design}:value=mixed"
        extra = valued.state_dict().keys() - plain.state_dict().keys()
        assert {key.split(".")[1] for key in extra} == {"side"}
        assert plain.state_dict().keys() <= valued.state_dict().keys()
        for site in plain.plan.readers:
            assert own.sources(site) == plain.stream.sources(site)


def test_a_zero_table_changes_nothing_at_the_start() -> None:
    plain, tabled = (Case(spec).model(moved=False) for spec in ("standard", "standard:value=zero_table"))
    assert torch.equal(plain(ids()), tabled(ids()))
    assert tabled.stream.starts == "standard"


def test_the_cache_keeps_mixed_values() -> None:
    model = Case("standard:value=resformer").model()
    cache = Cache()
    with torch.no_grad():
        whole = model(ids())
        parts = [model(part, cache=cache) for part in ids().split([5, 1, 3], 1)]
    assert_close(torch.cat(parts, 1), whole, "decoded")
    keys, values = cache._slots["l1_attn"].tensors()[:2]
    sublayer = {each.site.name: each for each in model.sublayers()}
    steps = {step.site.name: step for step in model.walk(ids())}
    own = {name: sublayer[name].v(steps[name].read.lanes[0]) for name in ("l0_attn", "l1_attn")}
    expected = (own["l0_attn"] + own["l1_attn"]) / 2
    assert keys.shape == values.shape
    assert_close(values[:, 0, :9], expected, "cached values")


@pytest.mark.parametrize(
    ("spec", "layout", "message"),
    [
        ("standard:value=banana", "attn,mlp", "value takes resformer"),
        ("standard:value=resformer", "mlp", "this plan has 0"),
        ("standard:value=true", "attn,mlp", "value takes resformer"),
    ],
)
def test_wrong_values_are_one_error(spec: str, layout: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        residua.build(spec, Plan.regular(8, 2, layout))


def test_the_value_of_ddl_is_its_own() -> None:
    stream = residua.build("ddl:value=released", Plan.regular(8, 2))
    assert not stream.sided
    assert residua.build("ddl:value=resformer", Plan.regular(8, 2)).sided


def test_a_design_that_looks_up_tokens_says_so_without_them() -> None:
    from residua.runner import Runner

    stream = residua.build("standard:value=table", Plan.regular(8, 2, vocab=5))
    with pytest.raises(ValueError, match="was given embeddings alone"):
        Runner(stream).open(torch.zeros(1, 3, 8))
