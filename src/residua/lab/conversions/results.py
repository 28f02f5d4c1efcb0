"""The answer: loss before, at the worst of the first updates, and after, and the difference from going on unconverted.

before      validation loss of the checkpoint, converted or not
rise        largest (training loss - that of the unconverted row on the same batch) of the first `EARLY` updates
after       validation loss at the end
difference  after - that of the unconverted row, seed by seed, with Student's interval; verdicts over all rows by Holm
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from residua.lab.common.files import Record, Values
from residua.lab.common.stats import ALPHA, holm, paired, spread
from residua.lab.common.tables import count, difference, markdown_table, mde, print_table
from residua.lab.common.tables import spread as shown_spread
from residua.lab.conversions.plan import BASE, ConversionPlan, Rates, Run
from residua.lab.runs import FinishedRun, divergence, final_loss, read_run
from residua.lab.train import read_metrics

FORMAT = 1
FILE = "conversions.json"
"""Beside the runs; not results.json, whose rows were trained from random weights."""
EARLY = 50
"""Updates in which a conversion that disturbs its checkpoint would show it."""
FLAT = 0.01
"""Nats: a base that gains less than this by going on for another fine-tune's tokens is called at its plateau."""


def collect(plan: ConversionPlan, out: Path, chosen: Mapping[str, Rates], *, command: str = "") -> Values:
    """Everything the table, the page and the verdict are made from."""
    runs = plan.runs(out, chosen)
    broken = [
        {"folder": run.folder, "label": run.label, **why} for run in runs if (why := divergence(out / run.folder))
    ]
    gone = {one["label"] for one in broken}
    read = {
        (run.label, run.config.seed): read_run(out / run.folder, run.config.seed, run.config)
        for run in runs
        if run.label not in gone
    }
    losses = {key: _updates(one.folder) for key, one in read.items()}
    if len({one.result["fingerprint"] for one in read.values()}) > 1:
        raise ValueError(f"the runs in {out} saw different corpora and do not compare; run them again on one")
    rows = []
    for label in (label for label in plan.labels() if label not in gone):
        of_row = [read[label, seed] for seed in plan.seeds]
        of_base = [read[BASE, seed] for seed in plan.seeds]
        rises = [_rise(losses[label, seed], losses[BASE, seed]) for seed in plan.seeds]
        own, base = ([run.result["loss"] for run in each] for each in (of_row, of_base))
        gap = None if label == BASE else asdict(paired(own, base, tests=len(plan.labels()) - 1))
        tried = plan.trials(label)
        rates = dict(chosen.get(label, {}))
        rows.append(
            {
                "label": label,
                "design": label,
                "layout": "attn,mlp",
                "size": "" if plan.base is None else f"{plan.base.depth}x{plan.base.width}",
                "baseline": label == BASE,
                "parameters": of_row[0].result["parameters"],
                "stream_parameters": of_row[0].result["stream_parameters"],
                "rates": rates,
                "trials": plan.trial_count(label),
                "edge": [
                    key
                    for key, rate in rates.items()
                    if rate in _ends([each[key] for each in tried] if key == "lr" else list(plan.tune.residual_lr))
                ],
                "before": asdict(spread([run.validations[0]["loss"] for run in of_row])),
                "rise": None if label == BASE else max(rises),
                "rises": rises,
                "after": asdict(spread(own)),
                "gained": asdict(spread([run.validations[0]["loss"] - run.result["loss"] for run in of_row])),
                "bits_per_byte": asdict(spread([run.result["bits_per_byte"] for run in of_row])),
                "difference": gap,
                "curve": _curve(of_row),
                "cpu_seconds": sum(run.seconds for run in of_row) / len(of_row),
            }
        )
    judged = [row for row in rows if row["difference"] is not None and row["difference"]["p"] is not None]
    for row, p in zip(judged, holm([row["difference"]["p"] for row in judged]), strict=True):
        row["adjusted"] = p
        row["difference"]["significant"] = p <= ALPHA
    for row in rows:
        if row["difference"] is not None:
            row["difference"].setdefault("significant", None)
    results: Values = {
        "format": FORMAT,
        "command": command,
        "plan": plan.to_json(),
        "digest": plan.digest,
        "machine": _machine(next(iter(read.values()))),
        "pretraining": None if plan.base is None else _pretraining(plan, out),
        "rows": rows,
        "runs": [
            {
                "label": run.label,
                "folder": run.folder,
                "before": read[run.label, run.config.seed].validations[0]["loss"],
                "loss": read[run.label, run.config.seed].result["loss"],
            }
            for run in runs
            if run.label not in gone
        ],
        "tuning": _tuning(plan, out, chosen),
        "diverged": broken,
        "statistics": {
            "alpha": ALPHA,
            "rows": len(judged),
            "mde_rows": len(plan.labels()) - 1,
            "over_rows": "Holm",
            "early": EARLY,
        },
    }
    results["notes"] = _notes(results)
    return results


def _updates(folder: Path) -> list[tuple[str, float]]:
    """Batch and loss of every update."""
    return [(line["batch"], line["loss"]) for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "train"]


def _rise(own: list[tuple[str, float]], base: list[tuple[str, float]]) -> float:
    """The largest excess over the unconverted row of the first updates, each on the same batch."""
    early = list(zip(own, base, strict=True))[:EARLY]
    if any(one[0] != other[0] for one, other in early):
        raise ValueError("runs of one seed saw different batches; run both again")
    return max(one[1] - other[1] for one, other in early)


