"""altup: hand values, the blocks of transformers' Gemma 3n, and the start that is the standard network."""

import math

import pytest
import torch

import residua
from residua import Plan
from residua.runner import unchanged
from residua.streams.altup import Streams
from residua.testing import Case, error, ids
from tests.streams.hand import BY, close, constant, trace, vector
from tests.streams.harness import randomise

GEMMA = "altup:streams=3,ple=4,laurel=2"


def built(spec, width=2, depth=1, layout=("mlp",), vocab=5):
    return residua.build(spec, Plan.regular(width, depth, layout, vocab=vocab)).double()


def test_altup_hand_values():
    stream = built("altup:streams=2")
    site = stream.plan.sites[0]
    part = stream.part(site)["altup"]
    H = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)[None, None]
    part.predictions = lambda x: torch.tensor([[0.1, 0.2], [0.3, 0.4]], dtype=torch.float64).expand(1, 1, 2, 2)
    part.corrections = lambda x: torch.tensor([1.5, 0.5], dtype=torch.float64).expand(1, 1, 2)
    read = stream.read(Streams(H), site, unchanged)
    assert close(read.lanes[0], [1.1, 0.2])
    assert close(read.carry[0], [1.1, 0.2, 0.3, 1.4])
    after = stream.write(Streams(H), site, read, vector(2.0, 2.0) - read.lanes[0])  # so that the block gives (2, 2)
    assert close(after.H, [2.45, 2.9, 0.75, 2.3])


def test_altup_coefficients_hand_values():
    # rmsnorm(3, 4) / 2 = (3, 4) / (2 sqrt(12.5)); the router takes the first channel and then the second
    stream = built("altup:streams=2,eps=1e-30")
    part = stream.part(stream.plan.sites[0])["altup"]
    with torch.no_grad():
        part.router.copy_(torch.eye(2))
        part.predict.copy_(torch.tensor([[1.0, 0], [0, 1], [2, 0], [0, 300]]))
        part.correct.copy_(torch.tensor([[1.0, 0], [0, -200]]))
    one, two = (math.tanh(v / (2 * 12.5**0.5)) for v in (3, 4))
    assert close(part.predictions(vector(3.0, 4.0)), [one, two, 2 * one, 120 * two])  # rows are the stream that is made
    assert close(part.corrections(vector(3.0, 4.0)), [1 + one, 1 - 120 * two])


@pytest.mark.parametrize("by", BY)
def test_altup_opens_and_closes_at_the_size_of_the_first_stream(by):
    stream = built("altup:streams=2,start=standard", depth=1)
    with torch.no_grad():
        stream.project.stream1.copy_(torch.tensor([[0.0, 2.0], [0.0, 0.0]]))  # (3, 4) to (8, 0)
        stream.part(stream.plan.head).stream1.copy_(torch.eye(2))
    assert close(stream.open(vector(3.0, 4.0)).H, [3, 4, 5, 0])
    # the block adds (1, 0) to both; (6, 0) is brought to the size of (4, 4)
    found = trace(stream, vector(3.0, 4.0), [constant(1.0, 0.0)], by=by)
    assert close(found.out, [(4 + 32**0.5) / 2, 2])


@pytest.mark.parametrize("options", ["", ",ple=3"])
def test_altup_standard_start_runs_the_standard_network_in_one_stream(options):
    ours = Case(f"altup:start=standard{options}").model(moved=False, eps=1e-30)
    plain = Case("standard").model(moved=False, eps=1e-30)
    assert error(ours(ids()), plain(ids())) < 1e-12


def theirs(width, streams, ple, laurel):
    """A tiny text configuration of Gemma 3n and its module."""
    gemma = pytest.importorskip("transformers.models.gemma3n.modeling_gemma3n")
    config = gemma.Gemma3nTextConfig(
        vocab_size=5, vocab_size_per_layer_input=5, hidden_size=width, hidden_size_per_layer_input=ple,
        intermediate_size=[12] * 2, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
        altup_num_inputs=streams, laurel_rank=laurel, rms_norm_eps=1e-6, num_kv_shared_layers=0, pad_token_id=0,
        layer_types=["full_attention"] * 2, activation_sparsity_pattern=[0.0, 0.0],
    )  # fmt: skip
    return gemma, config


