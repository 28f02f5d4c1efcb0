"""What others do with a model: pickle, replicate, quantise, adapt, place, head and train it, as with its base."""

import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    GPT2ForSequenceClassification,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForTokenClassification,
    Trainer,
    TrainingArguments,
    pipeline,
)

from residua.hf.convert import convert
from residua.testing import error
from tests.hf.models import base, converted, ids
from tests.hf.types import config_of, model_of

ROUTED = "delta:blocks=2"
LANES = "mudd"


@pytest.fixture(scope="module")
def routed():
    return converted("llama", ROUTED, moved=True)


@pytest.fixture(scope="module")
def saved(routed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    routed.save_pretrained(folder)
    return folder


UNPICKLE = """
import pickle, sys
cls, model, row = pickle.load(open(sys.argv[1], "rb"))
assert type(model) is cls and model.model.layers[0].owner.backbone is model.model
print(model(row).logits.double().sum().item())
"""


def test_pickle_is_read_by_a_fresh_process(tmp_path):
    model = converted("llama", LANES, layout="canon,attn,mlp", moved=True)
    file = tmp_path / "model.pickle"
    file.write_bytes(pickle.dumps((type(model), model, ids())))
    done = subprocess.run([sys.executable, "-c", UNPICKLE, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(model(ids()).logits.double().sum().item(), rel=1e-6)


@pytest.fixture
def replicate(monkeypatch):
    """torch's own, as DataParallel calls it: only what it would send to GPUs stays here, parameters multiplied
    by a factor to tell them by."""
    module = sys.modules["torch.nn.parallel.replicate"]
    monkeypatch.setattr(module, "_get_device_index", lambda device, optional: device)
    monkeypatch.setattr(
        module, "_broadcast_coalesced_reshape",
        lambda tensors, factors, detach: [
            [each.clone() if detach else each * factor for each in tensors] for factor in factors
        ],
    )  # fmt: skip
    return module.replicate


@pytest.mark.parametrize("design", [ROUTED, LANES])
def test_replicas_of_data_parallel_use_their_own_stream(design, replicate):
    """Two replicas give what two models with their numbers give, and their gradients arrive where both came from."""
    model, factors = converted("llama", design, moved=True), (1.5, 0.5)
    made = [replica(ids()).logits for replica in replicate(model, factors)]
    wanted = dict.fromkeys(dict(model.named_parameters()), 0.0)
    for factor, logits in zip(factors, made, strict=True):
        alone = converted("llama", design, moved=True)
        with torch.no_grad():
            for parameter in alone.parameters():
                parameter.mul_(factor)
        answer = alone(ids()).logits
        assert error(logits.detach(), answer.detach()) < 2e-6
        answer.square().mean().backward()
        for name, parameter in alone.named_parameters():
            wanted[name] = wanted[name] + factor * parameter.grad
    sum(logits.square().mean() for logits in made).backward()
    for name, parameter in model.named_parameters():
        assert error(parameter.grad, wanted[name]) < 2e-5, name
    assert model.model.layers[0].owner.backbone is model.model


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")
def test_dynamic_quantisation_keeps_the_lanes(architecture):
    model = converted(architecture, LANES, moved=True)
    with torch.no_grad():
        before = model(ids()).logits
        quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        assert error(quantised(ids()).logits, before) < 0.1


def test_float64_is_not_rounded():
    model = base("llama").double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-12)
        kept, before = {name: each.clone() for name, each in model.state_dict().items()}, model(ids()).logits
        model = convert(model, ROUTED, say=None)
        assert torch.equal(model(ids()).logits, before)
    assert all(torch.equal(each, model.state_dict()[name]) for name, each in kept.items())


def test_conversion_needs_ordinary_surroundings():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"outside torch\.autocast"):
        convert(base("llama"), ROUTED, say=None)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"outside torch\.inference_mode"):
        convert(base("llama"), ROUTED, say=None)


def test_model_without_numbers_converts_without_the_check(routed):
    with torch.device("meta"):
        empty = LlamaForCausalLM(base("llama").config)
    with pytest.raises(ValueError, match="check=False"):
        convert(empty, ROUTED, say=None)
    model = convert(empty, ROUTED, check=False, say=None)
    assert {each.device.type for each in model.parameters()} == {"meta"}
    assert {name: each.shape for name, each in model.named_parameters()} == {
        name: each.shape for name, each in routed.named_parameters()
    }
    filled = model.to_empty(device="cpu")
    filled.load_state_dict(routed.state_dict())
    filled.model.rotary_emb.load_state_dict(routed.model.rotary_emb.state_dict())
    filled.model.rotary_emb.inv_freq = routed.model.rotary_emb.inv_freq
    with torch.no_grad():
        assert torch.equal(filled.eval()(ids()).logits, routed(ids()).logits)


