"""A tiny model of every type of AutoModelForCausalLM: its own configuration, with every size made small.

`SMALL` shrinks what configurations call alike; `OWN` is what a type needs besides, and nothing where it needs nothing.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from residua.hf.anatomy import to_json
from residua.hf.convert import convert
from residua.hf.find import find

TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB, WIDTH, LAYERS, HEADS = 61, 32, 2, 4

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "sliding_window": 6,
    # experts
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_local_experts": 4,
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 24, "moe_num_experts": 4, "moe_k": 2, "num_shared_experts": 1,
    "shared_intermediate_size": 24, "decoder_sparse_step": 1, "intermediate_size_mlp": 48,
    "moe_layer_start_index": 1, "num_dense_layers": 1, "mlp_only_layers": [],
    "top_k_experts": 2, "num_mtp_layers": 0,
    # latent attention
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    # state spaces, linear attention and convolutions
    "mamba_d_state": 4, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 4, "mamba_d_head": 16,
    "mamba_n_groups": 1, "mamba_chunk_size": 4, "mamba_dt_rank": 4, "mamba_d_ssm": 64, "use_mamba_kernels": False,
    "state_size": 4, "time_step_rank": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "conv_L_cache": 3,
    "n_groups": 1, "chunk_size": 4, "ssm_state_size": 4, "mamba_num_heads": 4, "mamba_head_dim": 16,
    # sizes by other names
    "d_model": WIDTH, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64, "n_layers": LAYERS,
    "n_heads": HEADS, "max_seq_len": 64, "ffn_dim": 48, "ffn_hidden_size": 48, "num_layers": LAYERS, "d_ff": 48,
    "decoder_layers": LAYERS, "decoder_attention_heads": HEADS, "decoder_ffn_dim": 48, "encoder_layers": LAYERS,
    "encoder_attention_heads": HEADS, "encoder_ffn_dim": 48, "n_inner": 48, "rotary_dim": 4,
    "word_embed_proj_dim": WIDTH,
    "attention_heads": HEADS, "embedding_size": WIDTH, "input_embedding_size": WIDTH, "output_embedding_size": WIDTH,
    "dim_ff": 48, "dim_head": 8, "lru_width": WIDTH, "attention_window_size": 6, "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8, "dff": 48, "kv_channels": 8, "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window_size": 6, "rel_extent": 16, "d_rel": 4,
    "attention_chunk_size": 6,
}  # fmt: skip

TURNS = ["linear_attention", "full_attention"]
"""Two kinds of layers in turn, by the names that hybrid types share."""

OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": TURNS, "mlp_layer_types": ["dense", "sparse"]},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            each: {"rope_type": "default", "rope_theta": 1e4} for each in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": WIDTH},
    },
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "laurel_rank": 4,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "granitemoehybrid": {"layer_types": TURNS, "residual_multiplier": 0.5},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 0},
    "kimi_linear": {
        "layer_types": TURNS,
        "mlp_layer_types": ["dense", "sparse"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"moe_topk": 2, "zero_expert_num": 2, "expert_ffn_hidden_size": 24, "head_dim": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "minimax": {"layer_types": TURNS, "block_size": 4, "full_attn_alpha_factor": 1.5, "mlp_beta_factor": 0.5},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "moe"],
        "moe_shared_expert_intermediate_size": 24,
    },
    "olmo_hybrid": {"layer_types": TURNS},
    "qwen3_5_moe_text": {"layer_types": TURNS},
    "qwen3_5_text": {"layer_types": TURNS},
    "qwen3_next": {"layer_types": TURNS},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "xlstm": {"num_heads": 4, "chunk_size": 16},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],  # one alone has nothing to share
        "n_mamba_heads": 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 4, "mamba_ngroups": 1},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 8},
}
"""What some types need besides: the kinds of two layers, where by themselves both would be the same."""


def config_of(model_type: str, **extra: Any) -> Any:
    """The configuration of a type, small."""
    cls = CONFIG_MAPPING[model_type]
    fields = {each.name for each in dataclasses.fields(cls)}
    small = {name: value for name, value in SMALL.items() if name in fields}
    if "kv_lora_rank" in fields:  # latent attention makes keys for every head
        small["num_key_value_heads"] = HEADS
    return cls(**small | OWN.get(model_type, {}) | extra)


def _new(model_type: str, **extra: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(model_type, **extra)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@cache
def _made(model_type: str) -> Any:
    return _new(model_type)


def model_of(model_type: str, **extra: Any) -> Any:
    """A tiny model of a type, with weights that no initialisation would give; the same every time."""
    return _new(model_type, **extra) if extra else copy.deepcopy(_made(model_type))


DESIGNS = ("standard", "delta:blocks=2", "attnres:blocks=2", "mhc", "mudd")
"""What every type is tried with."""
ROUNDING = 2e-6
"""What a decoded token may differ by beside a bound, relative to the RMS of the logits."""
MOST = 2_000_000
"""Parameters that a tiny model may have: what is larger has parts beside its text decoder that nothing here shrinks."""


def tokens() -> torch.Tensor:
    return torch.randint(2, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))


def built(model_type: str) -> None:
    """Refuse a type that cannot be made small."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        with torch.device("meta"):
            size = sum(each.numel() for each in AutoModelForCausalLM.from_config(config_of(model_type)).parameters())
    except (
        ImportError,
        AssertionError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        StrictDataclassError,
    ) as error:
        raise ValueError(
            f"not tried: its tiny configuration does not build ({str(error).strip().splitlines()[-1].strip()})"
        ) from None
    if size > MOST:
        raise ValueError(
            "not tried: its smallest test configuration is too large; if it has a text model, convert that"
        )


