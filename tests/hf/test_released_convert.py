"""The other way: the designs of released models enter the decoders that we convert, or are refused with the reason."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from residua.testing import error
from tests.hf.models import base, converted, ids

DESIGNS = (
    "mhc:head=learned", "mhc:res=identity", "mhc:res=identity,head=learned", "mhc:pass=previous",
    "mhc:res=krom,head=mean", "altup",
)  # fmt: skip
architectures = pytest.mark.parametrize("architecture", ["llama", "gemma2"])


@architectures
@pytest.mark.parametrize("design", DESIGNS)
def test_released_design_enters_a_decoder(architecture, design, tmp_path):
    model = converted(architecture, design)
    assert model.config.identity["same"]
    with torch.no_grad():
        before, after = base(architecture)(ids()).logits, model(ids()).logits
    assert ((after - before).abs().max() / before.square().mean().sqrt()) <= model.config.identity["bound"]


@architectures
@pytest.mark.parametrize("design", ["mhc:head=learned", "mhc:res=identity"])
def test_released_design_decodes_and_is_saved_once_converted(architecture, design, tmp_path):
    model = converted(architecture, design, moved=True)
    with torch.no_grad():
        whole = model(ids()).logits
        output = model(ids()[:, :3], use_cache=True)
        steps = [output.logits]
        for place in range(3, ids().shape[1]):
            output = model(ids()[:, place : place + 1], past_key_values=output.past_key_values, use_cache=True)
            steps.append(output.logits)
    assert error(torch.cat(steps, 1), whole) < 1e-5
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(ids()).logits, whole)


@architectures
@pytest.mark.parametrize(
    ("design", "said"),
    [
        ("gated", "gated cannot enter a trained network: it normalises what it reads by itself"),
        ("mhc:model=deepseek-v4", "does not start as the base network.*leave out eps"),
        ("mhc:model=hy-v4", "does not start as the base network"),
    ],
)
def test_released_design_that_is_no_base_is_refused(architecture, design, said):
    with pytest.raises(ValueError, match=said):
        converted(architecture, design)
