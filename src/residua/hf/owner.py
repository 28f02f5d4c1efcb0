"""A way back to the backbone, whose stream may be wrapped or replaced (as peft does), that is no submodule."""

from __future__ import annotations

from residua.hf.anatomy import Model


class Owner:
    """Holds the backbone."""

    def __init__(self, backbone: Model) -> None:
        self.backbone = backbone
