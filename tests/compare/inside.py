"""A pool that makes runs in this process, for tests that need real runs and no processes."""

from residua.lab.compare import run
from residua.lab.compare.pool import Pool
from residua.lab.compare.worker import attempt

SMALL = """
designs = ["standard", "attnres"]
seeds = [0, 1]
sizes = [{ depth = 1, width = 16, heads = 2 }]

[train]
corpus = "dir:text"
steps = 2
batch = 2
context = 16
eval_windows = 2
"""


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


def inside(patch, folder, plan):
    """A machine in `folder` with a text, a plan.toml and nothing else; the pool that makes its runs."""
    write_text(folder / "text")
    (folder / "plan.toml").write_text(plan)
    pool = Inside()
    patch.chdir(folder)
    patch.setenv("RESIDUA_CACHE", str(folder / "cache"))
    patch.setattr(run, "make_pool", lambda on, out: pool)
    return pool
