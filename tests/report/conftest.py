"""One comparison for all tests of the page."""

from __future__ import annotations

import pytest

from residua.lab.report import gather, render
from tests.browser import chromium as chromium
from tests.report.comparison import make_comparison


@pytest.fixture(scope="session")
def compared(tmp_path_factory):
    """The directory of a comparison."""
    out = tmp_path_factory.mktemp("runs") / "compared"
    make_comparison(out)
    return out


@pytest.fixture(scope="session")
def data(compared):
    """What its page shows."""
    return gather(compared)


@pytest.fixture(scope="session")
def html(data):
    """Its page."""
    return render(data)


@pytest.fixture(scope="module")
def files(tmp_path_factory, html):
    """The page as a file, in a folder of its own."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "report.html").write_text(html, encoding="utf-8")
    return folder
