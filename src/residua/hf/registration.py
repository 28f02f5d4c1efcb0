"""register(auto): transformers' Auto classes learn of converted models, and import nothing of them yet; peft likewise.

`residua/__init__.py` has these functions called when a package arrives, or at once if it is there.
"""

from __future__ import annotations

from types import ModuleType

from residua.hf.anatomy import PREFIX, Argument, Class, Config


def register(auto: ModuleType) -> None:
    """Tell transformers' module of config classes the model types of converted models."""
    for base_type in list(auto.CONFIG_MAPPING_NAMES):
        auto.CONFIG_MAPPING.register(PREFIX + base_type, _pending(base_type), exist_ok=True)


def _pending(base_type: str) -> type:
    """A stand-in for a config class that imports the base's only when one is made."""

    class Pending:
        model_type = PREFIX + base_type

        def __new__(cls, *args: Argument, **kwargs: Argument) -> Config:
            return _made()(*args, **kwargs)

        @classmethod
        def from_dict(cls, *args: Argument, **kwargs: Argument) -> Config:
            return _made().from_dict(*args, **kwargs)

        @classmethod
        def from_pretrained(cls, *args: Argument, **kwargs: Argument) -> Config:
            return _made().from_pretrained(*args, **kwargs)

    def _made() -> Class:
        from residua.hf.classes import config_class

        return config_class(base_type)

    return Pending


def adapt(constants: ModuleType) -> None:
    """Tell peft's module of constants that a converted model has the target modules of its base."""
    for name, table in vars(constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(table, dict):
            table |= {PREFIX + base_type: wanted for base_type, wanted in table.items()}


def allow(auto: ModuleType) -> None:
    """Let peft's AutoPeftModel look up the classes of converted models in this package, which is imported already."""
    known = auto.get_default_import_allowlist
    vars(auto)["get_default_import_allowlist"] = lambda: [*known(), __name__.partition(".")[0]]
