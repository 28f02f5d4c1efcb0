"""The statements, each a row with an error and a verdict: what must be equal, and what must not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from residua import ops
from residua.lab.duality.models import Subject, stack_of
from residua.lab.duality.reads import Given, Stack, gaps, over_depth, over_sequence
from residua.model import Transformer
from residua.model.config import ModelConfig
from residua.testing import error

ALLOWED = {torch.float64: 1e-12, torch.float32: 1e-5}
"""RMS error over RMS reference, values and gradients alike."""
DIFFERENT = 1e-6
"""What is said to differ must differ by at least this in float64: a million times what equality allows."""


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison."""

    part: str
    """theorem, network, instance, condition or reduction."""
    what: str
    model: str
    dtype: str
    error: float
    bound: float
    equal: bool
    """Whether the error must be at most the bound, or at least."""
    window: int | None = None
    quantity: str | None = None

    @property
    def passed(self) -> bool:
        """The verdict."""
        return self.error <= self.bound if self.equal else self.error >= self.bound

    def to_json(self) -> dict[str, object]:
        """Plain values, the verdict among them."""
        return {**asdict(self), "passed": self.passed}


def _row(
    part: str,
    what: str,
    subject: Subject,
    gap: float,
    dtype: torch.dtype = torch.float64,
    *,
    equal: bool = True,
    window: int | None = None,
    quantity: str | None = None,
) -> Row:
    bound = ALLOWED[dtype] if equal else DIFFERENT
    return Row(part, what, subject.name, str(dtype).removeprefix("torch."), gap, bound, equal, window, quantity)


def theorem(subject: Subject) -> Iterator[Row]:
    """Depth read = ShortSWA on the transposed stack: every window, outputs and gradients, both types."""
    for dtype in ALLOWED:
        given = subject.given.to(dtype)
        for window in range(1, len(given.stack) + 1):
            for quantity, gap in gaps(over_depth, over_sequence, given, window).items():
                what = "depth read = ShortSWA on the transposed stack"
                yield _row("theorem", what, subject, gap, dtype, window=window, quantity=quantity)


def network(subject: Subject) -> Iterator[Row]:
    """What a trained network's own sites read is ShortSWA on the stack that the network made."""
    if subject.reads is None or subject.window is None:
        return
    expected = over_sequence(subject.given.to(torch.float64), subject.window)[: len(subject.reads)]
    gap = error(subject.reads, expected)
    what = "reads inside the network = ShortSWA on its stack"
    yield _row("network", what, subject, gap, window=subject.window, quantity="output")


def instances(subject: Subject) -> Iterator[Row]:
    """`window_attend` on axis 0 is the read; `attend`, the read of AttnRes and Delta, is it with a static query."""
    for dtype in ALLOWED:
        given = subject.given.to(dtype)
        full = len(given.stack)
        gap = max(gaps(_along_axis_zero, over_depth, given, full).values())
        yield _row("instance", "window_attend(axis=0) = the read of depthswa", subject, gap, dtype, window=full)
        gap = max(gaps(_static, _static_along_axis_zero, given, full).values())
        what = "attend (AttnRes, Delta) = window_attend(axis=0) with one query a depth"
        yield _row("instance", what, subject, gap, dtype, window=full)


def _along_axis_zero(given: Given, window: int) -> Stack:
    keyed = ops.rms_norm(given.stack, 1e-6) if given.key_norm else given.stack
    q, k, v = keyed @ given.query, keyed @ given.key, given.stack @ given.value
    return ops.window_attend(q, k, v, axis=0, window=window, heads=given.heads)


def _static(given: Given, window: int) -> Stack:
    """Rows of W_Q as the static queries of the depths."""
    return torch.stack(
        [
            ops.attend(given.query[l], tuple(given.stack[max(0, l - window + 1) : l + 1]))
            for l in range(len(given.stack))
        ]
    )


def _static_along_axis_zero(given: Given, window: int) -> Stack:
    count, batch, tokens, width = given.stack.shape
    q = (given.query[:count] * width**0.5)[:, None, None].expand(count, batch, tokens, width)  # `attend` has no scale
    return ops.window_attend(q, ops.rms_norm(given.stack, 1e-6), given.stack, axis=0, window=window, heads=1)


BROKEN = {
    "weights not shared over depth": lambda given, window: _own_queries(given, window),
    "another mask: the window is one longer": lambda given, window: over_sequence(given, window + 1),
    "another mask: blocks instead of a sliding window": lambda given, window: over_sequence(
        given, window, mode="local"
    ),
    "another mask: later sources are seen": lambda given, window: _explicit(given, window, causal=False),
    "another normaliser: a null beside the sources": lambda given, window: _explicit(given, window, null=True),
    "another scale: no 1/sqrt(e)": lambda given, window: _explicit(given, window, scale=1.0),
    "another position term: a bias on one axis": lambda given, window: _explicit(given, window, bias=0.5),
}
"""A condition broken on one side of the equation, the other side left as it is."""


def _distance(count: int) -> Tensor:
    at = torch.arange(count)
    return at[:, None] - at[None]


def _sliding(count: int, window: int) -> Tensor:
    distance = _distance(count)
    return (distance >= 0) & (distance < window)


def _blocks(count: int, window: int) -> Tensor:
    block = torch.arange(count) // window
    return (_distance(count) >= 0) & (block[:, None] == block[None])


