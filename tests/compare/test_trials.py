"""Which rates are tried on which seeds, and which of them is chosen."""

import pytest

from residua.lab.compare import ComparePlan, compare, run
from residua.lab.compare.choice import choose_rates, conceded, widest_stable
from residua.lab.compare.foreseen import foreseen, in_lines
from residua.lab.compare.results import collect
from residua.lab.compare.trials import trials
from residua.lab.compare.unfinished import untried
from residua.lab.runs import has_ended
from tests.compare.inside import Inside, write_text
from tests.compare.test_results import SMALL, break_run, write_run

TUNE = {"lr": [1e-3, 2e-3, 4e-3], "seeds": [100, 101], "close": 0.05}


def plan(**tune):
    return ComparePlan.from_json({"designs": ["standard", "delta:blocks=2"], **SMALL, "tune": {**TUNE, **tune}})


def tuned(one, out, losses):
    """Make what is asked for until nothing is; the (rate, seed) of the standard network's runs in that order.

    losses: by rate, seed by seed; None breaks. The other row has a best rate that none is close to.
    """
    made = []
    while left := [trial for trial in trials(one, out) if not has_ended(out / trial.folder)]:
        for trial in left:
            lr, seed = trial.config.lr, trial.config.seed
            loss = 3.0 + 100 * lr
            if trial.variant.design == "standard":
                made.append((lr, seed))
                loss = losses[lr][one.tune.seeds.index(seed)]
            break_run(out / trial.folder) if loss is None else write_run(out / trial.folder, loss)
    return made


FIRST = [(1e-3, 100), (2e-3, 100), (4e-3, 100)]


@pytest.mark.parametrize(
    ("losses", "then", "best"),
    [
        # nothing is close to the best: one seed decides
        ({1e-3: [3.3], 2e-3: [3.0], 4e-3: [3.2]}, [], 2e-3),
        # the mean of both decides, and not the first
        ({1e-3: [3.04, 3.1], 2e-3: [3.0, 3.0], 4e-3: [3.2]}, [(1e-3, 101), (2e-3, 101)], 2e-3),
        ({1e-3: [3.2], 2e-3: [3.0, 3.2], 4e-3: [3.04, 3.0]}, [(2e-3, 101), (4e-3, 101)], 4e-3),
        # of what is still close the smaller
        ({1e-3: [3.04, 3.04], 2e-3: [3.0, 3.0], 4e-3: [3.2]}, [(1e-3, 101), (2e-3, 101)], 1e-3),
        # one that broke on the second seed, finite or not, makes room for those that it was ahead of
        ({1e-3: [3.06, 3.0], 2e-3: [3.04, 3.1], 4e-3: [3.0, 3.4]}, [(2e-3, 101), (4e-3, 101), (1e-3, 101)], 1e-3),
        ({1e-3: [3.06, 3.0], 2e-3: [3.04, 3.1], 4e-3: [3.0, None]}, [(2e-3, 101), (4e-3, 101), (1e-3, 101)], 1e-3),
        # and where it was ahead of one alone, that is chosen
        ({1e-3: [3.2], 2e-3: [3.04, 3.0], 4e-3: [3.0, 3.4]}, [(2e-3, 101), (4e-3, 101)], 2e-3),
        # all break: the best that is finite
        ({1e-3: [3.0, 3.6], 2e-3: [3.0, 3.4], 4e-3: [None]}, [(1e-3, 101), (2e-3, 101)], 2e-3),
        ({1e-3: [None], 2e-3: [None], 4e-3: [None]}, [], None),
    ],
)
def test_what_is_close_is_tried_again_and_the_mean_decides(tmp_path, losses, then, best):
    one = plan()
    assert tuned(one, tmp_path, losses) == [*FIRST, *then]
    chosen = choose_rates(one, tmp_path)
    assert chosen.get("standard") == (None if best is None else {"lr": best})
    assert chosen["delta:blocks=2"] == {"lr": 1e-3}
    assert untried(one, tmp_path) == {}


