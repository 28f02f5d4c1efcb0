"""Every type of AutoModelForCausalLM in the table of docs/convert.md, tiny: what the table says of it is so.

The table is written by `tools/update_types`, which tries every type with every design. Here every type that converts is
found again and tried with the two designs whose states differ most; the others take turns, one a type.
"""

import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo

from residua.hf.anatomy import from_json
from residua.hf.convert import convert
from residua.hf.find import find
from residua.hf.proof import shown
from tests.hf.types import DESIGNS, ROUNDING, TYPES, anatomy, check, gap, model_of, tokens

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # gpt_bigcode's

ROOT = Path(__file__).parents[2]
TABLE = json.loads((ROOT / "results" / "types.json").read_text())["types"]
CONVERTED = [name for name, found in TABLE.items() if "why" not in found]
REFUSED = [name for name, found in TABLE.items() if not found.get("why", "not tried").startswith("not tried")]

ASKED = (
    "gemma", "gemma4_text", "qwen2_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo", "olmo3", "olmoe",
    "cohere", "cohere2", "falcon", "glm", "glm4", "glm4_moe", "deepseek_v2", "deepseek_v3", "ernie4_5", "exaone4",
    "starcoder2", "stablelm", "opt", "bloom", "gpt_oss", "llama4_text", "nemotron", "lfm2", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "minimax", "seed_oss", "gptj", "gpt_neo", "phi", "mamba", "mamba2", "jamba", "modernbert-decoder",
)  # fmt: skip
"""Types that people ask for first."""


def test_table_is_current(monkeypatch):
    loader = importlib.machinery.SourceFileLoader("update_types", str(ROOT / "tools" / "update_types"))
    tool = importlib.util.module_from_spec(importlib.util.spec_from_loader("update_types", loader))
    loader.exec_module(tool)
    monkeypatch.setattr(sys, "argv", ["update_types", "--check"])
    tool.main()


def test_enough_types_convert():
    every = [
        name
        for name in CONVERTED
        if all(said == "yes" or "inputs of their own" in said for said in TABLE[name]["designs"].values())
    ]
    assert len(every) >= 90, "with standard, delta, attnres and mhc, and with mudd wherever q, k and v have projections"
    assert set(ASKED) <= set(CONVERTED)
    assert set(TYPES) == set(TABLE)


@pytest.mark.parametrize("place", range(len(CONVERTED)), ids=CONVERTED)
def test_type_converts_as_the_table_says(place, tmp_path):
    name = CONVERTED[place]
    said = TABLE[name]
    found = from_json(anatomy(name))
    assert [shown(block) for block in found.blocks] == said["sites"]
    assert found.exact == said["exact"]
    for design in (*DESIGNS[:2], DESIGNS[2 + place % 3]):
        refusal = check(name, design, tmp_path / design.partition(":")[0])
        assert (refusal is None) == (said["designs"][design] == "yes"), refusal


@pytest.mark.parametrize("name", REFUSED)
def test_type_is_refused_as_the_table_says(name):
    model = model_of(name)
    keys = list(model.state_dict())
    if "outside its layers" not in TABLE[name]["why"]:
        with pytest.raises(ValueError) as caught:
            find(model)
        assert str(caught.value).startswith(TABLE[name]["why"])
        assert "\n" not in str(caught.value)
    assert list(model.state_dict()) == keys
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["gemma", "olmo", "olmo3", "qwen2_moe", "gpt_oss", "deepseek_v3", "cohere2"])
def test_found_anatomy_is_one_graph(name):
    """As its base is: the lines of an anatomy leave nothing in the way of a compiler."""
    model = model_of(name)
    model.config.anatomy = anatomy(name)
    lanes = TABLE[name]["designs"]["mudd"] == "yes"
    model = convert(model, "mudd" if lanes else "delta:blocks=2", say=None)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert gap(compiled(tokens(), use_cache=False).logits, model(tokens(), use_cache=False).logits) < ROUNDING
    torch._dynamo.reset()
