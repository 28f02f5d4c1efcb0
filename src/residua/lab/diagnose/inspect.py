"""inspect_ids(model, ids, ...): the routing of one prompt as plain data, for a table, JSON, a picture or a page.

model      its name or path                     design    its spec
prompt     the text                             tokens    the text of every token
record     `RoutingRecord.summary()`            weights   site -> [lane][source][token][group]
loss       of the prompt, nats per token; None for a prompt of one token
attention  of our models: site -> mean weight 0, 1, 2, ... tokens back
paths      what reached the logit of each token, where it was asked for: see `paths_of`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor, nn

from residua.lab.common.files import Record, Values
from residua.lab.diagnose.attention import attention_by_offset
from residua.lab.diagnose.paths import attribute
from residua.lab.diagnose.record import logits_of, record_routing
from residua.lab.diagnose.site import plain
from residua.lab.diagnose.table import align, routing_table
from residua.model import Transformer, token_loss

MOST_FOLLOWED = 64
"""Tokens whose logits are followed back: each costs a backward pass."""


class Inspection(Values):
    """What one model did with one prompt; a notebook shows its weights and its largest reads, token by token."""

    def _repr_html_(self) -> str:
        from residua.lab.diagnose.show import inspection_html

        return inspection_html(self)


def inspect_ids(
    model: nn.Module,
    ids: Int[Tensor, " t"],
    *,
    tokens: Sequence[str],
    prompt: str = "",
    name: str = "",
    named: Callable[[int], str] | None = None,
) -> Inspection:
    """What every site of a model read for one sequence of token ids.

    named: the text of a token; with it, also what reached the logit of each token of the prompt.
    """
    if len(ids) < 1:
        raise ValueError("the prompt is empty; give at least one token")
    attention: dict[str, list[float]] = {}
    with torch.no_grad(), ExitStack() as stack:
        if isinstance(model, Transformer):
            attention = stack.enter_context(attention_by_offset(model))
        record = stack.enter_context(record_routing(model))
        logits = logits_of(model(ids[None]))
    loss = token_loss(logits[:, :-1], ids[None, 1:]).item() if len(ids) > 1 else None
    found = Inspection(
        model=name,
        design=record.design,
        prompt=prompt,
        tokens=list(tokens),
        loss=loss,
        record=record.summary(),
        weights={site: plain(weights[:, :, 0].float()) for site, weights in record.weights().items()},
        attention=attention,
    )
    if named is not None and found["weights"]:
        found["paths"] = paths_of(model, ids, named)
    return found


def paths_of(model: nn.Module, ids: Int[Tensor, " t"], named: Callable[[int], str]) -> Values:
    """What reached the logit of the token that comes next, and of the model's first choice, at every position.

    sources   site -> names                         exact     whether the head's parts and the rest are the logit
    targets   two of {title, tokens: the text of each target, logits, rest: [token], parts: site -> [source][token]}

    After the last token nothing comes: its target is the model's choice in both.
    """
    ids = ids[:MOST_FOLLOWED]
    with torch.no_grad():
        choice = logits_of(model(ids[None]))[0].argmax(-1)
    targets = []
    for title, wanted in (
        ("the token that comes next", torch.cat([ids[1:], choice[-1:]])),
        ("its first choice", choice),
    ):
        found = attribute(model, ids[None], wanted)
        names = [named(int(each)) for each in wanted]
        targets.append(
            {"title": title, "tokens": names, "logits": plain(found.logits), "rest": plain(found.rest),
             "parts": {site: plain(parts) for site, parts in found.parts.items()}}
        )  # fmt: skip
    return {
        "sources": {site: list(names) for site, names in found.sources.items()},
        "exact": found.exact,
        "targets": targets,
    }


def tables(found: Record, site: str | None = None) -> str:
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


def compared(first: Record, second: Record) -> str:
    """Two models as text: their losses, and the mean weights of the second minus those of the first."""
    losses = [each["loss"] for each in (first, second)]
    said = [f"{second['model']} minus {first['model']}"]
    if None not in losses:
        said.append(f"loss: {losses[1] - losses[0]:+.4f} nats per token ({losses[0]:.4f} to {losses[1]:.4f})")
    grid = difference(first, second)
    if not grid["sites"]:
        return "\n".join([*said, "no site of both mixes a source of both"])
    head = ["mean weight", *grid["sources"]]
    body = [
        [name, *("" if weight is None else f"{weight:+.2f}" for weight in row)]
        for name, row in zip(grid["sites"], grid["weights"], strict=True)
    ]
    return "\n".join([*said, *align([head, *body])])


def difference(first: Record, second: Record) -> Values:
    """The mean weights of the second minus those of the first, where sites and sources of both have the same names."""
    before, after = (mean_weights(each) for each in (first, second))
    sites = [name for name in after["sites"] if name in before["sites"]]
    sources = [name for name in after["sources"] if name in before["sources"]]

    def at(grid: Record, site: str, source: str) -> float | None:
        return grid["weights"][grid["sites"].index(site)][grid["sources"].index(source)]

    rows = []
    for site in sites:
        pairs = [(at(before, site, source), at(after, site, source)) for source in sources]
        rows.append([None if old is None or new is None else new - old for old, new in pairs])
    return {"sites": sites if sources else [], "sources": sources, "weights": rows, "signed": True}


def mean_weights(found: Record) -> Values:
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


def draw(found: Record, path: Path) -> None:
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


def _token_table(found: Record, site: str) -> str:
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