def test_row_waits_until_what_is_close_has_been_tried_on_every_seed(tmp_path):
    one = plan()
    grid = [trial for trial in trials(one, tmp_path) if trial.variant.design == "standard"]
    assert [(trial.config.lr, trial.config.seed) for trial in grid] == FIRST
    for trial in grid:
        write_run(tmp_path / trial.folder, 3.0)
    assert untried(one, tmp_path)["standard"] == (3, 6)
    assert choose_rates(one, tmp_path) == {}


def test_table_counts_the_runs_that_were_made_and_calls_no_row_favoured_for_them(tmp_path):
    one = plan()
    tuned(one, tmp_path, {1e-3: [3.3], 2e-3: [3.0, 3.0], 4e-3: [3.01, 3.2]})
    for made in one.runs(choose_rates(one, tmp_path)):
        write_run(tmp_path / made.folder, 3.0 + made.config.seed / 10)
    results = collect(one, tmp_path)
    assert [row["trials"] for row in results["rows"]] == [5, 3]
    assert [(each["lr"], each["seed"]) for each in results["tuning"] if each["label"] == "standard"] == [
        (1e-3, 100), (2e-3, 100), (2e-3, 101), (4e-3, 100), (4e-3, 101),
    ]  # fmt: skip
    assert not any("was tuned by" in note for note in results["notes"])
    assert widest_stable(one, tmp_path, one.variants()[0]) == (4e-3, True)


def test_table_says_what_the_smaller_rate_may_cost(tmp_path):
    """By the tuning seeds, of a row that has a better one; nothing is said of rows that have their best."""
    one = plan()
    tuned(one, tmp_path, {1e-3: [3.04, 3.02], 2e-3: [3.0, 3.0], 4e-3: [3.2]})
    for made in one.runs(choose_rates(one, tmp_path)):
        write_run(tmp_path / made.folder, 3.0 + made.config.seed / 10)
    assert conceded(one, tmp_path) == {"standard": ({"lr": 2e-3}, pytest.approx(0.03))}
    (said,) = [note for note in collect(one, tmp_path)["notes"] if "smallest" in note]
    assert said == (
        "Of rates within 0.05 nats of the best on the tuning seeds the smallest is taken; the best ended lower by "
        "0.0300 for standard (0.002)."
    )
    assert conceded(plan(close=None), tmp_path) == {}


def test_plan_without_it_tries_all_and_keeps_its_digest(tmp_path):
    one = plan(close=None)
    assert trials(one, tmp_path) == one.tuning()
    assert "close" not in one.to_json()["tune"]
    assert ComparePlan.from_json(plan().to_json()) == plan()
    assert "up to 12 tuning runs" in in_lines(foreseen(plan()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"close": 0}, "positive number of nats, not 0"),
        ({"close": True}, "positive number of nats, not True"),
        ({"close": "near"}, "positive number of nats, not 'near'"),
        ({"seeds": [100]}, "a second of tune.seeds"),
        ({"lr": []}, "needs tune.lr"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(**changes)


@pytest.mark.slow  # trains
def test_comparison_tunes_in_rounds_and_is_made_again_from_records(tmp_path, monkeypatch):
    monkeypatch.setenv("RESIDUA_CACHE", str(tmp_path / "cache"))
    write_text(tmp_path / "text")
    train = {"corpus": f"dir:{tmp_path / 'text'}", "steps": 2, "batch": 2, "context": 16, "eval_windows": 2}
    values = {
        "designs": ["standard"],
        "seeds": [0, 1],
        "sizes": [{"depth": 1, "width": 16, "heads": 2}],
        "train": train,
    }
    one = ComparePlan.from_json({**values, "tune": {**TUNE, "close": 9.0}})
    pool, kept = Inside(), tmp_path / "records"
    monkeypatch.setattr(run, "make_pool", lambda on, out: pool)
    results = compare(one, tmp_path / "out", records=kept, draw=False)
    assert [folder.name for folder in pool.made] == [
        *(f"lr{lr:g}-seed100" for lr in TUNE["lr"]), *(f"lr{lr:g}-seed101" for lr in TUNE["lr"]), "seed0", "seed1",
    ]  # fmt: skip
    pool.made.clear()
    for so_far in (False, True):
        again = compare(one, tmp_path / f"again{so_far}", records=kept, draw=False, so_far=so_far)
        assert again["rows"] == results["rows"]
        assert again["tuning"] == results["tuning"]
    assert pool.made == []
