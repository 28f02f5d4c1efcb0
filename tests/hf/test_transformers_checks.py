"""The checks that transformers' classes of model and generation tests make, on converted models: the package comes
without its tests."""

import copy
import inspect
from functools import cache

import pytest
import torch
import torch._dynamo
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, CompileConfig, DynamicCache, StaticCache

from residua.testing import error
from tests.hf.models import VOCAB, base, converted, ids

GREEDY = {"max_new_tokens": 4, "do_sample": False}
DESIGN = "delta:blocks=2"
KEEPING = {"ddl:channels=2,compress=token": None, "attnres:blocks=2": "swa:window=3,attn,canon,mlp"}
ARCHITECTURES = ("llama", "gpt2", "mistral", "qwen3", "qwen3_moe", "mixtral", "gemma2", "gemma3_text")
CASES = [(each, DESIGN) for each in ARCHITECTURES] + [("llama", design) for design in KEEPING]
EVERY = pytest.mark.parametrize(("architecture", "design"), CASES)


@cache
def _model(architecture, design):
    return converted(architecture, design, layout=KEEPING.get(design), moved=True).eval()


def made(architecture, design):
    """The same model for all checks that only look at it."""
    return _model(architecture, design)


def own(architecture, design):
    """One to change."""
    return copy.deepcopy(_model(architecture, design))


def backbone_of(model):
    return model.base_model


@EVERY
def test_forward_has_the_signature_of_the_base(architecture, design):
    plain, model = base(architecture), made(architecture, design)
    for one, other in ((plain, model), (backbone_of(plain), backbone_of(model))):
        assert list(inspect.signature(one.forward).parameters) == list(inspect.signature(other.forward).parameters)


@EVERY
@torch.no_grad()
def test_outputs_are_the_same_as_tuple_dict_batch_and_row(architecture, design):
    model = made(architecture, design)
    asked = {"output_hidden_states": True, "use_cache": False}
    found = model(ids(), **asked)
    pairs = zip(model(ids(), return_dict=False, **asked), found.to_tuple(), strict=True)
    for one, other in pairs:
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other)
        else:
            assert all(map(torch.equal, one, other))
    rows = torch.cat([model(row[None]).logits for row in ids()])
    assert error(rows, found.logits) < 2e-6
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids()), use_cache=False).logits
    assert error(embedded, found.logits) < 2e-6


@EVERY
def test_attentions_and_hidden_states_have_their_shapes_and_gradients(architecture, design):
    model = own(architecture, design)
    model.set_attn_implementation("eager")
    found = model(ids(), output_attentions=True, output_hidden_states=True, use_cache=False)
    layers = model.config.num_hidden_layers
    assert [tuple(each.shape) for each in found.attentions] == [(2, 4, 9, 9)] * layers
    assert [tuple(each.shape) for each in found.hidden_states] == [(2, 9, 32)] * (layers + 1)
    kept = (found.hidden_states[0], found.attentions[0])
    for each in kept:
        each.retain_grad()
    found.logits.flatten()[0].backward(retain_graph=True)
    assert all(each.grad is not None for each in kept)


@EVERY
def test_saved_config_and_fresh_model_are_alike(architecture, design, tmp_path):
    model = made(architecture, design)
    model.config.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config._name_or_path = model.config._name_or_path
    assert config.to_dict() == model.config.to_dict()
    fresh = AutoModelForCausalLM.from_config(config)
    assert {name: each.shape for name, each in fresh.named_parameters()} == {
        name: each.shape for name, each in model.named_parameters()
    }
    assert all(each.isfinite().all() for each in fresh.parameters())
    assert type(model.config)().stream is None  # made without arguments


