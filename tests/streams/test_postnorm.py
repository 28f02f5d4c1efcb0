"""Norms of the stream: every form by hand, post as the original Transformer, and where the backbone has no norm."""

import math

import pytest
import torch
from torch.nn import functional as F

import residua
from residua import Plan, ops
from residua.model import ModelConfig, Transformer
from residua.ops.window_attend.position import rotate
from residua.testing import Case, assert_close, ids
from tests.streams.hand import BY, close, set_, trace, vector
from tests.streams.harness import compare, run_stream, toy_sublayers


def rms(x):
    return x / x.square().mean(-1, keepdim=True).sqrt()


def first(x):
    """f(x) = (2 x_0, 0)."""
    return x * vector(2, 0)


ONE_STEP = {
    # from (3, 4), with gains of 1 and no eps
    "form=post": (1.292325, 0.574367),
    "form=deepnorm,alpha=2.0": (1.176697, 0.784465),
    "form=keel,alpha=4.0": (0.919691, 1.074322),
    "form=mixln,share=1.0": (1.292325, 0.574367),
    "form=mixln,share=1.0,alpha=2.0": (1.176697, 0.784465),
    "form=hybrid,first=pre": (4.697056, 4),
    "form=hybrid": (3 * 0.848528, 1.131371),  # an mlp: N(x) + f(N(x))
}


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("options", ONE_STEP)
def test_postnorm_step_by_hand(options, by):
    eps = "" if "hybrid" in options else ",eps=0"  # which has no norm of its own
    stream = residua.build(f"postnorm:{options}{eps}", Plan.regular(2, 1, "mlp")).double()
    out = trace(stream, vector(3, 4), [first], [rms, lambda x: x], by=by).out
    assert close(out, ONE_STEP[options], 1e-6)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(("form", "out"), [("resi_dual", (2.735716, 0.668817)), ("siamese", (2.782242, 0.448556))])
def test_two_streams_by_hand(form, out, by):
    """Two steps from (3, 4): what separates the two is what a sublayer reads."""
    stream = residua.build(f"postnorm:form={form},eps=0", Plan.regular(2, 1)).double()
    assert close(trace(stream, vector(3, 4), [first, first], [rms] * 3, by=by).out, out, 1e-6)


@pytest.mark.parametrize("by", BY)
def test_hybrid_block_by_hand(by):
    """(3, 4) + att = (9, 4); its norm, (1.292325, 0.574367), is the stream that the MLP adds to; the head norms."""
    stream = residua.build("postnorm:form=hybrid", Plan.regular(2, 1)).double()
    inputs, out = trace(stream, vector(3, 4), [first, first], [rms, rms, lambda x: x], by=by)
    assert close(inputs[0][0], (3, 4))
    assert close(inputs[1][0], (1.292325, 0.574367), 1e-6)
    assert close(out, (3 * 1.292325, 0.574367), 1e-5)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(("share", "post"), [(0.25, 1), (0.5, 2), (0.51, 3), (1.0, 4)])
def test_mixln_norms_the_first_blocks(share, post, by):
    """Norms that halve, after sublayers that answer zero: the backbone's act on reads, the design's on the stream."""
    stream = residua.build(f"postnorm:form=mixln,share={share},eps=0", Plan.regular(2, 4)).double()
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter.fill_(0.5)
    inputs, out = trace(stream, vector(1, 1), [torch.zeros_like] * 8, [lambda x: x / 10] * 8 + [rms], by=by)
    for place, (x,) in enumerate(inputs):
        block = place // 2
        held = 0.5 if place else 1.0
        assert close(x, (held, held) if block < post else (0.05, 0.05)), place
    assert close(out, (0.5, 0.5) if post == 4 else (1, 1))
    takes = [stream.takes_norm(site) for site in stream.plan.readers]
    assert takes == [False] * 2 * post + [True] * (8 - 2 * post) + [post < 4]


