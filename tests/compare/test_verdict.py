"""The closing lines of a comparison: what was found, what was not, and a command that would run."""

import math
import re
import shlex
from dataclasses import asdict
from statistics import stdev

import pytest
from typer.testing import CliRunner

from residua.cli import app
from residua.lab.common.stats import found_at, paired
from residua.lab.compare.verdict import MOST_NAMED, MOST_SEEDS, detectable, lines, verdict, with_seeds

BASE = (2.0, 2.1, 2.2)
AHEAD, BEHIND, NEAR, NOISE = (1.81, 1.9, 2.02), (2.15, 2.26, 2.34), (2.0, 2.08, 2.19), (2.1, 2.0, 2.3)
COMMAND = "residua compare --plan recipes/demo.toml --out runs/demo --jobs 2"


def results(command=COMMAND, **losses):
    rows = [{"label": "standard", "baseline": True, "difference": None}]
    for label, own in losses.items():
        gap = paired(own, BASE[: len(own)])
        rows.append({"label": label, "baseline": False, "difference": asdict(gap) | {"significant": gap.significant}})
    seeds = len(next(iter(losses.values()), BASE))
    return {"rows": rows, "plan": {"seeds": list(range(seeds))}, "command": command}


def test_what_is_significant_is_found_and_the_rest_is_not():
    told = verdict(results(canon=AHEAD, ddl=BEHIND, dense=NEAR, delta=NOISE), "runs/demo")
    better, worse = told["found"].split("; ")
    gap = paired(AHEAD, BASE)
    interval = f"95 % interval {-gap.high:.3f} to {-gap.low:.3f}"
    assert better == (
        f"significantly better than standard (3 seeds): canon by {-gap.mean:.3f} nats per token ({interval})"
    )
    assert worse.startswith("significantly worse than standard (3 seeds): ddl by 0.150 nats")
    assert "delta (+0.033) and dense (-0.010)" in told["unclear"]
    sizes = sorted(paired(own, BASE).detectable for own in (NEAR, NOISE))
    assert f"the minimum detectable effect is {sizes[0]:.3f} to {sizes[1]:.3f} nats (80 % power)" in told["unclear"]
    shown = lines(told)
    assert [line.split(":")[0] for line in shown[:3]] == ["Found", "Not significant", "Next"]
    assert shown[3].strip() == told["command"]


def test_of_many_rows_the_largest_are_named_and_the_rest_counted():
    rows = {f"row{place}": tuple(loss + place / 1000 for loss in NOISE) for place in range(MOST_NAMED + 3)}
    unclear = verdict(results(**rows), "runs/demo")["unclear"]
    assert unclear.startswith(f"row{MOST_NAMED + 2} (+")
    assert unclear.count("row") == MOST_NAMED
    assert " and 3 more against standard; " in unclear


def test_more_seeds_are_as_many_as_would_tell_the_nearest():
    """By the definition of the detectable difference, at the spread that was seen."""
    found = results(dense=NEAR, delta=NOISE)
    nearest, seen = found["rows"][1], abs(found["rows"][1]["difference"]["mean"])
    gaps = [own - base for own, base in zip(NEAR, BASE, strict=True)]
    for seeds in (3, 6, 9):
        expected = found_at(0.05, seeds - 1) * stdev(gaps) / math.sqrt(seeds)
        assert detectable(nearest, seeds) == pytest.approx(expected)
    words = shlex.split(verdict(found, "runs/demo")["command"])
    wanted = int(words[words.index("--seeds") + 1])
    assert 6 < wanted < MOST_SEEDS
    assert detectable(nearest, wanted) <= seen < detectable(nearest, wanted - 1)
    assert words[-1] == f"runs/demo-{wanted}-seeds"


def test_without_intervals_nothing_is_judged_and_three_seeds_come_next():
    told = verdict(results(dense=NEAR[:1]), "out")
    assert told["found"] == "nothing is judged: 1 seed gives no interval."
    assert told["unclear"] == ""
    assert told["command"].endswith("--seeds 3 --out out-3-seeds")
    alone = verdict(results(), "out")
    assert alone["command"] == alone["next"] == ""
    assert lines(alone) == ["Found: there is nothing to compare with."]


def test_where_all_is_told_the_next_command_looks_at_the_sources():
    told = verdict(results(canon=AHEAD), "runs/my comparison")
    assert told["unclear"] == ""
    assert told["command"] == "residua report 'runs/my comparison' --ablate"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (COMMAND, "residua compare --plan recipes/demo.toml --jobs 2 --seeds 6 --out runs/demo-6-seeds"),
        ("residua compare -d a --seeds 3 -o runs/demo", "residua compare -d a --seeds 6 --out runs/demo-6-seeds"),
        ("residua compare -d a --seeds=3 --out=x", "residua compare -d a --seeds 6 --out runs/demo-6-seeds"),
        ("residua compare -d a --so-far --out x", "residua compare -d a --seeds 6 --out runs/demo-6-seeds"),
        (
            "residua compare -d a --until-resolved 1e-4 --most-seeds=7 --out x",
            "residua compare -d a --seeds 6 --out runs/demo-6-seeds",
        ),
        ("", ""),
        ("residua report runs/demo", ""),
    ],
)
def test_command_is_the_typed_one_with_other_seeds(command, expected):
    assert with_seeds(command, "runs/demo/", 6) == expected


def test_next_command_of_a_plan_is_one_that_would_run(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text('designs = ["standard", "delta"]\nsizes = [{ depth = 2, width = 16, heads = 2 }]\n')
    told = verdict(results(f"residua compare --plan {plan} --out {tmp_path}/a", dense=NEAR), f"{tmp_path}/a")
    done = CliRunner().invoke(app, [*shlex.split(told["command"])[1:], "--dry-run"])
    assert done.exit_code == 0, done.output
    words = shlex.split(told["command"])
    assert done.output.startswith(f"2 rows x {words[words.index('--seeds') + 1]} seeds")


def test_the_level_is_that_of_the_table():
    """Of intervals that are wider for several looks, and of what is detectable among several rows."""
    found = results(canon=AHEAD, dense=NEAR)
    found["statistics"] = {"alpha": 0.05, "rows": 2, "mde_rows": 2, "looks": 10}
    told = verdict(found, "out")
    assert "(99.5 % interval" in told["found"]
    wanted, row = int(re.search(r"--seeds (\d+)", told["command"])[1]), found["rows"][2]
    assert f"would be {detectable(row, wanted, 0.05 / 20):.3f} nats" in told["next"]
    assert detectable(row, 3, 0.05 / 20) == pytest.approx(row["difference"]["detectable"])


def test_nothing_comes_next_beyond_the_most_seeds_and_of_conversions():
    many = results(dense=NEAR)
    many["rows"][1]["difference"] |= {"seeds": 9, "significant": False}
    assert verdict(many, "out")["command"] == ""
    moved = results(canon=AHEAD)
    for row in moved["rows"]:
        row["after"] = {}
    assert verdict(moved, "out")["command"] == ""
