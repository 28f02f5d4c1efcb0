"""A converted model among the tools of its world: precision, shards, devices, Trainer, LoRA, classification."""

import json

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from residua.hf.anatomy import ANATOMY, Fused
from residua.hf.convert import convert
from residua.testing import error
from tests.hf.models import ANY_STATE, base, converted, ids

ROUTED = "delta:blocks=2"
LANES = "mudd"


def test_routing_stays_in_float32_beside_half_precision(tmp_path):
    model = convert(base("llama").to(torch.bfloat16), ROUTED, say=None)
    kinds = {".stream." in name: each.dtype for name, each in model.named_parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    model.save_pretrained(tmp_path)
    for dtype in ("auto", torch.bfloat16, torch.float16):
        again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        wanted = torch.float16 if dtype is torch.float16 else torch.bfloat16
        for name, each in again.named_parameters():
            assert each.dtype == (torch.float32 if ".stream." in name else wanted), name
    out = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)(ids(), labels=ids())
    assert out.logits.dtype == torch.bfloat16
    out.loss.backward()


@pytest.mark.parametrize("design", ["attnres:blocks=2", "mudd", "ddl", "hyper", "dca", "depthswa", "mhc"])
def test_half_precision_runs(design):
    model = convert(base("llama").to(torch.bfloat16), design, say=None)
    with torch.no_grad():
        assert error(model(ids()).logits, converted("llama", design)(ids()).logits) < 0.05
    assert model.generate(ids(), max_new_tokens=3, do_sample=False).shape == (2, 12)


def test_shards_come_back(tmp_path):
    model = converted("llama", ROUTED, moved=True)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    names = {each.name for each in tmp_path.iterdir()}
    assert len([name for name in names if name.endswith(".safetensors")]) > 2
    assert not [name for name in names if name.endswith((".bin", ".pt"))]
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert error(again(ids()).logits, model(ids()).logits) < 2e-6


@pytest.mark.parametrize("design", [*ANY_STATE, LANES])
def test_layers_on_several_devices(design, tmp_path):
    """A device map whose entries differ: layers that live on disk are brought in by accelerate as they run."""
    model = converted("llama", design, moved=True)
    model.save_pretrained(tmp_path)
    places = {
        "model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
        "model.norm": "cpu", "model.stream": "cpu", "lm_head": "cpu",
    }  # fmt: skip
    spread = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=str(tmp_path / "off"))
    assert spread.model.layers[1].self_attn.q_proj.weight.device.type == "meta"
    with torch.no_grad():
        assert error(spread(ids()).logits, model(ids()).logits) < 2e-6
    assert torch.equal(
        spread.generate(ids(), max_new_tokens=4, do_sample=False),
        model.generate(ids(), max_new_tokens=4, do_sample=False),
    )
    automatic = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto")
    with torch.no_grad():
        assert error(automatic(ids()).logits, model(ids()).logits) < 2e-6


@pytest.mark.parametrize(("design", "layout"), [("delta:blocks=2", "swa:window=3,attn,canon,mlp"), ("mudd", None)])
def test_stream_that_accelerate_offloaded_to_memory_is_brought_in(design, layout):
    """cpu_offload has hooks at modules with parameters, and none at layers."""
    model = converted("llama", design, layout=layout, moved=True)
    with torch.no_grad():
        wanted = model(ids()).logits
        for _ in range(2):  # of one that has run, too
            model = cpu_offload(model, execution_device="cpu")
            assert model.model.embed_tokens.weight.device.type == "meta"
            assert torch.equal(model(ids()).logits, wanted)
            remove_hook_from_submodules(model)
            assert torch.equal(model(ids()).logits, wanted)


def test_offloaded_stream_is_brought_in(tmp_path):
    model = converted("llama", ROUTED, moved=True)
    model.save_pretrained(tmp_path)
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers": "cpu", "model.norm": "cpu",
              "model.stream": "disk", "lm_head": "cpu"}  # fmt: skip
    spread = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=str(tmp_path / "off"))
    with torch.no_grad():
        assert torch.equal(spread(ids()).logits, model(ids()).logits)
    assert {each.device.type for each in spread.model.stream.parameters()} == {"cpu"}


def test_parameters_of_a_site_settle_where_its_layer_is():
    from residua.hf.placing import settle

    stream, device = converted("llama", ROUTED).model.stream, torch.device("meta")
    settle(stream, stream.plan.block(1), device)
    assert {each.device.type for each in stream.at["l1_attn"].parameters()} == {"meta"}
    assert {each.device.type for each in stream.at["l0_mlp"].parameters()} == {"cpu"}
    shared = converted("llama", "depthswa").model.stream
    with pytest.raises(ValueError, match="shares"):
        settle(shared, shared.plan.block(1), device)


def rows(count=4):
    return [{"input_ids": line, "labels": line} for line in ids(count, 8)]


@pytest.mark.parametrize("architecture", ANATOMY)
def test_trainer_takes_steps(architecture, tmp_path):
    model = converted(architecture, ROUTED)
    start = {name: each.detach().clone() for name, each in model.named_parameters()}
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[], use_cpu=True,
        gradient_checkpointing=True, save_steps=4, disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=rows())
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    assert losses[-1] < losses[0]
    assert all(not torch.equal(each, start[name]) for name, each in model.named_parameters() if ".stream." in name)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert error(again(ids()).logits, model.eval()(ids()).logits) < 2e-6


