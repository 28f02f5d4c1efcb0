"""Qwen3.8-Flash-Next (`qwen4_exp`) on `gated`: {attn,mlp}_hyper_connection of layers, hyper_connection_mixer after.

    gain     hc_norm.weight [n d], as [n, d]       down, up   input_mix_weight_down, input_mix_weight_up
    inject   block_inject_weight, which the head has not

The n-gram tables that some layers add to all streams are no part of the design and stay the model's.
"""

from __future__ import annotations

from torch import Tensor

from residua.hf.anatomy import Argument, Config, Model
from residua.hf.released.loans import Loan, lend, weight
from residua.hf.released.walking import OnReleased
from residua.plan import Plan
from residua.spec import Value
from residua.stream import Stream

HOLDERS = {"attn": "attn_hyper_connection", "mlp": "mlp_hyper_connection"}
"""The module of a layer that holds the parameters of a site, by the site's kind."""


class Flat:
    """[b t n d] in one axis of n d."""

    def __init__(self, streams: int) -> None:
        self.streams = streams

    def embedding(self, hidden_states: Tensor) -> Tensor:
        return self.enter(hidden_states)[:, :, 0]

    def enter(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.unflatten(-1, (self.streams, -1))

    def leave(self, state: Tensor) -> Tensor:
        return state.flatten(-2)


class QwenLayer(OnReleased):
    """Of Qwen3.8-Flash-Next: linear or indexed attention, no norms but the stream's own."""

    linear_attn: Model
    self_attn: Model
    mlp: Model
    ple: Model | None
    layer_type: str

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        conv_mask: Tensor | None = None,
        past_key_values: Argument = None,
        ple_input_ids: Tensor | None = None,
        **kwargs: Argument,
    ) -> Tensor:
        walk = self.walk(hidden_states)
        if self.ple is not None:
            walk.add(self.ple(walk.hidden_states, ple_input_ids, past_key_values, conv_mask=conv_mask))

        def attend(x: Tensor) -> Tensor:
            if self.layer_type == "linear_attention":
                return self.linear_attn(x, cache_params=past_key_values, attention_mask=conv_mask, **kwargs)
            given = {"attention_mask": attention_mask, "past_key_values": past_key_values, **kwargs}
            y, _ = self.self_attn(x, position_embeddings, **given)
            return y

        walk.through(None, attend)
        walk.through(None, self.mlp)
        return walk.hidden_states


def design(config: Config) -> dict[str, Value]:
    """The design of a text configuration."""
    return {"name": "gated", "streams": config.hc_count, "rank": config.hc_lowrank, "eps": config.rms_norm_eps}


def lend_all(stream: Stream, plan: Plan, backbone: Model) -> None:
    """Every parameter of the stream from the modules of a backbone."""
    for site in plan.readers:
        head = site.kind == "head"
        holder = backbone.hyper_connection_mixer if head else getattr(backbone.layers[site.layer], HOLDERS[site.kind])
        loans = {
            "gain": Loan(holder.hc_norm, _gain),
            "down": Loan(holder.input_mix_weight_down, weight),
            "up": Loan(holder.input_mix_weight_up, weight),
        }
        if not head:
            loans["inject"] = Loan(holder.block_inject_weight, weight)
        lend(stream.part(site), loans)


def _gain(norm: Model) -> Tensor:
    return norm.weight.unflatten(0, (-1, norm.group_size))
