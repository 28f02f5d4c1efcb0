"""What cannot be converted is refused in one clear line, by function and command, and nothing is written."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertModel, T5Config
from typer.testing import CliRunner

from residua.hf.convert import convert
from tests.hf.models import base


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    base("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(plain, tmp_path):
    return shutil.copytree(plain, tmp_path / "model")


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def cut_header(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:50])


def shards(folder, harm):
    base("llama").save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink()
    harm(sorted(folder.glob("model-*.safetensors"))[1])


def pickled(folder):
    torch.save(base("llama").state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def configured(**values):
    def change(folder):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def replaced(config):
    def change(folder):
        config.save_pretrained(folder)

    return change


BROKEN = {
    "no such directory": (lambda folder: shutil.rmtree(folder), "neither a directory nor"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
    "half a file": (cut, "broke off"),
    "half a header": (cut_header, "cut short"),
    "a shard is missing": (lambda folder: shards(folder, lambda file: file.unlink()), "is missing"),
    "half a shard": (lambda folder: shards(folder, lambda file: file.write_bytes(file.read_bytes()[:-9])), "broke off"),
    "pickled": (pickled, r"rewrite it once: python -c"),
    "an encoder": (replaced(BertConfig()), "config.json describes"),
    "an encoder-decoder": (replaced(T5Config()), "encoder-decoder"),
    "another architecture": (
        configured(model_type="mamba"),
        "do not make the model of its config.json|config.json describes",
    ),
    "not a language model": (configured(model_type="vit"), "no causal language model"),
    "unheard-of architecture": (configured(model_type="nosuch"), "no anatomy for 'nosuch'"),
    "quantised": (configured(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}), "quantised"),
    "text and vision": (configured(model_type="gemma3"), "gemma3_text"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_input_is_one_line_and_writes_nothing(how, folder, tmp_path):
    harm, said = BROKEN[how]
    harm(folder)
    with pytest.raises(ValueError, match=said) as caught:
        convert(str(folder), "delta", say=None)
    assert "\n" not in str(caught.value)
    from residua.cli import app

    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["convert", str(folder), "-d", "delta", "--out", str(out)])
    assert done.exit_code != 0
    assert isinstance(done.exception, ValueError)
    assert not out.exists()
    assert [each.name for each in tmp_path.iterdir() if each.name != "model"] == []


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "gpt2"])
def test_checkpoint_in_the_format_of_the_hub_goes_through(architecture, tmp_path):
    """Experts lie apart in a file and stacked in memory, and old names are renamed; conversion keeps the way back."""
    plain = base(architecture)
    plain.save_pretrained(tmp_path / "plain")
    model = convert(str(tmp_path / "plain"), "delta", say=None)
    model.save_pretrained(tmp_path / "made")
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "made", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    kept = dict(again.named_parameters())
    assert all(torch.equal(kept[name], each) for name, each in plain.named_parameters())


def test_refusal_names_a_command_that_works(folder):
    pickled(folder)
    with pytest.raises(ValueError) as caught:
        convert(str(folder), "delta", say=None)
    command = str(caught.value).partition("rewrite it once: ")[2]
    assert command.startswith('python -c "')
    assert command.endswith('"')
    exec(command.removeprefix('python -c "').removesuffix('"'), {})
    model = convert(f"{folder}-safe", "delta", say=None)
    assert type(model).__name__ == "ResiduaLlamaForCausalLM"


def test_config_of_another_design_does_not_load(folder):
    """Weights of one design under the config of another: the keys do not fit, and that is said."""
    from tests.hf.models import converted

    converted("llama", "delta").save_pretrained(folder)
    configured(stream={"name": "nosuch"})(folder)
    with pytest.raises(ValueError, match="unknown design 'nosuch'"):
        AutoModelForCausalLM.from_pretrained(folder)
    configured(stream={"name": "mudd"})(folder)
    with pytest.raises(ValueError, match="another design"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_model_object_that_is_no_decoder_is_refused():
    model = BertModel(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16))
    with pytest.raises(ValueError, match="bert"):
        convert(model, "delta", say=None)


def test_quantised_model_object_is_refused():
    model = base("llama")
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(ValueError, match="quantise the result"):
        convert(model, "delta", say=None)


def test_converted_directory_is_not_converted_again(tmp_path):
    convert(base("llama"), "delta", say=None).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="converted already"):
        convert(str(tmp_path), "mudd", say=None)


def test_module_that_is_not_where_its_row_says_is_refused():
    model = base("llama")
    model.model.layers[1].post_attention_norm = model.model.layers[1].post_attention_layernorm
    del model.model.layers[1].post_attention_layernorm
    with pytest.raises(ValueError, match=r"layers\.1\.post_attention_layernorm"):
        convert(model, "delta", say=None)


def test_failed_check_saves_nothing(folder, tmp_path):
    from residua.cli import app

    base("olmo2").save_pretrained(tmp_path / "olmo")
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "olmo"), "-d", "mhc", "--out", str(out)])
    assert "not the base network" in str(done.exception)
    assert not out.exists()
