"""What the page shows, against the files of the runs and against the models themselves."""

import json
import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from residua.lab import figures
from residua.lab.compare import read_series
from residua.lab.compare.results import collect
from residua.lab.compare.table import columns
from residua.lab.compare.verdict import in_words, verdict
from residua.lab.diagnose.attention import by_offset
from residua.lab.report import explorer as explorers
from residua.lab.report import gather, inspection, render
from residua.lab.report.data import PROMPT
from residua.lab.report.look import look
from residua.lab.report.page import grid, unpacked
from residua.lab.report.runs import train_command
from residua.lab.report.summary import AGAINST, BETTER, ORDER, PLAIN, UNCLEAR, WORSE
from residua.lab.train import TrainConfig, load_model
from tests.figures.synthetic import write_comparison
from tests.report.comparison import DESIGNS, inspected, large_inspection, make_comparison, train_run

pytestmark = pytest.mark.slow  # models are trained


def test_data_are_those_of_the_figures(compared, data):
    drawn = figures.collect(read_series(compared))
    assert [each["label"] for each in data["series"]] == list(drawn["labels"].values()) == list(DESIGNS)
    for place, slug in enumerate(drawn["labels"]):
        assert data["curves"][place] == drawn["curves"][slug]
        assert data["quality"][place] == drawn["quality"][slug]
        for key in ("max_weight", "normalised_entropy", "effective_sources", "stream_rms", "output_rms", "position"):
            assert data["depth"][place][key] == drawn["depth"][slug][key]
        route = data["routing"][place]
        if route is None:
            assert slug not in drawn["routing"]
        else:
            assert grid(route, 0) == drawn["routing"][slug]["weights"]
            assert route["sources"] == drawn["routing"][slug]["sources"]


def test_table_is_that_of_compare_with_differences_in_words(compared, data):
    results = json.loads((compared / "results.json").read_text())
    rows = {row["label"]: row for row in results["rows"]}
    cells = columns(results)
    plain = {shown: name for name, shown in PLAIN.items()}
    titles = [plain.get(name, name) for group in data["summary"]["groups"] for name in group["columns"]]
    folded = data["summary"]["folded"]
    assert sorted([*titles, *folded, "design", "vs baseline"]) == sorted([*cells, AGAINST])
    for row in data["summary"]["rows"]:
        own = rows[data["series"][row["series"]]["label"]]
        expected = {title: cells[title](own) for title in (*titles, *folded) if title != AGAINST}
        found = dict(zip((*titles, *folded), (*row["cells"], *row["folded"]), strict=True))
        assert found.pop(AGAINST) == in_words(own["difference"])
        assert found == expected
    assert results["notes"][0] in data["notes"]
    assert data["summary"]["verdict"] == verdict(results, "compared")


def test_rows_inside_the_noise_stand_with_the_baseline_and_apart_from_the_others(compared, data):
    """And inside a group the lower loss is first."""
    results = json.loads((compared / "results.json").read_text())
    rows = {row["label"]: row for row in results["rows"]}
    place = {title: ORDER.index(title) for title in data["summary"]["sections"]}
    seen = []
    for row in data["summary"]["rows"]:
        own = rows[data["series"][row["series"]]["label"]]
        gap = own["difference"]
        better = UNCLEAR if gap is None or not gap["significant"] else BETTER if gap["high"] < 0 else WORSE
        assert row["group"] == better
        seen.append((place[better], own["loss"]["mean"]))
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    ("gap", "said"),
    [
        (None, "the baseline"),
        ((-0.19, -0.26, -0.12, 0.09, True), "better by 0.1900 (0.1200 to 0.2600)"),
        ((0.15, 0.05, 0.25, 0.1, True), "worse by 0.1500 (0.0500 to 0.2500)"),
        ((-0.012, -0.05, 0.03, 0.0531, False), "not significant (-0.0120; minimum detectable effect 0.0531)"),
        ((0.012, None, None, None, None), "+0.0120, not judged"),
    ],
)
def test_differences_are_words(gap, said):
    keys = ("mean", "low", "high", "detectable", "significant")
    assert in_words(gap and dict(zip(keys, gap, strict=True))) == said


