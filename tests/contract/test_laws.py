"""Every law x every design x (its option cases + the layouts). A new design is tested by being registered."""

import pytest

import residua
from residua.testing import LAWS, LAYOUTS, Case, cases, meeting, specs, uncovered


def weigh(case):
    """A case outside the plain layout is slow: the quick run meets every option once."""
    apart = (case.layout, case.causal) != LAYOUTS[0]
    return pytest.param(case, id=str(case), marks=[pytest.mark.slow] if apart else [])


@pytest.mark.parametrize("case", [weigh(case) for case in cases()])
@pytest.mark.parametrize("law", [name for name in LAWS if name != "one_graph"])
def test_law(law, case):
    LAWS[law](case)


@pytest.mark.parametrize("name", residua.names())
def test_cases_meet_every_option_and_every_layout(name):
    """All option cases in the plain layout; in each other layout the default, and no two cases that meet it alike."""
    found = cases(name)
    assert [case.spec for case in found if (case.layout, case.causal) == LAYOUTS[0]] == specs(name)
    for layout in LAYOUTS[1:]:
        there = [case for case in found if (case.layout, case.causal) == layout]
        assert there[0].spec == specs(name)[0]
        assert {meeting(case) for case in there} == {meeting(Case(spec, *layout)) for spec in specs(name)}
        assert len({meeting(case) for case in there}) == len(there)


@pytest.mark.parametrize("name", residua.names())
def test_cases_use_every_value_of_every_option(name):
    assert not uncovered(name)
