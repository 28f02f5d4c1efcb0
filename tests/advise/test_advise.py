"""Advice always has a source, follows the files it cites, and says what is not known."""

import hashlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from residua.cli import app
from residua.lab.advise import Situation, advise
from residua.lab.advise.duality import claims
from residua.lab.advise.evidence import Evidence, measured, result_files, results_folder, solved
from residua.lab.advise.literature import published
from residua.lab.advise.rank import CANDIDATES
from residua.lab.advise.situation import GOALS, PARALLEL
from residua.lab.cost.targets import sized

SMALL = sized("demo", depth=6, width=32, heads=4, vocab=64)
SITUATION = Situation(target=SMALL, tokens=64)


def row(design: str, mean: float, *, significant: bool, layout: str = "attn,mlp") -> dict:
    gap = {"mean": mean, "low": mean - 0.01, "high": mean + 0.01, "seeds": 3, "significant": significant}
    named = {"label": design, "design": design, "layout": layout, "size": "6x32"}
    return {**named, "baseline": False, "parameters": 2e8, "speed": 0.9, "difference": gap}


def write(folder: Path, name: str, *rows: dict) -> Path:
    (folder / name).mkdir(parents=True)
    baseline = row("standard", 0.0, significant=False) | {"baseline": True, "difference": None}
    (folder / name / "results.json").write_text(json.dumps({"rows": [baseline, *rows], "notes": []}))
    return folder


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("parallel", PARALLEL)
def test_advice_has_a_source_for_every_design(goal, parallel, tmp_path):
    answer = advise(replace(SITUATION, goal=goal, parallel=parallel), tmp_path)
    assert answer.ranked
    for one in answer.ranked:
        assert any(re.search(r"arXiv \d{4}\.\d{5}|factory|RFC", reason) for reason in one.reasons), one
        assert one.costs["operations"] >= 1
    named = {(one.design, one.layout) for one in (*answer.ranked, *answer.ruled_out)}
    assert named <= {(one.design, one.layout) for one in CANDIDATES}


def test_evidence_has_the_notes_that_bear_on_it_and_no_others(tmp_path):
    write(tmp_path, "a", row("delta", -0.1, significant=True), row("delta:blocks=4", -0.1, significant=True))
    file = tmp_path / "a" / "results.json"
    found = json.loads(file.read_text()) | {"unfinished": {"runs": 1, "of": 2, "rows": []}}
    found["notes"] = [
        "UNFINISHED: 1 of 2 runs (...).",
        "delta: its rate 0.008 is at the edge.",
        "delta:blocks=4: its rate 0.004 is at the edge.",
        "standard was tuned by 3 runs.",
        "FORCED: different corpora.",
        "speedup: the baseline's compute.",
    ]
    file.write_text(json.dumps(found))
    shared = "standard was tuned by 3 runs; FORCED: different corpora"
    begin = "95 % interval -0.1100 to -0.0900; the comparison is not finished"
    assert {one.design: one.note for one in measured(tmp_path)} == {
        "delta": f"{begin}; delta: its rate 0.008 is at the edge; {shared}",
        "delta:blocks=4": f"{begin}; delta:blocks=4: its rate 0.004 is at the edge; {shared}",
    }


def test_published_numbers_name_their_source():
    for one in published():
        assert re.search(r"arXiv \d{4}\.\d{5}|factory|RFC|MHAR", one.source)
        assert one.effect is None or abs(one.effect) < 0.2
        assert one.speed is None or 0 < one.speed <= 1


