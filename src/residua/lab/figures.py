"""collect(series): the data of every plot, from the runs of a comparison, from one run, or from several.

Plain dicts, lists and numbers that go through JSON unchanged; the plots and the report are drawn from these and from
nothing else. Series are keyed by their folder name (slug) in the order of the plan. Over the seeds of a series stand
the mean and, as band, the lowest and the highest seed: with a handful of seeds that is what was seen, and no claim
about seeds that were not run. Numbers are rounded to six digits; None stands for what is not defined.

    labels    slug -> label                              baseline  slug, or None if it has not finished
    seeds     slug -> seeds finished                     missing   labels of series without a finished run
    band      what low and high are                      notes     what a reader must know, one sentence each
    curves    slug -> tokens, cpu_seconds (mean), loss and bits_per_byte (mean, low, high), of the validations
    routing   slug -> sites, sources, weights [site][source] or None where a site cannot read a source, signed
    depth     slug -> sites, position, deep, and one list for each of `OF_A_READ`, `OF_A_SITE` and the source count
    sources   slug -> sites, and how alike the sources of each are: cosine (mean over pairs), effective_rank
    beta      slug -> sites, and what DDL's gate does there: regimes (share of each), edges and counts of a histogram
    quality   slug -> bits_per_byte (mean, low, high), tokens_per_cpu_second, and over the baseline: speed, memory
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from residua.lab.common.files import Record, Values
from residua.lab.diagnose.condensed import mean_cosine
from residua.lab.diagnose.record import in_deep_third
from residua.lab.diagnose.show import weight_grid
from residua.lab.runs import Series, mean_if_all, rounded
from residua.plan import Plan

BAND = "lowest to highest seed"

OF_A_READ = ("max_weight", "normalised_entropy", "effective_sources")
"""What a site with a single source has none of: it has no choice."""
OF_A_SITE = ("stream_rms", "output_rms", "gradient_norm")


def collect(planned: Sequence[Series]) -> Values:
    """The data of every plot of what `residua.lab.compare.read_series` read."""
    series = {each.slug: each for each in planned if each.seeds}
    baseline = planned[0].baseline
    return {
        "labels": {slug: each.label for slug, each in series.items()},
        "baseline": baseline if baseline in series else None,
        "seeds": {slug: len(each.seeds) for slug, each in series.items()},
        "missing": [each.label for each in planned if not each.seeds],
        "band": BAND,
        "notes": _notes(planned),
        "curves": {slug: _curve(each) for slug, each in series.items()},
        **of_records(series),
        "quality": {slug: _quality(each, series.get(each.baseline)) for slug, each in series.items()},
    }


def of_records(series: Mapping[str, Series]) -> dict[str, Values]:
    """The sections that come from the routing records of the seeds alone."""
    records = {slug: read for slug, each in series.items() if (read := _records(each)) is not None}
    parts = {"routing": _routing, "depth": _depth, "sources": _sources, "beta": _beta}
    return {
        name: {slug: found for slug, each in records.items() if (found := part(each)) is not None}
        for name, part in parts.items()
    }


def _notes(planned: Sequence[Series]) -> list[str]:
    said = [
        f"{each.label}: {len(each.seeds)} of {each.planned} seeds so far."
        for each in planned
        if 0 < len(each.seeds) < each.planned
    ]
    missing = [each.label for each in planned if not each.seeds]
    if missing:
        said.append(f"Left out, not finished or diverged: {', '.join(missing)}.")
    if len({seed.result["fingerprint"] for each in planned for seed in each.seeds}) > 1:
        said.append("FORCED: these runs saw different corpora or tokenizers; their losses do not compare.")
    return said


def _curve(series: Series) -> Values:
    by_tokens = [
        {line["tokens"]: {**line, "cpu_seconds": seed.seconds_at(line)} for line in seed.validations}
        for seed in series.seeds
    ]
    tokens = sorted(set.intersection(*(set(lines) for lines in by_tokens)))
    if not tokens:
        raise ValueError(f"the seeds of {series.label} were validated at different steps; {_STRANGER}")

    def at(read: Callable[[Record], float]) -> list[list[float]]:
        return [[read(lines[count]) for lines in by_tokens] for count in tokens]

    return {
        "tokens": tokens,
        "cpu_seconds": [rounded(fmean(each)) for each in at(lambda line: line["cpu_seconds"])],
        "loss": _bands(at(lambda line: line["loss"])),
        "bits_per_byte": _bands(at(lambda line: line["bits_per_byte"])),
    }


def _routing(records: Sequence[Record]) -> Values | None:
    """The mean weights of the sites that mix; None for a design without any."""
    mixing = [
        site for site in records[0]["sites"] if all(site["site"] in each.get("mean_weights", {}) for each in records)
    ]
    if not mixing:
        return None
    own = {site["site"]: means(each["mean_weights"][site["site"]] for each in records) for site in mixing}
    kinds = {site["routing"]["weights"] for each in records for site in each["sites"] if "routing" in site}
    return weight_grid(records[0]["sites"], own, signed="signed" in kinds)


def _depth(records: Sequence[Record]) -> Values | None:
    """Every site's numbers in reading order; None for a model whose sites are not known."""
    sites = records[0]["sites"]
    if not sites:
        return None
    blocks = [site["layer"] for site in sites]
    plan = Plan.regular(1, max(1, blocks[-1]))
    return {
        "sites": [site["site"] for site in sites],
        "position": [rounded(b + blocks[:i].count(b) / blocks.count(b)) for i, b in enumerate(blocks)],
        "deep": [in_deep_third(plan, block) for block in blocks],
        "source_count": [len(site["sources"]) for site in sites],
        **{key: means([_of_a_read(site, key) for site in each["sites"]] for each in records) for key in OF_A_READ},
        **{key: means([site.get(key) for site in each["sites"]] for each in records) for key in OF_A_SITE},
    }


