"""What is drawn is the data, the same data give the same bytes, and one series or two hundred sources still draw."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.image import imread

from residua.lab import figures, plots
from residua.lab.compare import read_series
from residua.lab.plots import heat, lines
from tests.figures.synthetic import write_comparison

pytestmark = pytest.mark.slow  # every figure is drawn

EVERY = {
    "curves-tokens", "curves-time", "routing", "routing-attnres", "routing-denseformer", "depth-weights", "stream-rms",
    "quality-speed",
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("comparison")
    write_comparison(out)
    return figures.collect(read_series(out))


@pytest.fixture(scope="module")
def drawn(data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("drawn") / "figures"
    written = plots.draw(data, out)
    assert sorted(written) == sorted(out.iterdir())
    return out


def many(series: int, sources: int, *, routed: int = 1) -> dict[str, Any]:
    """Data of so many series, of which some mix so many sources."""
    draw = np.random.default_rng(0)
    slugs = [f"series-{i}" for i in range(series)]
    band = {"mean": [3.0, 2.0], "low": [2.9, 1.9], "high": [3.1, 2.1]}
    weights = np.tril(draw.random((sources, sources)))
    matrix = [[float(w) if j <= i else None for j, w in enumerate(row)] for i, row in enumerate(weights)]
    names = [f"l{i}_attn" for i in range(sources)]
    numbers = [float(value) for value in draw.random(sources)]
    return {
        "labels": {slug: f"design_{i}:a_rather_long_option={i} | attn,mlp" for i, slug in enumerate(slugs)},
        "baseline": slugs[0],
        "seeds": dict.fromkeys(slugs, 3),
        "missing": [],
        "band": figures.BAND,
        "notes": [],
        "curves": {slug: {"tokens": [0, 9], "cpu_seconds": [0.0, 1.0 + i], "loss": band, "bits_per_byte": band}
                   for i, slug in enumerate(slugs)},
        "routing": {slug: {"sites": names, "sources": names, "weights": matrix, "signed": i % 2 == 1}
                    for i, slug in enumerate(slugs[:routed])},
        "depth": {slug: {"sites": names, "position": list(range(sources)), "deep": [True] * sources,
                         "source_count": [2] * sources,
                         **dict.fromkeys((*figures.OF_A_READ, *figures.OF_A_SITE), numbers)} for slug in slugs},
        "quality": {slug: {"baseline": slugs[0], "parameters": 1, "tokens_per_cpu_second": 1.0,
                           "speed": 1 / (1 + i), "memory": 1.0 + i,
                           "bits_per_byte": {"mean": 2.0, "low": 1.9, "high": 2.1}} for i, slug in enumerate(slugs)},
    }  # fmt: skip


def check_image(path: Path) -> None:
    pixels = imread(path)[..., :3]
    assert min(pixels.shape[:2]) >= 300, path.name
    assert pixels.std() > 0.03, f"{path.name} is all but blank"
    assert (pixels.min(-1) < 0.5).mean() > 0.002, f"{path.name} has no ink"


def test_every_size_has_a_row_of_panels():
    """With the curves of its own rows, and one legend for all of them."""
    data = many(4, 2)
    data["labels"] = dict(zip(data["labels"], ("a | 2x8", "b | 2x8", "a | 4x8", "b | 4x8"), strict=True))
    data["quality"]["series-2"]["baseline"] = "series-2"
    for axis in ("tokens", "cpu_seconds"):
        figure = lines.curves(data, axis, axis, enlarged=0.5)
        assert [len(axes.lines) - (axis == "cpu_seconds") * (place % 2) for place, axes in enumerate(figure.axes)] == [
            2
        ] * 4
        assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
        assert [each.get_text() for axes in figure.axes for each in axes.texts] == ["2x8", "4x8"]
    assert len(lines.over_depth(data, {"max_weight": "w", "normalised_entropy": "e"}, shares=True).axes) == 4
    assert [len(axes.collections) for axes in lines.quality(data).axes] == [2] * 4


def test_draw_writes_every_plot_twice(drawn):
    assert {path.name for path in drawn.iterdir()} == {f"{name}.{kind}" for name in EVERY for kind in ("png", "svg")}


@pytest.mark.parametrize("name", sorted(EVERY))
def test_picture_is_not_blank(drawn, name):
    check_image(drawn / f"{name}.png")
    svg = (drawn / f"{name}.svg").read_text()
    assert svg.count("<path") > 20
    assert "dc:date" not in svg


def test_same_data_give_the_same_bytes(data, drawn, tmp_path):
    """Also through JSON, and whatever the user's own settings are, which are left as they were."""
    with mpl.rc_context({"axes.facecolor": "red", "font.size": 20, "svg.hashsalt": None}):
        before = dict(mpl.rcParams)
        written = plots.draw(json.loads(json.dumps(data)), tmp_path)
        assert dict(mpl.rcParams) == before
    for path in written:
        assert path.read_bytes() == (drawn / path.name).read_bytes(), path.name


