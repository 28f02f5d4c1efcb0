"""Tiny models of every architecture in the table, built locally, with weights that no initialisation would give."""

from __future__ import annotations

import copy
import os
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB, WIDTH, LAYERS = 61, 32, 2

COMMON = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
GPT = {
    "vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": 64,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "qwen2": COMMON,
    "qwen3": COMMON | {"head_dim": 8, "tie_word_embeddings": True},
    "mistral": COMMON | {"sliding_window": 6, "head_dim": 8},
    "smollm3": COMMON | {"no_rope_layer_interval": 2},
    "granite": COMMON | {"residual_multiplier": 0.4, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "gemma2": COMMON | {"sliding_window": 6, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": COMMON
    | {"sliding_window": 6, "head_dim": 8, "query_pre_attn_scalar": 8}
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "olmo2": COMMON,
    "phi3": COMMON,
    "gpt2": GPT,
    "gpt_neox": {key: value for key, value in COMMON.items() if key != "num_key_value_heads"} | {"rotary_pct": 0.5},
    "qwen3_moe": COMMON | EXPERTS | {"head_dim": 8},
    "mixtral": COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
}  # fmt: skip

ALSO = tuple(filter(None, os.environ.get("RESIDUA_ALSO", "").split(",")))
"""Types without a row that the contract is to be tried on too, their anatomy found."""

ANY_STATE = ("standard", "attnres:blocks=2", "delta:blocks=2", "ddl:channels=2,compress=token", "hyper")
"""Designs whose states are a tensor, tuples of tensors, and what keeps a past."""


@cache
def _made(architecture: str, extra: tuple[tuple[str, Any], ...]) -> Any:
    torch.manual_seed(0)
    if architecture in ALSO:
        from tests.hf.types import config_of

        config = config_of(architecture, **dict(extra))
    else:
        config = AutoConfig.for_model(architecture, **CONFIGS[architecture] | dict(extra))
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    return model


def base(architecture: str, **extra: Any) -> Any:
    """A model of an architecture; the same weights every time."""
    return copy.deepcopy(_made(architecture, tuple(sorted(extra.items()))))


def converted(architecture: str, design: str, *, moved: bool = False, layout: str | None = None, **extra: Any) -> Any:
    """It, on another stream; `moved` shakes every parameter that the conversion added, so that it acts."""
    from residua.hf.convert import convert

    model = convert(base(architecture, **extra), design, layout=layout, say=None)
    if moved:
        shake(model)
    return model


@torch.no_grad()
def shake(model: Any) -> None:
    """A gate by more than the rest: it starts at 0, and what it gates acts through it alone."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".stream." in name or ".inserted." in name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.5 if parameter.numel() == 1 else 0.1)


def ids(rows: int = 2, tokens: int = 9, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))