def test_seeds_and_lanes_are_those_of_the_records(compared, data):
    place = DESIGNS.index("mudd")
    route = data["routing"][place]
    assert route["views"] == ["mean", "q lane", "k lane", "v lane"]
    record = json.loads((compared / "runs/mudd/seed1/routing.json").read_text())
    sites = {site["site"]: site for site in record["sites"]}
    for lane, view in enumerate(route["views"][1:]):
        lanes = [sites[name]["routing"]["mean_weights"] for name in route["sites"]]
        own = [value for each in lanes for value in each[min(lane, len(each) - 1)]]
        assert route["means"][view][2] == pytest.approx(own, abs=1e-6)


def test_tokens_are_what_the_model_does(compared, data):
    """Every packed weight of a seed and head, against the model run here."""
    place = DESIGNS.index("attnres:heads=2")
    route = data["routing"][place]
    assert route["views"] == ["mean", "head 0", "head 1"]
    assert "".join(route["tokens"]).replace("\u00b7", " ") == PROMPT[: len(route["tokens"])]
    seen = look(load_model(compared / "runs/attnres-heads-2/seed2"), torch.tensor([list(PROMPT.encode())[:24]]))
    for view, chosen in enumerate((lambda w: w.mean((0, 3)), lambda w: w[0, ..., 0], lambda w: w[0, ..., 1])):
        expected = [row for name in route["sites"] for row in chosen(seen.weights[name]).tolist()]
        found = unpacked(route, 2, view)
        assert found == [pytest.approx(row, abs=route["step"]) for row in expected]
    assert route["step"] <= 1e-4


def test_gradients_and_attention_come_from_the_prompt(data):
    for depth in data["depth"]:
        assert depth["gradient_of"] == "prompt"
        assert all(value > 0 for value in depth["gradient_norm"][:-1])
    attention = data["axes"][0]["sequence"]
    windows = {site: len(row) for site, row in zip(attention["sites"], attention["weights"], strict=True)}
    assert windows == {"l0_swa": 4, "l0_attn": 16, "l1_swa": 4, "l1_attn": 16}


