"""load(cls, source): a model whose every tensor came from the files, and every tensor of the files went into it.

`from_pretrained` fills what is missing at random and drops what is left over, with a warning at most. Here each is an
error that names the tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from residua.hf.anatomy import Argument, Class, Config, Model
from residua.hf.weights import check_depth, check_weights, named

Info = Mapping[str, Iterable[Any]]
"""What `from_pretrained` says when asked with `output_loading_info`."""

BUILDING = (OSError, ValueError, TypeError, RuntimeError, AttributeError, LookupError, ArithmeticError)
"""How a config that is wrong comes out where transformers builds what it says."""
PACKED = 16
"""The most parameters that one number in a file may stand for: quantised weights are packed."""

_OURS = re.compile(r"(?:^|\.)(?:stream|inserted)\.")


def load(cls: Class, source: str, config: Config, **loading: Argument) -> Model:
    """`cls.from_pretrained(source)`, from safetensors alone, whole or a ValueError in one line."""
    shapes = check_weights(Path(source)) if Path(source).is_dir() else None
    if shapes is not None:
        check_depth(Path(source), config, shapes)
    try:
        if shapes is not None:
            _check_size(cls, source, config, sum(map(math.prod, shapes.values())))
        model, info = cls.from_pretrained(
            source, config=config, use_safetensors=True, trust_remote_code=False, output_loading_info=True,
            ignore_mismatched_sizes=True, **loading,
        )  # fmt: skip
    except BUILDING as error:
        said = first_line(error)
        raise ValueError(said if said.startswith(source) else f"{source}: {said}") from error
    check_complete(source, info)
    return model


def _check_size(cls: Class, source: str, config: Config, numbers: int) -> None:
    """Refuse a config of a far larger model than the files hold, before there is memory for it."""
    with torch.device("meta"):
        build = getattr(cls, "_from_config", None) or cls.from_config
        described = sum(each.numel() for each in build(config).parameters())
    if described > PACKED * numbers:
        raise ValueError(
            f"{source}: config.json describes {described:,} parameters, and the weights hold {numbers:,} numbers"
        )


def check_complete(source: object, info: Info) -> None:
    """Refuse missing, left-over and misshapen tensors, by name."""
    missing, extra = set(info["missing_keys"]), set(info["unexpected_keys"])
    misshapen = {f"{name} {_shape(there)} (the model has {_shape(here)})" for name, there, here in _mismatched(info)}
    told = [f"{what} {named(names)}" for what, names in (
        ("lack", missing - {name for name, *_ in _mismatched(info)}), ("have no place for", extra), ("hold", misshapen)
    ) if names]  # fmt: skip
    if told:
        raise ValueError(f"{source}: the weights do not make the model of its config.json: they {'; they '.join(told)}")


def check_converted(model: Model, info: Info, *, lenient: bool = False) -> None:
    """The same for a converted model. A head may be new, where a model is loaded as another class than was saved.

    lenient: the caller asked transformers for a head of another shape.
    """
    ours = [sorted(key for key in info[kind] if _OURS.search(key)) for kind in ("unexpected_keys", "missing_keys")]
    if any(ours):
        strange, absent = ours
        detail = f"has {named(strange)}" if strange else f"lacks {named(absent)}"
        raise ValueError(
            f"these weights are of another design than the config's {model.base_model.stream.spec}: the file {detail}; "
            "put back the files that were saved together, or convert the base again"
        )
    saved = list(getattr(model.config, "architectures", None) or ())
    if saved == [type(model).__name__] and not lenient:
        check_complete(model.config._name_or_path, info)
        return
    inner = {name.partition(".")[0] for name in model.base_model.state_dict()} | {model.base_model_prefix}
    whole = model.base_model is model

    def of_backbone(name: str) -> bool:
        return name.partition(".")[0] in inner

    check_complete(
        model.config._name_or_path,
        {
            "missing_keys": [name for name in info["missing_keys"] if whole or of_backbone(name)],
            "unexpected_keys": [name for name in info["unexpected_keys"] if of_backbone(name)],
            "mismatched_keys": [each for each in _mismatched(info) if whole or of_backbone(each[0])],
        },
    )


def first_line(error: BaseException) -> str:
    """An error in one line, with its kind where it says nothing else."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _mismatched(info: Info) -> list[tuple[str, Any, Any]]:
    return [tuple(each) for each in info["mismatched_keys"]]


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"
