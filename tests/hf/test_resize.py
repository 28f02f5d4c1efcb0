"""resize_token_embeddings: tables of a stream have a row for every token, as the embedding has."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.hf.models import VOCAB, converted, ids

TABLES = "model.stream.side.l0_attn.table.vectors", "model.stream.side.l1_attn.table.vectors"


@pytest.fixture
def model():
    return converted("llama", "delta:value=zero_table", moved=True)


@pytest.mark.parametrize("tokens", [VOCAB + 3, VOCAB - 11])
def test_tables_follow_the_embedding(model, tokens, tmp_path):
    known, last = ids() % min(tokens, VOCAB), torch.full((1, 2), tokens - 1)
    before = dict(model.named_parameters())
    with torch.no_grad():
        wanted = model(known).logits
        model.resize_token_embeddings(tokens, mean_resizing=False)
        assert torch.equal(model(known).logits[..., :VOCAB], wanted[..., :tokens])
    after = dict(model.named_parameters())
    both = min(tokens, VOCAB)
    for name in TABLES:
        assert torch.equal(after[name][:both], before[name][:both])
        assert not after[name][both:].any()  # as the design starts
    others = [name for name in before if ".stream." in name and name not in TABLES]
    assert all(after[name] is before[name] for name in others)  # an optimiser has them still
    model(last, labels=last).loss.backward()
    assert all(after[name].grad[-1].any() for name in TABLES)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.model.stream.plan.vocab == model.model.stream.plan.vocab == tokens
    with torch.no_grad():
        assert torch.equal(again(last).logits, model(last).logits)


def test_an_adapter_comes_after_resizing(model):
    tuned = get_peft_model(model, LoraConfig(r=2, modules_to_save=["stream"]))
    with pytest.raises(ValueError, match="resize the embeddings before an adapter is added"):
        tuned.resize_token_embeddings(VOCAB + 3)
    assert model.config.vocab_size == VOCAB
