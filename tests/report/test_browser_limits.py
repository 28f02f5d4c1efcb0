"""The page in a real browser at its limits: hostile text, a breach, its size and its speed."""

import pytest

from residua.lab.report import gather, inspection, render
from tests.report.browser import SHOTS, Opened, is_drawn, overflow
from tests.report.comparison import inspected, large_inspection, make_comparison
from tests.report.test_page import HOSTILE

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_hostile_text_neither_runs_nor_breaks_the_page(chromium, tmp_path):
    """In the folder's name, the corpus, the prompt, the command, tokens, sites and sources."""
    out = tmp_path / HOSTILE[1].replace("/", "")
    make_comparison(out, designs=("standard", "delta"), seeds=1, corpus=f"dir:{HOSTILE[0]}{HOSTILE[6]}")
    results = (out / "results.json").read_text()
    (out / "results.json").write_text(
        results.replace("residua compare", "residua " + "<script>window.broken=1<\\/script>")
    )
    (tmp_path / "runs.html").write_text(render(gather(out, prompt="".join(HOSTILE[:7]))), encoding="utf-8")
    for place, text in enumerate(HOSTILE):
        found = inspected()
        hostile = {"model": text, "design": text, "tokens": [text] * len(found["tokens"])}
        (tmp_path / f"{place}.html").write_text(render(inspection(found | hostile)), encoding="utf-8")
    for file in sorted(tmp_path.glob("*.html")):
        # what breaks a wide page breaks a narrow one: the one with every text in it is opened in both
        for width in (1280, 400) if file.stem == "runs" else (400,):
            with Opened(chromium, file, width=width) as opened:
                opened.page.locator("#routing").scroll_into_view_if_needed()
                opened.map("a").hover(position={"x": 90, "y": 60})
                assert opened.page.evaluate("window.broken") is None
                assert overflow(opened.page) <= 0, file.name


def test_policy_stops_what_gets_in(chromium, files):
    """Even if markup got in, nothing would run and nothing would be asked for."""
    opened = Opened(chromium, files / "report.html")
    with opened.context:
        opened.page.evaluate(
            """() => { const script = document.createElement('script'); script.textContent = 'window.broken = 1';
            document.body.append(script);
            const image = document.createElement('img'); image.src = 'http://example.invalid/x.png';
            document.body.append(image); document.body.setAttribute('onclick', 'window.broken = 2'); }"""
        )
        opened.page.mouse.click(5, 300)
        opened.page.wait_for_timeout(200)
        assert opened.page.evaluate("window.broken") is None
        assert len([text for text in opened.heard if "Content Security Policy" in text]) >= 3
        assert opened.refused == [("http://example.invalid/x.png", "csp")]


def test_page_opens_in_under_a_second(chromium, files):
    """Of processor time of the page's thread, from the file to the last picture: a busy machine has no say in it."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    with context:
        page = context.new_page()
        session = context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        page.goto((files / "report.html").as_uri())
        page.wait_for_selector("html[data-ready]")
        page.wait_for_timeout(300)
        measured = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
        assert 0 < measured["TaskDuration"] < 1.0


def test_large_maps_do_not_lag(chromium, tmp_path):
    """100 sites and 200 sources: a tenth of a second is the most that still feels immediate."""
    file = tmp_path / "large.html"
    file.write_text(render(inspection(large_inspection())), encoding="utf-8")
    with Opened(chromium, file) as opened:
        page = opened.page
        opened.map("a")
        moved, slid = page.evaluate(
            """() => {
              const spent = (count, act) => {
                const list = Array.from({ length: count }, (_, turn) => {
                  const start = performance.now(); act(turn); return performance.now() - start; });
                return list.sort((a, b) => a - b)[Math.floor(count / 2)]; };
              const canvas = document.querySelector('[data-map=a] canvas');
              const box = canvas.getBoundingClientRect();
              const slider = document.querySelector('#explore-token');
              return [
                spent(60, (turn) => canvas.dispatchEvent(new PointerEvent('pointermove',
                  { clientX: box.left + 80 + 9 * turn, clientY: box.top + 120 + 5 * turn }))),
                spent(24, (turn) => { slider.value = turn % 13; slider.dispatchEvent(new Event('input')); })]; }"""
        )
        assert moved < 100
        assert slid < 100
        path = SHOTS / "large.png"
        SHOTS.mkdir(parents=True, exist_ok=True)
        page.locator("[data-map=a]").screenshot(path=path)
        assert is_drawn(path)
        assert overflow(page) <= 0