def _curve(runs: list[FinishedRun]) -> list[Values]:
    """The mean validation loss over seeds at every validation."""
    return [
        {"tokens": lines[0].get("tokens", 0), "loss": sum(line["loss"] for line in lines) / len(lines)}
        for lines in zip(*(run.validations for run in runs), strict=True)
    ]


def _pretraining(plan: ConversionPlan, out: Path) -> Values:
    run = plan.pretraining(out)
    read = read_run(out / run.folder, run.config.seed, run.config)
    return {
        "parameters": read.result["parameters"],
        "tokens": read.result["tokens"],
        "passes": read.result["passes"],
        "loss": read.result["loss"],
        "bits_per_byte": read.result["bits_per_byte"],
        "curve": _curve([read]),
        "cpu_seconds": read.seconds,
    }


def _machine(run: FinishedRun) -> Values:
    manifest: Record = run.manifest or {}
    return {"system": manifest.get("machine"), **manifest.get("versions", {}), "hardware": list(run.hardware)}


def _tuning(plan: ConversionPlan, out: Path, chosen: Mapping[str, Rates]) -> list[Values]:
    runs: list[Run] = []
    for label in plan.labels() if plan.tune.lr else ():
        runs += [*plan.tuning(out, label), *plan.tuning(out, label, chosen[label]["lr"])]
    return [
        {
            "label": run.label,
            "lr": run.config.lr,
            "residual_lr": None if run.label == BASE else run.config.residual_rate,
            "seed": run.config.seed,
            "loss": None if divergence(out / run.folder) else final_loss(out / run.folder),
        }
        for run in runs
    ]


def _ends(grid: list[float]) -> tuple[float, ...]:
    return (min(grid), max(grid)) if len(grid) > 1 else ()


def _notes(results: Record) -> list[str]:
    """What a reader must know before believing the table."""
    said, rows = [], results["rows"]
    base = next(row for row in rows if row["baseline"])
    gained = base["gained"]["mean"]
    if results["pretraining"] is not None:
        where = "it was at its plateau" if gained < FLAT else f"it was not at its plateau (a gain below {FLAT:g})"
        said.append(
            f"The checkpoint had seen {results['pretraining']['tokens']:,} tokens. Going on as it is for "
            f"{base['curve'][-1]['tokens']:,} more lowers its loss by {gained:.4f} nats: {where}."
        )
    said += [
        f"{row['label']}: its {' and '.join(row['edge'])} lie at the edge of the grid; a better one may lie outside."
        for row in rows
        if row["edge"]
    ]
    said += [
        f"{row['label']} was tuned by {row['trials']} runs and {base['label']} by {base['trials']}."
        for row in rows
        if row["trials"] != base["trials"]
    ]
    if base["after"]["seeds"] < 3:
        said.append(f"{count(base['after']['seeds'], 'seed')}: no interval below three, and no difference is judged.")
    said += [f"{one['label']} is left out: {one['folder']} diverged, {one['message']}" for one in results["diverged"]]
    return said


def cells(row: Record) -> dict[str, str]:
    """A row of the table, by the titles of its columns."""
    return {
        "row": row["label"],
        "added": f"{row['stream_parameters']:,}",
        "before": f"{row['before']['mean']:.4f}",
        "largest rise": "-" if row["rise"] is None else f"{row['rise']:+.4f}",
        "after": shown_spread(row["after"], 4),
        "gained": f"{row['gained']['mean']:.4f}",
        "vs going on": difference(row),
        "lr": " / ".join(f"{rate:g}" for rate in row["rates"].values()) + ("!" if row["edge"] else ""),
        "CPU s": f"{row['cpu_seconds']:.0f}",
    }


def legend(results: Record) -> str:
    """What the columns mean."""
    seeds = count(len(results["plan"]["seeds"]), "seed")
    alpha = f"{100 * results['statistics']['alpha']:g} %"
    return (
        f"Validation loss, nats per token, mean +- standard deviation over {seeds}. largest rise: of the training loss "
        f"over that of the unconverted row on the same batch, in the first {results['statistics']['early']} updates of "
        f"any seed. vs going on: mean paired difference with its 95 % t interval; n.s.: not significant, {alpha} for "
        f"all rows together (Holm); {mde(results['statistics'].get('mde_rows'))}. "
        "lr: of the checkpoint's weights / of the design's."
    )


def to_markdown(results: Record) -> str:
    """A Markdown table with its notes."""
    rows = [cells(row) for row in results["rows"]]
    lines = [
        markdown_table(rows[0], ([f"`{row['row']}`", *list(row.values())[1:]] for row in rows)),
        "",
        legend(results),
        *(f"- {note}" for note in results["notes"]),
    ]
    return "\n".join(lines) + "\n"


def enough(results: Record) -> str:
    """Whether ordinary fine-tuning was enough: who ends below its start, and what the worst early update cost."""
    rows = [row for row in results["rows"] if not row["baseline"]]
    if not rows:
        return "Was ordinary fine-tuning enough? No conversion is left: all of them diverged."
    higher = [row["label"] for row in rows if row["gained"]["mean"] <= 0]
    worst, early = max(rows, key=lambda row: row["rise"]), results["statistics"]["early"]
    ended = f"not for {', '.join(higher)}, no lower than before" if higher else "all end below where they began"
    return (
        f"Was ordinary fine-tuning enough? Of {count(len(rows), 'conversion')}, {ended}. In the first {early} updates "
        f"no training loss was more than {max(worst['rise'], 0):.4f} nats above that of going on ({worst['label']})."
    )


def show(results: Record) -> None:
    """Print the table to the terminal."""
    rows: list[dict[str, Any]] = [cells(row) for row in results["rows"]]
    print_table(list(rows[0]), [list(row.values()) for row in rows], [legend(results)], results["notes"])