def test_altup_equals_the_module_of_transformers():
    gemma, config = theirs(8, 3, 4, 2)
    module = gemma.Gemma3nTextAltUp(config).double().eval()
    stream = built("altup:streams=3", width=8)
    generator = torch.Generator().manual_seed(0)
    randomise(stream, generator)
    site = stream.plan.sites[0]
    part = stream.part(site)["altup"]
    names = {
        "router_norm": "gain",
        "modality_router": "router",
        "prediction_coefs": "predict",
        "correction_coefs": "correct",
    }
    with torch.no_grad():
        for name, ours in names.items():
            getattr(module, name).weight.copy_(getattr(part, ours))
    H = torch.randn(2, 5, 3, 8, generator=generator, dtype=torch.float64)
    act = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    predicted = module.predict(H.movedim(2, 0))
    read = stream.read(Streams(H), site, unchanged)
    assert error(read.carry[0].movedim(2, 0), predicted) < 1e-6  # their norm and tanh round to float32
    after = stream.write(Streams(H), site, read, act - read.carry[1])
    assert error(after.H.movedim(2, 0), module.correct(predicted, act)) < 1e-6


def test_altup_equals_the_decoder_of_gemma3n():
    """Every term at once: open, two blocks with laurel and the per-layer embeddings, and the head."""
    gemma, config = theirs(8, 3, 4, 2)
    torch.manual_seed(0)
    model = gemma.Gemma3nTextModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    stream = residua.build(GEMMA, Plan.regular(8, 2, vocab=5))
    _load(stream, model)
    tokens = torch.randint(5, (2, 6), generator=torch.Generator().manual_seed(1))
    context = _context(model, tokens)
    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).last_hidden_state
        x = model.embed_tokens(tokens)
        state = stream.open(x, ids=tokens)
        for site in stream.plan.sites:
            layer = model.layers[site.layer]
            attention = site.kind == "attn"
            before = layer.input_layernorm if attention else layer.pre_feedforward_layernorm
            read = stream.read(state, site, lambda x, before=before: (before(x),))
            if attention:
                y = layer.post_attention_layernorm(layer.self_attn(read.lanes[0], **context)[0])
            else:
                y = layer.post_feedforward_layernorm(layer.mlp(read.lanes[0]))
            state = stream.write(state, site, read, y)
        (found,) = stream.read(state, stream.plan.head, lambda x: (model.norm(x),)).lanes
    assert error(found, expected) < 2e-6


def _context(model, tokens):
    """What their attention wants beside its input."""
    places = torch.arange(tokens.shape[1])[None]
    rotation = model.rotary_emb(model.embed_tokens(tokens), places, "full_attention")
    mask = torch.full((tokens.shape[1],) * 2, float("-inf")).triu(1)[None, None]
    return {"position_embeddings": rotation, "attention_mask": mask, "shared_kv_states": {}}


@torch.no_grad()
def _load(stream, model):
    """Their weights in our places."""
    stream.lookup.table.copy_(model.embed_tokens_per_layer.weight)
    stream.lookup.project.copy_(model.per_layer_model_projection.weight)
    stream.lookup.gain.copy_(model.per_layer_projection_norm.weight)
    head = stream.part(stream.plan.head)
    for k in range(1, stream.streams):
        getattr(stream.project, f"stream{k}").copy_(model.altup_projections[k - 1].weight)
        getattr(head, f"stream{k}").copy_(model.altup_unembed_projections[k - 1].weight)
    for layer, block in enumerate(model.layers):
        part = stream.part(stream.plan.block(layer)[0])
        part["altup"].gain.copy_(block.altup.router_norm.weight)
        part["altup"].router.copy_(block.altup.modality_router.weight)
        part["altup"].predict.copy_(block.altup.prediction_coefs.weight)
        part["altup"].correct.copy_(block.altup.correction_coefs.weight)
        part["ple"].scale.copy_(block.altup.correct_output_scale)
        part["ple"].gate.copy_(block.per_layer_input_gate.weight)
        part["ple"].project.copy_(block.per_layer_projection.weight)
        part["ple"].gain.copy_(block.post_per_layer_input_norm.weight)
        part["laurel"].left.copy_(block.laurel.linear_left.weight)
        part["laurel"].right.copy_(block.laurel.linear_right.weight)
        part["laurel"].gain.copy_(block.laurel.post_laurel_norm.weight)


def test_altup_without_ids_says_what_it_needs():
    from residua.runner import Runner

    with pytest.raises(ValueError, match="pass ids"):
        Runner(built("altup:ple=2")).open(vector(1.0, 2.0))


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        ("streams=1", "use standard"),
        ("ple=-1", "0 for none"),
        ("laurel=3", "at most the width 2"),
        ("clip=-1.0", "0 for none"),
        ("laurel=1,start=standard", "drop one"),
    ],
)
def test_altup_refuses(options, cure):
    with pytest.raises(ValueError, match=cure):
        built(f"altup:{options}")
