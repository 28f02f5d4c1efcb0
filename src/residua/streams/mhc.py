"""Manifold-constrained Hyper-Connections: the remix of the streams is kept doubly stochastic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from residua import ops
from residua.ops.norm import accumulator
from residua.plan import Plan, Site
from residua.registry import register
from residua.spec import Value
from residua.stream import Conversion, Norm, Past, Read, Routing, Start, Stream
from residua.streams._mixers import MIXERS, check_mixer
from residua.streams._parallel import copies, home, mixture, names, written
from residua.streams._parts import Fill, Part, constant, marked, normal, positive

PRESETS: Mapping[str, Mapping[str, Value]] = {
    "deepseek-v4": {"head": "learned", "eps": 1e-6},
    "deepseek-v4.1": {"head": "learned", "reads": "previous", "eps": 1e-6},
    "glm-5.3-flash": {"head": "mean", "eps": 1e-6, "norm_eps": 1e-5},
    "hy-v4": {"head": "learned", "res": "identity", "eps": 1e-6, "norm_eps": 1e-5, "init": "hy-v4"},
}
"""What `model=` stands for, where that is not the default."""
SHARED: Mapping[str, Value] = {"iterations": 20, "res": "sinkhorn", "norm_eps": 1e-6, "reads": "own", "post": 2.0}
"""The defaults that a released model has too."""


class Form(NamedTuple):
    """The options that maps are made from."""

    streams: int
    iterations: int
    init: str
    head: str
    res: str
    eps: float
    norm_eps: float
    reads: str
    post: float


class Affine(Part):
    """alpha rmsnorm(vec H) phi + b, for one of pre (n), post (n) and res (n x n).

    fixed: not to be learned. It is kept beside the parameters, under the same names, and a checkpoint has it.
    """

    phi: Tensor
    bias: Tensor
    alpha: Tensor

    def __init__(self, inputs: int, shape: tuple[int, ...], bias: Fill, phi: Fill, *, fixed: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.add("phi", (inputs, math.prod(shape)), phi)
        self.add("bias", shape, bias)
        self.add("alpha", (1,), constant(0.01))
        if fixed:
            for name, parameter in list(self.named_parameters()):
                delattr(self, name)
                self.register_buffer(name, parameter.detach())

    def forward(self, product: Tensor) -> Tensor:
        """alpha product + b, of rmsnorm(vec H) phi."""
        return self.alpha * product.unflatten(-1, self.shape) + self.bias


def mapped(H: Tensor, maps: Sequence[Affine | None], eps: float) -> tuple[Tensor | None, ...]:
    """What each map makes of H, all by one product; None where there is none."""
    there = [one for one in maps if one is not None]
    phi = torch.cat([one.phi for one in there], 1)
    products = ops.normed_project(H.flatten(-2), phi, phi.new_zeros(phi.shape[1]), eps=eps)
    made = iter(products.split([one.phi.shape[1] for one in there], -1))
    return tuple(None if one is None else one(next(made)) for one in maps)


class Starts(NamedTuple):
    """Where the maps of a site begin: the biases of pre and post, and phi of all."""

    pre: Fill
    post: Fill
    phi: Fill

    @classmethod
    def of(cls, form: Form, site: Site) -> Starts:
        own, zero = home(form.streams, site), constant(0.0)
        match form.init:
            case "a6":
                return cls(marked(3.0, own, -3.0), zero, zero)
            case "kromhc":
                return cls(marked(1.0, own, -1.0), marked(1.0, own, -1.0), zero)
            case "hy-v4":
                return cls(constant(-math.log(form.streams - 1)), zero, normal(0.006))
            case _:
                return cls(zero, zero, normal(0.02))


class Collapse(nn.Module):
    """w = sigmoid(pre) + eps, the weights [b t n] of a read: all that a learned head has."""

    pre: Affine | None

    def __init__(self, plan: Plan, form: Form) -> None:
        super().__init__()
        self.form = form
        starts = Starts.of(form, plan.head)
        self.pre = Affine(form.streams * plan.width, (form.streams,), starts.pre, starts.phi)

    def forward(self, H: Tensor) -> tuple[Tensor, ...]:
        assert self.pre is not None
        (logits,) = self.made(H, self.pre)
        assert logits is not None
        return (self.weights(logits),)

    def made(self, H: Tensor, *maps: Affine | None) -> tuple[Tensor | None, ...]:
        """What each map makes of H."""
        return mapped(H, maps, self.form.norm_eps)

    def weights(self, logits: Tensor) -> Tensor:
        """Those of pre."""
        weights, eps = logits.sigmoid(), self.form.eps
        return weights + eps if eps else weights


class Mappings(Collapse):
    """H_pre = sigmoid, H_post = 2 sigmoid, H_res = a doubly stochastic matrix of their mappings.

    The first site has n equal streams: pre only scales and res does nothing. After the last, the head sums the
    streams, which a doubly stochastic H_res cannot change (20 rounds of Sinkhorn leave it a column error of 1e-3 to
    1e-2, so the paper's last H_res is not quite nothing). What could not learn is not built.

    With an eps, what acts through it alone (or through the unfinished rounds of Sinkhorn) is there and fixed: released
    models have it, and their numbers need it.
    """

    def __init__(self, plan: Plan, form: Form, site: Site) -> None:
        nn.Module.__init__(self)
        self.form = form
        n, starts = form.streams, Starts.of(form, site)
        first, last = site.index == 0, site.index == len(plan.sites) - 1

        def affine(shape: tuple[int, ...], bias: Fill, learns: bool, kept: bool = False) -> Affine | None:
            return Affine(n * plan.width, shape, bias, starts.phi, fixed=not learns) if learns or kept else None

        own, collapses, touched = form.reads == "own", form.head == "learned", form.eps > 0
        self.pre = affine((n,), starts.pre, not first if own else collapses or not last, own and touched)
        self.post = Affine(n * plan.width, (n,), starts.post, starts.phi)
        self.res = None
        if form.res != "identity":
            mixer, exact = MIXERS[form.res], form.res != "sinkhorn"
            kept = constant(0.0) if form.init == "random" else mixer.kept
            inside = not first and (collapses or not last)
            self.res = affine(mixer.shape(n), kept, inside, touched and not exact)

    def forward(self, H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """pre [b t n], post [b t n] and res [b t n n]."""
        form = self.form
        reads, writes, logits = self.made(H, self.pre, self.post, self.res)
        assert writes is not None
        # without a map a read is the mean
        pre = torch.full_like(writes, 1 / form.streams) if reads is None else self.weights(reads)
        post = form.post * writes.sigmoid()
        if form.res == "identity" and form.eps:
            post = post + form.eps
        if logits is None:
            one = torch.eye(form.streams, dtype=post.dtype, device=post.device)
            return pre, post, one.expand(*H.shape[:2], -1, -1)
        matrix = MIXERS[form.res].matrix
        if matrix is None:
            return pre, post, ops.sinkhorn(logits, iterations=form.iterations, eps=form.eps)
        return pre, post, matrix(logits)


class Passed(NamedTuple):
    """The streams, and the weights with which the next site reads them."""

    H: Tensor
    pre: Tensor


@register("mhc")
class MHC(Stream[Tensor | Passed]):
    """x = H_pre H; H <- H_res H + H_post' f(norm(x)), H_res doubly stochastic; the embedding is copied, the head sums.

    pre, post and res are affine in rmsnorm(vec H), through sigmoid, 2 sigmoid and Sinkhorn (columns then rows,
    `iterations` rounds, so that rows are exact). Products of H_res keep the mean of the streams, up to column errors.

    init       a6: phi = 0, b_pre = +3 on the site's own stream and -3 elsewhere, b_res = 6 I - 3 (published with the
               conference version); random: phi ~ N(0, 0.02^2), biases 0; hy-v4: phi ~ N(0, 0.006^2) and
               b_pre = -ln(n - 1), so that pre is 1/n; kromhc: phi = 0, b_pre and b_post +1 on the site's own stream and
               -1 elsewhere. All tell the streams apart; with phi = 0 and b = 0 they would stay equal for ever, so that
               start is not offered.
    head       sum, mean, or learned: x = (sigmoid(alpha rmsnorm(vec H) phi + b) + eps) H.
    res        sinkhorn; identity: H_res = I; or a matrix that is doubly stochastic to the last bit: lite, a mean of all
               permutations (at most 4 streams); krom, a Kronecker product of 2 x 2 matrices (2, 4, 8 ... streams);
               circulant, a mean of the n rotations.
    eps        added to pre and to the head's weights, to the first softmax and every sum of Sinkhorn, and, with
               res=identity, to post.
    norm_eps   of the rmsnorm over all streams.
    reads      own: a site reads with its own pre. previous: with the pre that the site before it made (the first reads
               stream 0), so that one pass over H makes pre, post and res; a learned head reads with the last pre and
               has no parameters. Written pass=previous as well.
    post       the factor of H_post's sigmoid.
    model      deepseek-v4, deepseek-v4.1, glm-5.3-flash or hy-v4: the options of a released model, as `PRESETS` has
               them. Options beside it may not contradict it, but for init and the number of streams.

    In half precision H_res H and H_post are rounded before they are added; with res other than sinkhorn, and with
    reads=previous, the whole of H_res H + H_post' y is computed in float32 and rounded once, as HY-V4 and DeepSeek-V4.1
    do. The pre that reads=previous passes on has the type of the state.
    """

    paper = "arXiv 2512.24880"
    mixes = "n parallel streams"
    released_in: ClassVar = {
        "DeepSeek-V4": "mhc:model=deepseek-v4",
        "DeepSeek-V4.1": "mhc:model=deepseek-v4.1",
        "GLM-5.3-Flash": "mhc:model=glm-5.3-flash",
        "HY-V4": "mhc:model=hy-v4",
    }
    conversion = Conversion(eps=True)
    cases = (
        "",
        "streams=2",
        "init=random,iterations=8",
        "model=deepseek-v4",
        "model=deepseek-v4.1",
        "model=glm-5.3-flash",
        "model=hy-v4,res=identity,init=hy-v4",
        "reads=previous,res=krom,head=mean",
        "res=lite,head=learned,init=kromhc,streams=3",
        "res=circulant,eps=1e-3,norm_eps=1e-5,post=1.5",
    )

    def __init__(
        self,
        plan: Plan,
        *,
        streams: int = 4,
        iterations: int = 20,
        init: Literal["a6", "random", "hy-v4", "kromhc"] = "a6",
        head: Literal["sum", "mean", "learned"] = "sum",
        res: Literal["sinkhorn", "identity", "lite", "krom", "circulant"] = "sinkhorn",
        eps: float = 0.0,
        norm_eps: float = 1e-6,
        reads: Literal["own", "previous"] = "own",
        post: float = 2.0,
        model: Literal["deepseek-v4", "deepseek-v4.1", "glm-5.3-flash", "hy-v4"] | None = None,
    ) -> None:
        super().__init__(plan)
        if model is not None:
            raise ValueError(
                f"mhc: model={model} stands for other options; build it with build('mhc:model={model}', plan)"
            )
        if streams < 2:
            raise ValueError(f"mhc: streams={streams}: with one stream H_res is 1 and H_pre only scales; use standard")
        positive(self.name, iterations=iterations)
        if iterations != 20 and res != "sinkhorn":
            raise ValueError(f"mhc: iterations={iterations} are rounds of Sinkhorn, and res={res} has none")
        if not 0 <= norm_eps < 1:
            raise ValueError(f"mhc: norm_eps takes a number from 0 to below 1, not {norm_eps!r}")
        if not post > 0:
            raise ValueError(f"mhc: post={post}: a sublayer would write nothing, or its opposite; use a factor above 0")
        check_mixer(self.name, res, streams)
        self.form = Form(streams, iterations, init, head, res, eps, norm_eps, reads, post)
        self.once = res != "sinkhorn" or reads == "previous"
        self.each(self._made)

    def _made(self, site: Site) -> nn.Module | None:
        if site.kind != "head":
            return Mappings(self.plan, self.form, site)
        return Collapse(self.plan, self.form) if self.form.head == "learned" and self.form.reads == "own" else None

    @classmethod
    def upgraded(cls, options: dict[str, Value]) -> tuple[str, dict[str, Value]]:
        options = dict(options)
        if "pass" in options:  # a keyword of Python, and so no name of an argument
            if "reads" in options:
                raise ValueError("mhc: pass and reads are one option; give one of them")
            options["reads"] = options.pop("pass")
        model = options.get("model")
        if not isinstance(model, str) or model not in PRESETS:  # the check of options has the words for it
            return cls.name, options
        del options["model"]
        for key, value in {**SHARED, **PRESETS[model]}.items():
            if key != "init" and options.get(key, value) != value:
                raise ValueError(f"mhc: model={model} has {key}={value}, not {options[key]}; leave out one of them")
        return cls.name, {**PRESETS[model], **options}

    @property
    def starts(self) -> Start:
        form = self.form
        damped = form.eps > 0 and form.res in ("sinkhorn", "identity")  # H shrinks, or y grows, by eps a site
        return "eps" if form.init == "a6" and form.post == 2 and not damped else "no"

    def gates(self, state: Tensor | Passed, site: Site, read: Read) -> Mapping[str, Tensor]:
        part = self.part(site)
        mappings = {} if part is None else {name: getattr(part, name, None) for name in ("pre", "post", "res")}
        return {f"alpha_{name}": mapping.alpha for name, mapping in mappings.items() if mapping is not None}

    def open(self, x: Tensor, past: Past = None) -> Tensor | Passed:
        H = copies(x, self.form.streams)
        if self.form.reads == "own":
            return H
        first = torch.eye(self.form.streams, dtype=x.dtype, device=x.device)[0]
        return Passed(H, first.expand(*x.shape[:2], -1))

    def read(self, state: Tensor | Passed, site: Site, norm: Norm) -> Read:
        if site.kind == "head":
            return Read(norm(self._collapsed(state)))
        H = _streams(state)
        pre, post, res = self.part(site)(H)
        weights, given = state.pre if isinstance(state, Passed) else pre, res.transpose(-1, -2)
        if self.once:
            (x,) = ops.remix(weights[..., None], H).unbind(-2)
            wide = H.to(accumulator(H.dtype))
            rest = wide if self.form.res == "identity" else ops.remix(given, wide)
        else:
            x, rest = ops.read_remix(weights, given, H)
        return Read(norm(x), carry=(rest, post, pre) if isinstance(state, Passed) else (rest, post))

    def write(self, state: Tensor | Passed, site: Site, read: Read, y: Tensor) -> Tensor | Passed:
        rest, post, *onward = read.carry
        if not self.once:
            return written(rest, post, y)
        H = written(rest, post, y.to(rest.dtype)).to(_streams(state).dtype)
        return Passed(H, onward[0].to(H.dtype)) if onward else H

    def _collapsed(self, state: Tensor | Passed) -> Tensor:
        """What the head reads."""
        H = _streams(state)
        match self.form.head:
            case "sum":
                return H.sum(-2)
            case "mean":
                return H.mean(-2)
        (x,) = ops.remix(self._weights(state, self.plan.head)[..., None], H).unbind(-2)
        return x

    def _weights(self, state: Tensor | Passed, site: Site) -> Tensor:
        if isinstance(state, Passed):
            return state.pre
        weights, *_ = self.part(site)(state)
        return weights

    def sources(self, site: Site) -> tuple[str, ...]:
        return () if site.kind == "head" and self.form.head != "learned" else names(self.form.streams)

    def routing(self, state: Tensor | Passed, site: Site) -> Routing | None:
        if not self.sources(site):
            return None
        return mixture(_streams(state), self._weights(state, site))


def _streams(state: Tensor | Passed) -> Tensor:
    return state.H if isinstance(state, Passed) else state
