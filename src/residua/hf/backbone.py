"""backbone_of(model): embedding, layers and final norm of a model with a head, which `AutoModel` has as one class."""

from __future__ import annotations

from transformers import AutoModel, AutoModelForCausalLM

from residua.hf.anatomy import Class, Model


def prefix_of(cls: Class) -> str:
    """The attribute under which a model class has its backbone.

    A causal class may name one that it has not (llama4_text), and the backbone's class is right; other heads put their
    backbone where they say.
    """
    backbone: Class = AutoModel._model_mapping.get(cls.config_class, None)
    causal = AutoModelForCausalLM._model_mapping.get(cls.config_class, None) is cls
    if causal and getattr(backbone, "config_class", None) is cls.config_class:
        return str(backbone.base_model_prefix)
    return str(cls.base_model_prefix)


def backbone_of(model: Model) -> Model:
    """The backbone of a live model, or the model itself if it is one."""
    return getattr(model, prefix_of(type(model)), model.base_model)
