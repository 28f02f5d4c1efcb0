"""What every converted model adds to its base: it builds its stream, starts it, and saves what loads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Cache,
)

from residua.hf.anatomy import Argument, Class, Config, Model
from residua.hf.cache import memory_of
from residua.hf.complete import check_converted
from residua.hf.insert import Inserted, start_std
from residua.hf.install import OF_STREAM, install
from residua.hf.resize import refuse_resize, resize
from residua.hf.storage import SHIM, write_beside, write_card
from residua.hf.told import MASK

if TYPE_CHECKING:
    from transformers import PreTrainedModel as Base
else:
    Base = object  # the real one comes behind this mixin

AUTO = (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoModelForQuestionAnswering,
)
"""The Auto classes through which a converted model can be loaded."""


class Converted(Base):
    """Mixed into a model class of Hugging Face, before it."""

    config: Config
    base_model: Model
    converted: ClassVar[Callable[[Class], Class]]
    """The converted form of another model class: of the backbone, which a model with a head makes as the base does."""

    def __init__(self, config: Config, *args: Argument, **kwargs: Argument) -> None:
        super().__init__(config, *args, **kwargs)
        install(self)

    @classmethod
    def from_pretrained(cls, *args: Argument, output_loading_info: bool = False, **kwargs: Argument) -> Model:
        """As in transformers, from safetensors alone; weights that are not whole, or of another design, are refused."""
        if kwargs.get("use_safetensors") is False:
            raise ValueError("converted models are loaded from safetensors alone; leave out use_safetensors=False")
        lenient = bool(kwargs.pop("ignore_mismatched_sizes", False))
        own = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
        model, info = super().from_pretrained(*args, **kwargs | own)
        check_converted(model, info, lenient=lenient)
        return (model, info) if output_loading_info else model

    def _initialize_weights(self, module: nn.Module, *custom: bool) -> None:
        # transformers leaves out, of a class that is not its own, every module whose tensors were all loaded: also one
        # that has none, and fills buffers of its children (FalconH1Model).
        own = next((True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))), False)
        super()._initialize_weights(module, *(custom if own else ()))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Inserted):
            module.start(start_std(self.config))
        elif getattr(module, OF_STREAM, False):
            _start(module)
        else:
            super()._init_weights(module)

    def resize_token_embeddings(self, *args: Argument, **kwargs: Argument) -> nn.Embedding:
        """As in transformers; tables of the stream follow."""
        backbone = self.base_model
        refuse_resize(backbone)
        made: nn.Embedding = super().resize_token_embeddings(*args, **kwargs)
        resize(backbone, len(made.weight))
        return made

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Argument = None, **kwargs: Argument) -> None:
        """As in transformers, without reentrant checkpoints."""
        given = {"use_reentrant": False} | (gradient_checkpointing_kwargs or {})
        if given["use_reentrant"]:
            raise ValueError(
                "use_reentrant=True cannot see the tensors inside a stream's state and would lose their gradients; "
                "use gradient_checkpointing_kwargs={'use_reentrant': False}, the default"
            )
        super().gradient_checkpointing_enable(given, **kwargs)

    def save_pretrained(self, save_directory: Argument, *args: Argument, **kwargs: Argument) -> None:
        """As in transformers; beside the weights, the shim that loads them elsewhere and the model card."""
        own, config = type(self), type(self.config)
        built = [auto.__name__ for auto in AUTO if auto._model_mapping.get(config, None) is own]
        self.config.auto_map = {
            "AutoConfig": f"{SHIM}.{config.__name__}", **dict.fromkeys(built, f"{SHIM}.{own.__name__}")
        }  # fmt: skip
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            write_beside(self, save_directory)

    def _upload_modified_files(self, working_dir: Argument, *args: Argument, **kwargs: Argument) -> Argument:
        write_card(self, working_dir)  # a push puts its own template over the card
        return super()._upload_modified_files(working_dir, *args, **kwargs)


class Generating(Base):
    """Mixed in beside it where the base generates."""

    base_model: Model

    def prepare_inputs_for_generation(self, *args: Argument, **kwargs: Argument) -> dict[str, Any]:
        """As in transformers; a stream that keeps more than keys and values is also told what is padding."""
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        mask = kwargs.get("attention_mask")
        if self.base_model.remembers and mask is not None and mask.ndim == 2:
            # A static cache is handed masks of its own shape, from which padding cannot be told.
            tokens = inputs.get("input_ids")
            tokens = inputs["inputs_embeds"] if tokens is None else tokens
            inputs[MASK] = mask[:, -tokens.shape[1] :]
        return inputs

    def _prepare_cache_for_generation(
        self, generation_config: Argument, model_kwargs: dict[str, Any], *args: Argument, **kwargs: Argument
    ) -> None:
        """As in transformers; a cache carries what a stream keeps from the start, so that recording reaches it."""
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get("past_key_values")
        if self.base_model.remembers and isinstance(cache, Cache):
            memory_of(cache)
            if generation_config.is_assistant:
                cache.activate_past_recording()


@torch.no_grad()
def _start(part: Model) -> None:
    """Put the parameters of a site at their start, but for those that a checkpoint has filled already."""
    filled = {
        name: parameter.clone()
        for name, parameter in part.named_parameters(recurse=False)
        if getattr(parameter, "_is_hf_initialized", False)
    }
    part.reset_parameters()
    for name, value in filled.items():
        getattr(part, name).copy_(value)
