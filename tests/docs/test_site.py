"""The built documentation: complete, and silent on the network."""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from filelock import FileLock

import residua
from residua.testing import LAWS

pytestmark = pytest.mark.slow  # the site is built

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(page.stem for page in (ROOT / "docs").glob("*.md"))


def sources():
    """What the site is made of."""
    folders = ("docs", "examples", "recipes", "results", "src/residua")
    named = ("mkdocs.yml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")
    found = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return [*(path for path in found if path.is_file() and "__pycache__" not in path.parts), *map(ROOT.joinpath, named)]


@pytest.fixture(scope="session")
def site(tmp_path_factory, worker_id):
    """The site: that of `make docs`, which builds it alike, if it is newer than all it is made of; or built once for
    all workers of a run."""
    made = ROOT / "site" / "built"  # a build begins by emptying the folder, and make leaves this at a good end
    if made.exists() and made.stat().st_mtime > max(path.stat().st_mtime for path in sources()):
        return made.parent
    base = tmp_path_factory.getbasetemp()
    shared = (base if worker_id == "master" else base.parent) / "site"
    with FileLock(f"{shared}.lock"):
        if not (shared / "built").exists():
            done = subprocess.run(
                [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", shared],
                cwd=ROOT, capture_output=True, text=True, timeout=300,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
            (shared / "built").touch()
    return shared


class Page(HTMLParser):
    """The ids of a page, and what a browser would load for it."""

    LOADS = ("link", "script", "img", "iframe", "source", "video", "audio", "embed", "object", "use", "image")

    def __init__(self, path):
        super().__init__()
        self.ids, self.loads = set(), []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.ids.add(attributes.get("id"))
        # rel=prev and rel=next name pages and load nothing
        if tag in self.LOADS and attributes.get("rel") not in ("prev", "next", "canonical"):
            given = (attributes.get(key) for key in ("src", "href", "srcset", "data", "poster"))
            self.loads += [(tag, value) for value in given if value]


def remote(address):
    return re.match(r"(https?:)?//", address) is not None


def test_site_has_a_section_for_every_design(site):
    page = Page(site / "designs.html")
    assert set(residua.names()) <= page.ids
    text = (site / "designs.html").read_text()
    for name in residua.names():
        for option in residua.options.options_of(residua.design(name)):
            assert f"<td><code>{option}</code></td>" in text, f"{name}: {option} is in no table"


def test_site_has_a_section_for_every_law(site):
    assert set(LAWS) <= Page(site / "laws.html").ids


@pytest.mark.parametrize("name", PAGES)
def test_page_loads_nothing_from_elsewhere(site, name):
    path = site / f"{name}.html"
    assert Page(path).loads, "a page without even a style sheet"
    assert [load for load in Page(path).loads if remote(load[1])] == []
    assert "<!-- residua:" not in path.read_text(), "a comment that the build did not answer"


def test_style_sheets_load_nothing_from_elsewhere(site):
    sheets = list(site.rglob("*.css"))
    assert sheets
    for sheet in sheets:
        found = re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')\s]+)", sheet.read_text(encoding="utf-8"))
        assert [address for address in found if remote(address)] == [], sheet.name


def test_site_holds_pages_and_no_sources(site):
    assert not list(site.rglob("*.py"))
    assert not list(site.rglob("*.md"))


def test_findings_lead_to_the_committed_pages(site):
    committed = sorted((ROOT / "results").glob("*/report.html"))
    assert committed
    findings = (site / "findings.html").read_text(encoding="utf-8")
    for page in committed:
        address = f"reports/{page.parent.name}.html"
        assert (site / address).read_bytes() == page.read_bytes()
        assert f'href="{address}"' in findings


def test_names_of_rows_are_whole(site):
    """Their bar, which splits a row of Markdown, neither cuts them nor leaves its escape."""
    findings = (site / "findings.html").read_text(encoding="utf-8")
    assert "<code>delta:blocks=8 | 48x26</code>" in findings
    assert "\\|" not in findings


def test_unknown_comment_stops_the_build(tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    for file in (ROOT / "docs").glob("*.py"):
        shutil.copy(file, docs)
    (docs / "index.md").write_text("<!-- residua: nonsense -->\n")
    (tmp_path / "mkdocs.yml").write_text("site_name: x\nhooks: [docs/hooks.py]\nexclude_docs: '*.py'\n")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode
    assert "index.md asks for 'nonsense'; docs/hooks.py answers design_table" in done.stderr


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", ["index", "designs"])
def test_page_opens_from_a_folder(site, chromium, name, width):
    page = chromium.new_page(viewport={"width": width, "height": 800})
    heard, asked = [], []
    page.on("console", lambda message: heard.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((site / f"{name}.html").as_uri())
    page.wait_for_load_state("networkidle")
    assert heard == []
    assert [address for address in asked if not address.startswith(("file:", "data:", "blob:"))] == []
    assert len(page.inner_text("article")) > 500
    title = page.locator("article h1")
    assert title.is_visible()
    assert title.bounding_box()["height"] > 10
    overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow <= 0, f"the page is {overflow} px wider than the window"
    page.close()


@pytest.mark.browser
def test_search_works_from_a_folder(site, chromium):
    page = chromium.new_page(viewport={"width": 1280, "height": 800})
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("/")
    page.keyboard.type("Sinkhorn")
    page.wait_for_selector(".md-search-result__item", timeout=20_000)
    assert "mhc" in page.inner_text(".md-search-result__list").lower()
    page.close()
