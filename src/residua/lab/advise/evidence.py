"""What is known of each design's quality and speed, and who says so: here our own results, in `literature` the others'.

Ours are read from `results/*/results.json` when advice is asked for: in a checkout from there, elsewhere from the
copies that the package was built with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from residua.lab.checkout import checkout
from residua.lab.common.files import Record
from residua.lab.common.halves import kept
from residua.lab.common.tables import confidence, count

Kind = Literal["paper", "independent", "ours"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One comparison with the standard network."""

    design: str
    layout: str = "attn,mlp"
    effect: float | None = None
    """Validation loss less the standard network's, in nats; below zero is better. None: speed or a verdict alone."""
    decided: bool = True
    """Whether the difference is beyond its noise. Published runs have one seed and are taken at their word."""
    parameters: float
    """Of the model it was seen in."""
    speed: float | None = None
    """Tokens per second over the standard network's."""
    source: str
    kind: Kind
    note: str = ""

    @property
    def verdict(self) -> str:
        """`better`, `worse`, or `no difference seen`."""
        if self.effect is None:
            return "speed only"
        return "no difference seen" if not self.decided else "better" if self.effect < 0 else "worse"

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self) | {"verdict": self.verdict}


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """A row of one of our synthetic tasks, beside its baseline."""

    task: str
    design: str
    layout: str
    accuracy: float
    baseline: float
    decided: bool
    source: str

    @property
    def name(self) -> str:
        """Of the task, without its options."""
        return self.task.partition(":")[0]

    def __str__(self) -> str:
        noise = "" if self.decided else ", no difference seen"
        shares = f"{self.accuracy:.2f} of 1 against {self.baseline:.2f}"
        return f"{self.task}: {placed(self.design, self.layout)} {shares}{noise}, {self.source}"


def placed(design: str, layout: str) -> str:
    """The design, and its layout unless that is the plain one."""
    return design if layout == "attn,mlp" else f"{design} in {layout}"


def results_folder() -> Path:
    """Our committed results: those of the repository that this package runs from, or else those shipped in it."""
    root = checkout()
    return Path(str(resources.files("residua.lab.advise"))) / "results" if root is None else root / "results"


def measured(folder: Path) -> list[Evidence]:
    """Every row of every comparison in the folder that is not its baseline."""
    return [one for file in result_files(folder) for one in _rows(file, folder)]


def result_files(folder: Path) -> list[Path]:
    """The comparisons in the folder."""
    return sorted(folder.glob("*/results.json"))


def solved(folder: Path) -> list[Solved]:
    """Every row of every task in the folder that is not its baseline: `results/NAME/tasks/TASK.json`."""
    return [one for file in sorted(folder.glob("*/tasks/*.json")) for one in _tasks(file, folder)]


def _tasks(file: Path, folder: Path) -> Iterator[Solved]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        baseline = found["rows"][0]["accuracy"]["mean"]
        for row in found["rows"][1:]:
            yield Solved(
                task=found["task"],
                design=row["design"],
                layout=row["layout"],
                accuracy=row["accuracy"]["mean"],
                baseline=baseline,
                decided=row["difference"]["significant"],
                source=cited(file, folder),
            )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{file} is not a file of residua tasks: {error!r}") from None


def cited(file: Path, folder: Path) -> str:
    """The path to name: from the folder of results on."""
    return f"{folder.resolve().name}/{file.relative_to(folder).as_posix()}"


def by_seed(label: str, key: str, results: Record) -> dict[int, float]:
    """A number of every reported run of a row, by its seed."""
    runs = [run for run in results.get("runs", ()) if run["label"] == label]
    return {int(Path(run["folder"]).name.removeprefix("seed")): run[key] for run in runs}


def _comes_again(row: Record, rows: Sequence[Record], results: Record) -> bool:
    """Whether both halves of the seeds bear the row's difference out; taken at its word where no runs are listed."""
    base = next(one for one in rows if one["baseline"] and one["size"] == row["size"]) if results.get("runs") else None
    if base is None:
        return True
    own, other = (by_seed(one["label"], "loss", results) for one in (row, base))
    return kept([own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())], True)


def _interval(gap: Record, results: Record) -> str:
    """The interval of a difference; of fewer than three seeds there is none."""
    if gap["low"] is None:
        return "no interval"
    return f"{confidence(results)} interval {gap['low']:+.4f} to {gap['high']:+.4f}"


def _concerning(row: Record, results: Record) -> Iterator[str]:
    """The notes of a table that bear on the difference of one row: its own, its baseline's and those of all rows."""
    base = [one["label"] for one in results["rows"] if one["baseline"] and one["size"] == row["size"]]
    labels = {one["label"] for one in (*results["rows"], *results.get("diverged", ()))}
    if "unfinished" in results:
        yield "the comparison is not finished"
    for note in results.get("notes", ()):
        # a label may begin as another does: the longest is meant
        owner = max((label for label in labels if note.startswith((f"{label}:", f"{label} "))), key=len, default=None)
        if owner in (None, row["label"], *base) and not note.startswith(("UNFINISHED", "speedup:")):
            yield note.rstrip(".")


def _rows(file: Path, folder: Path) -> Iterator[Evidence]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        rows = found["rows"]
        for row in rows:
            if row["baseline"] or row["difference"] is None:
                continue
            gap = row["difference"]
            yield Evidence(
                design=row["design"],
                layout=row["layout"],
                effect=gap["mean"],
                decided=bool(gap["significant"]) and _comes_again(row, rows, found),
                parameters=row["parameters"],
                speed=row["speed"],
                source=f"{cited(file, folder)} (our own, {count(gap['seeds'], 'seed')})",
                kind="ours",
                note="; ".join((_interval(gap, found), *_concerning(row, found))),
            )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not a results file of residua compare: {error!r}") from None