@EVERY
def test_missing_weights_are_started(architecture, design, tmp_path):
    """A checkpoint that lacks everything: no parameter stays on the meta device or as memory held it."""
    model = own(architecture, design)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = type(model)(model.config)
    empty.to_empty(device="cpu")
    with torch.no_grad():
        for each in empty.parameters():
            each.fill_(torch.nan)
    for module in empty.modules():
        module._is_hf_initialized = False
    empty.init_weights()
    assert all(each.isfinite().all() for each in empty.parameters())


@EVERY
def test_embeddings_are_replaced_and_resized(architecture, design):
    model = own(architecture, design)
    assert isinstance(model.get_input_embeddings(), nn.Embedding)
    with torch.no_grad():
        before = model(ids()).logits
        model.resize_token_embeddings(VOCAB + 10)
        grown = model(ids()).logits
        assert grown.shape[-1] == VOCAB + 10
        assert error(grown[..., :VOCAB], before) < 2e-6
        model.resize_token_embeddings(VOCAB - 5)
        assert model(ids() % (VOCAB - 5)).logits.shape[-1] == VOCAB - 5
    assert model.config.vocab_size == VOCAB - 5
    model.set_input_embeddings(nn.Embedding(7, 32))
    assert model.get_input_embeddings().num_embeddings == 7


@EVERY
def test_training_reaches_every_parameter(architecture, design):
    model = own(architecture, design).train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    model(ids(), labels=ids(), use_cache=False).loss.backward()
    assert not [name for name, each in model.named_parameters() if each.grad is None]
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


@EVERY
@torch.no_grad()
def test_mask_of_four_axes_is_that_of_two(architecture, design):
    model = made(architecture, design)
    triangle = torch.tril(torch.ones(9, 9, dtype=torch.bool))[None, None].expand(2, 1, -1, -1)
    if architecture in ("mistral", "gemma2", "gemma3_text"):  # whose windows such a mask would have to hold too
        tokens = ids()[:, :5]
        triangle = triangle[..., :5, :5]
    else:
        tokens = ids()
    additive = torch.where(triangle, 0.0, torch.finfo(torch.float32).min)
    wanted = model(tokens, use_cache=False).logits
    assert error(model(tokens, attention_mask=additive, use_cache=False).logits, wanted) < 2e-6


@EVERY
@torch.no_grad()
def test_packed_rows_are_padded_rows(architecture, design):
    model = made(architecture, design)
    lengths = (4, 5)
    packed, places = ids(1, 9), torch.cat([torch.arange(each) for each in lengths])[None]
    if design.startswith("ddl"):
        with pytest.raises(ValueError, match="a row of its own"):
            model(packed, position_ids=places, use_cache=False)
        return
    padded, mask = torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5, dtype=torch.long)
    padded[0, 1:], padded[1], mask[0, 1:], mask[1] = packed[0, :4], packed[0, 4:], 1, 1
    found = model(padded, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0), use_cache=False).logits
    wanted = torch.cat([found[0, 1:], found[1]])
    assert error(model(packed, position_ids=places, use_cache=False).logits[0], wanted) < 2e-6


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
@torch.no_grad()
def test_experts_run_in_every_way_of_the_base(architecture):
    model = own(architecture, DESIGN)
    wanted = model(ids()).logits
    for how in ("eager", "batched_mm"):
        model.set_experts_implementation(how)
        assert model.config._experts_implementation == how
        assert error(model(ids()).logits, wanted) < 2e-6


@EVERY
def test_generation_in_every_way(architecture, design):
    model = made(architecture, design)
    greedy = model.generate(ids(), **GREEDY)
    full = model.generate(ids(), **GREEDY, return_dict_in_generate=True, output_scores=True, output_hidden_states=True)
    assert torch.equal(full.sequences, greedy)
    assert len(full.scores) == 4
    assert len(full.hidden_states[0]) == model.config.num_hidden_layers + 1
    beams = {"num_beams": 2, **GREEDY}
    assert torch.equal(model.generate(ids(), **beams), model.generate(ids(), use_cache=False, **beams))
    embedded = model.generate(inputs_embeds=model.get_input_embeddings()(ids()), **GREEDY)
    assert torch.equal(embedded, greedy[:, 9:])
    torch.manual_seed(0)
    sampled = model.generate(ids(), max_new_tokens=3, do_sample=True, num_return_sequences=2)
    assert sampled.shape == (4, 12)
    first = model.generate(ids(), max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    second = model.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=2, do_sample=False)
    assert torch.equal(second, greedy)


