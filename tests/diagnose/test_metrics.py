"""The numbers of a routing report, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from residua.lab.diagnose import metrics
from residua.lab.diagnose.site import SiteRecord
from residua.plan import Plan
from residua.stream import Routing

LN2, LN3 = math.log(2), math.log(3)


def one_read(*weights: float) -> torch.Tensor:
    """Weights of a single lane, token and group: [1 n 1 1 1]."""
    return torch.tensor(weights, dtype=torch.float64).view(1, -1, 1, 1, 1)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((0.75, 0.25), (0.75, 0.25)),
        ((3.0, 1.0), (0.75, 0.25)),
        ((-3.0, 1.0), (0.75, 0.25)),
        ((0.0, 0.0, 0.0), (1 / 3, 1 / 3, 1 / 3)),
        ((1e-9, -5e-9, 0.0, 0.0), (0.25, 0.25, 0.25, 0.25)),  # rounding of softmax - 1/n is no routing
        ((2.0,), (1.0,)),
    ],
)
def test_shares_are_sizes_over_their_sum(weights, expected):
    torch.testing.assert_close(metrics.shares(one_read(*weights)), one_read(*expected))


@pytest.mark.parametrize(
    ("share", "largest", "entropy", "effective", "contrast"),
    [
        ((0.5, 0.25, 0.25), 0.5, 1.5 * LN2, 2**1.5, 1 / 6),
        ((1.0, 0.0, 0.0), 1.0, 0.0, 1.0, 2 / 3),
        ((1 / 3, 1 / 3, 1 / 3), 1 / 3, LN3, 3.0, 0.0),
        ((0.5, 0.5, 0.0), 0.5, LN2, 2.0, 1 / 6),
    ],
)
def test_read_metrics_hand_values(share, largest, entropy, effective, contrast):
    read = one_read(*share)
    assert metrics.max_weight(read).item() == pytest.approx(largest)
    assert metrics.entropy(read).item() == pytest.approx(entropy)
    found = seen(read)
    assert found["max_weight"] == pytest.approx(largest)
    assert found["normalised_entropy"] == pytest.approx(entropy / LN3)
    assert found["effective_sources"] == pytest.approx(effective)
    assert found["contrast"] == pytest.approx(contrast)


def seen(weights):
    """What a site reports of one read with these weights."""
    count = weights.shape[1]
    record = SiteRecord(Plan.regular(2, 1).readers[-1], tuple(map(str, range(count))))
    record.see_routing(Routing((torch.ones(1, 1, 2),) * count, weights), keep=False, similarity=False)
    return record.summary()["routing"]


def test_one_source_has_no_normalised_entropy():
    assert seen(one_read(1.0))["normalised_entropy"] is None


def test_favourites_count_tokens_per_lane_and_group():
    share = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.2, 0.1, 0.7], [0.4, 0.3, 0.3]])  # token, source
    other = torch.tensor([[0.0, 1.0, 0.0]] * 4)
    both = torch.stack([share, other]).transpose(1, 2)[:, :, None, :, None]  # lane n b t group
    counts = metrics.favourites(both)
    assert counts.squeeze(-1).tolist() == [[3, 0, 1], [0, 4, 0]]
    assert metrics.agreement(counts).item() == pytest.approx((3 / 4 + 1) / 2)


@pytest.mark.parametrize(
    ("sources", "entropy", "agreement", "expected"),
    [
        (3, 0.951, 0.5, True),
        (3, 0.95, 0.95, False),  # more than 0.95, not 0.95 itself
        (3, 0.2, 0.951, True),
        (9, 0.5, 0.5, False),
        (2, 1.0, 1.0, None),
        (1, 1.0, 1.0, None),
    ],
)
def test_collapse_is_uniform_or_one_favourite(sources, entropy, agreement, expected):
    assert metrics.collapsed(sources, entropy, agreement) is expected


@pytest.mark.parametrize(
    ("lowest", "gap", "kind"),
    [(0.0, 0.0, "distribution"), (0.1, 1e-6, "distribution"), (0.0, 2.0, "scaled"), (-0.1, 0.0, "signed")],
)
def test_weights_kind_by_sign_and_sum(lowest, gap, kind):
    assert metrics.weights_kind(lowest, gap) == kind


def test_cosine_matrix_hand_values():
    x, y, zero = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), torch.zeros(2)
    tokens = [(x, 5 * x, -x, y, zero), (x, y, -x, 2 * y, zero)]  # one row of two tokens
    values = tuple(torch.stack([token[n] for token in tokens])[None] for n in range(5))
    expected = [
        [1.0, 0.5, -1.0, 0.0, 0.0],
        [0.5, 1.0, -0.5, 0.5, 0.0],
        [-1.0, -0.5, 1.0, 0.0, 0.0],
        [0.0, 0.5, 0.0, 1.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, 0.0],
    ]
    torch.testing.assert_close(metrics.cosine_matrix(values), torch.tensor(expected))


@pytest.mark.parametrize(
    ("matrix", "rank"),
    [
        (torch.eye(4), 4.0),
        (torch.ones(4, 4), 1.0),
        (torch.tensor([[1.0, 0.5], [0.5, 1.0]]), math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))),
        (torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)), 2.0),
        (torch.zeros(3, 3), 0.0),
    ],
)
def test_effective_rank_hand_values(matrix, rank):
    assert metrics.effective_rank(matrix) == pytest.approx(rank)


def test_effective_rank_of_nan_is_nan():
    assert math.isnan(metrics.effective_rank(torch.full((2, 2), math.nan)))


def test_rms_hand_value_in_narrow_types():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert metrics.mean_square(torch.tensor([3.0, 4.0], dtype=dtype)).item() == pytest.approx(12.5)


def test_beta_regimes_and_histogram_hand_values():
    beta = torch.tensor([0.0, 0.15, 0.25, 0.85, 1.0, 1.15, 1.5, 1.85, 1.95, 2.0])
    assert metrics.beta_regimes(beta).tolist() == pytest.approx([0.2, 0.3, 0.3, 0.2])
    counts = metrics.beta_histogram(beta).tolist()
    bins = {0: 1, 1: 1, 2: 1, 8: 1, 10: 1, 11: 1, 15: 1, 18: 1, 19: 2}
    assert counts == [bins.get(place, 0) for place in range(20)]
