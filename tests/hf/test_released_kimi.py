"""Kimi K3's stream from files with its names: both spellings, against loops written from its rule."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from residua import ModelConfig, Plan, Transformer, build, open_released
from residua.hf.released import kimi
from residua.runner import walk
from residua.testing import assert_close

WIDTH, EPS = 6, 1e-5


def k3(embedding, answers, queries, size):
    """What every sublayer and the head read: `queries` maps (layer, kind) or "head" to query times gain."""

    def read(sources, score):
        keys = [source * torch.rsqrt(source.square().mean(-1, keepdim=True) + EPS) for source in sources]
        weights = torch.stack([key @ score for key in keys]).softmax(0)
        return sum(weight[..., None] * source for weight, source in zip(weights, sources, strict=True))

    bank, running, seen = [], embedding, []
    for place, y in enumerate(answers):
        layer, kind = place // 2, ("attn", "mlp")[place % 2]
        sources = [*bank, running]
        seen.append(read(sources, queries[layer, kind]))
        if kind == "attn" and layer % size == 0:
            bank, running = [*bank, running], y
        else:
            running = running + y
    return [*seen, read([*bank, running], queries["head"])]


def tensors(layers, *, spelling="names", width=WIDTH):
    """Every tensor of the stream, and query times gain by place."""
    generator = torch.Generator().manual_seed(3)
    made, scores = {}, {}

    def add(name, score_name, place):
        query, gain = (torch.randn(width, generator=generator, dtype=torch.float64) for _ in range(2))
        scores[place] = query * gain
        if spelling == "names":
            made[f"language_model.model.{name}_proj.weight"] = query[None]
            made[f"language_model.model.{name}_norm.weight"] = gain
        else:
            made[score_name] = query * gain

    for layer in range(layers):
        add(f"layers.{layer}.self_attention_res", f"blk.{layer}.attn_res_score", (layer, "attn"))
        add(f"layers.{layer}.mlp_res", f"blk.{layer}.ffn_res_score", (layer, "mlp"))
    add("output_attn_res", "output_res_score", "head")
    return made, scores


def folder_of(path, made, layers, size, *, shards=1, width=WIDTH):
    """A checkpoint folder, in one file or in several."""
    shape = {"num_hidden_layers": layers, "hidden_size": width, "attn_res_block_size": size, "rms_norm_eps": EPS}
    (path / "config.json").write_text(json.dumps({"model_type": "kimi_k3", "text_config": shape}))
    if shards == 1:
        save_file(made, path / "model.safetensors")
        return path
    names = sorted(made)
    places = {name: f"model-{index % shards}.safetensors" for index, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: made[name] for name in names if places[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return path


@pytest.mark.parametrize("spelling", ["names", "gguf"])
@pytest.mark.parametrize(("layers", "size", "shards"), [(4, 2, 1), (5, 2, 2), (3, 12, 1), (3, 1, 3)])
def test_kimi_stream_is_the_rule(tmp_path, spelling, layers, size, shards):
    made, scores = tensors(layers, spelling=spelling)
    stream = kimi.open_stream(folder_of(tmp_path, made, layers, size, shards=shards)).double()
    kimi.fill(stream, tmp_path)  # in float64, where nothing is rounded
    embedding, *answers = torch.randn(2 * layers + 1, 2, 3, WIDTH, dtype=torch.float64)
    steps = walk(stream, embedding, lambda site, read: answers[site.index])
    expected = k3(embedding, answers, scores, size)
    for step, read in zip(steps, expected, strict=True):
        assert_close(step.read.lanes[0], read)
    assert stream.options["block"] == min(2 * size, 2 * layers)
    assert stream.options["eps"] == EPS


def test_kimi_hand_values():
    """Blocks of one layer, gains 1 and every query (1, 0)."""
    made = {"output_res_score": torch.tensor([1.0, 0.0], dtype=torch.float64)}
    made |= {
        f"blk.{i}.{kind}_res_score": made["output_res_score"].clone() for i in range(2) for kind in ("attn", "ffn")
    }
    stream = build("attnres:block=2,eps=0", Plan.regular(2, 2)).double()
    with torch.no_grad():
        for part in stream.at.values():
            part.query.copy_(made["output_res_score"])
    assert {kimi.place(key) for key in made} == {
        *((f"l{i}_{kind}", "score") for i in range(2) for kind in ("attn", "mlp")), ("head", "score"),
    }  # fmt: skip
    outputs = [
        torch.tensor([[each]], dtype=torch.float64) for each in [(2.0, 0.0), (0.0, 2.0), (1.0, -1.0), (1.0, 1.0)]
    ]
    embedding = torch.tensor([[(3.0, 4.0)]], dtype=torch.float64)
    reads = [step.read.lanes[0][0, 0] for step in walk(stream, embedding, lambda site, read: outputs[site.index])]
    hand = [(3.0, 4.0), (2.362233, 1.448932), (2.462204, 2.924409), (1.950844, 1.551970), (2.254829, 1.612326)]
    torch.testing.assert_close(torch.stack(reads), torch.tensor(hand, dtype=torch.float64), atol=1e-6, rtol=0)


def test_kimi_stream_goes_onto_a_backbone_of_ours(tmp_path):
    """Its eps is what an untrained model would refuse; loaded weights are asked nothing about their start."""
    made, scores = tensors(3, width=8)
    folder = folder_of(tmp_path, made, 3, 2, width=8)
    design = kimi.design_of(json.loads((folder / "config.json").read_text()))
    config = ModelConfig(vocab=11, width=8, depth=3, heads=2, eps=EPS, init_std=0.02, design=design)
    with pytest.raises(ValueError, match="starts as the standard network only while eps is small"):
        Transformer(config)
    model = Transformer(config, trained=True)
    kimi.fill(model.stream, folder)
    part = model.stream.part(model.plan.site("l1_mlp"))
    assert_close(part.query * part.gain, scores[1, "mlp"].float())
    assert model(torch.tensor([[1, 2, 3]])).isfinite().all()


def test_kimi_refuses_what_is_no_stream_by_name(tmp_path):
    made, _ = tensors(2)
    made["language_model.model.layers.0.self_attn.q_proj.weight"] = torch.zeros(2, 2)
    folder = folder_of(tmp_path, made, 2, 1)
    stream = kimi.open_stream(folder)
    with pytest.raises(ValueError, match=r"1 tensors of .* no part of the stream, such as .*self_attn\.q_proj"):
        kimi.fill(stream, folder)
    assert kimi.fill(stream, folder, only=True) is stream
    with pytest.raises(ValueError, match="Kimi K3 has no class"):
        open_released(folder)


def test_kimi_files_that_do_not_fit_are_named(tmp_path):
    made, _ = tensors(2)
    folder = folder_of(tmp_path, made, 2, 1)
    with pytest.raises(ValueError, match=r"lacks at\.l2_attn\.gain, at\.l2_attn\.query"):
        kimi.fill(build("attnres:block=2", Plan.regular(WIDTH, 3)), folder)
    with pytest.raises(ValueError, match="6 numbers, and attnres:block=2 has 4"):
        kimi.fill(build("attnres:block=2", Plan.regular(4, 2)), folder)
    with pytest.raises(ValueError, match=r"no part of the stream, such as .*layers\.1"):
        kimi.fill(build("attnres:block=2", Plan.regular(WIDTH, 1)), folder)
    with pytest.raises(ValueError, match="not Kimi K3's stream"):
        kimi.fill(build("standard", Plan.regular(WIDTH, 2)), folder)
    both = made | tensors(2, spelling="gguf")[0]
    with pytest.raises(ValueError, match="mix two spellings"):
        kimi.fill(build("attnres:block=2", Plan.regular(WIDTH, 2)), folder_of(tmp_path, both, 2, 1))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="attn_res_block_size"):
        kimi.open_stream(tmp_path)
