"""Kimi K3's stream, block AttnRes, from its checkpoint: by the names of Hugging Face and vLLM, or of GGUF.

    layers.{i}.self_attention_res_{proj,norm}.weight   query and key gain of l{i}_attn       blk.{i}.attn_res_score
    layers.{i}.mlp_res_{proj,norm}.weight              of l{i}_mlp                           blk.{i}.ffn_res_score
    output_attn_res_{proj,norm}.weight                 of the head                           output_res_score

GGUF keeps the product of query and gain, which is all that acts. K3 counts its blocks in layers:
`attn_res_block_size` is half of our `block`. The first attention has one source and so no query here; K3's is left out.
There is no class of this model in transformers: its layers have no place here, and are refused by name unless the
stream alone is asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from residua.hf.storage import INDEX, SINGLE, check_weights
from residua.plan import Plan
from residua.registry import build
from residua.spec import Value
from residua.stream import Stream

SIZE = "attn_res_block_size"
"""The field of a configuration that tells such a model."""
EPS = 1e-5
"""Of every norm of K3."""

_ROOT = r"(?:language_model\.)?(?:model\.)?"
_NAMED = re.compile(_ROOT + r"layers\.(\d+)\.(self_attention|mlp)_res_(proj|norm)\.weight")
_NAMED_HEAD = re.compile(_ROOT + r"output_attn_res_(proj|norm)\.weight")
_SCORE = re.compile(r"blk\.(\d+)\.(attn|ffn)_res_score(?:\.weight)?")
_SCORE_HEAD = re.compile(r"output_res_score(?:\.weight)?")
_KINDS = {"self_attention": "attn", "attn": "attn", "mlp": "mlp", "ffn": "mlp"}
_PARAMETERS = {"proj": "query", "norm": "gain"}


def is_kimi(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is of such a model."""
    return SIZE in (values.get("text_config") or values)


def design_of(values: Mapping[str, Any]) -> dict[str, Value]:
    """The design that a config.json describes."""
    values = values.get("text_config") or values
    sublayers = 2 * int(values["num_hidden_layers"])
    block = min(2 * int(values[SIZE]), sublayers)  # one block larger than the model is one of its size
    return {"name": "attnres", "block": block, "eps": float(values.get("rms_norm_eps", EPS))}


def open_stream(folder: Path | str, *, only: bool = True) -> Stream:
    """The stream of a checkpoint, without its layers: only the stream's tensors are read from the files."""
    values = json.loads((Path(folder) / "config.json").read_text())
    if not is_kimi(values):
        raise ValueError(f"{folder} is no checkpoint with Kimi K3's stream: its config.json has no {SIZE}")
    shape = values.get("text_config") or values
    plan = Plan.regular(int(shape["hidden_size"]), int(shape["num_hidden_layers"]))
    return fill(build(design_of(values), plan), folder, only=only)


@torch.no_grad()
def fill(stream: Stream, source: Path | str, *, only: bool = False) -> Stream:
    """Put the tensors of a safetensors file, or of a folder of them, into an `attnres` stream.

    only: leave out what is no part of the stream; otherwise such tensors are an error that names them.
    """
    if stream.name != "attnres":
        raise ValueError(f"{stream.spec} is not Kimi K3's stream; build attnres:block=..., see kimi.design_of")
    wanted = dict(stream.named_parameters())
    missing, strange = set(wanted), []
    for key, read in _entries(Path(source)):
        found = place(key)
        if found is None or found[0] not in {site.name for site in stream.plan.readers}:
            strange.append(key)
            continue
        if found[0] == stream.plan.readers[0].name:  # one source needs no query
            continue
        for name, value in _values(*found, read()).items():
            if value.numel() != wanted[name].numel():
                raise ValueError(f"{key} has {value.numel()} numbers, and {stream.spec} has {wanted[name].numel()}")
            if name not in missing:
                raise ValueError(f"{key} gives {name} a second time; the files mix two spellings")
            wanted[name].copy_(value.reshape(wanted[name].shape))
            missing.discard(name)
    if strange and not only:
        raise ValueError(
            f"{len(strange)} tensors of {source} are no part of the stream, such as {', '.join(sorted(strange)[:3])}: "
            "there is no class of Kimi K3 here to take them; only=True loads the stream alone"
        )
    if missing:
        raise ValueError(f"{source} lacks {', '.join(sorted(missing)[:3])} of {stream.spec}")
    return stream


def place(key: str) -> tuple[str, str] | None:
    """The site of a tensor and what it is there: query, gain, or their product, score. None: no part of the stream."""
    if found := _NAMED.fullmatch(key):
        return f"l{found[1]}_{_KINDS[found[2]]}", _PARAMETERS[found[3]]
    if found := _NAMED_HEAD.fullmatch(key):
        return "head", _PARAMETERS[found[1]]
    if found := _SCORE.fullmatch(key):
        return f"l{found[1]}_{_KINDS[found[2]]}", "score"
    return ("head", "score") if _SCORE_HEAD.fullmatch(key) else None


def _values(site: str, what: str, value: Tensor) -> dict[str, Tensor]:
    if what == "score":
        return {f"at.{site}.query": value, f"at.{site}.gain": torch.ones_like(value)}
    return {f"at.{site}.{what}": value}


def _entries(source: Path) -> Iterator[tuple[str, Any]]:
    """Every key of the files, with a function that reads its tensor."""
    from safetensors import safe_open

    if source.is_dir():
        check_weights(source)
        index = source / INDEX
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [SINGLE]
        files = [source / name for name in names]
    elif source.is_file():
        files = [source]
    else:
        raise ValueError(f"{source} is neither a safetensors file nor a folder of them")
    for file in files:
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118  # no mapping
                yield key, lambda opened=opened, key=key: opened.get_tensor(key)
