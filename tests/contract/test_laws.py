"""Every law x every design x its option cases x every layout. A new design is tested by being registered."""

import pytest

import residua
from residua.testing import LAWS, LAYOUTS, cases, uncovered


def weigh(case):
    """An option case outside the plain layout is slow: the quick run meets every option and every layout once."""
    apart = ":" in case.spec and (case.layout, case.causal) != LAYOUTS[0]
    return pytest.param(case, id=str(case), marks=[pytest.mark.slow] if apart else [])


@pytest.mark.parametrize("case", [weigh(case) for case in cases()])
@pytest.mark.parametrize("law", [name for name in LAWS if name != "one_graph"])
def test_law(law, case):
    LAWS[law](case)


@pytest.mark.parametrize("name", residua.names())
def test_cases_use_every_value_of_every_option(name):
    assert not uncovered(name)
