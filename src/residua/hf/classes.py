"""Classes of converted models, made from Hugging Face's own: `ResiduaLlamaForCausalLM`, `ResiduaLlamaConfig`, ...

    config    the base's, with `stream` (the design), `layout`, `anatomy` (where it was found) and `identity`;
              model_type is "residua_" + the base's
    model     the base's, whose backbone has a `stream`; HF keys stay, new ones lie under `stream` and `inserted`

They are made when they are first asked for, and Auto classes learn of the models when a config is first made.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import cache, wraps
from types import ModuleType

from transformers import AutoConfig, AutoModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY, OutputRecorder

from residua.hf.anatomy import PREFIX, Argument, Class, Config
from residua.hf.backbone import prefix_of
from residua.hf.converted import AUTO, Converted, Generating
from residua.hf.forward import OnStreamBackbone, Tap, positional
from residua.hf.made import made
from residua.hf.told import Telling

OWN_KEYS = ("stream", "inserted")
"""The modules under which everything lies that a conversion adds."""
KEPT_IN_FLOAT32 = "stream"
"""Routing parameters stay in float32 when a model is loaded in half precision: their steps are small beside them."""


class ConvertedConfig:
    """Mixed into the base's config; making one tells the Auto classes of the models that take it."""

    def __post_init__(self, **kwargs: Argument) -> None:
        base: Class = super()
        base.__post_init__(**kwargs)
        own: Class = type(self)
        register_models(own)


@cache
def config_class(base_type: str) -> Class:
    """The config class of converted models of one architecture."""
    base = CONFIG_MAPPING[base_type]
    body = {
        "model_type": PREFIX + base_type,
        "stream": None,
        "layout": None,
        "anatomy": None,
        "identity": None,
        "__annotations__": {
            "stream": "dict | None",
            "layout": "str | None",
            "anatomy": "dict | None",
            "identity": "dict | None",
        },
    }
    config = made(f"Residua{base.__name__}", (ConvertedConfig, base), body)
    AutoConfig.register(PREFIX + base_type, config, exist_ok=True)
    _adopt_keys(base_type, PREFIX + base_type)
    return config


def _adopt_keys(base: str, own: str) -> None:
    """Let the checkpoints of a converted type or class have the keys of its base (stacked experts, a renamed head)."""
    conversions = get_checkpoint_conversion_mapping(base)
    if conversions is not None:
        register_checkpoint_conversion_mapping(own, list(map(_of_base, conversions)), overwrite=True)


class OfBase:
    """Mixed into a renaming of checkpoint keys, before it: a pattern (".mlp.") must not catch ours ("l0_mlp.")."""

    __slots__ = ()

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        if any(part in OWN_KEYS for part in source_key.split(".")):
            return source_key, None
        renamed: tuple[str, str | None] = super().rename_source_key(source_key)  # type: ignore[misc]
        return renamed


def _of_base(conversion: Argument) -> Argument:
    """A conversion of the base's checkpoints, which leaves alone what a conversion of ours adds."""
    own: Argument = copy.deepcopy(conversion)
    if isinstance(own, WeightRenaming):
        kind: Class = type(own)
        own.__class__ = _renaming(kind)
    return own


@cache
def _renaming(base: Class) -> Class:
    cls: Class = type(f"OfBase{base.__name__}", (OfBase, base), {"__slots__": ()})
    return cls


@cache
def register_models(config: Config) -> None:
    """Let the Auto classes build the models of a converted config."""
    base = CONFIG_MAPPING[config.model_type.removeprefix(PREFIX)]
    for auto in AUTO:
        model = auto._model_mapping.get(base, None)
        model = model[0] if isinstance(model, tuple | list) else model
        if model is not None:
            made_of = model_class(model)
            auto.register(config, made_of, exist_ok=True)
            # The table of names is asked too: by pipelines, and by Trainer whether labels are shifted when smoothed.
            auto._model_mapping._model_mapping[config.model_type] = made_of.__name__


@cache
def model_class(base: Class) -> Class:
    """The converted form of a Hugging Face model class: a backbone, or a backbone with a head."""
    base_type = base.config_class.model_type
    recorded = dict(base._can_record_outputs or {})
    backbone = AutoModel._model_mapping.get(CONFIG_MAPPING[base_type], None) is base
    lists = backbone and "output_hidden_states" in positional(base.forward)
    if "hidden_states" in recorded or lists:
        recorded["hidden_states"] = OutputRecorder(Tap, capture_initial_hidden_state=False)
    unsplit = list(base._no_split_modules or ())
    body = {
        "config_class": config_class(base_type),
        "__annotations__": {"config": config_class(base_type)},
        "__doc__": f"`{base.__name__}` on a residual stream of residua.",
        "converted": staticmethod(model_class),
        "_can_record_outputs": recorded,
        # transformers reads the source of a class's module for these; that of the base says it
        "_can_set_attn_implementation_cached_value": base._can_set_attn_implementation(),
        "_can_set_experts_implementation_cached_value": base._can_set_experts_implementation(),
        "_no_split_modules": [*unsplit, *(f"Residua{name}" for name in unsplit)],
        "_keep_in_fp32_modules_strict": [*(base._keep_in_fp32_modules_strict or ()), KEPT_IN_FLOAT32],
    }
    own: tuple[Class, ...] = (Converted,)
    if base.can_generate():
        own = (Converted, Generating)
        method = Generating.prepare_inputs_for_generation
        body[method.__name__] = _as(method, base.prepare_inputs_for_generation)
    own = (*own, Telling)
    body |= {"after_input": positional(base.forward), "forward": _as(Telling.forward, base.forward)}
    if backbone:
        own, body["lists"] = (*own, OnStreamBackbone), lists
    bases: tuple[Class, ...] = (*own, base)
    body["base_model_prefix"] = prefix_of(base)
    model = made(f"Residua{base.__name__}", bases, body)
    _adopt_keys(base.__name__, model.__name__)
    _publish(model)
    _CAN_RECORD_REGISTRY[str(model)] = recorded  # filled by the constructor, which a live model has behind it
    return model


def _publish(model: Class) -> None:
    """Make a class an attribute of the package, where `transformers serve` looks for what a config names.

    The package loads itself a second time as it goes, and modules that came before hold the first.
    """
    own = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "transformers"]
    held = [vars(module).get("transformers") for module in own if module is not None]
    for package in (sys.modules["transformers"], *(each for each in held if isinstance(each, ModuleType))):
        setattr(package, model.__name__, model)


def _as(method: Callable[..., Argument], theirs: Callable[..., Argument]) -> Callable[..., Argument]:
    """A method under the signature of the base's: transformers looks there for what a model takes."""

    @wraps(theirs)
    def signed(self: Class, *args: Argument, **kwargs: Argument) -> Argument:
        return method(self, *args, **kwargs)

    return signed