@torch.no_grad()
def answers(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a prompt, and of two tokens decoded after it."""
    whole, start = model(tokens(), use_cache=False).logits, model(tokens()[:, :6], use_cache=True)
    key = next((each for each in ("past_key_values", "cache_params", "state") if each in start), None)
    if key is None:
        raise ValueError("not tried: it hands out no cache to decode with")
    cache, decoded = start[key], []
    for place in (6, 7):
        made = model(tokens()[:, place : place + 1], use_cache=True, **{key: cache})
        cache = made[key]
        decoded.append(made.logits)
    return whole, torch.cat(decoded, 1)


@cache
def plain(model_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    return answers(_made(model_type))


@cache
def anatomy(model_type: str) -> dict[str, Any]:
    """What the finder finds, as a config keeps it; of a type with a row, too."""
    return to_json(find(model_of(model_type)))


def stored(folder: Path) -> set[str]:
    """The keys of a saved model."""
    found: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as held:
            found |= set(held.keys())
    return found


@cache
def plain_keys(model_type: str) -> frozenset[str]:
    """Those of the base."""
    with tempfile.TemporaryDirectory() as folder:
        _made(model_type).save_pretrained(folder)
        return frozenset(stored(Path(folder)))


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).abs().max() / other.square().mean().sqrt()).item()


def check(model_type: str, design: str, folder: Path) -> str | None:
    """Convert a tiny model with the anatomy that is found: identity in a prompt and decoding, saved and loaded.

    None, or the words with which the design is refused; anything that is not as it should be is an AssertionError.
    """
    model = model_of(model_type)
    model.config.anatomy = anatomy(model_type)
    try:
        model = convert(model, design, say=None)
    except ValueError as error:
        return str(error)
    bound = max(model.config.identity["bound"], ROUNDING)
    made = answers(model)
    for one, other in zip(made, plain(model_type), strict=True):
        assert gap(one, other) <= bound, f"{model_type} on {design}: {gap(one, other):.2g} beside {bound:.2g}"
    model.save_pretrained(folder)
    more = stored(folder) - plain_keys(model_type)
    assert plain_keys(model_type) <= stored(folder), sorted(plain_keys(model_type) - stored(folder))
    assert all(".stream." in f".{name}" for name in more), more
    again, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(again) is type(model)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert again.config.anatomy == anatomy(model_type)
    for one, other in zip(answers(again.eval()), made, strict=True):
        assert gap(one, other) <= ROUNDING, f"{model_type} on {design}, loaded: {gap(one, other):.2g}"
    return None