def test_attention_by_offset_is_the_mean_of_a_diagonal():
    weights = torch.tensor([[[[1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [0.0, 0.5, 0.5]]]])
    assert by_offset(weights) == [pytest.approx(0.75), pytest.approx(0.375)]


def test_looking_leaves_the_model_as_it_was(compared):
    model = load_model(compared / "runs/delta-blocks-2/seed0")
    ids = torch.arange(12).view(1, -1)
    before = model(ids)
    found = look(model, ids)
    assert torch.equal(model(ids), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    window = found.attention["l0_swa"]
    assert window[0] > 0


def test_depth_axis_counts_from_the_newest_source(data):
    place = DESIGNS.index("attnres:heads=2")
    depth, route = data["axes"][place]["depth"], data["routing"][place]
    first = grid(route, 0)[-1]
    assert depth["weights"][-1] == [value for value in reversed(first) if value is not None]
    assert data["axes"][0]["depth"] is None, "standard mixes nothing"


def test_costs_set_the_prediction_beside_the_measurement(data):
    for cost, quality in zip(data["costs"], data["quality"], strict=True):
        assert cost["speed"] == quality["speed"]
        assert cost["parameters"] == quality["parameters"]
        assert 0 < cost["speed_by_bytes"] <= 1.2
        assert cost["speed_by_operations"] > 0
    assert data["costs"][0]["speed_by_operations"] == 1.0
    assert data["costs"][0]["extra_saved"] == 0
    assert data["costs"][DESIGNS.index("mudd")]["extra_saved"] > 0


def test_beta_regimes_sum_to_one(data):
    beta = data["beta"][DESIGNS.index("ddl")]
    assert [sum(parts) for parts in zip(*beta["regimes"].values(), strict=True)] == pytest.approx(
        [1.0] * len(beta["sites"]), abs=1e-5
    )
    assert data["beta"][0] is None


def test_commands_make_the_runs_again(data, compared):
    """The command's flags give the config of the run."""
    from residua.cli.train import resolve

    config = json.loads((compared / "runs/mudd/seed0/config.json").read_text())
    line = next(each["command"] for each in data["runs"]["commands"] if each["what"].startswith("mudd"))
    assert line == train_command(config, "runs/mudd-seed0")
    words = line.split()[2:-2]
    flags = {words[i][2:].replace("-", "_"): words[i + 1] for i in range(0, len(words), 2)}
    known = {key: type(config[key])(value) for key, value in flags.items()}
    assert resolve(None, known).to_json() == config
    assert data["runs"]["differing"]["design"] == list(DESIGNS)


def test_runs_without_a_plan_are_grouped_by_all_but_the_seed(tmp_path):
    recipe = {"width": 16, "depth": 2, "heads": 2, "steps": 2, "batch": 2, "context": 16, "eval_windows": 2}
    base = TrainConfig(design="delta", **recipe)
    configs = {"a": base, "b": replace(base, seed=1), "c": replace(base, lr=0.5), "d": replace(base, design="standard")}
    for name, config in configs.items():
        train_run(tmp_path / name, config)
    found = gather(*(tmp_path / name for name in configs))
    assert [each["label"] for each in found["series"]] == ["delta | a", "delta | c", "standard"]
    assert [each["seeds"] for each in found["series"]] == [[0, 1], [0], [0]]
    assert found["title"] == "a + b + c + d"
    assert found["kind"] == "runs"
    assert found["routing"][0]["sample"] == "the prompt"
    assert any("routing is that of the prompt" in note for note in found["notes"])
    assert any("Not a finished comparison" in note for note in found["notes"])
    render(found)
    alone = gather(tmp_path / "a")
    assert [each["label"] for each in alone["series"]] == ["delta"]


def test_missing_checkpoints_are_said_and_the_rest_is_shown(compared, tmp_path):
    copied = tmp_path / "copy"
    shutil.copytree(compared, copied)
    for folder in copied.glob("runs/*/*/checkpoints"):
        shutil.rmtree(folder)
    found = gather(copied)
    assert "cannot be loaded" in found["absent"]["tokens"]
    assert found["axes"][-1]["sequence"] is None
    assert found["axes"][-1]["depth"]
    assert found["routing"][-1]["tokens"] is None
    assert found["routing"][-1]["means"]["mean"][0]
    assert str(tmp_path) not in render(found), "a page names no path of this machine"
    without = gather(copied, checkpoints=False)
    said = "The models were not loaded, as with --records and --no-checkpoints."
    assert without["absent"]["tokens"] == said, "once, and not for every row"


def test_results_that_are_not_those_of_the_runs_are_not_shown(compared, tmp_path):
    copied = tmp_path / "copy"
    shutil.copytree(compared, copied)
    result = copied / "runs/standard/seed0/result.json"
    result.write_text(json.dumps(json.loads(result.read_text()) | {"loss": 1.0}))
    found = gather(copied, checkpoints=False)
    assert found["summary"]["differences"] == []
    assert any("Not a finished comparison" in note for note in found["notes"])


def test_files_without_configurations_still_make_a_page(tmp_path):
    write_comparison(tmp_path)
    found = gather(tmp_path)
    assert "costs" in found["absent"]
    assert "tokens" in found["absent"]
    assert "Nothing to show here" in render(found)


def test_inspection_needs_its_parts():
    with pytest.raises(ValueError, match="needs tokens"):
        inspection({key: value for key, value in inspected().items() if key != "tokens"})


def test_inspection_of_a_design_without_sources_says_so():
    found = inspection(inspected("standard"))
    assert "mixes no sources" in found["absent"]["routing"]
    assert found["axes"][0]["sequence"]
    render(found)


def test_large_pages_are_bounded(monkeypatch):
    whole = inspection(large_inspection(20, 20))
    assert whole["notes"] == []
    cells = sum(map(len, whole["routing"][0]["reads"]))
    monkeypatch.setattr(explorers, "MOST_PACKED", 5 * cells)
    cut = inspection(large_inspection(20, 20))
    assert len(cut["routing"][0]["tokens"]) == 5
    assert any("first 5 of 12 tokens" in note for note in cut["notes"])
    monkeypatch.setattr(explorers, "MOST_MEANS", cells)
    small = inspection(large_inspection(20, 20))
    assert small["routing"][0]["seeds"] == []
    assert any("mean over seeds" in note for note in small["notes"])
    render(small)


def test_packed_steps_hold_large_and_signed_weights():
    found = inspected()
    scaled = {site: (torch.tensor(values) * -70).tolist() for site, values in found["weights"].items()}
    route = inspection(found | {"weights": scaled})["routing"][0]
    expected = [row for name in route["sites"] for row in torch.tensor(scaled[name]).mean((0, 3)).tolist()]
    assert route["step"] == 0.01
    assert [value for row in unpacked(route, 0) for value in row] == pytest.approx(
        [value for row in expected for value in row], abs=0.0051
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "name a directory"),
        (("nowhere",), "neither a comparison nor a run"),
    ],
)
def test_gather_refuses_by_name(arguments, says):
    with pytest.raises(ValueError, match=says):
        gather(*arguments)


