"""A recording in a notebook: the map of its weights and its table, in one well-formed piece of HTML."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
import torch

from residua.lab.diagnose import ablate_sources, record_routing
from residua.lab.diagnose.inspect import inspect_ids
from residua.testing import Case, ids


def shown(spec):
    model = Case(spec).model()
    with torch.no_grad(), record_routing(model) as record:
        model(ids(2, 8))
    return record, record._repr_html_()


@pytest.mark.parametrize("spec", ["attnres:heads=2", "mudd", "delta:blocks=2", "hyper"])
def test_map_has_every_mean_weight_and_the_table_every_cell(spec):
    record, html = shown(spec)
    root = ElementTree.fromstring(html)
    written = [float(each.text) for each in root.iter("text") if each.get("class", "").startswith("cell")]
    expected = [w for weights in record.weights().values() for w in weights.mean((0, 2, 3, 4)).tolist()]
    assert len(written) == len(expected)
    assert sorted(written) == pytest.approx(sorted(expected), abs=0.0051)
    said = [cell.text for cell in root.iter("td")]
    title, _, *lines, note = record.table().split("\n")
    for line in lines:
        assert set(re.split(r"  +", line)) <= {cell for cell in said if cell}, line
    assert [each.text for each in root.iter("p")] == [title, note]


def test_names_are_escaped_and_the_style_is_for_light_and_dark_and_this_piece_alone():
    record, _ = shown("attnres")
    hostile = "</td><script>alert(1)</script>\"'&"
    record.design = hostile
    for site in record.sites.values():
        site.sources = tuple(f"{hostile}{name}" for name in site.sources)
    html = record._repr_html_()
    root = ElementTree.fromstring(html)
    assert not list(root.iter("script"))
    assert root.find("svg").get("aria-label") == f"Mean weights of {hostile}"
    assert "light-dark(" in html
    assert ":root" not in html
    assert not any(word in html for word in ("http:", "https:", "url(", "@import")), "nothing is fetched"


def test_design_that_mixes_nothing_shows_its_table_alone():
    _, html = shown("standard")
    root = ElementTree.fromstring(html)
    assert root.find("svg") is None
    assert [each.text for each in root.iter("p")][-1] == "no site mixes sources"
    assert list(root.iter("td"))


def test_before_a_forward_a_line_says_that_nothing_was_recorded():
    with record_routing(Case("attnres").model()) as record:
        html = record._repr_html_()
    (line,) = ElementTree.fromstring(html).iter("p")
    assert line.text.startswith("nothing was recorded")


@pytest.mark.parametrize("spec", ["attnres:heads=2", "mudd", "standard"])
def test_inspection_draws_its_means_and_its_largest_weights(spec):
    model, prompt = Case(spec).model(dtype=torch.float32), ids(1, 8)[0]
    found = inspect_ids(model, prompt, tokens=[f"<{each}> " for each in prompt.tolist()])
    root = ElementTree.fromstring(found._repr_html_())
    written = [float(each.text) for each in root.iter("text") if each.get("class", "").startswith("cell")]
    weights = [torch.tensor(each).mean((0, 3)) for each in found["weights"].values()]
    means = [value for each in weights for value in each.mean(1).tolist()]
    largest = [column[column.abs().argmax()].item() for each in weights for column in each.T]
    assert written == pytest.approx([*means, *largest], abs=0.0051) if weights else written == []
    assert f"loss {found['loss']:.4f}" in next(root.iter("p")).text
    assert not any(word in found._repr_html_() for word in ("http:", "https:", "url(", "@import", "<script"))


def test_ablation_draws_every_change():
    found = ablate_sources(Case("attnres").model(), ids(), ids().roll(-1, 1))
    root = ElementTree.fromstring(found._repr_html_())
    written = [float(each.text) for each in root.iter("text") if each.get("class", "").startswith("cell")]
    assert written == pytest.approx([gap for own in found.change.values() for gap in own.values()], abs=0.00051)
    nothing = ablate_sources(Case("standard").model(), ids(), ids().roll(-1, 1))
    assert "no site mixes sources" in nothing._repr_html_()
