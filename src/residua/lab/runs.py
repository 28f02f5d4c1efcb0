"""A finished run as it lies on disk, read once: what results, figures and reports are all made from.

`read_run(folder)` opens every file of a run once. Speed, memory and the means of the routing are properties of what was
read, so that a table, a plot and a page cannot disagree about them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from residua.lab.common.expect import expect, read_expected
from residua.lab.common.files import Record, differing, read_json
from residua.lab.finetune_config import FinetuneConfig
from residua.lab.train import TrainConfig, read_metrics
from residua.lab.train.recipe import Recipe, digest_of
from residua.lab.updates import summarise

RESULT = "result.json"
"""Written when a run has finished."""
ROUTING = "routing.json"
"""Beside the files of a run: how its reads were routed, where it was looked at."""
DIVERGED = "diverged.json"
"""Of a run that broke by its own numbers: step, site and message. It would break again, so it is not run again."""
HARDWARE = "hardware.json"
"""Of a run of a comparison: the kinds of hardware that its updates were made on, in order."""
UPDATES = "updates.json"
"""Of a run that was taken from its record, which has the lines of the validations only: what the updates come to."""
ROUTED = ("max_weight", "normalised_entropy", "effective_sources", "collapsed_share")
_MEANS = dict.fromkeys(ROUTED, (float, None))
SHAPES: Record = {
    RESULT: {
        **dict.fromkeys(("loss", "perplexity", "bits_per_byte"), float),
        **dict.fromkeys(("tokens", "parameters", "stream_parameters"), int),
        **dict.fromkeys(("fingerprint", "design?", "config?", "checkpoint?"), str),
        "time": {"cpu_seconds": float, "peak_memory": float},
    },
    ROUTING: {
        "network?": _MEANS,
        "deep_third?": _MEANS,
        "sites?": [{"site": str, "layer": int, "sources": list}],
        "mean_weights?": dict,
    },
    DIVERGED: {"step": int, "site": str, "message": str},
    HARDWARE: {"kinds": [str]},
    "manifest.json": {"data": dict},
}
"""What is read of each of these files."""
LINE = {
    "train": {"batch?": str},
    "valid": {"loss": float, "time": {"cpu_seconds": float}, "tokens?": int, "bits_per_byte?": float},
}
"""What a line of metrics.jsonl holds, by its kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """What one finished run left behind."""

    folder: Path
    seed: int
    result: Record
    """As `lab.train.Result` has it."""
    validations: Sequence[Record] = ()
    """The lines of the validations, in order."""
    updates: Record | None = None
    """What the updates come to, as `lab.updates.summarise` has it."""
    routing: Record | None = None
    settings: Record | None = None
    """The fields of its `TrainConfig`; None where the folder keeps no config.json."""
    manifest: Record | None = None
    """Data, versions and machine; None where the folder keeps none."""
    hardware: Sequence[str] = ()
    """The kinds of hardware that its updates were made on; none where the folder does not say."""
    update_seconds: float | None = None
    """What an update takes by `lab.compare.pace`, where its comparison has timed them; the run's clock then says
    nothing."""

    @property
    def clock(self) -> str | None:
        """What its seconds are of: seconds of two clocks do not compare, and of none nothing is known."""
        return "updates timed in turn" if self.update_seconds else self.kind

    @property
    def kind(self) -> str | None:
        """The kind of hardware that its speed is of, empty if unknown; None where it moved from one to another."""
        if len(self.hardware) > 1:
            return None
        return self.hardware[0] if self.hardware else ""

    @property
    def build(self) -> str:
        """The torch and the kernels that its numbers come from; empty where the folder does not say."""
        manifest = self.manifest or {}
        said = [("torch", manifest.get("versions", {}).get("torch")), ("kernels", manifest.get("native"))]
        return ", ".join(f"{name} {value}" for name, value in said if value)

    @property
    def finetuned(self) -> bool:
        """Whether it went on from a checkpoint of Hugging Face."""
        return self.settings is not None and "checkpoint" in self.settings

    @property
    def recipe(self) -> Recipe:
        """The configuration, of `residua train` or of `residua finetune`; an error where none is kept."""
        if self.settings is None:
            raise ValueError(f"{self.folder} keeps no config.json")
        return read_recipe(self.settings)

    @property
    def config(self) -> TrainConfig:
        """The configuration of a run of `residua train`."""
        if not isinstance(found := self.recipe, TrainConfig):
            raise ValueError(f"{self.folder} is a run of residua finetune, whose model is not described by its config")
        return found

    @property
    def seconds(self) -> float:
        """Processor seconds of the updates."""
        return self.seconds_at(self.validations[-1]) if self.update_seconds else self.result["time"]["cpu_seconds"]

    def seconds_at(self, validation: Record) -> float:
        """Processor seconds of the updates before a validation."""
        if self.update_seconds:
            return self.update_seconds * validation["step"]
        return validation["time"]["cpu_seconds"]

    @property
    def speed(self) -> float | None:
        """Tokens per processor second; None where the clock did not move."""
        return self.result["tokens"] / self.seconds if self.seconds else None

    @property
    def memory(self) -> int:
        """Bytes of memory at the peak."""
        return self.result["time"]["peak_memory"]

    def loss_at(self, seconds: float) -> float:
        """The validation loss when it had used so many processor seconds, on a line between validations."""
        times, losses = zip(*((self.seconds_at(line), line["loss"]) for line in self.validations), strict=True)
        return float(np.interp(seconds, times, losses))


