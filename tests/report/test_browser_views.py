"""The views of paths, knock-outs and passes in a real browser, what the page opens on, and what fits where."""

import base64
import re
from array import array

import pytest
import torch

from residua.lab.diagnose.inspect import inspect_ids
from residua.lab.plots.colour import contrast
from residua.lab.report import gather, inspection, render
from residua.lab.report.extra import grid_of
from residua.lab.report.guide import VIEWS
from residua.lab.train import TrainConfig
from residua.model import ModelConfig, Transformer
from tests.report.browser import ATTNRES, MUDD, SHOTS, Opened, is_drawn, overflow, shown
from tests.report.comparison import inspected, train_run
from tests.report.test_loops import LAYOUT

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def signed(value):
    """As the page writes a change or a part of a logit."""
    return "cannot be read" if value is None else f"{'+' if value > 0 else ''}{value:.4f}"


def numbers_of(text):
    return float(text.rsplit(": ", 1)[1])


def test_page_opens_on_the_verdict_and_every_view_explains_itself(chromium, files, data):
    with Opened(chromium, files / "report.html") as opened:
        page = opened.page
        told = data["summary"]["verdict"]
        text = page.inner_text("#verdict")
        for part in ("found", "unclear", "next", "command"):
            assert told[part] in text
        assert page.locator("#verdict").bounding_box()["y"] < 200
        for key, view in VIEWS.items():
            if view.optional:
                continue
            lead = page.locator(f"#{key} .lead").first.inner_text()
            assert view.look in lead
            assert view.look.count(".") == 1, "one sentence"
            if key not in data["absent"]:
                assert page.locator(f"#{key} dl.legend dt").all_inner_texts() == [sign for sign, _ in view.legend]
            page.locator(f"#{key} .lead a").click()
            page.wait_for_function(f"location.hash === '#guide-{key}'")
            assert page.locator(f"#guide-{key} + dd").inner_text() == view.more


@pytest.mark.parametrize("width", [1280, 400])
def test_the_first_table_and_the_differences_fit(chromium, files, width):
    """Nothing to scroll for: at 1280 pixels a table, at 400 cards; the rows of differences take the whole width."""
    with Opened(chromium, files / "report.html", width=width) as opened:
        page = opened.page
        table = page.locator("#summary .table").first
        assert table.evaluate("one => one.scrollWidth - one.clientWidth") <= 0
        room = page.locator("#summary").bounding_box()["width"]
        rows = page.locator("#summary .rows")
        assert rows.bounding_box()["width"] >= 0.98 * room
        picture = rows.locator("svg[role=img]").first.bounding_box()["width"]
        assert picture >= (0.9 if width == 400 else 0.4) * room
        cells = page.locator("#results td:visible")
        for cell in cells.all():
            assert cell.evaluate("one => one.scrollWidth - one.clientWidth") <= 1
        assert overflow(page) <= 0


def test_cells_are_large_enough_for_a_finger(chromium, files):
    """Two dozen columns on a phone: the map scrolls, and its cells stay wide."""
    with Opened(chromium, files / "report.html", width=400) as opened:
        canvas = opened.map("strip")
        height, columns = canvas.bounding_box()["height"], {}
        for x in range(60, 140, 2):
            canvas.hover(position={"x": x, "y": height - 8}, force=True)
            columns.setdefault(opened.tip(), []).append(x)
        widths = [max(xs) - min(xs) + 2 for xs in list(columns.values())[1:-1]]
        assert widths
        assert min(widths) >= 16


def test_digits_can_be_read_on_every_colour(chromium, files):
    """In the static maps of the page, by the contrast that WCAG asks of text."""
    with Opened(chromium, files / "report.html", script=False) as opened:
        pairs = opened.page.locator("#routing .maps svg[role=img]").evaluate_all(
            """all => all.flatMap((one) => [...one.querySelectorAll('text.cell')].map((text) =>
            [text.previousElementSibling.getAttribute('fill'), getComputedStyle(text).fill]))"""
        )
    assert len(pairs) > 20
    for ground, ink in pairs:
        colour = tuple(bytes.fromhex(ground[1:]))
        assert contrast(colour, tuple(int(part) for part in re.findall(r"\d+", ink)[:3])) >= 4.5


