"""`residua bench plain`: the same network three times over, and what its table says."""

import json

import pytest
import torch
from typer.testing import CliRunner

from residua.cli import app
from residua.lab.bench import plain
from residua.lab.bench.rivals import Plain, llama
from residua.lab.bench.table import markdown, sheets
from residua.model import ModelConfig, Transformer, token_loss


@pytest.fixture(scope="module")
def models():
    ours = Transformer(ModelConfig(vocab=64, width=32, depth=2, heads=4))
    for name, parameter in ours.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return ours, {"plain": Plain(ours, 40), "llama": llama(ours, 40)}


def test_rivals_compute_the_same_network(models):
    ours, rivals = models
    ids = torch.arange(24).view(2, 12)
    plain.check(ours, rivals, ids)
    losses = {name: plain.logits_of(model(ids)) for name, model in rivals.items()}
    for logits in losses.values():
        torch.testing.assert_close(token_loss(logits, ids), ours(ids, targets=ids))
    cache = rivals["plain"].cache(2, 12)
    with torch.inference_mode():
        parts = (
            rivals["plain"](ids[:, :5], cache),
            *(rivals["plain"](ids[:, t : t + 1], cache, t) for t in range(5, 12)),
        )
        torch.testing.assert_close(torch.cat(parts, 1), ours(ids), rtol=1e-4, atol=1e-4)


def test_another_network_is_not_timed(models):
    ours, rivals = models
    ids = torch.arange(12)[None]
    with torch.no_grad():
        rivals["plain"].qkv[1].weight[40, 3] += 1.0
    with pytest.raises(RuntimeError, match="plain computes another network"):
        plain.check(ours, rivals, ids)


def test_quick_run_has_every_phase_and_rival():
    ran = CliRunner().invoke(app, ["bench", "plain", "--quick", "--as-is", "--json"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    rows = {row["phase"]: row for row in found["plain"]["rows"]}
    assert rows.keys() == set(plain.PHASES)
    for phase, row in rows.items():
        assert {"plain", "llama"} <= row["ratios"].keys() | {"residua"}
        assert ("earlier" in row["ratios"]) == (phase == "step")  # of a narrow model
        fastest = min(row["ratios"][name]["value"] for name in ("plain", "llama"))
        assert row["of_fastest"] == pytest.approx(1 / fastest)
        assert "control" in row["ratios"]["plain"]
    assert "1 x 32, 8 | step" in markdown(sheets(found)[0])


def test_shapes_are_depth_and_width():
    assert plain.parse_shape("6x64") == (6, 64)
    assert {(6, 64), (12, 256), (12, 768)} <= set(plain.SHAPES)
    assert plain.Shape(6, 64, 128).rows == 32
    assert plain.Shape(12, 768, 1024).rows == 1
    with pytest.raises(ValueError, match="DEPTHxWIDTH"):
        plain.parse_shape("6")
