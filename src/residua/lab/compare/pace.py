"""The pace of every row of a plan: seconds of an update, all rows timed in turn in one run.

    OUT/pace.json                          in the directory of a comparison
    DIR/pace/<digest of the rows>.json     among records

The runs of a table are made on several days and beside other work, so that ratios of their own clocks are of machines
as much as of designs. Here all rows of a size make an update a round, in an order that rotates, and ratios are taken
inside a round; the baselines of all sizes have rounds of their own. The baseline against itself is the control: what
lies within it is not resolved.

Random tokens, the plan's batch, context and threads, a process of its own on cores of its own. What an update costs
does not depend on the rate, the seed or the tokens.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from residua.lab.common.expect import read_expected
from residua.lab.common.files import Listener, Record, Values, json_digest, read_json, write_json
from residua.lab.common.hardware import hardware
from residua.lab.common.tables import count
from residua.lab.compare.plan import ComparePlan, Variant
from residua.lab.compare.pool_base import environment
from residua.lab.runs import rounded

PACE = "pace.json"
FORMAT = 1
ROUNDS = 15
"""Of one attempt."""
ATTEMPTS = 3
WITHIN = 0.01
"""A control beyond this asks for as many rounds again."""
GROUP = 6
"""Rows of one interleaved run besides the baseline: a round of more takes so long that the machine changes within it,
and all models of a round are in memory."""
MOST = 1_000_000
"""Updates of a model that is only timed: more than it makes, so that its rate is still about zero."""
VARIES = ("seed", "lr", "residual_lr", "steps")
"""Fields of a run that do not change what an update costs."""
SHAPE: Record = {
    "rows_digest": str,
    "rounds": int,
    "control": float,
    "hardware": str,
    "threads": int,
    "rows": [{"slug": str, "label": str, "seconds": float, "slowdown": ({"value": float, "resolved": bool}, None)}],
}


def digest_of_rows(plan: ComparePlan) -> str:
    """A name of what is timed: every row's settings, whatever its rates and seeds."""
    rows = {}
    for variant in plan.variants():
        settings = plan.config(variant, plan.seeds[0]).to_json()
        rows[variant.slug] = {key: value for key, value in settings.items() if key not in VARIES}
    return json_digest(rows)[:16]


def time_rows(plan: ComparePlan, out: Path, vocab: int, listen: Listener) -> None:
    """Time the rows of a plan on this machine, in a process of its own, into `out`.

    vocab: ids of the plan's tokenizer.
    """
    listen({"kind": "title", "text": "timing updates"})
    job, made = out / "jobs" / PACE, out / PACE
    job.parent.mkdir(parents=True, exist_ok=True)
    write_json(job, {"plan": plan.to_json(), "vocab": vocab})
    made.unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", "from residua.lab.compare.pace import main; main()", str(job), str(made)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | environment(plan.threads), text=True,
        start_new_session=True,  # Ctrl-C reaches this process, and the other ends when its pipe is closed
    )  # fmt: skip
    assert process.stdout is not None
    with process:
        for line in process.stdout:
            listen({"kind": "data", "text": line.rstrip()})
    if process.returncode or not made.exists():
        raise ValueError(f"updates could not be timed (exit code {process.returncode}); its reason is above")


def read_pace(plan: ComparePlan, out: Path) -> Values | None:
    """What was timed in the directory of a comparison; None where nothing was. That of other rows is refused."""
    path = out / PACE
    if not path.exists():
        return None
    found = read_expected(path, SHAPE)
    if found["rows_digest"] != digest_of_rows(plan):
        raise ValueError(f"{path} has the times of other rows than the plan's; delete it, and --timed makes it again")
    return dict(found)


def seconds_of(found: Record | None) -> Mapping[str, float]:
    """Seconds of an update by row; none where nothing was timed."""
    return {} if found is None else {row["slug"]: row["seconds"] for row in found["rows"]}