@pytest.mark.parametrize("layout", [("attn", "mlp"), ("mlp", "attn", "conv")], ids=",".join)
def test_post_is_the_standard_design_with_norm_post(layout):
    """The norms are the same; there a reader holds the one of what it reads, here a writer that of what it wrote."""
    generator = torch.Generator().manual_seed(0)
    plan = Plan.regular(8, 3, layout)
    sublayers = toy_sublayers(plan, generator)
    gains = [1 + 0.3 * torch.randn(8, generator=generator, dtype=torch.float64) for _ in plan.readers]
    norms = [lambda x, gain=gain: ops.rms_norm(x, 1e-6, gain) for gain in gains]
    x = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    stream = residua.build("postnorm:form=post,embed=normed", plan).double()
    with torch.no_grad():
        stream.embed.gain.copy_(gains[0])
        for site, gain in zip(plan.sites, gains[1:], strict=True):
            stream.part(site).gain.copy_(gain)
    expected = run_stream(residua.build("standard:norm=post", plan), x, sublayers, norms)
    assert torch.equal(run_stream(stream, x, sublayers, norms), expected)

    plain = residua.build("postnorm", plan).double()
    plain.load_state_dict({k: v for k, v in stream.state_dict().items() if k.startswith("at.")})
    assert torch.equal(run_stream(plain, norms[0](x), sublayers, norms), expected)


def test_post_and_standard_post_are_one_model():
    """Two Transformers of one seed: the same parameters in other places, the same logits."""
    own = Case("postnorm:embed=normed,eps=1e-9").model(moved=False)
    other = Case("standard:norm=post").model(moved=False)
    count = [sum(p.numel() for p in model.parameters()) for model in (own, other)]
    assert count[0] == count[1]
    assert torch.equal(own(ids()), other(ids()))
    assert not any("norm" in name for name, _ in own.named_parameters())


@pytest.mark.parametrize(
    ("form", "sites", "head"),
    [
        ("post", [False, False], False),
        ("deepnorm", [False, False], False),
        ("keel", [True, True], False),
        ("resi_dual", [False, False], True),
        ("siamese", [True, True], True),
        ("hybrid", [False, True], True),
        ("hybrid,first=pre", [True, True], True),
        ("mixln", [False, False], True),
    ],
)
def test_backbone_has_a_norm_only_where_one_is_read_through(form, sites, head):
    model = Case(f"postnorm:form={form}").model(depth=2)
    kinds = [type(each.norm).__name__ for each in model.sublayers()]
    assert kinds[:2] == ["LaneNorm" if norm else "NoNorm" for norm in sites]
    assert type(model.norm).__name__ == ("LaneNorm" if head else "NoNorm")


@pytest.mark.parametrize(("layout", "alpha"), [("attn,mlp", 2.0), ("attn,mlp,mlp,mlp", 32**0.25)])
def test_deepnorm_alpha_counts_sublayers(layout, alpha):
    """(2L)^(1/4) for the L blocks of the paper: L = 8 gives 2."""
    assert residua.build("postnorm:form=deepnorm", Plan.regular(4, 8, layout)).alpha == pytest.approx(alpha)


def test_keel_alpha_is_the_number_of_sublayers():
    assert residua.build("postnorm:form=keel", Plan.regular(4, 8)).alpha == 16


def test_keel_with_a_large_alpha_leaves_the_direction():
    """N(alpha x + f(N(x))) with alpha to infinity is N(x): what a deep stack keeps of its embedding."""
    stream = residua.build("postnorm:form=keel,alpha=1e9,eps=0", Plan.regular(2, 3)).double()
    assert close(trace(stream, vector(3, 4), [first] * 6, [rms] * 7).out, (0.848528, 1.131371), 1e-5)


def test_siamese_reads_both_streams_and_resi_dual_one():
    for form, fed in (("resi_dual", (3, 4)), ("siamese", (3.848528, 5.131371))):
        stream = residua.build(f"postnorm:form={form},eps=0", Plan.regular(2, 1)).double()
        assert close(trace(stream, vector(3, 4), [first, first], [rms] * 3).inputs[0][0], fed, 1e-6)


