"""`residua generate`: text from a trained model, token by token as it is made."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def command(
    run: Path = typer.Argument(..., help="Run directory of train, compare or finetune, or a Hugging Face directory."),
    prompt: str = typer.Option(..., "--prompt", "-p", help="The text to continue."),
    tokens: int = typer.Option(200, "--tokens", "-n", help="Number of new tokens."),
    temperature: float = typer.Option(0.8, help="Sampling temperature; 0: greedy."),
    top_k: int = typer.Option(None, help="Sample from the k most likely tokens."),
    top_p: float = typer.Option(None, help="Nucleus sampling: smallest set of tokens with this probability."),
    seed: int = typer.Option(0, help="Random seed."),
    as_json: bool = typer.Option(False, "--json", help="Print prompt, text and token ids as JSON."),
) -> None:
    """Generate text from a trained model."""
    import torch

    from residua.lab.evaluate.opened import open_model
    from residua.model.generate import check_sampling

    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed {seed}: it is from 0 to below 2**63")
    check_sampling(tokens, temperature, top_k, top_p)
    opened = open_model(run)
    end, given, ids = opened.tokenizer.end, opened.tokenizer.encode(prompt), opened.begun(prompt)
    if not given:
        raise ValueError("the prompt is empty; give at least one character")
    generator = torch.Generator().manual_seed(seed)
    made: list[int] = []
    shown = opened.text(given)
    if not as_json:
        typer.echo(shown, nl=False)
    for token in opened.steps(
        torch.tensor([ids]), tokens, temperature=temperature, top_k=top_k, top_p=top_p, stop=end,
        generator=generator,
    ):  # fmt: skip
        if token == end:
            break
        made.append(token)
        text = opened.text(given + made)
        if not as_json and not text.endswith("\ufffd"):  # a character may need several tokens
            typer.echo(text[len(shown) :], nl=False)
            shown = text
    if as_json:
        typer.echo(json.dumps({"prompt": prompt, "text": opened.text(made), "tokens": made}))
    else:
        typer.echo()
