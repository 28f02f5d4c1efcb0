"""One self-contained page that shows what each design routes, where it collapses, what it costs and how it compares.

write("runs/demo")                     the page of a comparison, runs/demo/report.html
write("runs/a", "runs/b", out=...)     of several runs
write_inspection(data, out=path)       of one prompt in one model, or in two side by side
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from residua.lab.common.files import Record, write_text
from residua.lab.report.data import PROMPT as PROMPT
from residua.lab.report.data import gather as gather
from residua.lab.report.inspection import inspection as inspection
from residua.lab.report.page import render as render
from residua.lab.runs import Series

NAME = "report.html"


def write(
    *runs: Path | str,
    out: Path | str | None = None,
    read: Sequence[Series] | None = None,
    prompt: str = PROMPT,
    checkpoints: bool = True,
    ablate: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Write the page of a comparison or of runs; where it is: `report.html` in the first directory by default.

    `read` is what lies there, where somebody has read it already: `residua.lab.compare` leaves it in its results.
    Equal input gives equal bytes. Nothing is written if anything is wrong.
    """
    found = gather(*runs, read=read, prompt=prompt, checkpoints=checkpoints, ablate=ablate, progress=progress)
    text = render(found)
    path = Path(runs[0]) / NAME if out is None else Path(out)
    write_text(path, text)
    return path


def write_inspection(data: Record | Sequence[Record], out: Path | str) -> Path:
    """Write the page of one prompt in one model or in two; `residua.lab.report.inspection` says what the data are."""
    text = render(inspection(*([data] if isinstance(data, Mapping) else data)))
    write_text(Path(out), text)
    return Path(out)
