"""`residua serve`: transformers' server, which then knows converted models."""

from __future__ import annotations

import typer

from residua.extras import need


def command(
    model: str = typer.Argument(..., help="Directory or hub name of a model, converted or not."),
    options: list[str] = typer.Argument(
        None, help="Options of `transformers serve`, after --, such as -- --port 8000 --continuous-batching."
    ),
) -> None:
    """Serve a model with an OpenAI-compatible API: `transformers serve` in a process that has imported residua."""
    need("serve", "transformers", "fastapi", "uvicorn", "openai")
    from transformers.cli.transformers import app

    from residua.hf.storage import load_config

    load_config(model)  # a wrong name is said in one line
    app(["serve", model, *(options or ())])