def test_axes_have_whole_blocks_and_say_that_they_are_logarithmic(chromium, files):
    for script in (True, False):
        with Opened(chromium, files / "report.html", script=script) as opened:
            panels = opened.page.locator("#depth .panels svg.figure")
            for panel in panels.all():
                below = panel.locator("text.tick.middle").all_text_contents()
                assert below
                assert all(re.fullmatch(r"\d+", text) for text in below), below
                sides = [
                    float(text) for text in panel.locator("text.tick.end").all_text_contents() if text[0].isdigit()
                ]
                assert len(sides) > 1
                logarithmic = "(log scale)" in panel.locator("text.title").text_content()
                gaps = [b - a for a, b in zip(sorted(sides), sorted(sides)[1:], strict=False)]
                even = len(gaps) < 2 or max(gaps) - min(gaps) < 1e-9 * max(sides) + 1e-9
                assert logarithmic or even
        assert "upper bound" not in opened_text(chromium, files)


def opened_text(chromium, files):
    with Opened(chromium, files / "report.html") as opened:
        return opened.page.inner_text("#costs")


def test_every_map_of_the_two_axes_has_its_scale(chromium, files, data):
    with Opened(chromium, files / "report.html") as opened:
        figures = opened.page.locator("#axes-mount figure:has(canvas)")
        parts = [each[axis] for each in data["axes"] for axis in ("depth", "sequence") if each[axis]]
        assert figures.count() == len(parts)
        for figure, part in zip(figures.all(), parts, strict=True):
            largest = max(abs(value) for row in part["weights"] for value in row if value is not None)
            assert figure.locator(".ramp span").nth(1).inner_text() == f"{largest:.3g}"


