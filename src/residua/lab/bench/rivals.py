"""The network of `standard` as others write it, on the same weights: a careful plain form, and transformers' Llama.

The plain form is what a good hand makes of PyTorch alone: one product for q, k and v and one for gate and up, PyTorch's
fused attention, a head tied to the embedding, a cache that is allocated once.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from residua.model import Transformer


class Plain(nn.Module):
    """x + attention(norm x), x + mlp(norm x), `depth` times, then norm and the embedding's transpose."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, model: Transformer, tokens: int) -> None:
        """tokens: the most that a sequence has, prompt and answer."""
        super().__init__()
        config = model.config
        self.heads, self.eps, self.depth = config.heads, config.eps, config.depth
        width = config.width // config.heads
        self.embed = nn.Embedding(config.vocab, config.width)
        self.qkv = _stack(config.depth, config.width, 3 * config.width)
        self.out = _stack(config.depth, config.width, config.width)
        self.gate_up = _stack(config.depth, config.width, 2 * config.hidden)
        self.down = _stack(config.depth, config.hidden, config.width)
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(config.width)) for _ in range(2 * config.depth + 1))
        angles = torch.arange(tokens)[:, None] * config.rope_base ** -(torch.arange(0, width, 2) / width)
        self.register_buffer("cosine", torch.cat([angles.cos()] * 2, -1), persistent=False)
        self.register_buffer("sine", torch.cat([-angles.sin(), angles.sin()], -1), persistent=False)
        self._copy(model)

    @torch.no_grad()
    def _copy(self, model: Transformer) -> None:
        self.embed.weight.copy_(model.embed.weight)
        sublayers: Any = list(model.sublayers())
        for gain, norm in zip(self.gains, [*(one.norm for one in sublayers), model.norm], strict=True):
            gain.copy_(norm.weight[0])
        for layer, (attention, mlp) in enumerate(zip(sublayers[::2], sublayers[1::2], strict=True)):
            held = {
                "qkv": (attention.q, attention.k, attention.v), "out": (attention.o,),
                "gate_up": (mlp.gate, mlp.up), "down": (mlp.down,),
            }  # fmt: skip
            for name, parts in held.items():
                getattr(self, name)[layer].weight.copy_(torch.cat([part.weight for part in parts]))

    def cache(self, rows: int, tokens: int) -> list[Tensor]:
        """Room for the keys and values of every layer."""
        width = self.embed.weight.shape[1] // self.heads
        return [torch.empty(2, rows, self.heads, tokens, width) for _ in range(self.depth)]

    def forward(self, ids: Tensor, cache: list[Tensor] | None = None, before: int = 0) -> Tensor:
        """Logits; with a cache, after the `before` tokens that it holds."""
        x, after = self.embed(ids), before + ids.shape[1]
        cosine, sine = self.cosine[before:after], self.sine[before:after]
        for layer in range(self.depth):
            normed = F.rms_norm(x, x.shape[-1:], self.gains[2 * layer], self.eps)
            q, k, v = self.qkv[layer](normed).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            q, k = self._turned(q, cosine, sine), self._turned(k, cosine, sine)
            if cache is not None:
                cache[layer][0, :, :, before:after], cache[layer][1, :, :, before:after] = k, v
                k, v = cache[layer][:, :, :, :after]
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=not before)
            x = x + self.out[layer](mixed.transpose(1, 2).flatten(-2))
            gate, up = self.gate_up[layer](F.rms_norm(x, x.shape[-1:], self.gains[2 * layer + 1], self.eps)).chunk(
                2, -1
            )
            x = x + self.down[layer](F.silu(gate) * up)
        return F.linear(F.rms_norm(x, x.shape[-1:], self.gains[-1], self.eps), self.embed.weight)

    @staticmethod
    def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        return x * cosine + x.roll(x.shape[-1] // 2, -1) * sine


def _stack(depth: int, inputs: int, outputs: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(inputs, outputs, bias=False) for _ in range(depth))


def llama(model: Transformer, tokens: int) -> Any:
    """transformers' Llama with the weights of a model of ours; None where transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import LlamaConfig, LlamaForCausalLM

    config = model.config
    made: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab, hidden_size=config.width, intermediate_size=config.hidden,
            num_hidden_layers=config.depth, num_attention_heads=config.heads, max_position_embeddings=tokens,
            rms_norm_eps=config.eps, tie_word_embeddings=True, attn_implementation="sdpa",
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
        )
    )  # fmt: skip
    weights = {"model.embed_tokens.weight": model.embed.weight, "lm_head.weight": model.embed.weight}
    sublayers: Any = list(model.sublayers())
    last: Any = model.norm
    weights["model.norm.weight"] = last.weight[0]
    for layer, (attention, mlp) in enumerate(zip(sublayers[::2], sublayers[1::2], strict=True)):
        at = f"model.layers.{layer}"
        weights |= {f"{at}.self_attn.{name}_proj.weight": getattr(attention, name).weight for name in "qkvo"}
        weights |= {f"{at}.mlp.{name}_proj.weight": getattr(mlp, name).weight for name in ("gate", "up", "down")}
        weights[f"{at}.input_layernorm.weight"] = attention.norm.weight[0]
        weights[f"{at}.post_attention_layernorm.weight"] = mlp.norm.weight[0]
    made.load_state_dict({name: weight.detach().clone() for name, weight in weights.items()})
    return made
