"""`residua compare`: which design is better, by how much, at what cost, and is the difference significant?"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from residua.cli._flags import MOST_SEEDS, grid, path_option, tell, typed
from residua.extras import need
from residua.lab.common.files import Record, Values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console
    from rich.progress import TaskID

    from residua.lab.common.files import Listener


OUT_OF_TIME = 124
"""The exit code of a command that was given less time than it needs, as that of timeout(1)."""


def command(
    plan: Path = path_option(None, "--plan", help="TOML file of a whole comparison, or a shipped one, such as demo."),
    design: list[str] = typer.Option(
        [], "--design", "-d", help="Design to train; repeatable. The first is the baseline."
    ),
    layout: list[str] = typer.Option([], "--layout", help="Layout of sublayers, such as swa,attn,mlp; repeatable."),
    size: list[str] = typer.Option([], "--size", help="DEPTHxWIDTH or DEPTHxWIDTHxHEADS, such as 6x128; repeatable."),
    seeds: int = typer.Option(
        None, metavar="COUNT", help="How many seeds: 3, the default, runs the seeds 0, 1 and 2; or those of the plan."
    ),
    baseline: str = typer.Option(None, help="Baseline design, if not the first."),
    match: str = typer.Option("none", help="none, params or flops: narrow the MLP until all rows have equal cost."),
    lr_grid: str = typer.Option(
        "", help="Learning rates to tune over, such as 1e-3,2e-3,4e-3; on a seed that is not reported."
    ),
    residual_lr_grid: str = typer.Option("", help="The same, for the parameters that the design adds."),
    until_resolved: float = typer.Option(
        None, help="Add seeds to all rows until the half width of every interval is at most this."
    ),
    most_seeds: int = typer.Option(None, help="With --until-resolved: the most seeds of a row, 12 by default."),
    threads: int = typer.Option(1, help="Threads per run."),
    settings: list[str] = typer.Option(
        [], "--set", "-s", help="Training setting, such as steps=500 or corpus=pycode; repeatable."
    ),
    out: Path = path_option(..., "--out", "-o", help="Output directory; the same command resumes there."),
    jobs: int = typer.Option(
        None, "--jobs", "-j", help="Parallel runs; by default one here, and on a cluster what it has room for."
    ),
    on: str = typer.Option(
        "local", "--on", help="local, slurm or ray, with options such as slurm:partition=gpu,minutes=720,gpus=1."
    ),
    records: Path = typer.Option(
        None, "--records", help="Directory of run records: those there are not trained again, new ones are added."
    ),
    so_far: bool = typer.Option(
        False, "--so-far", help="Train nothing: write the table of the runs that are there, and what is missing."
    ),
    stop_after: float = typer.Option(
        None, "--stop-after", metavar="MINUTES", help="Save every run and end after so long; the same command goes on."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print what would run, and stop."),
    timed: bool = typer.Option(
        False,
        "--timed",
        help="After training, time updates of all rows in turn here: speeds are then of these and not of the runs' own "
        "clocks. With --dry-run: time a few, and print the processor hours of the plan.",
    ),
    force: bool = typer.Option(False, "--force", help="Allow runs on different corpora in one table."),
    report: bool = typer.Option(True, help="Write report.html."),
    as_json: bool = typer.Option(False, "--json", help="Print the results as JSON."),
) -> None:
    """Train designs with the same recipe, tuned learning rates and several seeds, and compare them with intervals."""
    from residua.lab.compare import ComparePlan, compare, read_plan
    from residua.lab.compare.foreseen import foreseen, in_lines
    from residua.lab.compare.recipes import find_plan
    from residua.lab.compare.table import show
    from residua.lab.compare.until import Until
    from residua.lab.compare.verdict import lines, verdict
    from residua.lab.conversions.plan import is_conversion
    from residua.lab.data import check_data

    tune = {"lr": grid("lr-grid", lr_grid), "residual_lr": grid("residual-lr-grid", residual_lr_grid)}
    flags = {
        "designs": design, "layouts": layout, "sizes": [_size(text) for text in size], "baseline": baseline,
        "tune": {key: rates for key, rates in tune.items() if rates},
        "train": dict(_setting(text) for text in settings),
    }  # fmt: skip
    given: Values = {key: value for key, value in flags.items() if value}
    if seeds is not None and not 1 <= seeds <= MOST_SEEDS:
        raise ValueError(f"--seeds {seeds}: it is how many, from 1 to {MOST_SEEDS}")
    if most_seeds is not None and until_resolved is None:
        raise ValueError("--most-seeds goes with --until-resolved")
    if plan is not None:
        if given or match != "none" or threads != 1:
            raise ValueError("--plan defines the whole comparison but --seeds; edit the file, or drop the other flags")
        if is_conversion(file := find_plan(plan)):
            if until_resolved is not None or records is not None or force or so_far:
                raise ValueError(
                    f"{file} compares conversions: --until-resolved, --records, --force and --so-far are not for it"
                )
            _conversions(file, out, seeds, jobs, on, stop_after, dry_run, timed, as_json)
            return
        chosen = read_plan(file)
        if seeds is not None:
            chosen = replace(chosen, seeds=tuple(range(seeds)))
    else:
        if not design:
            raise ValueError("give designs with --design (two or more), or a plan file with --plan")
        chosen = ComparePlan.from_json(
            given | {"seeds": list(range(3 if seeds is None else seeds)), "match": match, "threads": threads}
        )
    if until_resolved is not None:
        until = Until(half_width=until_resolved)
        chosen = replace(chosen, until=until if most_seeds is None else replace(until, most_seeds=most_seeds))
    if dry_run:
        first = chosen.config(chosen.variants()[0], chosen.seeds[0])
        check_data(first.corpus, first.tokenizer)
        found = foreseen(chosen, tell if timed else None)
        typer.echo(json.dumps(found, indent=2) if as_json else in_lines(found))
        return
    if so_far and stop_after is not None:
        raise ValueError("--so-far trains nothing, and needs no --stop-after")
    with _shown() as listen:
        results = compare(
            chosen, out, jobs=jobs, on=on, force=force, records=records, minutes=stop_after, so_far=so_far,
            timed=timed, command=typed(), on_event=listen,
        )  # fmt: skip
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
    typer.echo("\n" + "\n".join(lines(verdict(results, out))))


@contextmanager
def _shown() -> Iterator[Listener]:
    """What the runs tell, on the screen; Ctrl-C and the end of its time end the command once they are saved."""
    from residua.lab.compare.execute import TimeIsUp

    try:
        with _display() as listen:
            yield listen
    except KeyboardInterrupt:
        tell("residua: interrupted; every run is saved, and the same command resumes")
        raise typer.Exit(130) from None
    except TimeIsUp:
        tell("residua: the time is up; every run is saved, and the same command goes on")
        raise typer.Exit(OUT_OF_TIME) from None


def _conversions(
    file: Path,
    out: Path,
    seeds: int | None,
    jobs: int | None,
    on: str,
    minutes: float | None,
    dry_run: bool,
    timed: bool,
    as_json: bool,
) -> None:
    """A plan of conversions: a checkpoint fine-tuned as it is, beside its conversions."""
    need("hf", "transformers")
    from transformers.utils import logging

    from residua.lab.compare.verdict import lines, verdict
    from residua.lab.conversions import compare_conversions, read_conversion
    from residua.lab.conversions.base import foreseen, in_lines
    from residua.lab.conversions.results import enough, show

    logging.disable_progress_bar()
    plan = read_conversion(file)
    if seeds is not None:
        plan = replace(plan, seeds=tuple(range(seeds)))
    if dry_run:
        found = foreseen(plan, tell if timed else None)
        typer.echo(json.dumps(found, indent=2) if as_json else in_lines(found))
        return
    if timed:
        raise ValueError(f"{file} compares conversions: for it, --timed goes with --dry-run")
    with _shown() as listen:
        results = compare_conversions(plan, out, jobs=jobs, on=on, minutes=minutes, command=typed(), on_event=listen)
    if as_json:
        typer.echo(json.dumps(results, indent=2))
        return
    show(results)
    typer.echo(f"written: {out}/conversions.json, conversions.md\n\n{enough(results)}")
    typer.echo("\n".join(lines(verdict(results, out))))


def _size(text: str) -> dict[str, int]:
    from residua.lab.common.size import FORM, read_size

    found = read_size(text)
    if found is None:
        raise ValueError(f"--size {text}: write {FORM}")
    return found


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
