"""The page in a real browser: it answers to mouse and keyboard, is drawn, prints, and reads without script."""

import re

import pytest

from residua.lab.report.guide import VIEWS
from residua.lab.report.page import grid, unpacked
from tests.report.browser import ATTNRES, DELTA, MUDD, SHOTS, Opened, check_cells, is_drawn, overflow, shown
from tests.report.comparison import DESIGNS

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_every_view_is_drawn(chromium, files, width, scheme):
    SHOTS.mkdir(parents=True, exist_ok=True)
    with Opened(chromium, files / "report.html", width=width, height=3000, color_scheme=scheme) as opened:
        assert overflow(opened.page) <= 0
        for view in (key for key, each in VIEWS.items() if not each.optional):
            section = opened.page.locator(f"#{view}")
            section.scroll_into_view_if_needed()
            opened.page.wait_for_timeout(100)
            path = SHOTS / f"{view}-{width}-{scheme}.png"
            section.screenshot(path=path)
            assert is_drawn(path, 24 if view != "knockouts" else 8), path.name
        background = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) == (scheme == "dark")


def test_curves_answer_to_mouse_legend_scale_and_slider(chromium, files, data):
    with Opened(chromium, files / "report.html") as opened:
        page = opened.page
        page.locator("#curves").scroll_into_view_if_needed()
        chart = page.locator("#curves-mount svg.figure[tabindex]")
        box = chart.bounding_box()
        page.mouse.move(box["x"] + box["width"] - 14, box["y"] + box["height"] / 2)
        assert f"{data['curves'][0]['tokens'][-1]:,}" in opened.tip()
        assert all(name in opened.tip() for name in DESIGNS)
        before = chart.locator("path.line").first.get_attribute("d")
        page.get_by_label("log scale").check()
        logged = chart.locator("path.line").first.get_attribute("d")
        assert logged != before
        page.focus("#curves-from")
        page.keyboard.press("Home")
        assert chart.locator("path.line").first.get_attribute("d") != logged
        assert "0 %" in page.inner_text("#curves-mount .bar")
        key = page.locator("#curves-mount .keys button").first
        key.focus()
        page.keyboard.press("Space")
        assert key.get_attribute("aria-pressed") == "false"
        assert chart.locator("g[data-series='0']").count() == 0
        assert page.locator("#depth-mount .keys button").first.get_attribute("aria-pressed") == "false"


def test_slider_follows_the_tokens(chromium, files, data):
    route = data["routing"][ATTNRES]
    with Opened(chromium, files / "report.html") as opened:
        page = opened.page
        opened.choose("a", ATTNRES)
        opened.choose("seed", 2)
        page.focus("#explore-token")
        for token in (1, 2, 3):
            page.focus("#explore-token")
            page.keyboard.press("ArrowRight")
            assert f"{token} of {len(route['tokens'])}: {route['tokens'][token - 1]}" in page.inner_text("#routing")
            flat = iter(unpacked(route, 2))
            weights = []
            for reads in route["reads"]:
                own = {source: next(flat)[token - 1] for source in reads}
                weights.append([own.get(source) for source in range(len(route["sources"]))])
            check_cells(opened, "a", route, weights)
        buttons = page.locator(".tokens button")
        assert buttons.nth(2).get_attribute("aria-pressed") == "true"
        buttons.nth(4).click()
        assert page.input_value("#explore-token") == "5"
        buttons.nth(4).click()
        assert page.input_value("#explore-token") == "0"


def test_side_by_side_shows_the_difference(chromium, files, data):
    a, b = data["routing"][DELTA], data["routing"][ATTNRES]
    with Opened(chromium, files / "report.html") as opened:
        opened.choose("a", DELTA)
        opened.choose("b", ATTNRES)
        check_cells(opened, "a", a, grid(a, 0))
        check_cells(opened, "b", b, grid(b, 0))
        rows = [name for name in a["sites"] if name in b["sites"]]
        columns = [name for name in a["sources"] if name in b["sources"]]
        assert rows
        assert columns
        told = opened.cells("difference", len(rows), len(columns))
        for site, row in zip(rows, told, strict=True):
            for source, text in zip(columns, row, strict=True):
                left, right = (grid(r, 0)[r["sites"].index(site)][r["sources"].index(source)] for r in (a, b))
                said = text.rsplit(": ", 1)[1]
                if left is None or right is None:
                    assert said == "not in both"
                else:
                    assert float(said) == pytest.approx(left - right, abs=6e-4)
        opened.choose("b", -1)
        assert opened.page.locator("[data-map=b]").is_hidden()
        assert opened.page.locator("[data-map=difference]").is_hidden()


