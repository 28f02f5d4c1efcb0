"""A lane reaches the projection of its name, whether q, k and v have one each or share a fused one.

What attention is tells them apart without a look at its weights. The first token sees itself alone: its value changes
its own answer, its key those of later tokens only, and its query none.
"""

import pytest
import torch
import torch._dynamo
from peft import LoraConfig, get_peft_model

from residua.hf.anatomy import ANATOMY
from residua.testing import error
from tests.hf.models import WIDTH, converted, ids


@pytest.mark.parametrize("architecture", ANATOMY)
def test_lane_reaches_its_own_projection(architecture):
    model = converted(architecture, "mudd", moved=True)
    anatomy = ANATOMY[architecture]
    layer = getattr(model.base_model, anatomy.layers)[1]  # the first block of this design has one lane
    attention = getattr(layer, anatomy.parts[0].sublayer)
    turns, answers = iter((None, 0, 1, 2)), []

    def change(module, args, kwargs):
        changed = next(turns)
        place = "hidden_states" if "hidden_states" in kwargs else None
        x = kwargs[place] if place else args[0]
        assert x.shape[-1] == 3 * WIDTH
        if changed is not None:
            x = x.clone()
            x[:, 0, changed * WIDTH : (changed + 1) * WIDTH] += torch.linspace(-3, 3, WIDTH)
        return (args, kwargs | {place: x}) if place else ((x, *args[1:]), kwargs)

    attention.register_forward_pre_hook(change, with_kwargs=True)
    attention.register_forward_hook(lambda module, args, output: answers.append(output[0]))
    with torch.no_grad():
        for _ in range(4):
            model(ids())
    plain, *others = answers
    first, later = zip(*(((y - plain)[:, :1].abs().max(), (y - plain)[:, 1:].abs().max()) for y in others), strict=True)
    moved = [(one > 1e-4, two > 1e-4) for one, two in zip(first, later, strict=True)]
    assert moved[0] == (False, False), "the query of the first token changed an answer"
    assert moved[1] == (False, True), "the key of the first token changed its own answer, or none"
    assert moved[2][0], "the value of the first token did not change its answer"


def test_replaced_projections_are_compiled_with_their_lanes():
    """LoRA puts modules in the place of projections, merging puts them back: no eager forward has to come between."""
    tuned = get_peft_model(converted("llama", "mudd", moved=True), LoraConfig(r=2, init_lora_weights=False)).eval()
    for each in (lambda: tuned, tuned.merge_and_unload):
        found = each()
        torch._dynamo.reset()
        with torch.no_grad():
            compiled = torch.compile(found, fullgraph=True, backend="eager")(input_ids=ids(), use_cache=False).logits
            assert error(compiled, found(input_ids=ids(), use_cache=False).logits) < 2e-6
    torch._dynamo.reset()
