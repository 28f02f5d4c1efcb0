"""`residua finetune`: a Hugging Face checkpoint, converted or about to be, through our training loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from residua.cli._flags import read_settings, run_flags, running, show, sign
from residua.extras import need
from residua.lab.finetune_config import MODEL, FinetuneConfig
from residua.lab.train.recipe import fields_of


def command(
    checkpoint: str, out: Path, config: Path | None, resume: str, track: list[str], as_json: bool, **flags: Any
) -> None:
    """Fine-tune a Hugging Face checkpoint, with separate learning rates for the base and the added parameters."""
    from residua.lab.train.ranks import one_voice

    with one_voice():
        need("hf", "transformers")
        from transformers.utils import logging

        from residua.lab.finetune import finetune

        logging.disable_progress_bar()  # one display at a time, and ours says what counts
        given = {name: value for name, value in flags.items() if value is not None}
        if checkpoint is not None:
            given["checkpoint"] = checkpoint
        chosen = FinetuneConfig.from_json(read_settings(config) | given)
        with running(out) as display:
            result = finetune(chosen, out, resume=resume, track=tuple(track), on_event=display)  # type: ignore[arg-type]
        line = (
            f"{result.design}: valid loss {result.loss:.4f}, perplexity {result.perplexity:.2f}, "
            f"{result.bits_per_byte:.4f} bits/byte after {result.tokens:,} tokens, model in {out / MODEL}"
        )
        show(result.to_json(), as_json, lambda _: typer.echo(line))


sign(
    command,
    {name: field for name, field in fields_of(FinetuneConfig).items() if name != "checkpoint"},
    checkpoint=(str, typer.Argument(None, help="Model directory or hub name.")),
    **run_flags(),
    as_json=(bool, typer.Option(False, "--json", help="Print the result as JSON.")),
)
