"""A model run on the meta device, where tensors have shapes and no data, with every function priced by its rule.

Functions are seen as the code calls them, one level above the operators that `counter` counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.overrides import TorchFunctionMode

from residua.counting.rules import SILENT, Arguments, Call, Function, Keywords, Rule, Unseen, rule_of
from residua.counting.shapes import made


class Walk(TorchFunctionMode):
    """Adds up operations, bytes and kept tensors, apart for the design (`stream`) and the rest (`backbone`)."""

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self.flops: defaultdict[str, float] = defaultdict(float)
        self.bytes_moved: Counter[str] = Counter()
        self.saved: Counter[str] = Counter()
        self._owner, self._off = "backbone", False
        self._held = {_storage(tensor) for tensor in held}
        self._alive: list[Tensor] = []

    @contextmanager
    def inside(self, owner: str) -> Iterator[None]:
        """What runs here is put down to `owner`."""
        before, self._owner = self._owner, owner
        try:
            yield
        finally:
            self._owner = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs here costs nothing: it is priced as a whole by whoever paused."""
        self._off = True
        try:
            yield
        finally:
            self._off = False

    def __torch_function__(
        self, func: Function, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs, name = kwargs or {}, func.__name__
        if name in SILENT or self._off:
            return func(*args, **kwargs)
        call = Call(name, args, kwargs, made(name, func, args, kwargs))
        self.price(call, rule_of(call))
        return call.out

    def price(self, call: Call, rule: Rule) -> None:
        """Put a call on the bill."""
        owner, inputs, outputs = self._owner, call.inputs, call.outputs
        sources = {_storage(tensor) for tensor in inputs}
        made = [out for out in outputs if _storage(out) not in sources]
        if not made:  # a view
            return
        self.bytes_moved[owner] += sum(_nbytes(tensor) for tensor in (*inputs, *outputs)) + rule.between(call)
        if made[0].is_floating_point():
            self.flops[owner] += rule.flops(call)
        if call.learns:
            for kept in rule.keeps(call):
                self._keep(owner, kept)

    def _keep(self, owner: str, kept: Tensor | Unseen) -> None:
        """Autograd holds on to this until the backward pass; a storage is held once."""
        if isinstance(kept, Unseen):
            self.saved[owner] += kept.nbytes
        elif _storage(kept) not in self._held:
            self._held.add(_storage(kept))
            self._alive.append(kept)  # its address must not be given to another
            self.saved[owner] += kept.untyped_storage().nbytes()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _nbytes(tensor: Tensor) -> int:
    """Bytes that are there: an expanded axis has stride 0 and is read from one place."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count
