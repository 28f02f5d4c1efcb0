"""install(model): the backbone gets its stream, as its config says, and its layers and final norm are put on it."""

from __future__ import annotations

import torch
from transformers.utils.output_capturing import install_output_capuring_hook

from residua.hf.anatomy import Class, Model, known, probe
from residua.hf.forward import OnStreamBackbone, OnStreamLayer, OnStreamNorm, Tap, on_stream, ready
from residua.hf.insert import insert
from residua.hf.lanes import LaneHooks
from residua.hf.owner import adopt
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
    adopt(backbone, anatomy)
    for place, layer in enumerate(layers):
        sites, block = plan.block(place), anatomy.block(place)
        layer.__class__ = on_stream(layer.__class__, OnStreamLayer)
        layer.anatomy, layer.block, layer.ready, layer.sites = anatomy, block, ready(block), sites
        layer.returned = None if block.returns is None else tuple(map(program, block.returns))
        layer.tap, layer.lanes = Tap(), None
        layer.inserted = insert(config, anatomy.slots(config.layout, place), sites, stream).to(backbone.device, dtype)
        attention = block.attention
        if stream.sided:
            check_values(layer, block, config, plan, stream.spec)
        if attention is not None and any(site.kind == "attn" and stream.feeds(site) > 1 for site in sites):
            layer.lanes = LaneHooks(layer.get_submodule(attention.sublayer), block, config)
    norm.__class__ = on_stream(norm.__class__, OnStreamNorm)
    norm.tap = Tap()
    for part in stream.modules():
        if part is not stream and hasattr(part, "reset_parameters"):
            setattr(part, OF_STREAM, True)
    backbone.stream = stream.to(device=backbone.device, dtype=torch.float32)
    backbone.execution = Execution()
    backbone.remembers = stream.mixes_tokens or any(len(layer.inserted) for layer in layers)


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
    del norm.tap, norm.owner, backbone.owner, backbone.stream, backbone.execution, backbone.remembers
    norm.__class__ = norm.__class__.__bases__[1]
    model.__class__, backbone.__class__ = classes


def _forget_recorders(backbone: Model) -> None:
    """Take off the hooks of an earlier `output_hidden_states`, which would record the state; they come back at taps."""
    for module in backbone.modules():
        for key, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__qualname__", "").startswith(install_output_capuring_hook.__name__):
                del module._forward_hooks[key]
    backbone._output_capturing_hooks_installed = False
