"""Checkpoints of the authors' released Delta code (model_type qwen3_attnres) as converted Qwen3 models.

    mode         here                                              gate type         here
    block        attnres:block=2*ceil(L/blocks)                    bias              gate=none
    full         attnres                                           sigmoid_scalar    gate=scalar
    delta        delta_released                                    sigmoid_vector    gate=vector
    delta_block  delta_released:blocks=...                         learnable_alpha   gate=alpha

The query is the row of `*_res_proj`, the key gain is `*_res_norm`. Parameters of sites with nothing to choose from have
no effect in the released code and no place here; they are left out. Any other key without a place is an error.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from residua.hf.anatomy import Model
from residua.hf.storage import INDEX, SINGLE, check_weights, model_type
from residua.spec import Value

MODEL_TYPE = "qwen3_attnres"
GATES = {"bias": "none", "sigmoid_scalar": "scalar", "sigmoid_vector": "vector", "learnable_alpha": "alpha"}
MODES = ("block", "full", "delta", "delta_block")
REFUSED = {
    "delta_v": "its sources lack the embedding, which no released table uses",
    "full_v": "it mixes cumulative states, which no released table uses",
    "block_v": "the released code ignores its value routing; load it as mode block",
    "delta_block_v": "the released code never fills its sources: it is the plain Qwen3",
    "delta_replace": "an ablation whose read, over outputs without the embedding, replaces the stream; no design here",
    "full_additive": "an ablation that adds a read of cumulative states to the stream; no design here",
    "pre_gated": "an ablation that routes gated outputs; no design here",
    "first_layer": "an ablation that mixes in one early output; no design here",
    "delta_centered_reset": "the released code runs it as mode full; set attnres_mode to full",
}
IGNORED = ("attnres_init_bias", "attnres_gate_init")
"""Of older files; the release reads neither."""

_SITE = re.compile(r"model\.layers\.(\d+)\.(attn|mlp)_(.+)")
_NAMES = {
    "res_proj.weight": "query",
    "res_norm.weight": "gain",
    "null_source": "vector",
    "res_gate_logit": "logit",
    "res_gate_proj.weight": "weight",
    "res_gate_proj.bias": "bias",
    "res_alpha": "alpha",
}


def is_official(folder: Path) -> bool:
    """Whether a directory holds such a checkpoint."""
    return (folder / "config.json").is_file() and model_type(folder) == MODEL_TYPE


def design_of(config: dict[str, Any]) -> dict[str, Value]:
    """The design that a released configuration describes."""
    mode, gate = config.get("attnres_mode", "block"), config.get("attnres_gate_type", "bias")
    null, depth = bool(config.get("attnres_use_null_source", False)), int(config["num_hidden_layers"])
    blocks = int(config.get("attnres_num_blocks", 8))
    if mode not in MODES:
        reason = REFUSED.get(mode, "the released code has no such mode that works")
        raise ValueError(f"attnres_mode {mode!r} cannot be loaded: {reason} (loadable: {', '.join(MODES)})")
    if gate not in GATES:
        raise ValueError(f"attnres_gate_type {gate!r} is unknown; the released code has {', '.join(GATES)}")
    eps = float(config.get("rms_norm_eps", 1e-6))
    if mode in ("block", "full"):
        if gate != "bias" or null:
            raise ValueError(
                f"attnres_mode {mode!r} with {'a null source' if null else 'gate ' + gate}: its read replaces the "
                "stream, and this mixes it with the open block alone; there is no such design here"
            )
        size = 2 * -(-depth // blocks) if mode == "block" else 1
        return {"name": "attnres", "block": size, "eps": eps}
    grouped: dict[str, Value] = {"blocks": blocks} if mode == "delta_block" else {}
    return {"name": "delta_released", **grouped, "gate": GATES[gate], "null": null, "eps": eps}


def load_official(source: Path | str, *, dtype: torch.dtype | None = None) -> Model:
    """The model in a directory written by the released code, on the residual stream it was trained with."""
    from transformers import Qwen3ForCausalLM

    from residua.hf.classes import config_class, model_class

    folder = Path(source)
    if not is_official(folder):
        raise ValueError(f"{folder} holds no checkpoint of the released Delta code: its model_type is not {MODEL_TYPE}")
    check_weights(folder)
    values = json.loads((folder / "config.json").read_text())
    design = design_of(values)
    plain = {
        key: value
        for key, value in values.items()
        if not key.startswith("attnres_") and key not in ("model_type", "architectures", "auto_map")
    }
    known = ("attnres_mode", "attnres_num_blocks", "attnres_gate_type", "attnres_use_null_source", *IGNORED)
    unknown = sorted(key for key in values if key.startswith("attnres_") and key not in known)
    if unknown:
        raise ValueError(f"{folder / 'config.json'} has {', '.join(unknown)}, which the released code does not")
    config = config_class("qwen3").from_dict({**plain, "stream": design})
    tensors = read_tensors(folder)
    kind = dtype or tensors["model.embed_tokens.weight"].dtype
    model = model_class(Qwen3ForCausalLM)._from_config(config, dtype=kind)
    _fill(model, tensors)
    model.config.base = str(folder.name)
    return model.eval()


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors checkpoint."""
    from safetensors.torch import load_file

    if not (folder / INDEX).is_file():
        return dict(load_file(folder / SINGLE))
    files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    return {key: value for file in files for key, value in load_file(folder / file).items()}


@torch.no_grad()
def _fill(model: Model, tensors: dict[str, Tensor]) -> None:
    places = dict(model.named_parameters(remove_duplicate=False))
    stream, filled, leftover = model.model.stream, set(), []
    for key, value in tensors.items():
        routed = _routed(key)
        name: str | None = key
        if routed is not None:
            site, name = stream.plan.site(routed[0]), _parameter(places, *routed)
            # one source needs no query, and a site that reads the plain stream has no parameters at all
            idle = routed[1] in ("query", "gain") and len(stream.sources(site)) <= 1
            if name is None and site.kind != "head" and (stream.part(site) is None or idle):
                continue
        if name not in places or places[name].numel() != value.numel():
            leftover.append(key)
            continue
        places[name].copy_(value.reshape(places[name].shape))
        filled.add(name)
    if leftover:
        raise ValueError(f"keys without a place in this model: {', '.join(sorted(leftover)[:3])}; is its mode right?")
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    missing = sorted(places.keys() - filled - tied)
    if missing:
        raise ValueError(f"the checkpoint lacks {', '.join(missing[:3])} of this model; is its mode right?")


def _routed(key: str) -> tuple[str, str] | None:
    """The site and the parameter that a routing key belongs to; None for a key of Qwen3's own."""
    if key.startswith("model.final_") and key.removeprefix("model.final_") in _NAMES:
        return "head", _NAMES[key.removeprefix("model.final_")]
    found = _SITE.fullmatch(key)
    if found is None or found[3] not in _NAMES:
        return None
    return f"l{found[1]}_{found[2]}", _NAMES[found[3]]


def _parameter(places: dict[str, Tensor], site: str, name: str) -> str | None:
    start, end = f"model.stream.at.{site}.", f".{name}"
    return next((each for each in places if each.startswith(start) and each.endswith(end)), None)