def test_found_anatomy_serves_a_model_without_numbers():
    """Where the finder has nothing to run, it says so; what it found elsewhere can be given."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config_of("arcee"))
    with pytest.raises(ValueError, match=r"on the meta device they have no numbers.* set model\.config\.anatomy"):
        convert(empty, ROUTED, check=False, say=None)
    whole = convert(model_of("arcee"), ROUTED, say=None)
    empty.config.anatomy = whole.config.anatomy
    model = convert(empty, ROUTED, check=False, say=None)
    assert type(model) is type(whole)
    assert {name: each.shape for name, each in model.named_parameters()} == {
        name: each.shape for name, each in whole.named_parameters()
    }
    assert {each.device.type for each in model.parameters()} == {"meta"}


def with_head(cls, architecture="llama"):
    torch.manual_seed(0)
    config = base(architecture).config
    config.num_labels = 3
    return cls(config).eval()


@pytest.mark.parametrize(
    ("head", "auto", "labels"),
    [
        (LlamaForTokenClassification, AutoModelForTokenClassification, {"labels": ids() % 3}),
        (
            LlamaForQuestionAnswering,
            AutoModelForQuestionAnswering,
            {"start_positions": torch.tensor([0, 1]), "end_positions": torch.tensor([2, 3])},
        ),
    ],
)
def test_heads_convert_and_come_back(head, auto, labels, tmp_path):
    plain = with_head(head)
    with torch.no_grad():
        before = plain(ids(), **labels)
    model = convert(plain, ROUTED, say=None)
    found = model(ids(), **labels)
    assert torch.equal(found.loss, before.loss)
    found.loss.backward()
    assert all(each.grad is not None for name, each in model.named_parameters() if ".gate." in name)
    model.save_pretrained(tmp_path)
    again, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is type(model)
    assert not info["missing_keys"]
    with torch.no_grad():
        assert torch.equal(again(ids(), **labels).loss, before.loss)


def rows():
    return [{"input_ids": row, "labels": row} for row in ids()]


def arguments(folder, **options):
    return TrainingArguments(
        str(folder), max_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, **options
    )


def test_classifier_of_gpt2_has_a_loss_in_training(tmp_path):
    model = convert(with_head(GPT2ForSequenceClassification, "gpt2"), ROUTED, say=None).train()
    kinds = [{"input_ids": row, "labels": 1} for row in ids()]
    assert Trainer(model=model, args=arguments(tmp_path), train_dataset=kinds).train().training_loss > 0
    assert type(model).__name__ in AutoNames.SEQUENCE.values()


class AutoNames:
    """The tables in which transformers looks up what a class is for."""

    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as SEQUENCE


def test_smoothed_labels_are_shifted_as_for_the_base(tmp_path):
    losses = [
        Trainer(model=model, args=arguments(tmp_path, label_smoothing_factor=0.3), train_dataset=rows())
        .train()
        .training_loss
        for model in (base("llama"), converted("llama", ROUTED))
    ]
    assert losses[0] == losses[1]
    assert AutoNames.CAUSAL["residua_llama"] == "ResiduaLlamaForCausalLM"


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_peft_finds_the_target_modules_of_the_base(architecture):
    from peft import LoraConfig, get_peft_model

    plain, tuned = (
        get_peft_model(model, LoraConfig(r=2)) for model in (base(architecture), converted(architecture, LANES))
    )
    assert tuned.peft_config["default"].target_modules == plain.peft_config["default"].target_modules


def test_adapter_is_loaded_by_peft_alone(saved, tmp_path):
    from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model

    tuned = get_peft_model(AutoModelForCausalLM.from_pretrained(saved), LoraConfig(r=2, init_lora_weights=False)).eval()
    tuned.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(AutoPeftModelForCausalLM.from_pretrained(tmp_path)(ids()).logits, tuned(ids()).logits)


@pytest.mark.parametrize("room", [9_000, 50_000])  # nothing fits; the embedding does
def test_little_memory_offloads_layers_and_brings_the_stream_in(room, saved, routed, tmp_path):
    spread = AutoModelForCausalLM.from_pretrained(
        saved, device_map="auto", max_memory={"cpu": room}, offload_folder=str(tmp_path)
    )
    assert "disk" in spread.hf_device_map.values()
    with torch.no_grad():
        assert error(spread(ids()).logits, routed(ids()).logits) < 2e-6
    greedy = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(spread.generate(ids(), **greedy), routed.generate(ids(), **greedy))


def test_only_models_with_a_head_generate(routed):
    assert type(routed).can_generate()
    assert not type(routed.model).can_generate()
    assert not type(convert(with_head(LlamaForTokenClassification), ROUTED, say=None)).can_generate()


def test_what_stays_in_float32_is_named_as_a_module(routed):
    names = [name for name, _ in routed.named_modules()]
    assert all(any(kept in name.split(".") for name in names) for kept in routed._keep_in_fp32_modules_strict)


@pytest.mark.parametrize("chosen", [[0], (1,), [0, 1], True])
@pytest.mark.parametrize("as_dict", [True, False])
def test_hidden_states_of_chosen_layers_are_those_of_the_base(chosen, as_dict):
    found = [
        model.model(ids(), output_hidden_states=chosen, use_cache=False, return_dict=as_dict)
        for model in (base("llama"), converted("llama", "standard"))
    ]
    plain, ours = (each.hidden_states if as_dict else each[-1] for each in found)
    assert [each is None for each in plain] == [each is None for each in ours]
    assert all(torch.equal(one, other) for one, other in zip(plain, ours, strict=True) if one is not None)


def test_pipeline_of_classification_takes_it(tmp_path, caplog):
    from tests.hf.test_commands import bytes_tokenizer

    torch.manual_seed(0)
    config = base("llama", vocab_size=257).config
    model = convert(LlamaForTokenClassification(config), ROUTED, say=None)
    found = pipeline("token-classification", model=model, tokenizer=bytes_tokenizer())
    assert found("def area")
    assert "not supported" not in caplog.text
