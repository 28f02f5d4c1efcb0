"""The gates of the designs that have them, as a record reports them."""

from __future__ import annotations

import math

import pytest
import torch

import residua
from residua.lab.diagnose import record_routing
from residua.streams import Standard
from residua.testing import Case, ids, walk

NEARLY_SHUT = 1 / (1 + math.exp(2))
"""sigmoid(-2)"""


@pytest.mark.parametrize(
    ("spec", "site", "gates"),
    [
        ("delta:gate=scalar", "l1_attn", {"gate": NEARLY_SHUT}),
        ("delta:gate=vector,value_lane=true", "l1_attn", {"gate": NEARLY_SHUT, "gate_v": NEARLY_SHUT}),
        ("delta:gate=alpha", "l2_mlp", {"gate": 0.0}),
        ("delta", "l2_mlp", {}),
        ("depthswa:enter=add,gate=alpha", "l1_attn", {"gate": 0.0}),
        ("depthswa", "l1_attn", {}),
        ("hyper", "l1_attn", {"s_alpha": 0.01, "s_beta": 0.01}),
        ("hyper:dynamic=false", "l1_attn", {}),
        ("mhc", "l1_attn", {"alpha_pre": 0.01, "alpha_post": 0.01, "alpha_res": 0.01}),
        ("mhc", "l0_attn", {"alpha_post": 0.01}),
        ("mhc:head=learned", "head", {"alpha_pre": 0.01}),
        ("ddl:start=standard", "head", {}),
        ("highway:start=0.25", "l1_attn", {"scale": 0.25}),
        ("highway:form=muse", "l2_mlp", {"skip": 0.75**0.5, "write": 0.5}),
        ("highway:form=beam", "l2_mlp", {}),
        ("lambdas", "l1_attn", {"resid": 1.0, "x0": 0.0}),
        ("lambdas:init=released", "head", {"backout": 0.2}),
        ("frac", "l1_attn", {"s_alpha": 0.01, "s_beta": 0.01}),
        ("laurel:weights=softmax", "l1_mlp", {"low_rank": 0.0, "alpha": 0.5, "beta": 0.5}),
        ("multigate:streams=2,bias=0.0", "l1_attn", {"gate": 0.5}),
    ],
)
def test_gates_start_where_the_design_says(spec, site, gates):
    model = Case(spec).model(moved=False)
    with record_routing(model) as record:
        model(ids())
    found = record[site].summary()["gates"]
    assert {name: gate["mean"] for name, gate in found.items()} == pytest.approx(gates)
    assert all(gate["min"] <= gate["mean"] + 1e-9 and gate["mean"] <= gate["max"] + 1e-9 for gate in found.values())


def test_ddl_beta_is_the_share_that_its_write_uses():
    model = Case("ddl:start=standard").model()
    with record_routing(model) as record:
        model(ids())
        model(ids())
    for site, state, norm in walk(model, ids()):
        if site.kind == "head":
            continue
        rewrite = model.stream.part(site)["rewrite"]
        beta = rewrite.share(model.stream.read(state, site, norm).lanes[0])
        found = record[site.name].summary()
        assert found["gates"]["beta"]["mean"] == pytest.approx(beta.mean().item())
        assert found["gates"]["beta"]["std"] == pytest.approx(beta.std(correction=0).item(), rel=1e-6)
        assert found["gates"]["blend"]["mean"] == pytest.approx(rewrite.blend.item())
        assert sum(found["beta"]["counts"]) == 2 * beta.numel()
        regimes = found["beta"]["regimes"]
        assert sum(regimes.values()) == pytest.approx(1)
        assert regimes["projection"] == pytest.approx(((beta >= 0.8) & (beta <= 1.2)).double().mean().item())


def test_gates_are_declared_by_a_design_of_ones_own():
    @residua.register("scaled-toy")
    class Scaled(Standard):
        """h <- h + 3 f(norm(h))."""

        paper = "a test"

        def gates(self, state, site, read):
            return {"step": torch.tensor([3.0])}

    try:
        model = Case("scaled-toy").model()
        with record_routing(model) as record:
            model(ids())
        assert record["l0_mlp"].summary()["gates"]["step"] == {"mean": 3.0, "std": 0.0, "min": 3.0, "max": 3.0}
    finally:
        residua.unregister("scaled-toy")