def test_clicks_on_labels_and_cells_pick(chromium, files, data):
    route = data["routing"][DELTA]
    with Opened(chromium, files / "report.html") as opened:
        page = opened.page
        opened.choose("a", DELTA)
        opened.choose("b", -1)
        canvas = opened.map("a")
        canvas.hover(position={"x": 80, "y": 80})
        inside = re.match(r"(\S+) \u2190 (\S+): ", opened.tip())
        site, source = inside.groups()
        weight = grid(route, 0)[route["sites"].index(site)][route["sources"].index(source)]
        assert opened.tip().endswith(shown(weight))
        canvas.click(position={"x": 80, "y": 80})
        assert (page.input_value("#explore-site"), page.input_value("#explore-source")) == (site, source)
        assert f"{site} \u2190 {source}: {shown(weight)}" in page.inner_text("#readout")
        assert f"What {site} reads" in page.inner_text("#routing")
        assert f"Who reads {source}" in page.inner_text("#routing")
        reads = page.locator("#routing .bars").first.locator("li")
        own = [w for w in grid(route, 0)[route["sites"].index(site)] if w is not None]
        assert [row.split("\n")[-1] for row in reads.all_inner_texts()] == [shown(w) for w in own]
        readers = page.locator("#routing .bars").nth(1).locator("li")
        column = [row[route["sources"].index(source)] for row in grid(route, 0)]
        assert readers.count() == sum(w is not None for w in column)
        canvas.focus()
        page.keyboard.press("Escape")
        assert page.locator("#routing .bars").count() == 0
        canvas.click(position={"x": 8, "y": 80})
        assert (page.input_value("#explore-site"), page.input_value("#explore-source")) == (site, "")
        page.select_option("#explore-site", "")
        page.select_option("#explore-source", route["sources"][0])
        assert f"Who reads {route['sources'][0]}" in page.inner_text("#routing")


def test_strip_shows_tokens_layer_by_layer(chromium, files, data):
    route = data["routing"][ATTNRES]
    with Opened(chromium, files / "report.html") as opened:
        opened.choose("a", ATTNRES)
        opened.choose("seed", 0)
        site = len(route["sites"]) - 1
        opened.choose("site", route["sites"][site])
        start = sum(map(len, route["reads"][:site]))
        tokens = unpacked(route, 0)
        told = opened.cells("strip", 2, 5)
        for row in range(2):
            source = route["sources"][route["reads"][site][row]]
            for token in range(5):
                expected = f"{route['tokens'][token]}: {route['sites'][site]} \u2190 {source}: "
                assert told[row][token] == expected + shown(tokens[start + row][token])
        opened.page.keyboard.press("Enter")
        assert opened.page.input_value("#explore-token") != "0"


def test_keyboard_reaches_and_works_everything(chromium, files):
    """Tab from the top: every control gets the focus, shows it, and has a name."""
    with Opened(chromium, files / "report.html", height=2500) as opened:
        page = opened.page
        reached = set()
        for _ in range(250):
            page.keyboard.press("Tab")
            where = page.evaluate(
                """() => { const e = document.activeElement; if (e === document.body) return null;
                const named = e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length;
                const s = getComputedStyle(e);
                return [e.tagName.toLowerCase(), e.id, Boolean(named), s.outlineStyle !== 'none']; }"""
            )
            if where is None:
                break
            tag, name, named, outlined = where
            assert named, where
            assert outlined, where
            reached |= {tag, name}
        assert {"a", "button", "select", "canvas", "svg", "summary", "theme", "explore-token", "explore-a"} <= reached
        assert {"path-design", "path-target"} <= reached


def test_theme_can_be_changed(chromium, files):
    with Opened(chromium, files / "report.html", color_scheme="light") as opened:
        page = opened.page

        def looks():
            box = page.locator("[data-map=a] canvas").screenshot()
            return page.evaluate("getComputedStyle(document.body).backgroundColor"), box

        opened.map("a")
        before, light = looks()
        page.click("#theme")
        opened.map("a")
        after, dark = looks()
        assert before != after
        assert light != dark
        page.click("#theme")
        assert looks()[0] == before


def test_page_reads_without_script(chromium, files, data):
    with Opened(chromium, files / "report.html", script=False) as opened:
        page = opened.page
        assert page.locator("#theme").is_hidden()
        for view, least in (("summary", 4), ("curves", 2), ("routing", 3), ("depth", 5), ("axes", 2), ("costs", 2)):
            pictures = page.locator(f"#{view} svg.figure[role=img]")
            assert pictures.count() >= least
            assert pictures.first.is_visible()
        assert page.locator("#results").is_visible()
        assert page.locator("#verdict").is_visible()
        assert page.locator("#paths-mount table").count() == sum(each is not None for each in data["paths"])
        maps = page.locator("#routing .maps svg[role=img]")
        route = data["routing"][MUDD]
        written = maps.first.locator("text.cell").all_text_contents()
        own = [weight for row in grid(route, 0) for weight in row if weight is not None]
        assert [float(text) for text in written] == [pytest.approx(weight, abs=0.0051) for weight in own]
        path = SHOTS / "without-script.png"
        SHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=path, full_page=True)
        assert is_drawn(path)
        assert overflow(page) <= 0


def test_page_prints(chromium, files):
    with Opened(chromium, files / "report.html", color_scheme="dark") as opened:
        page = opened.page
        SHOTS.mkdir(parents=True, exist_ok=True)
        printed = page.pdf(path=SHOTS / "report.pdf", format="A4", print_background=True)
        assert printed.count(b"/Type /Page") > 3
        page.emulate_media(media="print")
        assert page.locator("nav").is_hidden()
        scheme = page.evaluate("getComputedStyle(document.documentElement).colorScheme")
        assert scheme == "light"
