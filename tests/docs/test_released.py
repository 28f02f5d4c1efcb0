"""The table of released models is what the designs say, and every spec in it builds."""

import re
from pathlib import Path

import torch

import residua

PAGE = (Path(__file__).parents[2] / "docs" / "released.md").read_text(encoding="utf-8")


def test_table_of_released_models_is_that_of_the_designs():
    shown = dict(re.findall(r"^\| ([^|]+?) \| [^|]+ \| `([^`]+)` \|", PAGE, re.MULTILINE))
    assert shown == {
        model: spec for name in residua.names() for model, spec in residua.design(name).released_in.items()
    }


def test_every_released_spec_builds_its_design():
    for name in residua.names():
        for spec in residua.design(name).released_in.values():
            with torch.device("meta"):
                assert residua.build(spec, residua.Plan.regular(64, 12)).name == name
