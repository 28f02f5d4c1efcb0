"""`residua eval`: bits per byte of a corpus, and harness tasks, for a run of ours or a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from residua.cli._flags import show, tell
from residua.extras import need
from residua.lab.common.files import Values


def command(
    model: Path = typer.Argument(..., help="Run directory of train or finetune, or a Hugging Face model directory."),
    corpus: str = typer.Option("pydoc", help="Corpus: pydoc, pycode, pysite, dir:PATH, file:GLOB or hf:NAME."),
    context: int = typer.Option(256, help="Tokens per window."),
    windows: int = typer.Option(0, help="Number of evenly spaced windows; 0: the whole validation split."),
    batch: int = typer.Option(8, help="Windows, or questions of a task, per forward pass."),
    task: list[str] = typer.Option(
        [], "--task", "-t", help="lm-eval task; repeatable. residua_cloze, residua_bits and residua_copy work offline."
    ),
    count: int = typer.Option(64, help="Documents in each residua_* task."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Evaluate a model: loss on a corpus, and lm-eval tasks."""
    if batch < 1 or count < 4 or windows < 0:
        raise ValueError("batch must be at least 1, count at least 4 and windows not negative")
    if context < 2:
        raise ValueError(f"context={context} must be at least 2")
    from residua.lab.data import check_data, prepare
    from residua.lab.evaluate import corpus_loss, open_model

    check_data(corpus, "bytes")
    if task:
        need("eval", "lm_eval")
        from residua.lab.evaluate.harness import check_tasks

        check_tasks(task)
    opened = open_model(model)
    tokens = prepare(corpus, opened.tokenizer, progress=tell)
    found: Values = {"model": str(model), "design": opened.design, "corpus": corpus}
    with _progress() as advance:
        found["loss"] = corpus_loss(opened, tokens, context=context, windows=windows, batch=batch, progress=advance)
    if task:
        from residua.lab.evaluate.harness import evaluate

        found["tasks"] = evaluate(opened, task, tokens, count=count, batch=batch)
    show(found, as_json, _show)


def _show(found: Values) -> None:
    loss = found["loss"]
    typer.echo(
        f"{found['design']} on {found['corpus']}: loss {loss['loss']:.4f}, perplexity {loss['perplexity']:.2f}, "
        f"{loss['bits_per_byte']:.4f} bits/byte ({loss['windows']} windows of {loss['context']} tokens)"
    )
    for name, metrics in found.get("tasks", {}).items():
        shown = [f"{key} {value:.4f}" for key, value in metrics.items() if not key.endswith("_stderr")]
        typer.echo(f"{name}: {', '.join(shown)}")


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("evaluating", total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)
