"""The page of a comparison over several sizes in a real browser: the committed one over five depths."""

from pathlib import Path

import pytest

from tests.report.browser import Opened

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PAGE = Path(__file__).resolve().parents[2] / "results" / "depth" / "report.html"
NAMES = ["standard", "attnres:blocks=8", "delta:blocks=8", "delta", "denseformer", "mudd"]


def drawn(page, view):
    """The rows whose lines the first chart of a view shows."""
    chart = page.locator(f"#{view}-mount svg[role=img]").first
    chart.scroll_into_view_if_needed()
    page.wait_for_timeout(60)
    places = chart.locator("g[data-series]").evaluate_all("found => found.map((one) => Number(one.dataset.series))")
    labels = page.evaluate("JSON.parse(document.getElementById('data').textContent).series.map((one) => one.label)")
    return [labels[place] for place in places]


def test_one_size_is_shown_at_a_time_and_every_view_follows(chromium):
    with Opened(chromium, PAGE) as opened:
        page = opened.page
        assert page.locator("#curves-mount .keys button").all_inner_texts() == NAMES
        sizes = [page.locator(f"#{view}-mount select.size") for view in ("curves", "depth")]
        assert [one.input_value() for one in sizes] == ["48x26"] * 2
        assert drawn(page, "curves") == [f"{name} | 48x26" for name in NAMES]
        sizes[0].select_option("8x64")
        assert [one.input_value() for one in sizes] == ["8x64"] * 2
        assert drawn(page, "curves") == [f"{name} | 8x64" for name in NAMES]
        assert drawn(page, "depth") == [f"{name} | 8x64" for name in NAMES if name != "standard"]
        shown = page.locator("#axes-mount h3:visible").all_inner_texts()
        assert shown == [f"{name} | 8x64" for name in NAMES if name != "standard"]


def test_a_key_hides_a_design_at_every_size(chromium):
    with Opened(chromium, PAGE) as opened:
        page = opened.page
        page.locator("#depth-mount .keys button").nth(2).click()
        assert page.locator("#curves-mount .keys button").nth(2).get_attribute("aria-pressed") == "false"
        page.locator("#curves-mount select.size").select_option("4x90")
        assert drawn(page, "curves") == [f"{name} | 4x90" for name in NAMES if name != "delta:blocks=8"]
        page.locator("#curves-mount .keys button").nth(2).click()
        assert len(drawn(page, "curves")) == len(NAMES)


def test_without_script_every_size_has_its_own_charts(chromium):
    with Opened(chromium, PAGE, script=False) as opened:
        titles = opened.page.locator("#curves-mount svg .title").all_text_contents()
    assert titles[::2] == [f"validation loss, {size}" for size in ("4x90", "8x64", "16x44", "32x32", "48x26")]
