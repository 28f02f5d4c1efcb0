"""Loading the base and saving the result: safetensors only, nothing executed, one clear error for what is wrong."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from residua.hf.anatomy import PREFIX, Config, Model, Tokenizer, refuse_type

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHIM = "modeling_residua"
"""The file beside a saved model that lets it load, with trust_remote_code, where `residua` was not imported."""
TEMPLATE = "This model card has been automatically generated"
"""What Hugging Face's own card says, which tells nothing."""


def load_base(source: str, *, dtype: torch.dtype | str = "auto", revision: str | None = None) -> Model:
    """A plain decoder from a directory or the hub, after looking at its files."""
    from transformers import AutoModelForCausalLM

    config = load_config(source, revision=revision)
    refuse_type(config)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{source} is quantised; convert the full-precision model and quantise the result")
    if Path(source).is_dir():
        check_weights(Path(source))
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=dtype, revision=revision or "main", use_safetensors=True,
            trust_remote_code=False, output_loading_info=True,
        )  # fmt: skip
    except OSError as error:
        raise ValueError(f"{source}: {_first_line(error)}") from None
    except ValueError as error:
        if type(config) in AutoModelForCausalLM._model_mapping:
            raise
        raise ValueError(
            f"no anatomy for {config.model_type!r}: transformers has no causal language model of it"
        ) from error
    absent = sorted(info["missing_keys"])
    if absent:
        raise ValueError(
            f"{source} has no weights for {len(absent)} parameters of a {config.model_type} decoder, such as {absent[0]}: "
            "its config.json is another model's"
        )
    return model


def load_config(source: str, *, revision: str | None = None) -> Config:
    """The config of a directory or hub name."""
    from transformers import AutoConfig

    folder = Path(source)
    if folder.is_file():
        raise ValueError(f"{source} is a file; give the directory that holds config.json and the weights")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"{source} has no config.json; it is not the directory of a Hugging Face model")
    if folder.is_dir():
        model_type(folder)  # says so if the file is no JSON
    try:
        values = AutoConfig.from_pretrained(source, revision=revision or "main", trust_remote_code=False)
    except OSError:
        raise ValueError(
            f"{source!r} is neither a directory nor a model that can be reached on the hub; check the name, or "
            "download it first and give its directory"
        ) from None
    except ValueError as error:
        if folder.is_dir():
            named = model_type(folder)
            if named is not None and not named.startswith(PREFIX):
                raise ValueError(
                    f"no anatomy for {named!r}: this transformers release has no such model; use one that has, or load "
                    "the model with its own code and give convert the model itself"
                ) from None
        raise ValueError(f"{source}: {_first_line(error)}") from None
    return values


def model_type(folder: Path) -> str | None:
    """What a directory's config.json says it holds."""
    try:
        found = json.loads((folder / "config.json").read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder / 'config.json'} is not JSON: {error}") from None
    return found.get("model_type") if isinstance(found, dict) else None


def check_weights(folder: Path) -> None:
    """Refuse a directory whose weights are missing, cut short, or pickled."""
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text())
        shards = sorted(set(index["weight_map"].values()))
    elif (folder / SINGLE).is_file():
        shards = [SINGLE]
    else:
        pickled = sorted(each.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for each in folder.glob(pattern))
        if pickled:
            raise ValueError(
                f"{folder} has its weights in {pickled[0]}, a pickle that may run code when it is loaded; if you trust "
                f'it, rewrite it once: python -c "from transformers import AutoModelForCausalLM as M; '
                f"M.from_pretrained('{folder}').save_pretrained('{folder}-safe')\""
            )
        raise ValueError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}")
    for shard in shards:
        _check_shard(folder / shard)


def _check_shard(file: Path) -> None:
    """Whether a safetensors file is as long as its header says."""
    if not file.is_file():
        raise ValueError(f"{file} is missing; download the model again")
    with file.open("rb") as handle:
        start = handle.read(8)
        header = handle.read(struct.unpack("<Q", start)[0]) if len(start) == 8 else b""
    try:
        entries = json.loads(header)
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError(f"{file} is cut short or no safetensors file; download it again") from None
    ends = [value["data_offsets"][1] for key, value in entries.items() if key != "__metadata__"]
    wanted = 8 + len(header) + max(ends, default=0)
    if file.stat().st_size != wanted:
        raise ValueError(f"{file} has {file.stat().st_size} bytes of {wanted}: a download that broke off; get it again")


_OURS = re.compile(r"(?:^|\.)(?:stream|inserted)\.")


def check_loaded(model: Model, info: Mapping[str, Iterable[str]]) -> None:
    """Refuse weights of another design than the config's: all of its keys must have come, or none of any design."""
    strange = sorted(key for key in info["unexpected_keys"] if _OURS.search(key))
    absent = sorted(key for key in info["missing_keys"] if _OURS.search(key))
    own = [key for key in model.state_dict() if _OURS.search(key)]
    if strange or 0 < len(absent) < len(own):
        detail = f"has {strange[0]}" if strange else f"lacks {absent[0]}"
        raise ValueError(
            f"these weights are of another design than the config's {model.base_model.stream.spec}: the file {detail}; "
            "put back the config.json that was saved with them"
        )


def load_tokenizer(source: str) -> Tokenizer:
    """The tokenizer beside a model; None where there is none."""
    folder = Path(source)
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if folder.is_dir() and not any((folder / name).is_file() for name in names):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError):
        return None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def write_beside(model: Model, folder: Path | str) -> None:
    """What a saved model needs beside its weights: the shim that loads it, and its card."""
    (Path(folder) / f"{SHIM}.py").write_text(shim(model))
    write_card(model, folder)


def write_card(model: Model, folder: Path | str) -> None:
    """The model card, unless somebody wrote one."""
    from residua.hf.card import card

    file = Path(folder) / "README.md"
    if not file.exists() or TEMPLATE in file.read_text():
        file.write_text(card(model))


def shim(model: Model) -> str:
    """A module with the classes of one model, taken from the installed package."""
    names = sorted({type(model).__name__, type(model.base_model).__name__, type(model.config).__name__})
    base_type = model.config.model_type.removeprefix(PREFIX)
    return (
        '"""Loads this model through the package it was made with: pip install residua."""\n\n'
        "from residua.hf import shim\n\n" + "".join(f'{name} = shim.find("{base_type}", "{name}")\n' for name in names)
    )
