"""A pool that makes runs in this process, for tests that need real runs and no processes."""

from residua.lab.compare.pool import Pool
from residua.lab.compare.worker import attempt


class Ended:
    """A run that is over when it has begun."""

    def running(self):
        return False

    def stop(self):
        raise AssertionError

    kill = stop


class Inside(Pool):
    parallel = 1
    queues = False
    restarts = 0
    pause = 0.0

    def __init__(self):
        self.made = []

    def start(self, work):
        self.made.append(work.folder)
        attempt(work)
        return Ended()


def write_text(folder, documents=60):
    """A folder of small texts that differ."""
    folder.mkdir()
    for number in range(documents):
        words = " ".join(f"word{(number * 37 + place * place) % 101}" for place in range(60))
        (folder / f"{number}.txt").write_text(f"Text {number}. {words}\n")
