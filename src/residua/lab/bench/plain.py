"""Our `standard` network against the same network as others write it: forward, training step, cached decoding.

A ratio over our own `standard` says nothing about how fast that is. Here it stands against `rivals`, whose weights are
the same and whose logits are compared before anything is timed; and, for the training step of a narrow model, against
itself as it was before it had kernels of its own: PyTorch's operations, all logits at once, and an allocator that
returns large blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from residua import ops
from residua.lab.bench.rivals import Plain, llama
from residua.lab.bench.timing import Form, Measured, interleave
from residua.lab.common.allocator import keep_pages, returning_pages
from residua.model import Cache, ModelConfig, Transformer, token_loss

OURS, PLAIN, LLAMA, EARLIER = "residua", "plain", "llama", "earlier"
SHAPES = ((6, 64), (12, 256), (12, 768))
CONTEXTS = (128, 1024)
VOCABULARY = 4096
PHASES = ("forward", "step", "decode")
NARROW = 128
"""Below this width most of a step was not matrix products."""


class Shape(NamedTuple):
    """What is measured at once."""

    depth: int
    width: int
    context: int

    @property
    def heads(self) -> int:
        """Of 64 channels, and at least four: narrow models have narrow heads."""
        return max(4, self.width // 64)

    @property
    def rows(self) -> int:
        """Sequences in a step: 4096 tokens at width 64, fewer where a token costs more."""
        return max(1, (4096 if self.width < NARROW else 1024 if self.width < 512 else 512) // self.context)


def parse_shape(text: str) -> tuple[int, int]:
    """`6x64` as depth and width."""
    try:
        depth, width = (int(part) for part in text.split("x"))
    except ValueError:
        raise ValueError(f"shape {text!r}: write DEPTHxWIDTH, such as 6x64") from None
    return depth, width


def measure(
    shapes: Sequence[tuple[int, int]] = SHAPES,
    contexts: Sequence[int] = CONTEXTS,
    *,
    vocabulary: int = VOCABULARY,
    seconds: float = 6.0,
    least: int = 5,
    say: Callable[[str], None] = lambda text: None,
) -> Measured:
    """Every phase of every shape, in interleaved runs of their own; every form but the earlier one keeps its pages."""
    keep_pages()
    rows: list[Measured] = []
    for depth, width in shapes:
        for context in contexts:
            shape = Shape(depth, width, context)
            say(f"measuring {depth} x {width}, context {context}")
            for phase, forms in _phases(shape, vocabulary):
                timing = interleave(forms, controlled=OURS, seconds=seconds, least=least)
                ratios = {name: timing.ratio(OURS, name, OURS) for name in forms if name != OURS}
                rivals = [ratio.value for name, ratio in ratios.items() if name != EARLIER]
                rows.append({
                    **shape._asdict(), "heads": shape.heads, "rows": 1 if phase == "decode" else shape.rows,
                    "phase": phase, "seconds": {name: timing.typical(name) for name in forms},
                    "ratios": {name: ratio.to_json() for name, ratio in ratios.items()},
                    "of_fastest": 1 / min(rivals),
                })  # fmt: skip
    return {"vocabulary": vocabulary, "rows": rows}


def _phases(shape: Shape, vocabulary: int) -> Iterator[tuple[str, dict[str, Form]]]:
    """The forms of each phase, on the same weights."""
    ours, ids = _ours(shape, vocabulary)
    room = shape.context + 4096  # tokens that the timed steps of decoding add
    rivals: dict[str, nn.Module] = {PLAIN: Plain(ours, room)}
    if (made := llama(ours, room)) is not None:
        rivals[LLAMA] = made
    check(ours, rivals, ids[:, :-1])
    models = {OURS: ours, **rivals}
    yield "forward", {name: _inference(_forward(model, ids[:, :-1])) for name, model in models.items()}
    yield "decode", {name: _inference(_decode(model, ids[:1, :-1], room)) for name, model in models.items()}
    steps = {name: step(model, ids) for name, model in models.items()}
    yield "step", steps | ({EARLIER: _earlier(ours, ids)} if shape.width < NARROW else {})


def _ours(shape: Shape, vocabulary: int) -> tuple[Transformer, Tensor]:
    """Our network of this shape, and a batch of tokens, each followed by its target."""
    config = ModelConfig(vocab=vocabulary, width=shape.width, depth=shape.depth, heads=shape.heads)
    generator = torch.Generator().manual_seed(0)
    return Transformer(config), torch.randint(vocabulary, (shape.rows, shape.context + 1), generator=generator)


def own_step(shape: Shape, vocabulary: int = VOCABULARY) -> Form:
    """The training step that is compared with those of the rivals."""
    return step(*_ours(shape, vocabulary))


@torch.inference_mode()
def check(ours: Transformer, rivals: dict[str, nn.Module], ids: Tensor) -> None:
    """Raise unless all give the same logits: what differs in numbers must not be compared in time."""
    expected = ours(ids[:1])
    for name, model in rivals.items():
        found = logits_of(model(ids[:1]))
        error = float((found - expected).square().mean() / expected.square().mean()) ** 0.5
        if error > 1e-4:
            raise RuntimeError(f"{name} computes another network: its logits differ by {error:.1e}")


def logits_of(answer: Any) -> Tensor:
    """The logits, bare or in what transformers wraps them in."""
    return answer if isinstance(answer, Tensor) else answer.logits


def _forward(model: nn.Module, ids: Tensor) -> Form:
    """Logits of every position; a Llama is told to make no cache."""
    if isinstance(model, Transformer | Plain):
        return lambda: model(ids)
    return lambda: model(ids, use_cache=False)


def step(model: nn.Module, ids: Tensor) -> Form:
    """Loss, gradients, their norm clipped, and an update by the fused AdamW."""
    inputs, targets = ids[:, :-1], ids[:, 1:]
    if isinstance(model, Transformer):
        return _updating(model, lambda: model(inputs, targets=targets))
    if isinstance(model, Plain):
        return _updating(model, lambda: F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()))
    return _updating(
        model, lambda: F.cross_entropy(model(inputs, use_cache=False).logits.flatten(0, 1), targets.flatten())
    )


def _earlier(model: Transformer, ids: Tensor) -> Form:
    """Our own step by PyTorch's operations, with all logits, and blocks that go back to the kernel."""
    run = _updating(model, lambda: token_loss(model(ids[:, :-1]), ids[:, 1:]))

    def form() -> None:
        with ops.backend("reference"), returning_pages():
            run()

    return form


def _updating(model: torch.nn.Module, loss: Callable[[], Tensor]) -> Form:
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)

    def run() -> None:
        loss().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def _decode(model: nn.Module, prompt: Tensor, room: int) -> Form:
    """One more token after the prompt, again and again: all forms take as many."""
    last = prompt[:, -1:]
    if isinstance(model, Transformer):
        ours = Cache()
        with torch.inference_mode():
            model(prompt, cache=ours)
        return lambda: model(last, cache=ours)
    if isinstance(model, Plain):
        cache, length = model.cache(1, room), prompt.shape[1]
        with torch.inference_mode():
            model(prompt, cache)

        def token() -> None:
            nonlocal length
            model(last, cache, length)
            length = length + 1 if length + 1 < room else prompt.shape[1]

        return token
    from transformers import DynamicCache

    grown = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(prompt, past_key_values=grown)
    return lambda: model(last, past_key_values=grown)


def _inference(form: Form) -> Form:
    def run() -> None:
        with torch.inference_mode():
            form()

    return run
