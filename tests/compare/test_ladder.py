"""Sizes with token budgets, rates that a rule carries, its check, and what a row is worth in the baseline's compute."""

import json
import math

import numpy as np
import pytest
import torch
from scipy import optimize

from residua.lab.compare import ComparePlan
from residua.lab.compare.choice import choose_rates, widest_stable
from residua.lab.compare.results import collect
from residua.lab.compare.sizes import counted_parameters
from residua.lab.compare.speedup import Fitted, Rung, fit
from residua.lab.compare.table import columns, legend, to_csv, to_markdown
from residua.model import Transformer
from tests.compare.fakes import break_run, leave

SIZES = [
    {"depth": 2, "width": 16, "heads": 2, "tokens_per_parameter": 20},
    {"depth": 2, "width": 32, "heads": 2, "tokens_per_parameter": 20},
    {"depth": 4, "width": 64, "heads": 2, "tokens_per_parameter": 20, "seeds": 3},
]
TUNE = {
    "lr": [1e-3, 2e-3, 4e-3, 8e-3],
    "seeds": [100],
    "carry": "width",
    "check": "2x32",
    "check_designs": ["standard"],
}


def plan(**changes):
    given = {
        "designs": ["standard", "mudd"], "sizes": SIZES, "seeds": [0, 1, 2, 3, 4],
        "train": {"context": 16, "batch": 2}, "tune": TUNE,
    }  # fmt: skip
    return ComparePlan.from_json(given | changes)


def test_steps_come_from_the_parameters_of_the_baseline_without_embeddings():
    one = plan()
    for variant in one.variants():
        config = one.config(variant, 0)
        model = Transformer(one.config(one.baseline_of(variant), 0).model(11))
        own = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("embed"))
        assert config.steps == math.ceil(20 * own / 32)
    assert counted_parameters(config) > own  # mudd has more of its own, and no more text


def test_untied_head_is_left_out_too():
    one = plan(train={"context": 16, "batch": 2, "tied": False})
    with torch.device("meta"):
        model = Transformer(one.config(one.variants()[0], 0).model(11))
    own = sum(p.numel() for name, p in model.named_parameters() if not name.startswith(("embed", "head")))
    assert counted_parameters(one.config(one.variants()[0], 0)) == own


def test_sizes_have_seeds_of_their_own():
    counted = {}
    for run in plan().runs({}):
        counted.setdefault(str(run.variant.size), set()).add(run.config.seed)
    assert counted == {"2x16": {0, 1, 2, 3, 4}, "2x32": {0, 1, 2, 3, 4}, "4x64": {0, 1, 2}}