def test_routing_of_a_stream_that_peft_trains_is_that_of_the_copy_at_work():
    from peft import LoraConfig, get_peft_model

    from residua import ablate_sources, record_routing

    tuned = get_peft_model(converted("llama", ROUTED), LoraConfig(r=2, modules_to_save=["stream"])).eval()
    for name, each in tuned.named_parameters():
        if ".modules_to_save." in name:
            torch.nn.init.normal_(each)

    def seen(model):
        with torch.no_grad(), record_routing(model) as record:
            model(ids())
        return record.table(), ablate_sources(model, ids()[:, :-1], ids()[:, 1:], use_cache=False)

    wrapped = seen(tuned)
    assert wrapped == seen(tuned.merge_and_unload())


def projections(architecture):
    made_by = ANATOMY[architecture].projections
    return [made_by.name] if isinstance(made_by, Fused) else list(made_by)


@pytest.mark.parametrize(("architecture", "design"), [*((each, LANES) for each in ANATOMY), ("llama", ROUTED)])
def test_lora_trains_the_base_and_routing_in_full(architecture, design, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    plain = base(architecture)
    tuned = get_peft_model(
        converted(architecture, design),
        LoraConfig(
            target_modules=projections(architecture),
            modules_to_save=["stream"],
            r=2,
            fan_in_fan_out=architecture == "gpt2",
        ),
    )
    with torch.no_grad():
        assert error(tuned(ids()).logits, plain(ids()).logits) < 2e-6
    learning = {name for name, each in tuned.named_parameters() if each.requires_grad}
    assert all("lora_" in name or ".stream.modules_to_save." in name for name in learning)
    start = {name: each.detach().clone() for name, each in tuned.named_parameters()}
    optimizer = torch.optim.AdamW([each for each in tuned.parameters() if each.requires_grad], lr=1e-2)
    for _ in range(4):
        tuned(input_ids=ids(), labels=ids()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, each in tuned.named_parameters():
        moved = not torch.equal(each, start[name])
        assert moved == (name in learning), f"{name} {'moved' if moved else 'did not move'}"
    tuned.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(converted(architecture, design), tmp_path)
    with torch.no_grad():
        assert error(again.eval()(ids()).logits, tuned.eval()(ids()).logits) < 2e-6
    merged = tuned.merge_and_unload()
    with torch.no_grad():
        assert error(merged(ids()).logits, again(ids()).logits) < 2e-5
        assert error(merged(ids()).logits, plain(ids()).logits) > 1e-3
    merged.save_pretrained(tmp_path / "merged")
    alone, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        assert error(alone(ids()).logits, merged(ids()).logits) < 2e-6


def test_classifier_converts_and_comes_back(tmp_path):
    torch.manual_seed(0)
    config = base("llama").config
    config.num_labels = 3
    plain = LlamaForSequenceClassification(config).eval()
    with torch.no_grad():
        before = plain(ids()).logits
    model = convert(plain, ROUTED, say=None)
    with torch.no_grad():
        assert torch.equal(model(ids()).logits, before)
    model(ids(), labels=torch.tensor([0, 2])).loss.backward()
    model.save_pretrained(tmp_path)
    again, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    with torch.no_grad():
        assert torch.equal(again(ids()).logits, before)


def test_backbone_converts_without_a_head(tmp_path):
    plain = base("llama").model
    before = plain(ids()).last_hidden_state
    model = convert(plain, ROUTED, say=None)
    assert torch.equal(model(ids()).last_hidden_state, before)
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModel.from_pretrained(tmp_path)(ids()).last_hidden_state, before)


def test_classifier_grows_from_a_converted_decoder(tmp_path):
    converted("llama", ROUTED, moved=True).save_pretrained(tmp_path)
    model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=4, output_loading_info=True)
    assert info["missing_keys"] == {"score.weight"}
    assert model(ids()).logits.shape == (2, 4)
    stream = AutoModelForCausalLM.from_pretrained(tmp_path).model.stream.state_dict()
    assert all(torch.equal(value, stream[key]) for key, value in model.model.stream.state_dict().items())


def test_missing_routing_is_refused(tmp_path):
    """A plain checkpoint under a converted config: routing that nobody trained is not made up."""
    model = converted("llama", "attnres:blocks=2")
    base("llama").save_pretrained(tmp_path)
    plain = json.loads((tmp_path / "config.json").read_text())
    wanted = plain | {
        "model_type": "residua_llama",
        "stream": model.config.stream,
        "architectures": [type(model).__name__],
    }
    (tmp_path / "config.json").write_text(json.dumps(wanted))
    with pytest.raises(ValueError, match=r"the file lacks model\.stream\."):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_stream_of_a_new_model_starts_as_declared():
    """Made from its config alone, a converted model has the stream of a conversion, not one at random."""
    model = converted("llama", "attnres:blocks=2")
    again = AutoModelForCausalLM.from_config(model.config)
    for key, value in model.model.stream.state_dict().items():
        assert torch.equal(value, again.model.stream.state_dict()[key]), key


def test_reentrant_checkpointing_is_refused():
    with pytest.raises(ValueError, match="use_reentrant"):
        converted("llama", ROUTED).gradient_checkpointing_enable({"use_reentrant": True})


@pytest.mark.parametrize("rows", [1, 3])
def test_cache_without_a_configuration_is_taken(rows):
    from transformers import DynamicCache

    model = converted("llama", "ddl:channels=2,compress=token", moved=True)
    with torch.no_grad():
        whole, cache = model(ids(rows)).logits, DynamicCache()
        parts = [model(part, past_key_values=cache).logits for part in ids(rows).split([4, 5], 1)]
        assert error(torch.cat(parts, 1), whole) < 2e-6
        cache.batch_repeat_interleave(2)
        assert model(torch.ones(2 * rows, 1, dtype=torch.long), past_key_values=cache).logits.shape[0] == 2 * rows
        cache.reset()
        assert error(model(ids(rows), past_key_values=cache).logits, whole) < 2e-6
        with pytest.raises(ValueError, match="rolled back"):
            cache.crop(-1)
