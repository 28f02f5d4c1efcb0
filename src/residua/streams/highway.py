"""Highways: one stream whose skip and whose write each have a weight."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from residua import ops
from residua.plan import Plan, Site
from residua.registry import register
from residua.spec import Value
from residua.stream import Conversion, Norm, Past, Read, Start, Stream
from residua.streams._norms import Gain
from residua.streams._parts import Part, belongs, constant, normal

LEAST = 1e-3
"""Under the root of Muse-Spark's skip."""
LARGEST = 1e18
"""What a skip may make of a stream: its square is still a float32."""


class Step(Part, ABC):
    """h <- alpha h + beta y at one site."""

    @abstractmethod
    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        """The stream after a sublayer answered y."""

    def gates(self, h: Tensor) -> Mapping[str, Tensor]:
        """What is learned of alpha and beta."""
        return {}


class Transform(Step):
    """(1 - T) h + T y, T = sigmoid(W h + b), by channel."""

    weight: Tensor
    bias: Tensor

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.add("weight", (width, width), normal(0.02))
        self.add("bias", (width,), constant(start))

    def gate(self, h: Tensor) -> Tensor:
        """T."""
        return torch.sigmoid(F.linear(h, self.weight.to(h.dtype), self.bias.to(h.dtype)))

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        return torch.lerp(h, y, self.gate(h))

    def gates(self, h: Tensor) -> Mapping[str, Tensor]:
        return {"transform": self.gate(h)}


class Scaled(Step):
    """h + scale y: one number, or one a channel."""

    scale: Tensor

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.add("scale", (width,), constant(start))

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        return h + self.scale.to(h.dtype) * y

    def gates(self, h: Tensor) -> Mapping[str, Tensor]:
        return {"scale": self.scale}


