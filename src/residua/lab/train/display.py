"""What a person sees of a run: a live bar on a terminal, plain lines everywhere else. Both on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from residua.lab.common.files import Record

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


class Display:
    """A listener for `train`, used in a `with`. `every`: seconds between plain training lines."""

    def __init__(self, *, every: float = 10.0) -> None:
        from rich.console import Console

        self.console = Console(stderr=True, markup=False, highlight=False)
        self.every, self._said = every, float("-inf")
        self._bar: Progress | None = None
        self._steps = 0
        self._shown = {"loss": "-", "valid": "-", "speed": "-"}

    def __enter__(self) -> Display:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: Record) -> None:
        show: Callable[[Record], None] | None = getattr(self, f"_{event['kind']}", None)
        if show is not None:
            show(event)

    def _say(self, text: str) -> None:
        self.console.print(text, soft_wrap=not self.console.is_terminal)  # there one event is one line, however long

    def _data(self, event: Record) -> None:
        self._say(event["text"])

    def _start(self, event: Record) -> None:
        self._steps = event["steps"]
        begins = "from the start" if event["kind"] == "start" else f"on from step {event['step']}"
        self._say(
            f"{event['design']}: {event['parameters']:,} parameters ({event['stream_parameters']:,} of the stream), "
            f"{event['steps']} steps of {event['tokens_per_step']:,} tokens, {event['passes']:.2f} passes, {begins}, "
            f"in {event['out']}{_ranks(event)}"
        )
        if self.console.is_terminal:
            self._bar = _bar(self.console)
            self._task = self._bar.add_task(event["design"], total=self._steps, completed=event["step"], numbers="")
            self._bar.start()

    _resumed = _start

    def _relaid(self, event: Record) -> None:
        before, now = event["before"], event["now"]
        self._say(
            f"until step {event['step']} on {before['processes']} ranks ({before['parallel']}), from here on "
            f"{now['processes']} ({now['parallel']}): the same batches, other last bits"
        )

    def _damaged(self, event: Record) -> None:
        self._say(
            f"warning: checkpoint {event['checkpoint']} is damaged ({event['reason']}); "
            f"going on from step {event['step']} instead"
        )

    def _train(self, event: Record) -> None:
        speed = event["time"]["tokens_per_second"]
        if self._bar is not None:
            self._show(event["step"], loss=f"{event['loss']:.3f}", speed=f"{speed:,.0f}")
        elif time.monotonic() - self._said >= self.every:
            self._said = time.monotonic()
            self._say(
                f"step {event['step']}/{self._steps}  loss {event['loss']:.4f}  gradient {event['gradient_norm']:.3f}  "
                f"lr {event['lr']:.2e}  {speed:,.0f} tokens/s"
            )

    def _valid(self, event: Record) -> None:
        bits = f"{event['bits_per_byte']:.4f}"
        if self._bar is not None:
            self._show(event["step"], valid=bits + _routing(event))
        else:
            self._say(
                f"step {event['step']}/{self._steps}  valid loss {event['loss']:.4f}  "
                f"perplexity {event['perplexity']:.2f}  bits/byte {bits}  passes {event['passes']:.2f}{_routing(event)}"
            )

    def _saved(self, event: Record) -> None:
        if self._bar is None:
            self._say(f"step {event['step']}/{self._steps}  saved {event['checkpoint']}")

    def _show(self, step: int, **numbers: str) -> None:
        self._shown |= numbers
        text = "loss {loss}  valid {valid} bits/byte  {speed} tokens/s".format(**self._shown)
        assert self._bar is not None  # a plain display says lines instead
        self._bar.update(self._task, completed=step, numbers=text)


def _ranks(event: Record) -> str:
    return f", on {event['ranks']} ranks ({event['parallel']})" if "ranks" in event else ""


def _routing(event: Record) -> str:
    """What a validation saw of the routing, where the run looks at it."""
    seen = event.get("routing", {}).get("network", {})
    if seen.get("max_weight") is None:
        return ""
    return f"  max weight {seen['max_weight']:.3f}  entropy {seen['normalised_entropy']:.3f}"


def _bar(console: Console) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
        console=console,
        refresh_per_second=4,
    )
