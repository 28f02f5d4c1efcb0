"""A converted model whose stream does nothing gives back its base; another one is refused, and nothing is written."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, LlamaForSequenceClassification, MixtralForCausalLM
from typer.testing import CliRunner

from residua.cli import app
from residua.hf.convert import convert
from residua.hf.restore import restore
from tests.hf.models import base, converted, ids, shake


@pytest.mark.parametrize(
    ("architecture", "design", "layout"),
    [
        ("llama", "delta:blocks=2", "swa:window=3,attn,mlp"),
        ("qwen3", "attnres:blocks=2", None),  # its embeddings are tied
        ("gpt2", "mudd", None),
        ("llama", "hyper", None),
        ("mixtral", "ddl:channels=2,compress=token", None),
    ],
)
def test_design_at_its_start_gives_back_the_base(architecture, design, layout):
    plain = base(architecture)
    found = restore(converted(architecture, design, layout=layout))
    assert type(found) is type(plain)
    assert found.config.to_diff_dict() == plain.config.to_diff_dict()
    theirs = plain.state_dict()
    assert found.state_dict().keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in found.state_dict().items())
    with torch.no_grad():
        assert torch.equal(found(ids()).logits, plain(ids()).logits)


def test_design_that_acts_is_refused_until_it_is_trained_to_nothing():
    model = converted("llama", "delta:blocks=2", moved=True)
    before = model(ids()).logits
    with pytest.raises(ValueError, match="another network"):
        restore(model)
    assert torch.equal(model(ids()).logits, before)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".alpha"):
                parameter.fill_(1e-9)  # the gates are shut; what they gate may be anything
    assert isinstance(restore(model), LlamaForCausalLM)
    with pytest.raises(ValueError, match="plain llama"):
        restore(base("llama"))


def run(*arguments):
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def test_command_writes_the_base_or_nothing(tmp_path):
    model = converted("mixtral", "delta:blocks=2")
    model.save_pretrained(tmp_path / "made")
    done = run(tmp_path / "made", "--to", "standard", "--out", tmp_path / "plain", "--json")
    assert json.loads(done.stdout)["to"] == "standard", done.output
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert type(again) is MixtralForCausalLM
    with torch.no_grad():
        assert torch.equal(again(ids()).logits, base("mixtral")(ids()).logits)
    shake(model)
    model.save_pretrained(tmp_path / "moved")
    refused = run(tmp_path / "moved", "--to", "standard", "--out", tmp_path / "none")
    assert "another network" in str(refused.exception)
    assert not (tmp_path / "none").exists()
    assert "standard or onnx" in str(run(tmp_path / "made", "--to", "gguf", "--out", tmp_path / "none").exception)
    both = run(tmp_path / "made", "--to", "standard", "--design", "mudd", "--out", tmp_path / "none")
    assert "drop --design" in str(both.exception)


def test_command_refuses_a_model_without_the_head_of_a_language_model(tmp_path):
    """What is written has the numbers that were read: a head is never made up."""
    model = LlamaForSequenceClassification(base("llama").config)
    convert(model, "delta:blocks=2", say=None).save_pretrained(tmp_path / "classifier")
    for to in ("standard", "onnx"):
        refused = run(tmp_path / "classifier", "--to", to, "--out", tmp_path / "none")
        assert isinstance(refused.exception, ValueError), refused.exception
        assert "lack lm_head.weight" in str(refused.exception)
    assert not (tmp_path / "none").exists()


def test_command_names_the_types_it_takes(tmp_path):
    converted("llama", "delta:blocks=2").save_pretrained(tmp_path / "made")
    refused = run(tmp_path / "made", "--to", "standard", "--dtype", "foo", "--out", tmp_path / "none")
    assert str(refused.exception) == "--dtype is auto, float32, bfloat16, float16, not 'foo'"
    done = run(tmp_path / "made", "--to", "standard", "--dtype", "bfloat16", "--out", tmp_path / "half")
    assert done.exit_code == 0, done.exception
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16
