"""A way back to the backbone, whose stream may be wrapped or replaced (as peft does), that is no submodule."""

from __future__ import annotations

import copy
import threading

from torch import Tensor

from residua.hf.anatomy import Anatomy, Argument, Model


class Told(threading.local):
    """What the forward of this thread tells its layers (`told.py`); None where none runs."""

    now: dict[str, Tensor] | None = None

    def __reduce__(self) -> tuple[Argument, ...]:
        return Told, ()  # a copy of a model is in no forward


class Owner:
    """Holds the backbone, and what a forward of it tells its layers."""

    def __init__(self, backbone: Model) -> None:
        self.backbone, self.told = backbone, Told()


def adopt(backbone: Model, anatomy: Anatomy) -> None:
    """Give the layers and the final norm of a backbone their way back to it, and itself the same."""
    owner = Owner(backbone)
    for module in (backbone, *backbone.get_submodule(anatomy.layers), backbone.get_submodule(anatomy.norm)):
        module.__dict__["owner"] = owner


def adopt_replica(backbone: Model, anatomy: Anatomy) -> None:
    """The same for a copy that DataParallel made, with a stream of its own: what a design points to inside itself,
    such as its routes, would be the original's."""
    original, made = backbone.get_submodule(anatomy.norm).owner.backbone.stream, backbone.stream
    memo: dict[int, object] = {id(original.plan): original.plan}
    for one, other in zip(original.modules(), made.modules(), strict=True):
        memo |= {id(each): getattr(other, key) for key, each in one._parameters.items() if each is not None}
    backbone._modules["stream"] = copy.deepcopy(original, memo)
    adopt(backbone, anatomy)
