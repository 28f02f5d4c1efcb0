"""Is the converted model still the base? max |logit difference| / RMS(logits) on text and on random tokens.

The check runs in float32 whatever the model's precision, so that rounding cannot hide or feign a difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from residua.hf.anatomy import Model, Tokenizer
from residua.hf.defaults import BOUND
from residua.hf.forward import OnStreamLayer, Tap
from residua.hf.program import child
from residua.stream import Conversion

TEXT = (
    "The stream that every layer reads from and writes to is the memory of a network across its depth. "
    "def area(width, height):\n    return width * height\n"
)


def batches(model: Model, tokenizer: Tokenizer = None) -> dict[str, Tensor]:
    """Token ids to compare on: a text (its bytes, where there is no tokenizer) and random ones."""
    vocab = model.get_input_embeddings().weight.shape[0]
    longest = min(64, getattr(model.config, "max_position_embeddings", None) or 64)
    text = tokenizer(TEXT)["input_ids"] if tokenizer is not None else list(TEXT.encode())
    random = torch.randint(vocab, (1, longest), generator=torch.Generator().manual_seed(0))
    return {"text": torch.tensor([text[:longest]]) % vocab, "random": random}  # one row each: no padding token needed


@contextmanager
def in_float32(model: nn.Module, apart: Sequence[nn.Module] = ()) -> Iterator[None]:
    """The model in float32 (float64, if anything of it is) and evaluation mode, and as it was afterwards: widening and
    narrowing lose nothing. The parameters of the modules `apart` stay as they are.

    The largest parameters are widened first and narrowed last: each is there twice for a moment, while there is room.
    """
    left = {each for module in apart for each in module.parameters()}
    before = {name: each.dtype for name, each in model.named_parameters() if each not in left}
    buffers = {name: each.dtype for name, each in model.named_buffers()}
    training = [(module, module.training) for module in model.modules()]
    wide = torch.float64 if torch.float64 in before.values() else torch.float32
    for each in sorted((*model.parameters(), *model.buffers()), key=lambda each: -each.numel()):
        if each.is_floating_point() and each not in left:
            each.data = each.data.to(wide)
    model.eval()
    try:
        yield
    finally:
        for name, each in sorted(model.named_parameters(), key=lambda pair: pair[1].numel()):
            each.data = each.data.to(before.get(name, each.dtype))
        for name, buffer in model.named_buffers():
            buffer.data = buffer.data.to(buffers.get(name, buffer.dtype))
        for module, mode in training:
            module.training = mode


@torch.no_grad()
def answers(model: Model, ids: dict[str, Tensor]) -> dict[str, Tensor]:
    """The logits for every batch, those of a question's start and end as one; of a backbone without a head, what a
    head would read."""
    outputs = {name: model(each.to(model.device), use_cache=False) for name, each in ids.items()}
    return {name: _joined(each) for name, each in outputs.items()}


def _joined(output: Mapping[str, Any]) -> Tensor:
    if "start_logits" in output:
        return torch.stack([output["start_logits"], output["end_logits"]])
    found: Tensor = output["logits"] if "logits" in output else output["last_hidden_state"]
    return found


def compare(model: Model, before: dict[str, Tensor], ids: dict[str, Tensor], expected: Conversion) -> dict[str, Any]:
    """The report of the check, as it is printed and stored in the config."""
    with smallest_square(model) as seen:
        after = answers(model, ids)
    gaps = {name: _ratio(after[name], before[name]) for name in ids}
    explained = _explained(model, seen) if expected.eps else 0.0
    bound = 0.0 if expected.exact else BOUND + explained
    gap = max(gaps.values())
    return {
        "max_gap": gap,
        "bound": bound,
        "batches": gaps,
        "same": bool(gap <= bound),
        **({"explained_by_eps": explained} if expected.eps else {}),
    }


def _ratio(after: Tensor, before: Tensor) -> float:
    return ((after - before).abs().max() / before.square().mean().sqrt().clamp_min(1e-30)).item()


@contextmanager
def smallest_square(model: nn.Module) -> Iterator[list[float]]:
    """Mean squares of what the blocks and the head read, the smallest of every read."""
    seen: list[float] = []

    def watch(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0].square().mean(-1).min().item())

    handles = [tap.register_forward_pre_hook(watch) for tap in model.modules() if isinstance(tap, Tap)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _explained(model: Model, seen: list[float]) -> float:
    """How far an eps that is not small beside the stream may move a logit, relative to the logits' RMS.

    1 / sqrt(m + eps) differs from 1 / sqrt(m) by the share eps / 2m, and every site's norm may add as much. More than
    MOST is no small difference any more, whatever its reason.
    """
    eps = next((getattr(model.config, key) for key in EPS if getattr(model.config, key, None) is not None), 0.0)
    # a norm may have an eps of its own, whatever the config says
    eps = max(eps, *(eps_of(norm, model.config.hidden_size) for norm in _norms(model)), 0.0)
    sites = len(model.base_model.stream.plan.readers)
    return min(MOST, sites * eps / (2 * max(min(seen, default=1.0), 1e-30)))


def _norms(model: nn.Module) -> Iterator[nn.Module]:
    """The norms before the sublayers."""
    for layer in model.modules():
        if isinstance(layer, OnStreamLayer):
            yield from (child(layer, part.norm) for part in layer.ready if part.norm)


@torch.no_grad()
def eps_of(norm: nn.Module, width: int) -> float:
    """The eps that a norm adds to the mean square, from how it answers to a hundredth of an input."""
    device = next((each.device for each in norm.parameters()), torch.device("cpu"))
    x = torch.linspace(-1, 1, width, device=device)
    x, small = (x / x.square().mean().sqrt())[None, None], 1e-2

    def size(y: Tensor) -> float:
        return (norm(y) - norm(-y)).norm().item()  # without a bias

    share = (size(small * x) / max(size(x), 1e-30)) ** 2  # small^2 (1 + eps) / (small^2 + eps)
    if share < 2 * small**2:  # no norm: it is as small as what it was handed
        return 0.0
    return max(0.0, small**2 * (1 - share) / (share - small**2))


EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
MOST = 0.01
