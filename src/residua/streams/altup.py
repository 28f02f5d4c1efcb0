"""AltUp: a block runs one of n streams and predicts the others, which its result then corrects."""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from residua import ops
from residua.ops.norm import accumulator
from residua.plan import Plan, Site
from residua.registry import register
from residua.stream import Conversion, Norm, Past, Read, Routing, Start, Stream
from residua.streams._lowrank import ShippedLaurel
from residua.streams._parts import Part, constant, normal

STD = 0.02
"""Of the matrices at the start."""
FLOOR = 1e-5
"""Least mean square that is divided by where a stream is brought to the size of another."""


class Streams(NamedTuple):
    """The streams, and in a block the one that it runs."""

    H: Tensor
    """[b t n d]; inside a block its predictions."""
    x: tuple[Tensor, ...] = ()
    """The running stream of the open block: none or one."""
    ple: tuple[Tensor, ...] = ()
    """An embedding [b t p] for every block that has not used its own yet."""


class Coefficients(Part):
    """What a block predicts its streams with, C [n, n], and corrects them with, 1 + c [n]: from one stream alone."""

    gain: Tensor
    router: Tensor
    predict: Tensor
    correct: Tensor

    def __init__(self, width: int, streams: int, eps: float, clip: float, std: float) -> None:
        super().__init__()
        self.eps, self.clip = eps, clip
        self.add("gain", (width,), constant(1.0))
        self.add("router", (streams, width), normal(STD))
        self.add("predict", (streams * streams, streams), normal(std))
        self.add("correct", (streams, streams), normal(std))

    def predictions(self, x: Tensor) -> Tensor:
        """C [b t to from]."""
        return F.linear(self._routed(x), self._clipped(self.predict)).unflatten(-1, (-1, len(self.correct)))

    def corrections(self, x: Tensor) -> Tensor:
        """1 + c [b t n]."""
        return F.linear(self._routed(x), self._clipped(self.correct)) + 1.0

    def _routed(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.to(self.gain.dtype), x.shape[-1:], self.gain, self.eps) * (1.0 / x.shape[-1])
        return F.linear(normed, self.router).tanh()

    def _clipped(self, weight: Tensor) -> Tensor:
        return weight.clamp(-self.clip, self.clip) if self.clip else weight


