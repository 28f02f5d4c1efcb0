"""Seeds are added to all rows alike until the differences are resolved, and the table says how it was judged."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from residua.lab.compare import ComparePlan, compare, read_series, run
from residua.lab.compare.table import legend
from residua.lab.compare.until import Until
from residua.lab.runs import is_done
from tests.compare.fakes import leave


@pytest.fixture
def trained(monkeypatch):
    """Runs that take no time: their losses are drawn, those of the second design with `spread`."""
    made = []
    settings = SimpleNamespace(spread=0.01, gap=0.05)

    def execute(runs, out, **_):
        for one in runs:
            if not is_done(out / one.folder):
                made.append(one.folder)
                draw = np.random.default_rng([one.config.seed, len(one.config.design)])
                own = one.config.design != "standard"
                leave(out / one.folder, one.config, 3 + (settings.gap + draw.normal(0, settings.spread) if own else 0))

    data = SimpleNamespace(manifest={"fingerprint": "f" * 64, "tokens": {"train": 1000}})
    monkeypatch.setattr(run, "execute", execute)
    monkeypatch.setattr("residua.lab.data.prepare", lambda *_, **__: data)
    settings.made = made
    return settings


def plan(**changes):
    given = {
        "designs": ["standard", "attnres", "delta"], "seeds": [0, 1, 2],
        "train": {"steps": 4, "context": 16, "batch": 2},
        "sizes": [{"depth": 2, "width": 16, "heads": 2}], "tune": {"lr": [1e-3], "seeds": [4]},
        "until": {"half_width": 0.01, "most_seeds": 12, "add": 2},
    }  # fmt: skip
    return ComparePlan.from_json(given | changes)


def test_looks_add_seeds_that_are_no_tuning_seeds():
    assert [look.seeds for look in plan().looks()] == [
        (0, 1, 2), (0, 1, 2, 3, 5), (0, 1, 2, 3, 5, 6, 7), (0, 1, 2, 3, 5, 6, 7, 8, 9),
        (0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11), (0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12),
    ]  # fmt: skip
    assert plan(until=None).looks() == [plan(until=None)]
    grown = plan().looks()[2]
    assert [len(look.seeds) for look in grown.looks()] == [3, 5, 7, 9, 11, 12]  # a plan that has grown knows its looks
    assert ComparePlan.from_json(grown.to_json()) == grown


@pytest.mark.parametrize(
    ("spread", "ends"),
    [
        (0.0002, "resolved, at look 1 of"),
        (0.006, "resolved, at look "),
        (0.5, "NOT resolved when the most seeds were reached, at look 6 of at most 6"),
    ],
)
def test_seeds_are_added_to_all_rows_until_resolved(tmp_path, trained, spread, ends):
    trained.spread = spread
    results = compare(plan(), tmp_path, draw=False)
    counts = {row["loss"]["seeds"] for row in results["rows"]}
    assert len(counts) == 1  # in equal numbers
    (count,) = counts
    widths = [(row["difference"]["high"] - row["difference"]["low"]) / 2 for row in results["rows"][1:]]
    assert count == 12 or max(widths) <= 0.01
    assert (count == 3) == (spread == 0.0002)
    assert (count == 12) == (spread == 0.5)
    (note,) = [note for note in results["notes"] if note.startswith("Seeds were added")]
    assert ends in note
    assert f"with {count} seeds" in note
    assert "Lan & DeMets 1983" in note
    assert results["statistics"] == {
        "alpha": pytest.approx(0.05),
        "rows": 2,
        "mde_rows": 2,
        "over_rows": "Holm",
        "looks": 6,
    }
    assert "5 % for all 2 rows together (Holm)" in legend(results)
    assert "99.17 % t interval" in legend(results)
    assert json.loads((tmp_path / "plan.json").read_text())["seeds"] == [0, 1, 2]
    assert {len(each.seeds) for each in read_series(tmp_path)} == {count}


def test_same_command_takes_the_same_looks(tmp_path, trained):
    trained.spread = 0.006
    first = compare(plan(), tmp_path, draw=False)
    made = len(trained.made)
    assert compare(plan(), tmp_path, draw=False) == first
    assert len(trained.made) == made


def test_verdict_is_corrected_for_rows_and_looks(tmp_path, trained):
    """A p-value of 0.02 is a verdict alone, and none among two rows and six looks."""
    trained.spread, trained.gap = 0.02, 0.03
    judged = {}
    for looks in (None, {"half_width": 1.0, "most_seeds": 12, "add": 2}):
        results = compare(plan(until=looks), tmp_path / str(bool(looks)), draw=False)
        row = results["rows"][1]
        judged[bool(looks)] = row
        others = [one["difference"]["p"] for one in results["rows"][1:]]
        assert row["adjusted"] >= min(1.0, row["difference"]["p"] * (6 if looks else 1))
        assert max(others) <= 1
        assert row["difference"]["significant"] == (row["adjusted"] <= 0.05)
    assert judged[True]["difference"]["mean"] == judged[False]["difference"]["mean"]
    assert judged[True]["adjusted"] == pytest.approx(min(1.0, 6 * judged[False]["adjusted"]))
    assert judged[True]["difference"]["high"] > judged[False]["difference"]["high"]


def test_plan_that_passes_its_text_too_often_is_refused(tmp_path, trained):
    """1000 tokens of text: four updates of 32 tokens are 0.13 passes, 100 are 3.2."""
    compare(plan(until=None, most_passes=2), tmp_path / "a", draw=False)
    train = {"steps": 100, "context": 16, "batch": 2}
    with pytest.raises(ValueError, match=r"standard would pass pydoc 3.20 times, and most_passes is 2"):
        compare(plan(until=None, most_passes=2, train=train), tmp_path / "b", draw=False)
    assert not (tmp_path / "b").exists()


def test_level_of_a_look():
    assert Until(half_width=0.01, most_seeds=12).level(3) == pytest.approx(0.005)
    assert Until(half_width=0.01, most_seeds=3).level(3) == pytest.approx(0.05)


def test_note_of_a_comparison_that_goes_on_says_so():
    until = Until(half_width=0.01, most_seeds=6)
    assert "not resolved yet, at look 2 of at most 4, with 4 seeds" in replace(until, began=3).note(4, 0.5)
    assert "NOT resolved when the most seeds were reached, at look 4" in replace(until, began=3).note(6, 0.5)
    assert ": resolved, at look 2" in replace(until, began=3).note(4, 0.005)
