"""Gemma 3n's text decoder on `altup`: n streams of which a layer runs the first, with LAuReL and per-layer embeddings.

    altup           router_norm, modality_router, prediction_coefs, correction_coefs
    ple             altup.correct_output_scale, per_layer_input_gate, per_layer_projection, post_per_layer_input_norm
    laurel          linear_left, linear_right, post_laurel_norm

What the backbone makes before its layers stays as it makes it: the other streams of the embedding, and the per-layer
embeddings. Its head mixes the streams inside the backbone's own forward; there the head's read takes the place of the
result.
"""

from __future__ import annotations

from torch import Tensor

from residua.hf.anatomy import Argument, Config, Model
from residua.hf.released.loans import Loan, lend, weight
from residua.hf.released.walking import OnReleased, head_read
from residua.plan import Plan
from residua.spec import Value
from residua.stream import Stream
from residua.streams.altup import Streams

LAST = "residua_last"
"""The keyword that brings the last layer's streams back to the backbone."""


class Last:
    """The streams that the newest layer of one forward left. (No list: what places layers on devices copies lists.)"""

    hidden_states: Tensor


class First:
    """[n b t d]."""

    def embedding(self, hidden_states: Tensor) -> Tensor:
        return hidden_states[0]

    def enter(self, hidden_states: Tensor, ple: tuple[Tensor, ...] = ()) -> Streams:
        return Streams(hidden_states.movedim(0, 2), ple=ple)

    def leave(self, state: Streams) -> Tensor:
        return state.H.movedim(2, 0).contiguous()


class GemmaLayer(OnReleased):
    """Of Gemma 3n: norms on both sides of a sublayer, and an embedding of the layer's own."""

    self_attn: Model
    mlp: Model
    input_layernorm: Model
    post_attention_layernorm: Model
    pre_feedforward_layernorm: Model
    post_feedforward_layernorm: Model

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Tensor | None = None,
        per_layer_input: Tensor | None = None,
        **kwargs: Argument,
    ) -> Tensor:
        last: Last = kwargs.pop(LAST)
        assert per_layer_input is not None  # the backbone makes one for every layer
        walk = self.walk(hidden_states, First().enter(hidden_states, (per_layer_input,)))

        def attend(x: Tensor) -> Tensor:
            y, _ = self.self_attn(hidden_states=x, position_embeddings=position_embeddings, **kwargs)
            return self.post_attention_layernorm(y)

        walk.through(self.input_layernorm, attend)
        walk.through(self.pre_feedforward_layernorm, lambda x: self.post_feedforward_layernorm(self.mlp(x)))
        last.hidden_states = walk.hidden_states
        return last.hidden_states


class GemmaBackbone(OnReleased):
    """The base's forward, whose result is the head's read of the streams that its last layer left."""

    norm: Model

    def forward(self, *args: Argument, **kwargs: Argument) -> Argument:
        last = Last()
        output = super().forward(*args, **kwargs, **{LAST: last})  # type: ignore[misc]
        x = head_read(self, last.hidden_states, self.norm)
        if isinstance(output, tuple):
            return (x, *output[1:])
        output.last_hidden_state = x
        return output


def design(config: Config) -> dict[str, Value]:
    """The design of a text configuration."""
    if config.altup_active_idx != 0 or not config.altup_correct_scale:
        raise ValueError(
            "Gemma 3n with altup_active_idx other than 0, or without altup_correct_scale, is not known here"
        )
    if config.hidden_activation != "gelu_pytorch_tanh":
        raise ValueError(f"Gemma 3n with hidden_activation={config.hidden_activation} is not known here")
    return {
        "name": "altup", "streams": config.altup_num_inputs, "ple": config.hidden_size_per_layer_input,
        "laurel": config.laurel_rank, "clip": config.altup_coef_clip or 0.0, "eps": config.rms_norm_eps,
    }  # fmt: skip


def lend_all(stream: Stream, plan: Plan, backbone: Model) -> None:
    """Every parameter of the stream from the modules of a backbone."""
    for site in plan.sites:
        if site.first:
            lend(stream.part(site), _of_layer(backbone.layers[site.layer]))
    several = {"project": backbone.altup_projections, f"at.{plan.head.name}": backbone.altup_unembed_projections}
    loans = {f"{path}.stream{k}": Loan(each, weight) for path, one in several.items() for k, each in enumerate(one, 1)}
    loans["lookup.table"] = Loan(backbone.embed_tokens_per_layer, weight)
    loans["lookup.project"] = Loan(backbone.per_layer_model_projection, weight)
    loans["lookup.gain"] = Loan(backbone.per_layer_projection_norm, weight)
    lend(stream, loans)


def _of_layer(layer: Model) -> dict[str, Loan]:
    altup, laurel = layer.altup, layer.laurel
    return {
        "altup.gain": Loan(altup.router_norm, weight),
        "altup.router": Loan(altup.modality_router, weight),
        "altup.predict": Loan(altup.prediction_coefs, weight),
        "altup.correct": Loan(altup.correction_coefs, weight),
        "ple.scale": Loan(altup, _scale),
        "ple.gate": Loan(layer.per_layer_input_gate, weight),
        "ple.project": Loan(layer.per_layer_projection, weight),
        "ple.gain": Loan(layer.post_per_layer_input_norm, weight),
        "laurel.left": Loan(laurel.linear_left, weight),
        "laurel.right": Loan(laurel.linear_right, weight),
        "laurel.gain": Loan(laurel.post_laurel_norm, weight),
    }


def _scale(altup: Model) -> Tensor:
    return altup.correct_output_scale
