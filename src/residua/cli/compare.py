"""`residua compare`: which design is better, by how much, at what cost, and is the difference significant?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from residua.cli._flags import grid, tell, typed
from residua.lab.common.files import Record, Values

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from residua.lab.common.files import Listener
    from residua.lab.compare import ComparePlan


def command(
    plan: Path = typer.Option(None, "--plan", help="TOML file with the whole comparison, instead of the flags below."),
    design: list[str] = typer.Option(
        [], "--design", "-d", help="Design to train; repeatable. The first is the baseline."
    ),
    layout: list[str] = typer.Option([], "--layout", help="Layout of sublayers, such as swa,attn,mlp; repeatable."),
    size: list[str] = typer.Option([], "--size", help="DEPTHxWIDTH or DEPTHxWIDTHxHEADS, such as 6x128; repeatable."),
    seeds: int = typer.Option(3, help="Number of seeds: 0, 1, ..."),
    baseline: str = typer.Option(None, help="Baseline design, if not the first."),
    match: str = typer.Option("none", help="none, params or flops: narrow the MLP until all rows have equal cost."),
    lr_grid: str = typer.Option(
        "", help="Learning rates to tune over, such as 1e-3,2e-3,4e-3; on a seed that is not reported."
    ),
    residual_lr_grid: str = typer.Option("", help="The same, for the parameters that the design adds."),
    until_resolved: float = typer.Option(
        None, help="Add seeds to all rows until the half width of every interval is at most this."
    ),
    most_seeds: int = typer.Option(12, help="With --until-resolved: the most seeds of a row."),
    threads: int = typer.Option(1, help="Threads per run."),
    settings: list[str] = typer.Option(
        [], "--set", "-s", help="Training setting, such as steps=500 or corpus=pycode; repeatable."
    ),
    out: Path = typer.Option(..., "--out", "-o", help="Output directory; the same command resumes there."),
    jobs: int = typer.Option(
        None, "--jobs", "-j", help="Parallel runs; by default one here, and on a cluster what it has room for."
    ),
    on: str = typer.Option(
        "local", "--on", help="local, slurm or ray, with options such as slurm:partition=gpu,minutes=720,gpus=1."
    ),
    records: Path = typer.Option(
        None, "--records", help="Directory of run records: those there are not trained again, new ones are added."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print what would run, and stop."),
    timed: bool = typer.Option(
        False, "--timed", help="With --dry-run: time a few updates of every row here, and print the processor hours."
    ),
    force: bool = typer.Option(False, "--force", help="Allow runs on different corpora in one table."),
    report: bool = typer.Option(True, help="Write report.html."),
    as_json: bool = typer.Option(False, "--json", help="Print the results as JSON."),
) -> None:
    """Train designs with the same recipe, tuned learning rates and several seeds, and compare them with intervals."""
    from residua.lab.compare import ComparePlan, compare, read_plan
    from residua.lab.compare.table import show
    from residua.lab.compare.until import Until

    tune = {"lr": grid("lr-grid", lr_grid), "residual_lr": grid("residual-lr-grid", residual_lr_grid)}
    flags = {
        "designs": design, "layouts": layout, "sizes": [_size(text) for text in size], "baseline": baseline,
        "tune": {key: rates for key, rates in tune.items() if rates},
        "train": dict(_setting(text) for text in settings),
    }  # fmt: skip
    given: Values = {key: value for key, value in flags.items() if value}
    if plan is not None:
        if given or match != "none" or seeds != 3 or threads != 1:
            raise ValueError("--plan defines the whole comparison; edit the file, or drop the other flags")
        chosen = read_plan(plan)
    else:
        if not design:
            raise ValueError("give designs with --design (two or more), or a plan file with --plan")
        chosen = ComparePlan.from_json(given | {"seeds": list(range(seeds)), "match": match, "threads": threads})
    if until_resolved is not None:
        chosen = replace(chosen, until=Until(half_width=until_resolved, most_seeds=most_seeds))
    if dry_run:
        _announce(chosen, timed=timed)
        return
    if timed:
        raise ValueError("--timed goes with --dry-run")
    try:
        with _display() as listen:
            results = compare(
                chosen, out, jobs=jobs, on=on, force=force, records=records, command=typed(), on_event=listen
            )
    except KeyboardInterrupt:
        tell("residua: interrupted; every run is saved, and the same command resumes")
        raise typer.Exit(130) from None
    page = None
    if report:
        from residua.lab.report import write

        # records hold no weights: a page that shall come out the same without them does not look at any
        page = write(out, read=results.series, checkpoints=records is None)
    if as_json:
        typer.echo(json.dumps(results, indent=2))
        return
    show(results)
    typer.echo(f"written: {out}/results.json, results.csv, results.md, figures/")
    if page is not None:
        typer.echo(f"report: {page}")


def _size(text: str) -> dict[str, int]:
    parts = text.split("x")
    if len(parts) not in (2, 3) or not all(part.isdigit() for part in parts):
        raise ValueError(f"--size {text}: write DEPTHxWIDTH or DEPTHxWIDTHxHEADS, such as 6x128 or 6x128x4")
    return dict(zip(("depth", "width", "heads"), map(int, parts), strict=False))


def _setting(text: str) -> tuple[str, object]:
    from residua.lab.train.config import config_fields

    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set {text}: write key=value, such as steps=500")
    known = config_fields().get(key)
    if known is None:
        raise ValueError(f"--set {text}: unknown training setting {key!r}")
    if known.kind is str:
        return key, value
    if known.kind is bool:
        if value not in ("true", "false"):
            raise ValueError(f"--set {text}: {key} is true or false")
        return key, value == "true"
    try:
        return key, known.kind(value)
    except ValueError:
        raise ValueError(f"--set {text}: {key} takes a {known.describe()}") from None


def _announce(plan: ComparePlan, *, timed: bool) -> None:
    tuning, variants, reported = plan.tuning(), plan.variants(), plan.runs({})
    if len(reported) == len(variants) * len(plan.seeds):
        typer.echo(f"{len(variants)} rows x {len(plan.seeds)} seeds, baseline {plan.compared_with}")
    else:
        typer.echo(f"{len(variants)} rows, up to {len(plan.seeds)} seeds, baseline {plan.compared_with}")
    checks = len(plan.checking({variant.label: {"lr": 1e-3} for variant in variants}))
    checked = f", {checks} that check how rates are carried ({plan.tune.describe()})" if checks else ""
    typer.echo(f"{len(tuning)} tuning runs{checked}, then {len(reported)} reported runs")
    if plan.until is not None:
        counts = plan.until.counts(len(plan.seeds))
        typer.echo(f"then seeds are added until resolved to {plan.until.half_width:g}: looks at {counts} seeds")
    hours: dict[str, Record] = {}
    if timed:
        from residua.lab.compare.estimate import estimate

        hours = {row["label"]: row for row in estimate(plan, tell)}
    for variant in variants:
        config = plan.config(variant, plan.seeds[0])
        taken = f", {hours[variant.label]['hours']:.2f} CPU hours" if timed else ""
        typer.echo(
            f"  {variant.label:<36} mlp_width {config.model(256).hidden}, "
            f"{config.steps} steps of {config.tokens_per_step} tokens{taken}"
        )
    if timed:
        typer.echo(f"in all {sum(row['hours'] for row in hours.values()):.1f} CPU hours, as measured here just now")


def _display() -> _Plain:
    """A live display on a terminal, a line per finished run elsewhere."""
    from rich.console import Console

    console = Console(stderr=True, markup=False, highlight=False)
    return _Live(console) if console.is_terminal else _Plain(console)


def _ended(event: Record) -> str:
    if event["kind"] == "diverged":
        return f"{event['run']}: diverged, {event['message']}"
    return f"{event['run']}: loss {event['loss']:.4f}, {event['bits_per_byte']:.4f} bits/byte"


def _lost(event: Record) -> str:
    return f"{event['run']}: lost ({event['message']}); started again, {event['restart']} of {event['of']}"


class _Plain:
    def __init__(self, console: Console) -> None:
        self.console = console
        self.left = 0

    def __enter__(self) -> Listener:
        return self.take

    def __exit__(self, *_: object) -> None:
        pass

    def take(self, event: Record) -> None:
        if event["kind"] in ("title", "data"):
            self.console.print(event["text"])
        elif event["kind"] == "phase":
            self.left = event["runs"] - event["done"]
            if event["done"]:
                self.console.print(f"{event['done']} of {event['runs']} runs are already done")
        elif event["kind"] == "lost":
            self.console.print(_lost(event))
        elif event["kind"] in ("finished", "diverged"):
            self.left -= 1
            self.console.print(f"{_ended(event)}; {self.left} left")


class _Live(_Plain):
    """A bar for all runs and one for each that is running."""

    def __enter__(self) -> Listener:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.progress = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False), console=self.console,
        )  # fmt: skip
        self.tasks: dict[str, TaskID] = {}
        self.title = ""
        self.progress.start()
        return self.take

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def take(self, event: Record) -> None:
        kind = event["kind"]
        if kind == "title":
            self.title = event["text"]
        elif kind == "phase" and event["runs"]:
            self.whole = self.progress.add_task(self.title, total=event["runs"], completed=event["done"], note="")
        elif kind == "started":
            self.tasks[event["run"]] = self.progress.add_task(event["run"], total=event["steps"], note="")
        elif kind == "progress" and "step" in event:
            self.progress.update(self.tasks[event["run"]], completed=event["step"], note=f"loss {event['loss']:.3f}")
        elif kind == "lost":
            self.progress.console.print(_lost(event))
        elif kind in ("finished", "diverged"):
            self.progress.remove_task(self.tasks.pop(event["run"]))
            self.progress.advance(self.whole)
            self.progress.console.print(_ended(event))
        elif kind == "data":
            self.progress.console.print(event["text"])