MASKS = {
    "another mask: the window is one longer": lambda count, window: _sliding(count, window + 1),
    "another mask: blocks instead of a sliding window": _blocks,
}
"""Which sources each depth sees under a broken mask: in a short stack it may be the whole one."""


def conditions(subject: Subject, longest: int = 3) -> Iterator[Row]:
    """Each condition broken is seen; and the explicit form used to break it is the read while it is whole.

    The window leaves out a source, where there are three and more; a mask that is no other one in so short a stack is
    not tried.
    """
    given = subject.given.to(torch.float64)
    window = max(2, min(longest, len(given.stack) - 1))
    right = over_sequence(given, window)
    yield _row("condition", "all conditions kept", subject, error(_explicit(given, window), right), window=window)
    for what, left in BROKEN.items():
        if what in MASKS and torch.equal(MASKS[what](len(given.stack), window), _sliding(len(given.stack), window)):
            continue
        yield _row("condition", what, subject, error(left(given, window), right), equal=False, window=window)
    parallel, sequential = _fed_back(subject, window)
    what = "feedback: the stack is not given but made by the reads"
    yield _row("condition", what, subject, error(sequential, parallel), equal=False, window=window)


def _own_queries(given: Given, window: int) -> Stack:
    """Every depth with a W_Q of its own: the shared one, turned."""
    turns = [torch.linalg.qr(_noise(given.query.shape, seed)).Q for seed in range(len(given.stack))]
    return over_depth(given, window, queries=torch.stack([given.query @ turn for turn in turns]))


def _explicit(
    given: Given, window: int, *, causal: bool = True, null: bool = False, scale: float | None = None, bias: float = 0.0
) -> Stack:
    """The read written out, with one thing changed."""
    keyed = ops.rms_norm(given.stack, 1e-6) if given.key_norm else given.stack
    q, k, v = (
        (x @ w).unflatten(-1, (given.heads, -1)).movedim(0, -2)  # [b t head n e]
        for x, w in ((keyed, given.query), (keyed, given.key), (given.stack, given.value))
    )
    at = torch.arange(len(given.stack))
    distance = at[:, None] - at[None]
    seen = (distance < window) & (distance >= 0) if causal else distance.abs() < window
    logits = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale) + bias * distance
    logits = logits.masked_fill(~seen, -torch.inf)
    if null:
        logits = torch.cat([logits, torch.zeros_like(logits[..., :1])], -1)
    return (logits.softmax(-1)[..., : len(at)] @ v).movedim(-2, 0).flatten(-2)


def _fed_back(subject: Subject, window: int) -> tuple[Stack, Stack]:
    """The reads of a network whose sublayers answer them, and the same read of the stack that the same sublayers make
    of the plain stream: what computing all depths at once would give."""
    given = subject.given.to(torch.float64)
    layers = [_noise(given.value.shape, 100 + l) * len(given.value) ** -0.5 for l in range(len(given.stack))]

    def stack(fed: bool) -> tuple[Tensor, Tensor]:
        states, reads = [given.stack[0]], []
        for weight in layers:
            read = over_sequence(replace(given, stack=torch.stack(states)), window)[-1]
            reads.append(read)
            entered = ops.rms_norm(read if fed else states[-1], 1e-6)
            states.append(states[-1] + torch.tanh(entered @ weight))
        return torch.stack(states[:-1]), torch.stack(reads)

    (plain, _), (made, reads) = stack(False), stack(True)
    assert error(reads, over_sequence(replace(given, stack=made), window)) < ALLOWED[torch.float64]
    return over_sequence(replace(given, stack=plain), window), reads


def reductions(subject: Subject) -> Iterator[Row]:
    """What the residual stream is as a depth read, and what it is not."""
    for dtype in ALLOWED:
        plain = _logits(subject, "standard", dtype)
        for what, design in (
            ("identity attention over states (window 1, W_V = I) = the stream", "depthswa:window=1,unit=sublayer"),
            ("ones over deltas = the stream (dca at its start)", "dca"),
            ("zero logits over deltas = the standard network under pre-norm (attnres at its start)", "attnres"),
        ):
            yield _row("reduction", what, subject, error(_logits(subject, design, dtype), plain), dtype)
        deltas = stack_of(_rebuilt(subject, "standard", dtype), subject.ids, deltas=True)
        summed = torch.stack(
            [ops.mix(torch.ones(l + 1, dtype=dtype), tuple(deltas[: l + 1])) for l in range(len(deltas))]
        )
        what = "ones over the deltas of a stack = its states"
        yield _row("reduction", what, subject, error(summed, deltas.cumsum(0)), dtype)
    gap = error(_logits(subject, "attnres:sources=states", torch.float64), _logits(subject, "standard", torch.float64))
    yield _row("reduction", "zero logits over states is not the standard network", subject, gap, equal=False)


def _rebuilt(subject: Subject, design: str, dtype: torch.dtype) -> Transformer:
    """The subject's sublayers in another design at its start; eps small enough not to show."""
    config = ModelConfig.from_json({**subject.model.config.to_json(), "design": design, "eps": 1e-30})
    model = Transformer(config).to(dtype)
    own = {name: value for name, value in subject.model.state_dict().items() if not name.startswith("stream.")}
    missing, unexpected = model.load_state_dict(own, strict=False)
    assert not unexpected
    assert all(name.startswith("stream.") for name in missing)
    return model


@torch.no_grad()
def _logits(subject: Subject, design: str, dtype: torch.dtype) -> Tensor:
    return _rebuilt(subject, design, dtype)(subject.ids)


def _noise(shape: torch.Size, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