def test_curves_show_the_data(data):
    figure = lines.curves(data, "cpu_seconds", "", enlarged=0.5)
    for axes in figure.axes:
        for line, slug in zip(axes.lines, data["labels"], strict=False):
            assert list(line.get_xdata()) == data["curves"][slug]["cpu_seconds"]
            assert list(line.get_ydata()) == data["curves"][slug]["loss"]["mean"]
        band = axes.collections[1].get_paths()[0].vertices
        assert {1.8, 1.9, 5.0, 5.5} <= set(band[:, 1]), "attnres from its lowest to its highest seed"
    end = figure.axes[1]
    assert end.get_xlim() == (2.5, 8.0), "from half of the shortest on"
    assert end.get_ylim()[0] < 1.8
    assert 3.4 < end.get_ylim()[1] < 4.2, "the beginning is cut off"


def test_quality_shows_the_data(data):
    for axes, key in zip(lines.quality(data).axes, ("speed", "memory"), strict=True):
        points = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines[1:]]
        assert points == [(each[key], each["bits_per_byte"]["mean"]) for each in data["quality"].values()]


def test_depth_shows_the_data(data):
    (axes,) = lines.over_depth(data, {"max_weight": ""}, shares=True).axes
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines] == [
        ([0.5, 1.0], [0.75, 0.6]),
        ([1.0, 2.0], [0.75, 0.5]),
    ]


def test_heat_map_shows_the_data(data):
    for slug, routing in data["routing"].items():
        axes = heat.alone(data, slug).axes[0]
        shown = axes.images[0].get_array().filled(np.nan)
        np.testing.assert_array_equal(shown, np.array(routing["weights"], dtype=float))
        assert [label.get_text() for label in axes.get_xticklabels()] == routing["sources"]
        assert [label.get_text() for label in axes.get_yticklabels()] == routing["sites"]
        assert axes.get_ylim() == (len(routing["sites"]), 0), "the first site on top"
    written = [text.get_text() for text in heat.alone(data, "denseformer").axes[0].texts]
    assert written == ["-.50", "1.50", ".25", "-.25", ".50"]


@pytest.mark.parametrize(
    ("slug", "places"),
    [
        ("attnres", {0.0: 0.0, 0.25 * 0.75: 0.5, 0.75: 1.0}),
        ("denseformer", {-1.5: 0.0, -0.375: 0.25, 0.0: 0.5, 0.375: 0.75, 1.5: 1.0}),
    ],
)
def test_colours_are_square_roots_and_signs_diverge(data, slug, places):
    norm = heat.alone(data, slug).axes[0].images[0].norm
    for weight, place in places.items():
        assert float(norm(weight)) == pytest.approx(place)


def test_page_has_one_scale_for_each_kind_of_weight(data):
    wider = {**data, "routing": {**data["routing"], "standard": {**data["routing"]["attnres"], "weights": [[1.0]]}}}
    norms = [axes.images[0].norm for axes in heat.page(wider).axes if axes.images]
    assert [(norm.vmin, norm.vmax) for norm in norms] == [(0, 1), (-1.5, 1.5), (0, 1)]


def test_page_holds_twelve_designs(tmp_path):
    heat.page(many(12, 3, routed=12)).savefig(tmp_path / "page.png")
    check_image(tmp_path / "page.png")


def test_series_look_different_and_the_same_everywhere():
    looks = plots.styles(many(12, 2))
    assert len({(look.colour, str(look.dash)) for look in looks.values()}) == 12
    assert len({(look.colour, look.marker) for look in looks.values()}) == 12
    assert [slug for slug, look in looks.items() if look.colour == plots.OKABE_ITO["black"]] == ["series-0"]
    assert {look.colour for look in looks.values()} <= set(plots.OKABE_ITO.values())
    axes = lines.curves(many(12, 2), "tokens", "", enlarged=0.5).axes[0]
    assert [to_hex(line.get_color()).upper() for line in axes.lines] == [look.colour for look in looks.values()]


@pytest.mark.parametrize(("series", "sources", "routed"), [(1, 1, 1), (1, 200, 1), (12, 3, 1)])
def test_draw_takes_few_and_many(tmp_path, series, sources, routed):
    written = plots.draw(many(series, sources, routed=routed), tmp_path)
    assert len(written) == 2 * (5 + routed + (series > 1)), "a point alone compares with nothing"
    for path in written[::2]:
        check_image(path)


def test_draw_leaves_out_what_there_is_no_data_for(data, tmp_path):
    slug = "standard"
    alone = {**data, "routing": {}, "depth": {}, "labels": {slug: slug}, "seeds": {slug: 1}}
    alone |= {key: {slug: data[key][slug]} for key in ("curves", "quality")}
    assert {path.stem for path in plots.draw(alone, tmp_path)} == {"curves-tokens", "curves-time"}


def test_matplotlib_is_imported_by_drawing_alone():
    code = "import sys, residua.lab.figures, residua.lab.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
