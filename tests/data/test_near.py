"""Near-duplicates: found when reformatted or edited, left apart when merely alike in style, in seconds."""

import random
import re
import time

import numpy as np
import pytest

from residua.lab.data.near import SHINGLE, _windows, groups, signatures
from residua.lab.data.source import Tally, source
from tests.data.text import document


def shingles(text):
    plain = re.sub(rb"\s", b"", text).lower()
    return {plain[i : i + SHINGLE] for i in range(len(plain) - SHINGLE + 1)}


def jaccard(left, right):
    left, right = shingles(left), shingles(right)
    return len(left & right) / len(left | right)


def edited(text, words, seed=0):
    """`words` of the words replaced."""
    rng = random.Random(seed)
    parts = text.split(b" ")
    for place in rng.sample(range(len(parts)), words):
        parts[place] = f"other{rng.randrange(10**6)}".encode()
    return b" ".join(parts)


BASE = document(1, 200).encode()


@pytest.mark.parametrize(
    ("twin", "together"),
    [
        (BASE.replace(b" ", b"\n    "), True),
        (BASE.upper(), True),
        (BASE + b"and a last line\n", True),
        (edited(BASE, 10), True),
        (edited(BASE, 20), True),
        (edited(BASE, 120), False),
        (document(2, 200).encode(), False),
        (b"", False),
        (b"short", False),
    ],
)
def test_near_groups_what_is_alike(twin, together):
    others = [document(seed, 200).encode() for seed in range(10, 40)]
    group = groups([*others[:15], BASE, *others[15:], twin])
    assert (group[15] == group[-1]) == together
    assert jaccard(BASE, twin) > 0.6 if together else jaccard(BASE, twin) < 0.4, "the case itself is not clear"
    assert len(set(group[:15].tolist())) == 15


def test_near_signatures_estimate_the_jaccard_similarity():
    texts = [BASE, *(edited(BASE, count) for count in (2, 5, 10, 20, 40, 80, 160))]
    seen = signatures(texts)
    for text, signature in zip(texts, seen, strict=True):
        # 60 signatures: the standard deviation of the estimate is at most .065
        assert abs((signature == seen[0]).mean() - jaccard(BASE, text)) < 0.2


@pytest.mark.parametrize(("words", "least", "most"), [(10, 1.0, 1.0), (20, 0.9, 1.0), (40, 0.05, 0.9), (80, 0.0, 0.05)])
def test_near_finds_pairs_as_often_as_stated(words, least, most):
    """Mean similarities .77, .60, .38 and .17 over 60 pairs."""
    pairs = [(text, edited(text, words, seed)) for seed in range(60) if (text := document(seed, 200).encode())]
    group = groups([text for pair in pairs for text in pair]).reshape(-1, 2)
    assert len(set(group[:, 0].tolist())) == len(pairs)
    assert least <= (group[:, 0] == group[:, 1]).mean() <= most


def test_near_signatures_do_not_depend_on_the_neighbours():
    texts = [document(seed, 5 + seed).encode() for seed in range(30)] + [b"", b"x", b"0123456789ab"]
    together = signatures(texts)
    for text, signature in zip(texts, together, strict=True):
        assert np.array_equal(signatures([text])[0], signature)


def test_near_window_hash_is_equal_where_the_bytes_are():
    rng = np.random.default_rng(0)
    text = rng.integers(2, size=3000).astype(np.uint8)
    hashes = _windows(text)
    raw = [text[i : i + SHINGLE].tobytes() for i in range(len(text) - SHINGLE + 1)]
    assert len(hashes) == len(raw)
    assert len(set(hashes.tolist())) == len(set(raw))
    assert len(set(zip(hashes.tolist(), raw, strict=True))) == len(set(raw))


def test_near_groups_are_transitive_and_named_by_their_first():
    chain = [BASE]
    for step in range(6):
        chain.append(edited(chain[-1], 14, step))
    assert jaccard(chain[0], chain[-1]) < 0.5
    other = document(99, 200).encode()
    assert groups([other, *chain]).tolist() == [0] + [1] * len(chain)


@pytest.mark.slow
def test_near_is_fast_on_the_standard_library():
    found = source("pycode")
    documents = list(found.documents(Tally()))
    start = time.process_time()
    group = groups(documents)
    assert time.process_time() - start < 8, "measured 1 s"
    sizes = np.unique(group, return_counts=True)[1]
    assert 1 < sizes.max() < 0.2 * len(documents)
