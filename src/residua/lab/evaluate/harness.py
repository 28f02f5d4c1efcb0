"""lm-evaluation-harness with any model that `open_model` opens: offline tasks, or named ones when the hub answers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch

from residua.extras import need
from residua.lab.common.files import Values
from residua.lab.data import Tokens
from residua.lab.evaluate.local import NAMES, write_tasks
from residua.lab.evaluate.opened import Opened

LIMIT = 1024
"""Tokens of context for a model that names no limit of its own."""


def evaluate(
    opened: Opened, tasks: Sequence[str], tokens: Tokens | None = None, *, count: int = 64, batch: int = 1
) -> Values:
    """The harness's own results by task: every metric it reports, and its standard error.

    Tasks called residua_* are made from `tokens` and need no hub; any other name is the harness's, and its data come
    from the hub. A Hugging Face model with its tokenizer is asked by the harness's own class for such models, `batch`
    questions at once, so that its numbers are those of `lm_eval --model hf`; any other by ours, one at a time.
    """
    need("eval", "lm_eval")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    check_tasks(tasks)
    local = [name for name in tasks if name in NAMES]
    with TemporaryDirectory() as scratch:
        if local:
            if tokens is None:
                raise ValueError(f"{local[0]} is made from a corpus; name one with --corpus")
            write_tasks(Path(scratch), tokens, count=count)
        manager = TaskManager(include_path=scratch, include_defaults=len(local) < len(tasks))
        found = simple_evaluate(
            model=_model(opened, batch), tasks=list(tasks), task_manager=manager, bootstrap_iters=0, log_samples=False
        )
    return {
        name: {
            key.removesuffix(",none"): value
            for key, value in metrics.items()
            if isinstance(value, int | float) and math.isfinite(value) and not key.startswith(("alias", "sample"))
        }
        for name, metrics in found["results"].items()
    }


def check_tasks(tasks: Sequence[str]) -> None:
    """Refuse a task that there is not, before a model is opened for it."""
    for name in tasks:
        if name.startswith("residua_") and name not in NAMES:
            raise ValueError(f"no local task {name!r}; there are {', '.join(NAMES)}")
    others = [name for name in tasks if name not in NAMES]
    if others:
        from lm_eval.tasks import TaskManager

        manager = TaskManager()
        unknown = [name for name in others if not manager.match_tasks([name])]
        if unknown:
            raise ValueError(f"the harness has no task {unknown[0]!r}; `lm-eval ls tasks` lists them")


class Request(Protocol):
    """A question of the harness."""

    args: tuple[Any, ...]


def _model(opened: Opened, batch: int) -> Any:
    if opened.folder is None:
        return _adapter(opened)
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(opened.folder)
    return HFLM(pretrained=opened.model, tokenizer=tokenizer, backend="causal", batch_size=batch)


def _adapter(opened: Opened) -> Any:
    from lm_eval.api.model import LM

    class Adapter(LM):
        """The harness's three questions, asked one at a time."""

        def loglikelihood(self, requests: Iterable[Request], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return [_score(opened, *request.args) for request in requests]

        def loglikelihood_rolling(self, requests: Iterable[Request], disable_tqdm: bool = False) -> list[float]:
            return [_rolling(opened, request.args[0]) for request in requests]

        def generate_until(self, requests: Iterable[Request], disable_tqdm: bool = False) -> list[str]:
            return [_until(opened, *request.args) for request in requests]

    return Adapter()


def _score(opened: Opened, context: str, continuation: str) -> tuple[float, bool]:
    """ln p(continuation | context), and whether it is the likeliest of all."""
    before = opened.tokenizer.encode(context) or [opened.tokenizer.end]
    after = opened.tokenizer.encode(continuation)
    return _log_probability(opened, before, after)


def _rolling(opened: Opened, text: str) -> float:
    """ln p(text), in windows that each see half a window of what came before."""
    ids, total = [opened.tokenizer.end, *opened.tokenizer.encode(text)], 0.0
    limit = opened.context or LIMIT
    start = 1
    while start < len(ids):
        before = ids[max(0, start - limit // 2) : start]
        after = ids[start : start + limit - len(before)]
        total += _log_probability(opened, before, after)[0]
        start += len(after)
    return total


def _until(opened: Opened, context: str, settings: Values) -> str:
    """Greedy text, cut at the first of the words that end it."""
    ends = settings.get("until") or []
    most = int(settings.get("max_gen_toks", 128))
    ids = (opened.tokenizer.encode(context) or [opened.tokenizer.end])[-((opened.context or LIMIT) - most) :]
    text = opened.continued(ids, most, lambda made: any(end in made for end in ends))
    for end in ends:
        text = text.split(end)[0]
    return text


@torch.no_grad()
def _log_probability(opened: Opened, before: Sequence[int], after: Sequence[int]) -> tuple[float, bool]:
    if not after:
        return 0.0, True
    ids = torch.tensor([[*before, *after][-((opened.context or LIMIT) + 1) :]])
    logits = opened.logits(ids[:, :-1])[0, -len(after) :].float().log_softmax(-1)
    asked = ids[0, -len(after) :]
    return float(logits.gather(-1, asked[:, None]).sum()), bool((logits.argmax(-1) == asked).all())
