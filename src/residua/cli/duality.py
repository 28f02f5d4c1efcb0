"""`residua duality`: the equality of depth reads and window attention, on random and on trained models."""

from __future__ import annotations

from pathlib import Path

import typer

from residua.cli._flags import path_option, refuse_output, show, tell
from residua.lab.common.files import Values, write_json
from residua.lab.common.tables import print_table, terminal


def command(
    runs: list[Path] = typer.Option(
        [],
        "--run",
        "-r",
        help="Output directory of residua train; repeatable. Without it, three models are trained.",
    ),
    steps: int = typer.Option(60, help="Training steps of each model."),
    corpus: str = typer.Option("pydoc", help="Training corpus."),
    seeds: int = typer.Option(2, metavar="COUNT", help="Number of random stacks."),
    out: Path = path_option(None, "--out", help="Also write the JSON to this file."),
    as_json: bool = typer.Option(False, "--json", help="Print every row as JSON."),
    markdown: bool = typer.Option(False, "--markdown", help="Print the table as Markdown."),
) -> None:
    """Check that a depth read equals sliding-window attention on the transposed stack, and when it does not.

    The exit code is 1 if any check fails.
    """
    if as_json and markdown:
        raise ValueError("--json and --markdown exclude each other; give one")
    if steps < 1 or seeds < 1:
        raise ValueError(f"steps={steps} and seeds={seeds} must be at least 1")
    refuse_output(out, ".json")
    if not runs:
        from residua.lab.data import check_data

        check_data(corpus, "bytes")
    for run in runs:
        if not (run / "config.json").is_file():
            raise ValueError(f"{run} is not a run directory: it has no config.json")
    from residua.lab import duality

    subjects = [duality.random_subject(seed) for seed in range(seeds)]
    if runs:
        subjects += [duality.from_run(run) for run in runs]
    else:
        from residua.lab.train import Interrupted

        try:
            subjects += duality.trained_subjects(
                steps=steps,
                corpus=corpus,
                on_event=lambda event: tell(f"trained {event['design']}: loss {event['loss']:.3f}"),
            )
        except Interrupted as stopped:
            tell(f"residua: interrupted by {stopped.signal.name}; the models were being trained, and nothing is kept")
            raise typer.Exit(stopped.exit_code) from None
    report = duality.examine(subjects, on_event=lambda name: tell(f"examining {name}"))
    report["command"] = _spelled(runs, steps, corpus, seeds)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, report)
    show(report, as_json, lambda report: typer.echo(duality.as_markdown(report)) if markdown else _show(report))
    if not report["passed"]:
        raise typer.Exit(1)


def _spelled(runs: list[Path], steps: int, corpus: str, seeds: int) -> str:
    """The command without the places of this machine."""
    given = [f"--run {run.name}" for run in runs] if runs else [f"--steps {steps}", f"--corpus {corpus}"]
    return " ".join(["residua duality", *given, f"--seeds {seeds}"])


def _show(report: Values) -> None:
    from residua.lab.duality.report import TITLES, cells, summary

    console = terminal(160)
    trained = [model["name"] for model in report["models"] if model["trained"]]
    console.print(f"Random stacks: {len(report['models']) - len(trained)}. Models: {'; '.join(trained) or 'none'}.")
    console.print("The equality needs: " + "; ".join(report["conditions"]) + ".\n")
    left = [title for title in TITLES if title not in ("error", "must be", "cases")]
    print_table(TITLES, [cells(row) for row in summary(report)], left=left, width=160)
    console.print(
        "error: RMS error over RMS reference, the largest (or smallest, where it must differ) of all models, windows "
        "and gradients. --json has every one of them.\n\nObjections to the paper, and what the checks show"
    )
    for one in report["settles"]:
        verdict = "shown" if one["passed"] else "NOT SHOWN"
        console.print(f"  {one['asked']}\n    {one['answer']} [{verdict}: {one['shown_by']}]")
    console.print("\n" + ("Everything passed." if report["passed"] else "FAILED: see the rows marked FAIL."))
