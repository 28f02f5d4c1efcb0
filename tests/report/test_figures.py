"""What the report added to the figures: how alike sources are, DDL's gate, and runs that no plan ties together."""

import pytest

from residua.lab import figures
from residua.lab.compare import read_series
from residua.lab.train import TrainConfig
from tests.figures.synthetic import STANDARD, routing_record, write, write_comparison, write_run


def seeded(out, change):
    """Routing records of the two seeds of attnres, changed by a function of (site, seed)."""
    for seed in (0, 1):
        record = routing_record({"l0_mlp": {"embed": 0.5, "l0_attn": 0.5}, "l1_attn": {"embed": 0.2, "l0": 0.8}})
        for site in record["sites"]:
            change(site, seed)
        write(out / f"runs/attnres/seed{seed}/routing.json", record)


def test_similarity_is_the_mean_over_pairs_and_seeds(tmp_path):
    write_comparison(tmp_path)

    def compare(site, seed):
        if site["site"] == "l0_mlp":
            site["routing"] |= {"cosine": [[1.0, 0.2 + 0.4 * seed], [0.2 + 0.4 * seed, 1.0]], "effective_rank": 1.5}

    seeded(tmp_path, compare)
    found = figures.collect(read_series(tmp_path))["sources"]
    assert found == {
        "attnres": {
            "sites": ["l0_attn", "l0_mlp", "l1_attn", "l1_mlp", "head"],
            "cosine": [None, 0.4, None, None, None],
            "effective_rank": [None, 1.5, None, None, None],
        }
    }


def test_beta_is_shares_and_counts_of_the_gated_sites(tmp_path):
    write_comparison(tmp_path)

    def gate(site, seed):
        if site["kind"] == "mlp":
            site["beta"] = {
                "edges": [0.0, 1.0, 2.0], "counts": [1, 2 + seed],
                "regimes": {"identity": 0.5 * seed, "projection": 1 - 0.5 * seed},
            }  # fmt: skip

    seeded(tmp_path, gate)
    assert figures.collect(read_series(tmp_path))["beta"] == {
        "attnres": {
            "sites": ["l0_mlp", "l1_mlp"],
            "regimes": {"identity": [0.25, 0.25], "projection": [0.75, 0.75]},
            "edges": [0.0, 1.0, 2.0],
            "counts": [[2, 5], [2, 5]],
        }
    }


@pytest.mark.parametrize(
    ("changes", "labels", "seeds"),
    [
        ([{}, {"seed": 1}], ["delta"], {"delta": 2}),
        ([{}, {"design": "standard"}], ["delta", "standard"], {"delta": 1, "standard": 1}),
        ([{}, {"lr": 0.5}], ["delta | r0", "delta | r1"], {"delta-r0": 1, "delta-r1": 1}),
    ],
)
def test_runs_of_one_configuration_are_one_series(tmp_path, changes, labels, seeds):
    for place, change in enumerate(changes):
        folder = tmp_path / f"r{place}"
        write(folder / "config.json", TrainConfig(**({"design": "delta", "depth": 2} | change)).to_json())
        write_run(folder, STANDARD[place])
    found = figures.collect(read_series(*(tmp_path / f"r{place}" for place in range(len(changes)))))
    assert list(found["labels"].values()) == labels
    assert found["seeds"] == seeds
    assert found["baseline"] == next(iter(seeds))