class Injection(Part):
    """N(W (gelu(W_g (x * v)) * ple)): what the embedding of a block adds to the streams that it does not run."""

    scale: Tensor
    gate: Tensor
    project: Tensor
    gain: Tensor

    def __init__(self, width: int, inputs: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.add("scale", (width,), constant(0.0))
        self.add("gate", (inputs, width), normal(STD))
        self.add("project", (width, inputs), normal(STD))
        self.add("gain", (width,), constant(1.0))

    def forward(self, x: Tensor, ple: Tensor) -> Tensor:
        inner = F.gelu(F.linear(x.to(self.scale.dtype) * self.scale, self.gate), approximate="tanh")
        out = F.linear(inner * ple.to(inner.dtype), self.project).to(self.gain.dtype)  # autocast narrows it
        return F.rms_norm(out, out.shape[-1:], self.gain, self.eps).to(x.dtype)


class Lookup(Part):
    """(N(W e / sqrt(d)) + sqrt(p) T[token]) / sqrt(2), p numbers for every block."""

    table: Tensor
    project: Tensor
    gain: Tensor

    def __init__(self, plan: Plan, inputs: int, eps: float) -> None:
        super().__init__()
        self.shape, self.eps = (plan.depth, inputs), eps
        self.add("table", (plan.vocab, plan.depth * inputs), normal(STD))
        self.add("project", (plan.depth * inputs, plan.width), normal(STD))
        self.add("gain", (inputs,), constant(1.0))

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        projected = F.linear(x.to(self.project.dtype), self.project).to(self.gain.dtype) * x.shape[-1] ** -0.5
        projected = F.rms_norm(projected.unflatten(-1, self.shape), self.shape[-1:], self.gain, self.eps)
        known = torch.where(ids < len(self.table), ids, 0)  # a released table may be shorter than the vocabulary
        looked = F.embedding(known, self.table).unflatten(-1, self.shape) * self.shape[1] ** 0.5
        return ((projected + looked) * 2**-0.5).to(x.dtype).unbind(-2)


class Projections(Part):
    """A matrix for every stream but the first, called `stream1`, `stream2` and so on."""

    def __init__(self, width: int, streams: int, std: float) -> None:
        super().__init__()
        for k in range(1, streams):
            self.add(f"stream{k}", (width, width), normal(std))

    def forward(self, like: Tensor, others: list[Tensor]) -> list[Tensor]:
        """Each of the others, projected and brought to the size of `like`, after `like` itself."""
        wide = accumulator(like.dtype)
        size = like.to(wide).square().mean(-1, keepdim=True)
        size = size.clamp_min(torch.finfo(wide).tiny).sqrt()  # no gradient through the root of 0
        found = [like]
        for k, other in enumerate(others, 1):
            weight = getattr(self, f"stream{k}")
            out = F.linear(other.to(weight.dtype), weight).to(wide)
            own = out.square().mean(-1, keepdim=True).clamp_min(FLOOR).sqrt()
            found.append((out * size / own).to(like.dtype))
        return found


@register("altup")
class AltUp(Stream[Streams]):
    """p_k = s_k + sum_j C[k, j] s_j; a block maps p_0 to a; s_k <- p_k + (1 + c_k)(a - p_0), over n streams of width d.

    C = W_p r(s_0) and c = W_c r(a), r(x) = tanh(W_m rmsnorm(x) / d): as Gemma 3n ships it. s_0 is the embedding and
    s_k = P_k e; the head reads the mean of s_0 and U_k s_k; each product is brought to the size of its first stream.
    (In the paper C and c are numbers, the embedding is n times as wide, and blocks take turns in the stream they run.)

    streams   n.
    ple       p: after a block, s_k += N(W (gelu(W_g (s_0 * v)) * t)) for k > 0, t of width p made from the embedding
              and from a table of the block, looked up by token. v = 0 at the start; 0 for none.
    laurel    the rank of `laurel:form=gemma3n` at every attention; 0 for none. Gemma 3n is
              altup:ple=256,laurel=64 in the layout attn:norm=both,mlp:norm=both.
    clip      W_p and W_c are held to +-clip (Gemma 3n: in training, and W_p in place); 0 for no bound.
    start     gemma3n: matrices N(0, 0.02^2), as in transformers; what it was trained from is not published. standard:
              W_p = W_c = U_k = 0, so that stream 0 runs the standard network and the head reads 1/n of it; not with
              laurel.
    """

    paper = "arXiv 2301.13310 (as in Gemma 3n)"
    mixes = "n parallel streams, once a block"
    released_in: ClassVar = {"Gemma 3n": "altup:ple=256,laurel=64"}
    cases = (
        "",
        "start=standard",
        "streams=2,clip=0.0,eps=1e-5",
        "ple=3,laurel=2",
        "ple=3,streams=2,start=standard",
    )
    conversion = Conversion({"start": "standard"}, eps=True)

    def __init__(
        self,
        plan: Plan,
        *,
        streams: int = 4,
        ple: int = 0,
        laurel: int = 0,
        clip: float = 120.0,
        eps: float = 1e-6,
        start: Literal["gemma3n", "standard"] = "gemma3n",
    ) -> None:
        super().__init__(plan)
        if streams < 2:
            raise ValueError(f"altup: streams={streams} leaves no stream to predict; use standard")
        if ple < 0 or laurel < 0 or clip < 0:
            raise ValueError("altup: ple, laurel and clip are sizes, and 0 for none; they cannot be negative")
        if laurel > plan.width:
            raise ValueError(f"altup: laurel={laurel} is a rank, and at most the width {plan.width}")
        if laurel and start == "standard":
            raise ValueError("altup: start=standard is the standard network, which laurel is not; drop one of them")
        self.streams, self.standard = streams, start == "standard"
        std = 0.0 if self.standard else STD

        def make(site: Site) -> nn.Module | None:
            if site.kind == "head":
                return Projections(plan.width, streams, std)
            parts = nn.ModuleDict()
            if site.first:
                parts["altup"] = Coefficients(plan.width, streams, eps, clip, std)
            if site.first and ple:
                parts["ple"] = Injection(plan.width, ple, eps)
            if site.lanes == 3 and laurel:
                parts["laurel"] = ShippedLaurel(plan.width, laurel, eps)
            return parts if len(parts) else None

        self.each(make)
        self.project = Projections(plan.width, streams, STD)
        self.lookup = Lookup(plan, ple, eps) if ple else None
        self._opening = {site.layer: site for site in plan.sites if site.first}

    @property
    def starts(self) -> Start:
        return "eps" if self.standard else "no"

    @property
    def takes_ids(self) -> bool:
        return self.lookup is not None

    def open(self, x: Tensor, past: Past = None, ids: Tensor | None = None) -> Streams:
        H = torch.stack(self.project(x, [x] * (self.streams - 1)), -2)
        if self.lookup is None:
            return Streams(H)
        assert ids is not None  # a runner gives them to a design that takes them
        return Streams(H, ple=self.lookup(x, ids))

    def read(self, s: Streams, site: Site, norm: Norm) -> Read:
        if site.kind == "head":
            first, *others = s.H.unbind(-2)
            return Read(norm(torch.stack(self.part(site)(first, others)).mean(0)))
        H, x = s.H, s.x[0] if s.x else None
        if x is None:
            C = self.part(site)["altup"].predictions(H[..., 0, :])
            H = H + ops.remix(C.transpose(-1, -2), H)
            x = H[..., 0, :]
        return Read(norm(x), carry=(H, x))

    def write(self, s: Streams, site: Site, read: Read, y: Tensor) -> Streams:
        H, x = read.carry
        part = self.part(site)
        x = part["laurel"].write(x, read.lanes[0], y) if part is not None and "laurel" in part else x + y
        if not site.last:
            return Streams(H, (x,), s.ple)
        block = self.part(self._opening[site.layer])
        weights = block["altup"].corrections(x).to(x.dtype)
        H = H + weights[..., None] * (x - H[..., 0, :])[..., None, :]
        if not s.ple:
            return Streams(H)
        first, others = H.split((1, self.streams - 1), -2)
        added = block["ple"](first.squeeze(-2), s.ple[0])
        return Streams(torch.cat([first, others + added[..., None, :]], -2), ple=s.ple[1:])

    def sources(self, site: Site) -> tuple[str, ...]:
        if site.kind == "head" or not site.first:
            return ()
        return tuple(f"stream{k}" for k in range(self.streams))

    def routing(self, s: Streams, site: Site) -> Routing | None:
        if not self.sources(site):
            return None
        C = self.part(site)["altup"].predictions(s.H[..., 0, :])[..., 0, :]
        own = F.one_hot(torch.tensor(0, device=C.device), self.streams)
        return Routing(s.H.unbind(-2), (C + own).movedim(-1, 0)[None, ..., None])
