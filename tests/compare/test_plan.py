"""A plan expands to the runs it says, and everything wrong with one is one error before anything is written."""

import json
import re
from pathlib import Path

import pytest

from residua.lab.compare import ComparePlan, Size, Tune, compare, read_plan
from residua.lab.compare.execute import claim
from residua.lab.conversions import is_conversion, read_conversion
from residua.model import measure

SMALL = {"sizes": [{"depth": 2, "width": 16, "heads": 2}], "train": {"steps": 4, "context": 16}}


def plan(**changes):
    return ComparePlan.from_json({"designs": ["standard", "delta:blocks=2"], **SMALL, **changes})


WRONG = [
    ({"designs": []}, "at least one of designs"),
    ({"designs": "standard"}, "designs is a list"),
    ({"designs": ["standard", "standard"]}, "names one twice"),
    ({"designs": ["resnet"]}, "unknown design 'resnet'"),
    ({"designs": ["detla"]}, "did you mean 'delta'"),
    ({"designs": ["delta:blok=2"]}, "did you mean 'block'"),
    ({"designs": ["delta:gate=x"]}, "none|scalar|vector|alpha"),
    ({"designs": ["delta:block=2,blocks=2"]}, "not both"),
    ({"designs": ["delta:blocks=9"]}, "blocks must be 1..4"),
    ({"designs": ["attnres:gate=alpha"]}, "use delta:gate"),
    ({"designs": ["attnres:heads=3"]}, "does not divide"),
    ({"designs": ["delta:block=2", "delta:block=2,"]}, "not key=value"),
    ({"layouts": []}, "at least one of layouts"),
    ({"layouts": "attn,mlp"}, "layouts is a list"),
    ({"layouts": ["attn,ffn"]}, "choose from attn"),
    ({"layouts": ["swa:window=0,mlp"]}, "must be at least 1"),
    ({"layouts": ["attn,mlp", "attn,mlp"]}, "names one twice"),
    ({"seeds": []}, "at least one of seeds"),
    ({"seeds": [0, 0]}, "names one twice"),
    ({"seeds": [-1]}, "whole numbers from 0"),
    ({"seeds": [0.5]}, "whole numbers from 0"),
    ({"seeds": 3}, "seeds is a list"),
    ({"sizes": []}, "at least one of sizes"),
    ({"sizes": [{"width": 18, "heads": 4}]}, "does not split into 4 heads"),
    ({"sizes": [{"width": 12, "heads": 4}]}, "even head width"),
    ({"sizes": [{"width": 0}]}, "whole number from 1"),
    ({"sizes": [{"depth": 1.5}]}, "whole number from 1"),
    ({"sizes": [{"hidden": 3}]}, "sizes has no 'hidden'"),
    ({"sizes": ["6x128"]}, "sizes takes tables"),
    ({"baseline": "mudd"}, "not among the designs"),
    ({"match": "time"}, "match is none, params, flops"),
    ({"match": "params", "layouts": ["attn"]}, "has none"),
    ({"match": "params", "train": {"mlp_width": 32}}, "drop one of them"),
    ({"match": "params", "designs": ["standard", "ddl:gate=mlp"]}, "even with the narrowest MLP"),
    ({"threads": 0}, "threads must be at least 1"),
    ({"tune": {"lr": [1e-3], "seeds": [0]}}, "used for tuning and for reporting"),
    ({"tune": {"lr": [1e-3], "seeds": []}}, "at least one of tune.seeds"),
    ({"tune": {"lr": [-1.0]}}, "positive numbers"),
    ({"tune": {"lr": ["fast"]}}, "positive numbers"),
    ({"tune": {"lr": [1e-3, 1e-3]}}, "a rate twice"),
    ({"tune": {"residual_lr": [1e-3]}}, "needs tune.lr"),
    ({"tune": {"rates": [1e-3]}}, "tune has no 'rates'"),
    ({"tune": 3}, "tune takes tables"),
    ({"train": {"lr": 1e-3}, "tune": {"lr": [1e-3]}}, "give one of them"),
    ({"train": {"design": "delta"}}, "must not set design"),
    ({"train": {"seed": 3}}, "must not set seed"),
    ({"train": {"stepz": 3}}, "[train] has no 'stepz'"),
    ({"train": {"steps": -5}}, "steps must be at least 1"),
    ({"train": {"steps": "many"}}, "steps"),
    ({"train": {"objective": "rlhf"}}, "objective"),
    ({"train": {"lr": 0.0}}, "lr must be a positive number"),
    ({"train": 3}, "[train] is a table"),
    ({"speed": 9}, "a plan has no 'speed'"),
    ({"also": "standard"}, "also is a list"),
    ({"also": [{"design": "standard"}]}, "also takes rows"),
    ({"also": [{"design": "standard", "layout": "attn", "size": 1}]}, "also takes rows"),
    ({"also": [{"design": "resnet", "layout": "attn,mlp"}]}, "unknown design 'resnet'"),
    ({"also": [{"design": "standard", "layout": "attn,mlp"}]}, "share the folder"),
    ({"chosen": 3}, "[chosen] is a table"),
    ({"chosen": {"standard": 1e-3}}, "'delta:blocks=2' is not in it"),
    ({"chosen": {"standard": 1e-3, "delta:blocks=2": 1e-3, "x": 1}}, "'x' is no row"),
    ({"chosen": {"standard": 0, "delta:blocks=2": 1e-3}}, "positive numbers, not 0 for standard"),
    ({"chosen": {"standard": 1, "delta:blocks=2": 1}, "tune": {"lr": [1e-3]}}, "[chosen] and [tune] both"),
    ({"chosen": {"standard": 1, "delta:blocks=2": 1}, "train": {"lr": 1e-3}}, "[chosen] and [train] both"),
    ({"designs": ["ddl"], "layouts": ["swa:start=zero,mlp"]}, "starts at zero"),
    ({"designs": ["attnres"], "train": {"eps": 1e-3}}, "eps=0.001 must be at most"),
]


