"""Every architecture in the table, on the designs that together use every part of the forward.

What a conversion is at its start is cheap to check, and is checked for every pair. The rest runs for every architecture
with the design that uses most of its anatomy (q, k and v apart) and with one that keeps a past, and for every design on
one architecture: a design knows no architecture, and an architecture no design.
"""

import re
from pathlib import Path

import pytest
import torch
import torch._dynamo
from transformers import AutoModelForCausalLM

import residua
from residua.hf.anatomy import ANATOMY
from residua.testing import error
from tests.hf.models import ALSO, CONFIGS, base, converted, ids

ARCHITECTURES = (*ANATOMY, *ALSO)
DESIGNS = ("standard", "attnres:blocks=2", "delta", "delta:blocks=2", "mudd", "ddl")
ROUTED = "delta:blocks=2"
LANES = "mudd"
TOKENS = "ddl:channels=2,compress=token"
MOVED = (*DESIGNS, TOKENS)
"""Those, and one that keeps a past; with parameters away from their start."""


def pairs(everywhere, designs):
    """Some designs on every architecture, and the others on one of them."""
    found = [(architecture, design) for architecture in ARCHITECTURES for design in everywhere]
    return found + [("llama", design) for design in designs if design not in everywhere]


ACTING = pytest.mark.parametrize(("architecture", "design"), pairs((LANES, TOKENS), MOVED))


def test_every_architecture_has_a_tiny_model():
    assert set(CONFIGS) == set(ANATOMY)


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_conversion_keeps_logits_and_keys(architecture, design):
    plain = base(architecture)
    model = converted(architecture, design)
    with torch.no_grad():
        before, after = (each(ids(), output_hidden_states=True) for each in (plain, model))
    gap = (after.logits - before.logits).abs().max() / before.logits.square().mean().sqrt()
    assert gap <= (1e-5 if design.startswith("attnres") else 0)
    kept = dict(plain.named_parameters())
    added = {name for name, _ in model.named_parameters()} - set(kept)
    assert all(".stream.at." in name for name in added)
    assert all(torch.equal(kept[name], each) for name, each in model.named_parameters() if name in kept)
    assert (len(added) == 0) == (design == "standard")
    if design == "standard":
        assert len(after.hidden_states) == len(before.hidden_states)
        assert all(map(torch.equal, after.hidden_states, before.hidden_states))


@ACTING
def test_saved_model_comes_back(architecture, design, tmp_path):
    model = converted(architecture, design, moved=True)
    model.save_pretrained(tmp_path)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is type(model)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    saved, loaded = model.state_dict(), again.state_dict()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[key], loaded[key]) for key in saved)
    with torch.no_grad():
        assert error(again.eval()(ids()).logits, model(ids()).logits) < 2e-6
        moved = error(model(ids()).logits, base(architecture)(ids()).logits)
    assert (moved > 1e-3) == (design != "standard"), f"the design moves the logits by {moved:.2g}"


def tokens(model, **options):
    options = {"max_new_tokens": 8, "do_sample": False} | options
    return model.generate(ids(), **options)


@ACTING
def test_generation_is_the_same_with_every_cache(architecture, design):
    """Dynamic (sliding where the model is), static and none: the same tokens; and the cache's logits are the plain
    forward's."""
    model = converted(architecture, design, moved=True)
    dynamic = tokens(model)
    assert torch.equal(tokens(model, use_cache=False), dynamic)
    assert torch.equal(tokens(model, cache_implementation="static", disable_compile=True), dynamic)
    with torch.no_grad():
        whole, cache, parts = model(ids(2, 12)).logits, None, []
        for part in ids(2, 12).split([5, 1, 1, 4, 1], 1):
            output = model(part, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits)
    assert error(torch.cat(parts, 1), whole) < 2e-6


@ACTING
def test_left_padding_changes_nothing(architecture, design):
    model = converted(architecture, design, moved=True)
    prompt = ids(1, 6)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt], 1)
    mask = (torch.arange(9) >= 3).long()[None]
    with torch.no_grad():
        plain = model(prompt).logits
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        assert error(model(padded, attention_mask=mask, position_ids=positions).logits[:, 3:], plain) < 2e-6
    for options in ({}, {"cache_implementation": "static", "disable_compile": True}, {"use_cache": False}):
        alone = model.generate(prompt, max_new_tokens=6, do_sample=False, **options)[:, 6:]
        together = model.generate(padded, attention_mask=mask, max_new_tokens=6, do_sample=False, **options)[:, 9:]
        assert torch.equal(alone, together), options


def gradients(model, **options):
    model.zero_grad()
    model(ids(), labels=ids(), **options).loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@ACTING
def test_checkpointing_gives_the_same_gradients(architecture, design):
    model = converted(architecture, design, moved=True).train()
    plain = gradients(model, use_cache=False)
    model.gradient_checkpointing_enable()
    recomputed = gradients(model, use_cache=False)
    assert plain.keys() == recomputed.keys()
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)
    assert all(plain[name].abs().max() > 0 for name in plain if ".stream." in name)


@pytest.mark.parametrize("architecture", [each for each in ARCHITECTURES if each != "gemma2"])  # which has eager alone
def test_eager_and_sdpa_agree(architecture):
    model = converted(architecture, LANES, moved=True)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        eager = model(ids()).logits
        model.set_attn_implementation("sdpa")
        assert error(model(ids()).logits, eager) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "design"), pairs((LANES,), ("attnres:blocks=2", ROUTED, TOKENS)))
def test_model_is_one_graph(architecture, design):
    model = converted(architecture, design, moved=True)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert error(compiled(ids(), use_cache=False).logits, model(ids(), use_cache=False).logits) < 2e-6
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("design", [ROUTED, LANES, "ddl"])
def test_graph_of_the_backward_gives_the_same_gradients(design):
    model = converted("llama", design, moved=True).train()
    plain = gradients(model, use_cache=False)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    traced = gradients(compiled, use_cache=False)
    torch._dynamo.reset()
    assert {name.removeprefix("_orig_mod.") for name in traced} == plain.keys()
    # As one vector, the design's and the base's: of a scalar whose terms cancel (DDL's blend in layer 1), swapping the
    # two rows of the batch alone moves 3.5e-5.
    for added in (True, False):
        chosen = [name for name in plain if (".stream." in name) == added]
        one, other = (torch.cat([each[start + name].flatten() for name in chosen])
                      for each, start in ((traced, "_orig_mod."), (plain, "")))  # fmt: skip
        assert error(one, other) < 5e-6


def test_page_names_every_architecture_and_design():
    page = (Path(__file__).parents[2] / "docs" / "convert.md").read_text()
    said = page[page.index("## Architectures") :].replace("gemma3 (text)", "gemma3_text")
    assert not [name for name in ANATOMY if not re.search(rf"\b{name}\b", said)]
    assert not [name for name in residua.names() if f"`{name}`" not in page]


def test_names_of_designs_are_all_decided():
    """Every design of the package either enters or is refused with a reason."""
    from residua.hf.defaults import entry

    for name in residua.names():
        refusal = residua.design(name).conversion.refusal
        if refusal is None:
            assert entry(name, residua.Plan.regular(8, 4))[0].starts != "no"
        else:
            with pytest.raises(ValueError, match="train it from scratch"):
                entry(name, residua.Plan.regular(8, 4))
