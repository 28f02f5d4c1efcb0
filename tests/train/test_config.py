"""TrainConfig: JSON and back, one spelling of a design, and one clear error for each mistake."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from residua.lab.train import TrainConfig
from residua.lab.train.config import config_fields
from residua.model import ModelConfig
from tests.train.harness import toy_config


@pytest.mark.parametrize("config", [TrainConfig(), toy_config(schedule="wsd", decay_share=0.5, dtype="bfloat16")])
def test_config_survives_json(config):
    assert TrainConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_config_has_every_field_of_the_model_with_its_default():
    left_out = {"vocab", "causal"}  # the corpus and the objective say them
    mine = config_fields()
    for field in fields(ModelConfig):
        if field.name not in left_out:
            assert mine[field.name].default == field.default, field.name
    model = toy_config(qk_norm=True, tied=False, layout="swa:window=4,mlp").model(50)
    assert (model.vocab, model.qk_norm, model.tied, model.layout, model.causal) == (
        50,
        True,
        False,
        "swa:window=4,mlp",
        True,
    )
    assert not toy_config(objective="mlm").model(50).causal


@pytest.mark.parametrize(
    "written",
    ["delta:blocks=2", "delta:blocks=2,gate=none", "delta:gate=none,blocks=2", {"name": "delta", "blocks": 2}],
)
def test_config_keeps_one_spelling_of_a_design(written):
    assert toy_config(design=written) == toy_config(design="delta:blocks=2")
    assert toy_config(design=written).digest == toy_config(design="delta:blocks=2").digest


def test_config_digest_changes_with_every_field():
    other = {bool: lambda v: not v, int: lambda v: (v or 1) * 2, float: lambda v: (v or 0.1) / 2, str: lambda v: v}
    skipped = {"fp32_stream", "decay_share", "device"}  # say something only beside another field
    for name, field in config_fields().items():
        if field.choices or field.kind is str or name in skipped:
            continue
        base = TrainConfig()
        changed = other[field.kind](getattr(base, name))
        assert TrainConfig(**{name: changed}).digest != base.digest, name


WRONG = [
    ({"design": "detla"}, "unknown design 'detla': did you mean 'delta'?"),
    ({"design": "delta:blokcs=2"}, "did you mean 'blocks'"),
    ({"design": "delta:blocks=99"}, "blocks must be 1..12"),
    ({"design": "delta:blocks"}, "'blocks' is not key=value"),
    ({"design": 3}, "design takes text, not 3"),
    ({"layout": "attn,mpl"}, "unknown sublayer 'mpl'"),
    ({"layout": "swa:window=0"}, "window=0 must be at least 1"),
    ({"width": 0}, "width must be at least 1"),
    ({"width": 30, "heads": 4}, "width 30 does not split into 4 heads"),
    ({"width": 12, "heads": 4}, "even head width"),
    ({"kv_heads": 3}, "heads=4 must be a multiple of kv_heads=3"),
    ({"depth": 0}, "depth must be at least 1"),
    ({"width": "wide"}, "width takes whole number, not 'wide'"),
    ({"width": 64.0}, "width takes whole number, not 64.0"),
    ({"tied": 1}, "tied takes true|false, not 1"),
    ({"steps": 0}, "steps must be at least 1"),
    ({"steps": -5}, "steps must be at least 1, not -5"),
    ({"batch": 0}, "batch must be at least 1"),
    ({"context": 1}, "context must be at least 2"),
    ({"accumulate": 0}, "accumulate must be at least 1"),
    ({"lr": 0.0}, "lr must be a positive number"),
    ({"lr": -1e-3}, "lr must be a positive number, not -0.001"),
    ({"lr": float("nan")}, "lr must be finite"),
    ({"lr": "fast"}, "lr takes number, not 'fast'"),
    ({"residual_lr": 0.0}, "residual_lr must be a positive number"),
    ({"schedule": "linear"}, "schedule takes cosine|wsd, not 'linear'"),
    ({"warmup_share": 1.0}, "warmup_share must be from 0 to below 1"),
    ({"decay_share": 0.2}, "decay_share has no effect with schedule=cosine"),
    ({"schedule": "wsd", "warmup_share": 0.6, "decay_share": 0.6}, "add up to more than 1"),
    ({"min_lr_share": -0.1}, "min_lr_share must be from 0 to below 1"),
    ({"beta2": 1.0}, "beta2 must be from 0 to below 1"),
    ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
    ({"clip": -1.0}, "clip must be at least 0"),
    ({"explode": 0.0}, "explode must be a positive number"),
    ({"optimizer": "sgd"}, "optimizer takes adamw|muon"),
    ({"objective": "span"}, "objective takes clm|mlm"),
    ({"objective": "mlm", "layout": "conv,attn,mlp"}, "no place in an encoder"),
    ({"dtype": "float16"}, "dtype takes float32|bfloat16"),
    ({"fp32_stream": True}, "fp32_stream has no effect with dtype=float32"),
    ({"seed": -1}, "seed must be at least 0"),
    ({"seed": 2**63}, "seed must be below 2**63"),
    ({"threads": 0}, "threads must be at least 1"),
    ({"save_every": 0}, "save_every must be at least 1"),
    ({"eval_every": 0}, "eval_every must be at least 1"),
    ({"eval_windows": -1}, "eval_windows must be at least 0"),
    ({"keep": 1}, "keep must be at least 2"),
    ({"lane_norms": "own"}, "lane_norms takes shared|separate"),
    ({"eps": 1e-2, "design": "attnres"}, "must be at most"),
    ({"design": "ddl", "layout": "swa:start=zero,mlp"}, "drop start=zero"),
    ({"widht": 64}, "unknown training fields: widht"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[str(change) for change, _ in WRONG])
def test_config_refuses_with_one_line_that_says_what(change, message):
    with pytest.raises((ValueError, TypeError)) as caught:
        TrainConfig.from_json(change)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
