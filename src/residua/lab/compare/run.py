"""compare(plan, out): tune, train, look, and write the answer; again, it goes on where it stopped.

What is run first is worth most if nothing follows: the sizes in the order of the plan, each tuned and then trained, one
seed of every row before the next of any. A rule that carries rates is checked when the first size is done.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import closing
from pathlib import Path

from residua.lab.common.files import Listener, Record, write_json, write_text
from residua.lab.compare.choice import choose_rates, reported
from residua.lab.compare.execute import claim, deadline_after, execute, refuse_strangers
from residua.lab.compare.pace import time_rows
from residua.lab.compare.plan import ComparePlan, Run
from residua.lab.compare.pool import make_pool
from residua.lab.compare.records import Records
from residua.lab.compare.results import Results, collect
from residua.lab.compare.series import LOOKS
from residua.lab.compare.sizes import Size
from residua.lab.compare.table import to_csv, to_markdown
from residua.lab.compare.trials import trials
from residua.lab.compare.until import widest_half


def compare(
    plan: ComparePlan,
    out: Path | str,
    *,
    jobs: int | None = None,
    on: str = "local",
    force: bool = False,
    draw: bool = True,
    records: Path | str | None = None,
    minutes: float | None = None,
    so_far: bool = False,
    timed: bool = False,
    command: str = "",
    on_event: Listener | None = None,
) -> Results:
    """Run a plan in directory `out`; the results, also written there as JSON, CSV, Markdown and figures.

    jobs:  runs at a time; by default one on this machine, and on a cluster as many as it has room for. The threads of
           each are the plan's.
    on:    where they run: local, slurm or ray, with options as in `slurm:partition=gpu,minutes=720`.
    force: put runs of different corpora in one table.
    draw:  make the figures.
    records: a directory of records: a run whose record is there is not made, and every run that ends leaves its own.
    minutes: stop after so many: every run saves, and `TimeIsUp` is raised.
    so_far:  run nothing, and make the answer from the runs that are there; it says what is missing.
    timed:   then time updates of all rows in turn on this machine: the speeds of the answer are of these.
    """
    deadline = deadline_after(minutes)
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, not {jobs}")
    if timed and on != "local":
        raise ValueError(f"updates are timed on this machine, and --on {on} trains elsewhere; drop --timed")
    if not str(out):
        raise ValueError("out is empty: give the directory of the comparison, such as runs/a")
    out, listen = Path(out), on_event or (lambda event: None)
    pool = make_pool(on, out)
    from residua.lab.data import check_data, prepare
    from residua.lab.train.fits import check_fits

    first = plan.config(plan.variants()[0], plan.seeds[0])  # all share its corpus: it is prepared once
    check_data(first.corpus, first.tokenizer)
    if on == "local":
        for variant in plan.variants():
            check_fits(plan.config(variant, plan.seeds[0]))
    refuse_strangers(plan, out)

    def ready() -> Record:
        told = lambda text: listen({"kind": "data", "text": text})  # noqa: E731
        return prepare(first.corpus, first.tokenizer, progress=told).manifest

    kept = None if records is None else Records(records, first.corpus, first.tokenizer, ready)
    if not (so_far and kept is None):  # what is wrong with the corpus is said before anything is written
        _check_passes(plan, (ready() if kept is None else kept.data)["tokens"]["train"])
    claim(plan, out)

    def make(title: str, runs: Sequence[Run], needed: Collection[str] = ()) -> None:
        told = listen if kept is None else _keeping(kept, runs, out, listen)
        if runs and not so_far:
            listen({"kind": "title", "text": title})
            execute(
                runs, out, pool=pool, jobs=jobs, threads=plan.threads, listen=told, needed=needed, deadline=deadline
            )  # fmt: skip

    def train(runs: Sequence[Run]) -> None:
        bases = {run.folder for run in runs if run.variant == plan.baseline_of(run.variant)}
        make("training", in_passes(plan, runs), bases)

    def tune(size: Size) -> None:
        """Until what has ended asks for no more."""
        known: list[Run] = []
        while (runs := [run for run in trials(plan, out) if run.variant.size == size]) != known:
            make("tuning", runs)
            known = runs

    with closing(pool):
        for size in plan.sizes:
            tune(size)
            train([run for run in reported(plan, out) if run.variant.size == size])
            if size == plan.sizes[0]:
                make("checking the rule", plan.checking(choose_rates(plan, out)))
        if timed:
            data = ready() if kept is None else kept.data
            time_rows(plan, out, data["tokenizer"]["vocab"], listen)
        if kept is not None:
            kept.settle_pace(plan, out, anew=timed)
        for look in plan.looks():
            train(reported(look, out))
            if plan.until is not None:
                write_json(out / LOOKS, {"seeds": len(look.seeds)})
            results = collect(look, out, force=force, so_far=so_far, command=command)
            resolved = plan.until is not None and widest_half(results["rows"]) <= plan.until.half_width
            if resolved or "unfinished" in results:
                break
    write_json(out / "results.json", results)
    write_text(out / "results.csv", to_csv(results))
    write_text(out / "results.md", to_markdown(results))
    if draw:
        from residua.lab import figures, plots

        drawn = figures.collect(results.series)
        write_json(out / "figures.json", drawn)
        plots.draw(drawn, out / "figures")
    return results


def in_passes(plan: ComparePlan, runs: Sequence[Run]) -> list[Run]:
    """In the order in which they are made: size by size, there seed by seed, and of a seed the baseline first."""
    seeds = {seed: place for place, seed in enumerate(dict.fromkeys(run.config.seed for run in runs))}
    return sorted(
        runs,
        key=lambda run: (
            plan.sizes.index(run.variant.size),
            seeds[run.config.seed],
            run.variant != plan.baseline_of(run.variant),
        ),
    )


def _keeping(kept: Records, runs: Sequence[Run], out: Path, listen: Listener) -> Listener:
    """Take the records that are there, and write one for every run when it ends."""
    by_folder = {run.folder: run for run in runs}
    for run in runs:
        kept.settle(run, out)

    def told(event: Record) -> None:
        if event["kind"] in ("finished", "diverged"):
            kept.settle(by_folder[event["run"]], out)
        listen(event)

    return told


def _check_passes(plan: ComparePlan, tokens: int) -> None:
    """Refuse a plan whose runs would pass their text more often than it allows."""
    if plan.most_passes is None:
        return
    for variant in plan.variants():
        config = plan.config(variant, plan.seeds[0])
        passes = config.steps * config.tokens_per_step / tokens
        if passes > plan.most_passes:
            raise ValueError(
                f"{variant.label} would pass {config.corpus} {passes:.2f} times, and most_passes is "
                f"{plan.most_passes:g}; take a larger corpus, or fewer tokens"
            )
