"""What would have gone wrong without a word is refused, and a name that some configurations lack is no error."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

import residua
from residua.lab.finetune_config import FinetuneConfig

SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_model_with_an_adapter_is_refused():
    model = LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=48))
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="merge the adapter first"):
        residua.convert(model, "delta", say=None)


@pytest.mark.parametrize("which", ["wrapped", "inner"])
def test_model_of_peft_is_refused(which):
    """Wrapped by `get_peft_model`, or the model that was handed to it, whose layers it has exchanged."""
    inner = LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=48))
    wrapped = get_peft_model(inner, LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="merge_and_unload"):
        residua.convert(wrapped if which == "wrapped" else inner, "delta", say=None)


def test_merged_adapter_converts():
    model = LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=48))
    merged = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).merge_and_unload()
    assert residua.convert(merged, "delta", say=None).config.stream["name"] == "delta"


def test_compiled_model_is_refused():
    model = LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=48))
    with pytest.raises(ValueError, match=r"compiled; convert first, and compile the result"):
        residua.convert(torch.compile(model), "delta", say=None)


def test_inserted_sublayers_where_the_configuration_has_init_std():
    config = OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64)
    base = OPTForCausalLM(config).eval()
    ids = torch.randint(61, (1, 9))
    with torch.no_grad():
        before = base(ids).logits
        after = residua.convert(base, "delta", layout="attn,canon,mlp", say=None)(ids).logits
    assert torch.allclose(before, after, atol=1e-5)


def test_bytes_are_no_tokenizer_beside_files_of_another(tmp_path):
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(ValueError, match="give --tokenizer"):
        FinetuneConfig(checkpoint=str(tmp_path))
    assert FinetuneConfig(checkpoint=str(tmp_path), tokenizer="bytes").tokenizer == "bytes"
    (tmp_path / "vocab.json").unlink()
    assert FinetuneConfig(checkpoint=str(tmp_path)).tokenizer == "bytes"
