"""ShortSWA, ShortConv and Canon inside a converted model: nothing at first, then with caches of their own."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from residua.hf.convert import convert
from residua.testing import error
from tests.hf.models import base, converted, ids

LAYOUTS = ("swa:window=3,attn,mlp", "canon,attn,conv:kernel=3,mlp", "attn,mlp,swa:window=4:mode=local")
DESIGNS = ("standard", "delta:blocks=2", "mudd", "ddl:channels=2,compress=token")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3_text"])
def test_inserted_sublayers_start_as_nothing(architecture, layout):
    model = converted(architecture, "delta:blocks=2", layout=layout)
    with torch.no_grad():
        assert torch.equal(model(ids()).logits, base(architecture)(ids()).logits)
    added = {name for name, _ in model.named_parameters()} - {name for name, _ in base(architecture).named_parameters()}
    assert all(".stream." in name or ".inserted." in name for name in added)
    assert any(".inserted." in name for name in added)


def test_gpt_neox_takes_one_beside_its_parallel_site():
    model = converted("gpt_neox", "mudd", layout="canon,attn", moved=True)
    with torch.no_grad():
        assert error(model(ids()).logits, base("gpt_neox")(ids()).logits) > 1e-3


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inserted_sublayers_decode_pad_and_come_back(layout, design, tmp_path):
    model = converted("llama", design, layout=layout, moved=True)
    greedy = {"max_new_tokens": 7, "do_sample": False}
    plain = model.generate(ids(), **greedy)
    assert torch.equal(model.generate(ids(), use_cache=False, **greedy), plain)
    assert torch.equal(model.generate(ids(), cache_implementation="static", disable_compile=True, **greedy), plain)
    beams = model.generate(ids(), num_beams=2, **greedy)
    assert torch.equal(model.generate(ids(), num_beams=2, use_cache=False, **greedy), beams)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids()], 1)
    mask = (torch.arange(12) >= 3).long().expand(2, -1)
    assert torch.equal(model.generate(padded, attention_mask=mask, **greedy)[:, 12:], plain[:, 9:])
    model.save_pretrained(tmp_path)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert again.config.layout == layout
    assert torch.equal(again.generate(ids(), **greedy), plain)


def test_inserted_sublayers_learn():
    model = converted("llama", "delta", layout="swa:window=3,attn,canon,mlp,conv").train()
    start = {name: each.detach().clone() for name, each in model.named_parameters() if ".inserted." in name}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(3):
        model(ids(), labels=ids()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, each in model.named_parameters():
        assert name not in start or not torch.equal(each, start[name]), f"{name} has not moved"


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("swa,mlp", "keeps its own sublayers"),
        ("mlp,attn", "keeps its own sublayers"),
        ("attn:window=3,mlp", "without options"),
        ("swa:windw=3,attn,mlp", "did you mean 'window'"),
        ("swa:window=0,attn,mlp", "at least 1"),
        ("lstm,attn,mlp", "unknown sublayer"),
    ],
)
def test_wrong_layout_is_refused_before_the_model_is_touched(layout, said):
    model = base("llama")
    with pytest.raises((ValueError, TypeError), match=said):
        convert(model, "delta", layout=layout, say=None)
    assert str(model) == str(base("llama"))


def test_inserted_sublayers_have_the_precision_of_the_model(tmp_path):
    base("llama").save_pretrained(tmp_path / "plain")
    layout = "swa:window=3,attn,canon,mlp"
    model = convert(str(tmp_path / "plain"), "delta", layout=layout, dtype=torch.bfloat16, say=None)
    kinds = {each.dtype for name, each in model.named_parameters() if ".inserted." in name}
    assert kinds == {torch.bfloat16}
    model.save_pretrained(tmp_path / "made")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.bfloat16)
    with torch.no_grad():
        assert error(again(ids()).logits, model(ids()).logits) < 6e-3
    assert again.generate(ids(), max_new_tokens=4, do_sample=False).shape == (2, 13)


def test_random_start_of_inserted_sublayers_is_seeded():
    torch.manual_seed(1)
    first = converted("llama", "delta", layout="swa,attn,mlp").state_dict()
    torch.manual_seed(2)
    second = converted("llama", "delta", layout="swa,attn,mlp").state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
