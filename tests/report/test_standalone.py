"""The documentation's pictures come from the committed figures, and say what they hold."""

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from residua.lab import figures
from residua.lab.compare import read_series
from residua.lab.plots.charts import designs
from residua.lab.plots.sizes import size_charts
from residua.lab.plots.standalone import listed, pictures
from tests.figures.synthetic import write_comparison

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def drawn(tmp_path):
    write_comparison(tmp_path)
    return figures.collect(read_series(tmp_path))


def test_pictures_are_well_formed_and_the_same_every_time(drawn):
    found = pictures(drawn)
    assert list(found) == ["curves", "routing", "depth", "quality"]
    assert pictures(json.loads(json.dumps(drawn))) == found
    for text in found.values():
        ElementTree.fromstring(text)
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_map_has_the_weights_written_in(drawn):
    root = ElementTree.fromstring(pictures(drawn)["routing"])
    written = [float(each.text) for each in root.iter(f"{SVG}text") if each.get("class", "").startswith("cell")]
    own = [w for signed in (False, True) for each in drawn["routing"].values() if each["signed"] is signed
           for row in each["weights"] for w in row if w is not None]  # fmt: skip
    assert written == [pytest.approx(weight, abs=0.0051) for weight in own]


def test_curves_have_a_point_for_every_validation(drawn):
    text = pictures(drawn)["curves"]
    lines = re.findall(r'class="line" d="(M[^"h]*)"', text)
    expected = [len(curve["tokens"]) - 1 for curve in drawn["curves"].values()]
    assert [line.count("L") + 1 for line in lines] == 2 * expected


def test_a_design_has_one_line_over_its_sizes():
    """Loss at all three places, and shares of deep reads where there are any; rows of one size have no such picture."""
    row = {"mean": 2.0, "low": 1.9, "high": 2.1}
    deep = {"max_weight": [None, 0.9, 0.3, 0.5], "deep": [False, False, True, True]}
    plain = {"max_weight": [None] * 4, "deep": deep["deep"]}
    sized = [(name, size) for size in ("8x16", "2x32", "16x16") for name in ("standard", "delta", "mudd")]
    slugs = {f"{name}-{size}": f"{name} | {size}" for name, size in sized if (name, size) != ("mudd", "16x16")}
    figures = {
        "labels": slugs,
        "quality": {slug: {"baseline": f"standard-{slug.split('-')[1]}", "bits_per_byte": row} for slug in slugs},
        "depth": {slug: plain if slug.startswith("standard") else deep for slug in slugs},
    }
    figures["curves"] = {}
    loss, shares = size_charts(listed(figures))
    assert [each["label"] for each in designs(listed(figures))] == ["standard", "delta", "mudd"]
    places = [re.findall(r'class="tick middle" x="([\d.]+)"[^>]*>(\d+x\d+)', chart) for chart in (loss, shares)]
    assert [[name for _, name in one] for one in places] == 2 * [["2x32", "8x16", "16x16"]]
    assert re.findall(r"<title>(.*?)</title>", loss) == ["standard", "delta", "mudd"]
    assert [line.count("L") + 1 for line in re.findall(r'class="line" d="([^"]*)"', loss)] == [3, 3, 2]
    lines = re.findall(r'class="line" d="([^"]*)"', shares)
    assert [line.count("L") + 1 for line in lines] == [3, 2]
    assert {point.split()[1] for point in lines[0][1:].split("L")} == {"136.4"}, "0.4 of the height"
    for labels in ({slug: f"{name} | 8x16" for slug, name in slugs.items()}, {slug: slug for slug in slugs}):
        assert size_charts(listed({**figures, "labels": labels})) == []


def test_labels_are_escaped(drawn):
    drawn["labels"]["attnres"] = "<script>&'\""
    for text in pictures(drawn).values():
        assert "<script>" not in text
        ElementTree.fromstring(text)


@pytest.mark.slow
def test_committed_pictures_are_up_to_date():
    subprocess.run([sys.executable, "tools/update_figures", "--check"], cwd=ROOT, check=True)


@pytest.mark.slow
def test_check_names_a_picture_that_is_stale(tmp_path):
    """The tool in a copy of the tree that it reads and writes."""
    for name in ("results/demo", "tools", "docs/assets"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "tools/update_figures").write_text((ROOT / "tools/update_figures").read_text())
    (tmp_path / "results/demo/figures.json").write_text((ROOT / "results/demo/figures.json").read_text())
    run = [sys.executable, tmp_path / "tools/update_figures"]
    missing = subprocess.run([*run, "--check"], capture_output=True, text=True)
    assert missing.returncode == 1
    assert "demo-routing.svg" in missing.stderr
    subprocess.run(run, check=True)
    subprocess.run([*run, "--check"], check=True)
    changed = tmp_path / "docs/assets/demo-curves.svg"
    changed.write_text(changed.read_text() + " ")
    stale = subprocess.run([*run, "--check"], capture_output=True, text=True)
    assert stale.returncode == 1
    assert "demo-curves.svg" in stale.stderr
    assert "demo-routing.svg" not in stale.stderr
