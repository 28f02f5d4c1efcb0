"""Checkpoints of the released Delta code: written here with its keys, weights by formula, compared with the oracle."""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from residua.hf.official import design_of, load_official
from residua.testing import error
from tests.hf.models import CONFIGS, base, ids
from tests.oracles import released_delta

LAYERS, BLOCKS = 5, 2  # ceil(5 / 2) = 3 layers a block: the last is short; with 3 blocks, 2 layers, three boundaries
GATES = ("bias", "sigmoid_scalar", "sigmoid_vector", "learnable_alpha")


def config(**own):
    return CONFIGS["qwen3"] | {"num_hidden_layers": LAYERS} | own


def formula(shape, seed):
    """Numbers that no initialisation gives and every machine agrees on."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(1, count + 1, dtype=torch.float64) * (1.0 + 0.37 * seed)).reshape(shape).float()


def routing(mode, gate, null, width=32):
    """The released keys of one checkpoint."""
    keys, seeds = {}, itertools.count()
    for layer, kind in itertools.product(range(LAYERS), ("attn", "mlp")):
        start = f"model.layers.{layer}.{kind}_"
        keys[start + "res_proj.weight"] = formula((1, width), next(seeds))
        keys[start + "res_norm.weight"] = 1 + 0.3 * formula((width,), next(seeds))
        if null:
            keys[start + "null_source"] = 0.5 * formula((width,), next(seeds))
        if gate == "sigmoid_scalar":
            keys[start + "res_gate_logit"] = formula((), next(seeds))
        elif gate == "sigmoid_vector":
            keys[start + "res_gate_proj.weight"] = 0.1 * formula((width, width), next(seeds))
            keys[start + "res_gate_proj.bias"] = formula((width,), next(seeds))
        elif gate == "learnable_alpha":
            keys[start + "res_alpha"] = formula((), next(seeds))
    if mode in ("block", "full"):
        keys["model.final_res_proj.weight"] = formula((1, width), next(seeds))
        keys["model.final_res_norm.weight"] = 1 + 0.3 * formula((width,), next(seeds))
    return keys


def write(folder, mode, gate="bias", null=False, blocks=BLOCKS, extra=(), **own):
    """A directory as the released code writes it; its plain Qwen3, and its routing parameters."""
    plain, keys = base("qwen3", num_hidden_layers=LAYERS), routing(mode, gate, null)
    weights = {key: value.contiguous() for key, value in plain.state_dict().items() if key != "lm_head.weight"}
    save_file(weights | keys | dict(extra), folder / "model.safetensors", {"format": "pt"})
    values = plain.config.to_dict() | {
        "model_type": "qwen3_attnres", "architectures": ["Qwen3AttnResForCausalLM"], "attnres_mode": mode,
        "attnres_num_blocks": blocks, "attnres_gate_type": gate, "attnres_use_null_source": null,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values | own, default=str))
    return plain, keys


def oracle(plain, keys, mode, gate, null, blocks):
    """Logits by the oracle, through the sublayers of the plain Qwen3."""
    model, eps = plain.model, plain.config.rms_norm_eps
    e = model.embed_tokens(ids())
    rotary = model.rotary_emb(e, torch.arange(e.shape[1])[None])
    causal = torch.full((e.shape[1],) * 2, float("-inf"), dtype=e.dtype).triu(1)[None, None].expand(len(e), -1, -1, -1)

    def attention(layer):
        return lambda x: layer.self_attn(
            layer.input_layernorm(x), position_embeddings=rotary, attention_mask=causal
        )[0]  # fmt: skip

    def mlp(layer):
        return lambda x: layer.mlp(layer.post_attention_layernorm(x))

    layers = [(attention(layer), mlp(layer)) for layer in model.layers]
    sites = [
        {
            kind: {
                key.removeprefix(f"model.layers.{layer}.{kind}_"): value
                for key, value in keys.items()
                if key.startswith(f"model.layers.{layer}.{kind}_")
            }
            for kind in ("attn", "mlp")
        }
        for layer in range(LAYERS)
    ]
    span = -(-LAYERS // blocks) if "block" in mode else 0
    if mode in ("delta", "delta_block"):
        h = released_delta.additive(e, layers, sites, gate=gate, null=null, span=span, eps=eps)
    else:
        final = {key.removeprefix("model.final_"): value for key, value in keys.items() if "final" in key}
        h = released_delta.replacing(e, layers, sites, final, span=span, eps=eps)
    return plain.lm_head(model.norm(h))


CASES = [
    *itertools.product(("delta", "delta_block"), GATES, (False, True), (2, 3)),
    *itertools.product(("block", "full"), ("bias",), (False,), (2, 3)),
]


@pytest.mark.parametrize(("mode", "gate", "null", "blocks"), CASES)
def test_released_checkpoint_gives_the_oracles_logits(mode, gate, null, blocks, tmp_path):
    """In float64: mode full is so conditioned that the oracle itself is 3e-6 off in float32. Qwen3's norms round to
    float32 whatever the model's type, and one of their last bits is what the bound allows."""
    plain, keys = write(tmp_path, mode, gate, null, blocks)
    model, plain = load_official(tmp_path).double(), plain.double()
    with torch.no_grad():
        expected = oracle(plain, {key: value.double() for key, value in keys.items()}, mode, gate, null, blocks)
        assert error(model(ids()).logits, expected) < 1e-7
        assert error(plain(ids()).logits, expected) > 1e-2, "the routing does nothing"


def test_loaded_model_is_saved_as_any_other(tmp_path):
    write(tmp_path, "delta_block", "learnable_alpha", null=True)
    model = load_official(tmp_path)
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(again(ids()).logits, model(ids()).logits)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"mode": "delta_centered"}, "delta_centered"),
        ({"mode": "block_v"}, "block_v"),
        ({"mode": "delta", "gate": "softmax"}, "softmax"),
        ({"mode": "block", "gate": "learnable_alpha"}, "replaces"),
        ({"mode": "full", "null": True}, "null source"),
        ({"mode": "delta", "extra": {"model.layers.0.v_res_proj.weight": torch.ones(1, 32)}}, "v_res_proj"),
        ({"mode": "delta", "extra": {"model.final_res_proj.weight": torch.ones(1, 32)}}, "final_res_proj"),
        ({"mode": "delta", "attnres_temperature": 2.0}, "attnres_temperature"),
    ],
)
def test_unknown_mode_or_leftover_key_is_refused(own, said, tmp_path):
    write(tmp_path, **own)
    with pytest.raises(ValueError, match=said):
        load_official(tmp_path)


def test_missing_routing_key_is_refused(tmp_path):
    write(tmp_path, "delta")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp_res_norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="lacks"):
        load_official(tmp_path)


def test_older_configuration_fields_are_known():
    values = config(attnres_mode="delta", attnres_init_bias=3.0, rms_norm_eps=1e-5)
    assert design_of(values)["eps"] == 1e-5