def _sources(records: Sequence[Record]) -> Values | None:
    """How alike the sources of a site are; None where no record compared them."""

    def cosine(site: Record) -> float | None:
        n = len(site["sources"])
        return None if n < 2 else mean_cosine(site.get("routing", {}), n)

    found = {
        "cosine": means([cosine(site) for site in each["sites"]] for each in records),
        "effective_rank": means([_of_a_read(site, "effective_rank") for site in each["sites"]] for each in records),
    }
    if all(value is None for values in found.values() for value in values):
        return None
    return {"sites": [site["site"] for site in records[0]["sites"]], **found}


def _beta(records: Sequence[Record]) -> Values | None:
    """The gate of DDL at the sites that have one; None for the other designs."""
    gated = [site["site"] for site in records[0]["sites"] if "beta" in site]
    if not gated:
        return None
    seeds = [[site["beta"] for site in each["sites"] if site["site"] in gated] for each in records]
    return {
        "sites": gated,
        "regimes": {
            name: means([beta["regimes"][name] for beta in betas] for betas in seeds) for name in seeds[0][0]["regimes"]
        },
        "edges": seeds[0][0]["edges"],
        "counts": [
            [sum(counts) for counts in zip(*(betas[place]["counts"] for betas in seeds), strict=True)]
            for place in range(len(gated))
        ],
    }


def _quality(series: Series, baseline: Series | None) -> Values:
    return {
        "baseline": None if baseline is None else baseline.slug,
        "parameters": series.seeds[0].result["parameters"],
        "bits_per_byte": _band([run.result["bits_per_byte"] for run in series.seeds]),
        "tokens_per_cpu_second": _short(series.speed),
        **{key: _short(value) for key, value in series.over(baseline).items()},
    }


_STRANGER = "they are not of one plan: delete the odd one and run the comparison again"


def _records(series: Series) -> list[Record] | None:
    """The routing of every seed, all of one shape; None where it was not looked at."""
    records = [seed.routing for seed in series.seeds if seed.routing is not None]
    if len(records) < len(series.seeds):
        return None
    shapes = [[(site["site"], site["sources"]) for site in each["sites"]] for each in records]
    for seed, shape in zip(series.seeds, shapes, strict=True):
        if shape != shapes[0]:
            raise ValueError(f"{seed.folder} has other sites or sources than {series.seeds[0].folder}; {_STRANGER}")
    return records


def _of_a_read(site: Record, key: str) -> float | None:
    return site["routing"].get(key) if "routing" in site and len(site["sources"]) > 1 else None


def means(seeds: Iterable[Sequence[float | None]]) -> list[float | None]:
    """The mean over seeds of each entry; None where a seed has none, or none that is finite."""
    return [_short(mean_if_all(each)) for each in zip(*seeds, strict=True)]


def _short(value: float | None) -> float | None:
    return None if value is None else rounded(value)


def _band(values: Sequence[float]) -> dict[str, float]:
    return {"mean": rounded(fmean(values)), "low": rounded(min(values)), "high": rounded(max(values))}


def _bands(points: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    found = [_band(point) for point in points]
    return {key: [band[key] for band in found] for key in ("mean", "low", "high")}
