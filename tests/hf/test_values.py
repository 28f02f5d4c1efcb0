"""Values that layers share, on converted models: tables that enter as nothing, and the first layer's values."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from residua.hf.values import projection_of, replaced
from residua.registry import build
from residua.testing import error
from tests.hf.models import CONFIGS, base, converted, ids


def attentions(model):
    backbone = model.base_model
    anatomy = backbone.layers[0].anatomy if hasattr(backbone, "layers") else backbone.h[0].anatomy
    layers = getattr(backbone, anatomy.layers)
    return anatomy, [getattr(layer, anatomy.parts[0].sublayer) for layer in layers]


@pytest.mark.parametrize("architecture", CONFIGS)
def test_tables_enter_as_nothing_and_are_added_to_values(architecture):
    """Zero tables change no bit; moved, they are what a projection with T[token] added gives."""
    model, plain = converted(architecture, "standard:value=zero_table"), base(architecture)
    with torch.no_grad():
        assert torch.equal(model(ids()).logits, plain(ids()).logits)
        side = model.base_model.stream.side
        for part in side.values():
            part["table"].vectors.normal_()
        anatomy, _ = attentions(model)
        heads = model.base_model.stream.plan.kv[0]
        layers = getattr(plain.base_model, anatomy.layers)
        tables = [side[f"l{layer}_attn"]["table"].vectors[ids()] for layer in (0, len(layers) - 1)]
        attended = [getattr(layers[at], anatomy.parts[0].sublayer) for at in (0, -1)]
        one = torch.ones(1)
        with (
            replaced(attended[0], anatomy, plain.config, (one, tables[0]), heads) as first,
            replaced(attended[1], anatomy, plain.config, (one, tables[1]), heads),
        ):
            expected = plain(ids()).logits
        assert torch.equal(model(ids()).logits, expected)
        assert first[0].shape == tables[0].shape
        assert error(plain(ids()).logits, expected) > 1e-3


def test_values_of_a_hook_are_those_of_the_projection():
    """The hook's arithmetic, with a gate a head, against the projection's weights themselves."""
    model = base("llama")
    attention = model.model.layers[1].self_attn
    x, scale, shift = torch.randn(2, 5, 32), torch.rand(2, 5, 2), torch.randn(2, 5, 16)
    from residua.hf.anatomy import anatomy_of

    anatomy = anatomy_of(model.config)
    with replaced(attention, anatomy, model.config, (scale, shift), 2) as made:
        found = projection_of(attention, anatomy)(x)
    v = x @ attention.v_proj.weight.T
    assert torch.allclose(made[0], v, atol=1e-6)
    assert torch.allclose(found, v * scale.repeat_interleave(8, -1) + shift, atol=1e-6)
    assert not attention.v_proj._forward_hooks


def test_the_first_layers_values_reach_later_ones():
    """(v + V_1) / 2 in the second layer, prefill and decoding with the cache."""
    model = converted("llama", "standard:value=zero_table").double()
    plan = model.base_model.stream.plan
    model.base_model.stream = build("standard:value=resformer", plan).double()
    plain, kept = base("llama").double(), []
    first, second = (layer.self_attn.v_proj for layer in plain.model.layers)
    first.register_forward_hook(lambda module, args, v: kept.append(v))
    second.register_forward_hook(lambda module, args, v: (v + kept[-1]) / 2)
    with torch.no_grad():
        expected = plain(ids()).logits
        assert error(model(ids()).logits, expected) < 1e-12
        one = model(ids()[:, :6], use_cache=True)
        two = model(ids()[:, 6:], past_key_values=one.past_key_values, use_cache=True)
        assert error(torch.cat([one.logits, two.logits], 1), expected) < 1e-12


def test_a_model_with_tables_is_saved_loaded_and_generates(tmp_path):
    model = converted("qwen3", "delta:blocks=2,value=zero_table", moved=True)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(ids()).logits, model(ids()).logits)
        grown = model.generate(ids(), max_new_tokens=4, do_sample=False)
        step = ids()
        for _ in range(4):
            step = torch.cat([step, model(step).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(grown, step)
    with pytest.raises(ValueError, match="was given embeddings alone"):
        model(inputs_embeds=model.get_input_embeddings()(ids()))


def test_values_that_change_the_network_are_refused():
    with pytest.raises(ValueError, match="does not start as the base network"):
        converted("llama", "standard:value=resformer")