def test_gather_refuses_a_comparison_among_runs(compared):
    with pytest.raises(ValueError, match="is a comparison; give it alone"):
        gather(compared, compared / "runs/standard/seed0")
    with pytest.raises(ValueError, match="prompt is empty"):
        gather(compared, prompt="")


def test_weights_that_are_not_finite_are_left_out():
    found = inspected()
    site = next(iter(found["weights"]))
    for nothing in (math.nan, None):
        found["weights"][site][0][0][0][0] = nothing
        assert inspection(found)["routing"][0]["means"]["mean"][0][0] is None
        assert "NaN" not in render(inspection(found))


def test_inspection_takes_what_inspect_gives(compared, tmp_path):
    """The data part of `residua inspect`, drawn by the page: the same weights, and the prompt's loss."""
    from residua.lab.data import load_tokenizer
    from residua.lab.diagnose.inspect import inspect_ids
    from residua.lab.report import write_inspection

    model, tokenizer = load_model(compared / "runs/attnres-heads-2/seed0"), load_tokenizer('{"name": "bytes"}')
    ids = tokenizer.encode("Return it.")
    given = inspect_ids(model, torch.tensor(ids), tokens=[tokenizer.decode([i]) for i in ids], prompt="p", name="m")
    page = inspection(json.loads(json.dumps(given)))
    route = page["routing"][0]
    expected = [row for name in route["sites"] for row in torch.tensor(given["weights"][name]).mean((0, 3)).tolist()]
    assert unpacked(route, 0) == [pytest.approx(row, abs=route["step"]) for row in expected]
    assert f"{given['loss']:.4f} nats" in write_inspection(given, tmp_path / "page.html").read_text()


def test_results_figures_and_page_open_each_file_of_a_run_once(tmp_path, monkeypatch):
    """The metrics, the result, the configuration: whoever needs them takes them from what was read."""
    plan, opened = make_comparison(tmp_path, designs=("standard", "attnres"), seeds=2), Counter()
    real = Path.open

    def counted(path, *given, **named):
        opened[path] += 1
        return real(path, *given, **named)

    monkeypatch.setattr(Path, "open", counted)  # read_bytes and read_text go through it
    results = collect(plan, tmp_path)
    figures.collect(results.series)
    gather(tmp_path, read=results.series, checkpoints=False)
    for run in plan.runs({}):
        for name in ("metrics.jsonl", "result.json", "routing.json", "config.json", "manifest.json"):
            assert opened[tmp_path / run.folder / name] == 1, name
    opened.clear()
    gather(tmp_path, checkpoints=False)
    assert {opened[tmp_path / run.folder / "metrics.jsonl"] for run in plan.runs({})} == {1}
