"""Padding, documents and tokens reach layers whose loops hand on what they name and nothing else."""

import copy
import pickle
import threading
from functools import cache

import pytest
import torch
import torch._dynamo

from residua.hf.convert import convert
from residua.testing import error
from tests.hf.models import ids, shake
from tests.hf.types import ROUNDING, anatomy, model_of

PACKING = ("codegen", "gpt_neo", "gpt_neox_japanese", "gptj")
"""Those whose attention keeps documents apart by position_ids."""
PLACED = ("falcon", "opt", *PACKING)
"""Those that take position_ids."""
SILENT = ("bloom", "falcon_mamba", "mamba", "mpt", *PLACED)
"""Types whose loops name what they hand on; of opt, the head does not call the backbone."""
ROW, PAD = ids(1, 6), 3
PADDED = torch.cat([torch.ones(1, PAD, dtype=torch.long), ROW], 1)
MASK = (torch.arange(PAD + 6) >= PAD).long()[None]


@cache
def _made(name, design, around):
    model = model_of(name)
    model.config.anatomy = anatomy(name)
    own = ",".join(part["kind"] for part in anatomy(name)["blocks"][0]["parts"])
    model = convert(model, design, layout=f"canon,{own}" if around else None, say=None)
    shake(model)
    return model


def made(name, design="lambdas:smear=true", *, around=True):
    """A tiny model whose stream mixes tokens, with a sublayer inserted that does."""
    return copy.deepcopy(_made(name, design, around))


def padded(name):
    """What a model is handed for a row with padding before it."""
    places = {"position_ids": (MASK.cumsum(1) - 1).clamp_min(0)} if name in PLACED else {}
    return {"input_ids": PADDED, "attention_mask": MASK, "use_cache": False, **places}


@pytest.mark.parametrize("name", SILENT)
def test_padding_changes_nothing(name):
    model = made(name)
    with torch.no_grad():
        alone = model(ROW, use_cache=False).logits
        assert error(model(**padded(name)).logits[:, PAD:], alone) < ROUNDING
        bare = model.base_model(ROW, use_cache=False)[0]
        assert error(model.base_model(**padded(name))[0][:, PAD:], bare) < ROUNDING


@pytest.mark.parametrize("name", PACKING)
def test_documents_of_a_row_do_not_see_each_other(name):
    model = made(name, "standard")
    places = torch.tensor([[0, 1, 0, 1, 2, 3]])
    with torch.no_grad():
        packed = model(ROW, position_ids=places, use_cache=False).logits
        assert error(packed[:, 2:], model(ROW[:, 2:], use_cache=False).logits) < ROUNDING
    with pytest.raises(ValueError, match="a row of its own"):
        made(name)(ROW, position_ids=places, use_cache=False)


@pytest.mark.parametrize("name", ["bloom", "gpt_neo", "gpt_neox_japanese", "gptj", "mpt", "opt"])
def test_tokens_are_looked_up(name):
    model = made(name, "delta:value=zero_table", around=False)
    with torch.no_grad():
        before = model(ROW, use_cache=False).logits
        for table in model.base_model.stream.side.values():
            table.table.vectors[ROW[0, -1]] += 1
        assert error(model(ROW, use_cache=False).logits, before) > 1e-3


@pytest.mark.parametrize("name", ["bloom", "codegen", "falcon", "gpt_neox_japanese", "gptj", "opt"])
def test_static_cache_knows_padding(name):
    """Its masks have a shape of their own, and heads may keep to themselves what generation says besides."""
    model = made(name)
    greedy = {"max_new_tokens": 4, "do_sample": False, "disable_compile": True}
    wanted = model.generate(ROW, attention_mask=torch.ones_like(ROW), **greedy)[:, 6:]
    for kind in ("dynamic", "static"):
        found = model.generate(PADDED, attention_mask=MASK, cache_implementation=kind, **greedy)[:, PAD + 6 :]
        assert torch.equal(found, wanted), kind


@pytest.mark.parametrize("name", ["gptj", "opt", "mamba"])
def test_checkpoints_are_told_again(name):
    model = made(name).train()
    model.config.use_cache = False

    def gradients():
        model.zero_grad()
        torch.manual_seed(0)  # of dropout
        model(**padded(name)).logits[:, PAD:].square().sum().backward()
        return {key: each.grad for key, each in model.named_parameters()}

    wanted = gradients()
    model.gradient_checkpointing_enable()
    assert all(torch.equal(each, wanted[key]) for key, each in gradients().items() if each is not None)


def test_compiled_it_is_one_graph():
    model, name = made("gptj"), "gptj"
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert error(compiled(**padded(name)).logits, model(**padded(name)).logits) < ROUNDING
    torch._dynamo.reset()


def test_nothing_outlives_a_forward_and_threads_do_not_meet():
    model = made("gptj")
    with torch.no_grad():
        model(**padded("gptj"))
        with pytest.raises(RuntimeError):
            model(PADDED, attention_mask=MASK, position_ids=MASK[:, :2], use_cache=False)
        wanted = [model(**padded("gptj")).logits, model(PADDED, use_cache=False).logits]
    found = [[], []]

    def run(place):
        with torch.no_grad():
            for _ in range(8):
                given = padded("gptj") if place == 0 else {"input_ids": PADDED, "use_cache": False}
                found[place].append(model(**given).logits)

    threads = [threading.Thread(target=run, args=(place,)) for place in (0, 1)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert all(torch.equal(each, wanted[place]) for place in (0, 1) for each in found[place])
    again = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        assert torch.equal(again(**padded("gptj")).logits, wanted[0])
