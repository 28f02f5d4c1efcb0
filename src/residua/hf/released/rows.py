"""Which released models open, by the `model_type` of their configuration, and on which design: the only list."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from residua.hf.anatomy import Class, Config, Model
from residua.hf.released import gemma, hyper, qwen
from residua.hf.released.walking import HeadNorm, HeadRead, Passed, Shape
from residua.plan import Plan
from residua.spec import Value
from residua.stream import Stream


@dataclass(frozen=True, slots=True)
class Row:
    """One class of transformers whose residual stream is a design here."""

    title: str
    """The model as its authors call it."""
    design: Callable[[Config], dict[str, Value]]
    """The design of a (text) configuration, as `registry.build` takes it."""
    layer: Class
    """Put before the class of every decoder layer."""
    ends: Mapping[str, Class]
    """The modules of the backbone behind the layers, and what is put before the class of each."""
    shape: Callable[[Config], Shape]
    """How its streams lie in one tensor."""
    lend: Callable[[Stream, Plan, Model], None]
    """Gives the stream the parameters of a backbone."""
    layers: str = "layers"
    marks: tuple[str, ...] = ()
    """Other attributes by which the backbone is known."""
    backbone: Class | None = None
    """Put before the class of the backbone, where its forward has what is no module."""
    vocab: str = "vocab_size"
    """The field of a configuration that counts the token ids of the design's own tables."""

    def build(self, config: Config) -> Model:
        """A model of this configuration, with the weights of an untrained one."""
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        auto = (
            AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText
        )
        return auto.from_config(config)

    def plan(self, config: Config) -> Plan:
        """Every site of a model with this configuration."""
        return Plan.regular(
            config.hidden_size, config.num_hidden_layers, ("attn", "mlp"), vocab=getattr(config, self.vocab)
        )


def _deepseek_v4(config: Config) -> dict[str, Value]:
    return {
        "name": "mhc", "streams": config.hc_mult, "iterations": config.hc_sinkhorn_iters, "head": "learned",
        "eps": config.hc_eps, "norm_eps": config.rms_norm_eps,
    }  # fmt: skip


def _glm5_next(config: Config) -> dict[str, Value]:
    return {**_deepseek_v4(config), "head": "mean"}


def _hy_v4(config: Config) -> dict[str, Value]:
    return {
        "name": "mhc", "streams": config.hc_mult, "res": "identity", "head": "learned", "eps": config.hc_eps,
        "norm_eps": config.rms_norm_eps, "post": config.hc_magnitude, "init": "hy-v4",
    }  # fmt: skip


def _streams(config: Config) -> Shape:
    return hyper.Streams()


def _first(config: Config) -> Shape:
    return gemma.First()


def _flat(config: Config) -> Shape:
    return qwen.Flat(config.hc_count)


_COLLAPSED = MappingProxyType({"hc_head": Passed, "norm": HeadNorm})
_V4 = Row("DeepSeek-V4", _deepseek_v4, hyper.DeepSeekV4Layer, _COLLAPSED, _streams, hyper.lend_all)
_GLM = Row("GLM-5.3-Flash", _glm5_next, hyper.IndexedLayer, _COLLAPSED, _streams, hyper.lend_all)
_HY = Row("HY-V4", _hy_v4, hyper.IndexedLayer, _COLLAPSED, _streams, hyper.lend_all)
_GEMMA = Row(
    "Gemma 3n", gemma.design, gemma.GemmaLayer, MappingProxyType({}), _first, gemma.lend_all,
    marks=("altup_projections",), backbone=gemma.GemmaBackbone, vocab="vocab_size_per_layer_input",
)  # fmt: skip
_QWEN = Row(
    "Qwen3.8-Flash-Next", qwen.design, qwen.QwenLayer, MappingProxyType({"hyper_connection_mixer": HeadRead}),
    _flat, qwen.lend_all,
)  # fmt: skip

ROWS: Mapping[str, Row] = MappingProxyType(
    {
        "deepseek_v4": _V4,
        "glm5_next": _GLM,
        "glm5_next_text": _GLM,
        "hy_v4": _HY,
        "qwen4_exp": _QWEN,
        "qwen4_exp_text": _QWEN,
        "gemma3n": _GEMMA,
        "gemma3n_text": _GEMMA,
    }
)
