"""Matrices that are doubly stochastic to the last bit: hand values, and what they all are."""

import pytest
import torch

from residua.streams._mixers import circulant, kronecker, permuted
from tests.streams.test_mhc_released import draw, near, tensor


def test_lite_hand_values():
    start = permuted(tensor([0.0, *[-8.0] * 23])[None, None])[0, 0]
    eye = torch.eye(4, dtype=torch.bool)
    assert (start[eye] - 0.994008).abs().max() < 1e-6
    assert (start[~eye] - 0.001997).abs().max() < 1e-6
    # the permutation (1, 2, 0) sends stream 0 to 1, 1 to 2 and 2 to 0
    moved = permuted(tensor([-99.0, -99, -99, 0, -99, -99])[None, None])[0, 0]
    assert near(moved, [[0, 0, 1], [1, 0, 0], [0, 1, 0]], 1e-12)


def test_krom_hand_values():
    M = kronecker(tensor([0.75, 0.9]).logit()[None, None])[0, 0]
    assert near(M[0], [0.675, 0.075, 0.225, 0.025], 1e-15)
    assert torch.sigmoid(tensor(8.0)).item() == pytest.approx(0.999665, abs=1e-6)


def test_circulant_hand_values():
    M = circulant(tensor([2.0, 0.0, 1.0])[None, None])[0, 0]
    assert near(M[:, 0], [0.665241, 0.090031, 0.244728])  # what streams 0, 1 and 2 get of stream 0
    assert near(M[0], [0.665241, 0.244728, 0.090031])


@pytest.mark.parametrize(("matrix", "logits"), [(permuted, 24), (kronecker, 3), (circulant, 5)])
def test_mixers_are_doubly_stochastic(matrix, logits):
    M = matrix(3 * draw(2, 7, logits))
    assert M.min() >= 0
    assert (M.sum(-1) - 1).abs().max() < 1e-14
    assert (M.sum(-2) - 1).abs().max() < 1e-14
