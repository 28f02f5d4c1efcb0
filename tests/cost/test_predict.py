"""What is predicted from the plan is what a counter finds that knows neither the plan nor a formula of `predict`."""

import ast
import importlib.util
import resource
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import residua
from residua.counting.walk import Walk
from residua.lab.cost import predict, run_and_count
from residua.lab.cost.targets import PRESETS, sized
from residua.model import ModelConfig
from residua.testing import specs

SIZES = [(16, 2, 2, 8), (32, 3, 4, 12), (48, 4, 4, 20)]
"""Width, depth, heads, tokens."""
LAYOUTS = [
    "swa:window=3,attn,mlp", "conv,attn,mlp", "attn,canon,mlp", "swa:mode=local:window=4,mlp", "attn:local=swa,mlp"
]  # fmt: skip


def config(spec: str, size: int = 0, layout: str = "attn,mlp", **changes) -> tuple[ModelConfig, int]:
    width, depth, heads, tokens = SIZES[size]
    return ModelConfig(vocab=48, width=width, depth=depth, heads=heads, layout=layout, design=spec, **changes), tokens


def check(chosen: ModelConfig, tokens: int, batch: int = 1) -> None:
    guess, found = predict(chosen, tokens, batch=batch), run_and_count(chosen, tokens, batch=batch)
    for exact in ("parameters", "stream_parameters", "state_bytes", "cache_bytes"):
        assert getattr(guess, exact) == found.get(exact, 0), exact
    assert dict(guess.cut_bytes) == found["cut_bytes"]
    assert guess.flops == pytest.approx(found["flops"], rel=0.02)
    assert guess.saved_bytes == pytest.approx(found["saved_bytes"], rel=0.1)
    assert guess.bytes_moved == pytest.approx(found["bytes_moved"], rel=0.15)


@pytest.mark.parametrize("spec", [spec for name in residua.names() for spec in specs(name)])
def test_prediction_equals_measurement_for_every_case(spec):
    check(*config(spec))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", residua.names())
def test_prediction_equals_measurement_at_every_size(name, size):
    check(*config(name, size, kv_heads=2, qk_norm=True))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", residua.names())
def test_prediction_equals_measurement_in_every_layout(name, layout):
    check(*config(name, layout=layout), batch=2)


def test_encoder_is_counted_and_keeps_no_cache():
    chosen, tokens = config("elc", layout="swa:window=3,attn,mlp", causal=False)
    check(chosen, tokens)
    assert predict(chosen, tokens).cache_bytes == 0


def test_untied_head_and_separate_norms_are_counted():
    check(*config("mudd", tied=False, lane_norms="separate"))


@pytest.mark.parametrize("design", ["standard", "attnres", "delta:blocks=4", "dca", "mudd", "mhc"])
def test_7b_model_is_costed_in_two_seconds_without_allocating_it(design):
    target = sized("7.6B").of(design)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    cost = predict(target.config, 4096)
    assert time.process_time() - start < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kilobytes; the weights have 3e7
    assert cost.parameters == pytest.approx(7.5684e9, rel=0.005)


@pytest.mark.parametrize(
    ("size", "millions"),
    [("220M", 220.5), ("350M", 353.9), ("533M", 533.1), ("1B", 1043.9), ("3B", 2775.6), ("7.6B", 7568.4)],
)
def test_preset_has_the_parameters_of_the_paper(size, millions):
    assert predict(sized(size).config, 8).parameters / 1e6 == pytest.approx(millions, abs=0.05)


def test_every_preset_builds():
    for name in PRESETS:
        assert predict(sized(name).config, 8).flops > 0


def test_cost_scales_with_the_batch_and_the_type():
    chosen, tokens = config("attnres")
    one, two, three = (predict(chosen, tokens, batch=batch) for batch in (1, 2, 3))
    half = predict(chosen, tokens, dtype=torch.bfloat16)
    assert three.flops - two.flops == two.flops - one.flops  # what is done to parameters alone is done once
    assert two.cut == 2 * one.cut
    assert half.cut * 2 == one.cut
    assert half.cache_bytes * 2 == one.cache_bytes
    assert half.parameters == one.parameters


def test_halo_is_the_window_without_the_current_token():
    def halo(layout: str, design: str = "standard") -> int:
        return predict(ModelConfig(vocab=8, width=16, depth=3, heads=2, layout=layout, design=design), 8).halo_bytes

    assert halo("attn,mlp") == 0
    assert halo("swa:window=4,mlp") == 3 * 3 * 2 * 16 * 4
    assert halo("swa:window=1,mlp") == 0
    assert halo("canon:kernel=4,mlp") == 3 * 3 * 16 * 4
    assert halo("attn,mlp", "attnres") == halo("attn,mlp", "depthswa") == 0
    reads = 3 * 2 + 1
    assert halo("attn,mlp", "ddl:channels=2,compress=token,kernel=3") == reads * 2 * 2 * 16 * 4
    full = predict(ModelConfig(vocab=8, width=16, depth=3, heads=2), 8)
    assert full.key_value_bytes == full.cache_bytes == 3 * 8 * 2 * 16 * 4


def test_fused_path_is_a_lower_bound_with_the_same_state():
    for name in residua.names():
        chosen, tokens = config(name, 1, "swa:window=4,attn,mlp")
        plain, fused = predict(chosen, tokens), predict(chosen, tokens, path="fused")
        assert fused.flops < plain.flops
        assert fused.saved_bytes <= plain.saved_bytes
        assert fused.bytes_moved <= plain.bytes_moved
        assert dict(fused.cut_bytes) == dict(plain.cut_bytes)
    assert residua.ops.kernels() == kernels_before


kernels_before = residua.ops.kernels()


def test_fused_window_costs_its_pairs():
    def flops(window: int) -> float:
        chosen, tokens = config("standard", 1, f"swa:window={window},mlp")
        return predict(replace(chosen, heads=1), tokens, path="fused").flops

    layers, width, tokens = 3, 32, 12
    assert flops(2) - flops(1) == layers * (tokens - 1) * (4 * width + 7)
    assert flops(tokens) == flops(2 * tokens)


def test_function_without_a_rule_is_an_error_that_names_it():
    x = torch.empty(3, device="meta")
    with pytest.raises(NotImplementedError, match=r"'erfinv'.*rules\.py"), Walk([]):
        x.erfinv()


@pytest.mark.parametrize(
    ("options", "message"), [({"path": "fast"}, "path is reference or fused"), ({"batch": 0}, "at least 1")]
)
def test_wrong_question_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        predict(config("standard")[0], 8, **options)


def test_a_model_too_large_to_measure_is_refused():
    with pytest.raises(ValueError, match="measuring allocates the model: 28 GiB"):
        run_and_count(sized("7.6B").config, 8)


def test_counter_and_predictor_share_no_code():
    def imported(module: str) -> set[str]:
        tree = ast.parse(Path(importlib.util.find_spec(module).origin).read_text())
        return {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}

    measured = {f"residua.lab.cost.{one}" for one in ("counter", "running")}
    predicted = {f"residua.lab.cost.{one}" for one in ("fused", "predict")}
    predicted |= {f"residua.counting.{one}" for one in ("rules", "shapes", "walk")}
    for one in measured:
        assert not imported(one) & predicted
    for one in predicted:
        assert not imported(one) & measured
