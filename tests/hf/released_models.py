"""Tiny models of the released classes whose stream is a design here, with weights that no initialisation would give."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode

VOCAB, WIDTH, LAYERS = 61, 32, 3

EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
COMMON = {
    "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
INDEX = {"index_topk": 16, "index_n_heads": 2, "indexer_types": ["full", "full", "shared"]}


def _deepseek_v4(vocab: int) -> Any:
    config = transformers.DeepseekV4Config(
        vocab_size=vocab, **COMMON, **EXPERTS, head_dim=16, q_lora_rank=16, o_groups=2, o_lora_rank=8, sliding_window=6,
        index_n_heads=2, index_head_dim=16, index_topk=4,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        mlp_layer_types=["hash_moe", "moe", "moe"],
    )  # fmt: skip
    return transformers.DeepseekV4ForCausalLM(config)


def _glm5_next(vocab: int) -> Any:
    text = {"vocab_size": vocab} | COMMON | EXPERTS | LATENT | INDEX | {
        "intermediate_size": 48, "num_key_value_heads": 4, "index_head_dim": 8, "index_kpool": 2, "hc_mult": 3,
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"], "linear_head_dim": 8, "linear_num_heads": 2,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": WIDTH,
        "projection_intermediate_size": 16,
    }  # fmt: skip
    marks = ("image_token_id", "video_token_id", "image_start_token_id", "image_end_token_id")
    marks += ("video_start_token_id", "video_end_token_id")
    ids = {name: vocab - 1 - place for place, name in enumerate(marks)}
    config = transformers.Glm5NextConfig(text_config=text, vision_config=vision, **ids)
    return transformers.Glm5NextForConditionalGeneration(config)


def _hy_v4(vocab: int) -> Any:
    config = transformers.HYV4Config(
        vocab_size=vocab, **COMMON, **EXPERTS, **LATENT, **INDEX, intermediate_size=48, qk_rope_head_dim=8,
        index_head_dim=16, hc_magnitude=1.7,
    )  # fmt: skip
    return transformers.HYV4ForCausalLM(config)


def _qwen4_exp(vocab: int) -> Any:
    config = transformers.Qwen4ExpTextConfig(
        **COMMON, vocab_size=vocab, num_key_value_heads=2, head_dim=8, moe_intermediate_size=16, num_experts=4,
        num_experts_per_tok=2, shared_expert_intermediate_size=16, linear_key_head_dim=8, linear_value_head_dim=8,
        linear_num_key_heads=2, linear_num_value_heads=4, hc_count=3, hc_lowrank=5,
        layer_types=["linear_attention", "linear_attention", "indexed_attention"], ple_layer_ids=[1, 2],
        ngram_vocab_size_base=50, heads_per_ngram=2, make_ngram_vocab_size_divisible_by=8, split_ngram_parts=2,
        indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=16, indexer_compress_ratio=2,
    )  # fmt: skip
    return transformers.Qwen4ExpForCausalLM(config)


def _gemma3n(vocab: int) -> Any:
    config = transformers.Gemma3nTextConfig(
        **COMMON | {"num_hidden_layers": 4}, vocab_size=vocab, vocab_size_per_layer_input=vocab - 3,
        num_key_value_heads=2, head_dim=8, intermediate_size=48, hidden_size_per_layer_input=8, laurel_rank=4,
        layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=6, num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.9, 0.0, 0.0, 0.0], altup_num_inputs=3,
    )  # fmt: skip
    return transformers.Gemma3nForCausalLM(config)


MADE = {
    "deepseek_v4": _deepseek_v4,
    "glm5_next": _glm5_next,
    "hy_v4": _hy_v4,
    "qwen4_exp": _qwen4_exp,
    "gemma3n": _gemma3n,
}
"""By `model_type`."""
STREAM = ("_hc.", "hc_head", "hyper_connection", "altup", "laurel", "per_layer")
"""In the names of parameters of a stream."""


@cache
def _made(kind: str, vocab: int) -> Any:
    torch.manual_seed(0)
    model = MADE[kind](vocab).eval()
    model.set_experts_implementation("eager")  # the grouped one has no float64
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # The mappings of a stream by more: transposed or swapped, they must show.
            size = 0.5 if any(each in name for each in STREAM) else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=size)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(torch.randint(4, buffer.shape, generator=generator))
    return model


def released(kind: str, dtype: torch.dtype = torch.float32, vocab: int = VOCAB) -> Any:
    """A model of a class; the same weights every time."""
    return copy.deepcopy(_made(kind, vocab)).to(dtype)


class _Wide(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        kwargs = {key: torch.float64 if each is torch.float32 else each for key, each in (kwargs or {}).items()}
        return function(*args, **kwargs)


@contextmanager
def precise(dtype: torch.dtype) -> Iterator[None]:
    """In float64, what the released code computes in float32 whatever it is given is computed in float64 too."""
    if dtype != torch.float64:
        yield
        return
    with _Wide():
        yield


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, prompt: int = 5) -> dict[str, torch.Tensor]:
    """Of all tokens at once, and of a prompt followed by one token after another."""
    whole = model(input_ids=ids, use_cache=False).logits
    output = model(input_ids=ids[:, :prompt], use_cache=True)
    steps = [output.logits]
    for place in range(prompt, ids.shape[1]):
        output = model(input_ids=ids[:, place : place + 1], past_key_values=output.past_key_values, use_cache=True)
        steps.append(output.logits)
    return {"prefill": whole, "decoding": torch.cat(steps, 1)}