def unresolved(found: Record | None) -> set[str]:
    """Labels of rows whose updates were not told from their baseline's."""
    rows = () if found is None else found["rows"]
    return {row["label"] for row in rows if row["slowdown"] is not None and not row["slowdown"]["resolved"]}


def note(found: Record | None) -> list[str]:
    """What a reader must know of the seconds of a table."""
    if found is None:
        return []
    return [
        f"speed, equal time and speedup/CPU s are of updates timed in turn, {found['rounds']} rounds or more on "
        f"{found['hardware']} with {count(found['threads'], 'thread')}, the baseline against itself within "
        f"{100 * found['control']:.1f} %; not of the clocks of the runs, which were made at other times."
    ]


def measure(plan: ComparePlan, vocab: int, tell: Callable[[str], None] = lambda text: None) -> Values:
    """Seconds of an update of every row, here and now: those of the first baseline, times ratios to it and to the
    baseline of the row's size."""
    from residua.lab.bench.device import measuring_on
    from residua.lab.bench.timing import Timing, interleave_until
    from residua.lab.compare.estimate import on_random_tokens
    from residua.lab.train.reproducible import device_of, reproducible

    controls: list[float] = []
    slowdown: dict[str, Values | None] = {}
    seconds: dict[str, float] = {}
    some = plan.config(plan.variants()[0], plan.seeds[0])

    def timed(base: Variant, rows: Sequence[Variant]) -> Timing:
        tell(f"timing updates of {', '.join(each.label for each in (base, *rows))}")
        forms = {
            each.slug: on_random_tokens(plan.config(each, plan.seeds[0]), MOST, vocab=vocab).update
            for each in (base, *rows)
        }
        timing, tried = interleave_until(forms, controlled=base.slug, within=WITHIN, attempts=ATTEMPTS, least=ROUNDS)
        controls.append(tried[-1])
        return timing

    with measuring_on(device_of(some)), reproducible(some):
        first, *others = _by_baseline(plan)
        timing = timed(first, others)
        for base in (first, *others):
            ratio = 1.0 if base is first else timing.ratio(first.slug, base.slug, first.slug).value
            seconds[base.slug], slowdown[base.slug] = timing.typical(first.slug) * ratio, None
        for base, rows in _by_baseline(plan).items():
            for group in (rows[start : start + GROUP] for start in range(0, len(rows), GROUP)):
                timing = timed(base, group)
                for each in group:
                    found = timing.ratio(base.slug, each.slug, base.slug)
                    seconds[each.slug] = seconds[base.slug] * found.value
                    slowdown[each.slug] = {key: _short(value) for key, value in found.to_json().items()}
    return {
        "format": FORMAT,
        "rows_digest": digest_of_rows(plan),
        "rounds": ROUNDS,
        "control": rounded(max(controls)),
        "hardware": hardware(device_of(some)),
        "threads": plan.threads,
        "rows": [
            {"slug": each.slug, "label": each.label, "seconds": rounded(seconds[each.slug]),
             "slowdown": slowdown[each.slug]}
            for each in plan.variants()
        ],
    }  # fmt: skip


def _by_baseline(plan: ComparePlan) -> dict[Variant, list[Variant]]:
    """The rows that are compared with each baseline, in the order of the plan."""
    found: dict[Variant, list[Variant]] = {}
    for variant in plan.variants():
        rows = found.setdefault(plan.baseline_of(variant), [])
        rows += [variant] if variant != plan.baseline_of(variant) else []
    return found


def _short(value: object) -> object:
    return rounded(value) if isinstance(value, float) else value


def main() -> None:
    """`main JOB_JSON PACE_JSON`, as `time_rows` starts it."""
    from residua.lab.bench import regime
    from residua.lab.compare.worker import end_with_parent

    end_with_parent()
    job, made = map(Path, sys.argv[1:])
    given = read_json(job)
    plan = ComparePlan.from_json(given["plan"])
    cores = regime.pin(plan.threads)
    found = measure(plan, given["vocab"], lambda text: print(text, flush=True))
    told = regime.describe(plan.threads, cores)
    write_json(made, {**found, "regime": told})
