"""compare_conversions(plan, out): pretrain, tune, fine-tune, write the answer; again, it goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean

from residua.lab.common.files import Listener, Values, write_json, write_text
from residua.lab.compare.execute import claim, deadline_after, execute, refuse_strangers
from residua.lab.compare.pool import make_pool
from residua.lab.conversions.base import check_designs, write_start
from residua.lab.conversions.plan import BASE, START, ConversionPlan, Rates, Run
from residua.lab.conversions.results import FILE, collect, to_markdown
from residua.lab.runs import final_loss


def compare_conversions(
    plan: ConversionPlan,
    out: Path | str,
    *,
    jobs: int | None = None,
    on: str = "local",
    minutes: float | None = None,
    command: str = "",
    on_event: Listener | None = None,
) -> Values:
    """Run a plan in directory `out`; the results, also written there as conversions.json and conversions.md.

    jobs, on, minutes: as of `residua.compare`.
    """
    deadline = deadline_after(minutes)
    out, listen = Path(out), on_event or (lambda event: None)
    pool = make_pool(on, out)
    from residua.lab.data import check_data, prepare

    refuse_strangers(plan, out)
    texts = {(each.corpus, each.tokenizer) for each in [
        *([] if plan.base is None else [plan.pretraining(out).config]), plan.config(out, BASE, plan.seeds[0]),
    ]}  # fmt: skip
    for corpus, tokenizer in texts:
        check_data(corpus, tokenizer)
    if plan.base is not None:
        check_designs(plan)
    for corpus, tokenizer in texts:  # once, before several runs would make it at once
        prepare(corpus, tokenizer, progress=lambda text: listen({"kind": "data", "text": text}))
    claim(plan, out)

    def make(title: str, runs: Sequence[Run], needed: Callable[[Run], bool] = lambda run: False) -> None:
        listen({"kind": "title", "text": title})
        folders = {run.folder for run in runs if needed(run)}
        execute(
            runs, out, pool=pool, jobs=jobs, threads=plan.threads, listen=listen, needed=folders, deadline=deadline
        )  # fmt: skip

    with closing(pool):
        if plan.base is not None:
            write_start(plan, out / START)
            make("pretraining", [plan.pretraining(out)], lambda run: True)
        chosen = {}
        if plan.tune.lr:
            first = [run for label in plan.labels() for run in plan.tuning(out, label)]
            make("tuning lr", first)
            best = {label: _best(first, out, label)["lr"] for label in plan.labels()}
            then = [run for label in plan.labels() for run in plan.tuning(out, label, best[label])]
            make("tuning residual_lr", then)
            chosen = {label: _best([*first, *then], out, label) for label in plan.labels()}
        runs = plan.runs(out, chosen)
        make("fine-tuning", runs, lambda run: run.label == BASE)
    results = collect(plan, out, chosen, command=command)
    write_json(out / FILE, results)
    write_text((out / FILE).with_suffix(".md"), to_markdown(results))
    return results


def _best(runs: Sequence[Run], out: Path, label: str) -> Rates:
    """The rates of a row with the lowest mean validation loss over the tuning seeds; ties to the smaller."""
    losses: dict[tuple[tuple[str, float], ...], list[float]] = {}
    for run in (run for run in runs if run.label == label):
        rates = {"lr": run.config.lr} | ({} if label == BASE else {"residual_lr": run.config.residual_rate})
        losses.setdefault(tuple(rates.items()), []).append(final_loss(out / run.folder))
    mean, best = min((fmean(found), rates) for rates, found in losses.items())
    if mean == float("inf"):
        raise ValueError(f"every rate of {label} diverged; give smaller ones and another --out")
    return dict(best)
