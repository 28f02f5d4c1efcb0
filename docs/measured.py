"""What the pages show of the files in `results`: a table and the command that wrote it, or what to run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from markup import embedded, fence, linked, table

ROOT = Path(__file__).resolve().parent.parent
REPORTS = "reports"
"""The folder of the site that has them."""


def bench(kind: str) -> str:
    """The table of a committed file of `residua bench`, with its command; what to run where there is none yet."""
    from residua.lab.bench import record
    from residua.lab.bench.table import markdown, sheets

    file = ROOT / "results" / "bench" / f"{kind}.json"
    if not file.exists():
        return "Not measured yet for this version: `residua bench all --out results/bench --resume`."
    found = record.read(file)
    tables = "\n".join(markdown(sheet) for sheet in sheets(found))
    if "regime" not in found:  # compiled, and not run on anything
        return f"{fence(found['command'], 'sh')}\n\n{tables}"
    made_on = f"{found['regime']['processor']}, torch {found['regime']['torch']}."
    return f"{fence(found['command'], 'sh')}\n\n{tables}\n\n{made_on}"


def bars() -> str:
    """The bars of the fast path beside the committed files."""
    from residua.lab.bench.table import markdown
    from residua.lab.bench.targets import gathered, judged

    return markdown(judged(gathered(ROOT / "results" / "bench")))


def results(name: str) -> str:
    """The table of a committed comparison, with its command; what to run where there is none yet."""
    from residua.lab.compare.table import to_markdown

    file = ROOT / "results" / name / "results.json"
    if not file.exists():
        return f"Not run yet: `residua compare --plan recipes/{name}.toml --out runs/{name}`."
    found = json.loads(file.read_text())
    page = (
        f"\n\n[The page of this comparison]({REPORTS}/{name}.html): curves, routing, every run."
        if name in reports()
        else ""
    )
    # GitHub wants the bar of a name escaped inside code, and the parser of these pages shows the escape
    shown = to_markdown(found).replace("\\|", "|")
    return f"{fence(found['command'], 'sh')}\n\n{shown}{page}"


def reports() -> dict[str, Path]:
    """The pages of `residua compare` that are committed beside their tables."""
    return {page.parent.name: page for page in sorted((ROOT / "results").glob("*/report.html"))}


def claims() -> str:
    """What is claimed of residual streams, beside what the files in `results` say of it."""
    from residua.lab.advise.paper_claims import judge

    judged = judge(ROOT / "results")
    rows = [
        (
            one.claim.claim,
            linked(one.claim.who),
            one.measured(),
            one.interval(),
            f"<b>{one.verdict}</b>",
            one.source.replace("/", "/<wbr>"),  # a path is one word to a browser, and the other columns gave it room
        )
        for one in judged
    ]
    titles = ("claim", "who says so", "measured here", "95 % interval", "verdict", "file")
    shown = table(titles, rows, wide=("claim",))
    commands = dict.fromkeys(f"{one.command}  # {one.source}" for one in judged if one.command)
    return f"{shown}\n\n{fence(chr(10).join(commands), 'sh')}"


def figure(name: str) -> str:
    """A picture of a committed comparison that `tools/update_figures` drew; nothing where there is none yet."""
    there = (ROOT / "docs" / "assets" / f"{name}.svg").exists()
    return f"![{name.replace('-', ', ')}](assets/{name}.svg)" if there else ""


ROUTED = {"max_weight": 2, "normalised_entropy": 2, "effective_sources": 1, "collapsed_share": 2}
"""What is shown of a read, with how many digits; a read of too few sources cannot collapse."""


def routing(name: str) -> str:
    """How sharp the reads of a comparison's deep third are."""
    file = ROOT / "results" / name / "results.json"
    if not file.exists():
        return "Not run yet."
    rows = [
        (
            f"<code>{row['label']}</code>",
            *(
                "-" if (value := row["routing"][f"deep_{key}"]) is None else f"{value:.{digits}f}"
                for key, digits in ROUTED.items()
            ),
        )
        for row in json.loads(file.read_text())["rows"]
        if row["routing"]["deep_max_weight"] is not None
    ]
    return table(("design", "max weight", "entropy (0 to 1)", "effective sources", "collapsed sites"), rows)


