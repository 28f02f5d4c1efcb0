"""Small corpora made up on the spot: words from a fixed list, so that documents differ and BPE finds merges."""

import random

_WORDS = """residual stream depth attention query source weight gate norm layer block token write read route delta
mixture plain state model train loss value window local causal entropy share uniform learned static dynamic early"""
WORDS = tuple(_WORDS.split())


def document(seed, words=60):
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) + str(rng.randrange(100)) for _ in range(words)) + "\n"


def fill(folder, count=40, words=60, first=0):
    """`count` documents as files in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(first, first + count):
        (folder / f"{number:03}.txt").write_text(document(number, words))
    return folder
