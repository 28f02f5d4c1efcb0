"""What would have gone wrong without a word is refused, and a name that some configurations lack is no error."""

import pytest
import torch
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

import residua
from residua.lab.finetune_config import FinetuneConfig

SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_model_with_an_adapter_is_refused():
    model = LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=48))
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="merge the adapter first"):
        residua.convert(model, "delta", say=None)


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
