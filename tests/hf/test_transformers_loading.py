"""The checks that transformers' tests make of saving, loading, heads and plans: converted models beside their bases."""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2ForSequenceClassification,
    LlamaForSequenceClassification,
    MistralForSequenceClassification,
    MixtralForSequenceClassification,
    Qwen3ForSequenceClassification,
)
from transformers.distributed.fsdp import expand_fsdp_plan, verify_fsdp_plan
from transformers.distributed.tensor_parallel import verify_tp_plan

from residua.hf.convert import convert
from residua.testing import error
from tests.hf.models import base, converted, ids
from tests.hf.test_transformers_checks import ARCHITECTURES, DESIGN, EVERY, made, own
from tests.hf.types import stored

EACH = pytest.mark.parametrize("architecture", ARCHITECTURES)


@EVERY
def test_saved_file_has_the_keys_of_the_base_and_those_that_were_added(architecture, design, tmp_path):
    """Tied heads are saved once and experts as their checkpoints have them, as the base does it."""
    base(architecture).save_pretrained(tmp_path / "plain")
    made(architecture, design).save_pretrained(tmp_path / "made")
    plain, ours = stored(tmp_path / "plain"), stored(tmp_path / "made")
    assert plain <= ours
    assert all(".stream." in name or ".inserted." in name for name in ours - plain)
    assert ours - plain


@EVERY
def test_model_loads_by_its_class_on_a_device_and_from_numbers(architecture, design, tmp_path):
    model = made(architecture, design)
    model.save_pretrained(tmp_path)
    with torch.device("cpu"):
        inside = type(model).from_pretrained(tmp_path)
    from_numbers = type(model).from_pretrained(None, config=copy.deepcopy(model.config), state_dict=model.state_dict())
    with torch.no_grad():
        for again in (inside, from_numbers):
            assert error(again.eval()(ids()).logits, model(ids()).logits) < 2e-6


@EVERY
def test_disk_holds_what_memory_does_not(architecture, design, tmp_path):
    model = made(architecture, design)
    model.save_pretrained(tmp_path)
    spread = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map="auto", max_memory={"cpu": 9_000}, offload_folder=str(tmp_path / "off")
    )
    assert "disk" in spread.hf_device_map.values()
    with torch.no_grad():
        assert error(spread(ids()).logits, model(ids()).logits) < 2e-6


@EACH
def test_plans_of_the_base_fit_the_converted_model(architecture):
    """Every entry of the plans for tensor parallelism and FSDP2 names modules; layers are sharded, and none twice."""
    plain, model = base(architecture), own(architecture, DESIGN)
    assert model._tp_plan == plain._tp_plan
    assert model._fsdp_plan == plain._fsdp_plan
    modules = [name for name, _ in model.named_modules()]
    for verify, plan, names in (
        (verify_tp_plan, model._tp_plan, list(model.state_dict())),
        (verify_fsdp_plan, model._fsdp_plan, modules),
    ):
        verify(names, plan)
    theirs, ours = (expand_fsdp_plan(each, each._fsdp_plan) for each in (plain, model))
    assert _names(plain, theirs) == _names(model, ours)


def _names(model, targets):
    names = {id(module): name for name, module in model.named_modules()}
    return [[each if isinstance(each, str) else names[id(each)] for each in _modules(part)] for part in targets]


def _modules(part):
    """A plan's targets: modules, or pairs of a name and a module."""
    return [each[0] if isinstance(each, tuple) else each for each in part]


@EACH
@pytest.mark.parametrize("chosen", [[0], True])
def test_hidden_states_of_chosen_layers_are_the_bases(architecture, chosen):
    plain, ours = (
        model.base_model(ids(), output_hidden_states=chosen, use_cache=False).hidden_states
        for model in (base(architecture), converted(architecture, "standard"))
    )
    assert [each is None for each in plain] == [each is None for each in ours]
    assert all(torch.equal(one, other) for one, other in zip(plain, ours, strict=True) if one is not None)


CLASSIFIERS = {
    "llama": LlamaForSequenceClassification,
    "gpt2": GPT2ForSequenceClassification,
    "mistral": MistralForSequenceClassification,
    "qwen3": Qwen3ForSequenceClassification,
    "mixtral": MixtralForSequenceClassification,
}
PROBLEMS = {
    "regression": (1, torch.tensor([0.5, -1.0])),
    "single_label_classification": (3, torch.tensor([0, 2])),
    "multi_label_classification": (3, torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])),
}


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_every_kind_of_classification_has_the_loss_of_the_base(architecture, problem, tmp_path):
    count, labels = PROBLEMS[problem]
    config = base(architecture).config
    config.num_labels, config.problem_type = count, problem
    torch.manual_seed(0)
    plain = CLASSIFIERS[architecture](config).eval()
    with torch.no_grad():
        before = plain(ids(), labels=labels).loss
    model = convert(plain, DESIGN, say=None).train()
    loss = model(ids(), labels=labels).loss
    assert torch.equal(loss, before)
    loss.backward()
    assert all(each.grad is not None for each in model.score.parameters())
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert error(again(ids(), labels=labels).loss.detach(), before) < 2e-6


def test_head_of_another_size_is_refused_or_started_anew(tmp_path):
    config = base("llama").config
    config.num_labels = 3
    convert(LlamaForSequenceClassification(config).eval(), DESIGN, say=None).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"score\.weight"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    assert again.score.weight.shape == (5, 32)
    assert again.score.weight.isfinite().all()


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@EACH
def test_adapters_learn_through_checkpointed_layers(architecture):
    from peft import LoraConfig, get_peft_model

    targets = None if architecture != "qwen3_moe" else ["q_proj", "v_proj"]  # peft has no defaults for its base
    lora = LoraConfig(r=2, init_lora_weights=False, target_modules=targets)
    model = get_peft_model(own(architecture, DESIGN), lora).train()
    plain = _gradients(model)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    assert plain.keys() == {name for name, each in model.named_parameters() if "lora_" in name}
    for name, each in _gradients(model).items():
        assert torch.equal(each, plain[name]), name


def _gradients(model):
    model.zero_grad()
    model(input_ids=ids(), labels=ids(), use_cache=False).loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
