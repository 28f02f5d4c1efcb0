"""`residua finetune`: a Hugging Face checkpoint, converted or about to be, through our training loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from residua.cli._flags import read_settings, sign
from residua.cli._need import need


def command(
    checkpoint: str, out: Path, config: Path | None, resume: str, track: list[str], as_json: bool, **flags: Any
) -> None:
    """Fine-tune a Hugging Face checkpoint with a rate for its base and one for its routing; resumes like `train`."""
    need("hf", "transformers")
    from transformers.utils import logging

    from residua.hf.finetune import MODEL, FinetuneConfig, finetune
    from residua.train import Diverged, Interrupted
    from residua.train.display import Display

    logging.disable_progress_bar()  # one display at a time, and ours says what counts
    given = {name: value for name, value in flags.items() if value is not None}
    if checkpoint is not None:
        given["checkpoint"] = checkpoint
    chosen = FinetuneConfig.from_json(read_settings(config) | given)
    if out is None:
        raise ValueError("--out is missing: name a directory for the run, such as --out runs/a")
    try:
        with Display() as display:
            result = finetune(chosen, out, resume=resume, track=tuple(track), on_event=display)  # type: ignore[arg-type]
    except Interrupted as stopped:
        typer.echo(f"residua: {stopped}", err=True)
        raise typer.Exit(stopped.exit_code) from None
    except (Diverged, ImportError) as failed:
        typer.echo(f"residua: {failed}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2))
        return
    typer.echo(
        f"{result.design}: valid loss {result.loss:.4f}, perplexity {result.perplexity:.2f}, "
        f"{result.bits_per_byte:.4f} bits/byte after {result.tokens:,} tokens, model in {out / MODEL}"
    )


def _sign() -> None:
    from residua.hf.finetune import FinetuneConfig
    from residua.train.recipe import fields_of

    fields = {name: field for name, field in fields_of(FinetuneConfig).items() if name != "checkpoint"}
    sign(
        command,
        fields,
        checkpoint=(str, typer.Argument(None, help="Directory of the model (or a hub name).")),
        out=(Path, typer.Option(None, "--out", help="Directory of the run.")),
        config=(Path, typer.Option(None, "--config", help="JSON or TOML file of these settings; flags go over it.")),
        resume=(str, typer.Option("auto", "--resume", metavar="auto|never|must", help="Continue what is in --out.")),
        track=(list[str], typer.Option([], "--track", help="tensorboard, trackio or wandb; may be repeated.")),
        as_json=(bool, typer.Option(False, "--json", help="Print the result as JSON.")),
    )


_sign()
