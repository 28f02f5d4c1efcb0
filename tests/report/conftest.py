"""One comparison for all tests of the page."""

from __future__ import annotations

import pytest

from residua.lab.report import gather, render
from tests.browser import chromium as chromium
from tests.report.comparison import byte_tokens, make_comparison


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
def ablated(compared):
    """The same with knock-outs, measured on the text that the runs were trained on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("residua.lab.data.prepare", lambda *given, **named: byte_tokens())
        return gather(compared, ablate=True)


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


@pytest.fixture(scope="module")
def knocked(files, ablated):
    """The page with knock-outs."""
    (files / "ablated.html").write_text(render(ablated), encoding="utf-8")
    return files / "ablated.html"
