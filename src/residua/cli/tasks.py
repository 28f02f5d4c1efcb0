"""`residua tasks`: the synthetic tasks, or designs trained on one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from residua.cli._flags import MOST_SEEDS, grid, path_option, refuse_output, show, tell, typed
from residua.lab.common.files import Record, Values, write_json
from residua.lab.common.tables import difference, mde, print_table, spread

if TYPE_CHECKING:
    from residua.lab.tasks.task import Task


def command(
    task: str = typer.Argument(None, help="Task, such as khop or khop:hops=3; without it, all are listed."),
    design: list[str] = typer.Option(
        ["standard"], "--design", "-d", help="Design; repeatable. The first is the baseline."
    ),
    seeds: int = typer.Option(3, metavar="COUNT", help="How many seeds: 3 runs the seeds 0, 1 and 2."),
    steps: int = typer.Option(500, help="Training steps."),
    batch: int = typer.Option(32, help="Batch size."),
    lr: float = typer.Option(None, help="Learning rate of every design.  [default: 0.002]", show_default=False),
    lr_grid: str = typer.Option(
        "", help="Learning rates to tune over, such as 1e-3,2e-3,4e-3; on a seed that is not reported."
    ),
    width: int = typer.Option(64, help="Model width."),
    depth: int = typer.Option(4, help="Number of Transformer blocks."),
    heads: int = typer.Option(4, help="Number of attention heads."),
    layout: str = typer.Option("attn,mlp", help="Sublayers of a block."),
    also: list[str] = typer.Option(
        [], help='Another row with its own layout, such as "standard swa:window=4,attn,mlp"; repeatable.'
    ),
    out: Path = path_option(None, "--out", "-o", help="JSON file for the results; the same command resumes."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List the synthetic tasks, or train designs on one and compare their accuracy."""
    from residua.lab import tasks

    if task is None:
        listed = [_describe(tasks.get(name)) for name in tasks.names()]
        lines = [f"{row['task']:<14} {row['made']}\n{'':<14} separates {row['separates']}" for row in listed]
        show(listed, as_json, lambda _: typer.echo("\n".join(lines)))
        return
    from residua.lab.tasks.experiment import TaskRecipe, requested, run_task
    from residua.lab.tasks.kept import kept_in

    if not 1 <= seeds <= MOST_SEEDS:
        raise ValueError(f"--seeds {seeds}: it is how many, from 1 to {MOST_SEEDS}")
    refuse_output(out, ".json")
    rates = grid("lr-grid", lr_grid)
    if rates and lr is not None:
        raise ValueError("--lr and --lr-grid exclude each other; give one")
    recipe = TaskRecipe(steps=steps, batch=batch, width=width, depth=depth, heads=heads, layout=layout)
    recipe = recipe if lr is None else replace(recipe, lr=lr)
    pairs = [_pair(one) for one in also]
    requested(task, design, range(seeds), recipe, also=pairs, rates=rates)  # before anything is written
    with kept_in(None if out is None else out.with_name(f".{out.name}.runs")) as kept:
        try:
            with _progress((len(design) + len(pairs)) * (seeds + len(set(rates)))) as listen:
                results = run_task(
                    task, design, range(seeds), recipe, on_event=listen, also=pairs, rates=rates, kept=kept
                )
        except KeyboardInterrupt:
            cure = "the same command resumes" if out else "use --out to keep them"
            tell(f"residua: interrupted after {len(kept.runs)} finished runs; {cure}")
            raise typer.Exit(130) from None
        if out is not None:
            import torch

            from residua.lab.train.folder import machine

            write_json(out, {"command": typed(), "machine": machine(torch.device("cpu")), **results})
    show(results, as_json, _show)


def _pair(text: str) -> tuple[str, str]:
    parts = text.split()
    if len(parts) != 2:
        raise ValueError(f'--also takes a design and a layout, such as "standard swa,attn,mlp", not {text!r}')
    return parts[0], parts[1]


def _describe(cls: type[Task]) -> dict[str, str]:
    return {"task": cls.name, "made": (cls.__doc__ or "").strip().splitlines()[0], "separates": cls.separates}


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Record], None]]:
    """A bar on a terminal, a line per finished run elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True, markup=False, highlight=False)
    if not console.is_terminal:
        yield lambda event: console.print(
            f"{event['design']} in {event['layout']}, lr {event['lr']:g}, seed {event['seed']}: {_ended(event)}"
        )
        return
    with Progress(console=console) as progress:
        bar = progress.add_task("training", total=total)
        yield lambda event: progress.advance(bar)


def _ended(event: Record) -> str:
    return f"diverged, {event['message']}" if event["kind"] == "diverged" else f"{event['accuracy']:.3f}"


def _show(results: Values) -> None:
    several = len({row["layout"] for row in results["rows"]}) > 1
    rows = []
    for row in results["rows"]:
        mean, solved = spread(row["accuracy"], 3), row["steps_to_solve"]
        reached = f"{solved:.0f}" if solved else f"{row['solved']} of {len(results['seeds'])} seeds"
        name = f"{row['design']} in {row['layout']}" if several else row["design"]
        gap = difference(row, 3, "no difference")
        rows.append((name, f"{row['lr']:g}", mean, reached, gap, _routing(row["runs"])))
    legend = (
        f"{results['task']}: should separate {results['separates']} (a hypothesis). Chance {results['chance']:.3f}. "
        f"vs baseline: paired over seeds, 95 % interval; {mde(None)}."
    )
    titles = ("design", "lr", "accuracy", "steps to 95 %", "vs baseline", "routing")
    print_table(titles, rows, [legend], results["notes"], width=160)


def _routing(runs: list[Values]) -> str:
    scores = [run["routing"]["score"] for run in runs if run.get("routing")]
    return f"{sum(scores) / len(scores):.2f}" if scores else "-"
