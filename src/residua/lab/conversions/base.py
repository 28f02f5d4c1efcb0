"""The checkpoint of a plan that brings none: a Llama of transformers from random weights, and what a plan costs."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from residua.lab.common.files import Values
from residua.lab.compare.estimate import seconds
from residua.lab.conversions.plan import BASE, START, Base, ConversionPlan
from residua.lab.finetune import Converted
from residua.lab.finetune_config import FinetuneConfig


def llama(shape: Base, vocab: int, context: int) -> Any:
    """The model with random weights, a function of its seed alone."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(shape.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=shape.width,
            intermediate_size=max(16, 8 * shape.width // 3 // 16 * 16),
            num_hidden_layers=shape.depth,
            num_attention_heads=shape.heads,
            max_position_embeddings=context,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            initializer_range=0.5 * shape.width**-0.5,
        )
    )


def write_start(plan: ConversionPlan, folder: Path) -> None:
    """Save the random weights, unless they are there."""
    from residua.lab.data import prepare

    assert plan.base is not None
    if (folder / "config.json").exists():
        return
    config = plan.pretraining(folder.parent).config
    tokens = prepare(config.corpus, config.tokenizer)
    context = max(config.context, plan.config(folder.parent, BASE, plan.seeds[0]).context)
    with torch.random.fork_rng(devices=[]):
        llama(plan.base, tokens.vocab, context).save_pretrained(folder)


def check_designs(plan: ConversionPlan) -> None:
    """Refuse a design that the base cannot be converted to, before an hour is spent on the base."""
    from residua.hf.convert import convert

    assert plan.base is not None
    small = replace(plan.base, width=4 * plan.base.heads)
    with torch.random.fork_rng(devices=[]):
        for spec in plan.designs:
            convert(llama(small, 32, 32), spec, say=None)


def foreseen(plan: ConversionPlan, timing: Callable[[str], None] | None = None) -> Values:
    """What a plan would run, from the plan alone; timing: time a few updates of every row here, and tell of each."""
    out = Path("OUT")
    finetunes = plan.config(out, BASE, plan.seeds[0])
    rows = [
        {"label": label, "tuning_runs": plan.trial_count(label), "reported_runs": len(plan.seeds)}
        for label in plan.labels()
    ]
    found: Values = {
        "plan": plan.to_json(),
        "digest": plan.digest,
        "steps": finetunes.steps,
        "tokens": finetunes.steps * finetunes.tokens_per_step,
        "rows": rows,
    }
    if plan.base is not None:
        config = plan.pretraining(out).config
        found["pretraining"] = {"steps": config.steps, "tokens": config.steps * config.tokens_per_step}
    if timing is not None:
        _time(plan, found, timing)
    return found


def _time(plan: ConversionPlan, found: Values, tell: Callable[[str], None]) -> None:
    """Add the processor hours of every row, and of all."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        if plan.base is not None:
            config = plan.pretraining(out).config
            if not config.tokenizer.startswith("bpe:"):
                raise ValueError(f"--timed knows the vocabulary of bpe:VOCAB, not of {config.tokenizer}; drop it")
            vocab = int(config.tokenizer.removeprefix("bpe:"))
            context = max(config.context, plan.config(out, BASE, plan.seeds[0]).context)
            llama(plan.base, vocab, context).save_pretrained(out / START)
            tell("timing the pretraining")
            found["pretraining"]["hours"] = _hours(config, 1, vocab)
        else:
            from residua.hf.storage import load_config

            vocab = load_config(str(plan.checkpoint)).vocab_size
        for row in found["rows"]:
            tell(f"timing {row['label']}")
            config = plan.config(out, row["label"], plan.seeds[0])
            if plan.base is not None:
                config = replace(config, checkpoint=str(out / START))
            row["hours"] = _hours(config, row["tuning_runs"] + row["reported_runs"], vocab)
    found["hours"] = sum(row["hours"] for row in found["rows"]) + found.get("pretraining", {}).get("hours", 0.0)


def _hours(config: FinetuneConfig, runs: int, vocab: int) -> float:
    update, validation = seconds(config, lambda tokens: Converted(config, tokens, lambda line: None), vocab)
    return runs * (config.steps * update + (1 + math.ceil(config.steps / config.eval_every)) * validation) / 3600


def in_lines(found: Values) -> str:
    """What is foreseen, for a terminal."""
    lines = []
    if (before := found.get("pretraining")) is not None:
        hours = f", {before['hours']:.2f} CPU hours" if "hours" in before else ""
        lines.append(f"pretraining: {before['steps']} steps, {before['tokens']:,} tokens{hours}")
    lines.append(f"{len(found['rows'])} rows, each run {found['steps']} steps, {found['tokens']:,} tokens")
    for row in found["rows"]:
        hours = f", {row['hours']:.2f} CPU hours" if "hours" in row else ""
        lines.append(f"  {row['label']:<24} {row['tuning_runs']} tuning runs, {row['reported_runs']} reported{hours}")
    if "hours" in found:
        lines.append(f"in all {found['hours']:.1f} CPU hours, as measured here just now")
    return "\n".join(lines)