@dataclass(frozen=True, slots=True)
class Series:
    """The finished seeds of one variant."""

    label: str
    slug: str
    """Its name as a folder, a file and a key."""
    baseline: str
    """The slug of what it is compared with."""
    planned: int
    seeds: Sequence[FinishedRun]

    @property
    def speed(self) -> float | None:
        """Tokens per processor second, the mean over seeds; None where a clock did not move."""
        return mean_if_all(run.speed for run in self.seeds)

    @property
    def memory(self) -> float:
        """Bytes of memory at the peak, the mean over seeds."""
        return fmean(run.memory for run in self.seeds)

    @property
    def hardware(self) -> list[str]:
        """Every kind of hardware that its seeds ran on."""
        return list(dict.fromkeys(kind for run in self.seeds for kind in run.hardware))

    @property
    def builds(self) -> list[str]:
        """Every torch and kernel build that its seeds were made with."""
        return list(dict.fromkeys(run.build for run in self.seeds if run.build))

    def over(self, baseline: Series | None) -> dict[str, float | None]:
        """Speed and memory as multiples of the baseline's; None where one of the two is not known.

        Only seeds of one clock, and for memory on hardware of one kind, are compared: where both have several, the
        mean of the multiples of each.
        """
        if baseline is None:
            return {"speed": None, "memory": None}
        clocks, kinds = self._alike(baseline, "clock"), self._alike(baseline, "kind")
        return {
            "speed": mean_if_all(_ratio(own.speed, base.speed) for own, base in clocks),
            "memory": mean_if_all(_ratio(own.memory, base.memory) for own, base in kinds),
        }

    def _alike(self, baseline: Series, key: str) -> list[tuple[Series, Series]]:
        """Its seeds and the baseline's by what they have in common; without runs of which that is not known."""

        def of(series: Series, value: str) -> Series:
            return replace(series, seeds=[run for run in series.seeds if getattr(run, key) == value])

        values = [value for value in dict.fromkeys(getattr(run, key) for run in self.seeds) if value is not None]
        return [(of(self, value), of(baseline, value)) for value in values if of(baseline, value).seeds]

    def routing_means(self) -> dict[str, float | None]:
        """Of `ROUTED`, over seeds and sites; `deep_` those of the last third of the network."""
        return {
            prefix + key: mean_if_all((run.routing or {}).get(part, {}).get(key) for run in self.seeds)
            for prefix, part in (("", "network"), ("deep_", "deep_third"))
            for key in ROUTED
        }


def read_recipe(settings: Record) -> Recipe:
    """The configuration that a config.json holds: that of a fine-tuning run names a checkpoint."""
    return (FinetuneConfig if "checkpoint" in settings else TrainConfig).from_json(settings)


