"""A model that keeps its residual stream in float32 (`residual_in_fp32`) keeps it so on any stream."""

import pytest
import torch

from residua.hf.convert import convert
from tests.hf.types import anatomy, model_of, tokens

TYPES = ("falcon_mamba", "mamba", "mamba2")


def made(name, design, layout=None, **extra):
    model = model_of(name, **extra).to(torch.bfloat16)
    model.config.anatomy = anatomy(name)
    return convert(model, design, layout=layout, say=None)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("kept", [True, False])
@torch.no_grad()
def test_state_is_kept_in_float32_where_the_base_keeps_it_so(name, kept):
    plain = model_of(name, residual_in_fp32=kept).to(torch.bfloat16)
    model = made(name, "standard", residual_in_fp32=kept)
    asked = {"output_hidden_states": True, "use_cache": False}
    before, after = plain(tokens(), **asked), model(tokens(), **asked)
    assert torch.equal(after.logits, before.logits)
    assert [each.dtype for each in after.hidden_states] == [each.dtype for each in before.hidden_states]
    assert all(map(torch.equal, after.hidden_states, before.hidden_states))


def test_other_designs_and_inserted_sublayers_learn_on_it():
    for design in ("delta:blocks=2", "mhc", "ddl:channels=2,compress=token"):
        model = made("mamba", design, "canon,attn").train()
        model(tokens(), labels=tokens(), use_cache=False).loss.backward()
        assert all(each.grad is not None for name, each in model.named_parameters() if ".inserted." in name), design
        start = model.eval()(tokens()[:, :6], use_cache=True)
        assert model(tokens()[:, 6:7], cache_params=start.cache_params).logits.isfinite().all()
