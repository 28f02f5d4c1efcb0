"""The weight files of a directory, looked at before anything is built: which tensors there are, of which shapes.

A safetensors file says in its header what it holds. Here the header is believed only where it agrees with itself, with
the size of the file, with the index of the shards and with the config: everything else is one error that names the file
and the tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from residua.hf.anatomy import Config

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LONGEST = 100 << 20
"""Bytes of a header: the limit of the format's own reader."""

_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
}  # fmt: skip

Shapes = dict[str, tuple[int, ...]]


def check_weights(folder: Path) -> Shapes:
    """The tensors of a directory and their shapes; weights that are missing, cut short, pickled or at odds with their
    own headers or index are refused."""
    if (folder / INDEX).is_file():
        return _sharded(folder)
    if (folder / SINGLE).is_file():
        return _header(folder / SINGLE)
    pickled = sorted(each.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for each in folder.glob(pattern))
    if pickled:
        raise ValueError(
            f"{folder} has its weights in {pickled[0]}, a pickle that may run code when it is loaded; if you trust "
            f'it, rewrite it once: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{folder}').save_pretrained('{folder}-safe')\""
        )
    raise ValueError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}")


def check_depth(folder: Path, config: Config, shapes: Mapping[str, object]) -> None:
    """Refuse a config with more layers than the files have tensors, before a module is made for each of them."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers > len(shapes):
        raise ValueError(f"{folder}: config.json says {layers} layers, and the weights are {len(shapes)} tensors")


def _sharded(folder: Path) -> Shapes:
    """The tensors of every shard, each where the index says."""
    file = folder / INDEX
    try:
        index = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(each, str) for each in places.values()):
        raise ValueError(f"{file} has no weight_map from tensors to files; download it again")
    found: Shapes = {}
    for shard in sorted(set(places.values())):
        if Path(shard).name != shard:
            raise ValueError(f"{file} names {shard!r}, which is not a file beside it")
        held = _header(folder / shard)
        listed = {name for name, place in places.items() if place == shard}
        for names, what in ((listed - held.keys(), "lacks"), (held.keys() - listed, "has")):
            if names:
                raise ValueError(f"{folder / shard} {what} {named(names)}, and {INDEX} says otherwise")
        found |= held
    return found


def _header(file: Path) -> Shapes:
    """What a safetensors file holds, by a header that is true of its bytes."""
    if not file.is_file():
        raise ValueError(f"{file} is missing; download the model again")
    size, broken = file.stat().st_size, f"{file} is cut short or no safetensors file; download it again"
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > min(size - 8, LONGEST):
            raise ValueError(broken)
        header = handle.read(length)
    try:
        entries = json.loads(header)
    except ValueError:
        raise ValueError(broken) from None
    if not isinstance(entries, dict):
        raise ValueError(broken)
    entries.pop("__metadata__", None)
    spans = {name: _span(file, name, entry) for name, entry in entries.items()}
    end = 0
    for name, (first, last) in sorted(spans.items(), key=lambda pair: pair[1]):
        if first != end:
            raise ValueError(f"{file}: the header puts {name} at byte {first}, where {end} is next; download it again")
        end = last
    wanted = 8 + length + end
    if size != wanted:
        raise ValueError(f"{file} has {size} bytes of {wanted}: a download that broke off; get it again")
    return {name: tuple(entry["shape"]) for name, entry in entries.items()}


def _span(file: Path, name: str, entry: object) -> tuple[int, int]:
    """The bytes of one tensor, if its type, shape and place agree."""
    if isinstance(entry, dict) and entry.get("dtype") in _BITS:
        kind, shape, place = entry["dtype"], _whole(entry.get("shape")), _whole(entry.get("data_offsets"))
        if shape is not None and place is not None and len(place) == 2:
            first, last = place
            if 8 * (last - first) == math.prod(shape) * _BITS[kind]:
                return first, last
    raise ValueError(f"{file}: the header's entry for {name} is wrong; download it again")


def _whole(values: object) -> list[int] | None:
    right = isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
    return list(values) if right and isinstance(values, list) else None


def named(names: Iterable[str], most: int = 3) -> str:
    """The first few of some names, and how many more there are."""
    listed = sorted(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
