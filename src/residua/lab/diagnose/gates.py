"""The gates of a design, by name: `gate_values(stream, state, site, read)` gives tensors, empty where it has none.

A design of your own takes part with

    @gate_reader(MyDesign)
    def my_gates(stream, state, site, read):
        return {"gate": stream.part(site).gate}

A gate called `beta`, in 0 to 2, also gets a histogram and the regimes of `metrics.beta_regimes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from residua.plan import Site
from residua.stream import Read, Stream
from residua.streams import DDL, MHC, Delta, DepthSWA, Hyper

Reader = Callable[[Any, Any, Site, Read], Mapping[str, Tensor]]

_readers: dict[type[Stream[Any]], Reader] = {}


def gate_reader(design: type[Stream[Any]]) -> Callable[[Reader], Reader]:
    """Make a function of (stream, state, site, read) say what the gates of `design` and its subclasses are."""

    def add(reader: Reader) -> Reader:
        if design in _readers:
            raise ValueError(f"{design.__name__} has a gate reader already: {_readers[design].__qualname__}")
        _readers[design] = reader
        return reader

    return add


@torch.no_grad()
def gate_values(stream: Stream[Any], state: Any, site: Site, read: Read) -> dict[str, Tensor]:
    """The gates that act at a site, given its state and its read."""
    for cls in type(stream).__mro__:
        if cls in _readers:
            return dict(_readers[cls](stream, state, site, read))
    return {}


@gate_reader(Delta)
def delta_gates(stream: Delta, state: Any, site: Site, read: Read) -> dict[str, Tensor]:
    """g of every routed read; `gate_v` is the value lane's. gate=none has no gate."""
    routes = stream.part(site) or ()
    names = ("gate", "gate_v")[: len(routes)]
    return {name: route.gate(state.h) for name, route in zip(names, routes, strict=True) if route.gate.kind != "none"}


@gate_reader(DepthSWA)
def depthswa_gates(stream: DepthSWA, state: Any, site: Site, read: Read) -> dict[str, Tensor]:
    """The plain scalar before z."""
    part = stream.part(site)
    return {"gate": part["gate"].alpha} if part is not None and "gate" in part else {}


@gate_reader(DDL)
def ddl_gates(stream: DDL, state: Any, site: Site, read: Read) -> dict[str, Tensor]:
    """beta of every token, and with start=standard the blend, which scales what beta does."""
    part = stream.part(site)
    if part is None or "rewrite" not in part:
        return {}
    rewrite, (_, c) = part["rewrite"], read.carry
    gates: dict[str, Tensor] = {"beta": rewrite.share(c)}
    if stream.standard:
        gates["blend"] = rewrite.blend
    return gates


@gate_reader(Hyper)
def hyper_gates(stream: Hyper, state: Any, site: Site, read: Read) -> dict[str, Tensor]:
    """The scales of the dynamic weights."""
    part = stream.part(site)
    return {"s_alpha": part.s_alpha, "s_beta": part.s_beta} if part is not None and part.dynamic else {}


@gate_reader(MHC)
def mhc_gates(stream: MHC, state: Any, site: Site, read: Read) -> dict[str, Tensor]:
    """The scales of the dynamic weights, of the mappings that the site has."""
    part = stream.part(site)
    mappings = {} if part is None else {name: getattr(part, name) for name in ("pre", "post", "res")}
    return {f"alpha_{name}": mapping.alpha for name, mapping in mappings.items() if mapping is not None}