def test_literature_is_what_its_sources_print():
    """One row of each kind by hand, and a digest of all: whoever changes the file checks it against the sources."""
    found = {(one.design, one.parameters, one.speed is None): one for one in published()}
    assert found["delta:blocks=4", 220e6, True].effect == math.log(37.08 / 38.71)
    assert found["ddl", 124e6, True].effect == 2.8482 - 2.8543
    assert found["mhc", 27e9, True].effect == -0.021
    assert found["dca", 300e6, False].speed == 3.72 / 8.14
    assert found["ddl", 124e6, False].speed == 0.88
    assert found["ddl", 124e6, False].verdict == "speed only"
    lines = sorted(
        f"{one.design} {one.parameters!r} {one.effect!r} {one.speed!r} {one.source} {one.kind} {one.note}"
        for one in published()
    )
    assert len(lines) == 54
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest().startswith("97b3409e3b779d83")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('design = "ddl", millions = 1, los = [1, 2]', "unknown key los"),
        ('design = "ddl", millions = 1', "reports one of perplexity, loss, difference, speed"),
        ('design = "ddl", millions = 1, loss = [1, 2], speed = 1', "reports one of"),
        ('design = "ddl", millions = 1, loss = [1]', "not enough values"),
        ('design = "ddl", millions = 0, loss = [1, 2]', "must be above 0"),
        ('design = "dll", millions = 1, loss = [1, 2]', "ddl"),
        ('design = "ddl", loss = [1, 2]', "millions"),
        ('design = "ddl", millions = 1, speed = 1, kind = "ours"', "paper or independent"),
    ],
)
def test_wrong_row_of_the_literature_is_named(row, message):
    text = f'[[reported]]\nsource = "a paper"\nkind = "paper"\nrows = [{{ {row} }}]'
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        published(text)
    assert "literature.toml, a paper" in str(raised.value)


def test_candidate_without_a_source_is_unknown_and_not_advised(tmp_path):
    answer = advise(SITUATION, tmp_path)
    silent = "standard in swa:window=16,attn,mlp"
    assert any(line.startswith(f"{silent}: no measured loss is on record") for line in answer.unknown)
    assert "swa:window=16,attn,mlp" not in {one.layout for one in answer.ranked}
    assert any("none of our own results was found" in line for line in answer.unknown)


def test_goal_is_served_by_the_designs_that_a_source_names(tmp_path):
    def designs(goal: str) -> set[str]:
        return {f"{one.design} {one.layout}" for one in advise(replace(SITUATION, goal=goal), tmp_path).ranked}

    assert designs("shortcut") == {"ddl attn,mlp", "ddl:channels=4 attn,mlp"}
    assert any("swa" in one for one in designs("local"))
    assert not any(one.startswith(("ddl", "mhc")) for one in designs("depth"))


def test_checkpoint_rules_out_what_does_not_start_as_it(tmp_path):
    answer = advise(replace(SITUATION, checkpoint=True), tmp_path)
    assert {one.design for one in answer.ranked} >= {"delta:blocks=4,gate=alpha", "mudd", "dca:window=2"}
    out = {one.design: one.ruled_out for one in answer.ruled_out}
    assert "is another network" in out["ddl"][0]
    assert "up to the eps" in out["attnres:blocks=4"][0]
    local = advise(replace(SITUATION, checkpoint=True, goal="local"), tmp_path)
    starts = {f"{slot}:start=zero,attn,mlp" for slot in ("swa:window=16", "canon", "conv")}
    assert {one.layout for one in local.ranked} == starts


def test_memory_limit_uses_the_predicted_costs(tmp_path):
    answer = advise(replace(SITUATION, memory=1.3), tmp_path)
    for one in answer.ranked:
        assert one.costs["saved_fused"] <= 1.3
        assert bool(one.cautions) == (one.costs["saved_eager"] > 1.3)
    assert all(one.costs["saved_fused"] > 1.3 for one in answer.ruled_out if one.costs)
    free = [bool(one.cautions) for one in answer.ranked]
    assert free == sorted(free)  # what surely fits comes first


def test_latency_limit_cites_a_measured_speed(tmp_path):
    out = {one.design: one.ruled_out for one in advise(replace(SITUATION, latency=1.1), tmp_path).ruled_out}
    assert "ran at 0.53x the speed (wdlctc/hyper-connection-factory)" in out["mhc"]
    assert any("operations" in reason for reason in out["depthswa:window=4"])


def test_design_that_would_do_nothing_is_ruled_out(tmp_path):
    shallow = sized("demo", depth=2, width=32, heads=4, vocab=64)
    out = {one.design: one.ruled_out for one in advise(replace(SITUATION, target=shallow), tmp_path).ruled_out}
    assert out["denseformer:dilation=4,period=5"] == ("no site would read a mixture: the model is too shallow",)