def test_paths_read_as_the_data_and_add_up(chromium, files, data):
    each = data["paths"][ATTNRES]
    with Opened(chromium, files / "report.html") as opened:
        page = opened.page
        page.select_option("#path-design", str(ATTNRES))
        for which, target in enumerate(each["targets"]):
            page.select_option("#path-target", str(which))
            token = 4
            page.locator("#paths-mount .tokens button").nth(token).click()
            packed, count = array("h", base64.b64decode(target["packed"])), len(target["tokens"])
            cells = grid_of(
                each, [packed[cell * count + token] * target["step"] for cell in range(len(packed) // count)]
            )
            told = opened.cells("paths", len(each["sites"]), len(each["sources"]))
            for site, row, own in zip(each["sites"], told, cells, strict=True):
                assert row == [f"{s} through {site}: {signed(v)}" for s, v in zip(each["sources"], own, strict=True)]
            said = page.inner_text("#path-readout")
            assert said.startswith(f"The logit of {target['tokens'][token]} is {target['logits'][token]:.5g}")
            page.select_option("#path-target", str(which))
            parts = [numbers_of(text) for text in told[each["sites"].index("head")] if "cannot" not in text]
            left = target["rest"][token]
            assert sum(parts) + left == pytest.approx(target["logits"][token], abs=len(parts) * target["step"])
        page.locator("#paths-mount canvas").focus()
        page.keyboard.press("Escape")
        bars = page.locator("#path-parts li").all_inner_texts()
        assert len(bars) == len(each["reads"][each["sites"].index("head")])


def test_knockouts_read_as_the_data(chromium, knocked, ablated):
    with Opened(chromium, knocked) as opened:
        for place in (MUDD, ATTNRES):
            each = ablated["knockouts"][place]
            canvas = opened.page.locator(f"#knockouts-mount figure[data-series='{place}'] canvas")
            canvas.scroll_into_view_if_needed()
            opened.page.wait_for_timeout(60)
            told = opened.read(canvas, len(each["sites"]), len(each["sources"]))
            for site, row, own in zip(each["sites"], told, grid_of(each, each["mean"]), strict=True):
                assert row == [f"{site} without {s}: {signed(v)}" for s, v in zip(each["sources"], own, strict=True)]
        SHOTS.mkdir(parents=True, exist_ok=True)
        opened.page.locator("#knockouts").screenshot(path=SHOTS / "knockouts.png")
        assert is_drawn(SHOTS / "knockouts.png")


def test_passes_read_as_the_data(chromium, tmp_path):
    config = TrainConfig(
        design="attnres", layout=LAYOUT, width=16, depth=2, heads=2, steps=1, batch=2, context=16, eval_every=1,
        eval_windows=2, save_every=1,
    )  # fmt: skip
    train_run(tmp_path / "run", config, routing=True)
    data = gather(tmp_path / "run")
    (each,) = data["loops"]
    assert each["sites"] == ["l1_attn", "l1_mlp"]
    (tmp_path / "page.html").write_text(render(data), encoding="utf-8")
    with Opened(chromium, tmp_path / "page.html") as opened:
        maps = opened.page.locator("#loops-mount canvas")
        assert maps.count() == len(each["weights"]) == 2
        for turn, weights in enumerate(each["weights"]):
            maps.nth(turn).scroll_into_view_if_needed()
            opened.page.wait_for_timeout(60)
            told = opened.read(maps.nth(turn), len(each["sites"]), len(each["sources"]))
            for site, row, own in zip(each["sites"], told, weights, strict=True):
                named = [
                    f"pass {turn + 1}: {site} \u2190 {s}: {shown(w)}" for s, w in zip(each["sources"], own, strict=True)
                ]
                assert row == named


def test_two_models_stand_side_by_side(chromium, tmp_path):
    first, second = inspected("attnres", loss=2.0), inspected("delta:blocks=2", loss=1.5)
    (tmp_path / "both.html").write_text(render(inspection(first, second)), encoding="utf-8")
    with Opened(chromium, tmp_path / "both.html") as opened:
        page = opened.page
        assert page.locator("[data-map=b] canvas").is_visible()
        assert page.locator("[data-map=difference] canvas").is_visible()
        assert "The loss of the first is 2.0000 nats per token. The loss of the second is 1.5000" in page.inner_text(
            "header"
        )
        assert "not run on a prompt" not in page.inner_text("body")
        assert page.locator("#knockouts").count() == 0
        assert overflow(page) <= 0


@pytest.mark.parametrize("theme", ["", "light", "dark"])
@pytest.mark.parametrize("system", ["light", "dark"])
def test_notebook_figures_follow_the_notebook_or_the_system(chromium, tmp_path, system, theme):
    """On a ground of their own: ink and ground are told apart whatever is around them."""
    model = Transformer(ModelConfig(vocab=64, width=16, depth=2, heads=2, design="attnres"))
    seen = inspect_ids(model, torch.arange(8), tokens=list("notebook"))
    light = {"": "", "light": ' data-jp-theme-light="true"', "dark": ' data-jp-theme-light="false"'}[theme]
    file = tmp_path / "cell.html"
    file.write_text(f"<!DOCTYPE html><meta charset='utf-8'><body{light}>{seen._repr_html_()}</body>")
    with Opened(chromium, file, script=False, color_scheme=system) as opened:
        page = opened.page
        ground, ink = page.evaluate(
            """() => [getComputedStyle(document.querySelector('.residua')).backgroundColor,
            getComputedStyle(document.querySelector('.residua text.title')).fill]"""
        )
        colours = [tuple(int(part) for part in re.findall(r"\d+", each)[:3]) for each in (ground, ink)]
        assert contrast(*colours) >= 7
        assert (sum(colours[0]) < 200) == ((theme or system) == "dark")
        page.screenshot(path=SHOTS / f"notebook-{system}-{theme or 'system'}.png")
