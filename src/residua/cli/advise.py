"""`residua advise`: a ranking of designs for a model, with the evidence, the cost and the source of each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from residua.lab.common.files import Values

if TYPE_CHECKING:
    from residua.lab.advise import Advice, Answer


def command(
    goal: str = typer.Option(
        None,
        help="quality: lower loss; shortcut: erase and rewrite; local: neighbouring tokens; depth: early layers again.",
    ),
    size: str = typer.Option(None, help="Model size: demo, 220M, 350M, 533M, 1B, 3B, 7.6B, or DEPTHxWIDTH[xHEADS]."),
    config: Path = typer.Option(None, help="A Hugging Face config.json, or its directory, instead of --size."),
    context: int = typer.Option(None, help="Sequence length in tokens."),
    parallel: str = typer.Option(None, help="Parallelism between devices: none, pipeline or context."),
    checkpoint: bool = typer.Option(
        None, "--checkpoint/--scratch", help="Convert a trained checkpoint, or train from scratch."
    ),
    memory: float = typer.Option(None, help="Limit on activation memory, as a multiple of the standard network's."),
    latency: float = typer.Option(None, help="Limit on time per token, as a multiple of the standard network's."),
    results: Path = typer.Option(
        None, help="Directory with the results of comparisons; by default those that ship with residua."
    ),
    top: int = typer.Option(5, help="Number of designs to show."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Rank the designs for a model, each with its evidence, its cost and its source.

    On a terminal, missing options are asked for; elsewhere defaults are used, and printed.
    """
    if config is not None and size is not None:
        raise ValueError("--config and --size both set the model size; give one of them")
    if top < 1:
        raise ValueError(f"--top {top} must be at least 1")
    if results is not None and not results.is_dir():
        raise ValueError(f"--results {results} is not a directory")
    given = {"goal": goal, "size": "config" if config is not None else size, "context": context, "parallel": parallel,
             "checkpoint": checkpoint, "memory": memory, "latency": latency}  # fmt: skip
    chosen, assumed = _asked(given) if _interactive() and not as_json else _assumed(given)

    from residua.lab.advise import Situation, advise
    from residua.lab.cost.targets import from_hugging_face, sized

    target = from_hugging_face(config) if config is not None else sized(chosen["size"])
    if target.foreign is not None:
        raise ValueError(
            f"{target.foreign.title} has a residual design already, {target.foreign.design}; advise ranks designs for "
            "models with the standard residual stream"
        )
    asked = {key: value for key, value in chosen.items() if key not in ("size", "context")}
    answer = advise(Situation(target=target, tokens=chosen["context"], **asked), results)
    if as_json:
        typer.echo(json.dumps(answer.to_json() | {"assumed": assumed}, indent=2))
        return
    _page(answer, assumed, top)


NO_LIMIT = "as a multiple of the standard network's (0: no limit)"
QUESTIONS: Values = {
    "goal": ("quality", "Objective: quality, shortcut, local or depth"),
    "size": ("220M", "Model size: demo, 220M, 350M, 533M, 1B, 3B, 7.6B, or DEPTHxWIDTH[xHEADS]"),
    "context": (2048, "Sequence length in tokens"),
    "parallel": ("none", "Parallelism: none, pipeline or context"),
    "checkpoint": (False, "Convert a trained checkpoint"),
    "memory": (None, f"Limit on activation memory, {NO_LIMIT}"),
    "latency": (None, f"Limit on time per token, {NO_LIMIT}"),
}
"""What each option is where it is not given, and how it is asked for."""


def _interactive() -> bool:
    """Whether questions can be asked."""
    return all(stream is not None and not stream.closed and stream.isatty() for stream in (sys.stdin, sys.stdout))


def _assumed(given: Values) -> tuple[Values, list[str]]:
    defaults = {key: QUESTIONS[key][0] for key, value in given.items() if value is None}
    return given | defaults, [f"{key} {default}" for key, default in defaults.items() if default is not None]


def _asked(given: Values) -> tuple[Values, list[str]]:
    chosen = dict(given)
    for key, (default, question) in QUESTIONS.items():
        if given[key] is None:
            offered: Any = 0.0 if default is None else default
            answer = (
                typer.confirm(question, default=offered) if key == "checkpoint"
                else typer.prompt(question, default=offered, type=type(offered))
            )  # fmt: skip
            chosen[key] = None if default is None and not answer else answer
    return chosen, []


def _page(answer: Answer, assumed: list[str], top: int) -> None:
    from residua.lab.advise.situation import GOALS

    situation = answer.situation
    lines = [f"Goal: {situation.goal} ({GOALS[situation.goal]})"]
    if assumed:
        lines.append(f"Defaults used: {', '.join(assumed)}")
    lines.append("")
    if not answer.ranked:
        lines.append("No design with published or measured evidence fits: keep the standard residual stream.")
    for place, one in enumerate(answer.ranked[:top], 1):
        lines += _entry(one, f"{place}. ")
    if answer.ranked and not any(one.verdict == "better" for one in answer.ranked):
        lines += [
            "",
            "There is no evidence that any of these is better: the standard residual stream is the safe choice.",
        ]
    if answer.ruled_out:
        lines += ["", "Ruled out"]
        lines += [f"  {_name(one)}: {'; '.join(one.ruled_out)}" for one in answer.ruled_out]
    lines += ["", "The duality paper's recommendation, and our measurements"]
    lines += [f"  {one.measured.upper()}: {one.claim} ({one.source})\n      {one.because}" for one in answer.claims]
    lines += ["", "Unknown"]
    lines += [f"  {one}" for one in answer.unknown] or ["  nothing"]
    lines += [
        "",
        f"Results used: {', '.join(answer.results) or 'none found'}. Costs are predicted by residua cost for bfloat16, "
        "relative to the standard network; fused is a lower bound.",
    ]
    typer.echo("\n".join(lines))


def _entry(one: Advice, prefix: str) -> list[str]:
    costs = one.costs
    cache = costs["decode_cache_added_bytes"]
    told = (
        f"parameters {costs['parameters']:.4g}x, operations {costs['operations']:.3g}x, "
        f"saved for backward {costs['saved_eager']:.3g}x ({costs['saved_fused']:.3g}x fused), "
        f"bytes moved {costs['bytes_moved_eager']:.3g}x ({costs['bytes_moved_fused']:.3g}x fused), "
        f"pipeline cut {costs['pipeline_cut']:.3g}x, decode cache {'+' if cache else ''}{cache:,.0f} bytes"
    )
    return [
        f"{prefix}{_name(one)}   [{one.headline}]",
        *(f"     why   {reason}" for reason in one.reasons),
        *(f"     but   {caution}" for caution in one.cautions),
        f"     cost  {told}",
    ]


def _name(one: Advice) -> str:
    return one.design if one.layout == "attn,mlp" else f"{one.design} with --layout {one.layout}"
