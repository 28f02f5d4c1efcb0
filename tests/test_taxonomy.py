"""The map says of every design what its paper says, and finds it by probing alone."""

import json
import re

import pytest
from typer.testing import CliRunner

import residua
from residua.cli import app
from residua.lab.taxonomy import BOTH, FIXED, KEY, QUERY, STATE, STATIC, entries, entry, mixers, variants

TABLE = {
    # design: weights, what they add up to, lanes, window, whether it is such a read
    "standard": (FIXED, "no", 1, "all", True),
    "elc": (STATIC, "to 1", 1, "all", True),
    "denseformer": (STATIC, "no", 1, "all", True),
    "vertical": (STATIC, "to 1", 1, "all", True),
    "dca": (KEY, "no", 3, "all", True),
    "dca:grn=v1": (STATIC, "no", 3, "all", True),
    "dca:window=1": (KEY, "no", 3, "at most 3, one the sum of the dropped", True),
    "mudd": (QUERY, "no", 3, "all", True),
    "mudd:window=1": (QUERY, "no", 3, "at most 2", True),
    "attnres": (KEY, "to 1", 1, "all", True),
    "attnres:total=true": (KEY, "to n", 1, "all", True),
    "delta": (KEY, "to 1", 1, "all", True),
    "delta:centered=true": (KEY, "to 0", 1, "all", True),
    "delta:null=true": (KEY, "to at most 1", 1, "all", True),
    "depthswa": (BOTH, "to 1", 1, "at most 4", True),
    "depthswa:window=2,sources=deltas": (BOTH, "to 1", 1, "at most 2", True),
    "depthswa:window=1": (FIXED, "to 1", 1, "at most 1", True),
    "ddl": ("none", "no", 1, "none", False),
    "ddl:channels=2,compress=token,kernel=3": ("none", "no", 1, "none", False),
    "hyper": (STATE, "no", 1, "4 slots", False),
    "hyper:dynamic=false": (STATIC, "no", 1, "4 slots", False),
    "mhc": (STATE, "no", 1, "4 slots", False),
    "gated": (STATE, "to at most 1", 1, "4 slots", False),
    "lambdas": (STATIC, "no", 1, "at most 2", True),
    "frac": (STATE, "no", 1, "4 slots", False),
    "laurel": ("none", "no", 1, "none", False),
    "altup": (STATE, "no", 1, "4 slots", False),
    "lr_attnres": (KEY, "to 1", 1, "all", True),
    "multigate": (KEY, "to 1", 1, "at most 4", True),
    "highway": ("none", "no", 1, "none", False),
    "postnorm": ("none", "no", 1, "none", False),
}
"""Section 3.3 of the methods' table."""

INJECTIONS = {
    "denseformer": "replaces the input; the stream holds it too",
    "attnres": "replaces the input; the stream never holds it",
    "delta": "added to the input; the stream never holds it",
    "depthswa": "replaces the input; the stream never holds it",
    "depthswa:enter=add": "added to the input; the stream never holds it",
    "depthswa:enter=stream": "replaces the input; the stream holds it too",
    "standard": "is the stream",
    "ddl": "rewrites the stream",
    "lr_attnres": "replaces the input; the stream never holds it",
    "multigate": "replaces the input; the stream never holds it",
    "mudd": "replaces the input; the stream holds it too",
    "hyper": "replaces the input; the stream never holds it",
    "mhc": "replaces the input; the stream never holds it",
    "gated": "replaces the input; the stream never holds it",
    "frac": "replaces the input; the stream never holds it",
    "altup": "replaces the input; the stream holds it too",
    "laurel": "rewrites the stream",
    "highway:form=muse": "rewrites the stream",
    "postnorm:form=siamese": "rewrites the stream",
}


@pytest.mark.parametrize("spec", TABLE)
def test_map_of_a_design_is_that_of_its_paper(spec):
    found = entry(spec)
    assert (found.weights, found.normalised, found.lanes, found.window, found.instance) == TABLE[spec]
    assert bool(found.why) == (not found.instance or spec == "standard")


@pytest.mark.parametrize("spec", INJECTIONS)
def test_map_finds_where_a_read_goes(spec):
    assert entry(spec).injection == INJECTIONS[spec]


def test_map_covers_the_registry():
    assert [one.design for one in entries()] == list(residua.names())


def test_map_of_a_new_design_needs_no_declaration():
    from residua import Read, Stream, register

    @register("halves")
    class Halves(Stream):
        """x = h / 2; h <- h + f(norm(x))."""

        paper = "none: a test"
        starts = "eps"

        def open(self, x, past=None):
            return x

        def read(self, h, site, norm):
            return Read(norm(h / 2), carry=h)

        def write(self, h, site, read, y):
            return h + y

    try:
        assert entry("halves").weights == FIXED
    finally:
        residua.unregister("halves")


def test_mixers_of_tokens_stand_where_their_duals_do():
    found = {one.kind: (one.weights, one.window) for one in mixers()}
    assert found["attn"] == (BOTH, "all")
    assert found["swa"] == (BOTH, "bounded")
    assert found["canon"] == found["conv"] == (STATIC, "bounded")
    assert "mlp" not in found
    dual = entry("depthswa")
    assert dual.weights == found["swa"][0]


@pytest.mark.slow
def test_variants_are_one_for_each_place():
    found = [(one.design.partition(":")[0], one.cell) for one in variants()]
    assert len(found) == len(set(found))
    assert {name for name, _ in found} == set(residua.names())


def test_command_prints_the_map_and_draws_it_alike(tmp_path):
    said = CliRunner().invoke(app, ["designs", "--map"], catch_exceptions=False).output
    assert re.search(r"depthswa .* both sides .* at most 4", said)
    assert "ddl: no mixture is read" in said
    found = json.loads(CliRunner().invoke(app, ["designs", "mhc", "--map", "--json"], catch_exceptions=False).output)
    assert found[0]["instance"] is False
    table = CliRunner().invoke(app, ["designs", "delta", "--map", "--markdown"], catch_exceptions=False).output
    assert table.startswith("| design | sources |")
    for name in ("one", "two"):
        flags = ["designs", "mhc", "--map", "--picture", str(tmp_path / name)]
        assert CliRunner().invoke(app, flags, catch_exceptions=False).exit_code == 0
    assert (tmp_path / "one" / "map.svg").read_bytes() == (tmp_path / "two" / "map.svg").read_bytes()


def test_picture_without_the_map_is_refused():
    with pytest.raises(ValueError, match="--picture needs --map"):
        CliRunner().invoke(app, ["designs", "--picture", "x"], catch_exceptions=False)
