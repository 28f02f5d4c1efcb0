"""Small things that a visitor meets: tables that fit, plans by name, JSON that is JSON, words that are right."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from residua.lab.advise.evidence import Evidence, measured
from residua.lab.advise.rank import Advice
from residua.lab.compare import table
from residua.lab.compare.recipes import find_plan, recipe_names
from tests.refusals.harness import residua

ROOT = Path(__file__).resolve().parents[2]
DEMO = json.loads((ROOT / "results" / "demo" / "results.json").read_text())


def shown(results, width, monkeypatch, capsys):
    monkeypatch.setattr("rich.console.Console", lambda **options: Console(**options | {"width": width}))
    monkeypatch.setattr(Console, "is_terminal", property(lambda self: True))
    monkeypatch.setenv("NO_COLOR", "1")
    table.show(results)
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 100, 120])
def test_table_of_a_narrow_terminal_folds_nothing_and_explains_what_it_shows(width, monkeypatch, capsys):
    text = shown(DEMO, width, monkeypatch, capsys)
    head = next(line for line in text.splitlines() if "design" in line and "val loss" in line)
    for row in DEMO["rows"]:
        line = next(line for line in text.splitlines() if line.strip().startswith(row["label"] + " "))
        assert f"{row['loss']['mean']:.4f}" in line
    legend = text[text.index("val loss:") :]
    dropped = legend[legend.index("Not shown here: ") :]
    for title in table.SPARED:
        assert (title in head) != (title in dropped.split("\n!")[0]) or title not in table.columns(DEMO)
        assert title in head or f"{title}:" not in legend


def test_table_of_a_wide_terminal_is_whole(monkeypatch, capsys):
    text = shown(DEMO, 260, monkeypatch, capsys)
    assert all(title in text for title in table.columns(DEMO))
    assert "Not shown here" not in text


def test_routing_of_a_model_without_a_deep_third_is_half_there():
    row = {"routing": {"max_weight": 0.5, "deep_max_weight": None}}
    assert table._routed(row, "max_weight") == "0.50 / -"
    assert table._routed({"routing": {"max_weight": None, "deep_max_weight": None}}, "max_weight") == "-"


def test_one_seed_is_one_seed():
    one = DEMO | {"rows": [row | {"loss": row["loss"] | {"seeds": 1}} for row in DEMO["rows"]]}
    assert "over 1 seed." in table.legend(one)
    assert f"over {DEMO['rows'][0]['loss']['seeds']} seeds." in table.legend(DEMO)


def test_dry_run_of_a_comparison_is_json(tmp_path):
    said = residua("compare", "-d", "standard", "-d", "delta", "--seeds", "1", "--dry-run", "--json",
                   "--out", str(tmp_path / "new"))  # fmt: skip
    found = json.loads(said.out)
    assert [row["label"] for row in found["rows"]] == ["standard", "delta"]
    assert (found["tuning_runs"], found["reported_runs"]) == (0, 2)
    text = residua("compare", "-d", "standard", "--seeds", "1", "--dry-run", "--out", str(tmp_path / "new")).out
    assert text.startswith("1 row x 1 seed, baseline standard\n0 tuning runs, then 1 reported run\n")
    assert not (tmp_path / "new").exists()


def test_shipped_plan_is_found_by_its_name(tmp_path):
    assert "demo" in recipe_names()
    assert find_plan(Path("demo")).name == "demo.toml"
    (tmp_path / "demo").write_text("designs = ['standard']")
    assert find_plan(tmp_path / "demo") == tmp_path / "demo"
    assert json.loads(residua("compare", "--plan", "demo", "--dry-run", "--json", "--out", str(tmp_path / "x")).out)


def test_help_says_that_seeds_are_counted():
    for command in ("compare", "tasks"):
        assert "How many seeds" in residua(command, "--help").out


def evidence(effect, parameters, kind="paper"):
    return Evidence(design="delta", effect=effect, parameters=parameters, source="somebody", kind=kind)


def test_headline_of_advice_does_not_contradict_its_reasons():
    one = Advice("delta", "attn,mlp", "better", (), {}, (evidence(-0.02, 2e8), evidence(0.1499, 2e5, "ours")))
    assert one.headline == "better at 200M, worse at 0.2M"
    assert Advice("delta", "attn,mlp", "better", (), {}, (evidence(-0.02, 2e8),)).headline == "better"


def test_results_of_one_seed_are_evidence_without_an_interval(tmp_path):
    gap = {"mean": -0.1, "low": None, "high": None, "significant": None, "seeds": 1}
    row = {
        "label": "delta", "baseline": False, "difference": gap, "design": "delta", "layout": "attn,mlp", "size": "1x8",
        "parameters": 9, "speed": 1.0,
    }  # fmt: skip
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "results.json").write_text(json.dumps({"rows": [row], "notes": []}))
    (found,) = measured(tmp_path)
    assert (found.verdict, found.note) == ("no difference seen", "no interval")
    assert "(our own, 1 seed)" in found.source
