"""Every fenced block of README, CONTRIBUTING and the docs that shows Python or a `residua` command.

The ```python blocks of a page run in order in one namespace: a page is one session, and reads as one. An example that
the build takes into the page is part of that session.

A line `$ residua ...` of a ```console block must succeed. The lines below it, where there are any, must be the first
lines of its output; `...` stands for any text in a line and, alone, for any number of lines. No other command is run.
"""

import re
import shlex
from pathlib import Path

import pytest

import residua
from residua.lab.compare import run
from residua.ops import _backend
from tests.compare.inside import Inside
from tests.refusals.harness import residua as in_this_process

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    page
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
    if page.exists()
]
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLE = re.compile(r"^<!-- residua: example (\S+) -->$", re.MULTILINE)


def blocks(page, language):
    """The page's blocks of one language, with the line each starts at."""
    text = page.read_text(encoding="utf-8")
    if language == "python":
        text = EXAMPLE.sub(lambda found: f"```python\n{(ROOT / 'examples' / found[1]).read_text()}```", text)
    return [(text[: one.start()].count("\n") + 2, one[2]) for one in FENCE.finditer(text) if one[1] == language]


def commands(page):
    """Every `$ residua ...` of the page, with the output shown for it."""
    found = []
    for line, block in blocks(page, "console"):
        for place, text in enumerate(block.splitlines()):
            if text.startswith("$ "):
                found.append((line + place, text[2:], []))
            elif found:
                found[-1][2].append(text)
    return [one for one in found if one[1].split()[0] == "residua"]


def agrees(shown, output):
    """Whether the lines shown are how the output begins."""
    pattern = ""
    for line in shown:
        if line.strip() == "...":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += r".*".join(re.escape(part.rstrip()) for part in line.rstrip().split("...")) + r"[ \t]*\n"
    return re.match(pattern, "\n".join([*output.splitlines(), ""]))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_of_a_page_runs(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(_backend, "_kernels", dict(_backend._kernels))  # a page may register one
    monkeypatch.setattr(run, "make_pool", lambda on, out: Inside())  # the notebook's runs are processes
    known, namespace = residua.names(), {"__name__": "__main__"}
    try:
        for line, block in blocks(page, "python"):
            exec(compile("\n" * (line - 1) + block, str(page), "exec"), namespace)
    finally:
        for name in set(residua.names()) - set(known):
            residua.unregister(name)


@pytest.mark.parametrize(
    ("page", "command", "shown"),
    [
        pytest.param(page, command, shown, id=f"{page.name}:{line} {command}")
        for page in PAGES
        for line, command, shown in commands(page)
    ],
)
def test_command_of_a_page_prints_what_is_shown(page, command, shown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, *arguments = shlex.split(command)
    done = in_this_process(*arguments)
    assert done.code == 0, done.err
    assert agrees(shown, done.out), f"{program} printed\n{done.out}\nand {page.name} shows\n" + "\n".join(shown)


@pytest.mark.parametrize(
    ("shown", "output", "agree"),
    [
        (["a", "b"], "a\nb\nc\n", True),
        (["a", "c"], "a\nb\nc\n", False),
        (["a", "...", "c"], "a\nb\nb\nc\n", True),
        (["...", "d"], "a\nb\n", False),
        (["a ... c"], "a b b c\n", True),
        (["a ... d"], "a b c\n", False),
        (["a", ""], "a  \n\nb\n", True),
        ([], "anything\n", True),
    ],
)
def test_shown_output_agrees_with_what_begins_alike(shown, output, agree):
    assert bool(agrees(shown, output)) == agree


def test_pages_hold_blocks_to_run():
    assert sum(len(blocks(page, "python")) for page in PAGES) >= 15
    assert sum(len(commands(page)) for page in PAGES) >= 2
