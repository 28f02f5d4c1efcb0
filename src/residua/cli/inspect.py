"""`residua inspect`: what every sublayer of a model read from the stream, for one prompt."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from residua.cli._flags import refuse_output, tell


def command(
    model: Path = typer.Argument(..., help="Converted or released model, or run directory of train or finetune."),
    prompt: str = typer.Option(..., "--prompt", "-p", help="Input text."),
    site: str = typer.Option(
        None, "--site", help="Also print the weights of every token at this site, such as l3_attn."
    ),
    png: Path = typer.Option(None, "--png", help="Write a heat map of the mean weights to this PNG file."),
    html: Path = typer.Option(None, "--html", help="Write an interactive page to this HTML file."),
    as_json: bool = typer.Option(
        False, "--json", help="Print everything as JSON, including the weights of every token."
    ),
) -> None:
    """Show which sources every site reads for one prompt: as a table, JSON, a picture or a page."""
    import torch

    from residua.lab.diagnose.inspect import draw, inspect_ids, tables
    from residua.lab.evaluate.opened import open_model

    refuse_output(png, ".png", ".svg", ".pdf")
    refuse_output(html, ".html", ".htm")
    for file in (png, html):
        if file is not None and not file.absolute().parent.is_dir():
            raise ValueError(f"{file.parent} is not a directory; create it first")
    opened = open_model(model)
    if opened.design == "base":
        raise ValueError(f"{model} is not a converted model; convert it first: residua convert {model}")
    ids = opened.tokenizer.encode(prompt)
    if opened.context is not None and len(ids) > opened.context:
        raise ValueError(f"the prompt has {len(ids)} tokens, and this model takes {opened.context}; shorten it")
    tokens = [opened.tokenizer.decode([each]) for each in ids]
    found = inspect_ids(opened.model, torch.tensor(ids), tokens=tokens, prompt=prompt, name=str(model))
    text = tables(found, site)
    if png is not None:
        draw(found, png)
    if html is not None:
        from residua.lab.report import write_inspection

        write_inspection(found, html)
    typer.echo(json.dumps(found) if as_json else text)
    written = [str(file) for file in (png, html) if file is not None]
    if written:
        tell(f"written: {', '.join(written)}")
