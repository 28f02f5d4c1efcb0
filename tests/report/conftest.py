"""One comparison for all tests of the page."""

from __future__ import annotations

import shutil

import pytest

from residua.report import gather, render
from tests.docs.test_site import FLAGS
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
def chromium():
    """A browser for the tests of a file."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory, html):
    """The page as a file, in a folder of its own."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "report.html").write_text(html, encoding="utf-8")
    return folder
