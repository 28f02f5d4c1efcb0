"""Refusals of Hugging Face checkpoints: what is done to a tiny Llama and its tokenizer, and words of the line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Harm = Callable[[Path], None]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def tensors(change: Callable[[dict[str, Any]], object]) -> Harm:
    """The weights are changed and saved again, whole."""

    def harm(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        found = load_file(folder / SINGLE)
        change(found)
        save_file(found, folder / SINGLE, {"format": "pt"})

    return harm


def dropped(pattern: str) -> Harm:
    """Tensors whose names hold this are taken out."""
    return tensors(lambda found: [found.pop(name) for name in list(found) if pattern in name])


def header(change: Callable[[dict[str, Any]], object]) -> Harm:
    """The header says something else of the same bytes."""

    def harm(folder: Path) -> None:
        data = (folder / SINGLE).read_bytes()
        length = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + length])
        change(entries)
        text = json.dumps(entries).encode()
        (folder / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return harm


def config(**values: object) -> Harm:
    """Fields of the config are others."""

    def harm(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return harm


def text(name: str, content: str) -> Harm:
    return lambda folder: (folder / name).write_text(content) and None


def length(folder: Path) -> None:
    """The header is said to be longer than any file."""
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes((1 << 62).to_bytes(8, "little") + data[8:])


def index(**values: object) -> Harm:
    """An index of shards beside the one file."""
    return lambda folder: (folder / INDEX).write_text(json.dumps(values)) and None


def misplaced(folder: Path) -> None:
    """The index leaves out a tensor that the shard has."""
    data = (folder / SINGLE).read_bytes()
    entries = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    names = sorted(name for name in entries if name != "__metadata__")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names[1:], SINGLE)}))


FIRST = "model.layers.0.mlp.up_proj.weight"

ROWS: list[tuple[str, Harm, str]] = [
    ("no layers", dropped("model.layers."), "they lack model.layers.0.input_layernorm.weight"),
    ("one tensor is missing", dropped("layers.1.mlp.up_proj"), "they lack model.layers.1.mlp.up_proj.weight"),
    ("no embedding", dropped("embed_tokens"), "they lack model.embed_tokens.weight"),
    ("no head", dropped("lm_head"), "they lack lm_head.weight"),
    ("no tensors", dropped(""), "layers, and the weights are 0 tensors"),
    ("a tensor too many", tensors(lambda found: found.update(extra=found[FIRST].clone())), "no place for extra"),
    ("a layer too many",
     tensors(lambda found: found.update({FIRST.replace("0", "7"): found[FIRST].clone()})), "model.layers.7.mlp.up"),
    ("a misshapen tensor",
     tensors(lambda found: found.update({FIRST: found[FIRST][:4].clone()})), f"they hold {FIRST} 4x32"),
    ("a flat tensor", tensors(lambda found: found.update({FIRST: found[FIRST].flatten()})), FIRST),
    ("another name", tensors(lambda found: found.update({"renamed": found.pop(FIRST)})), "they lack " + FIRST),
    ("a header of another length", length, "cut short or no safetensors file"),
    ("a header of another type", header(lambda entries: entries[FIRST].update(dtype="F16")), f"entry for {FIRST}"),
    ("a header of no type", header(lambda entries: entries[FIRST].update(dtype="X")), f"entry for {FIRST}"),
    ("a header of another shape", header(lambda entries: entries[FIRST].update(shape=[1, 1])), f"entry for {FIRST}"),
    ("a header of shape -1", header(lambda entries: entries[FIRST].update(shape=[-1])), f"entry for {FIRST}"),
    ("a header of no place", header(lambda entries: entries[FIRST].pop("data_offsets")), f"entry for {FIRST}"),
    ("a header that overlaps",
     header(lambda entries: entries[FIRST].update(data_offsets=[0, 4 * 48 * 32])), "download it again"),
    ("a header that is a list", text(SINGLE, "\x02\0\0\0\0\0\0\0[]"), "cut short or no safetensors file"),
    ("an index that is no JSON", text(INDEX, "{"), "is not JSON"),
    ("an index that is a list", text(INDEX, "[]"), "has no weight_map"),
    ("an index without a map", index(), "has no weight_map"),
    ("an index of numbers", index(weight_map={"a": 1}), "has no weight_map"),
    ("an index that leads away", index(weight_map={"a": "../x.safetensors"}), "not a file beside it"),
    ("an index of an absent shard", index(weight_map={"a": "x.safetensors"}), "is missing"),
    ("an index of absent tensors", index(weight_map={"a": SINGLE}), "lacks a, and"),
    ("an index that leaves one out", misplaced, f"has lm_head.weight, and {INDEX} says otherwise"),
    ("config of a million layers", config(num_hidden_layers=10**6), "config.json says 1000000 layers"),
    ("config of a huge width", config(hidden_size=10**6), "parameters, and the weights hold"),
    ("config of a huge MLP", config(intermediate_size=10**9), "parameters, and the weights hold"),
    ("config of another width", config(hidden_size=16, head_dim=8), "they hold"),
    ("config of one layer", config(num_hidden_layers=1), "no place for model.layers.1"),
    ("config of three layers", config(num_hidden_layers=3), "they lack model.layers.2"),
    ("config of another vocabulary", config(vocab_size=30), "they hold lm_head.weight"),
    ("config of no heads", config(num_attention_heads=0, num_key_value_heads=0, head_dim=None), "model"),
    ("config of text", config(hidden_size="wide"), "config.json cannot be used"),
    ("config of a list", config(num_hidden_layers=[2]), "config.json cannot be used"),
    ("config of a strange type", config(model_type=3), "model_type is a name"),
    ("config that is a list", text("config.json", "[]"), "does not hold a JSON object"),
    ("config that is null", text("config.json", "null"), "does not hold a JSON object"),
    ("a broken tokenizer", text("tokenizer.json", "{"), "its tokenizer cannot be read"),
    ("an empty tokenizer", text("tokenizer.json", "{}"), "its tokenizer cannot be read"),
]  # fmt: skip
