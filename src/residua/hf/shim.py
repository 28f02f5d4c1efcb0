"""Where classes of converted models are found by name: by the file beside a saved model, and by pickle."""

from __future__ import annotations

from residua.hf.anatomy import PREFIX, Class


def find(base_type: str, name: str) -> Class:
    """The class `name` of converted models of one architecture."""
    from residua.hf import classes, made

    classes.register_models(classes.config_class(base_type))
    return getattr(made, name)


def __getattr__(name: str) -> Class:
    """A class that was made in this process, or the converted form of transformers' class that it is named for."""
    from residua.hf import classes, made

    if hasattr(made, name):
        return getattr(made, name)
    import transformers

    base = getattr(transformers, name.removeprefix("Residua"), None) if name.startswith("Residua") else None
    if base is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if issubclass(base, transformers.PreTrainedConfig):
        return classes.config_class(base.model_type.removeprefix(PREFIX))
    return classes.model_class(base)
