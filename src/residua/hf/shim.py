"""What the file beside a saved model calls: its classes, by name."""

from __future__ import annotations

from typing import Any


def find(base_type: str, name: str) -> Any:
    """The class `name` of converted models of one architecture."""
    from residua.hf import classes

    config = classes.config_class(base_type)
    if name == config.__name__:
        return config
    classes.register_models(config)
    return getattr(classes, name)