def read_run(folder: Path, seed: int, config: Recipe | None = None, chosen: Collection[str] = ()) -> FinishedRun:
    """Everything a run left, from one look at each of its files.

    config, chosen: what the run must be a run of, as in `check_belongs`.
    """
    lines: dict[str, list[Record]] = {"train": [], "valid": []}
    metrics, settings = folder / "metrics.jsonl", read_if_there(folder / "config.json")
    if config is not None and settings is not None:
        check_settings(folder, settings, config, chosen)
    for number, line in enumerate(read_metrics(metrics), 1):
        where = f"{metrics}, line {number}"
        expect(where, line, {"kind": str})
        if line["kind"] not in lines:
            raise ValueError(f"{where}: kind is {line['kind']!r}, neither train nor valid")
        expect(where, line, LINE[line["kind"]])
        lines[line["kind"]].append(line)
    if not lines["valid"]:
        raise ValueError(f"{folder / 'metrics.jsonl'} holds no validation; delete {folder} and run it again")
    return FinishedRun(
        folder=folder,
        seed=seed,
        result=read_result(folder, None if settings is None else digest_of(settings)),
        validations=lines["valid"],
        updates=read_if_there(folder / UPDATES) or summarise(lines["train"]),
        routing=_routing(folder),
        settings=settings,
        manifest=read_if_there(folder / "manifest.json"),
        hardware=(read_if_there(folder / HARDWARE) or {"kinds": ()})["kinds"],
    )


def read_updates(folder: Path) -> Record:
    """What the updates of a run come to, whether it ended well or broke."""
    metrics = folder / "metrics.jsonl"
    lines = read_metrics(metrics) if metrics.is_file() else ()
    return read_if_there(folder / UPDATES) or summarise([line for line in lines if line["kind"] == "train"])


def _routing(folder: Path) -> Record | None:
    found = read_if_there(folder / ROUTING)
    if found is not None and not found.keys() & {"network", "sites"}:
        raise ValueError(f"{folder / ROUTING} has no network and no sites; delete {folder} and run it again")
    return found


def read_result(folder: Path, digest: str | None = None) -> Record:
    """The result of a run; an error where it is not one, or not of the configuration with this digest."""
    result = read_expected(folder / RESULT, SHAPES[RESULT])
    check_digest(folder, result, digest)
    return result


def check_digest(folder: Path, result: Record, digest: str | None) -> None:
    """Refuse a result that says it is of another configuration."""
    if digest is not None and result.get("config") != digest:
        raise ValueError(
            f"{folder / RESULT} is the result of another configuration ({result.get('config')}, and config.json there "
            f"is {digest}); delete {folder} and run it again"
        )


def check_belongs(folder: Path, config: Recipe, chosen: Collection[str] = ()) -> None:
    """Refuse the folder of a run that is there, if it is a run of another configuration than this.

    chosen: fields that may be anything, because a search chose them.
    """
    if not (folder / "config.json").is_file():
        return
    settings = read_json(folder / "config.json")
    check_settings(folder, settings, config, chosen)
    if (folder / RESULT).exists():
        check_digest(folder, read_json(folder / RESULT), digest_of(settings))


def check_settings(folder: Path, settings: Record, config: Recipe, chosen: Collection[str] = ()) -> None:
    """Refuse settings that are not those of a configuration, but for the `chosen` ones."""
    here = {key: value for key, value in config.to_json().items() if key not in chosen}
    if found := differing({key: value for key, value in settings.items() if key not in chosen}, here):
        raise ValueError(f"{folder} holds a run of another plan ({found}); move it away, or give another --out")


def is_done(folder: Path) -> bool:
    """Whether a run has its result and its routing."""
    return (folder / RESULT).exists() and (folder / ROUTING).exists()


def divergence(folder: Path) -> Record | None:
    """Where and why a run broke: its `step`, `site` and `message`."""
    return read_if_there(folder / DIVERGED)


def has_ended(folder: Path) -> bool:
    """Whether nothing is left to do for a run: it is done, or it diverged and would again."""
    return is_done(folder) or divergence(folder) is not None


def final_loss(folder: Path) -> float:
    """The validation loss of a run that ended; infinite if it diverged."""
    return math.inf if divergence(folder) else read_result(folder)["loss"]


def _ratio(own: float | None, base: float | None) -> float | None:
    return own / base if own is not None and base else None


def read_if_there(path: Path) -> Record | None:
    """The object in a JSON file, of the shape that `SHAPES` says, or None."""
    return read_expected(path, SHAPES.get(path.name, {})) if path.is_file() else None


def mean_if_all(values: Iterable[float | None]) -> float | None:
    """The mean; None unless every value is there and finite, and there is one."""
    found = list(values)
    known = [value for value in found if value is not None and math.isfinite(value)]
    return fmean(known) if known and len(known) == len(found) else None


def rounded(value: float) -> float:
    """To six significant digits: more than any seed repeats, and short in a file."""
    return float(f"{value:.6g}")
