"""The file itself: one of it, with its policy, its data and its pictures inside, the same bytes every time."""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from residua.lab.plots import svg
from residua.lab.report import gather, inspection, render, write, write_inspection
from residua.lab.report.guide import VIEWS
from residua.lab.report.page import HERE, SCRIPTS, as_json
from tests.report.comparison import inspected, large_inspection

pytestmark = pytest.mark.slow  # models are trained

HOSTILE = [
    "</script><script>window.broken = 1</script>",
    "<img src=x onerror='window.broken = 1'>",
    "\"'><svg onload=window.broken=1>",
    "{{ 7 * 7 }}{% raw %}",
    "<!--",
    "\\u003c/script\\u003e",
    "\u202egnp.exe\u2066\u200b\u200d\ufeff\u2028",
    "n" * 10_000,
    "javascript:window.broken=1",
]
VOID = {"meta", "br", "input", "img", "link", "hr"}


class Page(HTMLParser):
    """Elements with their attributes, the text of scripts and styles, and whether all that opens closes."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.found, self.open, self.texts = [], [], {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if self.open and self.open[-1] in ("script", "style", "title"):
            self.texts.setdefault(self.open[-1], []).append(text)


def digest(text):
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def policy(page):
    return next(each["content"] for tag, each in page.found if each.get("http-equiv") == "Content-Security-Policy")


def test_page_is_whole_and_holds_its_data(html, data):
    page = Page(html)
    assert page.open == []
    stored, _ = page.texts["script"]
    held = json.loads(stored)
    assert {key: held[key] for key in data} == json.loads(json.dumps(data))
    ids = [each["id"] for _, each in page.found if "id" in each]
    assert len(ids) == len(set(ids))
    shown = {key for key, view in VIEWS.items() if not view.optional}
    assert shown <= set(ids)
    assert {f"guide-{key}" for key in shown} <= set(ids)
    links = {each["href"].removeprefix("#") for tag, each in page.found if tag == "a"}
    assert links <= set(ids), "every link leads somewhere"


def test_policy_allows_this_script_and_style_alone(html):
    page = Page(html)
    _, script = page.texts["script"]
    (style,) = page.texts["style"]
    assert policy(page) == (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    first = next(place for place, (tag, _) in enumerate(page.found) if tag in ("style", "script"))
    assert any("http-equiv" in each for _, each in page.found[:first]), "the policy comes before what it governs"


def test_page_asks_for_nothing_and_runs_nothing_inline(html):
    for tag, each in Page(html).found:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form", "img", "video", "audio")
        assert "src" not in each
        assert "style" not in each, "the policy would refuse it"
        assert not any(name.startswith("on") for name in each)
        assert each.get("href", "#").startswith("#")
    css = (HERE / "style.css").read_text() + svg.STYLE
    assert "url(" not in css
    assert "@import" not in css


def test_script_makes_no_markup_and_no_request():
    script = "".join((HERE / "script" / f"{name}.js").read_text() for name in SCRIPTS)
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "fetch(",
                 "XMLHttpRequest", "WebSocket", "import(", "localStorage", "http:", "https:"):  # fmt: skip
        assert word not in script.replace("http://www.w3.org/2000/svg", ""), word
    assert script.count("\n") <= 1150
    assert script.isascii()


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_stays_text(text):
    """In the model's name, design, prompt, tokens, sites and sources: the elements are those of harmless text."""
    found = inspected()
    first, *rest = found["record"]["sites"]
    renamed = {"site": f"{first['site']}{text}", "sources": [f"{name}{text}" for name in first["sources"]]}
    hostile = found | {
        "model": text, "design": text, "prompt": text, "tokens": [text for _ in found["tokens"]],
        "record": found["record"] | {"sites": [first | renamed, *rest]},
        "weights": {f"{site}{text if site == first['site'] else ''}": each for site, each in found["weights"].items()},
    }  # fmt: skip
    harmless, page = Page(render(inspection(found))), Page(render(inspection(hostile)))
    assert [tag for tag, _ in page.found] == [tag for tag, _ in harmless.found]
    assert page.open == []
    assert all(len(title) < 400 for title in page.texts["title"])
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200b-\u200f\ufeff\u2028]", render(inspection(hostile)))


def test_json_cannot_close_its_element():
    value = {"</script>": "<!-- ]]> & \u2028 \ud800"}
    text = as_json(value)
    assert not set("<>&") & set(text)
    assert text.isascii()
    assert json.loads(text) == value


def test_equal_runs_give_equal_bytes(compared, html, tmp_path):
    """In another process, with other hashes, into another place."""
    code = "import sys; from residua.lab.report import write; write(sys.argv[1], out=sys.argv[2])"
    subprocess.run(
        [sys.executable, "-c", code, str(compared), str(tmp_path / "again.html")],
        check=True, env=os.environ | {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    assert (tmp_path / "again.html").read_bytes() == html.encode()


def test_page_is_small(html):
    assert len(html.encode()) < 1_000_000
    assert len(render(inspection(large_inspection())).encode()) < 3_000_000


def test_write_puts_one_file_into_the_directory(compared, html, tmp_path):
    assert write(compared) == compared / "report.html"
    assert (compared / "report.html").read_bytes() == html.encode()
    (compared / "report.html").unlink()
    found = write_inspection(inspected(), tmp_path / "new" / "page.html")
    assert [path.name for path in found.parent.iterdir()] == ["page.html"]


def test_charts_are_drawn_to_scale():
    line = svg.Line("c-blue d0", "a", [0.0, 10.0], [0.0, 1.0])
    drawn = svg.lines(svg.Chart("t", "x", [line], share=True))
    width, height = svg.WIDTH, svg.HEIGHT
    first, last = f"{svg.LEFT:.1f} {height - svg.BOTTOM:.1f}", f"{width - svg.RIGHT:.1f} {svg.TOP:.1f}"
    assert f'd="M{first}L{last}"' in drawn


@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [(0, 1, 5, [0, 0.2, 0.4, 0.6, 0.8, 1]), (-0.25, 0.25, 5, [-0.2, -0.1, 0, 0.1, 0.2]), (3, 3, 5, [3])],
)
def test_ticks_are_round(low, high, count, expected):
    assert svg.ticks(low, high, count) == expected


def test_large_static_maps_are_drawn_in_blocks():
    names = [f"s{place}" for place in range(100)]
    cells = [[float(row == column) for column in range(100)] for row in range(100)]
    rows, columns, blocks = svg.pooled(names, names, cells)
    assert (list(rows), len(columns)) == (names[::2], 50)
    assert blocks[0][:2] == [0.5, 0.0]


def test_page_without_noise_has_no_verdict(compared):
    data = gather(compared, checkpoints=False)
    assert all(row["low"] is not None for row in data["summary"]["differences"])
    rows = [row | {"low": None, "high": None, "significant": None} for row in data["summary"]["differences"]]
    silent = data | {"summary": data["summary"] | {"differences": rows}, "quality": [None] * 5, "costs": [None] * 5}
    assert 'class="whisker"' in render(data)
    assert 'class="whisker"' not in render(silent)
