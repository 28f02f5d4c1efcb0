"""open_released(path_or_model): a released model whose residual stream is one of our designs, with that design at work.

The model is transformers' own, of its own class, with its own keys; its reads and writes are made by our stream from
its parameters. `record_routing`, `ablate_sources`, `residua inspect` and the rest then see it as any model of ours.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch
from torch import nn

from residua.hf.anatomy import Argument, Class, Config, Model
from residua.hf.complete import load
from residua.hf.made import made
from residua.hf.owner import Owner
from residua.hf.released.kimi import is_kimi
from residua.hf.released.loans import check_lent
from residua.hf.released.rows import ROWS, Row
from residua.hf.released.walking import Shape
from residua.hf.storage import load_config, model_type
from residua.registry import build
from residua.runner import Execution
from residua.stream import Stream


def open_released(model: Model, *, dtype: torch.dtype | str = "auto", **loading: Argument) -> Model:
    """The model on its stream as our design; the same logits.

    model:    a transformers model, which is changed and returned; or a directory or hub name to load.
    dtype:    of a model that is loaded; "auto" is the checkpoint's own.
    loading:  passed on to `from_pretrained`, such as device_map or revision.

    Raises ValueError for a model type whose stream is none of our designs.
    """
    if isinstance(model, str | Path):
        model = _load(str(model), dtype=dtype, **loading)
    if any(isinstance(module, Stream) for module in model.modules()):
        raise ValueError("this model is on a stream of residua already")
    install(model)
    return model


def load_causal(source: str, *, dtype: torch.dtype | str = "auto") -> Model:
    """A causal language model from a directory or the hub: on its stream where that is one of ours, else as it is."""
    from transformers import AutoModelForCausalLM

    _refuse(source)
    config = load_config(source)
    if str(config.model_type) in ROWS:
        return open_released(source, dtype=dtype)
    return load(AutoModelForCausalLM, source, config, dtype=dtype)


def is_released(folder: Path) -> bool:
    """Whether a directory holds a model that `open_released` opens."""
    return (folder / "config.json").is_file() and model_type(folder) in ROWS


def row_of(config: Config) -> Row:
    """The row of a configuration; an unknown type is an error that lists the known ones."""
    kind = str(config.model_type)
    if kind not in ROWS:
        raise ValueError(
            f"no released stream is known for model type {kind!r}; known are {', '.join(ROWS)}. A decoder with the "
            "standard stream converts to a design instead: residua convert"
        )
    return ROWS[kind]


def install(model: Model) -> None:
    """Put a live model on its stream."""
    row = row_of(model.config)
    config, backbone = model.config.get_text_config(), find_backbone(model, row)
    plan = row.plan(config)
    with torch.device("meta"):
        stream = build(row.design(config), plan)
    row.lend(stream, plan, backbone)
    check_lent(stream)
    owner, shape = Owner(backbone), row.shape(config)
    for layer, sites in zip(getattr(backbone, row.layers), map(plan.block, range(plan.depth)), strict=True):
        _put(layer, row.layer, owner, shape).sites = sites
    for name, mixin in row.ends.items():
        _put(getattr(backbone, name), mixin, owner, shape)
    if row.backbone is not None:
        _put_backbone(backbone, row.backbone, owner, shape)
    backbone.stream, backbone.execution = stream.train(backbone.training), Execution()


def find_backbone(model: nn.Module, row: Row) -> Model:
    """The module of a model that has the layers and what stands behind them."""
    wanted = (row.layers, *row.ends, *row.marks)
    for module in model.modules():
        if all(hasattr(module, name) for name in wanted):
            return module
    raise ValueError(
        f"{type(model).__name__} has no module with {', '.join(wanted)}, as {row.title} should; its row in "
        "residua/hf/released/rows.py was written for another release of transformers"
    )


def _load(source: str, **loading: Argument) -> Model:
    import transformers

    _refuse(source)
    config = load_config(source, revision=loading.get("revision"))
    row_of(config)
    for name in config.architectures or ():
        if (found := getattr(transformers, name, None)) is not None:
            break
    else:
        raise ValueError(f"{source}: config.json names no class of transformers in `architectures`")
    return load(found, source, config, **loading).eval()


def _refuse(source: str) -> None:
    """What the installed transformers has no class for."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    folder = Path(source)
    if not (folder / "config.json").is_file():
        return
    kind = model_type(folder)
    if kind in ROWS and kind not in CONFIG_MAPPING:
        raise ValueError(
            f"{source}: transformers {transformers.__version__} has no class for {kind}; install a newer release"
        )
    if is_kimi(json.loads((folder / "config.json").read_text())):
        raise ValueError(
            f"{source}: Kimi K3 has no class in transformers, and no other model takes its layers; its stream alone "
            "opens with residua.hf.released.kimi.open_stream"
        )


def _put(module: Model, mixin: Class, owner: Owner, shape: Shape) -> Model:
    """Swap the class of a module for a subclass with the mixin before it."""
    if "forward" in module.__dict__ and "_old_forward" not in module.__dict__:
        raise ValueError(
            f"the forward of {type(module).__name__} was replaced, and ours would never run; open it first"
        )
    module.__class__ = _on_stream(module.__class__, mixin)
    if "_old_forward" in module.__dict__:  # what the hooks of accelerate call
        module._old_forward = module.__class__.forward.__get__(module)
    module.owner, module.shape = owner, shape
    return module


def _put_backbone(backbone: Model, mixin: Class, owner: Owner, shape: Shape) -> None:
    """The same for a backbone, whose outputs transformers records by the name of its class."""
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    recorded = _CAN_RECORD_REGISTRY.get(str(type(backbone)))
    _put(backbone, mixin, owner, shape)
    if recorded is not None:
        _CAN_RECORD_REGISTRY[str(type(backbone))] = recorded


@cache
def _on_stream(base: Class, mixin: Class) -> Class:
    return made(f"Released{base.__name__}", (mixin, base), {})
