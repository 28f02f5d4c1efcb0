"""The counter on calls small enough to count by hand."""

import pytest
import torch
from torch.nn import functional as F

from residua.lab.cost.counter import OperatorCounter, SavedTensors

x, y = torch.randn(3, 5), torch.randn(5, 7)

BY_HAND = {
    "product of matrices": (lambda: x @ y, 2 * 3 * 5 * 7),
    "product with a vector": (lambda: x @ y[:, 0], 2 * 3 * 5),
    "batched product": (lambda: torch.bmm(x[None], y[None]), 2 * 3 * 5 * 7),
    "bias": (lambda: F.linear(x, y.mT, torch.ones(7)), 2 * 3 * 5 * 7 + 3 * 7),
    "sum of two": (lambda: x + x, 15),
    "broadcast": (lambda: x * x[:1], 15),
    "reduction": (lambda: x.sum(), 15),
    "softmax: maximum, difference, exp, sum, quotient": (lambda: x.softmax(-1), 5 * 15),
    "silu: sigmoid and product": (lambda: F.silu(x), 2 * 15),
    "views": (lambda: x.T.reshape(5, 3)[1:].unsqueeze(0), 0),
    "copies": (lambda: torch.cat([x, x.clone()]), 0),
    "whole numbers": (lambda: torch.arange(5) + 1, 0),
}


@pytest.mark.parametrize("what", BY_HAND)
def test_operations_by_hand(what):
    call, expected = BY_HAND[what]
    with OperatorCounter() as counter:
        call()
    assert counter.flops == expected


def test_attention_is_its_two_products_and_a_softmax():
    q = torch.randn(2, 3, 6, 4)
    with OperatorCounter() as counter:
        F.scaled_dot_product_attention(q, q, q)
    pairs = 2 * 3 * 6 * 6
    assert counter.flops == pairs * (4 * 4 + 5) + 2 * q.numel()  # and the scale of q and of k


def test_bytes_are_inputs_and_outputs_and_an_expanded_axis_is_read_once():
    with OperatorCounter() as counter:
        x + x[:1].expand(3, 5)
    assert counter.bytes_moved == 4 * (15 + 5 + 15)
    with OperatorCounter() as counter:
        x.view(5, 3).T
    assert counter.bytes_moved == 0


def test_saved_tensors_count_a_storage_once_and_no_parameter():
    weight = torch.randn(5, 5, requires_grad=True)
    a = torch.randn(4, 5, requires_grad=True) + 0
    saved = SavedTensors([weight])
    with saved:
        (a @ weight).sum() + (a.view(2, 10) * a.view(2, 10)).sum() + a.T.exp().sum()
    assert saved.nbytes == a.nbytes + a.nbytes  # a itself, and its exponential


def test_saved_tensors_hold_what_backward_needs():
    a = torch.randn(4, 5, requires_grad=True)
    with SavedTensors([]):
        loss = (a * a).sum()
    loss.backward()
    torch.testing.assert_close(a.grad, 2 * a.detach())
