"""The residual stream of the standard Transformer."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from residua.plan import Plan, Site
from residua.registry import register
from residua.stream import Conversion, Norm, Past, Read, Start, Stream


@register("standard")
class Standard(Stream[Tensor]):
    """h <- h + f(norm(h)).

    norm=post is the original Transformer, h <- norm(h + f(h)), with each norm moved to where its result is first
    read: site s normalises what site s - 1 wrote, the first normalises the embedding, and the head's is the last.
    """

    paper = "arXiv 1706.03762 (post-norm), 2002.04745 (pre-norm)"
    mixes = "nothing: the running sum"
    cases = ("", "norm=post")
    conversion = Conversion(exact=True)

    def __init__(self, plan: Plan, *, norm: Literal["pre", "post"] = "pre") -> None:
        super().__init__(plan)
        self.post = norm == "post"

    @property
    def starts(self) -> Start:
        return "no" if self.post else "standard"

    def open(self, x: Tensor, past: Past = None) -> Tensor:
        return x

    def read(self, h: Tensor, site: Site, norm: Norm) -> Read:
        (x,) = norm(h)
        return Read((x,), carry=x if self.post else h)

    def write(self, h: Tensor, site: Site, read: Read, y: Tensor) -> Tensor:
        return read.carry + y
