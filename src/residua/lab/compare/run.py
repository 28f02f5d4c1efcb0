"""compare(plan, out): tune, train, look, and write the answer; again, it goes on where it stopped."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from residua.lab.common.files import Listener, write_json, write_text
from residua.lab.compare.execute import claim, execute, refuse_strangers
from residua.lab.compare.plan import ComparePlan
from residua.lab.compare.pool import make_pool
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
    command: str = "",
    on_event: Listener | None = None,
) -> Results:
    """Run a plan in directory `out`; the results, also written there as JSON, CSV, Markdown and figures.

    jobs:  runs at a time; by default one on this machine, and on a cluster as many as it has room for. The threads of
           each are the plan's.
    on:    where they run: local, slurm or ray, with options as in `slurm:partition=gpu,minutes=720`.
    force: put runs of different corpora in one table.
    draw:  make the figures.
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, not {jobs}")
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
    prepare(first.corpus, first.tokenizer, progress=lambda text: listen({"kind": "data", "text": text}))
    claim(plan, out)
    baselines = {run.folder for run in plan.runs({}) if run.variant == plan.baseline_of(run.variant)}
    with closing(pool):
        for title, find in (("tuning", plan.tuning), ("training", lambda: reported(plan, out))):
            if runs := find():
                listen({"kind": "title", "text": title})
                execute(runs, out, pool=pool, jobs=jobs, threads=plan.threads, listen=listen, needed=baselines)
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