def test_sum_beside_the_normed_stream_is_never_scaled():
    """A pre-norm path: the gradient of y with respect to the embedding is the identity where sublayers answer zero."""
    x = torch.randn(4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for form in ("resi_dual", "siamese"):
        stream = residua.build(f"postnorm:form={form}", Plan.regular(4, 3)).double()

        def total(e, stream=stream):
            state = stream.open(e[None, None])
            for site in stream.plan.sites:
                read = stream.read(state, site, lambda *lanes: lanes)
                state = stream.write(state, site, read, torch.zeros_like(read.lanes[0]))
            return state.total[0][0, 0]

        assert torch.equal(torch.func.jacrev(total)(x), torch.eye(4, dtype=torch.float64))


@pytest.mark.parametrize("first", ["same", "pre"])
def test_hybrid_with_its_layout_is_the_paper(first):
    """Norms on q, k and v inside attention, written out with the model's own weights."""
    config = ModelConfig(
        vocab=23, width=16, depth=2, heads=2, mlp_width=24, init_std=0.3, layout="attn:heads_norm=qkv,mlp",
        design=f"postnorm:form=hybrid,first={first}",
    )  # fmt: skip
    model = Transformer(config, seed=1).double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    context = model.context(ids())

    def normed(x, norm):
        return x / (x.square().mean(-1, keepdim=True) + config.eps).sqrt() * norm.weight[0]

    def attention(f, x):
        q, k, v = (getattr(f, name)(x).unflatten(-1, (2, 8)) for name in "qkv")
        q, k, v = (normed(one, norm).transpose(1, 2) for one, norm in ((q, f.q_norm), (k, f.k_norm), (v, f.v_norm)))
        cos, sin = context.rotation
        scores = rotate(q, cos, sin) @ rotate(k, cos, sin).transpose(-1, -2) / math.sqrt(8)
        seen = torch.ones(9, 9, dtype=torch.bool).tril()
        mixed = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
        return f.o(mixed.transpose(1, 2).flatten(-2))

    def mlp(f, x):
        return f.down(F.silu(f.gate(x)) * f.up(x))

    h = model.embed(ids())
    for block, (attn, ffn) in enumerate(each.sublayers for each in model.blocks):
        if block == 0 and first == "pre":
            h = h + attention(attn, normed(h, attn.norm))
            h = h + mlp(ffn, normed(h, ffn.norm))
        else:
            h = h + attention(attn, h)
            h = normed(h, ffn.norm)
            h = h + mlp(ffn, h)
    assert_close(model(ids()), model.logits(normed(h, model.norm)), "logits")


def test_postnorm_parameter_count():
    """One gain a sublayer where the stream is normalised, and none where a reader norms."""
    for spec, gains in (("", 24), ("embed=normed", 25), ("form=siamese", 24), ("form=hybrid", 0), ("form=mixln", 6)):
        stream = residua.build(f"postnorm:{spec}" if spec else "postnorm", Plan.regular(8, 12))
        assert sum(p.numel() for p in stream.parameters()) == 8 * gains


@pytest.mark.parametrize("form", ["deepnorm", "siamese", "mixln"])
def test_postnorm_equals_its_oracle_at_another_depth(form):
    assert max(compare(f"postnorm:form={form}", ("attn", "mlp"), depth=7).values()) < 1e-10


def test_gain_moves_what_the_next_sublayer_reads():
    stream = residua.build("postnorm:eps=0", Plan.regular(2, 1)).double()
    set_(stream, l0_attn__gain=[10, 1])
    inputs = trace(stream, vector(3, 4), [first, first]).inputs
    assert close(inputs[1][0], (12.92325, 0.574367), 1e-5)


@pytest.mark.parametrize(
    ("spec", "error", "cure"),
    [
        ("postnorm:form=pre", ValueError, "form takes post|deepnorm|keel|resi_dual|siamese|hybrid|mixln"),
        ("postnorm:alpha=2.0", ValueError, "alpha belongs to form=deepnorm|keel|mixln; form=post has none"),
        ("postnorm:form=keel,share=0.5", ValueError, "share belongs to form=mixln"),
        ("postnorm:form=hybrid,eps=0.5", ValueError, "eps has no effect with form=hybrid and embed=raw"),
        ("postnorm:first=pre", ValueError, "first belongs to form=hybrid"),
        ("postnorm:form=mixln,share=0", ValueError, "above 0 and at most 1"),
        ("postnorm:form=mixln,share=1.5", ValueError, "above 0 and at most 1"),
        ("postnorm:form=keel,alpha=-1.0", ValueError, "alpha must be above 0"),
        ("postnorm:embed=true", ValueError, "embed takes raw|normed"),
        ("postnorm:beta=2.0", TypeError, "options: form, alpha, share, first, embed, eps"),
    ],
)
def test_postnorm_refusal_names_the_cure(spec, error, cure):
    with pytest.raises(error) as caught:
        residua.build(spec, Plan.regular(2, 2))
    assert cure in str(caught.value)
