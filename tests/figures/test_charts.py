"""The pictures of pages and notebooks: readable digits, honest axes, and the numbers that they were drawn from."""

import re
from xml.etree import ElementTree

import pytest

from residua.lab import figures
from residua.lab.compare import read_series
from residua.lab.plots import svg
from residua.lab.plots.charts import curve_charts, depth_charts, designs, quality_charts
from residua.lab.plots.colour import contrast, is_dark, shade
from residua.lab.plots.heat import _root_ticks
from residua.lab.plots.notebook import comparison_html
from residua.lab.plots.parted import by_size
from residua.lab.plots.rows import Mark, drawn
from residua.lab.plots.standalone import listed
from residua.lab.plots.style import styles
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


def test_rows_are_parted_by_their_size():
    labels = {1: "delta | swa,attn,mlp | 16x8", 2: "delta | attn,mlp | 2x8", 3: "standard | swa,attn,mlp | 2x8"}
    assert list(by_size(labels).items()) == [
        ("2x8", {2: "delta | attn,mlp", 3: "standard | swa,attn,mlp"}),
        ("16x8", {1: "delta | swa,attn,mlp"}),
    ]
    for whole in ({1: "delta", 2: "standard | 2x8"}, {1: "delta | 2x8", 2: "standard | 2x8"}, {}):
        assert by_size(whole) == {"": whole}


def sized(*sizes):
    """Data of two designs at some sizes, one of which has the baseline alone."""
    rows = [(name, size) for size in sizes for name in ("standard", "delta") if (name, size) != ("delta", "8x8")]
    slugs = {f"{name}-{size}": f"{name} | {size}" for name, size in rows}
    band = {"mean": [3.0, 2.0, 1.0], "low": [2.9, 1.9, 0.9], "high": [3.1, 2.1, 1.1]}
    site = {"sites": ["l0_attn", "head"], "position": [0, 1], "deep": [False, True], "max_weight": [0.5, 0.7]}
    point = {"speed": 1.0, "memory": 1.0, "bits_per_byte": {"mean": 2.0, "low": 1.9, "high": 2.1}}
    return {
        "labels": slugs,
        "curves": {slug: {"tokens": [0, 1, 2], "cpu_seconds": [0, 1, 2], "loss": band} for slug in slugs},
        "depth": dict.fromkeys(slugs, site),
        "quality": {slug: {**point, "baseline": f"standard-{slug.split('-')[1]}"} for slug in slugs},
    }


def test_a_design_looks_alike_at_every_size():
    looks = styles(sized("2x8", "4x8"))
    assert looks["delta-2x8"] == looks["delta-4x8"] != looks["standard-2x8"] == looks["standard-4x8"]


def test_every_chart_shows_one_size():
    """Its rows and no others, its name in the title; a point alone is no comparison."""
    data = listed(sized("4x8", "2x8", "8x8"))
    drawn = {
        "validation loss": curve_charts(data),
        "largest share of a read": depth_charts(data, [("max_weight", "largest share of a read")]),
        "bits per byte and (?:speed|memory)": quality_charts(data),
    }
    for title, charts in drawn.items():
        seen = [
            (re.search(rf">{title}, (\d+x8)<", chart)[1], set(re.findall(r"<title>[a-z]+ \| (\d+x8)", chart)))
            for chart in charts
        ]
        assert {size for size, _ in seen} >= {"2x8", "4x8"}
        assert all(rows == {size} for size, rows in seen)
    assert len(drawn["bits per byte and (?:speed|memory)"]) == 4
    assert [each["label"] for each in designs(data)] == ["standard", "delta"]
    assert not any(", 2x8<" in chart for chart in curve_charts(listed(sized("2x8"))))


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
