"""Loading the base and saving the result: safetensors only, nothing executed, one clear error for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from residua.hf.anatomy import PREFIX, Config, Model, Tokenizer, refuse_type
from residua.hf.complete import first_line, load
from residua.hf.weights import INDEX as INDEX
from residua.hf.weights import SINGLE as SINGLE
from residua.hf.weights import check_weights as check_weights

SHIM = "modeling_residua"
"""The file beside a saved model that lets it load, with trust_remote_code, where `residua` was not imported."""
TEMPLATE = "This model card has been automatically generated"
"""What Hugging Face's own card says, which tells nothing."""


def load_base(source: str, *, dtype: torch.dtype | str = "auto", revision: str | None = None) -> Model:
    """A plain decoder from a directory or the hub, after looking at its files."""
    from transformers import AutoModelForCausalLM

    config = load_config(source, revision=revision)
    refuse_converted(config)
    refuse_type(config)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{source} is quantised; convert the full-precision model and quantise the result")
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"no anatomy for {config.model_type!r}: transformers has no causal language model of it")
    return load(AutoModelForCausalLM, source, config, dtype=dtype, revision=revision or "main")


def refuse_converted(config: Config) -> None:
    """A second design has no place in a model that was converted."""
    if str(config.model_type).startswith(PREFIX):
        raise ValueError(
            f"this model is converted already, to {config.stream['name']}; convert the base it was made from"
        )


def load_config(source: str, *, revision: str | None = None) -> Config:
    """The config of a directory or hub name."""
    from transformers import AutoConfig

    folder = Path(source)
    if folder.is_file():
        raise ValueError(f"{source} is a file; give the directory that holds config.json and the weights")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"{source} has no config.json; it is not the directory of a Hugging Face model")
    if folder.is_dir() and model_type(folder) is None and (folder / "model" / "config.json").is_file():
        raise ValueError(f"{source} is a run of residua finetune; the model that it left is {folder / 'model'}")
    try:
        values = AutoConfig.from_pretrained(source, revision=revision or "main", trust_remote_code=False)
    except OSError:
        raise ValueError(
            f"{source!r} is neither a directory nor a model that can be reached on the hub; check the name, or "
            "download it first and give its directory"
        ) from None
    except Exception as error:  # a field of the wrong kind is whatever the class of that config makes of it
        if folder.is_dir() and isinstance(error, ValueError):
            named = model_type(folder)
            if named is not None and not named.startswith(PREFIX):
                raise ValueError(
                    f"no anatomy for {named!r}: this transformers release has no such model; use one that has, or load "
                    "the model with its own code and give convert the model itself"
                ) from None
        raise ValueError(f"{source}: config.json cannot be used: {first_line(error)}") from error
    return values


def model_type(folder: Path) -> str | None:
    """What a directory's config.json says it holds."""
    try:
        found = json.loads((folder / "config.json").read_bytes())
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{folder / 'config.json'} does not hold a JSON object")
    kind = found.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise ValueError(f"{folder / 'config.json'}: model_type is a name, not {kind!r}")
    return kind


def load_tokenizer(source: str, *, revision: str | None = None) -> Tokenizer:
    """The tokenizer beside a model; None where there is none. One that cannot be read is an error."""
    folder = Path(source)
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    there = [name for name in names if (folder / name).is_file()]
    if folder.is_dir() and not there:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, revision=revision or "main", trust_remote_code=False)
    except Exception as error:  # the tokenizers package raises a bare Exception for a file it cannot read
        if not folder.is_dir() and isinstance(error, OSError):
            return None  # a hub name without a tokenizer
        raise ValueError(
            f"{source}: its tokenizer cannot be read ({first_line(error)}); mend or remove {', '.join(there) or 'it'}"
        ) from error


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
