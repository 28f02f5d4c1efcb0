"""Where the norms of a sublayer stand: by hand, written out, cached, counted, refused, and under two other designs."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import residua
from residua.model import Cache, ModelConfig, Transformer, sizes_of
from residua.model.norms import LaneNorm, NoNorm
from residua.model.sublayers import make_sublayer
from residua.ops.window_attend.position import rotate
from residua.plan import parse_layout
from residua.testing import LAWS, Case, assert_close, ids

OLMO = "attn:norm=reordered:heads_norm=qk,mlp:norm=reordered"
GEMMA = "attn:norm=both,mlp:norm=both"
SCALED = "attn:scaled=true,mlp:scaled=true"
QKV = "attn:heads_norm=qkv,mlp"
MIXED = "swa:window=3:norm=both:scaled=true,attn:heads_norm=qkv,mlp:norm=reordered"
LAYOUTS = (OLMO, GEMMA, SCALED, QKV, MIXED)


class First(nn.Module):
    """f(x) = (2 x_0, 0)."""

    def forward(self, x):
        return x * x.new_tensor([2.0, 0.0])


@pytest.mark.parametrize(
    ("options", "layer", "expected"),
    [
        ("", 0, (4.697056, 4)),
        (":norm=pre", 0, (4.697056, 4)),
        (":norm=reordered", 0, (4.414214, 4)),
        (":norm=both", 0, (4.414214, 4)),
        (":scaled=true", 3, (3.848528, 4)),
        (":scaled=true", 0, (4.697056, 4)),
        (":norm=both:scaled=true", 3, (4.414214, 4)),
    ],
)
def test_placement_by_hand(options, layer, expected):
    """One step of the standard stream from (3, 4), gains of 1 and no eps."""
    config = ModelConfig(vocab=3, width=2, depth=4, heads=1, layout="mlp" + options, eps=0.0)
    (slot,) = parse_layout(config.layout)
    stream = residua.build("standard", config.plan)
    made = make_sublayer(config, config.plan.site(f"l{layer}_mlp"), slot, stream).double()
    made.forward = lambda x, context: First()(x)
    h = torch.tensor([[[3.0, 4.0]]], dtype=torch.float64)
    read = stream.read(h, made.site, made.norm)
    after = stream.write(h, made.site, read, made.answer(read, None))
    assert after.flatten().tolist() == pytest.approx(expected, abs=1e-6)


def built(layout, design="standard", **settings):
    """A model whose gains are not 1."""
    model = Case(design, layout).model(**settings)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def written_out(model, tokens):
    """The whole model again, from its weights and the text of its layout."""
    positions = model.context(tokens).rotation

    def normed(x, norm):
        return x / (x.square().mean(-1, keepdim=True) + model.config.eps).sqrt() * norm.weight[0]

    def heads(f, x, slot):
        q, k, v = (getattr(f, name)(x).unflatten(-1, (-1, 8)) for name in "qkv")
        kinds = str(slot.options.get("heads_norm", "none"))
        q, k = (normed(q, f.q_norm), normed(k, f.k_norm)) if kinds.startswith("qk") else (q, k)
        v = normed(v, f.v_norm) if kinds == "qkv" else v
        q, k = (rotate(one.transpose(1, 2), *positions) for one in (q, k))
        count = x.shape[1]
        seen = torch.ones(count, count, dtype=torch.bool).tril()
        if slot.kind == "swa":
            seen = seen.triu(1 - int(slot.options["window"]))
        scores = q @ k.transpose(-1, -2) / math.sqrt(8)  # one key head for all
        mixed = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v.transpose(1, 2)
        return f.o(mixed.transpose(1, 2).flatten(-2))

    h = model.embed(tokens)
    for layer, block in enumerate(model.blocks):
        for f, slot in zip(block.sublayers, model.config.slots, strict=True):
            where = slot.options.get("norm", "pre")
            x = h if where == "reordered" else normed(h, f.norm)
            x = x / math.sqrt(layer + 1) if slot.options.get("scaled") else x
            y = f.down(F.silu(f.gate(x)) * f.up(x)) if slot.kind == "mlp" else heads(f, x, slot)
            h = h + (y if where == "pre" else normed(y, f.out_norm))
    return model.logits(normed(h, model.norm))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_model_is_its_formula(layout):
    """Output and the gradient of every parameter."""
    model = built(layout)
    found, expected = model(ids()), written_out(model, ids())
    assert_close(found, expected, "logits")
    probe = torch.randn(found.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    names, parameters = zip(*model.named_parameters(), strict=True)
    pairs = (torch.autograd.grad((out * probe).sum(), parameters) for out in (found, expected))
    for name, one, other in zip(names, *pairs, strict=True):
        assert_close(one, other, name, gradient=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_decoding_is_the_forward(layout):
    model = built(layout)
    with torch.no_grad():
        whole = model(ids())
        for chunks in ([1] * 9, [4, 1, 4]):
            cache = Cache()
            parts = [model(part, cache=cache) for part in ids().split(chunks, 1)]
            assert_close(torch.cat(parts, 1), whole, f"chunks of {chunks}")


@pytest.mark.parametrize(
    ("layout", "norms", "gains"),
    [
        ("attn,mlp", 7, 7 * 16),
        (OLMO, 7, 7 * 16 + 3 * 2 * 8),  # as many as pre-norm, and the heads'
        (GEMMA, 13, 13 * 16),
        (SCALED, 7, 7 * 16),
        (QKV, 7, 7 * 16 + 3 * 3 * 8),
    ],
)
def test_norms_are_counted(layout, norms, gains):
    """Parameters as they are; of the operations, 4 d for every norm of a stream's width."""
    case = Case("standard", layout)
    model, sizes, plain = case.model(), sizes_of(case.config(), 9), sizes_of(Case("standard").config(), 9)
    assert sizes.parameters == sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for name, p in model.named_parameters() if "norm" in name) == gains
    assert sizes.flops_per_token - plain.flops_per_token == 4 * 16 * (norms - 7)
    assert sizes.cache_floats == plain.cache_floats


