"""A run whose blocks repeat: recording, the page and the prompt view tell its passes apart."""

import json
import math

import pytest
import torch

from residua.lab.duality.models import stack_of
from residua.lab.report import gather, render
from residua.lab.report.look import look
from residua.lab.train import TrainConfig, load_model
from residua.testing import Case, assert_close, ids
from tests.report.comparison import train_run

LAYOUT = "attn,mlp,loop:passes=2:blocks=1..1"
SITES = ["l0_attn", "l0_mlp", "l1_attn", "l1_mlp", "l1p1_attn", "l1p1_mlp", "head"]


@pytest.mark.slow
def test_page_of_a_looped_run_names_every_pass(tmp_path):
    config = TrainConfig(
        design="attnres", layout=LAYOUT, width=16, depth=2, heads=2, steps=2, batch=2, context=24, eval_every=2,
        eval_windows=2, save_every=2,
    )  # fmt: skip
    train_run(tmp_path / "run", config, routing=True)
    recorded = json.loads((tmp_path / "run" / "routing.json").read_text())
    assert list(recorded["mean_weights"]) == SITES[1:]
    data = gather(tmp_path / "run")
    page = json.dumps(data)
    assert all(f'"{site}"' in page for site in SITES[1:])
    assert "l1p1_attn" in render(data)
    assert load_model(tmp_path / "run").plan.loop is not None


def test_attention_of_a_repeated_block_is_kept_for_every_pass():
    """A prompt view has one profile a pass, and each is the mixture of its own pass."""
    model = Case("attnres", LAYOUT).model(depth=2, dtype=torch.float32)
    found = look(model, ids(rows=1))
    assert list(found.attention) == ["l0_attn", "l1_attn", "l1p1_attn"]
    assert found.attention["l1_attn"] != found.attention["l1p1_attn"]
    for profile in found.attention.values():
        assert math.isfinite(sum(profile))
    assert [site["site"] for site in found.record["sites"]] == SITES


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        ("standard", LAYOUT),
        ("standard", f"{LAYOUT}:between=norm"),
        ("standard:value=resformer", "attn,mlp"),
        ("standard", "attn:norm=both,mlp:norm=reordered"),
    ],
)
def test_a_stack_of_changes_is_what_was_written(spec, layout):
    """Every write counts, as it was written: those of later passes, beside shared values, and behind a norm."""
    model = Case(spec, layout).model(depth=2)
    stack = stack_of(model, ids())
    *_, head = model.walk(ids())
    assert len(stack) == model.plan.depth + 1
    assert_close(stack[-1], head.lanes[0], "the last state")
