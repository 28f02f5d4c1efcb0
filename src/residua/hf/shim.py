"""What the file beside a saved model calls: its classes, by name."""

from __future__ import annotations

from residua.hf.anatomy import Class


def find(base_type: str, name: str) -> Class:
    """The class `name` of converted models of one architecture."""
    from residua.hf import classes, made

    classes.register_models(classes.config_class(base_type))
    return getattr(made, name)