@EVERY
def test_assistant_or_a_clear_refusal(architecture, design):
    model = made(architecture, design)
    prompt = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    if design.startswith("ddl"):
        with pytest.raises(ValueError, match="rolled back"):
            model.generate(prompt, assistant_model=base("llama"), **GREEDY)
        return
    wanted = model.generate(prompt, **GREEDY)
    assert torch.equal(model.generate(prompt, prompt_lookup_num_tokens=2, **GREEDY), wanted)
    assert torch.equal(model.generate(prompt, assistant_model=base(architecture), **GREEDY), wanted)


@EVERY
@torch.no_grad()
def test_caches_have_their_format(architecture, design):
    model = made(architecture, design)
    heads, width = getattr(model.config, "num_key_value_heads", 4), getattr(model.config, "head_dim", None) or 8
    for empty in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=16)):
        found = model(ids()[:, :5], past_key_values=empty, use_cache=True).past_key_values
        assert len(found) == len(found.layers) == model.config.num_hidden_layers
        assert found.get_seq_length() == 5
        assert all(layer.keys.shape[:2] == (2, heads) and layer.keys.shape[-1] == width for layer in found.layers)
    chunked = model.generate(ids(), prefill_chunk_size=4, **GREEDY)
    assert torch.equal(chunked, model.generate(ids(), **GREEDY))


@EVERY
@torch.no_grad()
def test_only_the_logits_that_are_asked_for_are_made(architecture, design):
    model = made(architecture, design)
    whole = model(ids(), use_cache=False).logits
    for kept, wanted in ((1, whole[:, -1:]), (torch.tensor([0, 3]), whole[:, [0, 3]])):
        assert error(model(ids(), logits_to_keep=kept, use_cache=False).logits, wanted) < 2e-6


@EVERY
def test_generation_stops_samples_and_begins_as_it_should(architecture, design):
    model = own(architecture, design)
    greedy = model.generate(ids(1), max_new_tokens=6, do_sample=False)
    end = greedy[0, 11].item()
    found = model.generate(ids(1), max_new_tokens=6, do_sample=False, eos_token_id=end)
    first = 9 + greedy[0, 9:].tolist().index(end)
    assert torch.equal(found, greedy[:, : first + 1])
    if not design.startswith("ddl"):
        looked_up = model.generate(
            ids(1), max_new_tokens=6, do_sample=False, eos_token_id=end, prompt_lookup_num_tokens=3
        )
        assert torch.equal(looked_up, found)
    alone = model.generate(max_new_tokens=3, do_sample=False)
    assert alone.shape == (1, 4)
    assert alone[0, 0] == model.config.bos_token_id
    beams = model.generate(ids(), num_beams=3, num_return_sequences=2, do_sample=True, max_new_tokens=3)
    assert beams.shape == (4, 12)
    eager = own(architecture, design)
    eager.set_attn_implementation("eager")
    assert torch.equal(eager.generate(ids(1), max_new_tokens=6, do_sample=False), greedy)


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3_moe", "gemma3_text"])
def test_steps_on_a_static_cache_are_one_graph(architecture):
    model = own(architecture, DESIGN)
    wanted = model.generate(ids(), **GREEDY)
    compiling = CompileConfig(fullgraph=True, backend="eager", mode=None, dynamic=False)
    compiling._compile_all_devices = True
    torch._dynamo.reset()
    found = model.generate(ids(), cache_implementation="static", compile_config=compiling, **GREEDY)
    torch._dynamo.reset()
    assert torch.equal(found, wanted)
