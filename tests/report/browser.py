"""A page in Chromium: opened, read cell by cell, and looked at."""

from pathlib import Path

from tests.report.comparison import DESIGNS

SHOTS = Path(__file__).resolve().parents[2] / "artifacts" / "report"
ATTNRES, DELTA, MUDD, DDL = (DESIGNS.index(name) for name in ("attnres:heads=2", "delta:blocks=2", "mudd", "ddl"))


class Opened:
    """A page that was opened, what it said on the console and what it asked for."""

    def __init__(self, chromium, file, *, width=1280, height=900, script=True, **options):
        self.context = chromium.new_context(
            viewport={"width": width, "height": height}, java_script_enabled=script, **options
        )
        self.page = self.context.new_page()
        self.heard, self.asked = [], []
        self.page.on("console", lambda message: self.heard.append(message.text))
        self.page.on("pageerror", lambda error: self.heard.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.refused = []
        self.page.on("requestfailed", lambda request: self.refused.append((request.url, request.failure)))
        self.page.goto(file.as_uri())
        if script:
            self.page.wait_for_selector("html[data-ready]")

    def __enter__(self):
        return self

    def __exit__(self, *failed):
        if failed[0] is None:
            assert self.heard == []
            assert [url for url in self.asked if not url.startswith("file:")] == []
        self.context.close()

    def choose(self, name, value):
        self.page.select_option(f"#explore-{name}", str(value))

    def map(self, key):
        """The canvas of a map, in view and drawn."""
        canvas = self.page.locator(f"[data-map={key}] canvas")
        canvas.scroll_into_view_if_needed()
        self.page.wait_for_timeout(60)
        return canvas

    def tip(self):
        return self.page.inner_text(".tip")

    def cells(self, key, rows, columns):
        """Every cell of a map of the explorer."""
        return self.read(self.map(key), rows, columns)

    def read(self, canvas, rows, columns):
        """Every cell of a map as the arrow keys read it: [row][column] text."""
        canvas.focus()
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("ArrowDown")
        found = []
        for row in range(rows):
            told = [self.tip()]
            for _ in range(columns - 1):
                self.page.keyboard.press("ArrowLeft" if row % 2 else "ArrowRight")
                told.append(self.tip())
            found.append(told[::-1] if row % 2 else told)
            self.page.keyboard.press("ArrowDown")
        return found


def shown(value):
    """A weight as the page writes it: ties are away from zero there."""
    return "cannot be read" if value is None else f"{value + 1e-12:.3f}"


def overflow(page):
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def check_cells(opened, key, route, weights):
    """A map against its numbers."""
    told = opened.cells(key, len(route["sites"]), len(route["sources"]))
    for site, row, own in zip(route["sites"], told, weights, strict=True):
        expected = [f"{site} \u2190 {s}: {shown(w)}" for s, w in zip(route["sources"], own, strict=True)]
        assert row == expected


def is_drawn(path, least=24):
    """Whether a screenshot shows something: many colours, and no one of them everywhere."""
    from PIL import Image

    with Image.open(path) as image:
        colours = image.convert("RGB").getcolors(1 << 24)
        return len(colours) >= least and max(count for count, _ in colours) < 0.97 * image.width * image.height
