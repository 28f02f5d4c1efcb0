"""Memory, communication and time of every rank, for `residua cost --parallel` and `residua train --dry-run`."""

from __future__ import annotations

from collections.abc import Mapping

import typer

from residua.lab.common.files import Record
from residua.lab.common.tables import print_table

PARTS: Mapping[str, str] = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state (AdamW)",
    "gathered": "parameters unsharded by FSDP",
    "activations": "activations of the sublayers",
    "depth_state": "depth state and activations of the design",
    "cut_buffers": "pipeline buffers",
    "loss": "logits and loss",
    "temporaries": "temporary buffers of the backward pass",
    "total": "total",
}
AXES: Mapping[str, str] = {
    "pp": "sent between stages (pp)",
    "shared": "sent: gradients of shared parameters (pp)",
    "fsdp": "sent: parameters and gradients (fsdp)",
    "dp": "sent: gradients (dp)",
    "tp": "sent: activations (tp)",
}
"""What the tables of ranks show."""


def print_ranks(name: str, cost: Record) -> None:
    """One design: bytes of every place along `pp` by part, bytes that it sends, and the time of a step."""
    ranks = cost["ranks"]
    titles = [f"{name}: per rank", *(f"pp {one['place']}" for one in ranks)]
    blocks = [", ".join(f"{first}..{last - 1}" for first, last in one["blocks"]) for one in ranks]
    lines = [["blocks", *blocks]]
    lines += [[title, *(_bytes(one["memory"][part]) for one in ranks)] for part, title in PARTS.items()]
    lines += [
        [f"{title}, per step", *(_bytes(one["traffic"][axis]) for one in ranks)]
        for axis, title in AXES.items()
        if any(one["traffic"][axis] for one in ranks)
    ]
    print_table(titles, lines, width=240)
    if cost["links"]:
        each = ", ".join(f"{one['stage']}-{one['stage'] + 1}: {_bytes(one['forward'])}" for one in cost["links"])
        sent = sum(one["tensors"] for one in cost["links"])
        typer.echo(f"Forward pass: {sent} tensors per micro-batch are sent between stages ({each}).")
    time = cost["time"]
    typer.echo(
        f"Step: {time['step']:.3g} s: {time['compute'] / time['step']:.0%} compute on the busiest rank, "
        f"{time['bubble'] / time['step']:.0%} pipeline bubble, {time['communication_share']:.0%} communication.\n"
    )


def _bytes(value: float) -> str:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= size:
            return f"{value / size:.4g} {unit}" if value >= 1000 * size else f"{value / size:.3g} {unit}"
    return f"{value:.0f} B" if value else "-"
