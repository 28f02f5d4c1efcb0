"""Spec strings, options and the registry: round trips, and one error that names the cure for everything else."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import residua
from residua import Plan
from residua.spec import parse, parse_value, render, render_value

words = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda w: w not in ("true", "false", "inf", "nan")
)
values = st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False) | words


@given(words, st.dictionaries(words.filter(lambda w: w != "name"), values, max_size=5))
def test_spec_round_trips_as_string_and_as_json(name, options):
    assert parse(render(name, options)) == (name, options)
    stored = json.loads(json.dumps({"name": name, **options}))
    assert parse(stored) == (name, options)


@given(values)
def test_value_keeps_its_type(value):
    again = parse_value(render_value(value))
    assert again == value
    assert type(again) is type(value)


@pytest.mark.parametrize(
    ("spec", "error", "cure"),
    [
        ("", ValueError, "write name or name:key=value"),
        ("delta:", ValueError, "ends in a colon"),
        ("delta:block", ValueError, "not key=value"),
        ("delta:block=", ValueError, "not key=value"),
        ("delta:=3", ValueError, "not key=value"),
        ("delta:block=2,block=3", ValueError, "twice"),
        ("delta:gate=a b", ValueError, "neither a number"),
        ("detla", ValueError, "did you mean 'delta'"),
        ("resnet", ValueError, "choose from standard, elc"),
        ("delta:blok=2", TypeError, "did you mean 'block'"),
        ("standard:depth=2", TypeError, "options: norm"),
        ("delta:gate=sigmoid", ValueError, "none|scalar|vector|alpha"),
        ("delta:null=1", ValueError, "true|false"),
        ("delta:block=2.5", ValueError, "whole number"),
        ("delta:block=true", ValueError, "whole number"),
        ("delta:eps=-1e-6", ValueError, "from 0 to below 1"),
        ("delta:block=2,blocks=2", ValueError, "not both"),
        ("delta:block=0", ValueError, "must be 1..8"),
        ("attnres:blocks=9", ValueError, "must be 1..8"),
        ("attnres:gate=alpha", TypeError, "use delta:gate"),
        ("attnres:heads=3", ValueError, "does not divide"),
        ({"block": 2}, ValueError, 'needs a "name"'),
        ({"name": "delta", "block": None}, ValueError, "numbers, booleans or words"),
        ({"name": "delta", "block": [2]}, ValueError, "numbers, booleans or words"),
    ],
    ids=str,
)
def test_wrong_design_names_the_cure(spec, error, cure):
    with pytest.raises(error) as caught:
        residua.build(spec, Plan.regular(8, 4))
    assert cure in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        ((0, 4), "width of at least 1"),
        ((8, 0), "at least one block"),
        ((8, 4, "attn,ffn"), "choose from attn, swa, mlp, conv, canon"),
        ((8, 4, ""), "choose from"),
        ((8, 4, ()), "at least one sublayer"),
        ((8, 4, "swa:window,mlp"), "kind:key=value"),
        ((8, 4, "swa:window=3:window=4"), "twice"),
    ],
)
def test_wrong_plan_names_the_cure(arguments, cure):
    with pytest.raises(ValueError, match=re.escape(cure)):
        Plan.regular(*arguments)


def test_plan_names_every_site_once_in_reading_order():
    plan = Plan.regular(8, 2, "attn,attn,mlp")
    assert [site.name for site in plan.readers] == [
        "l0_attn", "l0_attn2", "l0_mlp", "l1_attn", "l1_attn2", "l1_mlp", "head",
    ]  # fmt: skip
    assert [site.index for site in plan.readers] == list(range(7))
    assert [(site.first, site.last) for site in plan.block(1)] == [(True, False), (False, False), (False, True)]
    assert plan.site("l1_mlp") is plan.sites[5]
    with pytest.raises(KeyError, match="l1_attn2"):
        plan.site("l9_mlp")


def test_constructor_checks_options_without_the_registry():
    with pytest.raises(ValueError, match="takes none"):
        residua.streams.Delta(Plan.regular(8, 2), gate="sigmoid")


def test_registering_twice_or_without_an_equation_is_refused():
    with pytest.raises(ValueError, match="registered already"):
        residua.register("delta")(residua.streams.Delta)

    class Silent(residua.streams.Standard):
        pass

    Silent.__doc__ = None
    with pytest.raises(ValueError, match="docstring"):
        residua.register("silent")(Silent)


@pytest.mark.parametrize(("blocks", "total", "sources"), [(4, 8, 4), (3, 8, 3), (5, 8, 4), (8, 8, 8), (1, 8, 1)])
def test_blocks_are_of_size_ceil(blocks, total, sources):
    """blocks=n makes groups of ceil(M / n): the last may be short, and fewer than n may come out."""
    plan = Plan.regular(8, total // 2)
    stream = residua.build(f"attnres:blocks={blocks}", plan)
    assert len(stream.sources(plan.head)) == 1 + sources
