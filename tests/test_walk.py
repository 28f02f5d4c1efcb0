"""The page on concepts follows one call from the README to the kernel; the call stack says whether it is true."""

import re
import sys
from pathlib import Path

import pytest
import torch

import residua
from residua.model import ModelConfig, Transformer
from residua.native import library
from residua.ops.attend import native

SOURCE = Path(residua.__file__).parent
PAGE = (SOURCE.parents[1] / "docs" / "concepts.md").read_text()


@pytest.mark.parametrize("graded", [True, False])
def test_concepts_names_every_file_between_the_readme_and_the_kernel(graded, monkeypatch):
    section = PAGE.partition("## From the README to the kernel")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d) \| `([\w./]+)` \| (.*) \|$", section, re.MULTILINE)
    assert [int(number) for number, *_ in rows] == list(range(8))  # seven hops
    files = [file for _, file, _ in rows]
    assert (SOURCE / files[-1]).is_file()

    stacks = []
    entry = library.entry

    def watched(name, *types):
        if name == "residua_attend":
            frame, stack = sys._getframe(1), []
            while frame is not None:
                path = Path(frame.f_code.co_filename)
                if SOURCE in path.parents:
                    stack.insert(0, path.relative_to(SOURCE).as_posix())
                frame = frame.f_back
            stacks.append(list(dict.fromkeys(stack)))
        return entry(name, *types)

    monkeypatch.setattr(native, "entry", watched)
    model = Transformer(ModelConfig(vocab=16, width=8, depth=2, heads=2, design="attnres"))
    with torch.set_grad_enabled(graded):
        model(torch.zeros(1, 3, dtype=torch.long))
    (dispatcher,) = re.findall(r"`(ops/_\w+\.py)`", section)
    passed = files[1:-1]
    passed.insert(passed.index("ops/attend/__init__.py") + 1, dispatcher)
    assert passed in stacks
