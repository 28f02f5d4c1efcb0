"""Every law x every design x its option cases x every layout. A new design is tested by being registered."""

import pytest

import residua
from residua.testing import LAWS, cases, uncovered


@pytest.mark.parametrize("case", cases(), ids=str)
@pytest.mark.parametrize("law", [name for name in LAWS if name != "one_graph"])
def test_law(law, case):
    LAWS[law](case)


@pytest.mark.parametrize("name", residua.names())
def test_cases_use_every_value_of_every_option(name):
    assert not uncovered(name)
