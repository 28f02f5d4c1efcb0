"""Every datum of every plot against values worked out by hand from the files of a comparison."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

import residua
from residua import Plan
from residua.lab import figures
from residua.lab.common.files import read_json
from residua.lab.compare import Size, read_series
from residua.lab.diagnose import record_routing
from residua.lab.diagnose.show import in_depth_order
from residua.lab.train import TrainConfig, load_model, train
from residua.testing import specs
from tests.figures.synthetic import STANDARD, routing_record, write, write_comparison, write_plan, write_run
from tests.train.harness import toy_config, toy_tokens

SECTIONS = ("curves", "routing", "depth", "quality")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    write_comparison(tmp_path)
    return tmp_path


def test_curves_are_means_and_ranges_over_seeds(out):
    assert figures.collect(read_series(out))["curves"]["standard"] == {
        "tokens": [0, 100, 200],
        "cpu_seconds": [0.0, 3.0, 5.0],
        "loss": {"mean": [4.1, 3.1, 2.05], "low": [4.0, 3.0, 2.0], "high": [4.2, 3.2, 2.1]},
        "bits_per_byte": {"mean": [8.2, 6.2, 4.1], "low": [8.0, 6.0, 4.0], "high": [8.4, 6.4, 4.2]},
    }


def test_curves_take_the_validations_that_all_seeds_have(out):
    write_run(out / "runs/standard/seed1", STANDARD[1][::2])
    assert figures.collect(read_series(out))["curves"]["standard"]["tokens"] == [0, 200]


def test_routing_is_the_mean_over_seeds_with_gaps(out):
    routing = figures.collect(read_series(out))["routing"]
    assert routing["attnres"] == {
        "sites": ["l0_mlp", "l1_attn"],
        "sources": ["embed", "l0_attn", "l0_mlp"],
        "weights": [[0.75, 0.25, None], [0.6, 0.2, 0.2]],
        "signed": False,
    }
    assert routing["denseformer"] == {
        "sites": ["l1_attn", "head"],
        "sources": ["embed", "l0", "l1"],
        "weights": [[-0.5, 1.5, None], [0.25, -0.25, 0.5]],
        "signed": True,
    }
    assert "standard" not in routing, "it mixes nothing"


def test_routing_is_signed_where_only_single_tokens_are(out):
    weights = {"l1_attn": {"embed": 0.5, "l0": 0.5}}
    for seed in (0, 1):
        write(
            out / f"runs/denseformer/seed{seed}/routing.json", routing_record(weights, kind=("scaled", "signed")[seed])
        )
    assert figures.collect(read_series(out))["routing"]["denseformer"]["signed"] is True


def test_depth_is_the_mean_over_seeds_and_none_without_a_choice(out):
    depth = figures.collect(read_series(out))["depth"]
    assert depth["attnres"] == {
        "sites": ["l0_attn", "l0_mlp", "l1_attn", "l1_mlp", "head"],
        "position": [0.0, 0.5, 1.0, 1.5, 2.0],
        "deep": [False, False, False, False, True],
        "source_count": [0, 2, 3, 0, 0],
        "max_weight": [None, 0.75, 0.6, None, None],
        "normalised_entropy": [None, 0.5, pytest.approx(entropies(), abs=1e-6), None, None],
        "effective_sources": [None, 1.5, pytest.approx(effective(), abs=1e-5), None, None],
        "stream_rms": [1.0] * 5,
        "output_rms": [None] * 5,
        "gradient_norm": [None] * 5,
    }
    assert depth["standard"]["max_weight"] == [None] * 5
    assert depth["standard"]["stream_rms"] == [1.0, 1.0, 2.0, 4.0, 8.0]
    assert depth["standard"]["output_rms"] == [1.0, 1.0, 1.0, 1.0, None]


def entropies() -> float:
    """Of 0.7, 0.1, 0.2 and of 0.5, 0.3, 0.2, in units of ln 3: 0.80182 and 1.02965 nats."""
    return (0.801819 + 1.029653) / 2 / math.log(3)


def effective() -> float:
    return (math.exp(0.801819) + math.exp(1.029653)) / 2


def test_depth_leaves_out_a_single_source(out):
    for seed in (0, 1):
        routing = routing_record({"l1_attn": {"embed": 1.0}}, gradient_norm=[1.0, 2.0, 3.0, 4.0, None])
        write(out / f"runs/attnres/seed{seed}/routing.json", routing)
    data = figures.collect(read_series(out))
    assert data["depth"]["attnres"]["max_weight"] == [None] * 5
    assert data["depth"]["attnres"]["source_count"] == [0, 0, 1, 0, 0]
    assert data["depth"]["attnres"]["gradient_norm"] == [1.0, 2.0, 3.0, 4.0, None]
    assert data["routing"]["attnres"]["weights"] == [[1.0]]


def test_quality_is_relative_to_the_baseline(out):
    quality = figures.collect(read_series(out))["quality"]
    assert quality["attnres"] == {
        "baseline": "standard",
        "parameters": 10,
        "bits_per_byte": {"mean": 3.7, "low": 3.6, "high": 3.8},
        "tokens_per_cpu_second": 25.0,
        "speed": 0.6,
        "memory": 2.0,
    }
    assert quality["standard"]["tokens_per_cpu_second"] == 41.6667
    assert (quality["standard"]["speed"], quality["standard"]["memory"]) == (1.0, 1.0)


def test_quality_follows_the_baseline_of_the_plan(tmp_path):
    write_comparison(tmp_path, baseline="attnres")
    data = figures.collect(read_series(tmp_path))
    assert data["baseline"] == "attnres"
    assert data["quality"]["standard"]["speed"] == pytest.approx(1 / 0.6, abs=1e-5)
    assert data["quality"]["standard"]["memory"] == 0.5


def test_quality_compares_within_a_size(tmp_path):
    plan = write_plan(
        tmp_path,
        designs=("standard", "delta"),
        seeds=(0,),
        sizes=(Size(width=16, depth=1, heads=2), Size(width=16, depth=2, heads=2)),
    )
    for variant, seconds in zip(plan.variants(), (1.0, 2.0, 10.0, 40.0), strict=True):
        routing = routing_record({}, plan=Plan.regular(16, variant.size.depth))
        write_run(tmp_path / f"runs/{variant.slug}/seed0", [(0, 0.0, 3.0), (80, seconds, 2.0)], routing=routing)
    data = figures.collect(read_series(tmp_path))
    assert [each["speed"] for each in data["quality"].values()] == [1.0, 0.5, 1.0, 0.25]
    assert [each["baseline"] for each in data["quality"].values()] == ["standard-1x16"] * 2 + ["standard-2x16"] * 2
    assert data["labels"]["delta-2x16"] == "delta | 2x16"
    assert data["baseline"] == "standard-1x16"


def test_unfinished_variants_are_named_and_left_out(out):
    (out / "runs/denseformer/seed0/result.json").unlink()
    (out / "runs/denseformer/seed1/routing.json").unlink()
    data = figures.collect(read_series(out))
    assert data["labels"] == {"standard": "standard", "attnres": "attnres"}
    assert data["missing"] == ["delta", "denseformer"]
    assert data["notes"] == ["Left out, not finished or diverged: delta, denseformer."]
    assert all(set(data[section]) <= {"standard", "attnres"} for section in SECTIONS)


def test_variant_with_a_seed_that_diverged_is_left_out_whole(out):
    """As in the table: the seeds that it survived would flatter it."""
    broken = out / "runs/attnres/seed1"
    (broken / "result.json").unlink()
    (broken / "diverged.json").write_text('{"step": 3, "site": "0.mlp", "message": "step 3: the loss is nan"}')
    data = figures.collect(read_series(out))
    assert set(data["labels"]) == {"standard", "denseformer"}
    assert data["missing"] == ["attnres", "delta"]


def test_finished_seeds_stand_for_a_variant_and_are_counted(out):
    (out / "runs/standard/seed1/result.json").unlink()
    data = figures.collect(read_series(out))
    assert data["seeds"] == {"standard": 1, "attnres": 2, "denseformer": 2}
    assert data["notes"][0] == "standard: 1 of 2 seeds so far."
    assert data["curves"]["standard"]["loss"] == {key: [4.0, 3.0, 2.0] for key in ("mean", "low", "high")}
    assert data["quality"]["attnres"]["speed"] == 0.5


def test_without_a_baseline_nothing_is_relative(out):
    shutil.rmtree(out / "runs/standard")
    data = figures.collect(read_series(out))
    assert data["baseline"] is None
    assert data["missing"] == ["standard", "delta"]
    quality = data["quality"]["attnres"]
    assert (quality["baseline"], quality["speed"], quality["memory"]) == (None, None, None)
    assert quality["tokens_per_cpu_second"] == 25.0


def test_different_corpora_are_said(out):
    assert not any("FORCED" in note for note in figures.collect(read_series(out))["notes"])
    write_run(out / "runs/standard/seed1", STANDARD[1], fingerprint="other")
    assert any("FORCED" in note for note in figures.collect(read_series(out))["notes"])


@pytest.mark.parametrize("changed", ["standard", "attnres", "denseformer"])
def test_variants_never_mix(out, changed):
    """Files of one variant reach nothing of another but what is relative to it."""
    before = figures.collect(read_series(out))
    for seed in (0, 1):
        routing = routing_record({"head": {"zzz": 9.0, "y": 1.0}}, stream_rms=[77.0] * 5)
        write_run(
            out / f"runs/{changed}/seed{seed}", [(7, 70.0, 77.0), (14, 140.0, 70.0)], peak_memory=7, routing=routing
        )
    after = figures.collect(read_series(out))
    for section in SECTIONS:
        assert after[section].get(changed) != before[section].get(changed), section
        for slug in before["labels"]:
            if slug != changed:
                assert _own(after, section, slug) == _own(before, section, slug), (section, slug)


def _own(data: dict[str, Any], section: str, slug: str) -> Any:
    found = data[section].get(slug)
    return {key: value for key, value in found.items() if key not in ("speed", "memory")} if found else found


def test_data_go_through_json_unchanged(out):
    data = figures.collect(read_series(out))
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert list(data["labels"]) == ["standard", "attnres", "denseformer"], "in the order of the plan"
    assert figures.collect(read_series(out)) == data
    assert data["band"] == "lowest to highest seed"


def test_numbers_have_six_digits_and_are_finite(out):
    weights = {"l1_attn": {"embed": 1 / 3, "l0": math.nan}}
    for seed in (0, 1):
        write(out / f"runs/attnres/seed{seed}/routing.json", routing_record(weights))
    assert figures.collect(read_series(out))["routing"]["attnres"]["weights"] == [[0.333333, None]]


def test_run_alone_is_one_series(tmp_path):
    config = TrainConfig(design="delta:blocks=2", depth=2)
    write(tmp_path / "config.json", config.to_json())
    write_run(tmp_path, STANDARD[0])
    result = json.loads((tmp_path / "result.json").read_text())
    write(tmp_path / "result.json", result | {"config": config.digest})
    (tmp_path / "routing.json").unlink()
    data = figures.collect(read_series(tmp_path))
    assert data["labels"] == {"delta-blocks-2": "delta:blocks=2"}
    assert data["baseline"] == "delta-blocks-2"
    assert data["curves"]["delta-blocks-2"]["loss"]["mean"] == [4.0, 3.0, 2.0]
    assert data["quality"]["delta-blocks-2"]["speed"] == 1.0
    assert (data["routing"], data["depth"], data["missing"], data["notes"]) == ({}, {}, [], [])


def test_collect_reads_what_training_writes(tmp_path):
    """The synthetic files are only as good as their likeness to these."""
    result = train(toy_config(), tmp_path, tokens=toy_tokens())
    model = load_model(tmp_path)
    with record_routing(model, gradients=True) as record:
        import torch

        model(torch.arange(12).view(1, -1)).sum().backward()
    means = {name: weights.detach().mean((0, 2, 3, 4)).tolist() for name, weights in record.weights().items()}
    write(tmp_path / "routing.json", record.summary() | {"mean_weights": means})
    data = figures.collect(read_series(tmp_path))
    curve, routing, depth = (data[section]["delta"] for section in ("curves", "routing", "depth"))
    assert curve["loss"]["mean"][-1] == figures.rounded(result.loss)
    assert curve["bits_per_byte"]["mean"][-1] == figures.rounded(result.bits_per_byte)
    assert curve["tokens"] == [0, 192, 384, 576]
    assert data["quality"]["delta"]["parameters"] == result.parameters
    assert routing["sources"] == ["embed", "l0_attn", "l0_mlp", "l1_attn"]
    for site, row in zip(routing["sites"], routing["weights"], strict=True):
        assert sum(weight or 0.0 for weight in row) == pytest.approx(1, abs=1e-5), site
    for key in figures.OF_A_SITE:
        assert all(value > 0 for value in depth[key][:-1]), key
    assert [value is not None for value in depth["max_weight"]] == [n > 1 for n in depth["source_count"]]


def _nothing(out: Path) -> None:
    pass


def _plan_alone(out: Path) -> None:
    write_plan(out, designs=("standard",))


def _unfinished_run(out: Path) -> None:
    write(out / "config.json", TrainConfig().to_json())


def _other_sites(out: Path) -> None:
    write_comparison(out)
    record = read_json(out / "runs/attnres/seed1/routing.json")
    record["sites"][1]["sources"] = ["embed", "other"]
    write(out / "runs/attnres/seed1/routing.json", record)


def _other_steps(out: Path) -> None:
    write_comparison(out)
    write_run(out / "runs/standard/seed1", [(1, 1.0, 1.0)])


def _no_validation(out: Path) -> None:
    write_comparison(out)
    (out / "runs/standard/seed1/metrics.jsonl").write_text("")


def _bad_json(out: Path) -> None:
    write_comparison(out)
    (out / "runs/standard/seed1/routing.json").write_text("{")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_nothing, "neither a comparison nor a run"),
        (_plan_alone, "no finished run"),
        (_unfinished_run, "no finished run"),
        (_other_sites, "other sites or sources"),
        (_other_steps, "validated at different steps"),
        (_no_validation, "holds no validation"),
        (_bad_json, "is not JSON"),
    ],
)
def test_collect_refuses_by_name(tmp_path, make, says):
    make(tmp_path)
    with pytest.raises(ValueError, match=says) as caught:
        figures.collect(read_series(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("attnres:blocks=2", ["embed", "block0", "block1", "partial"]),
        ("attnres:window=1", ["embed", "evicted", "l0_attn", "l0_mlp", "l1_attn", "l1_mlp"]),
        ("denseformer:dilation=2", ["embed", "l0", "l1"]),
        ("dca:window=1", ["embed", "middle", "l0", "l1"]),
        ("hyper:streams=2", ["stream0", "stream1"]),
        ("delta_released:null=true", ["null", "embed", "l0_attn", "l0_mlp", "l1_attn"]),
    ],
)
def test_sources_stand_in_depth_order(spec, expected):
    assert _ordered(spec, 2)[0] == expected


@pytest.mark.parametrize("name", residua.names())
def test_sources_keep_the_order_of_every_site(name):
    """No design's own order, oldest first, is contradicted by the columns."""
    for spec in specs(name):
        order, reads = _ordered(spec, 4)
        for read in reads:
            assert sorted(read, key=order.index) == list(read), spec


def _ordered(spec: str, depth: int) -> tuple[list[str], list[tuple[str, ...]]]:
    plan = Plan.regular(16, depth)
    stream = residua.build(spec, plan)
    reads = [stream.sources(site) for site in plan.readers if stream.sources(site)]
    return in_depth_order({site.name: site.index for site in plan.readers}, reads), reads
