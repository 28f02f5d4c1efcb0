"""gather(runs): everything the page shows, as plain values; the page is drawn from this and from nothing else.

The numbers are those of `lab.figures` (loss, depth, quality), of the results of a comparison (the table), of the
plan of the model (predicted cost), and of one look at each checkpoint with a prompt (tokens, gradients, attention).
A view whose data a run does not have is named in `absent`, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from residua.lab import figures
from residua.lab.common.files import Record, Values
from residua.lab.compare.plan import PLAN
from residua.lab.compare.series import read_series
from residua.lab.diagnose import Ablation
from residua.lab.plots.charts import PAPER
from residua.lab.plots.colour import DIVERGING, SEQUENTIAL
from residua.lab.plots.parted import by_size
from residua.lab.plots.style import look_of
from residua.lab.report import explorer as explorers
from residua.lab.report import extra
from residua.lab.report.costs import costs
from residua.lab.report.look import Look, look
from residua.lab.report.runs import run_data
from residua.lab.report.summary import summary
from residua.lab.report.text import visible, visible_token, visible_tree
from residua.lab.runs import FinishedRun, Series, rounded
from residua.lab.train import CheckpointError, load_model

FORMAT = 1
PROMPT = "Return a list of the words in the string. Return a list of the lines."
MOST_TOKENS = 128
VALIDATED, PROMPTED = "validation text", "the prompt"
"""What mean weights are means over."""
ASK = "Not measured: residua report with --ablate runs the models once for every source of every site."
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Looked:
    """What the seeds of a series showed on the prompt; None and the reason where they could not be asked."""

    tokens: list[str] | None
    looks: list[Look | None]
    reason: str = ""


def gather(
    *runs: Path | str,
    read: Sequence[Series] | None = None,
    prompt: str = PROMPT,
    checkpoints: bool = True,
    ablate: bool = False,
    progress: Progress | None = None,
) -> Values:
    """The data of a page for a comparison, or for one or several runs.

    read:        what lies in these directories, where somebody has read it already.
    prompt:      the text whose tokens are followed through every model.
    checkpoints: whether to load the models; without, the page has means only.
    ablate:      whether to measure the loss without each source of each site, on validation text.
    """
    if not runs:
        raise ValueError("name a directory that residua compare or residua train wrote")
    if not prompt:
        raise ValueError("the prompt is empty; give at least one character")
    if ablate and not checkpoints:
        raise ValueError("knock-outs need the models: drop --ablate or --no-checkpoints")
    planned = list(read or read_series(*runs))
    tell = progress or (lambda text: None)
    looked = {each.slug: _look(each, prompt, checkpoints, ablate, tell) for each in planned if each.seeds}
    kept = {each.slug for each in planned if all(seed.routing is not None for seed in each.seeds)}
    notes: list[str] = []
    planned = [_completed(each, looked.get(each.slug), notes) for each in planned]
    drawn = figures.collect(planned)
    shown = [each for each in planned if each.seeds]
    first = Path(runs[0])
    compared = (first / PLAN).exists()
    table = summary(first if compared else None, shown, drawn)
    data = page_data(
        shown,
        looked,
        drawn,
        {each.slug: VALIDATED if each.slug in kept else PROMPTED for each in shown},
        title=visible(" + ".join(Path(run).resolve().name for run in runs)),
        kind="comparison" if compared else "runs",
        notes=[*table.pop("notes"), *drawn["notes"], *notes],
        ladder=table.pop("ladder"),
        summary=table,
        curves=_listed(shown, drawn["curves"]),
        quality=_listed(shown, drawn["quality"]),
        prompt=prompt,
        costs=costs(shown, drawn),
        runs=run_data(
            [Path(run) for run in runs],
            shown,
            prompt=None if prompt == PROMPT else prompt,
            looked=checkpoints,
            ablate=ablate,
        ),
    )
    return checked(data, _absent(data, shown, looked, ablate))


def page_data(
    shown: Sequence[Series], looked: Mapping[str, Looked], drawn: Record, samples: Mapping[str, str], **others: Any
) -> Values:
    """What every page has, with the others: the series, and what their records and the prompt say of them.

    samples: what the mean weights of a series are means over.
    """
    routes = {
        each.slug: explorers.explorer(
            drawn["routing"][each.slug],
            [
                (seed.seed, seed.routing, found)
                for seed, found in zip(each.seeds, looked[each.slug].looks, strict=True)
                if seed.routing is not None
            ],
            looked[each.slug].tokens,
            samples[each.slug],
        )
        for each in shown
        if each.slug in drawn["routing"]
    }
    sizes = {
        slug: (size, name)
        for size, rows in by_size({each.slug: each.label for each in shown}).items()
        for slug, name in rows.items()
    }
    said = explorers.bound(routes) + explorers.pack(routes, {slug: found.looks for slug, found in looked.items()})
    return {
        **others,
        "format": FORMAT,
        "notes": [*others["notes"], *said],
        "band": figures.BAND,
        "colours": {"sequential": SEQUENTIAL, "diverging": DIVERGING},
        "series": [
            {"label": visible(each.label), **look_of(drawn, each.slug), "seeds": [seed.seed for seed in each.seeds],
             "baseline": each.slug == each.baseline, "size": sizes[each.slug][0], "name": visible(sizes[each.slug][1])}
            for each in shown
        ],
        "depth": [_depth(drawn, each.slug, looked[each.slug].looks) for each in shown],
        "paper": PAPER,
        "beta": _listed(shown, drawn["beta"]),
        "routing": _listed(shown, routes),
        "paths": [
            extra.paths(_first(looked[each.slug].looks), routes.get(each.slug), each.seeds[0].seed) for each in shown
        ],
        "knockouts": [
            extra.knockouts(_ablations(looked[each.slug].looks), routes.get(each.slug),
                            [seed.seed for seed in each.seeds])
            for each in shown
        ],
        "loops": [extra.passes(routes.get(each.slug)) for each in shown],
        "axes": [
            _axes(routes.get(each.slug), drawn["routing"].get(each.slug), looked[each.slug].looks) for each in shown
        ],
    }  # fmt: skip


def checked(data: Values, absent: Mapping[str, str]) -> Values:
    """The data with their texts made visible; the packed weights are ours and longer than any name."""
    found: Any = visible_tree({**data, "absent": absent})
    for before, after in zip(data["routing"], found["routing"], strict=True):
        if before is not None:
            after["packed"] = before["packed"]
    for before, after in zip(data["paths"], found["paths"], strict=True):
        for old, new in zip(before["targets"], after["targets"], strict=True) if before is not None else ():
            new["packed"] = old["packed"]
    return found


def _look(series: Series, prompt: str, wanted: bool, ablate: bool, tell: Progress) -> Looked:
    nothing: list[Look | None] = [None] * len(series.seeds)
    if not wanted:
        return Looked(None, nothing, "the models were not loaded, as with --records and --no-checkpoints")
    try:
        found: list[Look] = []
        tokens = None
        for seed in series.seeds:
            tell(f"looking at {series.label}, seed {seed.seed}")
            tokens, seen = _look_at(seed, prompt, followed=not found, ablate=ablate)
            found.append(seen)
    except (CheckpointError, OSError, ValueError, KeyError) as error:
        # a run whose checkpoints were deleted to save space still has its curves; a page names no path of a machine
        said = str(error).replace(str(seed.folder), f"seed {seed.seed}")
        return Looked(None, nothing, f"the model cannot be loaded: {visible(said, 300)}")
    return Looked(tokens, [*found])


def _look_at(seed: FinishedRun, prompt: str, *, followed: bool, ablate: bool) -> tuple[list[str], Look]:
    """The tokens of the prompt and what a seed does with them; `followed` back from their logits, for the first."""
    import torch

    from residua.lab.data import load_tokenizer

    config = seed.recipe
    if seed.finetuned:
        raise ValueError(f"it is a fine-tuned checkpoint; residua inspect {seed.folder.name} shows its reads")
    kept = seed.folder / "tokenizer.json"
    if not kept.is_file() and config.tokenizer != "bytes":
        raise ValueError("the run keeps no tokenizer.json")
    tokenizer = load_tokenizer(kept.read_text() if kept.is_file() else '{"name": "bytes"}')
    ids = tokenizer.encode(prompt)[: min(MOST_TOKENS, config.context)]
    if not ids:
        raise ValueError("the prompt has no token")
    model = load_model(seed.folder)
    names = {"named": lambda index: visible_token(tokenizer, index)} if followed else {}
    seen = look(model, torch.tensor([ids]), **names)
    if ablate and seen.weights:
        seen = replace(seen, ablation=extra.ablated(model, seed))
    return [visible_token(tokenizer, index) for index in ids], seen


def _completed(series: Series, looked: Looked | None, notes: list[str]) -> Series:
    """A run of `residua train` keeps no routing: what the prompt showed stands for it, and is called that."""
    if looked is None or all(seed.routing is not None for seed in series.seeds) or not all(looked.looks):
        return series
    notes.append(f"{series.label}: its routing is that of the prompt; only residua compare averages validation text.")
    pairs = zip(series.seeds, looked.looks, strict=True)
    return replace(series, seeds=[replace(seed, routing=found.record) for seed, found in pairs if found is not None])


def _first(looks: Sequence[Look | None]) -> Values | None:
    """The paths of the first seed, which alone is followed back."""
    return None if not looks or looks[0] is None else looks[0].paths


def _ablations(looks: Sequence[Look | None]) -> list[Ablation | None]:
    return [None if one is None else one.ablation for one in looks]


def _listed(shown: Sequence[Series], section: Record) -> list[Any]:
    return [section.get(each.slug) for each in shown]


def _depth(drawn: Record, slug: str, looks: Sequence[Look | None]) -> Values | None:
    """The numbers over depth, with the similarity of the sources, and the prompt's gradients where there are no
    others."""
    depth = drawn["depth"].get(slug)
    if depth is None:
        return None
    alike = drawn["sources"].get(slug) or dict.fromkeys(("cosine", "effective_rank"), [None] * len(depth["sites"]))
    found = {**depth, "cosine": alike["cosine"], "effective_rank": alike["effective_rank"], "gradient_of": "validation"}
    seen = [each.record["sites"] for each in looks if each is not None]
    if seen and all(value is None for value in depth["gradient_norm"]):
        found["gradient_norm"] = figures.means([site["gradient_norm"] for site in sites] for sites in seen)
        found["gradient_of"] = "prompt"
    return found


def _axes(route: Record | None, routing: Record | None, looks: Sequence[Look | None]) -> Values:
    """The same number on both axes: the mean weight of what lies 0, 1, 2, ... steps back."""
    found: Values = {"depth": None, "sequence": None}
    # parallel streams, which every site reads alike, are neither older nor newer than each other
    if route is not None and routing is not None and len({tuple(reads) for reads in route["reads"]}) > 1:
        found["depth"] = {
            "sites": route["sites"],
            "weights": [
                [row[source] for source in reversed(reads)]
                for row, reads in zip(routing["weights"], route["reads"], strict=True)
            ],
            "signed": routing["signed"],
        }
    seen = [each.attention for each in looks if each is not None]
    if seen and seen[0]:
        found["sequence"] = {
            "sites": list(seen[0]),
            "weights": [
                [rounded(fmean(values)) for values in zip_longest(*(each[site] for each in seen), fillvalue=0.0)]
                for site in seen[0]
            ],
        }
    return found


def _absent(data: Record, shown: Sequence[Series], looked: Mapping[str, Looked], ablate: bool) -> dict[str, str]:
    """Views without data, and why."""
    said: dict[str, str] = {}
    reasons: dict[str, list[str]] = {}
    for each in shown:
        if reason := looked[each.slug].reason:
            reasons.setdefault(reason, []).append(each.label)
    because = "; ".join(f"{', '.join(labels)}: {reason}" for reason, labels in reasons.items())
    if len(reasons) == 1 and len(next(iter(reasons.values()))) == len(shown):
        because = f"{next(iter(reasons)).capitalize()}."
    if not any(data["routing"]):
        said["routing"] = because or "No design here mixes sources: there are no weights to show."
    if not any(each and each["tokens"] for each in data["routing"]):
        said["tokens"] = because or "No design here mixes sources."
    if not any(data["paths"]):
        said["paths"] = because or "No design here mixes sources: there are no paths to tell apart."
    if not any(data["knockouts"]):
        said["knockouts"] = because or (
            "No design here mixes sources: there is none to take away." if not any(data["routing"]) else ASK
        )
    if not any(data["depth"]):
        said["depth"] = because or "No run here was looked at site by site."
    if not any(each[axis] for each in data["axes"] for axis in ("depth", "sequence")):
        said["axes"] = because or "No design here reads along depth, and no layout attends along the sequence."
    if not any(data["costs"]):
        said["costs"] = "The runs keep neither their configuration nor their vocabulary, so nothing can be predicted."
    return {key: visible(text, 600) for key, text in said.items()}
