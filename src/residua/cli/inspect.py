"""`residua inspect`: what every sublayer of a model read from the stream, for one prompt; one model, or two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from residua.cli._flags import refuse_output, tell

if TYPE_CHECKING:
    from residua.lab.diagnose.inspect import Inspection
    from residua.lab.evaluate.opened import Opened


def command(
    model: list[Path] = typer.Argument(
        ..., help="Converted or released model, or run directory of train or finetune; two are shown side by side."
    ),
    prompt: str = typer.Option(..., "--prompt", "-p", help="Input text."),
    before: bool = typer.Option(
        False, "--before", help="With a run of finetune: beside it, the model that it started from."
    ),
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
    from residua.lab.diagnose.inspect import compared, draw, tables
    from residua.lab.evaluate.opened import open_model, open_start

    refuse_output(png, ".png", ".svg", ".pdf")
    refuse_output(html, ".html", ".htm")
    if len(model) > 2 or (before and len(model) > 1):
        raise ValueError("one model, or two side by side; --before adds the second to one run of finetune")
    if png is not None and (before or len(model) > 1):
        raise ValueError("--png draws one model; --html shows two side by side")
    for file in (png, html):
        if file is not None and not file.absolute().parent.is_dir():
            raise ValueError(f"{file.parent} is not a directory; create it first")
    opened = [(f"{model[0]}, before", open_start(model[0]))] if before else []
    opened += [(str(path), open_model(path)) for path in model]
    paths = html is not None or as_json
    found = [_inspected(name, each, prompt, paths=paths) for name, each in opened]
    text = "\n\n".join([*(tables(each, site) for each in found), *([compared(*found)] if len(found) == 2 else [])])
    if png is not None:
        draw(found[0], png)
    if html is not None:
        from residua.lab.report import write_inspection

        write_inspection(found, html)
    typer.echo(json.dumps(found[0] if len(found) == 1 else found) if as_json else text)
    written = [str(file) for file in (png, html) if file is not None]
    if written:
        tell(f"written: {', '.join(written)}")


def _inspected(name: str, opened: Opened, prompt: str, *, paths: bool) -> Inspection:
    import torch

    from residua.lab.diagnose.inspect import inspect_ids

    if opened.design == "base":
        raise ValueError(
            f"{name} is not a converted model; convert it first: residua convert {name} --design delta --out NEW"
        )
    ids = opened.begun(prompt)
    if opened.context is not None and len(ids) > opened.context:
        raise ValueError(f"the prompt has {len(ids)} tokens, and this model takes {opened.context}; shorten it")
    tokens = [opened.token(each) for each in ids]
    return inspect_ids(
        opened.model, torch.tensor(ids), tokens=tokens, prompt=prompt, name=name, named=opened.token if paths else None
    )
