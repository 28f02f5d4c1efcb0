"""What a stream keeps between tokens, in every kind of cache: as many layers as the model has, compiled, taken back."""

import copy

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from transformers import CompileConfig, DynamicCache, StaticCache

from residua.hf.convert import convert
from residua.testing import error
from tests.hf.models import converted, ids, shake
from tests.hf.types import ROUNDING, anatomy, answers, gap, model_of

GREEDY = {"max_new_tokens": 6, "do_sample": False}
INSERTED = ("delta:blocks=2", "swa:window=3,attn,canon,mlp")
TOKENS = ("ddl:channels=2,compress=token,expand=conv", None)
KEEPING = pytest.mark.parametrize(("design", "layout"), [INSERTED, TOKENS])


@pytest.fixture(scope="module")
def models():
    return {pair: converted("llama", pair[0], layout=pair[1], moved=True) for pair in (INSERTED, TOKENS)}


@KEEPING
def test_cache_has_the_layers_of_the_model(design, layout, models):
    model = models[design, layout]
    for options in ({}, {"num_beams": 3}, {"cache_implementation": "static", "disable_compile": True}):
        found = model.generate(ids(), return_dict_in_generate=True, **GREEDY, **options).past_key_values
        assert len(found.layers) == model.config.num_hidden_layers
        assert all(layer.keys is not None for layer in found.layers)
    cache = DynamicCache()
    with torch.no_grad():
        model(ids(), past_key_values=cache)
    assert [tuple(keys.shape) for keys, _, _ in cache] == [(2, 2, 9, 8)] * 2


@KEEPING
def test_static_cache_is_compiled_as_one_graph(design, layout, models):
    model = models[design, layout]
    wanted = model.generate(ids(), **GREEDY)
    compiling = CompileConfig(fullgraph=True, backend="eager", mode=None, dynamic=False)
    compiling._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = model.generate(ids(), cache_implementation="static", compile_config=compiling, **GREEDY)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    assert torch.equal(found, wanted)
    assert graphs == 1


def addresses(kept):
    held = [each for recent in kept.slots.values() for each in recent.held]
    return [each.data_ptr() for each in (*held, *(kept.past or ()), kept.seen)]


@KEEPING
def test_static_cache_keeps_its_memory_in_place(design, layout, models):
    model = models[design, layout]
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(ids(2, 9)[:, :4], past_key_values=cache)
        kept = cache.layers[0].kept
        before = addresses(kept)
        after = model(ids(2, 9)[:, 4:], past_key_values=cache).logits
        assert error(after, model(ids(2, 9)).logits[:, 4:]) < 2e-6
    assert addresses(kept) == before
    assert len(before) > 1


def test_assisted_decoding_takes_tokens_back(models):
    model, plain = models[INSERTED], converted("llama", "standard")
    for main, assistant in ((model, plain), (plain, model), (model, model)):
        assert torch.equal(main.generate(ids(1), assistant_model=assistant, **GREEDY), main.generate(ids(1), **GREEDY))
    looked_up = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    assert torch.equal(
        model.generate(looked_up, prompt_lookup_num_tokens=3, **GREEDY), model.generate(looked_up, **GREEDY)
    )


def test_tokens_are_taken_back_after_a_forward_with_gradients(models):
    model = models[INSERTED]
    cache = DynamicCache(config=model.config)
    model(ids(2, 9)[:, :5], past_key_values=cache)
    before = [each.clone() for recent in cache.layers[0].kept.slots.values() for each in recent.held]
    with pytest.raises(ValueError, match="activate_past_recording"):
        cache.crop(-1)
    assert cache.get_seq_length() == 5  # refused before anything was touched
    cache = DynamicCache(config=model.config)
    model(ids(2, 9)[:, :3], past_key_values=cache)
    cache.activate_past_recording()
    model(ids(2, 9)[:, 3:], past_key_values=cache)
    cache.crop(-4)
    after = [each for recent in cache.layers[0].kept.slots.values() for each in recent.held]
    assert all(error(one, other) < 2e-6 for one, other in zip(after, before, strict=True))
    logits = model(ids(2, 9)[:, 5:], past_key_values=cache).logits
    assert error(logits, model(ids(2, 9)).logits[:, 5:]) < 2e-6


def test_a_design_that_mixes_tokens_cannot_take_them_back(models):
    model = models[TOKENS]
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids(), past_key_values=cache)
    with pytest.raises(ValueError, match="rolled back"):
        cache.crop(-2)
    cache.crop(0)


@KEEPING
def test_cache_of_minimax_remembers(design, layout):
    """It keeps linear attention beside its layers, and counts both together. What its own attention decodes differs
    from a whole forward in transformers too: it is made silent here, to see the rest."""
    model = model_of("minimax")
    model.config.anatomy = anatomy("minimax")
    model = convert(model, design, layout=layout, say=None)
    shake(model)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if name.endswith(("self_attn.o_proj.weight", "self_attn.out_proj.weight")):
                each.zero_()
    whole, decoded = answers(model)
    assert gap(decoded, whole[:, 6:8]) < ROUNDING
    assert torch.equal(model.generate(ids(), **GREEDY), model.generate(ids(), use_cache=False, **GREEDY))


@KEEPING
@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")
def test_prompt_tuning_puts_tokens_before_the_mask(design, layout, models):
    model = copy.deepcopy(models[design, layout])
    tuned = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    mask = torch.ones_like(ids())
    mask[0, :2] = 0
    given = {"input_ids": ids(), "attention_mask": mask}
    with torch.no_grad():
        wanted = tuned(**given).logits[:, -1].argmax(-1)
    made = [tuned.generate(**given, **GREEDY | {"max_new_tokens": 3}, use_cache=kept)[:, 9:] for kept in (True, False)]
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0][:, 0], wanted)