@pytest.mark.slow
def test_our_own_results_are_read_cited_and_ranked_by(tmp_path):
    before = advise(SITUATION, tmp_path).ranked
    folder = write(tmp_path / "results", "main", row("mhc", -0.5, significant=True), row("mudd", 0.3, significant=True))
    target = sized("220M")
    after = advise(Situation(target=target, tokens=64), folder)
    assert after.results == ("results/main/results.json",)
    assert after.ranked[0].design == "mhc"
    assert any("results/main/results.json (our own, 3 seeds)" in reason for reason in after.ranked[0].reasons)
    verdict = {one.design: one.verdict for one in after.ranked}
    assert verdict["mudd"] == "conflicting"
    assert before[0].design != "mhc"


def test_results_of_another_layout_or_option_are_not_taken_for_a_design(tmp_path):
    folder = write(
        tmp_path / "results", "others",
        row("mhc", -0.5, significant=True, layout="attn:local=swa,mlp"),
        row("mhc:streams=2", -0.5, significant=True),
        row("standard", -0.5, significant=True, layout="swa:window=4,attn,mlp"),
    )  # fmt: skip
    found = {(one.design, one.layout): one for one in advise(SITUATION, folder).ranked}
    assert all(each.kind != "ours" for each in found["mhc", "attn,mlp"].evidence)
    assert found["standard", "swa:window=16,attn,mlp"].verdict == "better"  # another window of the same kind


def test_difference_within_its_noise_is_no_verdict(tmp_path):
    folder = write(tmp_path, "noise", row("mhc", -0.5, significant=False))
    (one,) = measured(folder)
    assert one.verdict == "no difference seen"


def test_broken_results_file_is_named(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "results.json").write_text('{"rows": [{}]}')
    with pytest.raises(ValueError, match=r"x/results\.json is not a results file"):
        advise(SITUATION, tmp_path)


CHEAP = dict.fromkeys(
    ("operations", "bytes_moved_fused", "saved_fused", "pipeline_cut", "decode_cache_added_bytes", "halo_bytes"), 1.0
)


def said(design: str, effect: float, decided: bool, layout: str = "attn,mlp") -> Evidence:
    return Evidence(
        design=design, layout=layout, effect=effect, decided=decided, parameters=1e6, source="a file", kind="ours"
    )


@pytest.mark.parametrize(
    ("ours", "shortcut", "local"),
    [
        ([], "not measured", "not measured"),
        ([said("ddl", -0.1, True)], "agrees", "not measured"),
        ([said("ddl", 0.1, True)], "disagrees", "not measured"),
        ([said("ddl", -0.1, False)], "undecided", "not measured"),
        ([said("ddl", -0.1, False), said("depthswa:window=4", -0.2, True)], "disagrees", "not measured"),
        ([said("ddl", -0.1, True), said("depthswa:window=4", -0.2, True)], "undecided", "not measured"),
        ([said("standard", -0.1, True, "swa:window=4,attn,mlp")], "not measured", "agrees"),
        (
            [said("standard", -0.1, False, "swa,attn,mlp"), said("standard", -0.2, True, "canon,attn,mlp")],
            "not measured",
            "disagrees",
        ),
    ],
)
def test_recommendation_of_the_paper_is_judged_by_our_files(ours, shortcut, local):
    found = claims(ours, CHEAP, CHEAP)
    assert [one.measured for one in found[:2]] == [shortcut, local]
    assert all("2603.16039" in one.source for one in found)


def task(folder, name, *rows):
    """A file of `residua tasks`: rows of design, layout, accuracy and whether the difference is beyond its noise."""
    file = folder / "two-axes" / "tasks" / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    made = [
        {"design": design, "layout": layout, "accuracy": {"mean": share}, "difference": {"significant": decided}}
        for design, layout, share, decided in rows
    ]
    file.write_text(json.dumps({"task": name, "rows": made}))
    return file