def repeated(name: str) -> str:
    """A comparison beside an earlier run of the same plan, whose kernels rounded otherwise."""
    from residua.lab.compare.table import difference

    folder = ROOT / "results" / name
    earlier, later = (json.loads((folder / file).read_text()) for file in ("earlier.json", "results.json"))
    losses = [{run["folder"]: run["loss"] for run in found["runs"]} for found in (earlier, later)]

    def moved(label: str) -> str:
        gaps = [
            abs(losses[0][run["folder"]] - losses[1][run["folder"]]) for run in later["runs"] if run["label"] == label
        ]
        return "0, to the last bit" if not any(gaps) else "below 0.0001" if max(gaps) < 1e-4 else f"{max(gaps):.4f}"

    rows = [
        (f"<code>{old['label']}</code>", difference(old), difference(new), moved(old["label"]))
        for old, new in zip(earlier["rows"], later["rows"], strict=True)
    ]
    return table(("design", "vs baseline, earlier", "vs baseline, now", "largest change of a seed"), rows)


def task_results(name: str) -> str:
    """The tables of the tasks beside a comparison, each with its command."""
    from residua.lab.compare.table import difference, spread

    def shown(found: dict[str, Any]) -> str:
        rows = [
            (
                f"<code>{row['design']}</code>",
                f"<code>{row['layout']}</code>",
                f"{row['parameters']:,}",
                f"{row['lr']:g}",
                spread(row["accuracy"], 3),
                difference(row, 3, "no difference"),
            )
            for row in found["rows"]
        ]
        titles = ("design", "layout", "parameters", "lr", f"accuracy (chance {found['chance']:.3f})", "vs baseline")
        notes = "\n".join(f"- {note}" for note in found["notes"])
        return f"{fence(found['command'], 'sh')}\n\n{table(titles, rows)}\n\n{notes}"

    files = sorted((ROOT / "results" / name / "tasks").glob("*.json"))
    return "\n\n".join(shown(json.loads(file.read_text())) for file in files) or "Not run yet."


def finetuned(name: str) -> str:
    """What fine-tuning a converted checkpoint beside its base gave."""
    folder = ROOT / "results" / name
    if not (folder / "finetune.json").exists():
        return f"Not run yet: `tools/convert_experiment --out results/{name}`."
    found = json.loads((folder / "finetune.json").read_text())
    gap, first, early = found["final"]["difference"], found["first_loss"], found["first_steps"]
    said = [
        f"first losses differ by at most {first['largest_gap']:.1e}",
        f"{early['inside_band']} of {early['of']} losses of the first {early['steps']} updates lie in the base's band "
        "(two deviations over its seeds); paired with the base's, they differ by at most "
        f"{early['largest_paired_gap']:.4f}",
        f"final validation loss, converted less base: {gap['mean']:+.4f} nats, 95 % interval {gap['low']:+.4f} to "
        f"{gap['high']:+.4f}" + ("" if gap["significant"] else ", which holds zero: no difference seen"),
    ]
    lines = "\n".join(f"- {one}" for one in said)
    shown = embedded(folder / "finetune.svg", "Losses of the converted checkpoint and of its base while fine-tuning")
    return f"{fence(found['command'], 'sh')}\n\n{lines}\n\n{shown}"


def finder() -> str:
    """What finding and proving an anatomy takes."""
    file = ROOT / "results" / "finder.json"
    if not file.exists():
        return "Not measured yet: `tools/measure_finder`."
    found = json.loads(file.read_text())
    tiny, (one, whole) = found["tiny"], found["large"]
    above, layer = (f"{whole[key] / 1e6:.0f} MB" for key in ("above_bytes", "layer_bytes"))
    return (
        f"`{found['command']}`, CPU seconds of one thread ({found['hardware']}): at most {tiny['seconds']:.1f} for any "
        f"of {tiny['types']} types, tiny (`{tiny['slowest']}`); {whole['seconds']:.0f} for {whole['layers']} layers of "
        f"the shape of Llama 3 8B in bfloat16, and {one['seconds']:.1f} for the first of them alone. The most memory "
        f"above the model's own was {above}, where a layer is {layer}: the one in float32 is as large again. The check "
        "of the logits that follows needs the whole model in float32; `check=False` leaves it out."
    )


def conversions(name: str) -> str:
    """The table of a committed comparison of conversions, with its command and verdict."""
    from residua.lab.compare.verdict import lines, verdict
    from residua.lab.conversions.results import FILE, enough, to_markdown

    file = ROOT / "results" / name / FILE
    if not file.exists():
        return f"Not run to its end yet: `residua compare --plan recipes/{name}.toml --out runs/{name}`."
    found = json.loads(file.read_text())
    told = [enough(found), *lines(verdict(found, f"runs/{name}") | {"command": ""})]
    return f"{fence(found['command'], 'sh')}\n\n{to_markdown(found)}\n" + "\n\n".join(told)
