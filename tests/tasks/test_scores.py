"""Accuracy and routing scores, by hand and by brute force."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from residua.lab import tasks
from residua.lab.diagnose import record_routing
from residua.lab.tasks.routing import rising_assignment
from residua.model import ModelConfig, Transformer


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_accuracy_counts_questions_alone():
    targets = torch.tensor([[0, -100, 2], [1, 1, -100]])
    said = torch.tensor([[0, 0, 1], [1, 0, 0]])
    logits = torch.nn.functional.one_hot(said, 3).float()
    assert tasks.accuracy(logits, targets) == 0.5
    assert tasks.accuracy(torch.nn.functional.one_hot(targets.clamp_min(0), 3).float(), targets) == 1.0


def test_accuracy_without_a_question_is_refused():
    with pytest.raises(ValueError, match="no position is scored"):
        tasks.accuracy(torch.zeros(1, 2, 3), torch.full((1, 2), -100))


def test_rising_assignment_is_the_best_of_all():
    for steps, sources in ((1, 4), (2, 2), (2, 5), (3, 6), (4, 7)):
        for seed in range(20):
            table = torch.rand(steps, sources, generator=seeded(seed), dtype=torch.float64)
            total, found = rising_assignment(table)
            every = combinations(range(sources), steps)
            best = max(every, key=lambda choice: sum(table[k, n].item() for k, n in enumerate(choice)))
            assert found == best
            assert total == pytest.approx(sum(table[k, n].item() for k, n in enumerate(best)))


def planted(truth, places, sources, sharp=1.0):
    """Weights [1 n b t 1] that put `sharp` on the place of the true step, and spread the rest."""
    rest = (1 - sharp) / (sources - 1)
    weights = torch.full((1, sources, *truth.shape, 1), rest)
    for step, place in enumerate(places):
        weights[0, place, ..., 0][truth == step] = sharp
    return weights


def test_routing_score_of_planted_routing():
    truth = tasks.RouteSwitch().batch(16, seeded()).extra["route"]
    perfect = tasks.routing_score(planted(truth, (1, 4, 6), 8), truth)
    assert perfect.score == pytest.approx(1)
    assert (perfect.assignment, perfect.chance, perfect.above_chance) == ((1, 4, 6), 1 / 3, pytest.approx(1))
    blurred = tasks.routing_score(planted(truth, (1, 4, 6), 8, sharp=0.58), truth)
    assert blurred.score == pytest.approx(0.58)
    assert blurred.assignment == (1, 4, 6)
    # averaged over the three steps, each of the three places has (0.58 + 2 * 0.06) / 3
    assert blurred.static == pytest.approx(0.7 / 3)


def test_routing_score_of_a_falling_order_is_not_perfect():
    """A later step cannot be in an earlier source."""
    truth = tasks.RouteSwitch(ops=2).batch(16, seeded()).extra["route"]
    assert tasks.routing_score(planted(truth, (3, 1), 5), truth).score == pytest.approx(0.5)


@pytest.mark.parametrize("seed", range(5))
def test_routing_score_of_static_weights_is_at_most_chance(seed):
    truth = tasks.RouteSwitch(ops=4).batch(16, seeded(seed)).extra["route"]
    static = torch.rand(3, 9, 1, 1, 2, generator=seeded(seed)).softmax(1).expand(-1, -1, *truth.shape, -1)
    found = tasks.routing_score(static, truth)
    assert found.score <= found.chance + 1e-6
    assert found.above_chance <= 1e-6


def test_routing_score_takes_the_best_lane_and_the_size_of_signed_weights():
    truth = tasks.RouteSwitch().batch(16, seeded()).extra["route"]
    uniform = torch.full((1, 6, *truth.shape, 1), 1 / 6)
    found = tasks.routing_score(torch.cat([uniform, -2 * planted(truth, (0, 2, 5), 6)]), truth)
    assert (found.lane, found.score) == (1, pytest.approx(1))


@pytest.mark.parametrize(
    ("shape", "truth", "message"),
    [
        ((1, 4, 1, 3, 1), [[0, 1]], "record the batch"),
        ((1, 4, 1, 2, 1), [[0, 0]], "2 or more steps"),
        ((1, 4, 1, 2, 1), [[0, 2]], "each of them"),
        ((1, 4, 1, 2, 1), [[-1, -1]], "2 or more steps"),
        ((1, 1, 1, 2, 1), [[0, 1]], "2 steps cannot be in 1"),
    ],
)
def test_routing_score_refuses_what_it_cannot_judge(shape, truth, message):
    with pytest.raises(ValueError, match=message):
        tasks.routing_score(torch.ones(shape), torch.tensor(truth))


@pytest.mark.parametrize("design", ["denseformer", "elc", "attnres"])
def test_best_routing_of_a_recorded_model(design):
    """Static designs are bound by chance at every site; the best site's score is that site's own."""
    task = tasks.RouteSwitch()
    ids, _, extra = task.batch(32, seeded())
    model = Transformer(ModelConfig(vocab=task.vocab, width=16, depth=4, heads=2, design=design))
    with torch.no_grad():
        for parameter in model.stream.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=seeded(1)))
    with record_routing(model) as record, torch.no_grad():
        model(ids)
    found = tasks.best_routing(record.weights(), extra["route"])
    assert found._replace(site="") == tasks.routing_score(record[found.site].weights, extra["route"])
    for name, weights in record.weights().items():
        if weights.shape[1] >= task.ops:
            assert tasks.routing_score(weights, extra["route"]).score <= found.score, name
    if design == "attnres":
        assert abs(found.score - found.static) > 1e-6
    else:
        assert found.score <= found.chance + 1e-6
        assert found.score == pytest.approx(found.static)


def test_best_routing_needs_a_site_with_sources_enough():
    with pytest.raises(ValueError, match="no recorded site mixes 3 sources"):
        tasks.best_routing({"head": torch.ones(1, 2, 1, 3, 1)}, torch.tensor([[0, 1, 2]]))
