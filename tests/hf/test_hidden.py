"""Hidden states of types whose backbones list them themselves: what blocks read, and of `standard` the bases'."""

import copy
from functools import cache

import pytest
import torch

from residua.hf.convert import convert
from residua.testing import error
from tests.hf.types import ROUNDING, anatomy, model_of, tokens

LISTING = (
    "bloom", "codegen", "falcon", "falcon_mamba", "gpt_neo", "gpt_neox_japanese", "gptj", "mamba", "mamba2", "mpt",
)  # fmt: skip


def made(name, design):
    model = model_of(name)
    model.config.anatomy = anatomy(name)
    return convert(model, design, say=None)


@cache
def standard(name):
    return made(name, "standard")


@pytest.mark.parametrize("name", LISTING)
@torch.no_grad()
def test_hidden_states_are_those_of_the_base(name):
    plain, model = model_of(name), standard(name)
    asked = {"output_hidden_states": True, "use_cache": False}
    for one, other in ((model, plain), (model.base_model, plain.base_model)):
        after, before = one(tokens(), **asked), other(tokens(), **asked)
        assert list(after) == list(before)
        assert all(map(torch.equal, after.hidden_states, before.hidden_states))
        assert len(after.hidden_states) == len(before.hidden_states)
        flat, wanted = (each(tokens(), return_dict=False, **asked)[-1] for each in (one, other))
        assert all(map(torch.equal, flat, wanted))
        assert one(tokens(), use_cache=False).get("hidden_states") is None


@pytest.mark.parametrize("name", ["gptj", "mamba"])
def test_hidden_states_are_what_blocks_read_on_any_stream(name):
    """At the start delta:blocks=2 reads as the base does; under checkpoints too, and where the config asks for them."""
    plain, model = model_of(name), made(name, "delta:blocks=2")
    wanted = plain(tokens(), output_hidden_states=True, use_cache=False).hidden_states
    model.config.output_hidden_states = True
    for train in (False, True):
        if train:
            model.gradient_checkpointing_enable()
            model.train()
        found = model(tokens(), use_cache=False).hidden_states
        assert len(found) == len(wanted)
        assert all(error(one, other) < ROUNDING for one, other in zip(found, wanted, strict=True))


def test_hidden_states_are_listed_with_attentions_in_the_order_of_the_base():
    plain, model = model_of("gpt_neo"), copy.deepcopy(standard("gpt_neo"))
    for each in (plain, model):
        each.set_attn_implementation("eager")
    asked = {"output_hidden_states": True, "output_attentions": True, "use_cache": False}
    with torch.no_grad():
        assert list(model(tokens(), **asked)) == list(plain(tokens(), **asked))
