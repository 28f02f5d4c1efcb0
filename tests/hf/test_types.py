"""Every type of AutoModelForCausalLM in the table of docs/convert.md, tiny: what the table says of it is so.

The table is written by `tools/update_types`, which tries every type with every design. Here every type that converts is
found again and tried with the two designs whose states differ most; the others take turns, one a type.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._dynamo
from transformers import AutoModelForCausalLM

from residua.hf.anatomy import from_json, probe, to_json
from residua.hf.convert import convert
from residua.hf.find import find
from residua.hf.proof import shown
from tests.hf.models import shake
from tests.hf.types import DESIGNS, ROUNDING, TYPES, anatomy, answers, check, gap, model_of, tokens
from tests.tools import tool

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
    monkeypatch.setattr(sys, "argv", ["update_types", "--check"])
    tool("update_types").main()


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


ATTN, MLP = "self_attn(lanes, **kwargs)", "mlp(x)"
SITES = {
    "gptj": ["attn: x = ln_1(raw), raw + y0 = attn(lanes, ", "; y0[0] + mlp(x)"],  # one norm, two branches at once
    "cohere": [f"attn: x = input_layernorm(raw), raw + {ATTN} + mlp(x)"],
    "gpt_neox": ["attn: x = input_layernorm(raw), raw + ", "mlp(post_attention_layernorm(raw))"],  # a norm for each
    "gemma3_text": [f"raw + post_attention_layernorm({ATTN})", f"raw + post_feedforward_layernorm({MLP})"],  # sandwich
    "glm4": [f"raw + post_self_attn_layernorm({ATTN})", f"raw + post_mlp_layernorm({MLP})"],
    "olmo3": ["attn: raw + post_attention_layernorm(self_attn(lanes", "mlp: raw + post_feedforward_layernorm(mlp(x))"],
    "granite": [f"{ATTN} * self.residual_multiplier", f"{MLP} * self.residual_multiplier"],
    "opt": ["torch.dropout(", "self.dropout)"],
    "phi": ["resid_dropout("],
    "mamba": ["mixer("],
}
"""What the finder must have read from one layer: by type, parts of its line."""
IN_TURN = {
    "jamba": ("mamba(", "self_attn("),
    "qwen3_next": ("linear_attn(", "self_attn("),
    "lfm2": ("conv(", "self_attn("),
}
"""Kinds of layers in turn, by what their first site calls."""


@pytest.mark.parametrize("name", SITES)
def test_feature_of_a_layer_is_read_as_it_is(name):
    """What the test above finds again, beside what a reader of the layer's code would write."""
    (line,) = TABLE[name]["sites"]
    assert all(part in line for part in SITES[name]), line


@pytest.mark.parametrize("name", IN_TURN)
def test_kinds_of_layers_in_turn_are_told_apart(name):
    lines = TABLE[name]["sites"]
    assert len(lines) == 2
    assert all(part in line.partition(" | ")[0] for line, part in zip(lines, IN_TURN[name], strict=True)), lines


VARIANTS = (
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {"parallel_attn": False, "alibi": True}),
    ("stablelm", {"use_parallel_residual": True}),
    ("deepseek_v3", {"q_lora_rank": None}),
    ("gemma4_text", {"enable_moe_block": True, "num_experts": 4}),
    ("gemma4_text", {"num_hidden_layers": 4, "num_kv_shared_layers": 2,
                     "layer_types": ["sliding_attention", "full_attention"] * 2}),
    ("llama4_text", {"num_hidden_layers": 4, "interleave_moe_layer_step": 2}),
    ("qwen2_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2}),
    ("qwen3_moe", {"mlp_only_layers": [0]}),
    ("cohere", {"use_qk_norm": True}),
    ("opt", {"word_embed_proj_dim": 16}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    ("qwen3_next", {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}),
)  # fmt: skip
"""Settings under which released checkpoints of a type are built otherwise than its tiny model: dense and mixture layers
in turn, branches beside or behind each other, shared keys."""


@pytest.mark.parametrize(("name", "extra"), VARIANTS)
def test_other_forms_of_a_type_convert(name, extra):
    model = model_of(name, **extra)
    before = answers(model)
    model.config.anatomy = to_json(find(model))
    model = convert(model, "delta:blocks=2", say=None)
    bound = max(model.config.identity["bound"], ROUNDING)
    assert all(gap(one, other) <= bound for one, other in zip(answers(model), before, strict=True))


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


def test_layers_are_those_that_are_there(tmp_path):
    """The num_hidden_layers of LongCat-Flash counts caches, two a layer."""

    def made(design):
        model = model_of("longcat_flash")
        model.config.anatomy = anatomy("longcat_flash")
        return convert(model, design, say=None)

    for design in ("lambdas", "denseformer"):  # whose parameters are as many as the layers
        made(design)
    model = made("ddl:channels=2,compress=token")
    shake(model)
    assert model.config.num_hidden_layers == 2 * len(model.model.layers)
    assert model.model.stream.plan.depth == len(model.model.layers)
    whole, decoded = answers(model)
    assert gap(decoded, whole[:, 6:8]) <= ROUNDING
    model.save_pretrained(tmp_path)
    assert torch.equal(answers(AutoModelForCausalLM.from_pretrained(tmp_path).eval())[0], whole)
    model.train()(tokens(), labels=tokens(), use_cache=False).loss.backward()
    assert all(each.grad is not None for each in model.model.stream.parameters())
    with pytest.raises(ValueError, match="has 2 layers, and the plan of its stream 4; convert the base again"):
        probe(model.model, replace(from_json(model.config.anatomy), depth=None))  # as it was kept before