class Skip(Step):
    """alpha h + y, alpha a constant."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        return self.alpha * h + y


class Muse(Step):
    """alpha h + beta N(w y), beta = sigmoid(g / temperature), alpha = sqrt(max(1 - beta^2, 1e-3)), by channel.

    The gain w stands before the norm, so that only its direction acts; where `gained` is False there is none.
    """

    gate: Tensor
    gain: Tensor  # only if `gained`

    def __init__(self, width: int, start: float, temperature: float, eps: float, gained: bool) -> None:
        super().__init__()
        self.temperature, self.eps, self.gained = temperature, eps, gained
        self.add("gate", (width,), constant(start))
        if gained:
            self.add("gain", (width,), constant(1.0))

    def weights(self) -> tuple[Tensor, Tensor]:
        """alpha and beta."""
        scaled = self.gate / self.temperature
        beta = scaled.sigmoid()
        # 1 - beta^2 as (1 - beta)(1 + beta), which is exact where beta is close to 1
        return ((-scaled).sigmoid() * (1 + beta)).clamp(min=LEAST).sqrt(), beta

    def mixed(self, h: Tensor, normed: Tensor) -> Tensor:
        """alpha h + beta normed, rounded to the type of h once."""
        alpha, beta = self.weights()
        return (alpha * h + beta * normed).to(h.dtype)

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        return self.mixed(h, ops.rms_norm(self.gain.to(y.dtype) * y if self.gained else y, self.eps))

    def gates(self, h: Tensor) -> Mapping[str, Tensor]:
        alpha, beta = self.weights()
        return {"skip": alpha, "write": beta}


class Beam(Step):
    """sqrt((t - 1) / t) h + N(y) / sqrt(t), where y is the t-th term of the stream and the embedding the first."""

    def __init__(self, width: int, t: int, eps: float) -> None:
        super().__init__()
        self.alpha, self.beta = math.sqrt((t - 1) / t), 1 / math.sqrt(t)
        self.norm = Gain(width, eps)

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        return self.alpha * h + self.beta * self.norm(y)


@register("highway")
class Highway(Stream[Tensor]):
    """h <- alpha h + beta f(norm(h)): a skip and a write that are scaled, by numbers, by channel or by depth.

    form         layerscale: h + g f(norm(h)), g one number a channel (LayerScale).
                 rezero: h + a f(h), a one number that starts at 0, and no norm before the sublayer (ReZero).
                 deepnorm: alpha h + f(norm(h)), alpha = (number of sublayers)^(1/4): DeepNorm's skip without its norm.
                 The next norm forgets what the stream is multiplied by, so that a sublayer fades by alpha with each one
                 after it; `postnorm:form=deepnorm` is the paper's.
                 muse: alpha h + beta N(f(norm(h))), one g a channel, beta = sigmoid(g / temperature),
                 alpha = sqrt(max(1 - beta^2, 1e-3)): what Muse-Spark runs. N has no gain behind attention, and one
                 inside elsewhere, N(w f), of which only the direction acts. That model also normalises its embedding,
                 which is no business of a stream.
                 beam: sqrt((t-1)/t) h + N(f(norm(h))) / sqrt(t), t = 2, 3, ... over the sublayers: what Beam runs.
                 gate: (1 - T) h + T f(h), T = sigmoid(W h + b), W d x d, and no norm: Highway networks, a gated
                 recurrence over depth.
    start        of a (rezero: 0), of every g (layerscale: 0.1 to 18 blocks, 1e-5 to 24, 1e-6 beyond; muse: 0), of b
                 (gate: -2, so that the stream is carried at first; W starts at N(0, 0.02^2)).
    norm         of rezero and gate: none (the papers), or pre: the sublayer reads norm(h).
    skip         alpha of deepnorm.
    temperature  of muse: 0.3.
    eps          of N: 1e-8 for muse and 1e-6 for beam, as released.

    N, of what the sublayer gives back, belongs to the design; a layout needs no norm=both for it.
    """

    paper = (
        "arXiv 2103.17239 (LayerScale), 2003.04887 (ReZero), 2203.00555 (DeepNorm), 1505.00387 (Highway networks), "
        "Muse-Spark, Beam"
    )
    mixes = "nothing: the running sum, its terms scaled"
    released_in: ClassVar = {"Muse-Spark": "highway:form=muse", "Beam": "highway:form=beam"}
    cases = (
        "",
        "start=1.0",
        "form=rezero",
        "form=rezero,norm=pre,start=0.5",
        "form=rezero,norm=none,start=1.0",
        "form=deepnorm",
        "form=deepnorm,skip=1.5",
        "form=muse",
        "form=muse,start=-0.6,temperature=0.5,eps=1e-5",
        "form=beam",
        "form=gate",
        "form=gate,norm=pre,start=-1.0",
    )
    conversion = Conversion({"start": 1.0}, exact=True)

    def __init__(
        self,
        plan: Plan,
        *,
        form: Literal["layerscale", "rezero", "deepnorm", "muse", "beam", "gate"] = "layerscale",
        start: float | None = None,
        norm: Literal["none", "pre"] | None = None,
        skip: float | None = None,
        temperature: float | None = None,
        eps: float | None = None,
    ) -> None:
        super().__init__(plan)
        belongs(self.name, form, "start", start, "layerscale", "rezero", "muse", "gate")
        belongs(self.name, form, "norm", norm, "rezero", "gate")
        belongs(self.name, form, "skip", skip, "deepnorm")
        belongs(self.name, form, "temperature", temperature, "muse")
        belongs(self.name, form, "eps", eps, "muse", "beam")
        if temperature is not None and temperature <= 0:
            raise ValueError(f"highway: temperature must be above 0, not {temperature}")
        self.form, self.norms = form, form not in ("rezero", "gate") or norm == "pre"
        self.start = _start(form, plan.depth) if start is None else start
        alpha = len(plan.sites) ** 0.25 if skip is None else skip
        if form == "deepnorm":
            _refuse_skip(alpha, len(plan.sites))

        def make(site: Site) -> Step | None:
            if site.kind == "head":
                return None
            if form == "deepnorm":
                return Skip(alpha)
            if form == "gate":
                return Transform(plan.width, self.start)
            if form == "beam":
                return Beam(plan.width, site.index + 2, 1e-6 if eps is None else eps)
            if form == "muse":
                given = temperature or 0.3, 1e-8 if eps is None else eps
                return Muse(plan.width, self.start, *given, gained=site.lanes == 1)
            return Scaled(1 if form == "rezero" else plan.width, self.start)

        self.each(make)

    @property
    def starts(self) -> Start:
        scaled = self.form in ("layerscale", "rezero")
        return "standard" if scaled and self.norms and self.start == 1 else "no"

    @classmethod
    def entering(cls, options: Mapping[str, Value]) -> dict[str, Value]:
        filled: dict[str, dict[str, Value]] = {
            "layerscale": {"start": 1.0},
            "rezero": {"start": 1.0, "norm": "pre"},
        }
        return {**filled.get(str(options.get("form", "layerscale")), {}), **options}

    def takes_norm(self, site: Site) -> bool:
        return self.norms or site.kind == "head"

    def open(self, x: Tensor, past: Past = None) -> Tensor:
        return x

    def read(self, h: Tensor, site: Site, norm: Norm) -> Read:
        return Read(norm(h) if self.takes_norm(site) else (h,))

    def write(self, h: Tensor, site: Site, read: Read, y: Tensor) -> Tensor:
        after: Tensor = self.part(site)(h, y)
        return after

    def gates(self, h: Tensor, site: Site, read: Read) -> Mapping[str, Tensor]:
        part: Step | None = self.part(site)
        return {} if part is None else part.gates(h)


def _start(form: str, depth: int) -> float:
    """LayerScale's rule is CaiT's."""
    if form != "layerscale":
        return -2.0 if form == "gate" else 0.0
    return 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6


def _refuse_skip(alpha: float, sublayers: int) -> None:
    if not alpha > 1:
        raise ValueError(f"highway: skip must be above 1, not {alpha}; a skip of 1 is the standard stream")
    if sublayers * math.log(alpha) > math.log(LARGEST):
        most = LARGEST ** (1 / sublayers)
        raise ValueError(
            f"highway: {sublayers} sublayers would multiply the stream by {alpha:.3g}^{sublayers}, past float32; "
            f"use postnorm:form=deepnorm, which has a norm for it, or skip={most:.3g} or less"
        )