def test_norms_that_a_design_owns_are_not_the_backbones():
    """postnorm without a norm before any sublayer or the head: seven norms fewer, and six gains of its own."""
    own, plain = (sizes_of(Case(spec).config(), 9) for spec in ("postnorm", "standard"))
    assert own.parameters - plain.parameters == (6 - 7) * 16
    backbone = own.flops_per_token - own.stream_flops_per_token
    assert plain.flops_per_token - plain.stream_flops_per_token - backbone == 4 * 16 * 7


def test_what_stands_where():
    model = Case("standard", "attn:norm=reordered,mlp:norm=both").model()
    attention, mlp = model.blocks[1].sublayers
    assert isinstance(attention.norm, NoNorm)
    assert isinstance(mlp.norm, LaneNorm)
    assert all(isinstance(each.out_norm, LaneNorm) for each in (attention, mlp))
    assert Case("standard").model().blocks[1].sublayers[0].out_norm is None
    x = torch.ones(1, 1, 2)
    assert NoNorm()(x, x) == (x, x)


def test_heads_norm_is_the_qk_norm_of_the_model():
    """One option of a layout for what is a setting of the whole model: the same bits, and no second pair."""
    layout = Case("standard", "attn:heads_norm=qk,mlp").model()
    setting = Case("standard").model(qk_norm=True)
    both = Case("standard", "attn:heads_norm=qk,mlp").model(qk_norm=True)
    assert torch.equal(layout(ids()), setting(ids()))
    assert torch.equal(both(ids()), setting(ids()))
    assert both.state_dict().keys() == setting.state_dict().keys()


def test_a_norm_behind_forgets_the_size_of_an_output():
    model = built(GEMMA, eps=0.0)
    before = model(ids())
    with torch.no_grad():
        for each in model.sublayers():
            for writer in each.writers():
                writer.mul_(3)
    assert_close(model(ids()), before, "logits")


@pytest.mark.parametrize("layout", [OLMO, GEMMA, QKV])
def test_gains_start_at_one(layout):
    model = Transformer(Case("standard", layout).config(), seed=3)
    assert all(bool((p == 1).all()) for name, p in model.named_parameters() if "norm" in name)


@pytest.mark.parametrize(
    ("layout", "error", "cure"),
    [
        ("attn,mlp:norm=post", ValueError, "normalises the stream and not the sublayer; use the design postnorm"),
        ("attn,mlp:norm=post", ValueError, "layout item mlp:norm=post"),
        ("attn,mlp:norm=sandwich", ValueError, "norm takes pre|both|reordered"),
        ("attn:norm=reordered:scaled=true,mlp", ValueError, "norm=reordered has none"),
        ("attn,mlp:scaled=2", ValueError, "scaled takes true|false"),
        ("attn:heads_norm=v,mlp", ValueError, "heads_norm takes none|qk|qkv"),
        ("attn,mlp:heads_norm=qk", TypeError, "layout item mlp:heads_norm=qk"),
    ],
)  # fmt: skip
def test_refusal_names_the_cure(layout, error, cure):
    with pytest.raises(error) as caught:
        Case("standard", layout).model()
    assert cure in str(caught.value)


def test_a_wider_output_has_no_norm_behind():
    """What the extra channels would be normalised with is not said anywhere."""

    class Wider(residua.Stream):
        """h <- h + f(norm(h))[:d]."""

        paper = "none: a test"
        starts = "standard"
        spec = "wider"

        def open(self, x, past=None):
            return x

        def read(self, h, site, norm):
            return residua.Read(norm(h))

        def write(self, h, site, read, y):
            return h + y[..., : h.shape[-1]]

        def extra(self, site):
            return 2

    config = Case("standard", "attn:norm=both,mlp").config()
    with pytest.raises(ValueError, match="more channels than the width from l0_attn; use norm=pre"):
        make_sublayer(config, config.plan.site("l0_attn"), config.slots[0], Wider(config.plan))


@pytest.mark.parametrize("name", [name for name in LAWS if name not in ("one_graph", "starts_as_declared")])
@pytest.mark.parametrize("spec", ["hyper:streams=2", "postnorm:form=siamese"])
def test_laws_hold_where_norms_stand_elsewhere(spec, name):
    LAWS[name](Case(spec, MIXED))


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "layout"), [("attnres", GEMMA), ("postnorm:form=hybrid", QKV)])
def test_model_with_placed_norms_is_one_graph(spec, layout):
    LAWS["one_graph"](Case(spec, layout))


@pytest.mark.parametrize("layout", [GEMMA, SCALED, QKV])
@pytest.mark.parametrize("spec", ["attnres", "highway:start=1.0"])
def test_designs_start_as_declared_where_a_norm_is_read_through(spec, layout):
    LAWS["starts_as_declared"](Case(spec, layout))


def test_a_read_that_is_scaled_shows_where_no_norm_forgets_it():
    """AttnRes starts as the mean of its sources, which is the standard network only behind a norm."""
    with pytest.raises(AssertionError, match="declared to start as the standard network"):
        LAWS["starts_as_declared"](Case("attnres", OLMO))
