"""`residua inspect`: what every sublayer of a model read from the stream, for one prompt."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def command(
    model: Path = typer.Argument(..., help="A converted model, or a directory of residua train or finetune."),
    prompt: str = typer.Option(..., "--prompt", "-p", help="The text to run through it."),
    site: str = typer.Option(None, "--site", help="Also print the weights of every token at this site, as l3_attn."),
    png: Path = typer.Option(None, "--png", help="Draw the mean weights, sites by sources, into this file."),
    html: Path = typer.Option(None, "--html", help="Write a page with the routing explorer into this file."),
    as_json: bool = typer.Option(False, "--json", help="Print everything, every token's weights included, as JSON."),
) -> None:
    """Show how one prompt is routed: as a table, JSON, a picture or a page."""
    import torch

    from residua.lab.diagnose.inspect import draw, inspect_ids, tables
    from residua.lab.evaluate.opened import open_model

    for file in (png, html):
        if file is not None and not file.absolute().parent.is_dir():
            raise ValueError(f"{file.parent} is no directory; make it first")
    opened = open_model(model)
    if opened.design == "base":
        raise ValueError(
            f"{model} has no residual stream of ours to look into; convert it first: residua convert {model}"
        )
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
