"""inspect_ids(model, ids, ...): the routing of one prompt as plain data, for a table, JSON, a picture or a page.

model      its name or path                     design    its spec
prompt     the text                             tokens    the text of every token
record     `RoutingRecord.summary()`            weights   site -> [lane][source][token][group]
loss       of the prompt, nats per token; None for a prompt of one token
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from residua.lab.diagnose.record import logits_of, record_routing
from residua.lab.diagnose.site import plain
from residua.lab.diagnose.table import align, routing_table
from residua.model import token_loss


def inspect_ids(
    model: nn.Module, ids: Int[Tensor, " t"], *, tokens: Sequence[str], prompt: str = "", name: str = ""
) -> dict[str, Any]:
    """What every site of a model read for one sequence of token ids."""
    if len(ids) < 1:
        raise ValueError("the prompt is empty; give at least one token")
    with torch.no_grad(), record_routing(model) as record:
        logits = logits_of(model(ids[None]))
    loss = token_loss(logits[:, :-1], ids[None, 1:]).item() if len(ids) > 1 else None
    return {
        "model": name,
        "design": record.design,
        "prompt": prompt,
        "tokens": list(tokens),
        "loss": loss,
        "record": record.summary(),
        "weights": {site: plain(weights[:, :, 0].float()) for site, weights in record.weights().items()},
    }


def tables(found: Mapping[str, Any], site: str | None = None) -> str:
    """The inspection as text: a line a site, the mean weights, and the tokens of one site if it is named."""
    parts = [routing_table(found["record"])]
    if found["weights"]:
        grid = mean_weights(found)
        head = ["mean weight", *grid["sources"]]
        body = [
            [name, *("" if weight is None else f"{weight:.2f}" for weight in row)]
            for name, row in zip(grid["sites"], grid["weights"], strict=True)
        ]
        parts.append("\n".join(align([head, *body])))
    if site is not None:
        parts.append(_token_table(found, site))
    return "\n\n".join(parts)


def mean_weights(found: Mapping[str, Any]) -> dict[str, Any]:
    """Sites, sources and mean weights over lanes, tokens and groups; None where a site has no such source."""
    named = {site["site"]: site["sources"] for site in found["record"]["sites"] if site["site"] in found["weights"]}
    order = {name: None for sources in named.values() for name in sources if name not in ("evicted", "partial")}
    order |= {name: None for sources in named.values() for name in sources}
    rows = []
    for site, sources in named.items():
        means = torch.tensor(found["weights"][site]).mean((0, 2, 3)).tolist()
        row = dict(zip(sources, means, strict=True))
        rows.append([row.get(name) for name in order])
    signed = any(weight is not None and weight < 0 for row in rows for weight in row)
    return {"sites": list(named), "sources": list(order), "weights": rows, "signed": signed}


def draw(found: Mapping[str, Any], path: Path) -> None:
    """The mean weights as a heat map, in a PNG file."""
    if not found["weights"]:
        raise ValueError(f"{found['design']} mixes no sources: there are no weights to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from residua.lab.plots import heat
    from residua.lab.plots.style import styled

    figures = {
        "routing": {"model": mean_weights(found)},
        "labels": {"model": found["design"]},
        "notes": [f"Prompt of {len(found['tokens'])} tokens."],
    }
    with styled():
        figure = heat.alone(figures, "model")
        scratch = path.with_name(f".{path.name}.writing")
        FigureCanvasAgg(figure).print_png(scratch)
        scratch.replace(path)


def _token_table(found: Mapping[str, Any], site: str) -> str:
    if site not in found["weights"]:
        known = ", ".join(found["weights"]) or "none"
        raise ValueError(f"{found['design']} mixes no sources at {site!r}; it does at {known}")
    sources = next(each["sources"] for each in found["record"]["sites"] if each["site"] == site)
    weights = torch.tensor(found["weights"][site]).mean((0, 3)).T.tolist()
    rows = [
        [repr(token)[1:-1], *(f"{weight:.2f}" for weight in row)]
        for token, row in zip(found["tokens"], weights, strict=True)
    ]
    return "\n".join(align([[f"{site}: token", *sources], *rows]))
