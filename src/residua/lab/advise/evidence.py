"""What is known of each design's quality and speed, and who says so: papers, independent runs, and our own results.

A published number is written here with its source. Ours are read from `results/*/results.json` when advice is asked
for, so that they are never older than the files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

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

    def to_json(self) -> dict[str, Any]:
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


_DELTA = "Delta Attention Residuals, arXiv 2605.18855"
_KIMI = "Attention Residuals, arXiv 2603.15031"
_DDL = "Deep Delta Learning, arXiv 2601.00417"
_MUDD = "MUDDFormer, arXiv 2502.12170"
_DCA = "DeepCrossAttention, arXiv 2502.06785"
_FACTORY = "wdlctc/hyper-connection-factory"
_MHAR = "the MHAR paper's comparison"

_FALSE_START = "its AttnRes started from random queries, which the AttnRes paper does not"
_BLOCKS = "a mixture of experts of so many active parameters; about eight blocks"
_ESTIMATED = "its size is our estimate"
_MIXTURE = "a mixture of experts; parameters are the active ones"
_ONE_SEED = "one seed a row"

# design, parameters in millions, before and after, "ppl" or "loss", source, kind, note
_LOSSES: tuple[tuple[str, float, float, float, str, str, Kind, str], ...] = (
    ("delta:blocks=4", 220, 38.71, 37.08, "ppl", _DELTA, "paper", _ONE_SEED),
    ("delta:blocks=4", 533, 32.00, 31.16, "ppl", _DELTA, "paper", _ONE_SEED),
    ("delta:blocks=4", 1044, 29.70, 29.19, "ppl", _DELTA, "paper", _ONE_SEED),
    ("delta:blocks=4", 7570, 17.43, 16.00, "ppl", _DELTA, "paper", _ONE_SEED),
    ("delta", 220, 38.71, 36.83, "ppl", _DELTA, "paper", _ONE_SEED),
    ("delta", 533, 32.00, 31.05, "ppl", _DELTA, "paper", _ONE_SEED),
    ("delta", 1044, 29.70, 29.13, "ppl", _DELTA, "paper", _ONE_SEED),
    ("attnres:blocks=4", 220, 38.71, 37.39, "ppl", _DELTA, "independent", _FALSE_START),
    ("attnres:blocks=4", 1044, 29.70, 31.76, "ppl", _DELTA, "independent", _FALSE_START),
    ("attnres:blocks=4", 7570, 17.43, 18.58, "ppl", _DELTA, "independent", _FALSE_START),
    ("attnres:blocks=8", 194, 1.931, 1.909, "loss", _KIMI, "paper", _BLOCKS),
    ("attnres:blocks=8", 436, 1.766, 1.746, "loss", _KIMI, "paper", _BLOCKS),
    ("attnres:blocks=8", 528, 1.719, 1.693, "loss", _KIMI, "paper", _BLOCKS),
    ("attnres", 194, 1.931, 1.899, "loss", _KIMI, "paper", _MIXTURE),
    ("attnres", 436, 1.766, 1.737, "loss", _KIMI, "paper", _MIXTURE),
    ("attnres", 304, 0.0, -0.032, "loss", _FACTORY, "independent", _ONE_SEED),
    ("attnres", 85, 0.0, -0.013, "loss", _FACTORY, "independent", ""),
    ("attnres", 350, 3.290, 3.345, "loss", _MHAR, "independent", "by the authors of Delta"),
    ("attnres", 1000, 3.175, 3.315, "loss", _MHAR, "independent", "by the authors of Delta"),
    ("attnres:window=8,evicted=drop", 436, 1.766, 1.764, "loss", _KIMI, "paper", "a short window over depth"),
    ("denseformer", 436, 1.766, 1.767, "loss", _KIMI, "independent", "mixed sublayer outputs, not block states"),
    ("denseformer", 378, 18.61, 17.84, "ppl", "DenseFormer, arXiv 2402.02622", "paper", f"48 blocks; {_ESTIMATED}"),
    (
        "denseformer:dilation=4,period=5",
        378,
        18.61,
        17.87,
        "ppl",
        "DenseFormer, arXiv 2402.02622",
        "paper",
        "48 blocks",
    ),
    ("mudd", 405, 11.68, 10.83, "ppl", _MUDD, "paper", _ONE_SEED),
    ("mudd", 85, 0.0, -0.070, "loss", _FACTORY, "independent", "diverged at 304M without prepost"),
    ("mudd:prepost=all", 304, 0.0, -0.071, "loss", _FACTORY, "independent", _ONE_SEED),
    ("mudd:prepost=all", 85, 0.0, -0.065, "loss", _FACTORY, "independent", ""),
    (
        "dca:window=2",
        300,
        15.14,
        14.41,
        "ppl",
        _DCA,
        "paper",
        f"LM1B, 24 blocks; {_ESTIMATED}; its gain shrinks with width",
    ),
    ("dca", 300, 15.14, 14.35, "ppl", _DCA, "paper", f"LM1B, 24 blocks; {_ESTIMATED}; its gain shrinks with width"),
    ("hyper", 304, 0.0, -0.036, "loss", _FACTORY, "independent", _ONE_SEED),
    ("hyper", 85, 0.0, -0.046, "loss", _FACTORY, "independent", ""),
    ("hyper", 1000, 0.0, -0.027, "loss", "Hyper-Connections, arXiv 2409.19606", "paper", _MIXTURE),
    ("mhc", 304, 0.0, -0.040, "loss", _FACTORY, "independent", _ONE_SEED),
    ("mhc", 85, 0.0, -0.050, "loss", _FACTORY, "independent", ""),
    ("mhc", 436, 1.766, 1.747, "loss", _KIMI, "independent", _MIXTURE),
    ("mhc", 27_000, 0.0, -0.021, "loss", "mHC, arXiv 2512.24880", "paper", "a mixture of experts of 27B in all"),
    ("ddl", 124, 2.8543, 2.8482, "loss", _DDL, "paper", _ONE_SEED),
    ("ddl", 353, 2.6053, 2.6039, "loss", _DDL, "paper", _ONE_SEED),
    ("ddl:channels=4", 124, 2.8543, 2.8321, "loss", _DDL, "paper", "no matched control with four channels"),
    ("ddl:channels=4", 353, 2.6053, 2.5790, "loss", _DDL, "paper", "no matched control with four channels"),
)

# design, parameters in millions, tokens per second over the standard network's, source, kind, note
_SPEEDS: tuple[tuple[str, float, float, str, Kind, str], ...] = (
    ("ddl", 124, 0.88, _DDL, "paper", "H200"),
    ("ddl:channels=4", 124, 0.68, _DDL, "paper", "H200, unfused"),
    ("mudd", 405, 0.80, _MUDD, "paper", "the lowest it reports"),
    ("mudd", 2800, 0.96, _MUDD, "paper", "the highest it reports"),
    ("dca:window=2", 300, 5.39 / 8.14, _DCA, "paper", "24 blocks"),
    ("dca", 300, 3.72 / 8.14, _DCA, "paper", "24 blocks"),
    ("denseformer", 378, 4.65 / 5.94, "DenseFormer, arXiv 2402.02622", "paper", "inference, 48 blocks"),
    ("denseformer:dilation=4,period=5", 378, 5.72 / 5.94, "DenseFormer, arXiv 2402.02622", "paper", "inference"),
    ("mhc", 304, 0.53, _FACTORY, "independent", "unfused, 8 x H100"),
    ("mudd:prepost=all", 304, 0.53, _FACTORY, "independent", "unfused, 8 x H100"),
    ("hyper", 304, 0.51, _FACTORY, "independent", "unfused, 8 x H100"),
    ("attnres", 304, 0.38, _FACTORY, "independent", "unfused, 8 x H100"),
    ("attnres:blocks=8", 3000, 1 / 1.04, _KIMI, "paper", "fused; under 4 % with a pipeline"),
    ("attnres:blocks=8", 1000, 0.70, "torchtitan RFC 3029", "independent", f"unfused, one RTX 5090; {_ESTIMATED}"),
)


def published() -> list[Evidence]:
    """Everything above."""
    found = []
    for design, size, before, after, unit, source, kind, note in _LOSSES:
        effect = after - before if unit == "loss" else math.log(after / before)
        found.append(Evidence(design=design, effect=effect, parameters=size * 1e6, source=source, kind=kind, note=note))
    for design, size, speed, source, kind, note in _SPEEDS:
        found.append(Evidence(design=design, parameters=size * 1e6, speed=speed, source=source, kind=kind, note=note))
    return found


def results_folder() -> Path | None:
    """`results` here, or in the repository that this package runs from; None where there is neither."""
    for place in (Path("results"), Path(__file__).resolve().parents[4] / "results"):
        if place.is_dir():
            return place
    return None


def measured(folder: Path | None) -> list[Evidence]:
    """Every row of every comparison in the folder that is not its baseline."""
    return [] if folder is None else [one for file in result_files(folder) for one in _rows(file, folder)]


def result_files(folder: Path | None) -> list[Path]:
    """The committed comparisons."""
    return [] if folder is None else sorted(folder.glob("*/results.json"))


def solved(folder: Path | None) -> list[Solved]:
    """Every row of every task in the folder that is not its baseline: `results/NAME/tasks/TASK.json`."""
    if folder is None:
        return []
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


def _rows(file: Path, folder: Path) -> Iterator[Evidence]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        rows, notes = found["rows"], "; ".join(found.get("notes", []))
        for row in rows:
            if row["baseline"] or row["difference"] is None:
                continue
            gap = row["difference"]
            yield Evidence(
                design=row["design"],
                layout=row["layout"],
                effect=gap["mean"],
                decided=gap["significant"],
                parameters=row["parameters"],
                speed=row["speed"],
                source=f"{cited(file, folder)} (our own, {gap['seeds']} seeds)",
                kind="ours",
                note=(f"95 % interval {gap['low']:+.4f} to {gap['high']:+.4f}" + (f"; {notes}" if notes else "")),
            )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not a results file of residua compare: {error!r}") from None
