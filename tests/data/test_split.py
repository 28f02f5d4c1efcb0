"""The split: 5 % of the bytes, whole groups, by hash alone."""

import hashlib

import numpy as np
import pytest

from residua.lab.data.corpus import validation


def digests(count):
    return [hashlib.sha256(str(index).encode()).digest() for index in range(count)]


@pytest.mark.parametrize("count", [20, 100, 3000])
def test_split_gives_five_percent(count):
    sizes = np.random.default_rng(count).integers(50, 150, size=count).tolist()
    valid = validation(digests(count), sizes, np.arange(count))
    share = np.array(sizes)[valid].sum() / sum(sizes)
    assert abs(share - 0.05) <= 75 / sum(sizes) + 1e-9


def test_split_keeps_groups_whole():
    group = np.repeat(np.arange(100), 5)
    valid = validation(digests(500), [10] * 500, group)
    assert valid.sum() == 25
    assert all(len(set(valid[group == name].tolist())) == 1 for name in range(100))


def test_split_does_not_depend_on_the_order():
    names, sizes = digests(200), list(range(100, 300))
    forward = validation(names, sizes, np.arange(200))
    backward = validation(names[::-1], sizes[::-1], np.arange(200))
    assert np.array_equal(forward, backward[::-1])


def test_split_follows_the_hash():
    names = digests(100)
    valid = validation(names, [10] * 100, np.arange(100))
    assert sorted(np.array(names, dtype=object)[valid]) == sorted(names)[:5]


@pytest.mark.parametrize(
    ("sizes", "group", "expected"),
    [
        ([900, 100], [0, 1], [False, True]),
        ([300, 100, 500], [0, 1, 2], [False, True, False]),
        ([100, 100, 500], [0, 0, 2], [True, True, False]),
        ([10, 1000], [0, 1], [True, False]),
        ([10, 10], [0, 0], [False, False]),
        ([10], [0], [False]),
    ],
)
def test_split_of_few_groups(sizes, group, expected):
    assert validation(digests(len(sizes)), sizes, np.array(group)).tolist() == expected
