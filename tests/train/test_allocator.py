"""A training process keeps the pages that it frees."""

import resource
import sys
from subprocess import run

import pytest

CODE = """
import resource, torch
from residua.lab.common.allocator import keep_pages
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.zeros(1 << 24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
before = faults()
kept = keep_pages()
for _ in range(3):
    faults()
print(kept, before, faults())
"""


@pytest.mark.slow
def test_freed_blocks_are_not_faulted_in_again():
    """Four blocks of 64 MiB, one after the other: 16384 pages each time, or none. In a process of its own, because an
    allocator that was told once stays so."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)}
    said = run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True).stdout.split()
    pages = (1 << 26) // resource.getpagesize()
    assert said[0] == "True"
    assert int(said[1]) >= 4 * pages
    assert int(said[2]) < pages // 8


def test_tunables_of_the_user_are_left_alone(monkeypatch):
    from residua.lab.common.allocator import keep_pages

    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=65536")
    assert not keep_pages()