@pytest.mark.parametrize(("changes", "cure"), WRONG, ids=[str(changes) for changes, _ in WRONG])
def test_wrong_plan_is_one_error_and_nothing_is_written(changes, cure, tmp_path):
    file = tmp_path / "plan.json"
    with pytest.raises((ValueError, TypeError)) as caught:
        compare(plan(**changes), tmp_path / "out")
    assert cure in str(caught.value), caught.value
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert not file.exists()


@pytest.mark.parametrize(
    ("train", "cure"),
    [
        ({"corpus": "wikipedia"}, "wikipedia"),
        ({"corpus": "dir:nowhere"}, "nowhere"),
        ({"corpus": "file:*.nothing"}, "nothing"),
        ({"tokenizer": "words"}, "words"),
        ({"tokenizer": "bpe:10"}, "bpe"),
    ],
    ids=str,
)
def test_missing_corpus_is_one_error_and_nothing_is_written(train, cure, tmp_path, monkeypatch):
    monkeypatch.setenv("RESIDUA_CACHE", str(tmp_path / "cache"))
    with pytest.raises((ValueError, OSError), match=re.escape(cure)):
        compare(plan(train={"steps": 4, "context": 16, **train}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_plan_file_errors_name_the_file(tmp_path):
    with pytest.raises(ValueError, match="no plan file"):
        read_plan(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("designs = [")
    with pytest.raises(ValueError, match=r"broken\.toml is not TOML"):
        read_plan(tmp_path / "broken.toml")
    (tmp_path / "empty.toml").write_text("seeds = [1]")
    with pytest.raises(ValueError, match=r"empty\.toml: a plan needs designs"):
        read_plan(tmp_path / "empty.toml")


def test_recipes_are_plans():
    for file in sorted((Path(__file__).parents[2] / "recipes").glob("*.toml")):
        if is_conversion(file):
            assert read_conversion(file).labels(), file
        else:
            assert read_plan(file).variants(), file


def test_plan_has_rows_besides_the_product():
    one = plan(also=[{"design": "standard", "layout": "swa:window=4,attn,mlp"}])
    assert [variant.label for variant in one.variants()] == [
        "standard | attn,mlp", "delta:blocks=2 | attn,mlp", "standard | swa:window=4,attn,mlp",
    ]  # fmt: skip
    assert one.baseline_of(one.variants()[2]) == one.variants()[0]
    assert ComparePlan.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert one.digest != plan().digest
    assert "also" not in plan().to_json()


def test_rows_train_at_the_rates_that_were_chosen_for_them():
    one = plan(chosen={"standard": 1e-3, "delta:blocks=2": 4e-3})
    assert {run.variant.label: run.config.lr for run in one.runs({})} == one.chosen
    assert ComparePlan.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert one.digest != plan().digest
    assert "chosen" not in plan().to_json()


def test_plan_round_trips_and_its_digest_holds_everything():
    one = plan(tune={"lr": [1e-3, 2e-3]}, match="params")
    again = ComparePlan.from_json(json.loads(json.dumps(one.to_json())))
    assert again == one
    assert again.digest == one.digest
    assert plan(seeds=[1, 2, 3]).digest != plan().digest
    assert plan(threads=2).digest != plan().digest


def test_directory_belongs_to_one_plan(tmp_path):
    claim(plan(), tmp_path / "out")
    claim(plan(), tmp_path / "out")
    with pytest.raises(ValueError, match="belongs to another plan"):
        claim(plan(seeds=[5, 6, 7]), tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    with pytest.raises(ValueError, match="not the directory of a comparison"):
        claim(plan(), tmp_path / "full")
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["letter.txt"]


def test_runs_are_the_product_and_share_the_recipe():
    chosen = plan(layouts=["attn,mlp", "swa:window=4,attn,mlp"], seeds=[0, 1])
    runs = chosen.runs({})
    assert len(runs) == 2 * 2 * 2
    assert len({run.folder for run in runs}) == 8
    varied = ("design", "layout", "seed")
    recipes = {json.dumps({k: v for k, v in run.config.to_json().items() if k not in varied}) for run in runs}
    assert len(recipes) == 1
    assert chosen.baseline_of(runs[-1].variant).label == "standard | attn,mlp"


def test_tuning_gives_every_row_the_grid_on_seeds_of_its_own():
    chosen = plan(tune={"lr": [1e-3, 4e-3], "residual_lr": [1e-3, 1e-2], "seeds": [100, 101]})
    runs = chosen.tuning()
    by_row = {label: [run for run in runs if run.variant.label == label] for label in ("standard", "delta:blocks=2")}
    assert len(by_row["standard"]) == 2 * 2  # no parameters of its own, so no residual rate to tune
    assert len(by_row["delta:blocks=2"]) == 2 * 2 * 2
    assert {run.config.seed for run in runs} == {100, 101}
    assert {(run.config.lr, run.config.residual_lr) for run in by_row["delta:blocks=2"]} == {
        (1e-3, 1e-3), (1e-3, 1e-2), (4e-3, 1e-3), (4e-3, 1e-2),
    }  # fmt: skip
    final = chosen.runs({"delta:blocks=2": {"lr": 4e-3, "residual_lr": 1e-2}})
    assert {run.config.lr for run in final if run.variant.design == "delta:blocks=2"} == {4e-3}


@pytest.mark.slow
@pytest.mark.parametrize("match", ["params", "flops"])
def test_match_brings_every_row_to_the_baseline(match):
    chosen = ComparePlan(
        designs=("standard", "mudd", "attnres"), layouts=("attn,mlp", "swa:window=4,attn,mlp"),
        sizes=(Size(depth=4, width=32, heads=4),), match=match, train={"context": 32},
    )  # fmt: skip

    def cost(variant):
        sizes = measure(chosen.config(variant, 0).model(256), tokens=32)
        return sizes.parameters if match == "params" else sizes.flops_per_token

    goal = cost(chosen.variants()[0])
    for variant in chosen.variants():
        assert cost(variant) == pytest.approx(goal, rel=0.01), variant.label
    assert chosen.config(chosen.variants()[1], 0).mlp_width < chosen.config(chosen.variants()[0], 0).model(256).hidden


def test_tune_is_off_without_rates():
    assert plan().tuning() == []
    assert plan().tune == Tune()
