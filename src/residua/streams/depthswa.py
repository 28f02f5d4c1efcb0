"""The depth read of the residual stream duality: short sliding-window attention, over layers instead of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from torch import Tensor, nn

from residua import ops
from residua.plan import Plan, Site
from residua.registry import register
from residua.stream import Conversion, Norm, Past, Read, Routing, Start, Stream
from residua.streams._parts import Part, block_names, constant, diagonal, divides, group_names, normal, positive


class Window(NamedTuple):
    """The stream and the last sources."""

    h: Tensor
    sources: tuple[Tensor, ...]
    """At most K, the newest last; the embedding is the first of all."""
    partial: tuple[Tensor, ...] = ()
    """The change made by the open layer so far, where sources are deltas of layers: none or one."""


class Projections(Part):
    """W_Q, W_K and W_V; without the first two where there is never more than one source to choose from."""

    query: Tensor  # this and the key only if `chooses`
    key: Tensor
    value: Tensor

    def __init__(self, width: int, chooses: bool) -> None:
        super().__init__()
        self.chooses = chooses
        if chooses:
            self.add("query", (width, width), normal(width**-0.5))
            self.add("key", (width, width), normal(width**-0.5))
        self.add("value", (width, width), diagonal(1.0))


@register("depthswa")
class DepthSWA(Stream[Window]):
    """z_l = softmax_j(W_Q u_l . W_K u_j / sqrt(d)) W_V u_j over l - K < j <= l: ShortSWA over the depth of a token.

    With `shared` weights this is exactly causal sliding-window attention on the transposed stack of sources u, for
    a given stack (in a network the stack depends on earlier reads): `ops.window_attend` along depth, axis 0. A site
    has one query, and sources that are not stacked, so it calls `ops.attend_qkv`, the fused form of one row of that
    operator; `residua duality` shows them equal. The paper fixes the read and leaves the rest open; each choice is an
    option. It gives no init either: here W_Q, W_K ~ N(0, 1/d) and W_V = I.

    window      K, counting the newest source.
    sources     states: u_l is the stream after layer l; deltas: what layer l added (u_0 is the embedding for both).
    unit        layer: one source and one read per Transformer block, as in the paper; sublayer: per sublayer.
    enter       input: the sublayer reads z, the shortcut keeps h. add: it reads h + g z. qkv: attention sublayers
                read z, the others h. stream: z replaces the stream itself, shortcut included.
    gate        alpha: g starts at 0 (enter=add only: elsewhere z replaces, and a gate would mix unlike things).
    shared      one W_Q, W_K, W_V for all depths, or one per site.
    key_norm    RMS-normalise sources before W_Q and W_K.
    """

    paper = "arXiv 2603.16039"
    mixes = "the last K states or deltas"
    conversion = Conversion({"enter": "add", "gate": "alpha"}, exact=True)
    cases = (
        "",
        "window=1",
        "window=2,sources=deltas",
        "sources=deltas,unit=sublayer,enter=add",
        "enter=add,gate=alpha,heads=2",
        "enter=qkv,unit=sublayer",
        "enter=qkv",
        "enter=stream,key_norm=true",
        "shared=false,window=3",
        "shared=false,window=1,enter=add,unit=sublayer",
    )

    def __init__(
        self,
        plan: Plan,
        *,
        window: int = 4,
        sources: Literal["states", "deltas"] = "states",
        unit: Literal["layer", "sublayer"] = "layer",
        enter: Literal["input", "add", "qkv", "stream"] = "input",
        gate: Literal["none", "alpha"] = "none",
        heads: int = 1,
        shared: bool = True,
        key_norm: bool = False,
    ) -> None:
        super().__init__(plan)
        positive(self.name, window=window, heads=heads)
        self.window, self.deltas, self.by_layer, self.enter = window, sources == "deltas", unit == "layer", enter
        self.heads, self.key_norm = heads, key_norm
        divides(self.name, plan, heads)
        if gate == "alpha" and enter != "add":
            raise ValueError(f"depthswa: a gate needs enter=add; enter={enter} replaces what it would be added to")
        if enter == "qkv" and not any(site.lanes == 3 for site in plan.sites):
            raise ValueError("depthswa: enter=qkv needs an attention sublayer; this layout has none")
        if key_norm and not self._chooses():
            raise ValueError("depthswa: key_norm has no effect where no site has two sources; drop it")
        self.shared = Projections(plan.width, self._chooses()) if shared else None

        def make(site: Site) -> nn.ModuleDict | None:
            if not self._reads(site):
                return None
            parts = nn.ModuleDict()
            if not shared:
                parts["project"] = Projections(plan.width, len(self._names(site)) > 1)
            if gate == "alpha":
                scalar = Part()
                scalar.add("alpha", (1,), constant(0.0))
                parts["gate"] = scalar
            return parts if len(parts) else None

        self.each(make)

    @property
    def starts(self) -> Start:
        if self.options["gate"] == "alpha":
            return "standard"
        newest = self.by_layer and any(not site.first and self._reads(site) for site in self.plan.sites)
        if self.window > 1 or self.deltas or newest:
            return "no"
        return "eps" if self.enter == "add" else "standard"  # z = h: the read doubles it, or is it

    def open(self, x: Tensor, past: Past = None) -> Window:
        return Window(x, (x,))

    def read(self, s: Window, site: Site, norm: Norm) -> Read:
        if not self._reads(site):
            return Read(norm(s.h), carry=s.h)
        z = ops.attend_qkv(*self._projected(s, site), heads=self.heads)
        if self.enter == "stream":
            return Read(norm(z), carry=z)
        return Read(norm(s.h + self._gate(s, site) * z if self.enter == "add" else z), carry=s.h)

    def write(self, s: Window, site: Site, read: Read, y: Tensor) -> Window:
        h = read.carry + y
        change = s.partial[0] + y if s.partial else y
        if self.by_layer and not site.last:
            return Window(h, s.sources, (change,) if self.deltas else ())
        return Window(h, (*s.sources, change if self.deltas else h)[-self.window :])

    def sources(self, site: Site) -> tuple[str, ...]:
        return self._names(site) if self._reads(site) else ()

    def routing(self, s: Window, site: Site) -> Routing | None:
        if not self._reads(site):
            return None
        query, keys, values = self._projected(s, site)
        weights = ops.attend_qkv_weights(query, keys, heads=self.heads)[None]
        return Routing(values, weights, *((s.h, self._gate(s, site)) if self.enter == "add" else ()))

    def gates(self, s: Window, site: Site, read: Read) -> Mapping[str, Tensor]:
        part = self.part(site)
        return {"gate": part["gate"].alpha} if part is not None and "gate" in part else {}

    def _projected(self, s: Window, site: Site) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        part = self.shared if self.shared is not None else self.part(site)["project"]
        values = tuple(source @ part.value.to(source.dtype) for source in s.sources)
        if not part.chooses:
            return s.sources[-1], s.sources, values  # one source: any query and key give it weight 1
        keyed = tuple(ops.rms_norm(u, 1e-6) for u in s.sources) if self.key_norm else s.sources
        query = keyed[-1] @ part.query.to(s.h.dtype)
        return query, tuple(u @ part.key.to(s.h.dtype) for u in keyed), values

    def _gate(self, s: Window, site: Site) -> Tensor | float:
        part = self.part(site)
        return part["gate"].alpha.to(s.h.dtype) if part is not None and "gate" in part else 1.0

    def _reads(self, site: Site) -> bool:
        if site.kind == "head":
            return False
        if self.enter == "qkv":
            return site.lanes == 3
        return site.first or not self.by_layer

    def _names(self, site: Site) -> tuple[str, ...]:
        if self.by_layer:
            return block_names(self.plan, site.layer)[-self.window :]
        return ("embed", *group_names(self.plan, 1, site.index))[-self.window :]

    def _chooses(self) -> bool:
        return any(self._reads(site) and len(self._names(site)) > 1 for site in self.plan.sites)
