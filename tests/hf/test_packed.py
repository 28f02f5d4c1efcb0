"""Several documents in one row, told apart by `position_ids` alone: none of them sees another."""

import pytest
import torch
from transformers import DynamicCache

from residua.hf.convert import convert
from residua.testing import error
from tests.hf.models import converted, ids
from tests.hf.types import anatomy, model_of

LENGTHS = (3, 1, 5, 4)
ROW = ids(1, sum(LENGTHS))
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
LAYOUTS = ("swa:window=3,attn,mlp", "canon,attn,conv:kernel=3,mlp", "attn,mlp,swa:window=4:mode=local")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_of_a_row_are_as_if_each_were_alone(layout):
    model = converted("llama", "delta:blocks=2", layout=layout, moved=True).double().train()
    target = torch.randn(1, len(ROW[0]), 61, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (model(ROW, position_ids=POSITIONS, use_cache=False).logits * target).sum().backward()
    packed = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()
    alone = torch.cat([model(part, use_cache=False).logits for part in ROW.split(LENGTHS, 1)], 1)
    (alone * target).sum().backward()
    assert error(model(ROW, position_ids=POSITIONS, use_cache=False).logits, alone) < 1e-9
    for name, each in model.named_parameters():
        assert error(packed[name], each.grad) < 1e-9, name
    together = model(ROW, use_cache=False).logits
    assert error(together[:, LENGTHS[0] :], alone[:, LENGTHS[0] :]) > 1e-2  # apart they differ from one text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_the_last_document_goes_on_in_a_cache(layout):
    """Transformers' attention does not tell documents apart in a cache; it is made silent here, to see the rest."""
    model = converted("llama", "standard", layout=layout, moved=True)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
        cache, parts = DynamicCache(config=model.config), []
        for start, stop in ((0, 2), (2, 6), (6, 8), (8, 13)):
            cut = slice(start, stop)
            parts.append(model(ROW[:, cut], position_ids=POSITIONS[:, cut], past_key_values=cache).logits)
        alone = torch.cat([model(part, use_cache=False).logits for part in ROW.split(LENGTHS, 1)], 1)
    assert error(torch.cat(parts, 1), alone) < 2e-6


@pytest.mark.parametrize("design", ["ddl:channels=2,compress=token", "lambdas:smear=true"])
def test_designs_that_mix_tokens_refuse_packed_rows(design):
    model = converted("llama", design)
    with pytest.raises(ValueError, match="a row of its own"):
        model(ROW, position_ids=POSITIONS, use_cache=False)
    with torch.no_grad():
        shifted = model(ROW, position_ids=3 + torch.arange(13)[None], use_cache=False).logits
        assert shifted.shape == (1, 13, 61)
        model(ROW, position_ids=POSITIONS, attention_mask=torch.ones_like(ROW))  # a mask says that the row is one


def test_compiled_designs_that_mix_tokens_refuse_packed_rows_as_they_run():
    model = converted("llama", "ddl:channels=2,compress=token", num_hidden_layers=1)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        one = torch.arange(13)[None]
        assert error(compiled(ROW, position_ids=one, use_cache=False).logits, model(ROW).logits) < 2e-6
        with pytest.raises(RuntimeError, match="a row of its own"):
            compiled(ROW, position_ids=POSITIONS, use_cache=False)
    torch._dynamo.reset()


def test_positions_of_images_say_nothing_of_documents():
    """Qwen 3.5 takes time, height and width [3 b t]; before them it may have the place in the text [4 b t]."""
    model = model_of("qwen3_5_text")
    model.config.anatomy = anatomy("qwen3_5_text")
    model = convert(model, "ddl:channels=2,compress=token", say=None)
    one, several = torch.arange(13).expand(3, 1, 13), POSITIONS.expand(3, 1, 13)
    with torch.no_grad():
        wanted = model(ROW, use_cache=False).logits
        for positions in (one, torch.cat([one[:1], one])):
            assert error(model(ROW, position_ids=positions, use_cache=False).logits, wanted) < 2e-6
        model(ROW, position_ids=torch.cat([one[:1], several]), use_cache=False)
        model(ROW, position_ids=several, use_cache=False)
        with pytest.raises(ValueError, match="a row of its own"):
            model(ROW, position_ids=torch.cat([several[:1], one]), use_cache=False)
