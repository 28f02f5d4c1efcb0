"""Parameters that stay where a released class keeps them: a part of a design reads them there.

    part.phi   ->   fn[:n].T of the class's own module

So the model keeps its keys, its optimizer and its device map, and saving writes what was loaded. A part whose
parameters are lent has none of its own; every access makes the view anew, because `model.to` replaces tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from torch import Tensor, nn

from residua.hf.anatomy import Class, Model
from residua.hf.made import made
from residua.stream import Stream


@dataclass(frozen=True)
class Loan:
    """A tensor made from parameters of a module. (The module is no submodule here: it would be saved twice.)"""

    lender: Model
    view: Callable[[Model], Tensor]

    def tensor(self) -> Tensor:
        """As it is now; gradients flow to the lender. One that is offloaded is brought in, as accelerate would for its
        own forward."""
        hook = self.lender.__dict__.get(
            "_hf_hook"
        )  # a module's own attribute: asking for a missing one by name is slow
        if hook is None or not getattr(hook, "offload", False):
            return self.view(self.lender)
        from accelerate.utils import align_module_device

        with align_module_device(self.lender):
            return self.view(self.lender)


def weight(module: Model) -> Tensor:
    """The parameter of a linear map, an embedding or a norm, as it is."""
    return module.weight


def lend(part: nn.Module, loans: Mapping[str, Loan]) -> None:
    """Replace the parameters of a part, by their names in it, by what other modules have."""
    own = part.state_dict()
    grouped: dict[str, dict[str, Loan]] = {}
    for name, loan in loans.items():
        lender = type(loan.lender).__name__
        if name not in own:
            raise ValueError(f"{lender} has {name}, which the design does not build here")
        wanted, found = own[name].shape, loan.tensor().shape
        if wanted != found:
            raise ValueError(f"{lender} gives {name} the shape {tuple(found)}, not {tuple(wanted)}")
        path, _, last = name.rpartition(".")
        grouped.setdefault(path, {})[last] = loan
    for path, lent in grouped.items():
        holder: Model = part.get_submodule(path)
        for each in lent:
            delattr(holder, each)  # a parameter, or a buffer where the design holds it fixed
        holder.loans = lent
        holder.__class__ = _borrowing(holder.__class__, tuple(sorted(lent)))


def check_lent(stream: Stream) -> None:
    """Refuse a stream that still has parameters of its own, which no checkpoint fills."""
    own = list(stream.state_dict())
    if own:
        raise ValueError(f"{stream.spec} has parameters that this model does not: {', '.join(own[:3])}")


def lenders(stream: nn.Module) -> Iterator[Model]:
    """The modules of the released class whose parameters the stream uses: all of each, and each once."""
    seen: dict[int, Model] = {}
    for module in stream.modules():
        for loan in getattr(module, "loans", {}).values():
            seen[id(loan.lender)] = loan.lender
    yield from seen.values()


@cache
def _borrowing(base: Class, names: tuple[str, ...]) -> Class:
    """The class of a part whose parameters of these names are lent."""
    body: dict[str, object] = {name: property(_borrowed(name)) for name in names}
    body["reset_parameters"] = _no_start
    return made(f"Borrowing{base.__name__}_{'_'.join(names)}", (base,), body)


def _borrowed(name: str) -> Callable[[Model], Tensor]:
    return lambda part: part.loans[name].tensor()


def _no_start(part: Model, generator: object = None) -> None:
    raise ValueError("the parameters of a released model's stream are its own and have no start here")
