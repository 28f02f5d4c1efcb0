"""`residua designs`: the table of designs, or one of them in full."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from residua.cli._flags import show, tell
from residua.cli._table import shipped
from residua.lab.common.files import Record, Values
from residua.lab.common.tables import markdown_table, print_table, terminal

if TYPE_CHECKING:
    from residua.plan import Plan

STARTS = {"standard": "same as standard", "eps": "same as standard, up to eps", "no": "differs from standard"}


def command(
    name: str = typer.Argument(None, help="Design to show in full, such as delta:blocks=4."),
    width: int = typer.Option(768, help="Model width for the counts."),
    depth: int = typer.Option(12, help="Number of Transformer blocks for the counts."),
    layout: str = typer.Option("attn,mlp", help="Sublayers of a block."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    markdown: bool = typer.Option(False, "--markdown", help="Print the table as Markdown."),
    mapped: bool = typer.Option(False, "--map", help="Classify each design: sources, weights, window, injection."),
    picture: Path = typer.Option(None, help="With --map: directory for the figure."),
) -> None:
    """List the residual designs, or show one with its options and what every site reads."""
    import residua

    if mapped:
        _map(name, as_json, markdown, picture)
        return
    if picture is not None:
        raise ValueError("--picture needs --map")
    plan = residua.Plan.regular(width, depth, layout)
    if name is None:
        rows = shipped(width, depth, layout) or counted(plan)
        show(rows, as_json, lambda rows: typer.echo(to_markdown(rows, plan)) if markdown else _table(rows, plan))
        return
    if markdown:
        raise ValueError("--markdown is for the table of all designs; use --json for one")
    found = describe(name, plan) | details(name, plan)
    show(found, as_json, _page)


MAP = {
    "design": "design",
    "sources": "sources",
    "weights": "weights from",
    "normalised": "weights sum",
    "lanes": "lanes",
    "window": "window",
    "injection": "injection",
    "instance": "depth read?",
}
"""The columns of the map."""


def _map(name: str | None, as_json: bool, markdown: bool, picture: Path | None) -> None:
    """The table of `residua.lab.taxonomy`, and its picture."""
    from residua.lab.taxonomy import entries, variants

    found = entries(None if name is None else [name])
    if picture is not None:
        from residua.lab.plots.grid import grid
        from residua.lab.plots.save import save

        tell(" ".join(map(str, save({"map": lambda: grid(variants() if name is None else found)}, picture))))
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found], indent=2))
        return
    rows = [{key: _cell(getattr(one, key)) for key in MAP} for one in found]
    notes = [f"{one.design}: {one.why}." for one in found if one.why]
    if markdown:
        table = markdown_table(MAP.values(), (row.values() for row in rows))
        typer.echo("\n".join([table, "", *(f"- {note}" for note in notes)]))
        return
    titles, console = list(MAP.values()), terminal(200)
    print_table(titles, [list(row.values()) for row in rows], left=titles, width=200)
    console.print("read_l = sum over j in the window of a_lj u_j. Found by probing each design.")
    console.print("\n".join(notes))


def _cell(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def counted(plan: Plan) -> list[Values]:
    """The rows of all designs, each built without memory and walked."""
    import residua

    return [describe(name, plan) for name in residua.names()]


def describe(spec: str, plan: Plan) -> Values:
    """One row of the table: what a design is and what it costs in this plan."""
    import torch

    import residua
    from residua.model.sizes import state_floats

    with torch.device("meta"):
        stream = residua.build(spec, plan)
    return {
        "design": stream.spec,
        "equation": (stream.__doc__ or "").strip().splitlines()[0],
        "sources": stream.mixes,
        "most_sources": max(len(stream.sources(site)) for site in plan.readers),
        "state_per_token": max(state_floats(stream).values()),
        "parameters_added": sum(p.numel() for p in stream.parameters()),
        "starts": stream.starts,
        "paper": stream.paper,
        "released": dict(stream.released_in),
    }


def details(spec: str, plan: Plan) -> Values:
    """The rest of one design: its text, its options, and what every site reads."""
    import inspect

    import torch

    import residua
    from residua.options import options_of

    with torch.device("meta"):
        stream = residua.build(spec, plan)
    return {
        "text": inspect.cleandoc(stream.__doc__ or ""),
        "options": {
            key: {"takes": option.describe(), "default": option.default, "here": stream.options.get(key)}
            for key, option in options_of(type(stream)).items()
        },
        "sites": {
            site.name: {
                "reads": list(stream.sources(site)),
                "lanes": stream.feeds(site),
                "parameters": sum(p.numel() for p in part.parameters()) if (part := stream.part(site)) else 0,
            }
            for site in plan.readers
        },
    }


def _columns(plan: Plan) -> dict[str, Callable[[Record], str]]:
    """The columns of the table, and how each is made from a row."""
    return {
        "design": lambda row: row["design"],
        "equation": lambda row: row["equation"],
        "mixes": lambda row: row["sources"],
        "state/token": lambda row: f"{row['state_per_token'] / plan.width:g} d",
        "params": lambda row: f"{row['parameters_added']:,}",
        "starts": lambda row: STARTS[row["starts"]],
        "paper": lambda row: row["paper"],
    }


def to_markdown(rows: list[Values], plan: Plan) -> str:
    """The table for a page."""
    columns, lines = _columns(plan), []
    for row in rows:
        cells = {title: cell(row).replace("|", "\\|") for title, cell in columns.items()}
        lines.append((cells | {title: f"`{cells[title]}`" for title in ("design", "equation")}).values())
    return markdown_table(columns, lines)


def _table(rows: list[Values], plan: Plan) -> None:
    console, columns = terminal(200), _columns(plan)
    if console.width < 140:  # seven columns do not fit; --json has them all
        del columns["mixes"], columns["paper"]
    left = [title for title in columns if title not in ("state/token", "params")]
    print_table(list(columns), [[cell(row) for cell in columns.values()] for row in rows], left=left, width=200)
    console.print(
        f"Counted for {plan.depth} blocks of width d = {plan.width}. state/token: the largest state between "
        "two sublayers; params: parameters added; starts: the untrained network beside the standard one. "
        "Details: residua designs NAME"
    )
    released = [f"{spec} in {model}" for row in rows for model, spec in row["released"].items()]
    if released:
        console.print(f"In released models: {'; '.join(released)}.")


def _page(found: Record) -> None:
    lines = [f"{found['design']}   ({found['paper']})", "", found["text"], "", "Options"]
    for key, option in found["options"].items():
        default = "not set" if option["default"] is None else str(option["default"])
        lines.append(f"  {key:<16} {option['takes']:<28} default {default}")
    if not found["options"]:
        lines.append("  none")
    if found["released"]:
        lines += ["", "In released models", *(f"  {model:<24} {spec}" for model, spec in found["released"].items())]
    lines += ["", "Sites: parameters added, and sources read"]
    for site, info in found["sites"].items():
        reads = info["reads"]
        shown = " ".join(reads) if len(reads) <= 6 else f"{' '.join(reads[:3])} ... {reads[-1]}  ({len(reads)})"
        lanes = f"  x{info['lanes']} lanes" if info["lanes"] > 1 else ""
        lines.append(f"  {site:<12} {info['parameters']:>10,}  {shown or '-'}{lanes}")
    lines += [
        "",
        f"parameters added {found['parameters_added']:,}   state per token {found['state_per_token']:,} numbers   "
        f"starts {STARTS[found['starts']]}",
    ]
    typer.echo("\n".join(lines))