def test_tasks_are_told_beside_the_claim_they_are_about(tmp_path):
    plain = ("standard", "attn,mlp", 0.5, False)
    task(tmp_path, "overwrite", plain, ("ddl", "attn,mlp", 0.9, True), ("depthswa", "attn,mlp", 0.1, True))
    task(tmp_path, "delim", plain, ("standard", "swa,attn,mlp", 0.55, False), ("ddl", "attn,mlp", 0.2, True))
    shortcut, local, _ = claims([], CHEAP, CHEAP, solved(tmp_path))
    assert "overwrite: ddl 0.90 of 1 against 0.50, " in shortcut.because
    assert "two-axes/tasks/overwrite.json" in shortcut.because
    assert "delim" not in shortcut.because
    assert "delim: standard in swa,attn,mlp 0.55 of 1 against 0.50, no difference seen" in local.because


def test_broken_file_of_a_task_is_named(tmp_path):
    file = task(tmp_path, "parity")
    with pytest.raises(ValueError, match=f"{file.name} is not a file of residua tasks"):
        solved(tmp_path)


def test_system_argument_names_where_each_placement_is_cheaper():
    found = claims([], CHEAP | {"operations": 0.5}, CHEAP | {"halo_bytes": 0.0})[2]
    assert found.measured == "in part"
    assert "cheaper over tokens: operations; cheaper over depth: context-parallel halo" in found.because
    assert claims([], CHEAP | {"operations": 0.5}, CHEAP)[2].measured == "agrees"
    assert claims([], CHEAP | {"operations": 2.0}, CHEAP)[2].measured == "disagrees"


def test_committed_results_can_be_read():
    assert result_files(results_folder())
    assert all(one.source.startswith("results/") for one in measured(results_folder()))


def test_command_without_a_terminal_assumes_and_says_so(tmp_path):
    done = CliRunner().invoke(app, ["advise", "--size", "demo", "--results", str(tmp_path)], input="")
    assert done.exit_code == 0, done.output
    assert "Defaults used: goal quality, context 2048, parallel none, checkpoint False" in done.output
    assert "Results used: none found" in done.output
    assert "NOT MEASURED" in done.output
    assert "safe choice" not in done.output
    local = CliRunner().invoke(app, ["advise", "--size", "demo", "--goal", "local", "--results", str(tmp_path)])
    assert (
        "There is no evidence that any of these is better: the standard residual stream is the safe choice."
        in local.output
    )


def test_command_asks_on_a_terminal_for_what_is_not_given(tmp_path, monkeypatch):
    monkeypatch.setattr("residua.cli.advise._interactive", lambda: True)
    flags = ["advise", "--goal", "local", "--results", str(tmp_path)]
    done = CliRunner().invoke(app, flags, input="demo\n64\ncontext\ny\n0\n\n")
    assert done.exit_code == 0, done.output
    assert "Objective" not in done.output
    for question in ("Model size", "Sequence length", "Parallelism", "trained checkpoint", "Limit on time per token"):
        assert question in done.output
    assert "Defaults used" not in done.output
    assert "swa:window=16:start=zero,attn,mlp" in done.output  # a trained model exists
    assert "bytes a boundary" in done.output  # and its tokens are split


def test_command_gives_json(tmp_path):
    flags = ["advise", "--size", "demo", "--context", "64", "--goal", "local", "--json", "--results", str(tmp_path)]
    found = json.loads(CliRunner().invoke(app, flags).output)
    assert found["situation"]["goal"] == "local"
    assert found["ranked"][0]["evidence"] == []
    assert found["assumed"] == ["parallel none", "checkpoint False"]
    assert {"ruled_out", "recommendation_of_the_paper", "unknown", "results"} <= set(found)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--goal", "speed"], "--goal is quality, shortcut, local, depth, not 'speed'"),
        (["--parallel", "tensor"], "--parallel is none, pipeline, context"),
        (["--size", "9B"], "unknown size '9B'"),
        (["--memory", "0.5"], "--memory must be at least 1 (a multiple of the standard network's), not 0.5"),
        (["--context", "0"], "--context 0 must be at least 1 token"),
        (["--size", "demo", "--config", "x"], "both set the model size"),
        (["--results", "nowhere"], "--results nowhere is not a directory"),
        (["--top", "0"], "--top 0"),
    ],
)
def test_wrong_question_is_refused(flags, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        CliRunner().invoke(app, ["advise", *flags], catch_exceptions=False)
