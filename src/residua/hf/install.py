"""install(model): the backbone gets its stream, as its config says, and its layers and final norm are put on it."""

from __future__ import annotations

from functools import cache

import torch
from transformers.utils.output_capturing import install_output_capuring_hook

from residua.hf.anatomy import Anatomy, Class, Config, Model, anatomy_of, probe
from residua.hf.forward import OnStreamBackbone, OnStreamLayer, OnStreamNorm, Tap, defaults, positional, ready
from residua.hf.insert import insert
from residua.hf.lanes import LaneHooks
from residua.hf.made import made
from residua.hf.owner import Owner
from residua.hf.program import program
from residua.hf.values import check_values
from residua.registry import build
from residua.runner import Execution
from residua.stream import Stream

OF_STREAM = "_of_stream"
"""Marks modules whose parameters start as the design says, not as Hugging Face would have them."""


def install(model: Model) -> None:
    """Put a model whose config has a `stream` on it; a model that is on one already stays as it is."""
    backbone = model.base_model
    if isinstance(getattr(backbone, "stream", None), Stream):
        return
    config = backbone.config
    anatomy = known(config)
    probe(backbone, anatomy)
    plan = anatomy.plan(config, config.layout)
    stream = build(config.stream, plan)
    layers, norm = backbone.get_submodule(anatomy.layers), backbone.get_submodule(anatomy.norm)
    dtype = next((each.dtype for each in norm.parameters()), torch.float32)
    if not isinstance(backbone, OnStreamBackbone):
        backbone.__class__ = model.converted(backbone.__class__)
    _forget_recorders(backbone)
    owner = Owner(backbone)
    for place, layer in enumerate(layers):
        sites, block = plan.block(place), anatomy.block(place)
        layer.__class__ = _on_stream(layer.__class__, OnStreamLayer)
        layer.anatomy, layer.block, layer.ready, layer.sites = anatomy, block, ready(block), sites
        layer.returned = None if block.returns is None else tuple(map(program, block.returns))
        layer.tap, layer.owner, layer.lanes = Tap(), owner, None
        layer.inserted = insert(config, anatomy.slots(config.layout, place), sites, stream).to(backbone.device, dtype)
        attention = block.attention
        if stream.sided:
            check_values(layer, block, config, plan, stream.spec)
        if attention is not None and any(site.kind == "attn" and stream.feeds(site) > 1 for site in sites):
            layer.lanes = LaneHooks(layer.get_submodule(attention.sublayer), block, config)
    norm.__class__ = _on_stream(norm.__class__, OnStreamNorm)
    norm.tap, norm.owner = Tap(), owner
    for part in stream.modules():
        if part is not stream and hasattr(part, "reset_parameters"):
            setattr(part, OF_STREAM, True)
    backbone.stream = stream.to(device=backbone.device, dtype=torch.float32)
    backbone.execution = Execution()
    backbone.remembers = stream.mixes_tokens or any(len(layer.inserted) for layer in layers)


def known(config: Config) -> Anatomy:
    """The anatomy of a converted model, which its config has or its row."""
    anatomy = anatomy_of(config)
    if anatomy is None:
        raise ValueError(
            f"the config of this {config.model_type} has no anatomy: put back the one that was saved with it"
        )
    return anatomy


def remove(model: Model, classes: tuple[Class, Class]) -> None:
    """Undo `install` on a live model whose classes were these, its own and its backbone's."""
    backbone = model.base_model
    anatomy = known(backbone.config)
    norm = backbone.get_submodule(anatomy.norm)
    for layer in backbone.get_submodule(anatomy.layers):
        if layer.lanes is not None:
            layer.lanes.detach()
        for name in ("anatomy", "block", "ready", "returned", "sites", "tap", "owner", "inserted", "lanes"):
            delattr(layer, name)
        layer.__class__ = layer.__class__.__bases__[1]
    del norm.tap, norm.owner, backbone.stream, backbone.execution, backbone.remembers
    norm.__class__ = norm.__class__.__bases__[1]
    model.__class__, backbone.__class__ = classes


def _forget_recorders(backbone: Model) -> None:
    """Take off the hooks of an earlier `output_hidden_states`, which would record the state; they come back at taps."""
    for module in backbone.modules():
        for key, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__qualname__", "").startswith(install_output_capuring_hook.__name__):
                del module._forward_hooks[key]
    backbone._output_capturing_hooks_installed = False


@cache
def _on_stream(base: Class, mixin: Class) -> Class:
    """The class of a layer or a final norm, with the mixin before it."""
    body = (
        {"after_state": positional(base.forward), "defaults": defaults(base.forward)} if mixin is OnStreamLayer else {}
    )
    return made(f"Residua{base.__name__}", (mixin, base), body)