def test_sizes_may_have_some_of_the_rows_only():
    one = plan(sizes=[*SIZES[:2], {**SIZES[2], "designs": ["standard"]}])
    assert [variant.label for variant in one.variants()] == [
        "standard | 2x16", "mudd | 2x16", "standard | 2x32", "mudd | 2x32", "standard | 4x64",
    ]  # fmt: skip
    assert ComparePlan.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_plan_round_trips_and_plans_of_before_keep_their_json():
    one = plan(until={"half_width": 0.01}, sizes=[{**size, "seeds": None} for size in SIZES], most_passes=2)
    assert ComparePlan.from_json(json.loads(json.dumps(one.to_json()))) == one
    plain = ComparePlan.from_json({"designs": ["standard"], "train": {"steps": 3}}).to_json()
    assert set(plain) == {"designs", "layouts", "sizes", "seeds", "baseline", "match", "threads", "tune", "train"}
    assert set(plain["sizes"][0]) == {"width", "depth", "heads", "kv_heads"}
    assert set(plain["tune"]) == {"lr", "residual_lr", "seeds"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"steps": 5}}, "give one of them"),
        ({"sizes": [{"tokens_per_parameter": 0}]}, "tokens_per_parameter is a positive number"),
        ({"sizes": [{**SIZES[0], "seeds": 9}]}, "tune.check"),
        ({"tune": {}, "sizes": [{**SIZES[0], "seeds": 9}]}, "has 9 seeds, and the plan lists 5"),
        ({"tune": {**TUNE, "carry": "depth"}}, "tune.carry is none, width, completep"),
        ({"tune": {"carry": "width"}}, "give tune.lr"),
        ({"tune": {**TUNE, "check": "2x16"}}, "at a size after the first"),
        ({"tune": {**TUNE, "check": ["2x32", "2x16"]}}, "tune.check=2x16"),
        ({"tune": {**TUNE, "check": 2}}, "tune.check is a list"),
        ({"tune": {**TUNE, "check": "2x32", "carry": "none"}}, "checks a rule"),
        ({"tune": {**TUNE, "check": []}}, "needs tune.check"),
        ({"tune": {**TUNE, "check_designs": ["delta"]}}, "not among the designs"),
        ({"sizes": [SIZES[0], {**SIZES[1], "lr": [2e-3]}]}, "carry is none"),
        ({"sizes": [{**SIZES[0], "lr": [2e-3]}], "tune": {}}, "in place of tune.lr"),
        ({"sizes": [{**SIZES[0], "lr": [-1]}], "tune": {"lr": [1e-3]}}, "sizes: lr of 2x16 are positive numbers"),
        ({"sizes": [{**SIZES[0], "lr": [1e-3, 1e-3]}], "tune": {"lr": [1e-3]}}, "lr of 2x16 names a rate twice"),
        ({"until": {"half_width": 0}, "sizes": SIZES[:2]}, "until.half_width is a positive number"),
        ({"until": {"half_width": 0.01, "most_seeds": 4}, "sizes": SIZES[:2]}, "at least the 5 seeds"),
        ({"until": {"half_width": 0.01, "add": 0}, "sizes": SIZES[:2]}, "until.add is a whole number"),
        ({"until": {"half_width": 0.01}, "sizes": SIZES[:2], "seeds": [0, 1]}, "until needs 3 seeds"),
        ({"until": {"half_width": 0.01}}, "no seeds of their own"),
        ({"until": {"width": 0.01}}, "until has no 'width'"),
        ({"sizes": [SIZES[0], {**SIZES[1], "designs": ["mudd"]}]}, "the baseline among them"),
        ({"sizes": [{**SIZES[0], "designs": ["standard"]}, SIZES[1]]}, "tunes every design at the first size"),
        ({"most_passes": -1}, "most_passes is a positive number"),
    ],
)
def test_wrong_ladder_is_one_error(changes, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        plan(**changes)


@pytest.mark.parametrize(
    ("rule", "factors"), [("width", {"2x32": 0.5, "4x64": 0.25}), ("completep", {"2x32": 0.5, "4x64": 0.25 / 2**0.5})]
)
def test_rates_of_the_first_size_are_carried_by_the_rule(tmp_path, rule, factors):
    one = plan(tune={**TUNE, "carry": rule})
    assert {str(run.variant.size) for run in one.tuning()} == {"2x16"}
    for run in one.tuning():
        best = 2e-3 if run.variant.design == "standard" else 4e-3
        leave(tmp_path / run.folder, run.config, 3 + abs(run.config.lr - best))
    rates = choose_rates(one, tmp_path)
    for size, factor in factors.items():
        # a carried rate has six digits
        assert rates[f"standard | {size}"] == {"lr": float(f"{2e-3 * factor:.6g}")}
        assert rates[f"mudd | {size}"] == {"lr": float(f"{4e-3 * factor:.6g}")}
    assert [run.config.lr for run in one.checking(rates)] == pytest.approx([5e-4, 1e-3, 2e-3])
    assert {run.variant.label for run in one.checking(rates)} == {"standard | 2x32"}


def test_rule_may_be_checked_at_several_sizes(tmp_path):
    one = plan(tune={**TUNE, "check": ["2x32", "4x64"]})
    assert ComparePlan.from_json(json.loads(json.dumps(one.to_json()))) == one
    rates = {variant.label: {"lr": 1e-3} for variant in one.variants()}
    assert [run.variant.label for run in one.checking(rates)] == 3 * ["standard | 2x32"] + 3 * ["standard | 4x64"]


def test_sizes_may_have_rates_of_their_own(tmp_path):
    own = [2e-3, 6e-3]
    one = plan(sizes=[SIZES[0], {**SIZES[1], "lr": own}], tune={"lr": [1e-3, 2e-3, 4e-3], "seeds": [100]})
    assert ComparePlan.from_json(json.loads(json.dumps(one.to_json()))) == one
    tried = {
        size: sorted({run.config.lr for run in one.tuning() if str(run.variant.size) == size})
        for size in ("2x16", "2x32")
    }
    assert tried == {"2x16": [1e-3, 2e-3, 4e-3], "2x32": own}
    for run in one.tuning():
        leave(tmp_path / run.folder, run.config, 3 + abs(run.config.lr - 2e-3))
    rates = choose_rates(one, tmp_path)
    assert {each["lr"] for each in rates.values()} == {2e-3}
    for run in one.runs(rates):
        leave(tmp_path / run.folder, run.config, 3 + 0.01 * run.config.seed)
    rows = collect(one, tmp_path)["rows"]
    assert {row["size"]: row["edge"] for row in rows} == {"2x16": False, "2x32": True}
    assert {row["size"]: row["trials"] for row in rows} == {"2x16": 3, "2x32": 2}


def test_plan_with_one_checked_size_keeps_its_json():
    assert plan().to_json()["tune"]["check"] == "2x32"
    assert plan(tune={**TUNE, "check": ["2x32"]}).digest == plan().digest


def climbed(out, *, gap=-0.1, slower=1.0, best=1e-3, exponent=0.2, **settings):
    """A ladder whose baseline lies on a curve with a little noise, and a row that is better by `gap` everywhere."""
    one = plan(**settings)
    draw = np.random.default_rng(0)
    for run in one.tuning():
        if run.config.lr > 5e-3 and run.variant.design == "mudd":
            break_run(out / run.folder)
        else:
            leave(out / run.folder, run.config, 3 + abs(run.config.lr - 2e-3))
    rates = choose_rates(one, out)
    for run in one.checking(rates):
        leave(out / run.folder, run.config, 3 + abs(run.config.lr - best))
    noise = {}
    for run in one.runs(rates):
        own = run.variant.design == "mudd"
        tokens = run.config.steps * run.config.tokens_per_step
        cost = counted_parameters(one.config(one.baseline_of(run.variant), 0)) * tokens
        key = str(run.variant.size), run.config.seed
        luck = noise.setdefault(key, draw.normal(0, 0.003)) + (draw.normal(0, 0.002) if own else 0)
        loss = 2 + 30 * cost**-exponent + luck + (gap if own else 0)
        leave(out / run.folder, run.config, loss, seconds=cost / 1e6 * (slower if own else 1), norm=9.0 if own else 1.0)
    return collect(one, out)


def test_ladder_in_table_json_and_notes(tmp_path):
    results = climbed(tmp_path, slower=3.0)
    found = results["ladder"]
    assert found["stated"] == "lr ~ width^-1"
    assert found["tuned_at"] == "2x16"
    assert [rung["size"] for rung in found["rungs"]] == ["2x16", "2x32", "4x64"]
    assert [rung["seeds"] for rung in found["rungs"]] == [5, 5, 3]
    assert set(found["curves"]) == {"per_token", "per_cpu_second"}
    (check,) = found["check"]
    assert check["holds"]
    assert check["predicted"] == pytest.approx(1e-3)
    for row in results["rows"]:
        if row["baseline"]:
            assert row["speedup"] is None
            continue
        token, second = row["speedup"]["per_token"], row["speedup"]["per_cpu_second"]
        assert token["factor"] > 1.2
        assert token["significant"]
        assert token["low"] < token["factor"] < (token["high"] or math.inf)
        assert second["factor"] < token["factor"]
    shown = to_markdown(results)
    assert "carried to the other sizes by lr ~ width^-1" in shown
    assert "L = L_inf + A C^-alpha" in shown
    assert {"speedup/token", "speedup/CPU s", "grad max", "spikes", "stable lr"} < set(columns(results))
    assert "over 3 to 5 seeds" in legend(results)
    assert "speedup_per_token_factor" in to_csv(results).splitlines()[0]
    assert json.loads(json.dumps(results, allow_nan=False)) == results


def test_row_without_a_gain_has_no_significant_speedup(tmp_path):
    results = climbed(tmp_path, gap=0.0)
    cells = columns(results)
    for row in results["rows"]:
        if not row["baseline"]:
            assert not row["speedup"]["per_token"]["significant"]
            assert cells["speedup/token"](row).rstrip("*").endswith("x n.s.")


def test_rule_that_its_check_contradicts_is_said(tmp_path):
    results = climbed(tmp_path, best=2e-3)
    (check,) = results["ladder"]["check"]
    assert not check["holds"]
    assert check["best"] == pytest.approx(2e-3)
    assert any("the rule predicts the rate 0.001 and 0.002 is better" in note for note in results["notes"])


def test_stability_is_in_the_table(tmp_path):
    """The grid's largest rate diverged for one row; of the other the grid ends before it breaks."""
    results = climbed(tmp_path)
    cells = {row["label"]: {name: cell(row) for name, cell in columns(results).items()} for row in results["rows"]}
    assert cells["standard | 2x16"]["stable lr"] == ">= 0.008"
    assert cells["mudd | 2x16"]["stable lr"] == "0.004"
    assert cells["mudd | 2x32"]["stable lr"] == "0.002"  # carried like the rate itself
    assert cells["mudd | 2x16"]["grad max"] == "9"
    assert cells["mudd | 2x16"]["spikes"] == "0"


def test_rate_that_ends_far_above_the_best_is_not_stable(tmp_path):
    one = plan()
    for run in one.tuning():
        leave(tmp_path / run.folder, run.config, 6.0 if run.config.lr == 4e-3 else 3.0)
    assert widest_stable(one, tmp_path, one.variants()[0]) == (2e-3, False)


def test_depth_at_equal_compute_is_no_ladder(tmp_path):
    """Sizes of nearly one cost have no curve over compute."""
    sizes = [{"depth": depth, "width": 16, "heads": 2} for depth in (2, 3, 4)]
    one = plan(sizes=sizes, tune={}, train={"context": 16, "batch": 2, "steps": 3}, seeds=[0, 1, 2])
    for run in one.runs({}):
        leave(tmp_path / run.folder, run.config, 3.0 + run.config.seed / 10)
    results = collect(one, tmp_path)
    assert "ladder" not in results
    assert all(row["speedup"] is None for row in results["rows"])
    assert "speedup/token" not in columns(results)


COMPUTE = [1.0, 4.0, 16.0, 64.0]


def curve(compute):
    return 2.0 + 1.5 * np.asarray(compute) ** -0.3


def test_fit_is_that_of_scipy():
    losses = curve(COMPUTE) + np.array([0.01, -0.012, 0.006, -0.004])
    found = fit(COMPUTE, losses[None])
    best, _ = optimize.curve_fit(lambda c, limit, a, k: limit + a * c**-k, COMPUTE, losses, p0=(2, 1.5, 0.3))
    assert found.limit[0] == pytest.approx(best[0], abs=0.02)
    assert found.exponent[0] == pytest.approx(best[2], abs=0.015)
    for loss in (2.3, 2.6, 3.0):
        expected = ((loss - best[0]) / best[1]) ** (-1 / best[2])
        assert found.compute(np.array([loss]))[0] == pytest.approx(expected, rel=0.01)


def test_exact_curve_is_found_and_a_loss_below_its_limit_is_never_reached():
    found = fit(COMPUTE, curve(COMPUTE)[None])
    assert (found.limit[0], found.exponent[0]) == pytest.approx((2.0, 0.3), abs=0.01)
    assert found.compute(np.array([1.9]))[0] == math.inf
    assert fit(COMPUTE, np.array([[1.0, 1.1, 1.2, 1.3]])).scale[0] == 0  # a loss that grows is no curve


def experiment(draw, factor, seeds=(5, 5, 3)):
    luck = [draw.normal(0, 0.01, count) for count in seeds]
    rungs = [Rung(str(c), c, (curve(c) + own).tolist()) for c, own in zip(COMPUTE, luck, strict=False)]
    own = curve(factor * COMPUTE[1]) + luck[1] + draw.normal(0, 0.005, seeds[1])
    return Fitted(rungs).speedup(1, (own - rungs[1].losses).tolist(), COMPUTE[1])


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_interval_of_the_speedup_holds_the_truth(factor):
    """In 95 % of experiments; of forty at most six may miss by chance (p < 0.01)."""
    draw = np.random.default_rng(2)
    found = [experiment(draw, factor) for _ in range(40)]
    held = [(one["low"] or 0) <= factor <= (one["high"] or math.inf) for one in found]
    assert sum(held) >= 34
    if factor == 1.0:
        assert sum(one["significant"] for one in found) == 40 - sum(held)
    assert np.mean([one["factor"] for one in found]) == pytest.approx(factor, abs=0.05)


def test_speedup_is_the_same_twice_and_none_where_compute_does_not_help():
    assert experiment(np.random.default_rng(5), 1.2) == experiment(np.random.default_rng(5), 1.2)
    rungs = [Rung(str(c), c, [c / 100 + 3, c / 100 + 3.01]) for c in COMPUTE]
    assert Fitted(rungs).speedup(1, [-1.0, -1.0], 4.0) is None


@pytest.mark.parametrize("missing", ["a size", "a seed"])
def test_two_sizes_or_one_seed_are_no_ladder(tmp_path, missing):
    sizes = SIZES[:2] if missing == "a size" else [*SIZES[:2], {**SIZES[2], "seeds": 1}]
    results = climbed(tmp_path, sizes=sizes)
    assert results["ladder"]["curves"] == {}
    assert all(row["speedup"] is None for row in results["rows"])


def test_every_row_is_compared_with_the_tuning_of_its_own_size(tmp_path):
    """A size with more rates than the first says nothing of its rows, and one with fewer hides nothing."""
    grids = [[1e-3, 2e-3, 4e-3], [5e-4, 1e-3, 2e-3, 4e-3, 8e-3]]
    for place, (first, second) in enumerate((grids, grids[::-1])):
        sizes = [{**SIZES[0], "lr": first}, {**SIZES[1], "lr": second}]
        one = plan(sizes=sizes, seeds=[0, 1, 2], tune={"lr": [1e-3, 2e-3, 4e-3], "seeds": [100]})
        out = tmp_path / str(place)
        for run in one.tuning():
            leave(out / run.folder, run.config, 3 + abs(math.log(run.config.lr / 2e-3)))
        for run in one.runs(choose_rates(one, out)):
            leave(out / run.folder, run.config, 3 + 0.01 * run.config.seed)
        assert not any("was tuned by" in note for note in collect(one, out)["notes"])


def test_edge_note_names_the_rate_at_the_edge(tmp_path):
    one = plan(
        sizes=SIZES[:1], seeds=[0, 1, 2], tune={"lr": [1e-3, 2e-3, 4e-3], "residual_lr": [4e-3, 8e-3], "seeds": [100]}
    )
    for run in one.tuning():
        worse = abs(math.log(run.config.lr / 2e-3)) + abs(math.log(run.config.residual_rate / 8e-3))
        leave(tmp_path / run.folder, run.config, 3 + worse)
    for run in one.runs(choose_rates(one, tmp_path)):
        leave(tmp_path / run.folder, run.config, 3.0 + 0.01 * run.config.seed)
    assert "mudd: its rate 0.002 / 0.008 is at the edge of the grid" in " ".join(collect(one, tmp_path)["notes"])
