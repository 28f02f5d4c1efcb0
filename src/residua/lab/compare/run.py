"""compare(plan, out): tune, train, look, and write the answer; again, it goes on where it stopped."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from residua.lab.common.files import Listener, Record, write_json, write_text
from residua.lab.compare.execute import claim, execute
from residua.lab.compare.plan import ComparePlan, Run
from residua.lab.compare.pool import make_pool
from residua.lab.compare.records import Records
from residua.lab.compare.results import Results, collect, reported
from residua.lab.compare.series import of_comparison
from residua.lab.compare.table import to_csv, to_markdown


def compare(
    plan: ComparePlan,
    out: Path | str,
    *,
    jobs: int | None = None,
    on: str = "local",
    force: bool = False,
    draw: bool = True,
    records: Path | str | None = None,
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
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, not {jobs}")
    out, listen = Path(out), on_event or (lambda event: None)
    pool = make_pool(on, out)
    from residua.lab.data import prepare

    first = plan.config(plan.variants()[0], plan.seeds[0])  # all share its corpus: it is prepared once

    def ready() -> Record:
        told = lambda text: listen({"kind": "data", "text": text})  # noqa: E731
        return prepare(first.corpus, first.tokenizer, progress=told).manifest

    kept = None if records is None else Records(records, first.corpus, first.tokenizer, ready)
    if kept is None:
        ready()
    else:
        _ = kept.data  # what is wrong with the corpus is said before anything is written
    claim(plan, out)
    baselines = {run.folder for run in plan.runs({}) if run.variant == plan.baseline_of(run.variant)}
    with closing(pool):
        for title, find in (("tuning", plan.tuning), ("training", lambda: reported(plan, out))):
            if runs := find():
                listen({"kind": "title", "text": title})
                told = listen if kept is None else _keeping(kept, runs, out, listen)
                execute(runs, out, pool=pool, jobs=jobs, threads=plan.threads, listen=told, needed=baselines)
    series = of_comparison(plan, out)
    results = collect(plan, out, series, force=force, command=command)
    write_json(out / "results.json", results)
    write_text(out / "results.csv", to_csv(results))
    write_text(out / "results.md", to_markdown(results))
    if draw:
        from residua.lab import figures, plots

        data = figures.collect(series)
        write_json(out / "figures.json", data)
        plots.draw(data, out / "figures")
    return results


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
