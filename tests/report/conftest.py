"""One comparison for all tests of the page."""

from __future__ import annotations

import pytest

from residua.report import gather, render
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
