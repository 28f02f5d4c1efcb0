"""The pictures of pages and notebooks: readable digits, honest axes, and the numbers that they were drawn from."""

import re
from xml.etree import ElementTree

import pytest

from residua.lab import figures
from residua.lab.compare import read_series
from residua.lab.plots import svg
from residua.lab.plots.colour import contrast, is_dark, shade
from residua.lab.plots.heat import _root_ticks
from residua.lab.plots.notebook import comparison_html
from residua.lab.plots.rows import Mark, drawn
from tests.figures.synthetic import write_comparison


@pytest.mark.parametrize("signed", [False, True])
def test_digits_have_contrast_on_every_colour_of_a_scale(signed):
    for place in range(201):
        value = place / 200 if not signed else place / 100 - 1
        colour = shade(value, 1.0, signed=signed)
        assert contrast(colour, (255, 255, 255) if is_dark(colour) else (0, 0, 0)) >= 4.5


def test_contrast_is_that_of_wcag():
    assert contrast((255, 255, 255), (0, 0, 0)) == pytest.approx(21)
    assert contrast((119, 119, 119), (255, 255, 255)) == pytest.approx(4.48, abs=0.01)


def test_whole_ticks_are_whole():
    assert svg.ticks(0, 3, 6) == [0, 0.5, 1, 1.5, 2, 2.5, 3]
    assert svg.ticks(0, 3, 6, whole=True) == [0, 1, 2, 3]
    assert svg.ticks(0, 14, 6, whole=True) == [0, 5, 10]


def test_log_axes_are_named_and_never_without_numbers():
    assert svg.log_ticks(0.2, 6) == [0.2, 0.5, 1, 2, 5]
    assert len(svg.log_ticks(2.1, 4.9)) > 1
    line = svg.Line("c-blue d0", "a", [0.0, 1.0], [0.01, 1.0])
    assert "loss (log scale)<" in svg.lines(svg.Chart("loss", "x", [line]))
    assert "(log scale)" not in svg.lines(svg.Chart("loss", "x", [svg.Line("c-blue d0", "a", [0.0, 1.0], [1.0, 2.0])]))


def test_a_colour_bar_ends_at_the_largest_weight():
    for top in (0.93, 1.0, 1.12, 7.3, 0.031):
        ticks = _root_ticks(top, apart=0.08)
        assert ticks[-1] == pytest.approx(top, rel=5e-3)
        assert ticks == sorted(set(ticks))
    assert ">1.12<" in svg.ramp(1.12)
    assert ">-1.12<" in svg.ramp(1.12, signed=True)


def test_rows_are_drawn_to_scale_and_say_their_words():
    marks = [Mark("c-blue d0", "<a>", -0.5, "better", bar=(-1.0, 0.0)), Mark("c-blue d0", "b", 1.0, "worse", False)]
    root = ElementTree.fromstring(drawn(marks, (-1.0, 1.0), 0.0, str, "t"))
    first, second, axis = root.findall("li")
    assert first.find("bdi").text == "<a>"
    assert first.find("span").text == "better"
    assert [each.get("cx") for each in root.iter("circle")] == ["26.00%", "98.00%"]
    assert second.find(".//circle").get("class") == "dot hollow"
    (bar,) = [each for each in first.iter("line") if each.get("class") == "whisker"]
    assert (bar.get("x1"), bar.get("x2")) == ("2.00%", "50.00%")
    assert axis.get("aria-hidden") == "true"
    assert drawn([], (0, 1), 0, str, "t") == ""


def test_notebook_shows_the_pictures_of_a_comparison(tmp_path):
    """One well-formed piece, for light and dark, with every mean weight and the words of every difference."""
    write_comparison(tmp_path)
    found = figures.collect(read_series(tmp_path))
    labels = list(found["labels"].values())
    gap = {"mean": -0.1, "low": -0.2, "high": 0.05, "significant": False, "words": "inside <the> noise"}
    html = comparison_html(found, [(labels[1], gap), ("not finished", gap)])
    root = ElementTree.fromstring(html)
    assert root.get("class") == "residua"
    assert [each.text for each in root.iter("span") if each.text] == ["inside <the> noise"]
    written = [float(each.text) for each in root.iter("text") if each.get("class", "").startswith("cell")]
    weights = [w for each in found["routing"].values() for row in each["weights"] for w in row if w is not None]
    assert written == pytest.approx(weights, abs=0.0051)
    assert "light-dark(" in html
    assert ":root" not in html
    assert not re.search("http:|https:|url\\(|@import|<script", html), "nothing is fetched and nothing runs"
